"""A user's function in the pool: whatever it does, its rows are left out, the others are judged,
and nothing of it outlives who asks."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxspec.rewards.outcome import Outcome, Scores
from jaxspec.rewards.pool import PoolError, RewardPool
from jaxspec.rewards.scorer import RewardInputs, Scorer
from tests.rewards.test_pool import SLACK, alive, children

MODULE = """
import asyncio, os, sys, time

def by_row(prompts, responses, answers, rows):
    return [float(r == a) + row["bonus"] for r, a, row in zip(responses, answers, rows)]

async def late_but_good(prompts, responses, answers, rows):
    await asyncio.sleep(0.01)
    return [(1, "correct") if r == a else (-1, "no_answer") for r, a in zip(responses, answers)]

def naughty(prompts, responses, answers, rows):
    what = responses[0]
    if what == "sleep": time.sleep(60)
    if what == "spin":
        while True: pass
    if what == "raise": raise LookupError("no such thing")
    if what == "exit": sys.exit(3)
    if what == "kill": os.kill(os.getpid(), 9)
    if what == "print":
        print("x" * 2**20); print("y" * 2**20, file=sys.stderr); os.write(1, b"z" * 2**20)
    if what == "short": return []
    if what == "text": return ["good"]
    if what == "nan": return [float("nan")]
    if what == "outcome": return [(1.0, "splendid")]
    if what == "nothing": return None
    if what == "large": return [10**400]
    if what == "beyond": return [1e300]
    if what == "array": return [(1.0, [1])]
    if what == "fork":
        if os.fork() == 0: time.sleep(0.3)
    if what == "after": time.sleep(0.6)
    return [0.25 if what == "after" else 0.5]

def writes_to_pipes(prompts, responses, answers, rows):
    what = responses[0]
    if what == "good": return [0.5]
    for name in os.listdir("/proc/self/fd"):
        try:
            if what == "closes" and int(name) > 2: os.close(int(name))
            if what == "partial": os.write(int(name), (2**20).to_bytes(4, "big") + b"x")
            if what == "a number": os.write(int(name), b"7")
            if what == "a message": os.write(int(name), b'\\0\\0\\0\\x19{"rewards":[[1,"wrong"]]}')
        except OSError: pass
    return [1.0]

calls = 0

def counts(prompts, responses, answers, rows):
    global calls
    calls += 1
    return [calls]

number = 7
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own_reward.py"
    path.write_text(MODULE, encoding="utf-8")
    return path


def judged(pool: RewardPool, responses: list[str], rows: int = 32, **columns: Any) -> Scores:
    scorer = Scorer("hash", ("function",), (1.0,), pool, rows_per_call=rows)
    return scorer(
        RewardInputs(responses, responses, ["4"] * len(responses), [columns] * len(responses))
    )


def test_a_function_of_ones_own_gets_whole_rows(file: Path) -> None:
    with RewardPool(2, 5.0, f"{file}:by_row") as pool:
        scores = judged(pool, ["4", "5", "4", "6", "4"], rows=2, bonus=0.25)
        assert scores.rewards.tolist() == [1.25, 0.25, 1.25, 0.25, 1.25]
        assert scores.valid.all()


def test_a_child_that_returns_as_well_answers_nothing(file: Path) -> None:
    with RewardPool(1, 2.0, f"{file}:naughty") as pool:
        scores = judged(pool, ["fork", "after", "good", "after"], rows=1)
    assert scores.rewards.tolist() == [0.5, 0.25, 0.5, 0.25]


def test_it_may_be_asynchronous_and_name_outcomes(file: Path) -> None:
    with RewardPool(1, 5.0, f"{file}:late_but_good") as pool:
        scores = judged(pool, ["4", "5"])
        assert scores.rewards.tolist() == [1, -1]
        assert scores.outcomes.tolist() == [Outcome.CORRECT, Outcome.NO_ANSWER]


