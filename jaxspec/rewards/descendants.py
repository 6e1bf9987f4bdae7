"""Processes below this one: lists, measures and ends them.

The lists come from Linux's /proc.
"""

import contextlib
import os
import re
import signal
from collections.abc import Collection, Iterable
from pathlib import Path

_MAX_KILL_ROUNDS = 1000
"""Rounds after which `end_descendants` gives up, as processes start others meanwhile."""


def end_descendants(excluded_pids: Collection[int] = ()) -> None:
    """Kills and reaps the processes below this one.

    Children in `excluded_pids` are spared, with all processes below them. Unless this process has
    called `adopt_orphans`, only its children are found.
    """
    # This process adopts the children of a killed child. So each round reaches one level deeper,
    # including processes that were forked meanwhile.
    for _ in range(_MAX_KILL_ROUNDS):
        pids = [pid for pid in list_children() if pid not in excluded_pids]
        if not pids:
            return
        killed_pids = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed_pids.append(pid)
        # Waiting for a process that could not be killed may never return.
        if not killed_pids:
            return
        for pid in killed_pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def list_children() -> list[int]:
    """Lists the processes whose parent is this one."""
    return _read_child_pids(os.getpid())


def list_descendants(pids: Iterable[int]) -> list[int]:
    """Lists the processes below `pids`, at any depth."""
    descendant_pids, pending_pids = [], [*pids]
    while pending_pids:
        child_pids = _read_child_pids(pending_pids.pop())
        descendant_pids += child_pids
        pending_pids += child_pids
    return descendant_pids


def _read_child_pids(pid: int) -> list[int]:
    child_pids: list[int] = []
    # The process or one of its threads may end while its files are read.
    with contextlib.suppress(OSError):
        # Linux lists the children of each thread separately.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            child_pids += map(int, (thread / "children").read_text().split())
    return child_pids


def measure_memory(pid: int) -> int:
    """Measures the memory of a process, in bytes.

    Swapped pages are counted, and pages of mapped files are not. A process that has ended has 0.
    """
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    # RssFile is left out: pages of libraries are shared by all processes that load them.
    sizes = re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", text, re.MULTILINE)
    return 1024 * sum(map(int, sizes))


def adopt_orphans() -> None:
    """Makes this process adopt its orphaned descendants.

    A process whose parent ends then becomes a child of this process. Does nothing on systems other
    than Linux.
    """
    _call_prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def request_parent_death_signal(number: int, parent: int) -> None:
    """Requests a signal for when the parent ends.

    The system then sends signal `number` to this process. It is sent at once if `parent` has
    already ended. On systems other than Linux, a later end sends none.
    """
    _call_prctl(1, number)  # PR_SET_PDEATHSIG
    # The parent may have ended before the call above, in which case nobody sends the signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _call_prctl(option: int, value: int) -> None:
    import ctypes

    # Systems other than Linux have no prctl.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
