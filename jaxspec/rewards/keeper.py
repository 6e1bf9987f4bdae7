"""Keeper process of the reward pool, started by `pool.py`.

The keeper forks workers, gives them tasks, and replaces those that are late. It has one thread and
does not import JAX, so forking is safe and takes milliseconds. It never blocks on a worker, so a
worker that hangs does not delay the others.
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

from jaxspec.rewards.code import find_sandbox, remove_folder
from jaxspec.rewards.descendants import adopt_orphans, end_descendants, request_parent_death_signal
from jaxspec.rewards.worker import TOKEN_SIZE, WorkerChannel, frame_task, pop_answer, run_worker

START_TIMEOUT = 120.0
"""Seconds within which a worker must have imported a user's module."""
# sympy's caches grow with every task.
MAX_WORKER_TASKS = 2000
"""Tasks after which a worker is replaced."""
MAX_START_FAILURES = 5
"""Consecutive failed starts that are tolerated once a worker has started."""
# On a busy machine a check may be late only because of other tasks, so it is tried again.
FIRST_TRY_SHARE = 1 / 3
"""Share of a task's time limit for the first try of a check. A second try has the rest."""
# An exclusive try stops all other work. With more late checks than this, the answers are at fault.
MAX_EXCLUSIVE_RETRIES = 8
"""Second tries of a batch during which no other task runs."""
BATCH_DEADLINES = 20
"""Time limit of a batch, in multiples of a task's limit. Its tasks add an allowance."""
USUAL_CHECK_SHARE = 0.1
"""Allowance that a check adds, in multiples of a task's limit."""
_ORPHAN_SIGNAL = signal.SIGUSR1
"""Signal sent to this process when its parent, the client, ends."""


@dataclasses.dataclass
class WorkerProcess:
    """Worker process, as seen by the keeper."""

    pid: int
    connection: socket.socket
    """Non-blocking connection to the worker."""
    token: bytes
    """Prefix of all answers of this worker."""
    deadline: float
    """Monotonic time from which its start or its task is late."""
    unsent: bytes = b""
    """Bytes of its task that are still to be sent."""
    received_bytes: bytearray = dataclasses.field(default_factory=bytearray)
    """Bytes of an incomplete answer."""
    task: "Task | None" = None
    is_ready: bool = False
    answered_count: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """Task of a batch."""

    batch_id: int
    index: int
    content: list[Any]
    is_retry: bool = False
    """Whether this is the second try."""
    is_exclusive: bool = False
    """Whether no other task may run at the same time."""


@dataclasses.dataclass
class TaskBatch:
    """Tasks whose answers are sent together."""

    answers: list[Any]
    pending_count: int
    """Number of tasks without an answer."""
    max_seconds: float
    """Time limit, counted from the start of the first task."""
    deadline: float = math.inf
    """Monotonic time after which no task of the batch starts."""
    is_expired: bool = False
    """Whether the deadline has passed."""
    retry_count: int = 0
    is_requested: bool = False
    """Whether the client waits for the answers."""


