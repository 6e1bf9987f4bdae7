"""The main program from outside: whole runs of a small model in processes of their own."""

import json
import random
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.runs import (
    Process,
    assert_same,
    environment,
    final_arrays,
    launch,
    lines,
    weights,
)

SCHEMA = {
    "step",
    "time/step",
    "time/data",
    "time/reward",
    "time/learning_call",
    "reward/mean",
    "reward/std",
    "advantage/max",
    "advantage/min",
    "advantage/zero",
    "ratio/kl",
    "ratio/max",
    "ratio/min",
    "optimizer/learning_rate",
    "rollout/length_ended",
    "rollout/length_max",
    "rollout/length_min",
    "rollout/prompt_length",
    "rollout/tokens_per_target_pass",
    "rollout/acceptance_length",
    "rollout/acceptance_rate",
    "rollout/acceptance_rate_3",
    "rollout/conditional_rate_3",
    "rollout/expected_acceptance_3",
    "rollout/draft_temperature_3",
    "rollout/draft_entropy_3",
    "rollout/target_entropy",
    "rollout/coverage",
    "rollout/rounds",
    "rollout/tokens",
    "rollout/tokens_per_s",
    "rollout/length_mean",
    "rollout/logprob_gap_mean",
    "rollout/logprob_gap_max",
    "status/eos",
    "status/length",
    "status/failed",
    "loss/policy",
    "loss/draft",
    "grad_norm/policy",
    "grad_norm/draft",
    "entropy",
    "learner/micro_batches",
    "learner/packing",
    "learner/lag",
}
PHASES = {"time/prepare", "time/generate", "time/train"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all runs of this file: the warm start is trained once, and each program
    compiled once."""
    return tmp_path_factory.mktemp("cache")


def comparable(line: dict) -> dict:
    return {
        name: value
        for name, value in line.items()
        if not name.startswith("time/") and not name.endswith("tokens_per_s")
    }


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("run")
    output = launch(cache, workdir, no_compare_plain=False).finish()
    assert "comparing with plain decoding" in output
    for row in (
        "reward",
        "acceptance_length",
        "held_out/avg@4",
        "tokens/s",
        "seconds by phase",
        "target passes a sequence",
        "round_cost",
    ):
        assert row in output
    told = [
        line
        for line in output.splitlines()
        if "eagle3 draft started from random weights (offline.steps 0" in line
    ]
    assert len(told) == 2, "at the start, and below the table"
    return workdir


def test_a_run_leaves_what_it_promises(undisturbed: Path) -> None:
    written = lines(undisturbed)
    assert [line["step"] for line in written] == list(range(8))
    for line in written:
        assert line.keys() >= SCHEMA
        assert line["status/eos"] + line["status/length"] == 32
        assert line["rollout/tokens_per_target_pass"] == pytest.approx(
            line["rollout/length_mean"] / line["rollout/rounds"]
        )
        assert line["rollout/acceptance_length"] == pytest.approx(
            line["rollout/tokens_per_target_pass"]
        )
        assert line["rollout/logprob_gap_max"] < 1e-9
        assert line["rollout/tokens_per_s"] == pytest.approx(
            line["rollout/tokens"] / line["time/step"]
        )
    assert [line["step"] for line in written if "eval/held_out/avg@4" in line] == [0, 4, 7]
    assert len({line["reward/mean"] for line in written}) > 1
    assert json.loads((undisturbed / "config.json").read_text())["batch"]["group_size"] == 4
    assert list((undisturbed / "tensorboard").iterdir())
    sample = json.loads((undisturbed / "samples.jsonl").read_text().splitlines()[0])
    assert sample.keys() >= {"step", "prompt", "response", "answer", "reward"}


@pytest.mark.slow
def test_a_finished_run_says_so_and_can_be_extended(
    cache: Path, undisturbed: Path, tmp_path: Path
) -> None:
    before = (undisturbed / "metrics.jsonl").read_text()
    assert "has all 8 batches already" in launch(cache, undisturbed).finish()
    assert (undisturbed / "metrics.jsonl").read_text() == before
    short = tmp_path / "short"
    launch(cache, short, steps=3).finish()
    assert f"resuming {short} at batch 3" in launch(cache, short).finish()
    assert_same(final_arrays(short), final_arrays(undisturbed))


def evaluated(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.sweep
def test_evaluations_change_nothing_in_a_run(
    cache: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """By a program of their own every third batch, or the run's every fourth: the same run, bit by
    bit. The best checkpoint is kept, and measured again it is as good."""
    kept = {"eval__every": 3, "eval__samples": 3, "eval__temperature": 0.5}
    output = launch(cache, tmp_path, **kept, eval__keep_best="held_out/pass@2").finish()
    assert "one more program for evaluations: eval.temperature 0.5, eval.samples 3" in output
    assert_same(final_arrays(tmp_path), final_arrays(undisturbed))
    best, written = json.loads((tmp_path / "best.json").read_text()), lines(tmp_path)
    found = [line.get("eval/held_out/pass@2") for line in written]
    assert [place for place, value in enumerate(found) if value is not None] == [0, 3, 6, 7]
    records = evaluated(tmp_path)
    assert [record["step"] for record in records] == [n for n in (0, 3, 6, 7) for _ in range(6)]
    assert {len(record["correct"]) for record in records} == {3}
    assert {len(record["correct"]) for record in evaluated(undisturbed)} == {4}
    (number,) = [entry.name for entry in (tmp_path / "best").iterdir() if entry.name.isdigit()]
    assert best["values"][number] == max(value for value in found if value is not None)
    again = [
        measure(cache, tmp_path / "best", tmp_path / name, eval__samples=3) for name in ("a", "b")
    ]
    assert again[0] == again[1], "two evaluations of one seed are equal"
    assert again[0]["held_out"]["pass@2"]["value"] == best["values"][number]


def measure(cache: Path, checkpoint: Path, workdir: Path, **changes: object) -> dict:
    """What `jaxspec.evaluate` finds of a checkpoint."""
    options = {"checkpoint": checkpoint, "workdir": workdir, **changes}
    words = [f"--{name.replace('__', '.')}={value}" for name, value in options.items()]
    arguments = [sys.executable, "-m", "jaxspec.evaluate", *words]
    Process(arguments, environment(cache, 2), workdir.with_suffix(".log")).finish()
    return json.loads((workdir / "results.json").read_text())


@pytest.fixture(scope="module")
def undisturbed_in_phases(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of their own round otherwise than the one of them all."""
    workdir = tmp_path_factory.mktemp("staged")
    output = launch(cache, workdir, schedule__kind="staged", schedule__slice_rounds=1).finish()
    assert "comparing with plain decoding" not in output  # --no_compare_plain
    return workdir


@pytest.mark.slow
def test_staged_gives_the_same_numbers_and_times_each_phase(
    undisturbed_in_phases: Path, undisturbed: Path
) -> None:
    for line, expected in zip(lines(undisturbed_in_phases), lines(undisturbed), strict=True):
        assert line.keys() >= PHASES or line["step"] == 0
        assert line["rollout/tokens_per_s"] == pytest.approx(
            line["rollout/tokens"] / line["time/step"]
        )
        assert line["rollout/generation_tokens_per_s"] == pytest.approx(
            line["rollout/tokens"] / line["time/generate"]
        )
        for name, value in comparable(expected).items():
            assert line[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    expected = weights(final_arrays(undisturbed))
    for name, value in weights(final_arrays(undisturbed_in_phases)).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.sweep
def test_lengths_that_rounds_choose_change_no_token(
    cache: Path, undisturbed: Path, tmp_path: Path
) -> None:
    output = launch(cache, tmp_path / "auto", rollout__draft__draft_length="auto").finish()
    table = "K=0 costs 1.00 plain steps and keeps 1.00 tokens in the mean row; K=1 costs"
    assert re.search(rf"measured in [\d.]+ s: {table}", output)
    for line, expected in zip(lines(tmp_path / "auto"), lines(undisturbed), strict=True):
        for name in ("reward/mean", "rollout/tokens", "status/eos", "status/length"):
            assert line[name] == expected[name], name
        assert line.keys() - expected.keys() >= {"rollout/acceptance_rate_5"}


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.sweep)]
)
def test_sigkill_at_a_random_moment_changes_nothing(
    cache: Path, undisturbed: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    workdir = tmp_path / "killed"
    file = workdir / "metrics.jsonl"
    # at four lines the first checkpoint exists: the second has waited for it
    for count in (rng.randint(1, 3), rng.randint(4, 6)):
        began = time.time()
        process = launch(cache, workdir)
        process.wait_until(
            lambda count=count, began=began: (
                len(lines(workdir)) >= count and file.stat().st_mtime > began
            )
        )
        time.sleep(rng.random() * 0.3)
        process.signal(signal.SIGKILL)
        process.handle.wait()
    assert "resuming" in launch(cache, workdir).finish()
    assert_same(final_arrays(workdir), final_arrays(undisturbed))
    assert [comparable(line) for line in lines(workdir)] == [
        comparable(line) for line in lines(undisturbed)
    ]


@pytest.mark.parametrize(
    "staged",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.sweep)],
)
def test_sigterm_saves_and_leaves_within_ten_seconds(
    cache: Path, tmp_path: Path, request: pytest.FixtureRequest, staged: bool
) -> None:
    alike: Path = request.getfixturevalue("undisturbed_in_phases" if staged else "undisturbed")
    workdir = tmp_path / "stopped"
    changes = {"schedule__kind": "staged", "schedule__slice_rounds": 1} if staged else {}
    output = ""
    for moment in ("while it compiles", "in its second batch"):
        process = launch(cache, workdir, **changes)
        if moment == "while it compiles":
            process.wait_until(lambda process=process: "compiling" in process.log.read_text())
        else:
            process.wait_until(lambda: len(lines(workdir)) >= 1)
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        output = process.finish(status=143)
        assert "the same command" in output
        assert time.monotonic() - began < 10
    stopped = re.search(r"stopped before batch (\d)", output)
    assert stopped, output
    assert int(stopped.group(1)) >= 1
    assert (
        f"resuming {workdir} at batch {stopped.group(1)}"
        in launch(cache, workdir, **changes).finish()
    )
    assert [comparable(line) for line in lines(workdir)] == [
        comparable(line) for line in lines(alike)
    ]
    assert_same(weights(final_arrays(workdir)), weights(final_arrays(alike)))


