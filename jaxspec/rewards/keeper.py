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
    remove_folder,
    signal_parent_death,
)
from jaxspec.rewards.worker import TOKEN_SIZE, WorkerChannel, frame_task, pop_answer, run_worker

START_TIMEOUT = 120.0
"""Seconds that a worker may take to import a user's module."""
MAX_WORKER_TASKS = 2000
"""Tasks after which a worker is replaced: what sympy keeps in memory only grows."""
MAX_START_FAILURES = 5
"""Workers in a row that may end before they are ready, once one has been."""
FIRST_TRY_SHARE = 1 / 3
"""Share of the seconds of a task that it may take beside others; one that is late is tried once
more, alone, for the rest."""
MAX_EXCLUSIVE_RETRIES = 8
"""Tasks of a batch whose second try has the pool to itself; that many late ones are no accident."""
BATCH_DEADLINES = 20
"""Deadlines that a batch may take, beside the usual time of its tasks."""
USUAL_CHECK_SHARE = 0.1
"""Usual time of a check of jaxspec, in deadlines."""
_ORPHAN_SIGNAL = signal.SIGUSR1
"""Signal at the end of a thread of the client, or of all of them."""


@dataclasses.dataclass
class WorkerProcess:
    """A process that answers one task after another."""

    pid: int
    connection: socket.socket
    """Never waits."""
    token: bytes
    """Begins all its answers."""
    deadline: float
    """When it is late."""
    unsent: bytes = b""
    """Rest of its task."""
    received_bytes: bytearray = dataclasses.field(default_factory=bytearray)
    """Part of an answer."""
    task: "Task | None" = None
    is_ready: bool = False
    answered_count: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """One of a batch."""

    batch_id: int
    index: int
    content: list[Any]
    is_retry: bool = False
    """It was late before."""
    is_exclusive: bool = False
    """Nothing else may run beside it."""


@dataclasses.dataclass
class TaskBatch:
    """Tasks whose answers are wanted together."""

    answers: list[Any]
    pending_count: int
    max_seconds: float
    """Most that it may take."""
    deadline: float = math.inf
    """When no task of it begins any more; counted from its first task."""
    is_expired: bool = False
    """That time has come."""
    retry_count: int = 0
    is_requested: bool = False


