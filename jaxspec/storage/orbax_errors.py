"""Reasons of Orbax's errors, and suppression of its other output."""

import functools
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

PATH_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of an absent path, or one of the wrong kind."""


@functools.cache
def silence_orbax() -> None:
    """Suppresses Orbax's logs and warnings of failures.

    The user reads each failure once, as a ConfigError.
    """
    # Orbax logs a traceback of each failed save.
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    # A failed read or save abandons its coroutines and futures. The garbage collector, asyncio and
    # the threads of tensorstore each report those.
    logging.getLogger("asyncio").addFilter(_is_not_abandoned)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # Other errors are still reported, by the hook that is replaced here.
    previous_hook = sys.unraisablehook

    def report_unraisable(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_abandoned = code is not None and "orbax" in code.co_filename
        is_loop_closed = (
            unraisable.exc_type is RuntimeError
            and str(unraisable.exc_value) == "Event loop is closed"
        )
        if not is_abandoned and not is_loop_closed:
            previous_hook(unraisable)

    sys.unraisablehook = report_unraisable


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _is_not_abandoned(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


def access_error_in(folder: Path) -> OSError | None:
    """Returns the error of the first file or folder that exists and cannot be opened.

    Returns None if all can be opened.
    """
    errors: list[OSError] = []
    for root, _, files in os.walk(folder, onerror=errors.append):
        for name in files:
            # O_NONBLOCK, since opening a named pipe would wait for a writer.
            try:
                os.close(os.open(Path(root, name), os.O_RDONLY | os.O_NONBLOCK))
            except OSError as error:
                errors.append(error)
    return next((error for error in errors if not isinstance(error, PATH_ERRORS)), None)


def describe_error(error: BaseException) -> str:
    """Returns the operating system's reason, or the first line."""
    # tensorstore appends the reason to a long message, followed by the code of the error or by a
    # description of the array.
    match = re.search(r"([^:\[\]]+) \[(?:os_error_code|tensorstore_spec)=", str(error))
    if match:
        return match[1].strip()
    return (
        (error.strerror if isinstance(error, OSError) else None)
        or str(error).split("\n")[0][:200]
        or type(error).__name__
    )
