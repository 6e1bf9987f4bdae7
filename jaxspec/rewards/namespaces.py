"""A sandbox of Linux namespaces, as a script that `code.py` starts: it shuts itself off, and then
runs the source that it is given, in the same process.

That process is the first of a process namespace, with its own /proc where the system allows one. It
sees Python's files, read-only, and a folder in memory, and has no network and no privileges. It
imports nothing of jaxspec.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
NOEXEC, NOATIME, NODIRATIME, RELATIME = 8, 1024, 2048, 1 << 21
KEPT = NOSUID | NODEV | NOEXEC | NOATIME | NODIRATIME
DETACH = 2
SEEN = "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", sys.base_prefix
"""What Python needs to run."""
DEVICES = "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"
HOME = "/tmp"
"""The folder in memory."""
SIZE = "64m"
"""Of all files in it together."""
FILES = "10k"
NOBODY = 65534
FIRST_USER = 2_000_000_000
"""Where jaxspec runs as root, each program has a user of its own from here on, or else the limit of
processes would be one for all of them."""


class _Linux:
    """Calls of the system that raise OSError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> None:
            given = [each.encode() if isinstance(each, str) else each for each in arguments]
            if function(*given) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"{name}: {os.strerror(number)}")

        return call


def enter(root: str) -> None:
    """Shuts this process off from the rest of the system; `root` is an empty folder.

    Returns in a child of this process, which ends with it.

    Raises:
      OSError: the system does not allow it.
    """
    linux, parent, user = _Linux(), os.getppid(), FIRST_USER + os.getpid()
    own = _unshare(linux)
    _end_with(linux, parent)
    child = os.fork()
    if child:
        os.closerange(0, 2**16)  # or else nobody would hear the child's end
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) and 1)
    _see_little(linux, root)
    _drop_privileges(linux, None if own else user)
    # The parent is outside of the namespace, and so has no number here.
    _end_with(linux, 0)


def _unshare(linux: _Linux) -> bool:
    """Leaves the namespaces of the system; returns whether the new ones belong to a new user
    namespace, which root needs none of."""
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    user, group = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError):
        linux.unshare(flags)
        return False
    linux.unshare(flags | NEWUSER)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        Path(f"/proc/self/{file}").write_text(text, encoding="ascii")
    return True


def _see_little(linux: _Linux, root: str) -> None:
    """Puts a file system in memory at `root`, with little in it, and makes it the only one."""
    os.umask(0o022)
    linux.mount("none", "/", None, REC | PRIVATE, None)
    linux.mount("tmpfs", root, "tmpfs", NOSUID | NODEV, f"mode=755,size={SIZE},nr_inodes={FILES}")
    for path in (*SEEN, *DEVICES):
        _show(linux, Path(path), Path(root + path))
    for path in ("/proc", "/dev/shm", HOME):
        Path(root + path).mkdir(parents=True, exist_ok=True)
    for path in ("/dev/shm", HOME):
        Path(root + path).chmod(0o1777)
    with contextlib.suppress(OSError):  # in some containers; then there is none
        linux.mount("proc", f"{root}/proc", "proc", NOSUID | NODEV, None)
    with contextlib.suppress(OSError):
        # Shared memory that no process is attached to would count for none.
        Path("/proc/sys/kernel/shmall").write_text("0", encoding="ascii")
    os.chdir(root)
    linux.pivot_root(".", ".")
    linux.umount2(".", DETACH)
    os.chdir(HOME)


def _show(linux: _Linux, path: Path, there: Path) -> None:
    """Has a path be seen at another, read-only unless it is a device."""
    if not path.exists() or there.exists() or there.is_symlink():
        return
    there.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        there.symlink_to(path.readlink())
        return
    if path.is_dir():
        there.mkdir()
    else:
        there.touch()
    linux.mount(str(path), str(there), None, BIND | REC, None)
    if not path.is_char_device():
        # Flags of the mount that is shown must stay. `statvfs` has another number for one of them.
        flags = os.statvfs(path).f_flag
        flags = flags & KEPT | RELATIME * bool(flags & 4096)
        linux.mount(None, str(there), None, REMOUNT | BIND | RDONLY | flags, None)


def _drop_privileges(linux: _Linux, user: int | None) -> None:
    """Leaves nothing of root in this process, which becomes a user; None: it is nobody already."""
    if user is not None:
        try:
            _become(user)
        except OSError:  # a container may know few users
            _become(NOBODY)
    version, no_set = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    linux.capset(version, no_set)
    linux.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    linux.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, or else /proc/self would be root's


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _end_with(linux: _Linux, parent: int) -> None:
    """Ends this process when its parent ends."""
    linux.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Arguments: an empty folder, a source, and its arguments."""
    root, source = sys.argv[1:3]
    del sys.argv[1:3]
    enter(root)
    os.environ["HOME"] = HOME
    exec(compile(source, "candidate", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
