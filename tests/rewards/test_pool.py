"""The pool of workers: verdicts of a real verifier, bounded in time whatever is judged, and a
user's function that does all it should not."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.data.json_lines import extract_reference
from jaxspec.mesh import make_mesh, row_sharding
from jaxspec.rewards import scorer as scoring
from jaxspec.rewards.outcome import Outcome
from jaxspec.rewards.pool import PoolError, RewardPool
from jaxspec.rewards.scorer import RewardInputs, Scorer

SHARED = Path(__file__).parents[3] / "shared/data"
needs_data = pytest.mark.skipif(not SHARED.exists(), reason="no shared data here")
CASES = SHARED / "verifier_cases"
DEADLINE = 1.5
SLACK = 3.0
"""Seconds that a busy machine may add; on a quiet one it is less than half a second."""
EASY = [("\\frac{1}{2}", "0.5", True), ("2\\sqrt{3}", "\\sqrt{12}", True), ("x+1", "x-1", False)]
HANGS = "1", "9^{9^{9^{9}}}"


def children(parent: int) -> list[int]:
    """Processes below another, at any depth."""
    pairs = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            fields = file.read_text(encoding="utf-8").rpartition(")")[2].split()
            pairs.append((int(file.parent.name), int(fields[1])))
    below, found = [parent], []
    while below:
        at = below.pop()
        found += (nearer := [pid for pid, ppid in pairs if ppid == at])
        below += nearer
    return found


def cases(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(2, DEADLINE) as made:
        made([])
        yield made


def equal(pool: RewardPool, pairs: list[tuple[str, str]]) -> list[Any]:
    return pool([["math", reference, answer] for reference, answer in pairs])


def easy(pool: RewardPool, times: int = 1) -> bool:
    pairs = [(reference, answer) for reference, answer, _ in EASY] * times
    return equal(pool, pairs) == [verdict for _, _, verdict in EASY] * times


# ---- the verifier


def test_what_hangs_is_ended_in_time_and_the_pool_is_whole(pool: RewardPool) -> None:
    before = time.monotonic()
    assert equal(pool, [HANGS]) == [{"timeout": True}]
    assert time.monotonic() - before < DEADLINE + SLACK
    assert easy(pool)


def test_answers_keep_their_places_beside_what_hangs(pool: RewardPool) -> None:
    pairs = [(str(number), f"\\frac{{{2 * number}}}{{2}}") for number in range(20)]
    pairs[7] = HANGS
    found = equal(pool, pairs)
    assert found.pop(7) == {"timeout": True}
    assert found == [True] * 19


def test_a_worker_that_dies_is_replaced(pool: RewardPool) -> None:
    number = pool.submit_tasks([["math", *HANGS]])
    for pid in children(pool._process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    [answer] = pool.collect_answers(number)
    assert answer in ({"died": True}, {"timeout": True})
    assert easy(pool)


@pytest.mark.parametrize("how", ["thread", "asyncio"])
def test_verdicts_do_not_depend_on_where_they_are_asked_for(pool: RewardPool, how: str) -> None:
    """math-verify's own limits on time raise in any thread but the main one."""
    if how == "asyncio":

        async def ask() -> list[bool]:
            return await asyncio.gather(*(asyncio.to_thread(easy, pool) for _ in range(4)))

        assert all(asyncio.run(ask()))
        return
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(easy(pool, 5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_verdicts_are_the_same_while_jax_works_on_several_devices(pool: RewardPool) -> None:
    """A verifier called from the program raised in the threads of a mesh."""
    rows = jax.device_put(jnp.ones((64, 256)), row_sharding(make_mesh(4, 1)))
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y.T @ y), x))
    running = work(rows)
    assert easy(pool, 10)
    assert np.isfinite(np.asarray(running)).all()


def test_answers_are_taken_by_number_in_any_order(pool: RewardPool) -> None:
    first, second = pool.submit_tasks([["math", "1", "1"]]), pool.submit_tasks([["math", "1", "2"]])
    assert pool.collect_answers(second) == [False]
    assert pool.collect_answers(first) == [True]


