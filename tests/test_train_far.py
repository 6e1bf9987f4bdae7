"""The main program across processes, over real text, and where it cannot go on."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import free_port
from tests.runs import (
    ROOT,
    Process,
    command,
    environment,
    final_arrays,
    launch,
    lines,
    printed,
    weights,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all runs of this file: the warm start is trained once, and each program
    compiled once."""
    return tmp_path_factory.mktemp("cache")


def together(cache: Path, workdir: Path, devices: int, **changes: object) -> str:
    """A run of two processes of so many devices each."""
    script = str(ROOT / "launch" / "multiprocess_cpu.sh")
    words = ["bash", script, "2", *command(workdir, **({"no_compare_plain": False} | changes))]
    variables = environment(cache, devices) | {
        "DEVICES_PER_PROCESS": str(devices),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return printed(words, variables, ROOT, timeout=900)


EIGHT_DEVICES = {
    "mesh__tensor": 2,
    "mesh__shard_above": 0,
    # all processes find the first run's draft
    "offline__steps": 20,
    "offline__samples": 128,
    "offline__rows": 32,
    # groups change shards on their way into a batch
    "dynamic_sampling__max_batches": 4,
    "dynamic_sampling__surplus": "carry",
}


@pytest.mark.slow
def test_two_processes_of_four_devices_match_one_of_eight(cache: Path, tmp_path: Path) -> None:
    changes = EIGHT_DEVICES | {"steps": 3, "no_compare_plain": True}
    launch(cache, tmp_path / "one", devices=8, **changes).finish()
    together(cache, tmp_path / "two", 4, **changes)
    for line, expected in zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True):
        assert line["reward/mean"] == expected["reward/mean"]
        assert line["rollout/tokens"] == expected["rollout/tokens"]
        assert line["rollout/rounds"] == expected["rollout/rounds"]
        for name in ("rollouts", "groups", "carried", "dropped"):
            name = f"dynamic_sampling/{name}"
            assert line[name] == expected[name], name
    expected = weights(final_arrays(tmp_path / "one"))
    for name, value in weights(final_arrays(tmp_path / "two")).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.sweep
def test_two_processes_draft_lengths_that_one_of_them_measured(cache: Path, tmp_path: Path) -> None:
    """Seconds of one process choose the lengths of both; coupled tokens are the same whatever they
    are."""
    changes = EIGHT_DEVICES | {"steps": 1}
    launch(cache, tmp_path / "one", **changes).finish()
    # a device for each is enough, and rounds are timed on it in half the time
    auto = {"rollout__draft__draft_length": "auto"}
    assert "K=5 costs" in together(cache, tmp_path / "auto", 1, **(changes | auto))
    assert (
        lines(tmp_path / "auto")[0]["rollout/tokens"]
        == lines(tmp_path / "one")[0]["rollout/tokens"]
    )


KEEPS_AT_ONCE = """
import runpy, sys
from jaxspec.preparation import policy
policy.KEEP_SECONDS = policy.KEEP_COST = 0.0
sys.argv[0] = "train"
runpy.run_module("jaxspec.train", run_name="__main__")
"""
"""The main program, which keeps the draft after every update."""


@pytest.mark.sweep
def test_processes_train_the_draft_together_and_go_on_after_a_kill(
    cache: Path, tmp_path: Path
) -> None:
    """Two of one device each sample the same answers as one of two devices, and end in the same
    weights, of which each has a part."""
    changes = {
        "steps": 1,
        "mesh__shard_above": 0,
        "rollout__draft__vocab": 16,
        "offline__steps": 60,
        "offline__samples": 64,
        "offline__rows": 16,
    }
    before = {*cache.glob("*/acceptance.json")}
    launch(cache, tmp_path / "one", **changes).finish()
    (reached,) = {*cache.glob("*/acceptance.json")} - before
    expected = reached.parent.rename(tmp_path / "draft")
    coordinator, started = f"127.0.0.1:{free_port()}", list[Process]()
    for number in range(2):
        place = {
            "JAXSPEC_COORDINATOR": coordinator,
            "JAXSPEC_PROCESSES": "2",
            "JAXSPEC_PROCESS_ID": str(number),
        }
        words = [sys.executable, "-c", KEEPS_AT_ONCE, *command(tmp_path / "two", **changes)]
        log = tmp_path / f"{number}.log"
        started.append(Process(words, environment(cache, 1) | place, log))
    partial = cache / f"{reached.parent.name}.partial"
    started[0].wait_until(lambda: (partial / "learner.npz").exists())
    for process in started:
        process.signal(signal.SIGKILL)
        process.handle.wait()
    said = together(cache, tmp_path / "two", 1, no_compare_plain=True, **changes)
    assert said.count("no draft in the cache") == 1
    assert re.search(r"going on at step \d+ of 60", said)
    assert said.count("draft 60/60") == 1
    assert reached.read_text() == (expected / "acceptance.json").read_text()
    with np.load(reached.parent / "weights.npz") as found, np.load(expected / "weights.npz") as one:
        assert found.files == one.files
        for name in found.files:
            np.testing.assert_array_equal(found[name], one[name], err_msg=name)
    assert not partial.exists()


@pytest.mark.sweep
def test_past_answers_follow_their_problems_to_other_processes(cache: Path, tmp_path: Path) -> None:
    """There are some 50 problems, so that batches from the seventh on ask again what processes have
    answered that are not the ones who ask, or are gone."""
    changes = {"rollout__draft__kind": "history", "save_every": 100}
    launch(cache, tmp_path / "one", steps=12, **changes).finish()
    together(cache, tmp_path / "more", 1, steps=7, no_compare_plain=True, **changes)
    launch(cache, tmp_path / "more", steps=9, **changes).finish()
    said = together(cache, tmp_path / "more", 1, steps=12, **changes)
    assert "comparing with plain decoding" in said
    found, expected = lines(tmp_path / "more"), lines(tmp_path / "one")
    for name in ("rollout/tokens", "rollout/rounds", "rollout/acceptance_length"):
        assert [line[name] for line in found] == [line[name] for line in expected], name
    kept = [line["rollout/acceptance_length"] for line in found]
    assert min(kept[-4:]) > max(kept[:4])  # they are looked through


