"""The configs that are shipped, and the commands that are shown to users, can be run."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from jaxspec.config.check import check_config
from jaxspec.config.cli import read_config
from jaxspec.config.settings import ResolvedConfig
from jaxspec.config.split import check_meshes
from tests.config.command_line import CONFIGS, NAMES, load


def test_commands_that_are_shown_to_users_are_taken(repository: Path) -> None:
    shown = [
        repository / "README.md",
        *(CONFIGS / name for name in NAMES),
        repository / "jaxspec" / "config" / "cli.py",
    ]
    text = "\n".join(file.read_text().replace("\\\n", " ") for file in shown)
    found = re.findall(
        r"^\s*(?:\.venv/bin/)?(?:python -m jaxspec\.\w+|train|\{command\}) (--config [^#({\n]*)",
        text,
        re.MULTILINE,
    )
    commands = [command.replace("...", "").split() for command in found if "--help" not in command]
    assert len(commands) >= 12
    for words in commands:
        load(*words)


SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")
SMALL = ("smollm2_135m",)
LARGER = ("qwen3_30b_a3b", "qwen3_235b_a22b")


@pytest.mark.parametrize("name", NAMES)
def test_config_files(name: str) -> None:
    scales = runpy.run_path(str(CONFIGS / name))["SCALES"]
    larger = LARGER if name in ("rl_think.py", "rl_zero.py") else ()
    larger = ("qwen3_8b_async", *larger) if name == "rl_think.py" else larger
    small = SMALL if name == "rl_think.py" else ()
    assert scales == (*SCALES[:1], *small, *SCALES[1:], *larger)
    for scale in scales:
        config, run = read_config(CONFIGS / name, scale)
        assert run == f"{Path(name).stem}-{scale}"
        if scale != "tiny":
            config = replace(config, data=replace(config.data, path="train.jsonl"))
        check_config(ResolvedConfig.from_config(config), devices=1)


def test_the_asynchronous_scale_fits_four_nodes_that_learn_and_twelve_that_generate() -> None:
    config, _ = read_config(CONFIGS / "rl_think.py", "qwen3_8b_async")
    config = replace(config, data=replace(config.data, path="train.jsonl"))
    shapes = check_meshes(ResolvedConfig.from_config(config), devices=64, processes=16)
    assert (shapes.learner, shapes.generator) == ((16, 1, 1), (48, 1, 1))
    assert ResolvedConfig.from_config(config).resolved_loss.importance == "tis"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", SCALES[1:])
def test_a_draft_is_trained_in_domain_and_loads_as_it_is_where_that_is_asked(
    name: str, scale: str
) -> None:
    argv = ["--config", f"{name}:{scale}", "--model.path", "policy", "--data.path", "problems"]
    config, _ = load(*argv, "--rollout.draft.path", "head")
    assert config.offline.steps > 0
    assert config.offline.text == ""  # on the policy's own answers
    config, _ = load(*argv, "--rollout.draft.path", "head", "--offline.steps", "0")
    assert config.offline.steps == 0


@pytest.mark.parametrize(
    ("name", "column", "tokens"),
    [
        ("rl_think.py", "prompt", 16_384),
        ("rl_zero.py", "prompt", 8192),
        ("dapo.py", "prompt", 22_528),
        ("rl_code.py", "text", 4608),
    ],
)
def test_what_headers_say_of_the_largest_common_scale(name: str, column: str, tokens: int) -> None:
    config, _ = read_config(CONFIGS / name, "qwen3_8b")
    assert config.data.prompt_column == column
    assert config.data.max_prompt_length + config.rollout.max_new_tokens == tokens
    assert config.draft_training.online == (name not in ("rl_think.py", "rl_zero.py"))
    assert config.rollout.draft.eagle3.vocab == 32_000


def test_dapo_is_what_was_published() -> None:
    config, _ = read_config(CONFIGS / "dapo.py", "qwen3_8b")
    batch, overlong = config.batch, config.overlong
    assert (batch.prompts, batch.group_size, batch.epochs) == (512, 16, 1)
    assert batch.prompts * batch.group_size // batch.mini_batches == 512  # answers an update
    assert config.optimizer.warmup_steps == 20 * batch.mini_batches
    assert config.rollout.max_new_tokens == 16_384 + 4096
    assert overlong.buffer * config.rollout.max_new_tokens == 4096
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.aggregation) == (
        *(0.2, 0.28),
        "token",
    )
    assert config.kl.beta == 0
    assert config.dynamic_sampling.max_batches == 10
    # Right, wrong, wrong and 0.3 into the buffer: with its 1 and -1 and a penalty of up to 1, the
    # same advantages.
    ours = np.array([1.0, 0.0, -0.3 * overlong.penalty])
    theirs = np.array([1.0, -1.0, -1.0 - 0.3])
    np.testing.assert_allclose(
        (ours - ours.mean()) / ours.std(), (theirs - theirs.mean()) / theirs.std()
    )


@pytest.mark.parametrize("scale", SCALES[1:])
def test_a_base_model_gets_no_chat_template(scale: str) -> None:
    zero, _ = read_config(CONFIGS / "rl_zero.py", scale)
    think, _ = read_config(CONFIGS / "rl_think.py", scale)
    assert "{problem}" in zero.data.prompt_format
    assert think.data.prompt_format == "chat"


@pytest.mark.parametrize(
    ("name", "program"),
    [(name, "train_draft" if name == "draft_offline.py" else "train") for name in NAMES],
)
def test_config_files_say_how_to_run_them_and_what_to_expect_where(name: str, program: str) -> None:
    head = (CONFIGS / name).read_text().split('"""')[1]
    assert f"\n\n  python -m jaxspec.{program} --config {name}\n" in head
    assert set(re.findall(r"python -m (\S+) --config ([\w.]+)", head)) == {
        (f"jaxspec.{program}", name)
    }
    assert "\nVary: " in head
    stated = re.search(
        r"\nExpect \(tiny, seeds? [\d"
        r" to]+,\son\s[^,:()]*\w[^,:()]*,\s(\d+\s[A-Z][a-z]+\s\d{4})\):\s",
        head,
    )
    assert stated, "a machine and a date"
    datetime.strptime(" ".join(stated[1].split()), "%d %B %Y")