def test_whatever_it_does_its_rows_are_left_out_and_the_others_are_not(file: Path) -> None:
    said = {
        "sleep": "exceeded reward.deadline",
        "spin": "exceeded reward.deadline",
        "raise": "LookupError: no such thing (own_reward.py, line 16)",
        "exit": "SystemExit: 3",
        "kill": "a call ended its process",
        "short": "0 rewards for 1 rows",
        "text": "the text 'good', not a number",
        "nan": "nan, which is not finite",
        "outcome": "'splendid', which is not one of",
        "nothing": "TypeError: it returned a NoneType for 1 rows",
        "large": "OverflowError",
        "beyond": "1e+300 is beyond float32",
        "array": "the outcome [1], which is not one of",
    }
    responses = [word for bad in said for word in (bad, "good")] + ["print", "fork", "after"]
    with RewardPool(2, 1.0, f"{file}:naughty") as pool:
        scores = judged(pool, responses, rows=1)
        known = [response not in said for response in responses]
        assert scores.valid.tolist() == known
        wanted = [0.5 * one for one in known[:-1]] + [0.25]
        assert scores.rewards.tolist() == wanted
        late = [Outcome(outcome) == Outcome.TIMEOUT for outcome in scores.outcomes]
        assert late == [response in ("sleep", "spin") for response in responses]
        for response, reason in said.items():
            assert reason in judged(pool, [response]).reason
        below = children(pool._process.pid)
    assert not any(map(alive, below))


def test_a_function_that_writes_to_its_pipe_is_ended(file: Path) -> None:
    """Whatever comes but an answer has the worker replaced, and the others are judged."""
    bad = ["partial", "a number", "a message", "closes"]
    responses = [word for what in bad for word in (what, "good")]
    with RewardPool(1, 5.0, f"{file}:writes_to_pipes") as pool:
        began = time.monotonic()
        scores = judged(pool, responses, rows=1)
        assert time.monotonic() - began < 5 + SLACK
        assert scores.valid.tolist() == [False, True] * len(bad)
        assert scores.rewards.tolist() == [0, 0.5] * len(bad)
        assert "wrote to the pool's connection" in scores.reason


STARTED = "pool([]); os.kill(os.getpid(), 9)"
FORKING = "time.sleep(0.3); os.kill(os.getpid(), 9)"
HALF = """
pool([])
pool.submit_tasks([["rows", ["partial"], ["partial"], [""], [{}]]] * 4)
time.sleep(1)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("workers", "function", "then"),
    [(2, "", STARTED), (400, "by_row", FORKING), (2, "writes_to_pipes", HALF)],
)
def test_nothing_outlives_who_asks(file: Path, workers: int, function: str, then: str) -> None:
    """Neither while the keeper forks, nor while a worker stops in the middle of a message."""
    where, seconds = function and f"{file}:{function}", 600 + os.getpid() / 2**22
    program = (
        "import os, time; from jaxspec.rewards.pool import RewardPool\n"
        f"pool = RewardPool({workers}, {seconds!r}, {where!r})\n{then}"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + SLACK
    while (left := with_word(str(seconds))) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def with_word(word: str) -> list[int]:
    """Processes that were started with a word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            words = (folder / "cmdline").read_bytes().split(b"\0")
            found += [int(folder.name)] * (word.encode() in words)
    return found


def test_the_same_call_is_made_each_time(file: Path) -> None:
    with RewardPool(1, 5.0, f"{file}:counts") as pool:
        assert judged(pool, ["4"] * 4, rows=1).rewards.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "own_reward.py:missing",
            "AttributeError: module 'jaxspec_own_own_reward' has no attribute 'missing'",
        ),
        ("own_reward.py:number", "number is a int, which cannot be called"),
        ("nowhere.py:reward", "FileNotFoundError"),
        ("no_such_package.rewards:reward", "ModuleNotFoundError"),
        ("own_reward", "write it as package.module:name or file.py:name"),
    ],
)
def test_a_function_that_is_not_there_is_named(file: Path, name: str, said: str) -> None:
    where = name.replace("own_reward.py", str(file)).replace("nowhere.py", f"{file.parent}/no.py")
    with RewardPool(2, 5.0, where) as pool, pytest.raises(PoolError, match=re.escape(said)):
        pool([])
