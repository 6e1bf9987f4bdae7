"""What process 0 of a job does, answers or refuses for all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.inputs.checked import ConfigError, require

_T = TypeVar("_T")
_LONGEST_MESSAGE = 4096
"""Bytes of what process 0 tells the others."""


def process_0_first(work: Callable[[], _T]) -> _T:
    """Does `work` in process 0, then in the others, which find what it left."""
    result = work() if jax.process_index() == 0 else None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("process 0 is done")
    return work() if result is None else result


def agreed_by_process_0(answer: bool) -> bool:
    """What process 0 answers, in every process."""
    return bool(told_by_process_0(int(answer)))


def told_by_process_0(number: int) -> int:
    """The number of process 0, of 31 bits, in every process."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def refused_by_all(look: Callable[[], None]) -> None:
    """Does `look` in process 0; what it refuses there, all processes refuse."""
    told = ""
    if jax.process_index() == 0:
        try:
            look()
        except ConfigError as reason:
            told = str(reason)
    if jax.process_count() > 1:
        sent = np.frombuffer(told.encode()[:_LONGEST_MESSAGE].ljust(_LONGEST_MESSAGE), np.uint8)
        told = bytes(multihost_utils.broadcast_one_to_all(sent)).decode(errors="ignore").strip()
    require(not told, told)


def in_process_0(build: Callable[[Path], None]) -> Callable[[Path], None]:
    """`build` in process 0; elsewhere a complaint, since what process 0 built should have been
    found."""
    return build if jax.process_index() == 0 else lambda folder: require_shared(False, folder)


def require_shared(found: bool, folder: Path) -> None:
    """Refuses to go on where this process has not found what process 0 has made in the cache."""
    require(
        found,
        f"{folder.parent} does not hold what process 0 has put there; set JAXSPEC_CACHE to a folder"
        " that all processes share",
    )
