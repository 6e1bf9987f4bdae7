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
LOCKED_FLAGS = NOSUID | NODEV | NOEXEC | NOATIME | NODIRATIME
DETACH = 2
VISIBLE_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    sys.base_prefix,
)
"""What Python needs to run."""
DEVICES = "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"
HOME_FOLDER = "/tmp"
"""The folder in memory."""
TMPFS_SIZE = "64m"
"""Of all files in it together."""
TMPFS_FILES = "10k"
NOBODY_UID = 65534
FIRST_UID = 2_000_000_000
"""Where jaxspec runs as root, each program has a user of its own from here on, or else the limit of
processes would be one for all of them."""


class _SystemCalls:
    """Calls of the system that raise OSError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call_checked(*arguments: Any) -> None:
            encoded_arguments = [
                argument.encode() if isinstance(argument, str) else argument
                for argument in arguments
            ]
            if function(*encoded_arguments) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"{name}: {os.strerror(number)}")

        return call_checked


def enter_sandbox(root: str) -> None:
    """Shuts this process off from the rest of the system; `root` is an empty folder.

    Returns in a child of this process, which ends with it.

    Raises:
      OSError: the system does not allow it.
    """
    syscalls, parent, user = _SystemCalls(), os.getppid(), FIRST_UID + os.getpid()
    has_user_namespace = _unshare_namespaces(syscalls)
    _end_with_parent(syscalls, parent)
    child = os.fork()
    if child:
        os.closerange(0, 2**16)  # or else nobody would hear the child's end
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) and 1)
    _mount_minimal_root(syscalls, root)
    _drop_privileges(syscalls, None if has_user_namespace else user)
    # The parent is outside of the namespace, and so has no number here.
    _end_with_parent(syscalls, 0)


def _unshare_namespaces(syscalls: _SystemCalls) -> bool:
    """Leaves the namespaces of the system; returns whether the new ones belong to a new user
    namespace, which root needs none of."""
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    user, group = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError):
        syscalls.unshare(flags)
        return False
    syscalls.unshare(flags | NEWUSER)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY_UID} {user} 1"),
        ("gid_map", f"{NOBODY_UID} {group} 1"),
    ):
        Path(f"/proc/self/{file}").write_text(text, encoding="ascii")
    return True


def _mount_minimal_root(syscalls: _SystemCalls, root: str) -> None:
    """Puts a file system in memory at `root`, with little in it, and makes it the only one."""
    os.umask(0o022)
    syscalls.mount("none", "/", None, REC | PRIVATE, None)
    syscalls.mount(
        "tmpfs",
        root,
        "tmpfs",
        NOSUID | NODEV,
        f"mode=755,size={TMPFS_SIZE},nr_inodes={TMPFS_FILES}",
    )
    for path in (*VISIBLE_PATHS, *DEVICES):
        _bind_mount(syscalls, Path(path), Path(root + path))
    for path in ("/proc", "/dev/shm", HOME_FOLDER):
        Path(root + path).mkdir(parents=True, exist_ok=True)
    for path in ("/dev/shm", HOME_FOLDER):
        Path(root + path).chmod(0o1777)
    with contextlib.suppress(OSError):  # in some containers; then there is none
        syscalls.mount("proc", f"{root}/proc", "proc", NOSUID | NODEV, None)
    with contextlib.suppress(OSError):
        # Shared memory that no process is attached to would count for none.
        Path("/proc/sys/kernel/shmall").write_text("0", encoding="ascii")
    os.chdir(root)
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", DETACH)
    os.chdir(HOME_FOLDER)


def _bind_mount(syscalls: _SystemCalls, source: Path, target: Path) -> None:
    """Has a path be seen at another, read-only unless it is a device."""
    if not source.exists() or target.exists() or target.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    syscalls.mount(str(source), str(target), None, BIND | REC, None)
    if not source.is_char_device():
        # Flags of the mount that is shown must stay. `statvfs` has another number for one of them.
        flags = os.statvfs(source).f_flag
        flags = flags & LOCKED_FLAGS | RELATIME * bool(flags & 4096)
        syscalls.mount(None, str(target), None, REMOUNT | BIND | RDONLY | flags, None)


def _drop_privileges(syscalls: _SystemCalls, user: int | None) -> None:
    """Leaves nothing of root in this process, which becomes a user; None: it is nobody already."""
    if user is not None:
        try:
            _set_user(user)
        except OSError:  # a container may know few users
            _set_user(NOBODY_UID)
    header, empty_sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    syscalls.capset(header, empty_sets)
    syscalls.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    syscalls.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, or else /proc/self would be root's


def _set_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _end_with_parent(syscalls: _SystemCalls, parent: int) -> None:
    """Ends this process when its parent ends."""
    syscalls.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Arguments: an empty folder, a source, and its arguments."""
    root, source = sys.argv[1:3]
    del sys.argv[1:3]
    enter_sandbox(root)
    os.environ["HOME"] = HOME_FOLDER
    exec(compile(source, "candidate", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
