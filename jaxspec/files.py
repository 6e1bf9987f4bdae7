"""What every file of a run or of the cache goes through: written whole or not at all, locked, digested, and named when it fails."""

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jaxspec.config import ConfigError


class SaveError(ConfigError):
    """Something could not be written to disk; what was saved before is intact."""


class Damaged(ConfigError):
    """A file that was written here does not hold any more what was written: `what` is wrong, and what can be done about it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what


@contextlib.contextmanager
def writing(what: str, remedy: str, error: type[ConfigError] = SaveError) -> Iterator[None]:
    """Turns what the operating system refuses into one message: what cannot be done, why, and the remedy."""
    try:
        yield
    except OSError as reason:
        raise error(f"{what}: {reason.strerror or reason}; {remedy}") from reason


def write_whole(file: Path, text: str) -> None:
    """Writes a text file that is complete or as it was before; one process at a time may do so.

    Raises SaveError if it cannot be written.
    """
    fresh = file.with_name(f"{file.name}.tmp")
    with writing(f"{file} cannot be written", "free some space and run the same command again"):
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)


def digest(file: Path) -> str:
    """The SHA-256 of a file's content, read piece by piece; "-" where there is no such file."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return "-"


def locked(path: Path, *, wait: bool) -> TextIO | None:
    """Opens a file and locks it; closing it, or the death of the process, unlocks. None if it is locked already, unless `wait`."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file
