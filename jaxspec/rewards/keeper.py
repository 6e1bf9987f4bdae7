"""The process that keeps the workers of the reward pool: it forks them, gives them tasks, ends
those that are late and forks others. `pool.py` runs it as a module.

It has one thread and never imports JAX, so that forking is safe and takes milliseconds. It never
waits for a worker: whatever a user's function does to a worker, others go on and ends are heard.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jaxspec.rewards.code import (
    adopt_orphans,
    end_descendants,
    find_sandbox,
    remove,
    signal_parent_death,
)
from jaxspec.rewards.worker import TOKEN, Channel, frame_task, take_answer, work

START = 120.0
"""Seconds that a worker may take to import a user's module."""
RECYCLED = 2000
"""Tasks after which a worker is replaced: what sympy keeps in memory only grows."""
FAILURES = 5
"""Workers in a row that may end before they are ready, once one has been."""
FIRST = 1 / 3
"""Share of the seconds of a task that it may take beside others; one that is late is tried once
more, alone, for the rest."""
ALONE = 8
"""Tasks of a batch whose second try has the pool to itself; that many late ones are no accident."""
BATCH = 20
"""Deadlines that a batch may take, beside the usual time of its tasks."""
USUAL = 0.1
"""Usual time of a check of jaxspec, in deadlines."""
_ORPHANED = signal.SIGUSR1
"""Signal at the end of a thread of the asker, or of all of them."""


@dataclasses.dataclass
class Worker:
    """A process that answers one task after another."""

    pid: int
    tasks: socket.socket
    """Never waits."""
    token: bytes
    """Begins all its answers."""
    ends: float
    """When it is late."""
    unsent: bytes = b""
    """Rest of its task."""
    heard: bytearray = dataclasses.field(default_factory=bytearray)
    """Part of an answer."""
    task: "Task | None" = None
    ready: bool = False
    done: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """One of a batch."""

    batch: int
    index: int
    content: list[Any]
    again: bool = False
    """It was late before."""
    alone: bool = False
    """Nothing else may run beside it."""


@dataclasses.dataclass
class Batch:
    """Tasks whose answers are wanted together."""

    answers: list[Any]
    left: int
    seconds: float
    """Most that it may take."""
    ends: float = math.inf
    """When no task of it begins any more; counted from its first task."""
    over: bool = False
    """That time has come."""
    again: int = 0
    wanted: bool = False


