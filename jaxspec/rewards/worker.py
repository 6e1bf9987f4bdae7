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
from jaxspec.rewards.code import adopt_orphans, is_test, passes
from jaxspec.rewards.mathematics.equality import is_readable, math_equal
from jaxspec.rewards.own_function import OwnFunction, adapt_function, rewards_of

MEMORY = 3 * 2**30
"""Bytes of address space of a worker that runs checks of jaxspec alone."""

_LENGTH = struct.Struct(">I")
"""How the length of a message is written."""
TOKEN = 16
"""Bytes that begin every answer of a worker."""
LONGEST = 2**26
"""Bytes of an answer."""


class Channel(NamedTuple):
    """A worker's end of the connection to the keeper.

    A user's function may find this connection among the open files and write to it. So every
    answer begins with a token that the keeper made for this worker.
    """

    socket: socket.socket
    token: bytes

    def receive(self) -> Any:
        """Waits for a task; None at the end of them."""
        header = self._read(_LENGTH.size)
        content = self._read(*_LENGTH.unpack(header)) if header else b""
        return json.loads(content) if content else None

    def send(self, answer: Any) -> None:
        """Sends an answer, if there still is a keeper."""
        content = json.dumps(answer).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(self.token + _LENGTH.pack(len(content)) + content)

    def _read(self, count: int) -> bytes:
        """So many bytes; none at the end."""
        parts, missing = [], count
        while missing:
            part = self.socket.recv(min(missing, 2**20))
            if not part:
                return b""
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def frame_task(content: Any) -> bytes:
    """A task as `Channel.receive` reads it."""
    written = json.dumps(content).encode()
    return _LENGTH.pack(len(written)) + written


def take_answer(heard: bytearray, token: bytes) -> Any:
    """Removes the first answer from the bytes that a worker sent; None if it is not whole yet.

    Raises:
      ValueError: they are no answer of that worker.
    """
    start = TOKEN + _LENGTH.size
    if not token.startswith(heard[:TOKEN]):
        raise ValueError("the bytes do not begin with the worker's token")
    if len(heard) < start:
        return None
    [length] = _LENGTH.unpack(heard[TOKEN:start])
    if length > LONGEST:
        raise ValueError(f"an answer of {length:,} bytes is longer than {LONGEST:,}")
    if len(heard) < start + length:
        return None
    answer = json.loads(heard[start : start + length])
    del heard[: start + length]
    return answer


def work(channel: Channel, function: str, seconds: float, folder: str) -> None:
    """Answers tasks until their end; programs run in `folder`, which is made.

    The first message says that the worker is ready, or why it cannot be; importing is done by then,
    and is not on any task's clock.
    """
    os.setsid()  # whoever ends this process ends what it has started, too
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # what a function prints would go where the run tells its progress
        os.dup2(nowhere, number)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    own = os.getpid()
    try:
        own_function = adapt_function(own_code.imported(function)) if function else None
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, and is named
        channel.send({"failed": own_code.told(error)})
        return
    if not function:
        with contextlib.suppress(ValueError, OSError):  # not every system limits it
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    channel.send({"ready": True})
    while (task := channel.receive()) is not None:
        # The keeper ends a worker that is late. Should there be no keeper any more, this does.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 5)
        answer = _answer(*task, own_function=own_function, seconds=seconds, folder=folder)
        if os.getpid() != own:  # a function has forked, and its child returns as well
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send(answer)


def _answer(
    kind: str,
    *arguments: Any,
    own_function: OwnFunction | None,
    seconds: float,
    folder: str,
) -> Any:
    match kind:
        case "math":
            return math_equal(*arguments)
        case "code":
            return program_passes(*arguments, seconds=seconds, folder=folder)
        case "readable":
            verifier, reference = arguments
            return is_readable(reference) if verifier == "math" else is_test(reference)
        case "sandbox":
            [sandbox] = arguments
            return sandbox
        case "form":
            return own_function.form if own_function else ""
        case _:
            assert own_function is not None, "rows are given only where there is a function"
            return rewards_of(own_function.call, *arguments)


def program_passes(
    tests: str, program: str, sandbox: str, *, seconds: float, folder: str
) -> bool | dict[str, str]:
    """Whether a program passes tests, or why that cannot be found here."""
    try:
        return passes(tests, program, seconds, folder, sandbox)
    except OSError as error:
        return {"error": own_code.told(error)}
