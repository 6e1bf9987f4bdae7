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

_PATIENCE = 60.0
"""Seconds that the keeper may take to end."""


class PoolError(Exception):
    """The pool cannot start, or is broken; the message says why."""


class RewardPool:
    """Workers that judge responses; tasks and answers are those of `worker.py`. It may be used from
    several threads.

    Args:
      workers: processes.
      seconds: that a task may take. A check of jaxspec that is late is tried once more alone within
        them; a call of a user's function is not.
      function: a user's, as `package.module:name` or `file.py:name`; empty: checks of jaxspec.

    The processes end with `close`, with this object, and with this process, however it ends.
    """

    def __init__(self, workers: int, seconds: float, function: str = "") -> None:
        here, away = socket.socketpair()
        ends = str(away.fileno()), str(os.getpid())
        command = [sys.executable, "-m", "jaxspec.rewards.keeper", *ends]
        self._lock, self._count = threading.Lock(), 0
        self._places: dict[int, list[int]] = {}
        # A session of its own: a Ctrl-C at the terminal is for who asks.
        with away:
            self._process = subprocess.Popen(
                [*command, str(workers), str(seconds), function],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[away.fileno()],
                start_new_session=True,
            )
        self._keeper = Connection(here.detach())
        self._close = weakref.finalize(self, _end, self._process, self._keeper)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes; none is left when this returns."""
        self._close()

    def submit(self, tasks: Sequence[list[Any]]) -> int:
        """Has the workers begin with some tasks; returns the number to collect their answers by.
        Checks of jaxspec that are the same are done once; calls of a user's function are not.

        Raises:
          PoolError: the pool is broken.
        """
        unique: dict[Any, int] = {}
        keys = [
            position if task[0] == "rows" else json.dumps(task)
            for position, task in enumerate(tasks)
        ]
        places = [unique.setdefault(key, len(unique)) for key in keys]
        first = dict(zip(reversed(places), reversed(tasks), strict=True))
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._send({"batch": number, "tasks": [first[place] for place in unique.values()]})
            self._places[number] = places
            return number

    def collect(self, number: int) -> list[Any]:
        """The answers to the tasks of `submit`, in their order, once they are all there: of a late
        one `{"timeout": True}`, of one whose worker died `{"died": True}`, and of those that had
        not begun when the time of the batch was over `{"unjudged": SECONDS}`.

        A batch may take 20 deadlines, and for each worker's share of it a tenth of one for each
        check and one for each call of a user's function.

        Raises:
          PoolError: the pool is broken.
        """
        with self._lock:
            self._send({"batch": number})
            answers = self._received(number)
            return [answers[place] for place in self._places.pop(number)]

    def __call__(self, tasks: Sequence[list[Any]]) -> list[Any]:
        """The answers to tasks, in their order."""
        return self.collect(self.submit(tasks))

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._keeper.send_bytes(json.dumps(message).encode())
        except OSError as error:
            self._heard()  # its last words, if there are any
            raise PoolError("the pool is closed") from error

    def _received(self, number: int) -> list[Any]:
        message = self._heard()
        assert message["batch"] == number, "one is asked for at a time"
        return message["answers"]

    def _heard(self) -> dict[str, Any]:
        try:
            message = json.loads(self._keeper.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            told = (
                f"the process that keeps the workers ended with status {self._process.returncode}"
            )
            raise PoolError(told) from error
        if "failed" in message:
            self.close()
            raise PoolError(message["failed"])
        return message


def _end(process: subprocess.Popen[bytes], keeper: Connection) -> None:
    keeper.close()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:  # its workers end with it
        process.kill()
        process.wait()
