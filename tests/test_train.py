"""The main program from outside: whole runs of a small model in processes of their own."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent

SMALL = {
    "model.layers": 4,
    "model.embed": 32,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.head_size": 8,
    "model.ffn": 64,
    "model.vocab": 24,
    "model.dtype": "float64",
    "sft.steps": 100,
    "sft.rows": 32,
    "offline.steps": 0,
    "data.digits": 1,
    "data.max_prompt_length": 6,
    "data.eval_prompts": 6,
    "rollout.max_new_tokens": 16,
    "rollout.verify": "coupled",
    "grpo.prompts": 8,
    "grpo.group_size": 4,
    "grpo.learning_rate": 0.001,
    "steps": 8,
    "save_every": 2,
    "eval_every": 4,
}
SCHEMA = {
    "step",
    "time/step",
    "time/data",
    "time/reward",
    "reward/mean",
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
}
PHASES = {"time/prepare", "time/generate", "time/logprob", "time/train", "time/draft"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all runs of this file: the warm start is trained once, and each program compiled once."""
    return tmp_path_factory.mktemp("cache")


def command(workdir: Path, **changes: object) -> list[str]:
    settings = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value)) if value is not True]
    flags += [f"--{name}" for name, value in settings.items() if value is True]
    return ["--config", str(ROOT / "configs" / "rl_think.py"), "--workdir", str(workdir), *flags]


def environment(cache: Path, devices: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {"JAXSPEC_CACHE": str(cache), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}


class Process:
    """A run in the background, with what it has printed so far."""

    def __init__(self, arguments: list[str], variables: dict[str, str], log: Path):
        self.log = log
        with log.open("w") as file:
            self.handle = subprocess.Popen(
                arguments, env=variables, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not condition() and self.handle.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        os.killpg(self.handle.pid, number)

    def finish(self, status: int = 0) -> str:
        self.handle.wait(timeout=400)
        output = self.log.read_text()
        assert self.handle.returncode == status, output
        return output


def launch(cache: Path, workdir: Path, devices: int = 2, **changes: object) -> Process:
    arguments = [sys.executable, "-m", "jaxspec.train", *command(workdir, **changes)]
    return Process(arguments, environment(cache, devices), cache / f"{time.monotonic_ns()}.log")


def lines(workdir: Path) -> list[dict]:
    file = workdir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def final_arrays(workdir: Path) -> dict[str, np.ndarray]:
    """What the newest checkpoint holds, read without the package."""
    newest = max((folder for folder in (workdir / "checkpoints").iterdir() if folder.name.isdigit()), key=lambda folder: int(folder.name))
    with ocp.StandardCheckpointer() as reader:
        path = (newest / "arrays").absolute()
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # whatever mesh it was saved from
        stored = reader.metadata(path).item_metadata.tree
        target = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here) for name, leaf in stored.items()}
        restored = reader.restore(path, target)
    return {name: np.asarray(value) for name, value in restored.items()}


def weights(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in arrays.items() if ".network." in name}


