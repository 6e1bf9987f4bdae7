"""The short help has the settings that people need first."""

import re

import pytest

from jaxspec.config.as_json import flatten_settings, to_json
from jaxspec.config.cli import SHORT_HELP, load_config
from jaxspec.config.settings import Config
from jaxspec.config.unused import POLICY_SETTINGS
from jaxspec.inputs.docstrings import first_sentence
from tests.config.command_line import load


def test_the_short_help_has_what_people_need_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--config", "rl_think.py:qwen3_8b", "--batch.prompts", "3", "--help")
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 100
    assert max(len(line) for line in lines if line.startswith(("  --", " " * 6))) <= 100
    named = [line.split()[0][2:] for line in lines if line.startswith("  --")]
    used = [name for name in SHORT_HELP if name not in ("sft.steps", "offline.steps")]
    assert [name for name in named if name in used] == used
    assert {*named} - {*flatten_settings(to_json(Config()))} == {"algorithm"}
    text = " ".join(" ".join(lines).split())
    prompts = load("--config", "rl_think.py:qwen3_8b")[0].batch.prompts
    assert f"--batch.prompts Prompts per batch. (default: {prompts})" in text
    assert "Examples: python -m jaxspec.train --config rl_think.py" in text
    assert text.endswith(
        f"--help all shows all {len(flatten_settings(to_json(Config())))} settings."
    )


def test_the_short_help_leaves_out_what_a_program_has_no_use_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"], "train_sft", "Trains.", used_settings=POLICY_SETTINGS)
    text = capsys.readouterr().out
    assert "--sft.steps" in text
    assert not re.search(r"--(steps|rollout\.draft|algorithm)", text)
    with pytest.raises(SystemExit):
        load_config(["--help"], "bench drafts", "Measures.", ["rollout.draft.kind"])
    text = capsys.readouterr().out
    assert "--rollout.draft.path" in text
    assert "--rollout.draft.kind" not in text


def test_a_first_sentence_ends_before_the_next() -> None:
    assert first_sentence("Of 0.5 at most. Not more.") == "Of 0.5 at most."
    assert first_sentence("By `math`. `code` runs.") == "By `math`."
    assert first_sentence("For all (i.e. some)") == "For all (i.e. some)"
