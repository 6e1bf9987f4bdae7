"""The configs that are shipped, and the commands that are shown to users, can be run."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from jaxspec.config.check import check
from jaxspec.config.cli import read_config
from jaxspec.config.settings import ResolvedConfig
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


@pytest.mark.parametrize("name", NAMES)
def test_config_files(name: str) -> None:
    for scale in ("tiny", "qwen3_0.6b", "qwen3_8b"):
        config, run = read_config(CONFIGS / name, scale)
        assert run == f"{Path(name).stem}-{scale}"
        if scale != "tiny":
            config = replace(config, data=replace(config.data, path="train.jsonl"))
        check(ResolvedConfig.of(config), devices=1)


@pytest.mark.parametrize("scale", ["qwen3_0.6b", "qwen3_8b"])
def test_a_base_model_gets_no_chat_template(scale: str) -> None:
    zero, _ = read_config(CONFIGS / "rl_zero.py", scale)
    think, _ = read_config(CONFIGS / "rl_think.py", scale)
    assert "{problem}" in zero.data.prompt_format
    assert think.data.prompt_format == "chat"


@pytest.mark.parametrize(
    ("name", "program"), list(zip(NAMES, ("train_draft", "train", "train"), strict=True))
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
