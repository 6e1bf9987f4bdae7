"""Kills a run again and again, and looks whether it always ends as if nothing had been: `python -m
tests.campaign --kills 100 --seed 0`.

The moments and the victims come from the seed, so a campaign can be had again. Each run of it is
killed some times, is then left to its end, and must have the weights of an undisturbed one, bit by
bit, with nothing left behind: no process, and no file that the undisturbed one does not have.
"""

import argparse
import dataclasses
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.runs import (
    ROOT,
    assert_same,
    command,
    environment,
    final_arrays,
    in_background,
    lines,
)

STEPS, SAVE_EVERY = 14, 2
TINIEST = {
    "model.embed": 16,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.ffn": 32,
    "sft.steps": 0,
    "rollout.max_new_tokens": 8,
    "rollout.draft.draft_length": 2,
    "batch.prompts": 4,
    "batch.group_size": 2,
    "batch.micro_tokens": 32,
    "steps": STEPS,
    "save_every": SAVE_EVERY,
    "eval.every": 100,
}
"""Draft length and micro-batches are given: what is chosen by measured seconds may differ."""
NOTICED = 15.0
"""Seconds in which a process that has died or is stopped must be noticed."""
LIMIT = 120.0
"""Seconds after which a launch hangs."""


@dataclasses.dataclass
class Kill:
    """What was done to a run, and what came of it."""

    way: str
    moment: str
    status: int
    seconds: float
    """From the blow to the end of the last process."""
    lost: int = 0
    """Batches whose lines were written, and that were made again."""


class Launch:
    """A run in the background: one process, or some under the launcher."""

    def __init__(self, folder: Path, cache: Path, processes: int) -> None:
        self.mark, self.workdir, self.processes = uuid.uuid4().hex, folder / "run", processes
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True, parents=True)
        train = [sys.executable, "-m", "jaxspec.train"]
        together = ["bash", str(ROOT / "launch/multiprocess_cpu.sh"), str(processes)]
        variables = environment(cache, 1) | {
            "CAMPAIGN": self.mark,
            "TMPDIR": str(self.temporary),
            "DEVICES_PER_PROCESS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.log = folder / f"{self.mark}.log"
        started = train if processes == 1 else together
        arguments = [*started, *command(self.workdir, **TINIEST)]
        # `/proc` shows words and variables of a new process alone, not those of a fork.
        self.handle = in_background(arguments, variables, self.log, subprocess.Popen)

    def members(self) -> list[int]:
        """Processes of this launch that have not ended, the launcher among them."""
        mark = f"CAMPAIGN={self.mark}".encode()
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [
            pid
            for pid in numbers
            if mark in told(pid, "environ") and b") Z" not in told(pid, "stat")
        ]

    def trainers(self) -> list[int]:
        """The processes that train."""
        if self.processes == 1:
            return [self.handle.pid]
        child = re.compile(rb"\) \S %d " % self.handle.pid)
        return sorted(
            pid
            for pid in self.members()
            if child.search(told(pid, "stat")) and b"jaxspec.train" in told(pid, "cmdline")
        )

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
        """Whether it came true before the run ended, or the time."""
        deadline = time.monotonic() + seconds
        while self.handle.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.02)
        return False

    def end(self) -> tuple[int, float]:
        """Status, and seconds until the last process has ended."""
        began = time.monotonic()
        while (left := self.members()) and time.monotonic() - began < LIMIT:
            self.handle.poll()
            time.sleep(0.05)
        assert not left, f"{len(left)} processes are left\n{self.log.read_text()}"
        return self.handle.wait(), time.monotonic() - began


def told(pid: int, name: str) -> bytes:
    """What the system says of a process; nothing of one that has just ended, or is another's."""
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:
        return b""


def one_is_killed(launch: Launch, rng: random.Random) -> None:
    os.kill(rng.choice(launch.trainers()), signal.SIGKILL)


def all_are_terminated(launch: Launch, rng: random.Random) -> None:
    launch.handle.terminate()  # the launcher passes it on


def one_is_stopped(launch: Launch, rng: random.Random) -> None:
    os.kill(rng.choice(launch.trainers()), signal.SIGSTOP)


def the_launcher_is_killed(launch: Launch, rng: random.Random) -> None:
    launch.handle.kill()


def no_file_may_grow(launch: Launch, rng: random.Random) -> None:
    """Writes fail from here on, as on a full disk; the system says that the file is too large
    instead of the disk full, for which no privilege is needed."""
    for pid in launch.trainers():
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (rng.choice([1, 2000]), hard))


@dataclasses.dataclass(frozen=True)
class Way:
    """What is done, and the statuses with which the job may end then."""

    do: Callable[[Launch, random.Random], None]
    statuses: frozenset[int]
    within: float = NOTICED


WAYS = {
    # 1: the others say that one has ended; 137: the launcher was told of that one first
    "SIGKILL, one of two": Way(one_is_killed, frozenset({1, 137})),
    "SIGTERM, all of two": Way(all_are_terminated, frozenset({143})),
    # 137: the launcher kills the one that is stopped; 134: JAX has missed its heartbeats before
    "SIGSTOP, one of two": Way(one_is_stopped, frozenset({1, 134, 137}), NOTICED + 5),
    "SIGKILL, launcher": Way(the_launcher_is_killed, frozenset({-9})),
    # 0: the run had nothing more to write
    "disk full, two": Way(no_file_may_grow, frozenset({0, 1, 2, 134}), LIMIT),
}
ALONE = {
    "SIGKILL, the only one": Way(one_is_killed, frozenset({-9})),
    "SIGTERM, the only one": Way(all_are_terminated, frozenset({143})),
    "disk full, one": Way(no_file_may_grow, frozenset({0, 1, 2}), LIMIT),
}


