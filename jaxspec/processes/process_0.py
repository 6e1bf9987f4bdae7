"""Actions and answers of process 0 for all processes that work together.

On the generator's side of a pipelined run, the first process of that side takes its place.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.processes import roles
from jaxspec.processes.global_arrays import sum_over_processes

_T = TypeVar("_T")
_MAX_MESSAGE_BYTES = 4096
"""Maximum length of an error message that process 0 sends."""


def run_in_process_0_first(work: Callable[[], _T]) -> _T:
    """Runs `work` in process 0, then in the others, which find its files."""
    if roles.is_first_member():
        result = work()
        wait_for_all()
        return result
    wait_for_all()
    return work()


def wait_for_all() -> None:
    """Waits until all processes call it."""
    sum_over_processes(np.zeros(1, np.int32))


def broadcast_table(table: np.ndarray) -> np.ndarray:
    """Returns the table of process 0 in every process."""
    return sum_over_processes(table if roles.is_first_member() else np.zeros_like(table))


def broadcast_flag(flag: bool) -> bool:
    """Returns the flag of process 0 in every process."""
    return bool(broadcast_number(int(flag)))


def broadcast_number(number: int) -> int:
    """Returns the number of process 0, below 2^31, in every process."""
    return int(broadcast_table(np.asarray([number], np.int32))[0])


def check_in_process_0(check: Callable[[], None]) -> None:
    """Runs `check` in process 0.

    Raises:
      ConfigError: `check` raises it in process 0. All processes raise the same message.
    """
    refusal = ""
    if roles.is_first_member():
        try:
            check()
        except ConfigError as error:
            refusal = str(error)
    if roles.member_count() > 1:
        # A broadcast needs the same shape in all processes, so the text is padded with blanks.
        message = np.frombuffer(
            refusal.encode()[:_MAX_MESSAGE_BYTES].ljust(_MAX_MESSAGE_BYTES), np.uint8
        )
        # The text may have been cut within a character.
        refusal = bytes(broadcast_table(message)).decode(errors="ignore").strip()
    require(not refusal, refusal)


def build_in_process_0_only(build: Callable[[Path], None]) -> Callable[[Path], None]:
    """Returns `build` in process 0, else a function that raises ConfigError."""
    # The others call it only if they do not find the folder that process 0 has built.
    return build if roles.is_first_member() else lambda folder: require_shared_cache(False, folder)


def require_shared_cache(is_shared: bool, folder: Path) -> None:
    """Requires that this process sees the cache of process 0.

    Raises:
      ConfigError: `is_shared` is False.
    """
    require(
        is_shared,
        f"{folder.parent} does not hold the files that process 0 wrote there; set JAXSPEC_CACHE to"
        " a folder that all processes share",
    )
