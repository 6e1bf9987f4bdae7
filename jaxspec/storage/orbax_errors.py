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

GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Of what is not there, or not what it should be."""


@functools.cache
def quieten_orbax() -> None:
    """Keeps quiet what Orbax tells beside what it raises, which the user reads once, as a
    ConfigError.

    It logs a traceback of each failed save, and leaves what a failed read or save had begun to the
    garbage collector, to asyncio and to the threads of tensorstore, who print theirs.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_not_abandoned)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    others = sys.unraisablehook

    def tell(told: Any) -> None:
        code = getattr(told.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        too_late = told.exc_type is RuntimeError and str(told.exc_value) == "Event loop is closed"
        if not abandoned and not too_late:
            others(told)

    sys.unraisablehook = tell


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _not_abandoned(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


def refusal_in(folder: Path) -> OSError | None:
    """What the operating system says of the first folder or file in a folder that is there and may
    not be opened; None if all may be."""
    found: list[OSError] = []
    for root, _, files in os.walk(folder, onerror=found.append):
        for name in files:
            try:
                os.close(os.open(Path(root, name), os.O_RDONLY | os.O_NONBLOCK))
            except OSError as reason:
                found.append(reason)
    return next((reason for reason in found if not isinstance(reason, GONE)), None)


def reason_of(error: BaseException) -> str:
    """The operating system's words, which tensorstore puts last in a long message; it may add what
    it was writing."""
    found = re.search(r"([^:\[\]]+) \[(?:os_error_code|tensorstore_spec)=", str(error))
    if found:
        return found[1].strip()
    return (
        (error.strerror if isinstance(error, OSError) else None)
        or str(error).split("\n")[0][:200]
        or type(error).__name__
    )
