"""Pool of worker processes that judge responses.

Every task has a time limit. `RewardPool` is the client. It starts the keeper (`keeper.py`), which
forks the workers (`worker.py`).
"""

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

_EXIT_TIMEOUT = 60.0
"""Seconds within which the keeper must end."""


class PoolError(Exception):
    """The pool cannot start, or has failed. The message gives the reason."""


class RewardPool:
    """Worker processes that judge responses.

    `worker.py` defines tasks and answers. Methods can be called from several threads. The processes
    end with `close`, when this object is garbage-collected, and when this process ends.

    Args:
      worker_count: number of worker processes.
      task_seconds: time limit of a task. If a check of jaxspec is late, a second try is made within
        the limit. A call of a user's function is made once.
      function: a user's function, as `package.module:name` or `file.py:name`. If empty, workers run
        jaxspec's own checks only.
    """

    def __init__(self, worker_count: int, task_seconds: float, function: str = "") -> None:
        local_socket, keeper_socket = socket.socketpair()
        connection_arguments = str(keeper_socket.fileno()), str(os.getpid())
        command = [sys.executable, "-m", "jaxspec.rewards.keeper", *connection_arguments]
        self._lock, self._batch_count = threading.Lock(), 0
        self._task_indices: dict[int, list[int]] = {}
        # In a new session, as Ctrl-C in the terminal is meant for this process only. The run may
        # still need the workers to finish its step.
        with keeper_socket:
            self._process = subprocess.Popen(
                [*command, str(worker_count), str(task_seconds), function],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[keeper_socket.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(local_socket.detach())
        # The callback must not refer to `self`, which it would keep alive.
        self._finalizer = weakref.finalize(self, _end_process, self._process, self._connection)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes, and waits until they have ended."""
        self._finalizer()

    def submit_tasks(self, tasks: Sequence[list[Any]]) -> int:
        """Starts a batch of tasks, and returns its id.

        Equal checks in a batch run once. Equal calls of a user's function all run.

        Raises:
          PoolError: the pool has failed.
        """
        unique_indices: dict[Any, int] = {}
        # A user's function may give another reward each time, so its calls get unique keys.
        task_keys = [
            position if task[0] == "rows" else json.dumps(task)
            for position, task in enumerate(tasks)
        ]
        task_indices = [unique_indices.setdefault(key, len(unique_indices)) for key in task_keys]
        unique_tasks = dict(zip(reversed(task_indices), reversed(tasks), strict=True))
        with self._lock:
            batch_id, self._batch_count = self._batch_count, self._batch_count + 1
            self._send_message(
                {
                    "batch": batch_id,
                    "tasks": [unique_tasks[index] for index in unique_indices.values()],
                }
            )
            self._task_indices[batch_id] = task_indices
            return batch_id

    def collect_answers(self, batch_id: int) -> list[Any]:
        """Waits for the answers of a batch.

        They are in the order of its tasks. A late task has the answer `{"timeout": True}`, and one
        whose worker died `{"died": True}`. A task that did not start within the batch's time limit
        has `{"unjudged": LIMIT}`, in seconds.

        The limit of a batch is 20 times that of a task, plus an allowance for its tasks divided by
        the number of workers. The allowance is a tenth of a task's limit for a check, and the full
        limit for a call of a user's function.

        Raises:
          PoolError: the pool has failed.
        """
        # The lock is held while waiting, so that another thread cannot read these answers.
        with self._lock:
            self._send_message({"batch": batch_id})
            answers = self._receive_answers(batch_id)
            return [answers[index] for index in self._task_indices.pop(batch_id)]

    def __call__(self, tasks: Sequence[list[Any]]) -> list[Any]:
        """Submits tasks, and returns their answers in order."""
        return self.collect_answers(self.submit_tasks(tasks))

    def _send_message(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            # If the keeper reported a failure before it ended, this call raises its reason.
            self._receive_message()
            raise PoolError("the pool is closed") from error

    def _receive_answers(self, batch_id: int) -> list[Any]:
        message = self._receive_message()
        assert message["batch"] == batch_id, "answers are requested one batch at a time"
        return message["answers"]

    def _receive_message(self) -> dict[str, Any]:
        try:
            message = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            reason = (
                f"the keeper process of the workers ended with status {self._process.returncode}"
            )
            raise PoolError(reason) from error
        if "failed" in message:
            self.close()
            raise PoolError(message["failed"])
        return message


def _end_process(process: subprocess.Popen[bytes], connection: Connection) -> None:
    # The keeper ends itself and the workers when the connection is closed.
    connection.close()
    try:
        process.wait(_EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        # The workers are set to be killed when the keeper ends.
        process.kill()
        process.wait()
