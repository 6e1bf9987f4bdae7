"""Pipelined runs from outside, against the fused run and against each other."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.run.batches import SAMPLE_COUNT
from tests.runs import Process, assert_same, final_arrays, launch, launch_job, lines, weights

STEPS = 8
APART: dict[str, Any] = {
    "schedule__kind": "pipelined",
    "schedule__slice_rounds": 2,
    "generation__devices": 1,
}
# So many batches that a signal comes before the last.
LONG = APART | {"schedule__lag": 1, "steps": 24}
IN_TURN = APART | {"generation__devices": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def comparable(line: dict) -> dict:
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(("time/", "pipeline/")) and not name.endswith("tokens_per_s")
    }


def assert_close(workdir: Path, other: Path) -> None:
    """Sums of other meshes round differently."""
    for line, expected in zip(lines(workdir), lines(other), strict=True):
        for name in ("reward/mean", "rollout/tokens", "status/eos", "learner/lag"):
            assert line[name] == expected[name], name
        assert comparable(line).keys() == comparable(expected).keys()
        # Micro-batches have a size on each data shard.
        same = comparable(expected).keys() - {"learner/micro_batches", "learner/packing"}
        for name in same:
            assert line[name] == pytest.approx(expected[name], rel=1e-7, abs=1e-9), name
    expected_weights = weights(final_arrays(other))
    for name, value in weights(final_arrays(workdir)).items():
        np.testing.assert_allclose(value, expected_weights[name], rtol=0, atol=1e-9, err_msg=name)


def assert_accounts_close(workdir: Path) -> None:
    """Every purpose of seconds is a metric. Tests of `Account` compare sums with a clock."""
    learner = ("train", "exposed_generation", "swap", "plan", "other")
    generator = ("idle_generate", "prepare", "data", "generate", "reward", "send")
    for line in lines(workdir):
        evaluation = line.get("time/evaluate", 0.0)
        is_last = line["step"] == STEPS - 1
        spent = sum(line[f"time/{name}"] for name in learner) + evaluation * is_last
        assert spent == pytest.approx(line["time/step"], rel=0.01)
        spent = sum(line[f"time/{name}"] for name in generator) + line["time/generator_other"]
        assert spent + evaluation * (not is_last) == pytest.approx(
            line["time/generator_step"], rel=0.01
        )


@pytest.fixture(scope="module")
def lag_1(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("lag_1")
    output = launch(cache, workdir, 2, **APART, schedule__lag=1).finish()
    assert "side by side, 1 updates apart" in output
    return workdir


@pytest.fixture(scope="module")
def long_lag_1(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("long_lag_1")
    launch(cache, workdir, 2, **LONG).finish()
    return workdir


@pytest.mark.slow
def test_without_a_lag_it_is_the_fused_run(cache: Path, tmp_path: Path) -> None:
    launch(cache, tmp_path / "fused", 1).finish()
    launch(cache, tmp_path / "apart", 2, **APART, schedule__lag=0).finish()
    assert_close(tmp_path / "apart", tmp_path / "fused")
    assert_accounts_close(tmp_path / "apart")


@pytest.mark.slow
def test_rows_lag_by_exactly_so_many_updates(lag_1: Path) -> None:
    assert [line["learner/lag"] for line in lines(lag_1)] == [min(n, 1) for n in range(STEPS)]
    assert_accounts_close(lag_1)


STALLED = """
import random, runpy, time
from jaxspec.run.pipelined.programs import PipelinedSchedule

def stall(name):
    method = getattr(PipelinedSchedule, name)

    def call(*arguments):
        time.sleep(random.random() * 0.5)
        return method(*arguments)

    setattr(PipelinedSchedule, name, call)

for name in ("learn", "pack_weights", "load", "measure"):
    stall(name)
