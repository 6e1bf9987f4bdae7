"""What a worker of the pool does with a task; it is forked by `keeper.py`, and JAX is not there.

A task is a list that starts with its kind, an answer a value of JSON.
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
from jaxspec.rewards.code import adopt_orphans, is_test, passes_tests
from jaxspec.rewards.mathematics.equality import is_readable, math_equal
from jaxspec.rewards.own_function import UserFunction, adapt_function, compute_rewards

MAX_ADDRESS_SPACE = 3 * 2**30
"""Bytes of address space of a worker that runs checks of jaxspec alone."""

_LENGTH_PREFIX = struct.Struct(">I")
"""How the length of a message is written."""
TOKEN_SIZE = 16
"""Bytes that begin every answer of a worker."""
MAX_ANSWER_SIZE = 2**26
"""Bytes of an answer."""


class WorkerChannel(NamedTuple):
    """A worker's end of the connection to the keeper.

    A user's function may find this connection among the open files and write to it. So every
    answer begins with a token that the keeper made for this worker.
    """

    socket: socket.socket
    token: bytes

    def receive_task(self) -> Any:
        """Waits for a task; None at the end of them."""
        header = self._receive_bytes(_LENGTH_PREFIX.size)
        content = self._receive_bytes(*_LENGTH_PREFIX.unpack(header)) if header else b""
        return json.loads(content) if content else None

    def send_answer(self, answer: Any) -> None:
        """Sends an answer, if there still is a keeper."""
        content = json.dumps(answer).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(self.token + _LENGTH_PREFIX.pack(len(content)) + content)

    def _receive_bytes(self, count: int) -> bytes:
        """So many bytes; none at the end."""
        chunks, remaining = [], count
        while remaining:
            chunk = self.socket.recv(min(remaining, 2**20))
            if not chunk:
                return b""
            chunks.append(chunk)
            remaining -= len(chunk)
        return b"".join(chunks)


def frame_task(content: Any) -> bytes:
    """A task as `WorkerChannel.receive_task` reads it."""
    body = json.dumps(content).encode()
    return _LENGTH_PREFIX.pack(len(body)) + body


def pop_answer(buffer: bytearray, token: bytes) -> Any:
    """Removes the first answer from the bytes that a worker sent; None if it is not whole yet.

    Raises:
      ValueError: they are no answer of that worker.
    """
    header_size = TOKEN_SIZE + _LENGTH_PREFIX.size
    if not token.startswith(buffer[:TOKEN_SIZE]):
        raise ValueError("the bytes do not begin with the worker's token")
    if len(buffer) < header_size:
        return None
    [length] = _LENGTH_PREFIX.unpack(buffer[TOKEN_SIZE:header_size])
    if length > MAX_ANSWER_SIZE:
        raise ValueError(f"an answer of {length:,} bytes is longer than {MAX_ANSWER_SIZE:,}")
    if len(buffer) < header_size + length:
        return None
    answer = json.loads(buffer[header_size : header_size + length])
    del buffer[: header_size + length]
    return answer


def run_worker(channel: WorkerChannel, function: str, task_seconds: float, folder: str) -> None:
    """Answers tasks until their end; programs run in `folder`, which is made.

    The first message says that the worker is ready, or why it cannot be; importing is done by then,
    and is not on any task's clock.
    """
    os.setsid()  # whoever ends this process ends what it has started, too
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # what a function prints would go where the run tells its progress
        os.dup2(null_fd, fd)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    worker_pid = os.getpid()
    try:
        user_function = adapt_function(own_code.import_function(function)) if function else None
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, and is named
        channel.send_answer({"failed": own_code.describe_error(error)})
        return
    if not function:
        with contextlib.suppress(ValueError, OSError):  # not every system limits it
            resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    channel.send_answer({"ready": True})
    while (task := channel.receive_task()) is not None:
        # The keeper ends a worker that is late. Should there be no keeper any more, this does.
        signal.setitimer(signal.ITIMER_REAL, 2 * task_seconds + 5)
        answer = _answer_task(
            *task, user_function=user_function, seconds=task_seconds, folder=folder
        )
        if os.getpid() != worker_pid:  # a function has forked, and its child returns as well
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
    match kind:
        case "math":
            return math_equal(*arguments)
        case "code":
            return check_program(*arguments, seconds=seconds, folder=folder)
        case "readable":
            verifier, reference = arguments
            return is_readable(reference) if verifier == "math" else is_test(reference)
        case "sandbox":
            [sandbox] = arguments
            return sandbox
        case "form":
            return user_function.form if user_function else ""
        case _:
            assert user_function is not None, "rows are given only where there is a function"
            return compute_rewards(user_function.call, *arguments)


def check_program(
    tests: str, program: str, sandbox: str, *, seconds: float, folder: str
) -> bool | dict[str, str]:
    """Whether a program passes tests, or why that cannot be found here."""
    try:
        return passes_tests(tests, program, seconds, folder, sandbox)
    except OSError as error:
        return {"error": own_code.describe_error(error)}
