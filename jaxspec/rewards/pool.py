"""The pool of worker processes that judge responses: bounded in time, whatever a response or a
user's function does."""

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
"""Seconds that the keeper may take to end."""


class PoolError(Exception):
    """The pool cannot start, or is broken; the message says why."""


class RewardPool:
    """Workers that judge responses; tasks and answers are those of `worker.py`. It may be used from
    several threads.

    Args:
      worker_count: processes.
      task_seconds: that a task may take. A check of jaxspec that is late is tried once more alone
        within them; a call of a user's function is not.
      function: a user's, as `package.module:name` or `file.py:name`; empty: checks of jaxspec.

    The processes end with `close`, with this object, and with this process, however it ends.
    """

    def __init__(self, worker_count: int, task_seconds: float, function: str = "") -> None:
        local_socket, keeper_socket = socket.socketpair()
        connection_arguments = str(keeper_socket.fileno()), str(os.getpid())
        command = [sys.executable, "-m", "jaxspec.rewards.keeper", *connection_arguments]
        self._lock, self._batch_count = threading.Lock(), 0
        self._task_indices: dict[int, list[int]] = {}
        # A session of its own: a Ctrl-C at the terminal is for who asks.
        with keeper_socket:
            self._process = subprocess.Popen(
                [*command, str(worker_count), str(task_seconds), function],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[keeper_socket.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(local_socket.detach())
        self._finalizer = weakref.finalize(self, _end_process, self._process, self._connection)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes; none is left when this returns."""
        self._finalizer()

    def submit_tasks(self, tasks: Sequence[list[Any]]) -> int:
        """Has the workers begin with some tasks; returns the number to collect their answers by.
        Checks of jaxspec that are the same are done once; calls of a user's function are not.

        Raises:
          PoolError: the pool is broken.
        """
        unique_indices: dict[Any, int] = {}
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
        """The answers to the tasks of `submit_tasks`, in their order, once they are all there: of a
        late one `{"timeout": True}`, of one whose worker died `{"died": True}`, and of those that
        had not begun when the time of the batch was over `{"unjudged": SECONDS}`.

        A batch may take 20 deadlines, and for each worker's share of it a tenth of one for each
        check and one for each call of a user's function.

        Raises:
          PoolError: the pool is broken.
        """
        with self._lock:
            self._send_message({"batch": batch_id})
            answers = self._receive_answers(batch_id)
            return [answers[index] for index in self._task_indices.pop(batch_id)]

    def __call__(self, tasks: Sequence[list[Any]]) -> list[Any]:
        """The answers to tasks, in their order."""
        return self.collect_answers(self.submit_tasks(tasks))

    def _send_message(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self._receive_message()  # its last words, if there are any
            raise PoolError("the pool is closed") from error

    def _receive_answers(self, batch_id: int) -> list[Any]:
        message = self._receive_message()
        assert message["batch"] == batch_id, "one is asked for at a time"
        return message["answers"]

    def _receive_message(self) -> dict[str, Any]:
        try:
            message = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            reason = (
                f"the process that keeps the workers ended with status {self._process.returncode}"
            )
            raise PoolError(reason) from error
        if "failed" in message:
            self.close()
            raise PoolError(message["failed"])
        return message


def _end_process(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    try:
        process.wait(_EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:  # its workers end with it
        process.kill()
        process.wait()