class Campaign:
    """Runs of one or of two processes, and the undisturbed one that they must be like."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder, self.processes, self.kills = folder, processes, list[Kill]()
        self.cache, self.runs = folder / "cache", 0
        whole = self.launch(folder / "undisturbed")
        status, _ = whole.end()
        assert status == 0, whole.log.read_text()
        self.workdir = whole.workdir
        self.arrays = final_arrays(whole.workdir)

    def launch(self, folder: Path) -> Launch:
        return Launch(folder, self.cache, self.processes)

    def run(self, ways: list[str], rng: random.Random) -> None:
        """A run that is killed in these ways, one after the other, and then is left to its end."""
        folder = self.folder / f"run-{self.runs}"
        self.runs += 1
        workdir = folder / "run"
        before: Kill | None = None
        written = saved = 0
        for way in [*ways, ""]:
            launch = self.launch(folder)
            if way:
                kill, written_now = self._kill(launch, way, rng)
            else:
                kill, written_now = None, 0
                status, _ = launch.end()
                assert status == 0, launch.log.read_text()
            said = launch.log.read_text()
            # one that is ended before it could resume does not say what the one before has lost
            too_soon = kill is not None and kill.moment == "starting" and "resuming" not in said
            if before is not None and not too_soon:
                before.lost = self._lost(said, written, saved)
            assert not list(launch.temporary.iterdir()), list(launch.temporary.iterdir())
            before, written = kill, written_now
            saved = max(saves(workdir), default=0)
        assert_same(final_arrays(workdir), self.arrays)
        assert len(lines(workdir)) == STEPS
        assert names(workdir) == names(self.workdir)

    def _kill(self, launch: Launch, way: str, rng: random.Random) -> tuple[Kill, int]:
        """Lets a run go on for a while, and ends it."""
        began, done = time.time(), {**WAYS, **ALONE}[way]
        if rng.random() < 0.25:
            moment = "starting"
            launch.wait_until(lambda: bool(launch.trainers()))
            launch.wait_until(lambda: False, rng.random() * 8)
        else:
            moment = "training"
            file = launch.workdir / "metrics.jsonl"
            launch.wait_until(lambda: file.exists() and file.stat().st_mtime > began)
            launch.wait_until(lambda: False, rng.random() * 0.5)
        # one that has made all its batches may end before it notices
        expected = done.statuses | ({0} if len(lines(launch.workdir)) == STEPS else set())
        if launch.handle.poll() is None and launch.trainers():
            done.do(launch, rng)
        else:
            moment = "ended before"
        status, seconds = launch.end()
        if moment != "ended before":
            assert status in expected, f"{way}: {status}\n{launch.log.read_text()}"
            assert seconds < done.within, f"{way}: {seconds:.1f} s\n{launch.log.read_text()}"
        kill = Kill(way, moment, status, seconds)
        self.kills.append(kill)
        return kill, len(lines(launch.workdir))

    def _lost(self, said: str, written: int, saved: int) -> int:
        """Batches of which the metrics had a line, and that a resumed run makes again."""
        found = re.search(r"resuming .* at batch (\d+)", said)
        if found is None:
            assert not saved or "has all" in said, said
            return written
        # the batch before the next is generated, but not learnt from
        lost = max(0, written - int(found[1]) + 1)
        # one interval since the newest checkpoint, and one while that was being written
        assert lost <= 2 * SAVE_EVERY, (lost, said)
        return lost


def saves(workdir: Path) -> list[int]:
    folder = workdir / "checkpoints"
    found = folder.iterdir() if folder.exists() else ()
    return [int(entry.name) for entry in found if entry.name.isdigit()]


def names(workdir: Path) -> set[str]:
    """What a run has left, by name; what belongs to a start has its time in it."""
    found = {entry.name for entry in workdir.iterdir()}
    return found | {f"checkpoints/{entry.name}" for entry in (workdir / "checkpoints").iterdir()}


@contextmanager
def a_folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep


def table(kills: list[Kill]) -> str:
    rows = [
        "| what was done | times | at its start | exit status | seconds to the end of all, at most"
        " | batches made again, at most |",
        "|---|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(kill.way for kill in kills):
        some = [kill for kill in kills if kill.way == way and kill.moment != "ended before"]
        statuses = ", ".join(map(str, sorted({kill.status for kill in some})))
        rows.append(
            f"| {way} | {len(some)} | {sum(kill.moment == 'starting' for kill in some)} |"
            f" {statuses} | {max((kill.seconds for kill in some), default=0):.1f} |"
            f" {max((kill.lost for kill in some), default=0)} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with a_folder(options.folder) as folder:
        two, one = Campaign(folder / "two", 2), Campaign(folder / "one", 1)
        kills: list[Kill] = []
        while len(kills) < options.kills:
            campaign, ways = (one, ALONE) if rng.random() < 0.4 else (two, WAYS)
            campaign.run([rng.choice(list(ways)) for _ in range(5)], rng)
            kills = [kill for kill in two.kills + one.kills if kill.moment != "ended before"]
            print(f"{table(kills)}\n{len(kills)} kills survived", flush=True)


if __name__ == "__main__":
    main()
