"""What is said on standard output, where a reader that is gone or a full disk is no reason to lose
the work."""

import contextlib
import os
import sys
from collections.abc import Iterator


def to_nowhere(*numbers: int) -> None:
    """Sends what is still written to these file descriptors to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in numbers:
        os.dup2(nowhere, number)
    os.close(nowhere)


@contextlib.contextmanager
def heard_or_not() -> Iterator[None]:
    """Lets a program go on that cannot write to standard output, because `| head` has ended or the
    disk is full: the rest goes nowhere."""
    try:
        yield
    except OSError:
        silence()


def silence() -> None:
    """Sends what is still printed to nowhere."""
    if sys.stdout is not None:
        to_nowhere(sys.stdout.fileno())


def say(message: str) -> None:
    """Prints a line."""
    with heard_or_not():
        print(message, flush=True)