REFUSED = [
    ({"rollout__draft__draft_lenght": 2}, 2, ["draft_length"]),
    ({"data__path": "nowhere.jsonl", "sft__steps": 0}, 2, ["nowhere.jsonl"]),
    ({"model__vocab": 12, "mesh__tensor": 1}, 2, ["model.vocab", "12", "21"]),
    ({"mesh__data": 8, "batch__prompts": 12}, 8, ["batch.prompts 12", "8 data shards"]),
]
ALSO_REFUSED = [
    ({"data__path": "nowhere.jsonl"}, 2, ["--sft.steps 0"]),
    ({"data__tokenizer": "nowhere", "sft__steps": 0}, 2, ["nowhere", "tokenizer.json"]),
    ({"mesh__tensor": 3}, 8, ["mesh.tensor 3", "8 devices"]),
    ({"mesh__data": 8, "batch__prompts": 4}, 8, ["batch.prompts 4", "8 data shards"]),
    (
        {"rollout__draft__kind": "none", "rollout__draft__draft_length": 2},
        2,
        ["rollout.draft.kind", "draft_length"],
    ),
]


@pytest.mark.parametrize(
    ("changes", "devices", "words"),
    [*REFUSED, *(pytest.param(*case, marks=pytest.mark.sweep) for case in ALSO_REFUSED)],
)
def test_bad_input_is_one_message_and_status_two(
    cache: Path, tmp_path: Path, changes: dict, devices: int, words: list[str]
) -> None:
    output = launch(cache, tmp_path / "refused", devices=devices, **changes).finish(status=2)
    assert "Traceback" not in output
    for word in words:
        assert word in output


