"""Standard output that survives errors.

A reader that is gone, or a full disk, must not cost unsaved work.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

LinePrinter = Callable[[str], Any]
"""Function that shows a line to the user."""


def redirect_to_null(*descriptors: int) -> None:
    """Redirects file descriptors to the null device."""
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null_descriptor, descriptor)
    os.close(null_descriptor)


@contextlib.contextmanager
def ignore_output_errors() -> Iterator[None]:
    """Ignores errors of writing to standard output.

    Further output is discarded after the first error.
    """
    try:
        yield
    # For example if `| head` has ended, or the disk is full.
    except OSError:
        silence_stdout()


def silence_stdout() -> None:
    """Discards all further standard output."""
    # Replacing the descriptor also protects the flush at the end of the process, which would raise
    # the error again.
    if sys.stdout is not None:
        redirect_to_null(sys.stdout.fileno())


def print_line(message: str) -> None:
    """Prints a line to standard output, ignoring errors."""
    with ignore_output_errors():
        print(message, flush=True)