class Keeper:
    """Queue of tasks with its workers.

    Args:
      client: connection to the pool's client.
      worker_count: number of workers.
      task_seconds: time limit of a task, over both tries.
      function: name of a user's function, or empty.
      folder: parent of the working folders of programs. It is removed at the end.
    """

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
        """Answers requests until the connection is closed, and then ends the workers."""
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
                    # Other events, such as the worker's end, are noticed when reading.
                    elif event == select.POLLOUT:
                        self._send_task(worker)
                    else:
                        self._receive_answer(worker)
                for worker in list(self._workers):
                    if is_busy(worker) and time.monotonic() >= worker.deadline:
                        self._handle_lost_worker(worker)
                self._expire_batches()
                self._send_answers()
        while self._workers:
            self._end_worker(self._workers[0])
            del self._workers[0]
        remove_folder(self._folder)

    def _poll_timeout(self) -> float | None:
        """Returns the milliseconds to the next deadline, or None if there is none."""
        deadlines = [worker.deadline for worker in self._workers if is_busy(worker)]
        deadlines += [batch.deadline for batch in self._batches.values()]
        soonest = min(deadlines, default=math.inf)
        remaining_seconds = max(0.0, soonest - time.monotonic())
        return None if math.isinf(remaining_seconds) else 1000 * remaining_seconds + 1

    def _assign_tasks(self) -> None:
        """Gives tasks to idle workers. No other task runs beside an exclusive one."""
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
            # The keeper looks for a sandbox once, and all workers use the cached result.
            if content[0] in ("code", "sandbox"):
                content = [*content, find_sandbox()]
            worker.unsent = frame_task(content)
            self._send_task(worker)

    def _send_task(self, worker: WorkerProcess) -> None:
        """Sends a worker's task, as far as possible without blocking."""
        # If the worker has ended, the next read notices.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while worker.unsent:
                worker.unsent = worker.unsent[worker.connection.send(worker.unsent) :]

    def _receive_request(self, message: dict[str, Any]) -> None:
        """Queues the tasks of a request. A request without tasks asks for a batch's answers."""
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
        """Reads from a worker, and records a complete answer.

        The worker is replaced if it has ended, sends anything else than an answer to its task, or
        has answered `MAX_WORKER_TASKS`. Raises EOFError if it could not start.
        """
        try:
            chunk = worker.connection.recv(2**20)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._handle_lost_worker(worker)
            return
        worker.received_bytes += chunk
        try:
            answer = pop_answer(worker.received_bytes, worker.token)
        except ValueError:
            self._handle_lost_worker(worker, wrote_invalid=True)
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
            self._handle_lost_worker(worker, wrote_invalid=True)
            return
        worker.answered_count += 1
        # Bytes after the answer are not the worker's, but those of a user's function.
        if worker.answered_count >= MAX_WORKER_TASKS or worker.received_bytes:
            self._replace_worker(worker)
        self._record_answer(task, answer)

    def _handle_lost_worker(self, worker: WorkerProcess, wrote_invalid: bool = False) -> None:
        """Replaces a worker that is late, has ended or wrote invalid bytes.

        Its check is tried a second time. After that, or if the task is a call of a user's function,
        the answer is the failure. Raises EOFError if workers cannot start.
        """
        task, is_late = worker.task, time.monotonic() >= worker.deadline
        if not worker.is_ready:
            self._start_failures += 1
            # If no worker has ever started, the cause is the function or the system.
            if not self._has_started or self._start_failures > MAX_START_FAILURES:
                failure = (
                    f"was not ready within {START_TIMEOUT:.0f} seconds"
                    if is_late
                    else "ended before it was ready"
                )
                failure = (
                    "wrote to the pool's connection before it was ready"
                    if wrote_invalid
                    else failure
                )
                self._report_failure(
                    f"a worker {failure}{', while importing the function' * bool(self._function)}"
                )
        self._replace_worker(worker)
        if task is None:
            return
        batch = self._batches[task.batch_id]
        is_user_call = task.content[0] == "rows"
        # A call of a user's function has had the whole time limit in its only try.
        if not (is_user_call or task.is_retry or batch.is_expired):
            batch.retry_count += 1
            is_exclusive = batch.retry_count <= MAX_EXCLUSIVE_RETRIES
            self._queue.appendleft(
                dataclasses.replace(task, is_retry=True, is_exclusive=is_exclusive)
            )
        elif wrote_invalid and is_user_call:
            self._record_answer(task, {"error": "a call wrote to the pool's connection"})
        else:
            self._record_answer(task, {"timeout" if is_late else "died": True})

    def _expire_batches(self) -> None:
        """Ends batches past their deadline, by answering tasks that have not started."""
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
        """Reports a failure to the client. Raises EOFError, which ends `serve_client`."""
        self._client.send_bytes(json.dumps({"failed": reason}).encode())
        raise EOFError

    def _record_answer(self, task: Task, answer: Any) -> None:
        batch = self._batches[task.batch_id]
        batch.answers[task.index] = answer
        batch.pending_count -= 1

    def _send_answers(self) -> None:
        """Sends the answers of complete batches that are requested."""
        for batch_id, batch in list(self._batches.items()):
            # Held back until one worker is ready, so that a failed import is reported even without
            # tasks.
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
                request_parent_death_signal(signal.SIGKILL, keeper_pid)
                # A copy kept here would hide the end of a connection from its other side.
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
        """Kills a worker, with its descendants. Removes its folder."""
        worker.connection.close()
        # A worker that has just been forked may not have its own process group yet.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        # Its orphans are now children of this process.
        end_descendants([peer.pid for peer in self._workers if peer is not worker])
        remove_folder(f"{self._folder}/{worker.pid}")


def is_busy(worker: WorkerProcess) -> bool:
    """Returns whether a worker is starting or has a task."""
    return worker.task is not None or not worker.is_ready


def main() -> None:
    """Serves a client.

    The command line holds the file descriptor of the connection, the client's process id, the
    number of workers, the time limit of a task in seconds, and the name of a user's function.
    """
    descriptor, client_pid, workers, task_seconds, function = sys.argv[1:]
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The client may still need answers after a signal, and ends this process itself.
        signal.signal(signal_number, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="jaxspec-")

    def exit_orphaned(*_: object) -> None:
        # Linux also sends the signal when only the thread that started this process ends.
        if os.getppid() != int(client_pid):
            end_descendants()
            remove_folder(folder)
            os._exit(1)

    signal.signal(_ORPHAN_SIGNAL, exit_orphaned)
    request_parent_death_signal(_ORPHAN_SIGNAL, int(client_pid))
    # Forked workers have the module without importing it again.
    with contextlib.suppress(ImportError):
        import math_verify  # noqa: F401  # pyright: ignore[reportMissingImports]
    adopt_orphans()
    Keeper(
        Connection(int(descriptor)), int(workers), float(task_seconds), function, folder
    ).serve_client()


if __name__ == "__main__":
    main()
