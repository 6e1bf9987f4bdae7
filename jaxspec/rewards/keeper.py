"""The process that keeps the workers of the reward pool: it forks them, gives them tasks, ends
those that are late and forks others. `pool.py` runs it as a module.

It has one thread and never imports JAX, so that forking is safe and takes milliseconds.
"""

import collections
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from jaxspec.rewards.code import adopt_orphans, end_descendants, remove
from jaxspec.rewards.worker import work

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


@dataclasses.dataclass
class Worker:
    """A process that answers one task after another."""

    pid: int
    tasks: Connection
    ends: float
    """When it is late."""
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
    again: int = 0
    wanted: bool = False


class Keeper:
    """The workers, and what they have to do. `seconds`: that a task may take in all."""

    def __init__(self, asker: Connection, workers: int, seconds: float, function: str) -> None:
        self._asker, self._seconds, self._function = asker, seconds, function
        self._queue: collections.deque[Task] = collections.deque()
        self._batches: dict[int, Batch] = {}
        self._started, self._failures = False, 0
        self._folder = tempfile.mkdtemp(prefix="jaxspec-")
        self._workers: list[Worker] = []
        for _ in range(workers):
            self._workers.append(self._forked())

    def serve(self) -> None:
        """Until the asker is gone."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._assign()
                busy = [worker for worker in self._workers if worker.task or not worker.ready]
                late = min((worker.ends for worker in busy), default=None)
                patience = None if late is None else max(0.0, late - time.monotonic())
                sources = [self._asker, *(worker.tasks for worker in self._workers)]
                for source in wait(sources, patience):
                    if source is self._asker:
                        self._listen(json.loads(self._asker.recv_bytes()))
                    else:
                        self._hear(source)
                for worker in list(self._workers):
                    waits = worker.task or not worker.ready
                    if waits and time.monotonic() >= worker.ends:
                        self._lost(worker)
                self._tell()
        while self._workers:
            self._end(self._workers[0])
            del self._workers[0]
        remove(self._folder)

    def _assign(self) -> None:
        """Gives tasks to idle workers; a second try only while nothing else runs."""
        for worker in self._workers:
            busy = [each.task for each in self._workers if each.task]
            if not worker.ready or worker.task or not self._queue or any(t.alone for t in busy):
                continue
            if self._queue[0].alone and busy:
                return
            task = self._queue.popleft()
            theirs = task.content[0] == "rows"
            share = (1 - FIRST) if task.again else 1.0 if theirs else FIRST
            worker.task, worker.ends = task, time.monotonic() + share * self._seconds
            with contextlib.suppress(BrokenPipeError):  # its end is heard next
                worker.tasks.send_bytes(json.dumps(task.content).encode())

    def _listen(self, message: dict[str, Any]) -> None:
        number = message["batch"]
        if "tasks" not in message:
            self._batches[number].wanted = True
            return
        tasks = message["tasks"]
        self._batches[number] = Batch([None] * len(tasks), len(tasks))
        self._queue.extend(Task(number, index, task) for index, task in enumerate(tasks))

    def _hear(self, source: Any) -> None:
        worker = next((each for each in self._workers if each.tasks is source), None)
        if worker is None:
            return
        try:
            answer = json.loads(worker.tasks.recv_bytes())
        except (EOFError, OSError):  # of the latter kind is an end in the middle of a message
            self._lost(worker)
            return
        if not worker.ready:
            if "failed" in answer:
                self._fail(answer["failed"])
            worker.ready, self._started, self._failures = True, True, 0
            return
        task, worker.task = worker.task, None
        assert task is not None, "a worker speaks when it is asked"
        worker.done += 1
        if worker.done >= RECYCLED:
            self._replace(worker)
        self._answered(task, answer)

    def _lost(self, worker: Worker) -> None:
        """A worker that is late, or dead: another takes its place, and its task is tried once
        more, alone, or settled."""
        task, late = worker.task, time.monotonic() >= worker.ends
        if not worker.ready:
            self._failures += 1
            if not self._started or self._failures > FAILURES:
                how = f"is not ready within {START:.0f} seconds" if late else "ends while it starts"
                self._fail(f"a worker {how}{', importing the function' * bool(self._function)}")
        self._replace(worker)
        if task is None:
            return
        batch = self._batches[task.batch]
        if not (task.content[0] == "rows" or task.again):
            batch.again += 1
            alone = batch.again <= ALONE
            self._queue.appendleft(dataclasses.replace(task, again=True, alone=alone))
        else:
            self._answered(task, {"timeout" if late else "died": True})

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
        here, away = Pipe()
        others = [self._asker, here, *(worker.tasks for worker in self._workers)]
        pid = os.fork()
        if pid == 0:
            try:
                for other in others:  # or else nobody would hear when this process is alone
                    other.close()
                work(away, self._function, self._seconds, f"{self._folder}/{os.getpid()}")
            finally:
                os._exit(0)
        away.close()
        return Worker(pid, here, time.monotonic() + START)

    def _end(self, worker: Worker) -> None:
        worker.tasks.close()
        for end in (os.killpg, os.kill):  # it may not have a session of its own yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        # what it started and let go is this process's now
        end_descendants([other.pid for other in self._workers if other is not worker])
        remove(f"{self._folder}/{worker.pid}")


def main() -> None:
    """Arguments: the descriptor to ask through, workers, seconds of a task, a user's function."""
    descriptor, workers, seconds, function = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # who asks may still have work to finish; its end is the end
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ImportError):
        import math_verify  # noqa: F401  # pyright: ignore[reportMissingImports] - for all workers
    adopt_orphans()
    Keeper(Connection(int(descriptor)), int(workers), float(seconds), function).serve()


if __name__ == "__main__":
    main()
