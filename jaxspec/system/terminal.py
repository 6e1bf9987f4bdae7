"""What is said on standard output, where a reader that is gone or a full disk is no reason to lose
the work."""

import contextlib
import os
import sys
from collections.abc import Iterator


def redirect_to_null(*descriptors: int) -> None:
    """Sends what is still written to these file descriptors to nowhere."""
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null_descriptor, descriptor)
    os.close(null_descriptor)


@contextlib.contextmanager
def ignore_output_errors() -> Iterator[None]:
    """Lets a program go on that cannot write to standard output, because `| head` has ended or the
    disk is full: the rest goes nowhere."""
    try:
        yield
    except OSError:
        silence_stdout()


def silence_stdout() -> None:
    """Sends what is still printed to nowhere."""
    if sys.stdout is not None:
        redirect_to_null(sys.stdout.fileno())


def print_line(message: str) -> None:
    """Prints a line."""
    with ignore_output_errors():
        print(message, flush=True)
