"""Files of runs and of the cache: atomic writes, locks, digests and errors."""

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
"""Errors that mean that there is no such file."""


class SaveError(ConfigError):
    """A file could not be written. Earlier files are intact."""


class DamagedFileError(ConfigError):
    """A file is missing, or its content has changed since it was written."""

    def __init__(self, problem: str, remedy: str) -> None:
        """Takes the problem and its remedy."""
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


@contextlib.contextmanager
def explain_write_errors(
    problem: str, remedy: str, error_type: type[ConfigError] = SaveError
) -> Iterator[None]:
    """Turns an OSError into `error_type`.

    The message has the problem, the reason of the operating system, and the remedy.
    """
    try:
        yield
    except OSError as error:
        raise error_type(f"{problem}: {error.strerror or error}; {remedy}") from error


@contextlib.contextmanager
def explain_read_errors(file: Path) -> Iterator[None]:
    """Turns an OSError of reading into ConfigError.

    An example is a missing permission. Errors of an absent or damaged file are not changed.
    """
    try:
        yield
    except MISSING_FILE_ERRORS:
        raise
    except OSError as error:
        # Damaged content raises these, such as an archive whose offsets lie before its beginning.
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
    """Yields a temporary path that then replaces `file`.

    It is renamed when the context ends. If an error leaves the context, `file` stays as it was. A
    missing folder is created.

    Args:
      file: file to write.
      remedy: advice for the error message.
      shared: whether several processes may write the file at once.

    Raises:
      SaveError: the file cannot be written.
    """
    # Processes of several machines may share the folder, so a process id alone is not unique.
    temporary_file = file.with_name(
        f"{file.name}.{f'{os.uname().nodename}-{os.getpid()}.' * shared}tmp"
    )
    with explain_write_errors(f"{file} cannot be written", remedy):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary_file
            temporary_file.replace(file)
        # Also after KeyboardInterrupt, no temporary file should remain.
        except BaseException:
            with contextlib.suppress(OSError):
                temporary_file.unlink()
            raise


def write_text_atomic(file: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_replace(file) as temporary_file:
        temporary_file.write_text(text, encoding="utf-8")


def remove_path(path: Path) -> None:
    """Removes a file, link, or folder with content, if it exists."""
    # A link to a folder is removed itself, not the folder that it points to.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def hash_file(file: Path) -> str:
    """Returns the SHA-256 of a file's content.

    It is "-" if the file does not exist or is a folder.

    Raises:
      ConfigError: the file cannot be read, or is a pipe or a device.
    """
    try:
        with explain_read_errors(file):
            # Reading a pipe or a device might never end. A folder raises IsADirectoryError below.
            mode = file.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ConfigError(
                    f"{file} is not a regular file; copy its content to a regular file and name it"
                )
            with file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
    except MISSING_FILE_ERRORS:
        return "-"


def expand_user_path(path: str | Path, setting: str) -> Path:
    """Returns an absolute path with `~` expanded.

    Raises:
      ConfigError: the home directory is unknown. The message names the `setting`.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        home = Path(path).parts[0]
        raise ConfigError(
            f"{setting} is {format_value(str(path))}, and no home directory of {home} is known"
            " here; give the full path"
        ) from error


def lock_file(path: Path, *, wait: bool) -> TextIO | None:
    """Opens and locks a file.

    It is locked until it is closed or the process ends. Returns None if it is locked already,
    unless `wait`.
    """
    # Mode "a+" creates the file without clearing what its owner has written.
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def utc_timestamp() -> str:
    """Returns the current UTC time in ISO 8601 form, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def next_free_path(path: Path) -> Path:
    """Returns the path, with the first free number appended if it exists."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