class Keeper:
    """The workers, and what they have to do. `task_seconds`: that a task may take in all; `folder`:
    of the programs, which goes away at the end."""

    def __init__(
        self, client: Connection, worker_count: int, task_seconds: float, function: str, folder: str
    ) -> None:
        self._client, self._task_seconds, self._function = client, task_seconds, function
        self._queue: collections.deque[Task] = collections.deque()
        self._batches: dict[int, TaskBatch] = {}
        self._has_started, self._start_failures = False, 0
        self._folder = folder
        self._workers: list[WorkerProcess] = []
        for _ in range(worker_count):
            self._workers.append(self._fork_worker())

    def serve_client(self) -> None:
        """Until the client is gone."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._assign_tasks()
                poll = select.poll()
                poll.register(self._client.fileno(), select.POLLIN)
                workers_by_fd = {}
                for worker in self._workers:
                    workers_by_fd[worker.connection.fileno()] = worker
                    poll.register(
                        worker.connection.fileno(),
                        select.POLLIN | (select.POLLOUT if worker.unsent else 0),
                    )
                for fd, event in poll.poll(self._poll_timeout()):
                    worker = workers_by_fd.get(fd)
                    if worker is None:
                        self._receive_request(json.loads(self._client.recv_bytes()))
                    elif event == select.POLLOUT:
                        self._send_task(worker)
                    else:
                        self._receive_answer(worker)
                for worker in list(self._workers):
                    if is_busy(worker) and time.monotonic() >= worker.deadline:
                        self._handle_loss(worker)
                self._expire_batches()
                self._send_answers()
        while self._workers:
            self._end_worker(self._workers[0])
            del self._workers[0]
        remove_folder(self._folder)

    def _poll_timeout(self) -> float | None:
        """Milliseconds until something is late, if something can be."""
        deadlines = [worker.deadline for worker in self._workers if is_busy(worker)]
        deadlines += [batch.deadline for batch in self._batches.values()]
        soonest = min(deadlines, default=math.inf)
        remaining_seconds = max(0.0, soonest - time.monotonic())
        return None if math.isinf(remaining_seconds) else 1000 * remaining_seconds + 1

    def _assign_tasks(self) -> None:
        """Gives tasks to idle workers; a second try only while nothing else runs."""
        for worker in list(self._workers):
            running = [peer.task for peer in self._workers if peer.task]
            if is_busy(worker) or not self._queue or any(task.is_exclusive for task in running):
                continue
            if self._queue[0].is_exclusive and running:
                return
            task = self._queue.popleft()
            is_user_call, start_time = task.content[0] == "rows", time.monotonic()
            share = (
                (1 - FIRST_TRY_SHARE) if task.is_retry else 1.0 if is_user_call else FIRST_TRY_SHARE
            )
            worker.task, worker.deadline = task, start_time + share * self._task_seconds
            batch = self._batches[task.batch_id]
            batch.deadline = min(batch.deadline, start_time + batch.max_seconds)
            content = task.content
            if content[0] in ("code", "sandbox"):
                content = [*content, find_sandbox()]
            worker.unsent = frame_task(content)
            self._send_task(worker)

    def _send_task(self, worker: WorkerProcess) -> None:
        """Sends as much of a worker's task as it takes now."""
        # An end is heard next.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while worker.unsent:
                worker.unsent = worker.unsent[worker.connection.send(worker.unsent) :]

    def _receive_request(self, message: dict[str, Any]) -> None:
        batch_id = message["batch"]
        if "tasks" not in message:
            self._batches[batch_id].is_requested = True
            return
        tasks = message["tasks"]
        call_count = sum(task[0] == "rows" for task in tasks)
        load = (call_count + USUAL_CHECK_SHARE * (len(tasks) - call_count)) / len(self._workers)
        max_seconds = self._task_seconds * (BATCH_DEADLINES + load)
        self._batches[batch_id] = TaskBatch([None] * len(tasks), len(tasks), max_seconds)
        self._queue.extend(Task(batch_id, index, task) for index, task in enumerate(tasks))

    def _receive_answer(self, worker: WorkerProcess) -> None:
        """Reads from a worker as much as there is; an answer that nobody asked for, or that is
        none, has the worker replaced."""
        try:
            chunk = worker.connection.recv(2**20)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._handle_loss(worker)
            return
        worker.received_bytes += chunk
        try:
            answer = pop_answer(worker.received_bytes, worker.token)
        except ValueError:
            self._handle_loss(worker, wrote_invalid=True)
            return
        if answer is None:
            return
        if not worker.is_ready:
            if "failed" in answer:
                self._report_failure(answer["failed"])
            worker.is_ready, self._has_started, self._start_failures = True, True, 0
            return
        task, worker.task = worker.task, None
        if task is None:
            self._handle_loss(worker, wrote_invalid=True)
            return
        worker.answered_count += 1
        if worker.answered_count >= MAX_WORKER_TASKS or worker.received_bytes:
            self._replace_worker(worker)
        self._record_answer(task, answer)

    def _handle_loss(self, worker: WorkerProcess, wrote_invalid: bool = False) -> None:
        """Replaces a worker that is late, dead, or wrote something else than an answer. Its task is
        tried once more, alone, or settled."""
        task, is_late = worker.task, time.monotonic() >= worker.deadline
        if not worker.is_ready:
            self._start_failures += 1
            if not self._has_started or self._start_failures > MAX_START_FAILURES:
                failure = (
                    f"is not ready within {START_TIMEOUT:.0f} seconds"
                    if is_late
                    else "ends while it starts"
                )
                failure = (
                    "writes to the connection of the pool while it starts"
                    if wrote_invalid
                    else failure
                )
                self._report_failure(
                    f"a worker {failure}{', importing the function' * bool(self._function)}"
                )
        self._replace_worker(worker)
        if task is None:
            return
        batch = self._batches[task.batch_id]
        is_user_call = task.content[0] == "rows"
        if not (is_user_call or task.is_retry or batch.is_expired):
            batch.retry_count += 1
            is_exclusive = batch.retry_count <= MAX_EXCLUSIVE_RETRIES
            self._queue.appendleft(
                dataclasses.replace(task, is_retry=True, is_exclusive=is_exclusive)
            )
        elif wrote_invalid and is_user_call:
            self._record_answer(task, {"error": "a call wrote to the connection of the pool"})
        else:
            self._record_answer(task, {"timeout" if is_late else "died": True})

    def _expire_batches(self) -> None:
        """Settles what has not begun of batches whose time is over."""
        for batch_id, batch in self._batches.items():
            if time.monotonic() < batch.deadline:
                continue
            batch.is_expired, batch.deadline = True, math.inf
            batch_tasks = [task for task in self._queue if task.batch_id == batch_id]
            for task in batch_tasks:
                answer = {"timeout": True} if task.is_retry else {"unjudged": batch.max_seconds}
                self._record_answer(task, answer)
            other_tasks = (task for task in self._queue if task.batch_id != batch_id)
            self._queue = collections.deque(other_tasks)

    def _report_failure(self, reason: str) -> NoReturn:
        """Says why there are no workers, and is done."""
        self._client.send_bytes(json.dumps({"failed": reason}).encode())
        raise EOFError

    def _record_answer(self, task: Task, answer: Any) -> None:
        batch = self._batches[task.batch_id]
        batch.answers[task.index] = answer
        batch.pending_count -= 1

    def _send_answers(self) -> None:
        for batch_id, batch in list(self._batches.items()):
            if batch.is_requested and not batch.pending_count and self._has_started:
                del self._batches[batch_id]
                answers = {"batch": batch_id, "answers": batch.answers}
                self._client.send_bytes(json.dumps(answers).encode())

    def _replace_worker(self, worker: WorkerProcess) -> None:
        self._end_worker(worker)
        self._workers[self._workers.index(worker)] = self._fork_worker()

    def _fork_worker(self) -> WorkerProcess:
        keeper_socket, worker_socket = socket.socketpair()
        keeper_socket.setblocking(False)
        token, keeper_pid = os.urandom(TOKEN_SIZE), os.getpid()
        inherited_sockets = [
            self._client,
            keeper_socket,
            *(worker.connection for worker in self._workers),
        ]
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(_ORPHAN_SIGNAL, signal.SIG_DFL)
                signal_parent_death(signal.SIGKILL, keeper_pid)
                # or else nobody would hear when this process is alone
                for connection in inherited_sockets:
                    connection.close()
                channel = WorkerChannel(worker_socket, token)
                run_worker(
                    channel, self._function, self._task_seconds, f"{self._folder}/{os.getpid()}"
                )
            finally:
                os._exit(0)
        worker_socket.close()
        return WorkerProcess(pid, keeper_socket, token, time.monotonic() + START_TIMEOUT)

    def _end_worker(self, worker: WorkerProcess) -> None:
        worker.connection.close()
        for kill in (os.killpg, os.kill):  # it may not have a session of its own yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        # what it started and let go is this process's now
        end_descendants([peer.pid for peer in self._workers if peer is not worker])
        remove_folder(f"{self._folder}/{worker.pid}")


def is_busy(worker: WorkerProcess) -> bool:
    """Whether a worker starts, or has a task."""
    return worker.task is not None or not worker.is_ready


def main() -> None:
    """Arguments: the descriptor to ask through, the client's process, workers, seconds of a task, a
    user's function."""
    descriptor, client_pid, workers, task_seconds, function = sys.argv[1:]
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # who asks may still have work to finish; its end is the end
        signal.signal(signal_number, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="jaxspec-")

    def exit_orphaned(*_: object) -> None:
        # The signal also comes at the end of the thread that started this process.
        if os.getppid() != int(client_pid):
            end_descendants()
            remove_folder(folder)
            os._exit(1)

    signal.signal(_ORPHAN_SIGNAL, exit_orphaned)
    signal_parent_death(_ORPHAN_SIGNAL, int(client_pid))
    with contextlib.suppress(ImportError):
        import math_verify  # noqa: F401  # pyright: ignore[reportMissingImports] - for all workers
    adopt_orphans()
    Keeper(
        Connection(int(descriptor)), int(workers), float(task_seconds), function, folder
    ).serve_client()


if __name__ == "__main__":
    main()