class Keeper:
    """The workers, and what they have to do. `seconds`: that a task may take in all; `folder`: of
    the programs, which goes away at the end."""

    def __init__(
        self, asker: Connection, workers: int, seconds: float, function: str, folder: str
    ) -> None:
        self._asker, self._seconds, self._function = asker, seconds, function
        self._queue: collections.deque[Task] = collections.deque()
        self._batches: dict[int, Batch] = {}
        self._started, self._failures = False, 0
        self._folder = folder
        self._workers: list[Worker] = []
        for _ in range(workers):
            self._workers.append(self._forked())

    def serve(self) -> None:
        """Until the asker is gone."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._assign()
                poll = select.poll()
                poll.register(self._asker.fileno(), select.POLLIN)
                numbers = {}
                for worker in self._workers:
                    numbers[worker.tasks.fileno()] = worker
                    poll.register(
                        worker.tasks.fileno(),
                        select.POLLIN | (select.POLLOUT if worker.unsent else 0),
                    )
                for number, event in poll.poll(self._patience()):
                    worker = numbers.get(number)
                    if worker is None:
                        self._listen(json.loads(self._asker.recv_bytes()))
                    elif event == select.POLLOUT:
                        self._send(worker)
                    else:
                        self._hear(worker)
                for worker in list(self._workers):
                    if is_busy(worker) and time.monotonic() >= worker.ends:
                        self._lost(worker)
                self._cut_batches()
                self._tell()
        while self._workers:
            self._end(self._workers[0])
            del self._workers[0]
        remove(self._folder)

    def _patience(self) -> float | None:
        """Milliseconds until something is late, if something can be."""
        ends = [worker.ends for worker in self._workers if is_busy(worker)]
        ends += [batch.ends for batch in self._batches.values()]
        soonest = min(ends, default=math.inf)
        left = max(0.0, soonest - time.monotonic())
        return None if math.isinf(left) else 1000 * left + 1

    def _assign(self) -> None:
        """Gives tasks to idle workers; a second try only while nothing else runs."""
        for worker in list(self._workers):
            busy = [each.task for each in self._workers if each.task]
            if is_busy(worker) or not self._queue or any(task.alone for task in busy):
                continue
            if self._queue[0].alone and busy:
                return
            task = self._queue.popleft()
            theirs, now = task.content[0] == "rows", time.monotonic()
            share = (1 - FIRST) if task.again else 1.0 if theirs else FIRST
            worker.task, worker.ends = task, now + share * self._seconds
            batch = self._batches[task.batch]
            batch.ends = min(batch.ends, now + batch.seconds)
            content = task.content
            if content[0] in ("code", "sandbox"):
                content = [*content, find_sandbox()]
            worker.unsent = frame_task(content)
            self._send(worker)

    def _send(self, worker: Worker) -> None:
        """Sends as much of a worker's task as it takes now."""
        # An end is heard next.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while worker.unsent:
                worker.unsent = worker.unsent[worker.tasks.send(worker.unsent) :]

    def _listen(self, message: dict[str, Any]) -> None:
        number = message["batch"]
        if "tasks" not in message:
            self._batches[number].wanted = True
            return
        tasks = message["tasks"]
        calls = sum(task[0] == "rows" for task in tasks)
        usual = (calls + USUAL * (len(tasks) - calls)) / len(self._workers)
        seconds = self._seconds * (BATCH + usual)
        self._batches[number] = Batch([None] * len(tasks), len(tasks), seconds)
        self._queue.extend(Task(number, index, task) for index, task in enumerate(tasks))

    def _hear(self, worker: Worker) -> None:
        """Reads from a worker as much as there is; an answer that nobody asked for, or that is
        none, has the worker replaced."""
        try:
            part = worker.tasks.recv(2**20)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._lost(worker)
            return
        worker.heard += part
        try:
            answer = take_answer(worker.heard, worker.token)
        except ValueError:
            self._lost(worker, wrote=True)
            return
        if answer is None:
            return
        if not worker.ready:
            if "failed" in answer:
                self._fail(answer["failed"])
            worker.ready, self._started, self._failures = True, True, 0
            return
        task, worker.task = worker.task, None
        if task is None:
            self._lost(worker, wrote=True)
            return
        worker.done += 1
        if worker.done >= RECYCLED or worker.heard:
            self._replace(worker)
        self._answered(task, answer)

    def _lost(self, worker: Worker, wrote: bool = False) -> None:
        """Replaces a worker that is late, dead, or wrote something else than an answer. Its task is
        tried once more, alone, or settled."""
        task, late = worker.task, time.monotonic() >= worker.ends
        if not worker.ready:
            self._failures += 1
            if not self._started or self._failures > FAILURES:
                how = f"is not ready within {START:.0f} seconds" if late else "ends while it starts"
                how = "writes to the connection of the pool while it starts" if wrote else how
                self._fail(f"a worker {how}{', importing the function' * bool(self._function)}")
        self._replace(worker)
        if task is None:
            return
        batch = self._batches[task.batch]
        theirs = task.content[0] == "rows"
        if not (theirs or task.again or batch.over):
            batch.again += 1
            alone = batch.again <= ALONE
            self._queue.appendleft(dataclasses.replace(task, again=True, alone=alone))
        elif wrote and theirs:
            self._answered(task, {"error": "a call wrote to the connection of the pool"})
        else:
            self._answered(task, {"timeout" if late else "died": True})

    def _cut_batches(self) -> None:
        """Settles what has not begun of batches whose time is over."""
        for number, batch in self._batches.items():
            if time.monotonic() < batch.ends:
                continue
            batch.over, batch.ends = True, math.inf
            mine = [task for task in self._queue if task.batch == number]
            for task in mine:
                answer = {"timeout": True} if task.again else {"unjudged": batch.seconds}
                self._answered(task, answer)
            left = (task for task in self._queue if task.batch != number)
            self._queue = collections.deque(left)

    def _fail(self, reason: str) -> NoReturn:
        """Says why there are no workers, and is done."""
        self._asker.send_bytes(json.dumps({"failed": reason}).encode())
        raise EOFError

    def _answered(self, task: Task, answer: Any) -> None:
        batch = self._batches[task.batch]
        batch.answers[task.index] = answer
        batch.left -= 1

    def _tell(self) -> None:
        for number, batch in list(self._batches.items()):
            if batch.wanted and not batch.left and self._started:
                del self._batches[number]
                answers = {"batch": number, "answers": batch.answers}
                self._asker.send_bytes(json.dumps(answers).encode())

    def _replace(self, worker: Worker) -> None:
        self._end(worker)
        self._workers[self._workers.index(worker)] = self._forked()

    def _forked(self) -> Worker:
        here, away = socket.socketpair()
        here.setblocking(False)
        token, keeper = os.urandom(TOKEN), os.getpid()
        others = [self._asker, here, *(worker.tasks for worker in self._workers)]
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(_ORPHANED, signal.SIG_DFL)
                signal_parent_death(signal.SIGKILL, keeper)
                for other in others:  # or else nobody would hear when this process is alone
                    other.close()
                channel = Channel(away, token)
                work(channel, self._function, self._seconds, f"{self._folder}/{os.getpid()}")
            finally:
                os._exit(0)
        away.close()
        return Worker(pid, here, token, time.monotonic() + START)

    def _end(self, worker: Worker) -> None:
        worker.tasks.close()
        for end in (os.killpg, os.kill):  # it may not have a session of its own yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        # what it started and let go is this process's now
        end_descendants([other.pid for other in self._workers if other is not worker])
        remove(f"{self._folder}/{worker.pid}")


def is_busy(worker: Worker) -> bool:
    """Whether a worker starts, or has a task."""
    return worker.task is not None or not worker.ready


def main() -> None:
    """Arguments: the descriptor to ask through, the asker's process, workers, seconds of a task, a
    user's function."""
    descriptor, asker, workers, seconds, function = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # who asks may still have work to finish; its end is the end
        signal.signal(number, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="jaxspec-")

    def end_orphaned(*_: object) -> None:
        # The signal also comes at the end of the thread that started this process.
        if os.getppid() != int(asker):
            end_descendants()
            remove(folder)
            os._exit(1)

    signal.signal(_ORPHANED, end_orphaned)
    signal_parent_death(_ORPHANED, int(asker))
    with contextlib.suppress(ImportError):
        import math_verify  # noqa: F401  # pyright: ignore[reportMissingImports] - for all workers
    adopt_orphans()
    Keeper(Connection(int(descriptor)), int(workers), float(seconds), function, folder).serve()


if __name__ == "__main__":
    main()
