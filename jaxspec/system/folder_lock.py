"""Exclusive lock of a run's folder."""

import contextlib
import errno
import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import parse_json
from jaxspec.system.files import lock_file, utc_timestamp

_UNSUPPORTED_ERRORS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems without locks."""


@contextlib.contextmanager
def lock_folder(folder: Path, print_line: Callable[[str], None]) -> Iterator[None]:
    """Locks a run's folder within the context.

    The end of the process unlocks it, too. If the file system has no locks, only warns.

    Raises:
      ConfigError: another run uses the folder, or the lock cannot be opened.
    """
    path = folder / "lock"
    with contextlib.ExitStack() as stack:
        # The folder is locked as well as the file. Somebody may remove the file, and another run
        # would then create and lock a new one. NFS cannot lock folders.
        is_exclusive, file = stack.enter_context(_lock_folder_itself(folder)), None
        try:
            file = lock_file(path, wait=False)
            is_exclusive = is_exclusive and file is not None
        except OSError as error:
            problem = f"{path} cannot be locked ({error.strerror})"
            require(
                error.errno in _UNSUPPORTED_ERRORS,
                f"{problem}; correct this, or choose another --workdir",
            )
            print_line(f"warning: {problem}; make sure that no other run uses this folder")
        conflict = f"{folder} is in use by another run: {_describe_owner(path)}"
        require(is_exclusive, f"{conflict}; wait for its end, or choose another --workdir")
        if file is not None:
            stack.enter_context(file)
            # Another run names this process in its error message.
            owner = {"pid": os.getpid(), "host": platform.node(), "since": utc_timestamp()}
            file.truncate(0)
            file.write(json.dumps(owner) + "\n")
            file.flush()
        yield


@contextlib.contextmanager
def _lock_folder_itself(folder: Path) -> Iterator[bool]:
    """Locks the folder itself, if the file system can.

    Yields False if another process has it locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # This file system cannot lock folders, and the lock file decides.
        yield True
    finally:
        os.close(descriptor)


def _describe_owner(path: Path) -> str:
    """Describes the process that wrote the lock file."""
    try:
        owner = parse_json(path.read_bytes())
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    # The owner may be about to write the file, or it may only have locked the folder.
    except (OSError, ValueError, KeyError, TypeError):
        return "the lock file does not name its process"