runpy.run_module("jaxspec.train", run_name="__main__", alter_sys=True)
"""
"""A run in which both sides stall at random, differently each time."""


@pytest.mark.parametrize(
    "lag",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.sweep)],
)
def test_stalls_of_either_side_change_nothing(cache: Path, tmp_path: Path, lag: int) -> None:
    settings = APART | {"schedule__lag": lag}
    launch(cache, tmp_path / "steady", 2, **settings).finish()
    for process in launch_job(cache, tmp_path / "two", 2, program=("-c", STALLED), **settings):
        process.finish()
    launch(cache, tmp_path / "one", 2, program=("-c", STALLED), **settings).finish()
    for name in ("two", "one"):
        assert_same_run(tmp_path / name, tmp_path / "steady")
        stalled, steady = (
            sum(line["time/step"] for line in lines(tmp_path / each)) for each in (name, "steady")
        )
        assert stalled > steady + 1


@pytest.mark.slow
def test_the_policy_is_the_same_whether_its_draft_learns(
    cache: Path, lag_1: Path, tmp_path: Path
) -> None:
    frozen = APART | {"schedule__lag": 1, "draft_training__no_online": True}
    launch(cache, tmp_path / "frozen", 2, **frozen).finish()
    expected, found = weights(final_arrays(lag_1)), weights(final_arrays(tmp_path / "frozen"))
    is_policy = {name: ".policy." in name for name in expected}
    assert {True, False} == set(is_policy.values())
    for name, value in expected.items():
        assert np.array_equal(found[name], value) == is_policy[name], name


@pytest.mark.parametrize(
    "lag",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.sweep)],
)
@pytest.mark.parametrize("devices", [(2, 2), (3, 1), (1, 2), (1, 3)])
def test_splits_of_the_devices_change_only_rounding(
    cache: Path, tmp_path: Path, lag: int, devices: tuple[int, int]
) -> None:
    learners, generators = devices
    prompts = {"batch__prompts": 12} if 3 in devices else {}
    launch(cache, tmp_path / "turns", 1, **IN_TURN, schedule__lag=lag, **prompts).finish()
    split = APART | {"generation__devices": generators, "schedule__lag": lag}
    launch(cache, tmp_path / "apart", learners + generators, **split, **prompts).finish()
    assert_close(tmp_path / "apart", tmp_path / "turns")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"batch__mini_batches": 2, "batch__epochs": 2, "kl__beta": 0.01},
        {"dynamic_sampling__max_batches": 3, "eval__temperature": 0.5, "lora__rank": 2},
    ],
)
def test_other_settings_work_with_a_lag(
    cache: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    for name, placement, devices in (("apart", APART, 2), ("turns", IN_TURN, 1)):
        settings = placement | {"schedule__lag": 2, "steps": 4} | changes
        launch(cache, tmp_path / name, devices, **settings).finish()
    assert_same_run(tmp_path / "apart", tmp_path / "turns")
    assert [line["learner/lag"] for line in lines(tmp_path / "apart")] == [0, 1, 2, 2]


def end_run(
    job: list[Process],
    workdir: Path,
    rng: random.Random,
    number: int,
    members: tuple[int, ...] = (0,),
) -> None:
    """Sends a signal to some processes of a job that has learned from a few more batches."""
    count = len(lines(workdir)) + rng.randint(2, 4)
    job[0].wait_until(lambda: len(lines(workdir)) >= count)
    time.sleep(rng.random() * 0.2)
    for member in members:
        job[member].signal(number)
    start = time.monotonic()
    statuses = [process.handle.wait(timeout=60) for process in job]
    if number == signal.SIGKILL:
        assert time.monotonic() - start < 15, "the others must notice it"
    else:
        assert statuses == [128 + signal.SIGTERM] * len(job)
        assert "stopped before batch" in job[0].log.read_text()


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.sweep)]
)
def test_kills_and_stops_change_nothing(
    cache: Path, long_lag_1: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    workdir = tmp_path / "killed"
    for number in (signal.SIGKILL, signal.SIGTERM):
        end_run([launch(cache, workdir, 2, **LONG)], workdir, rng, number)
    assert "resuming" in launch(cache, workdir, 2, **LONG).finish()
    assert_same_run(workdir, long_lag_1)


def assert_same_run(workdir: Path, other: Path) -> None:
    assert_same(final_arrays(workdir), final_arrays(other))
    assert [comparable(line) for line in lines(workdir)] == [
        comparable(line) for line in lines(other)
    ]


@pytest.mark.slow
def test_a_process_for_each_side_gives_the_very_run_of_one_process(
    cache: Path, lag_1: Path, tmp_path: Path
) -> None:
    settings = APART | {"schedule__lag": 1, "no_compare_plain": False}
    for said, compared in (
        (f"rl {STEPS}/{STEPS}", "target passes a sequence"),
        (f"has all {STEPS} batches already", "decoding is compared only as a run ends"),
    ):
        learner, generator = launch_job(cache, tmp_path / "two", 2, **settings)
        output = learner.finish()
        assert said in output
        assert compared in output
        assert ("without drafts" in output) == (compared == "target passes a sequence")
        generator.finish()
        assert_same_run(tmp_path / "two", lag_1)
        assert_accounts_close(tmp_path / "two")


@pytest.mark.parametrize(
    ("processes", "generators"),
    [pytest.param(3, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.sweep)],
)
def test_several_processes_a_side_change_only_rounding(
    cache: Path, lag_1: Path, tmp_path: Path, processes: int, generators: int
) -> None:
    split = APART | {"generation__devices": generators, "schedule__lag": 1}
    for process in launch_job(cache, tmp_path / "more", processes, **split):
        process.finish()
    assert_close(tmp_path / "more", lag_1)


@pytest.mark.parametrize(
    ("processes", "ends"),
    [
        pytest.param(
            *(2, [((1,), signal.SIGKILL), ((0,), signal.SIGTERM), ((1,), signal.SIGTERM)]),
            marks=pytest.mark.slow,
        ),
        # Of two learners and two generators, as a scheduler ends them.
        pytest.param(
            *(4, [((0, 1, 2, 3), signal.SIGTERM), ((2,), signal.SIGKILL)]),
            marks=pytest.mark.slow,
        ),
        pytest.param(2, [((0,), signal.SIGKILL)] * 3, marks=pytest.mark.sweep),
    ],
)
def test_the_end_of_either_side_ends_both_and_changes_nothing(
    cache: Path, long_lag_1: Path, tmp_path: Path, processes: int, ends: list
) -> None:
    rng, workdir = random.Random(processes), tmp_path / "killed"
    settings = LONG | {"generation__devices": processes // 2}
    for members, number in ends:
        end_run(launch_job(cache, workdir, processes, **settings), workdir, rng, number, members)
    for process in launch_job(cache, workdir, processes, **settings):
        process.finish()
    if processes == 2:
        assert_same_run(workdir, long_lag_1)
    else:
        assert_close(workdir, long_lag_1)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_processes(
    cache: Path, long_lag_1: Path, tmp_path: Path
) -> None:
    """From one of each side over two of each to a single one, which has the devices of both."""
    workdir, rng = tmp_path / "moved", random.Random(0)
    for processes in (2, 4):
        job = launch_job(
            cache, workdir, processes, **LONG | {"generation__devices": processes // 2}
        )
        end_run(job, workdir, rng, signal.SIGTERM)
    assert "resuming" in launch(cache, workdir, 2, **LONG).finish()
    assert_close(workdir, long_lag_1)


@pytest.mark.slow
def test_a_batch_that_cannot_be_made_ends_both_sides_with_words(
    cache: Path, tmp_path: Path
) -> None:
    """Answers that are all the same earn the same reward."""
    settings = APART | {
        "schedule__lag": 1,
        "dynamic_sampling__max_batches": 2,
        "rollout__temperature": 0.001,
    }
    learner, generator = launch_job(cache, tmp_path / "run", 2, **settings)
    assert learner.handle.wait(timeout=300) == generator.handle.wait(timeout=60) == 1
    output = learner.log.read_text()
    assert "dynamic sampling has found no group" in output
    assert "The same command makes the same rollouts again" in output
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == SAMPLE_COUNT


@pytest.mark.slow
def test_dynamic_sampling_and_other_evaluations_work_in_processes(
    cache: Path, tmp_path: Path
) -> None:
    settings = APART | {
        "schedule__lag": 1,
        "steps": 4,
        "dynamic_sampling__max_batches": 3,
        "eval__temperature": 0.5,
    }
    for process in launch_job(cache, tmp_path / "two", 2, **settings):
        process.finish()
    launch(cache, tmp_path / "one", 2, **settings).finish()
    assert_same_run(tmp_path / "two", tmp_path / "one")