@pytest.mark.slow
def test_adapters_learn_beside_weights_that_stay_and_a_resumed_run_goes_on_with_them(
    cache: Path, undisturbed: Path, tmp_path: Path
) -> None:
    changes = {"lora__rank": 4, "lora__alpha": 8, "optimizer__learning_rate": 0.01}
    launch(cache, tmp_path / "whole", steps=5, **changes).finish()
    launch(cache, tmp_path / "halves", steps=3, **changes).finish()
    assert "resuming" in launch(cache, tmp_path / "halves", steps=5, **changes).finish()
    arrays, found = final_arrays(tmp_path / "whole"), lines(tmp_path / "whole")
    assert_same(final_arrays(tmp_path / "halves"), arrays)
    warm = np.load(
        next(
            file
            for file in cache.glob("*/weights.npz")
            if not file.with_name("acceptance.json").exists()
        )
    )
    for place, (name, _) in enumerate(json.loads(str(warm["index"]))):
        np.testing.assert_array_equal(
            arrays.pop(f"0.learner.policy.network.base.{name}"),
            warm[f"arr_{place}"].astype(np.float32),
            err_msg=name,
        )
    assert not any(name.startswith("0.learner.policy.network.base.") for name in arrays)
    assert all(
        arrays[f"0.learner.policy.network.adapters.{name}_proj_b.value"].all()
        for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
    assert {
        name.partition(".adapters.")[2] != ""
        for name in arrays
        if name.startswith("0.learner.policy.optimizer.1.0.mu")
    } == {True}
    assert all(line["rollout/logprob_gap_max"] < 1e-9 for line in found)
    for name, value in lines(undisturbed)[0].items():  # fresh adapters change nothing
        if name.startswith("rollout/") and name != "rollout/tokens_per_s":
            assert found[0][name] == value, name


def test_a_folder_that_cannot_be_written_is_named(cache: Path) -> None:
    assert "/proc/jaxspec" in launch(cache, Path("/proc/jaxspec")).finish(status=2)


def test_a_workdir_of_another_config_is_refused_by_its_differing_keys(
    cache: Path, undisturbed: Path
) -> None:
    before = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    output = launch(cache, undisturbed, seed=7, batch__group_size=2).finish(status=2)
    assert "seed: 0 -> 7" in output
    assert "batch.group_size: 4 -> 2" in output
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == before
