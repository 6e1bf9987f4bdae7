"""What every file of a run or of the cache goes through: written whole or not at all, locked,
digested, and named when it fails."""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.json_keys import format_value

MISSING_FILE_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""What is raised where there is no such file."""


class SaveError(ConfigError):
    """Something could not be written to disk; what was saved before is intact."""


class DamagedFileError(ConfigError):
    """A file that was written here does not hold any more what was written: `problem` is wrong, and
    what can be done about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


@contextlib.contextmanager
def explain_write_errors(
    problem: str, remedy: str, error_type: type[ConfigError] = SaveError
) -> Iterator[None]:
    """Turns what the operating system refuses into one message: what cannot be done, why, and the
    remedy."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{problem}: {error.strerror or error}; {remedy}") from error


@contextlib.contextmanager
def explain_read_errors(file: Path) -> Iterator[None]:
    """Turns into ConfigError what the operating system refuses, for want of a right, say; what an
    absent or damaged file raises stays."""
    try:
        yield
    except MISSING_FILE_ERRORS:
        raise
    except OSError as error:
        # such as a jump before the beginning, where a damaged archive says so
        if error.errno in (None, errno.EINVAL):
            raise
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; see to that and run the same command again"
        ) from error


@contextlib.contextmanager
def atomic_replace(
    file: Path,
    remedy: str = "free some space and run the same command again",
    *,
    shared: bool = False,
) -> Iterator[Path]:
    """Gives a path to write to, which in the end takes the place of `file`: that is complete or as
    it was before.

    Its folder is made if it is absent. One process at a time may do so, unless it is `shared`.

    Raises:
      SaveError: the file cannot be written.
    """
    temporary_file = file.with_name(
        f"{file.name}.{f'{os.uname().nodename}-{os.getpid()}.' * shared}tmp"
    )
    with explain_write_errors(f"{file} cannot be written", remedy):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary_file
            temporary_file.replace(file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary_file.unlink()
            raise


def write_text_atomic(file: Path, text: str) -> None:
    """Writes a text file as `atomic_replace` does."""
    with atomic_replace(file) as temporary_file:
        temporary_file.write_text(text, encoding="utf-8")


def remove_path(path: Path) -> None:
    """Removes what is at a path: a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def hash_file(file: Path) -> str:
    """The SHA-256 of a file's content, read piece by piece; "-" where there is no such file.

    Raises:
      ConfigError: it cannot be read, or it is something that would never end, such as a pipe or a
        device.
    """
    try:
        with explain_read_errors(file):
            mode = file.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ConfigError(
                    f"{file} is not a regular file; copy what it gives to one, and name that"
                )
            with file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
    except MISSING_FILE_ERRORS:
        return "-"


def expand_user_path(path: str | Path, setting: str) -> Path:
    """An absolute path, with `~` and `~USER` as home directories.

    Raises:
      ConfigError: there is no such home; the `setting` is named.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        home = Path(path).parts[0]
        raise ConfigError(
            f"{setting} is {format_value(str(path))}, and no home directory of {home} is known"
            " here; give the whole path"
        ) from error


def lock_file(path: Path, *, wait: bool) -> TextIO | None:
    """Opens a file and locks it; closing it, or the death of the process, unlocks. None if it is
    locked already, unless `wait`."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def utc_timestamp() -> str:
    """The time in UTC, as it is written into files."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
