"""What process 0 of a job does, answers or refuses for all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.inputs.checked import ConfigError, require

_T = TypeVar("_T")
_MAX_MESSAGE_BYTES = 4096
"""Bytes of what process 0 tells the others."""


def run_in_process_0_first(work: Callable[[], _T]) -> _T:
    """Does `work` in process 0, then in the others, which find what it left."""
    result = work() if jax.process_index() == 0 else None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("process 0 is done")
    return work() if result is None else result


def broadcast_flag(flag: bool) -> bool:
    """What process 0 answers, in every process."""
    return bool(broadcast_number(int(flag)))


def broadcast_number(number: int) -> int:
    """The number of process 0, of 31 bits, in every process."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def check_in_process_0(check: Callable[[], None]) -> None:
    """Does `check` in process 0; what it refuses there, all processes refuse."""
    refusal = ""
    if jax.process_index() == 0:
        try:
            check()
        except ConfigError as error:
            refusal = str(error)
    if jax.process_count() > 1:
        message = np.frombuffer(
            refusal.encode()[:_MAX_MESSAGE_BYTES].ljust(_MAX_MESSAGE_BYTES), np.uint8
        )
        refusal = (
            bytes(multihost_utils.broadcast_one_to_all(message)).decode(errors="ignore").strip()
        )
    require(not refusal, refusal)


def build_in_process_0_only(build: Callable[[Path], None]) -> Callable[[Path], None]:
    """`build` in process 0; elsewhere a complaint, since what process 0 built should have been
    found."""
    return build if jax.process_index() == 0 else lambda folder: require_shared_cache(False, folder)


def require_shared_cache(is_shared: bool, folder: Path) -> None:
    """Refuses to go on where this process has not found what process 0 has made in the cache."""
    require(
        is_shared,
        f"{folder.parent} does not hold what process 0 has put there; set JAXSPEC_CACHE to a folder"
        " that all processes share",
    )