@pytest.mark.slow
def test_three_updates_that_are_not_finite_end_the_run_with_what_to_look_at(
    cache: Path, tmp_path: Path
) -> None:
    # Values grow by 1e15 with each weight on their way: the second product of attention is beyond
    # float32.
    large = {
        "model__dtype": "float32",
        "optimizer__learning_rate": 1e15,
        "optimizer__warmup_steps": 0,
    }
    output = launch(cache, tmp_path / "diverged", **large).finish(status=1)
    assert "not finite in 3 updates in a row" in output
    assert "grad_norm/policy" in output
    assert "Traceback" not in output
    assert [line["skipped_in_row/policy"] for line in lines(tmp_path / "diverged")][-3:] == [
        1,
        2,
        3,
    ]


@pytest.mark.sweep
def test_programs_of_a_model_are_run(cache: Path, tmp_path: Path) -> None:
    """A warm start on right programs of one step gets some of them right; all are judged."""
    task = {
        "data__task": "programs",
        "data__answer_style": "code",
        "data__max_prompt_length": 7,
        "rollout__max_new_tokens": 35,
        "reward__verifier": "code",
        "reward__run_code": True,
    }
    model = {"model__vocab": 40, "model__dtype": "float32", "sft__wrong_steps": 0.0}
    launch(cache, tmp_path / "programs", devices=1, **task, **model, steps=2).finish()
    found = lines(tmp_path / "programs")
    assert len(found) == 2
    for line in found:
        assert line["reward/mean"] > 0.2
        assert line["reward/timeout"] == line["reward/error"] == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT.parent / "shared/data/gsm8k/train.jsonl").exists(),
    reason="needs GSM8K and Qwen3's tokenizer beside the checkout",
)
def test_real_text_from_random_weights_to_a_folder_and_on_from_there(
    cache: Path, tmp_path: Path
) -> None:
    """Runs, resumes, leaves as a Hugging Face folder, and goes on from that: policy, draft and
    tokenizer are the folder's."""
    data = ROOT.parent / "shared/data"
    narrow = {
        "model.layers": 4,
        "model.embed": 32,
        "model.heads": 2,
        "model.kv_heads": 2,
        "model.head_size": 16,
        "model.ffn": 64,
    }
    batch = {
        "batch.prompts": 2,
        "batch.group_size": 2,
        "rollout.max_new_tokens": 16,
        "data.max_prompt_length": 96,
        "data.eval_prompts": 2,
        "offline.steps": 0,  # the scale's training of the draft takes minutes
    }
    real = {"data.path": data / "gsm8k/train.jsonl", "data.tokenizer": data / "qwen_tokenizer"}

    def launched(*words: str) -> str:
        return Process(
            [sys.executable, "-m", *words],
            # a vocabulary of 151,936 takes longer to run than to compile
            environment(cache, 1) | {"XLA_FLAGS": ""},
            cache / f"{time.monotonic_ns()}.log",
        ).finish()

    def run(name: str, steps: int, settings: dict[str, Any], *more: str) -> str:
        flags = {
            "workdir": tmp_path / name,
            **batch,
            "data.path": real["data.path"],
            **settings,
            "steps": steps,
        }
        words = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
        more = ("--rollout.engine.no_tail", "--no_compare_plain", *more)
        return launched(
            "jaxspec.train",
            "--config",
            str(ROOT / "configs/rl_think.py") + ":qwen3_0.6b",
            *words,
            *more,
        )

    assert "problems left out" in run("text", 1, narrow | real)
    assert "resuming" in run("text", 2, narrow | real)
    assert [line["step"] for line in lines(tmp_path / "text")] == [0, 1]
    assert all(line["status/eos"] + line["status/length"] == 4 for line in lines(tmp_path / "text"))
    sample = json.loads((tmp_path / "text/samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("<|im_start|>user\n")
    assert sample["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "\\boxed{}" in sample["prompt"]
    out = tmp_path / "out"
    assert f"is in {out}" in launched(
        "jaxspec.export", "--checkpoint", str(tmp_path / "text"), "--out", str(out)
    )
    arrays, weights = final_arrays(tmp_path / "text"), load_file(out / "model.safetensors")
    np.testing.assert_array_equal(
        weights["model.embed_tokens.weight"], arrays["0.learner.policy.network.embedding.value"]
    )
    folders = {
        "model.path": out,
        "rollout.draft.path": out / "draft",
        "optimizer.learning_rate": 1e-30,
    }
    said = run("again", 2, folders, "--rollout.no_enable_thinking")
    assert "warning: the draft agrees with the policy in" in said  # neither has learnt anything
    assert [line["step"] for line in lines(tmp_path / "again")] == [0, 1]
    again = json.loads((tmp_path / "again/samples.jsonl").read_text().splitlines()[0])
    assert again["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    launched(
        "jaxspec.export", "--checkpoint", str(tmp_path / "again"), "--out", str(tmp_path / "last")
    )
    last = load_file(tmp_path / "last/model.safetensors")
    for name, array in weights.items():  # weights that hardly learn come back as they were
        np.testing.assert_allclose(last[name], array, rtol=1e-5, atol=1e-7, err_msg=name)
