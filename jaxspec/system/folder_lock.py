"""The folder of a run belongs to one process at a time."""

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
"""How a file system says that it has no locks."""


@contextlib.contextmanager
def lock_folder(folder: Path, print_line: Callable[[str], None]) -> Iterator[None]:
    """Keeps every other process out of the folder until this is left or the process dies; a file
    system without locks is reported and trusted.

    Raises:
      ConfigError: another run has the folder, and which; or the lock cannot be opened.
    """
    path = folder / "lock"
    with contextlib.ExitStack() as stack:
        # The folder as well, where that can be locked (not on NFS): somebody may remove the file,
        # and another run would make it anew.
        is_exclusive, file = stack.enter_context(_lock_descriptor(folder)), None
        try:
            file = lock_file(path, wait=False)
            is_exclusive = is_exclusive and file is not None
        except OSError as error:
            problem = f"{path} cannot be locked ({error.strerror})"
            require(
                error.errno in _UNSUPPORTED_ERRORS,
                f"{problem}; see to that, or choose another --workdir",
            )
            print_line(f"warning: {problem}; see to it that no other run uses this folder")
        conflict = f"{folder} is in use by another run: {_describe_owner(path)}"
        require(is_exclusive, f"{conflict}; wait for its end, or choose another --workdir")
        if file is not None:
            stack.enter_context(file)
            owner = {"pid": os.getpid(), "host": platform.node(), "since": utc_timestamp()}
            file.truncate(0)
            file.write(json.dumps(owner) + "\n")
            file.flush()
        yield


@contextlib.contextmanager
def _lock_descriptor(folder: Path) -> Iterator[bool]:
    """Whether no other process has the folder itself locked; it is locked here from then on, where
    the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # the lock on the file decides there
        yield True
    finally:
        os.close(descriptor)


def _describe_owner(path: Path) -> str:
    """The process that wrote its name into the lock."""
    try:
        owner = parse_json(path.read_bytes())
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        return "its process has not said which it is"