def test_nothing_is_left_of_a_pool_however_it_ends(pool: RewardPool) -> None:
    with RewardPool(2, DEADLINE) as other:
        assert easy(other)
        below = children(other._process.pid)
        assert len(below) == 2
    assert not any(map(alive, below))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked about it does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def test_a_verifier_that_errs_is_found_out(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Canaries: or else every reward would silently be zero."""
    rows = RewardInputs([""], [r"\boxed{\sqrt{12}}"], [r"2\sqrt{3}"], [{}])
    scorer = Scorer("boxed", pool=pool, verifier="math")
    assert scorer(rows).rewards.tolist() == [1]
    sick = {"math": (*scoring.CANARIES["math"], ("2", "3", True))}
    monkeypatch.setattr(scoring, "CANARIES", sick)
    message = "math gave False for reference '2' and answer '3', not True"
    with pytest.raises(PoolError, match=message):
        Scorer("boxed", pool=pool, verifier="math")(rows)


def test_a_late_verdict_is_wrong_by_name(pool: RewardPool) -> None:
    responses = [f"\\boxed{{{HANGS[1]}}}", r"\boxed{\frac{2}{2}}", "1"]
    scores = Scorer("boxed", pool=pool, verifier="math")(
        RewardInputs(responses, responses, "111", [{}] * 3)
    )
    assert scores.outcomes.tolist() == [Outcome.TIMEOUT, Outcome.CORRECT, Outcome.NO_ANSWER]
    assert scores.rewards.tolist() == [0, 1, 0]
    assert scores.valid.all()


def test_references_that_cannot_be_read_are_found(pool: RewardPool) -> None:
    scorer = Scorer("boxed", pool=pool, verifier="math")
    assert scorer.find_unreadable_answers(["1", r"\frac{1}{2}", r"\text{}", "(3,4)"]) == [2]


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "most_wrong"),
    [("pairs.jsonl", 142, 1), ("derived_pairs.jsonl", 595, 0)],
)
def test_the_verdicts_on_cases_of_other_projects(name: str, least: int, most_wrong: int) -> None:
    """The bars as a training run scores: pairs without a convention of taste, and pairs that are
    equal or different by construction. Some take longer than `DEADLINE` on a busy machine."""
    all_cases = [case for case in cases(name) if "convention" not in case]
    given = [case["pred"] for case in all_cases]
    responses = [text if "\\boxed" in text else f"\\boxed{{{text}}}" for text in given]
    references = [extract_reference(case["gold"]) for case in all_cases]
    with RewardPool(2, 10 * DEADLINE) as pool:
        scorer = Scorer("boxed", pool=pool, verifier="math")
        scores = scorer(RewardInputs(responses, responses, references, [{}] * len(responses)))
    accepted = scores.rewards == 1
    expected = np.array([case["expected"] for case in all_cases])
    assert int(np.sum(accepted == expected)) >= least
    assert int(np.sum(accepted & ~expected)) <= most_wrong


@needs_data
@pytest.mark.slow
def test_hostile_responses_are_settled_in_time(pool: RewardPool) -> None:
    scorer = Scorer("boxed", pool=pool, verifier="math")
    for case in cases("hostile.jsonl"):
        before = time.monotonic()
        scores = scorer(RewardInputs([""], [case["response"]], [case["gold"]], [{}]))
        assert time.monotonic() - before < DEADLINE + SLACK, case["id"]
        if case["expected"] is not None:
            assert scores.rewards.tolist() == [case["expected"]], case["id"]
        assert easy(pool), case["id"]


@needs_data
@pytest.mark.slow
def test_all_solutions_of_math500_are_accepted(pool: RewardPool) -> None:
    lines = next((SHARED / "math500").glob("*.jsonl")).read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines]
    solutions = [problem["solution"] for problem in problems]
    answers = [problem["answer"] for problem in problems]
    scorer = Scorer("boxed", pool=pool, verifier="math")
    assert scorer.find_unreadable_answers(answers) == []
    scores = scorer(RewardInputs(solutions, solutions, answers, [{}] * len(answers)))
    assert len(answers) == 500
    assert np.flatnonzero(scores.rewards == 0).tolist() == []


def test_the_same_check_is_done_once(pool: RewardPool) -> None:
    """Or else one answer that hangs would hold the batch up as often as it is given."""
    before = time.monotonic()
    pairs = [HANGS, ("1", "2"), ("2", "2.0")] * 30
    assert equal(pool, pairs) == [{"timeout": True}, False, True] * 30
    assert time.monotonic() - before < DEADLINE + SLACK


@pytest.mark.slow
def test_a_batch_ends_in_time_and_the_rest_is_not_judged() -> None:
    pairs = [("1", f"9^{{9^{{9^{{{number}}}}}}}") for number in range(11, 91)]
    deadline = 0.6
    with RewardPool(2, deadline) as pool:
        assert pool([]) == []
        before = time.monotonic()
        found = equal(pool, pairs)
        most = deadline * (20 + 0.1 * len(pairs) / 2)
        assert time.monotonic() - before < most + SLACK
        late = found.count({"timeout": True})
        assert late > 4
        assert found[:late] == [{"timeout": True}] * late
        said = [answer["unjudged"] for answer in found[late:]]
        assert said == [pytest.approx(most)] * (len(pairs) - late)
        [again] = equal(pool, pairs[:1])
        assert again == {"timeout": True}


def test_the_address_space_of_this_process_is_its_own(pool: RewardPool) -> None:
    """The limit is the workers'."""
    assert easy(pool)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
