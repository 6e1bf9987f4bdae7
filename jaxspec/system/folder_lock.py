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
from jaxspec.system.files import locked, now

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""How a file system says that it has no locks."""


@contextlib.contextmanager
def folder_lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps every other process out of the folder until this is left or the process dies; a file
    system without locks is reported and trusted.

    Raises:
      ConfigError: another run has the folder, and which; or the lock cannot be opened.
    """
    path = folder / "lock"
    with contextlib.ExitStack() as stack:
        # The folder as well, where that can be locked (not on NFS): somebody may remove the file,
        # and another run would make it anew.
        lone, file = stack.enter_context(_descriptor_lock(folder)), None
        try:
            file = locked(path, wait=False)
            lone = lone and file is not None
        except OSError as reason:
            told = f"{path} cannot be locked ({reason.strerror})"
            require(reason.errno in _NO_LOCKS, f"{told}; see to that, or choose another --workdir")
            say(f"warning: {told}; see to it that no other run uses this folder")
        in_use = f"{folder} is in use by another run: {_holder(path)}"
        require(lone, f"{in_use}; wait for its end, or choose another --workdir")
        if file is not None:
            stack.enter_context(file)
            holder = {"pid": os.getpid(), "host": platform.node(), "since": now()}
            file.truncate(0)
            file.write(json.dumps(holder) + "\n")
            file.flush()
        yield


@contextlib.contextmanager
def _descriptor_lock(folder: Path) -> Iterator[bool]:
    """Whether no other process has the folder itself locked; it is locked here from then on, where
    the file system can do that."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # the lock on the file decides there
        yield True
    finally:
        os.close(opened)


def _holder(path: Path) -> str:
    """The process that wrote its name into the lock."""
    try:
        told = parse_json(path.read_bytes())
        return f"process {told['pid']} on {told['host']}, since {told['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        return "its process has not said which it is"
