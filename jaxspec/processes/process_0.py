"""Actions and answers of process 0 for all processes of a job."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.inputs.checked import ConfigError, require

_T = TypeVar("_T")
_MAX_MESSAGE_BYTES = 4096
"""Maximum length of an error message that process 0 sends."""


def run_in_process_0_first(work: Callable[[], _T]) -> _T:
    """Runs `work` in process 0, then in the others, which find its files."""
    if jax.process_index() == 0:
        result = work()
        _wait_for_process_0()
        return result
    _wait_for_process_0()
    return work()


def _wait_for_process_0() -> None:
    """Waits until all processes call it, which process 0 does after its work."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("process 0 is done")


def broadcast_flag(flag: bool) -> bool:
    """Returns the flag of process 0 in every process."""
    return bool(broadcast_number(int(flag)))


def broadcast_number(number: int) -> int:
    """Returns the number of process 0, below 2^31, in every process."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def check_in_process_0(check: Callable[[], None]) -> None:
    """Runs `check` in process 0.

    Raises:
      ConfigError: `check` raises it in process 0. All processes raise the same message.
    """
    refusal = ""
    if jax.process_index() == 0:
        try:
            check()
        except ConfigError as error:
            refusal = str(error)
    if jax.process_count() > 1:
        # A broadcast needs the same shape in all processes, so the text is padded with blanks.
        message = np.frombuffer(
            refusal.encode()[:_MAX_MESSAGE_BYTES].ljust(_MAX_MESSAGE_BYTES), np.uint8
        )
        # The text may have been cut within a character.
        refusal = (
            bytes(multihost_utils.broadcast_one_to_all(message)).decode(errors="ignore").strip()
        )
    require(not refusal, refusal)


def build_in_process_0_only(build: Callable[[Path], None]) -> Callable[[Path], None]:
    """Returns `build` in process 0, else a function that raises ConfigError."""
    # The others call it only if they do not find the folder that process 0 has built.
    return build if jax.process_index() == 0 else lambda folder: require_shared_cache(False, folder)


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
