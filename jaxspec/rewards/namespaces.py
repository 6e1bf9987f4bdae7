"""Runs Python source code in a sandbox of namespaces.

`code.py` starts this file as a script, which therefore imports nothing of jaxspec. The script
isolates its own process and then runs the source code given as an argument.

The sandbox has no network and no privileges, and shows no other processes. Python's files are
visible read-only. Folders in memory can be written to.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Flags CLONE_* of unshare(2), for kinds of namespaces.
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
# Flags MS_* of mount(2).
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
NOEXEC, NOATIME, NODIRATIME, RELATIME = 8, 1024, 2048, 1 << 21
LOCKED_FLAGS = NOSUID | NODEV | NOEXEC | NOATIME | NODIRATIME
"""Flags that a remount in a user namespace may not clear."""
DETACH = 2
"""Flag MNT_DETACH of umount2(2)."""
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
"""Paths that Python needs to run."""
DEVICES = "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"
HOME_FOLDER = "/tmp"
"""Working folder in the sandbox, held in memory."""
TMPFS_SIZE = "64m"
"""Size of all files in memory together."""
TMPFS_FILES = "10k"
"""Number of files in memory."""
NOBODY_UID = 65534
# RLIMIT_NPROC counts the processes of a user, so programs that shared one would share its limit.
FIRST_UID = 2_000_000_000
"""First user id for programs where jaxspec runs as root. Each program has its own."""


class _SystemCalls:
    """C library functions that raise OSError on failure."""

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
    """Isolates a child process, and returns in it.

    The child is cut off from the network, files and processes of the system. Either process ends
    when the other does. `root` is an empty folder to mount files on.

    Raises:
      OSError: the system does not allow it.
    """
    syscalls, parent, user = _SystemCalls(), os.getppid(), FIRST_UID + os.getpid()
    has_user_namespace = _unshare_namespaces(syscalls)
    _request_kill_with_parent(syscalls, parent)
    # A new process namespace applies to children only.
    child = os.fork()
    if child:
        # With copies of the pipes open here, their readers would not notice the child's end.
        os.closerange(0, 2**16)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) and 1)
    _mount_minimal_root(syscalls, root)
    _drop_privileges(syscalls, None if has_user_namespace else user)
    # Comes last, as a change of user clears the request. The parent is outside of the process
    # namespace, so its id is 0 here.
    _request_kill_with_parent(syscalls, 0)


def _unshare_namespaces(syscalls: _SystemCalls) -> bool:
    """Moves this process to new namespaces.

    Returns whether they include a user namespace, which only root can do without.
    """
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    user, group = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError):
        syscalls.unshare(flags)
        return False
    syscalls.unshare(flags | NEWUSER)
    # An unprivileged process may write its gid_map only after it has denied setgroups.
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY_UID} {user} 1"),
        ("gid_map", f"{NOBODY_UID} {group} 1"),
    ):
        Path(f"/proc/self/{file}").write_text(text, encoding="ascii")
    return True


def _mount_minimal_root(syscalls: _SystemCalls, root: str) -> None:
    """Replaces the root by a minimal file system.

    It is in memory, and is built at the folder `root`.
    """
    os.umask(0o022)
    # Otherwise the mounts below would also appear outside of the sandbox.
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
    # Some containers do not allow this mount. The sandbox then has no /proc.
    with contextlib.suppress(OSError):
        syscalls.mount("proc", f"{root}/proc", "proc", NOSUID | NODEV, None)
    with contextlib.suppress(OSError):
        # System V shared memory that no process is attached to escapes the memory limit.
        Path("/proc/sys/kernel/shmall").write_text("0", encoding="ascii")
    # With "." twice, the old root is stacked on the new one, and unmounting removes the old one
    # (pivot_root(2)). No folder for the old root is needed.
    os.chdir(root)
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", DETACH)
    os.chdir(HOME_FOLDER)


def _bind_mount(syscalls: _SystemCalls, source: Path, target: Path) -> None:
    """Mounts `source` at `target`, read-only unless it is a device.

    A link is copied instead. A missing `source` or an existing `target` is left alone.
    """
    # A target exists if a folder above it is already mounted.
    if not source.exists() or target.exists() or target.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # On many systems /bin and /lib are links into /usr.
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    syscalls.mount(str(source), str(target), None, BIND | REC, None)
    # A bind mount ignores MS_RDONLY. Only a remount sets it.
    if not source.is_char_device():
        # The kernel refuses a remount that clears flags of the original mount. `statvfs` reports
        # RELATIME by another number than `mount` takes.
        flags = os.statvfs(source).f_flag
        flags = flags & LOCKED_FLAGS | RELATIME * bool(flags & 4096)
        syscalls.mount(None, str(target), None, REMOUNT | BIND | RDONLY | flags, None)


def _drop_privileges(syscalls: _SystemCalls, user: int | None) -> None:
    """Drops all privileges of this process.

    The process becomes `user`, or `nobody` if that id is not mapped. With None, it is already
    mapped to `nobody`.
    """
    if user is not None:
        try:
            _set_user(user)
        except OSError:
            # A container may map only a few user ids.
            _set_user(NOBODY_UID)
    # 0x20080522 is version 3 of capabilities, which takes three sets of 64 bits.
    header, empty_sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    syscalls.capset(header, empty_sets)
    syscalls.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    # PR_SET_DUMPABLE: after the change of user, /proc/self would otherwise belong to root.
    syscalls.prctl(4, 1, 0, 0, 0)


def _set_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _request_kill_with_parent(syscalls: _SystemCalls, parent: int) -> None:
    """Requests that this process is killed when `parent` ends.

    Exits if `parent` has already ended.
    """
    syscalls.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    # The parent may have ended before the call.
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Runs source code in a sandbox.

    The command line holds an empty folder, the source code, and the arguments of that code.
    """
    root, source = sys.argv[1:3]
    # The source code finds its own arguments in `sys.argv`.
    del sys.argv[1:3]
    enter_sandbox(root)
    os.environ["HOME"] = HOME_FOLDER
    exec(compile(source, "candidate", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
