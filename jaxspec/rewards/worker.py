"""Worker of the reward pool: answers tasks, one at a time.

`keeper.py` forks it. A task is a list whose first element is its kind, and an answer is a JSON
value. JAX is not imported.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
from typing import Any, NamedTuple

from jaxspec.inputs import own_code
from jaxspec.rewards.code import is_test_program, passes_tests
from jaxspec.rewards.descendants import adopt_orphans
from jaxspec.rewards.mathematics.equality import is_readable, math_equal
from jaxspec.rewards.own_function import UserFunction, adapt_function, compute_rewards

# The needs of a user's function are unknown, so its worker has no such limit.
MAX_ADDRESS_SPACE = 3 * 2**30
"""Bytes of address space of a worker without a user's function."""

_LENGTH_PREFIX = struct.Struct(">I")
"""Format of the length in front of a message."""
TOKEN_SIZE = 16
"""Bytes of a worker's token."""
MAX_ANSWER_SIZE = 2**26
"""Bytes of the longest answer."""


class WorkerChannel(NamedTuple):
    """Worker's end of its connection to the keeper."""

    socket: socket.socket
    # A user's function may find this connection among its open files and write to it. The keeper
    # recognizes such bytes, as they do not begin with the token.
    token: bytes
    """Prefix of every answer, chosen by the keeper for this worker."""

    def receive_task(self) -> Any:
        """Waits for a task. Returns None when the keeper has closed the connection."""
        header = self._receive_bytes(_LENGTH_PREFIX.size)
        content = self._receive_bytes(*_LENGTH_PREFIX.unpack(header)) if header else b""
        return json.loads(content) if content else None

    def send_answer(self, answer: Any) -> None:
        """Sends an answer, unless the keeper has ended."""
        content = json.dumps(answer).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(self.token + _LENGTH_PREFIX.pack(len(content)) + content)

    def _receive_bytes(self, count: int) -> bytes:
        """Receives `count` bytes, or none if the connection is closed."""
        chunks, remaining = [], count
        while remaining:
            chunk = self.socket.recv(min(remaining, 2**20))
            if not chunk:
                return b""
            chunks.append(chunk)
            remaining -= len(chunk)
        return b"".join(chunks)


def frame_task(content: Any) -> bytes:
    """Encodes a task for `WorkerChannel.receive_task`."""
    body = json.dumps(content).encode()
    return _LENGTH_PREFIX.pack(len(body)) + body


def pop_answer(buffer: bytearray, token: bytes) -> Any:
    """Takes the first answer from received bytes.

    It is removed from `buffer` and returned. Returns None if the answer is incomplete.

    Raises:
      ValueError: the bytes are not an answer of the worker with that token, or are too long.
    """
    header_size = TOKEN_SIZE + _LENGTH_PREFIX.size
    # Compares as many bytes as have arrived, so that foreign bytes are noticed at once.
    if not token.startswith(buffer[:TOKEN_SIZE]):
        raise ValueError("the bytes do not begin with the worker's token")
    if len(buffer) < header_size:
        return None
    [length] = _LENGTH_PREFIX.unpack(buffer[TOKEN_SIZE:header_size])
    # Bounds the keeper's memory, whatever a worker sends.
    if length > MAX_ANSWER_SIZE:
        raise ValueError(f"an answer of {length:,} bytes is longer than {MAX_ANSWER_SIZE:,}")
    if len(buffer) < header_size + length:
        return None
    answer = json.loads(buffer[header_size : header_size + length])
    del buffer[: header_size + length]
    return answer


def run_worker(channel: WorkerChannel, function: str, task_seconds: float, folder: str) -> None:
    """Answers tasks until the keeper closes the connection.

    The first message is `{"ready": True}`, or `{"failed": REASON}` if the user's function cannot
    be imported.

    Args:
      channel: connection to the keeper.
      function: name of a user's function, or empty.
      task_seconds: time limit of a task.
      folder: working folder for programs. It is created when one runs.
    """
    # The keeper kills the session's process group, and with it the processes that a task starts.
    os.setsid()
    # Output of a user's function would otherwise appear among the messages of the run.
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null_fd, fd)
    # By default the alarm below ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Orphans of a program become children of this process, where `end_descendants` finds them.
    adopt_orphans()
    worker_pid = os.getpid()
    # Imports come before the first task, so that their time does not count against it.
    try:
        user_function = adapt_function(own_code.import_function(function)) if function else None
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
        channel.send_answer({"failed": own_code.describe_error(error)})
        return
    if not function:
        # Some systems do not limit the address space.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    channel.send_answer({"ready": True})
    while (task := channel.receive_task()) is not None:
        # The keeper ends a late worker. This alarm ends it if the keeper has ended first.
        signal.setitimer(signal.ITIMER_REAL, 2 * task_seconds + 5)
        answer = _answer_task(
            *task, user_function=user_function, seconds=task_seconds, folder=folder
        )
        # If a user's function forks, its child also returns here, and must not answer.
        if os.getpid() != worker_pid:
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send_answer(answer)


def _answer_task(
    kind: str,
    *arguments: Any,
    user_function: UserFunction | None,
    seconds: float,
    folder: str,
) -> Any:
    """Answers one task of a given kind."""
    match kind:
        case "math":
            return math_equal(*arguments)
        case "code":
            return check_program(*arguments, seconds=seconds, folder=folder)
        case "readable":
            verifier, reference = arguments
            return is_readable(reference) if verifier == "math" else is_test_program(reference)
        case "sandbox":
            [sandbox] = arguments
            return sandbox
        case "form":
            return user_function.form if user_function else ""
        case _:
            assert user_function is not None, "only a pool with a function is given rows"
            return compute_rewards(user_function.call, *arguments)


def check_program(
    tests: str, program: str, sandbox: str, *, seconds: float, folder: str
) -> bool | dict[str, str]:
    """Returns whether a program passes tests.

    Returns `{"error": REASON}` if the program cannot be run.
    """
    try:
        return passes_tests(tests, program, seconds, folder, sandbox)
    except OSError as error:
        return {"error": own_code.describe_error(error)}
