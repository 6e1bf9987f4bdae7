"""What Orbax tells of a failure: nothing beside what it raises, and that in the operating system's
words."""

import functools
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

PATH_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Of what is not there, or not what it should be."""


@functools.cache
def silence_orbax() -> None:
    """Keeps quiet what Orbax tells beside what it raises, which the user reads once, as a
    ConfigError.

    It logs a traceback of each failed save, and leaves what a failed read or save had begun to the
    garbage collector, to asyncio and to the threads of tensorstore, who print theirs.
    """
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_abandoned)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
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
    """What the operating system says of the first folder or file in a folder that is there and may
    not be opened; None if all may be."""
    errors: list[OSError] = []
    for root, _, files in os.walk(folder, onerror=errors.append):
        for name in files:
            try:
                os.close(os.open(Path(root, name), os.O_RDONLY | os.O_NONBLOCK))
            except OSError as error:
                errors.append(error)
    return next((error for error in errors if not isinstance(error, PATH_ERRORS)), None)


def describe_error(error: BaseException) -> str:
    """The operating system's words, which tensorstore puts last in a long message; it may add what
    it was writing."""
    match = re.search(r"([^:\[\]]+) \[(?:os_error_code|tensorstore_spec)=", str(error))
    if match:
        return match[1].strip()
    return (
        (error.strerror if isinstance(error, OSError) else None)
        or str(error).split("\n")[0][:200]
        or type(error).__name__
    )