def assert_same(arrays: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == others.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


def comparable(line: dict) -> dict:
    return {name: value for name, value in line.items() if not name.startswith("time/") and name != "rollout/tokens_per_s"}


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("run")
    output = launch(cache, workdir).finish()
    for row in (
        "reward",
        "acceptance_length",
        "held-out exact match",
        "tokens/s",
        "seconds by phase",
        "target passes a sequence",
        "round_cost",
    ):
        assert row in output
    return workdir


def test_a_run_leaves_what_it_promises(undisturbed: Path) -> None:
    written = lines(undisturbed)
    assert [line["step"] for line in written] == list(range(8))
    for line in written:
        assert line.keys() >= SCHEMA
        assert line["status/eos"] + line["status/length"] == 32
        assert line["rollout/tokens_per_target_pass"] == pytest.approx(line["rollout/length_mean"] / line["rollout/rounds"])
        assert line["rollout/acceptance_length"] == pytest.approx(line["rollout/tokens_per_target_pass"])
        assert line["rollout/logprob_gap_max"] < 1e-9
    assert [line["step"] for line in written if "eval/exact_match" in line] == [0, 4, 7]
    assert len({line["reward/mean"] for line in written}) > 1
    assert json.loads((undisturbed / "config.json").read_text())["grpo"]["group_size"] == 4
    assert list((undisturbed / "tensorboard").iterdir())
    sample = json.loads((undisturbed / "samples.jsonl").read_text().splitlines()[0])
    assert sample.keys() >= {"step", "prompt", "response", "answer", "reward"}


@pytest.mark.slow
def test_a_finished_run_says_so_and_can_be_extended(cache: Path, undisturbed: Path, tmp_path: Path) -> None:
    before = (undisturbed / "metrics.jsonl").read_text()
    assert "has all 8 batches already" in launch(cache, undisturbed).finish()
    assert (undisturbed / "metrics.jsonl").read_text() == before
    short = tmp_path / "short"
    launch(cache, short, steps=3).finish()
    assert f"resuming {short} at batch 3" in launch(cache, short).finish()
    assert_same(final_arrays(short), final_arrays(undisturbed))


@pytest.mark.slow
def test_staged_gives_the_same_numbers_and_times_each_phase(cache: Path, undisturbed: Path, tmp_path: Path) -> None:
    launch(cache, tmp_path / "staged", staged=True).finish()
    for line, expected in zip(lines(tmp_path / "staged"), lines(undisturbed), strict=True):
        assert line.keys() >= PHASES or line["step"] == 0
        for name, value in comparable(expected).items():
            assert line[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    expected = weights(final_arrays(undisturbed))
    for name, value in weights(final_arrays(tmp_path / "staged")).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_sigkill_at_a_random_moment_changes_nothing(cache: Path, undisturbed: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    workdir = tmp_path / "killed"
    file = workdir / "metrics.jsonl"
    for count in (rng.randint(1, 3), rng.randint(4, 6)):  # at four lines the first checkpoint exists: the second has waited for it
        began = time.time()
        process = launch(cache, workdir)
        process.wait_until(lambda count=count, began=began: len(lines(workdir)) >= count and file.stat().st_mtime > began)
        time.sleep(rng.random() * 0.3)
        process.signal(signal.SIGKILL)
        process.handle.wait()
    assert "resuming" in launch(cache, workdir).finish()
    assert_same(final_arrays(workdir), final_arrays(undisturbed))
    assert [comparable(line) for line in lines(workdir)] == [comparable(line) for line in lines(undisturbed)]


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True])
def test_sigterm_saves_and_leaves_within_ten_seconds(cache: Path, undisturbed: Path, tmp_path: Path, staged: bool) -> None:
    workdir = tmp_path / "stopped"
    changes = {"staged": True, "rollout__slice_rounds": 1} if staged else {}
    output = ""
    for moment in ("while it compiles", "in its second batch"):
        process = launch(cache, workdir, **changes)
        if moment == "while it compiles":
            process.wait_until(lambda process=process: "compiling" in process.log.read_text())
        else:
            process.wait_until(lambda: len(lines(workdir)) >= 1)
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        output = process.finish()
        assert "the same command" in output
        assert time.monotonic() - began < 10
    stopped = re.search(r"stopped before batch (\d)", output)
    assert stopped, output
    assert int(stopped.group(1)) >= 1
    assert f"resuming {workdir} at batch {stopped.group(1)}" in launch(cache, workdir, **changes).finish()
    assert [comparable(line) for line in lines(workdir)] == [comparable(line) for line in lines(undisturbed)]
    assert_same(weights(final_arrays(workdir)), weights(final_arrays(undisturbed)))


@pytest.mark.slow
def test_two_processes_of_four_devices_match_one_of_eight(cache: Path, tmp_path: Path) -> None:
    offline = {"offline__steps": 20, "offline__samples": 128, "offline__rows": 32}  # both processes find the first run's draft
    changes = {"mesh__tensor": 2, "mesh__shard_above": 0, "steps": 3, **offline}
    launch(cache, tmp_path / "one", devices=8, **changes).finish()
    script = ["bash", str(ROOT / "launch" / "multiprocess_cpu.sh"), "2", *command(tmp_path / "two", **changes)]
    variables = environment(cache, 4) | {"DEVICES_PER_PROCESS": "4", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    output = subprocess.run(script, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert output.returncode == 0, output.stdout + output.stderr
    for line, expected in zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True):
        assert line["reward/mean"] == expected["reward/mean"]
        assert line["rollout/tokens"] == expected["rollout/tokens"]
        assert line["rollout/rounds"] == expected["rollout/rounds"]
    expected = weights(final_arrays(tmp_path / "one"))
    for name, value in weights(final_arrays(tmp_path / "two")).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


REFUSED = [
    ({"rollout__draft__draft_lenght": 2}, 2, ["draft_length"]),
    ({"data__path": "nowhere.jsonl", "sft__steps": 0}, 2, ["nowhere.jsonl"]),
    ({"model__vocab": 12, "mesh__tensor": 1}, 2, ["model.vocab", "12", "21"]),
    ({"mesh__data": 8, "grpo__prompts": 12}, 8, ["grpo.prompts 12", "8 data shards"]),
]
ALSO_REFUSED = [
    ({"data__path": "nowhere.jsonl"}, 2, ["--sft.steps 0"]),
    ({"data__tokenizer": "nowhere", "sft__steps": 0}, 2, ["nowhere", "tokenizer.json"]),
    ({"mesh__tensor": 3}, 8, ["mesh.tensor 3", "8 devices"]),
    ({"mesh__data": 8, "grpo__prompts": 4}, 8, ["grpo.prompts 4", "8 data shards"]),
    ({"rollout__draft__kind": "none", "rollout__draft__draft_length": 2}, 2, ["rollout.draft.kind", "draft_length"]),
]


@pytest.mark.parametrize(
    ("changes", "devices", "words"), [*REFUSED, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALSO_REFUSED)]
)
def test_bad_input_is_one_message_and_status_two(cache: Path, tmp_path: Path, changes: dict, devices: int, words: list[str]) -> None:
    output = launch(cache, tmp_path / "refused", devices=devices, **changes).finish(status=2)
    assert "Traceback" not in output
    for word in words:
        assert word in output


@pytest.mark.slow
def test_adapters_learn_beside_weights_that_stay_and_a_resumed_run_goes_on_with_them(
    cache: Path, undisturbed: Path, tmp_path: Path
) -> None:
    changes = {"lora__rank": 4, "lora__alpha": 8, "grpo__learning_rate": 0.01}
    launch(cache, tmp_path / "whole", steps=5, **changes).finish()
    launch(cache, tmp_path / "halves", steps=3, **changes).finish()
    assert "resuming" in launch(cache, tmp_path / "halves", steps=5, **changes).finish()
    arrays, found = final_arrays(tmp_path / "whole"), lines(tmp_path / "whole")
    assert_same(final_arrays(tmp_path / "halves"), arrays)
    warm = np.load(next(file for file in cache.glob("*/weights.npz") if not file.with_name("acceptance.json").exists()))
    for place, (name, _) in enumerate(json.loads(str(warm["index"]))):
        np.testing.assert_array_equal(arrays.pop(f"0.policy.network.base.{name}"), warm[f"arr_{place}"].astype(np.float32), err_msg=name)
    assert not any(name.startswith("0.policy.network.base.") for name in arrays)
    assert all(arrays[f"0.policy.network.adapters.{name}_proj_b.value"].all() for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert {name.partition(".adapters.")[2] != "" for name in arrays if name.startswith("0.policy.optimizer.1.0.mu")} == {True}
    assert all(line["rollout/logprob_gap_max"] < 1e-9 for line in found)
    for name, value in lines(undisturbed)[0].items():  # fresh adapters change nothing
        if name.startswith("rollout/") and name != "rollout/tokens_per_s":
            assert found[0][name] == value, name


@pytest.mark.slow
def test_three_updates_that_are_not_finite_end_the_run_with_what_to_look_at(cache: Path, tmp_path: Path) -> None:
    output = launch(cache, tmp_path / "diverged", grpo__learning_rate=1e200, grpo__warmup_steps=0).finish(status=1)
    assert "not finite in 3 updates in a row" in output
    assert "grad_norm/policy" in output
    assert "Traceback" not in output
    assert [line["skipped_in_row/policy"] for line in lines(tmp_path / "diverged")][-3:] == [1, 2, 3]


def test_a_folder_that_cannot_be_written_is_named(cache: Path) -> None:
    assert "/proc/jaxspec" in launch(cache, Path("/proc/jaxspec")).finish(status=2)


def test_a_workdir_of_another_config_is_refused_by_its_differing_keys(cache: Path, undisturbed: Path) -> None:
    before = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    output = launch(cache, undisturbed, seed=7, grpo__group_size=2).finish(status=2)
    assert "seed: 0 -> 7" in output
    assert "grpo.group_size: 4 -> 2" in output
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == before


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT.parent / "shared/data/gsm8k/train.jsonl").exists(), reason="needs GSM8K and Qwen3's tokenizer beside the checkout"
)
def test_real_text_from_random_weights_to_a_folder_and_on_from_there(cache: Path, tmp_path: Path) -> None:
    """Runs, resumes, leaves as a Hugging Face folder, and goes on from that: policy, draft and tokenizer are the folder's."""
    data = ROOT.parent / "shared/data"
    narrow = {"model.layers": 4, "model.embed": 32, "model.heads": 2, "model.kv_heads": 2, "model.head_size": 16, "model.ffn": 64}
    batch = {"grpo.prompts": 2, "grpo.group_size": 2, "rollout.max_new_tokens": 16, "data.max_prompt_length": 96, "data.eval_prompts": 2}
    real = {"data.path": data / "gsm8k/train.jsonl", "data.tokenizer": data / "qwen_tokenizer"}

    def launched(*words: str) -> str:
        return Process([sys.executable, "-m", *words], environment(cache, 1), cache / f"{time.monotonic_ns()}.log").finish()

    def run(name: str, steps: int, settings: dict[str, Any], *more: str) -> str:
        flags = {"workdir": tmp_path / name, **batch, "data.path": real["data.path"], **settings, "steps": steps}
        words = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
        return launched("jaxspec.train", "--config", str(ROOT / "configs/rl_think.py") + ":qwen3_0.6b", *words, *more)

    assert "problems left out" in run("text", 1, narrow | real)
    assert "resuming" in run("text", 2, narrow | real)
    assert [line["step"] for line in lines(tmp_path / "text")] == [0, 1]
    assert all(line["status/eos"] + line["status/length"] == 4 for line in lines(tmp_path / "text"))
    sample = json.loads((tmp_path / "text/samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("<|im_start|>user\n")
    assert sample["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "\\boxed{}" in sample["prompt"]
    out = tmp_path / "out"
    assert f"is in {out}" in launched("jaxspec.export", "--checkpoint", str(tmp_path / "text"), "--out", str(out))
    arrays, weights = final_arrays(tmp_path / "text"), load_file(out / "model.safetensors")
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], arrays["0.policy.network.embedding.value"])
    folders = {"model.path": out, "rollout.draft.path": out / "draft", "grpo.learning_rate": 1e-30}
    said = run("again", 2, folders, "--rollout.no_enable_thinking")
    assert "warning: the draft agrees with the policy in" in said  # neither has learnt anything
    assert [line["step"] for line in lines(tmp_path / "again")] == [0, 1]
    again = json.loads((tmp_path / "again/samples.jsonl").read_text().splitlines()[0])
    assert again["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    launched("jaxspec.export", "--checkpoint", str(tmp_path / "again"), "--out", str(tmp_path / "last"))
    last = load_file(tmp_path / "last/model.safetensors")
    for name, array in weights.items():  # weights that hardly learn come back as they were
        np.testing.assert_allclose(last[name], array, rtol=1e-5, atol=1e-7, err_msg=name)
