"""From the command line to a config: files, scales, overrides, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec.config.cli import read_config
from jaxspec.config.settings import DraftConfig
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.inputs.checked import ConfigError
from tests.config.command_line import CONFIGS, NAMES, load, refused


def exit_message(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    return printed.out + printed.err


class TestLoad:
    def test_every_setting_is_documented_in_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            load("--config", "rl_think.py", "--help", "all")
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for key in (
            "--rollout.draft.draft_length",
            "--compare_plain, --no_compare_plain",
            "Longest response, in tokens.",
            "(default: 40)",
        ):
            assert key in text

    def test_defaults_name_and_workdir(self) -> None:
        config, name = load("--config", "rl_think.py")
        assert name == "rl_think-tiny"
        assert config == replace(
            read_config(CONFIGS / "rl_think.py")[0], workdir="runs/rl_think-tiny"
        )

    @pytest.mark.parametrize(
        "argv", [["--config", "rl_think.py:qwen3_8b"], ["--config=rl_think.py:qwen3_8b"]]
    )
    def test_scale(self, argv: list[str]) -> None:
        config, name = load(*argv)
        assert (name, config.model.layers, config.model.dtype) == (
            "rl_think-qwen3_8b",
            36,
            "bfloat16",
        )

    def test_stop_strings_are_taken_as_they_are(self) -> None:
        strings = ("\n\nProblem:", r"\n", " #", " #")
        argv = ["--config", "rl_think.py", "--rollout.stop", *strings, "--rollout.top_k", "3"]
        rollout = load(*argv)[0].rollout
        assert (rollout.stop, rollout.top_k) == (strings, 3)

    def test_overrides_on_either_side(self) -> None:
        argv = [
            "--batch.group_size",
            "32",
            "--config",
            "rl_think.py",
            "--rollout.draft.draft_length=5",
            "--workdir",
            "here",
        ]
        config, _ = load(*argv)
        assert (config.batch.group_size, config.rollout.draft.draft_length, config.workdir) == (
            32,
            5,
            "here",
        )

    def test_values_keep_their_text(self) -> None:
        argv = [
            "--data.path",
            "train.jsonl",
            "--data.instruction",
            "Answer: $X, in \\boxed{}",
            "--draft_training.learning_rate",
            "1e-5",
        ]
        config, _ = load("--config", "rl_think.py", *argv)
        assert config.data.instruction == "Answer: $X, in \\boxed{}"
        assert config.draft_training.learning_rate == 1e-5

    @pytest.mark.parametrize(
        ("flag", "compares"),
        [("--compare_plain", True), ("--no-compare-plain", False), ("--no_compare_plain", False)],
    )
    def test_booleans(self, flag: str, compares: bool) -> None:
        assert load("--config", "rl_think.py", flag)[0].compare_plain is compares

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--staged"], "--staged is now --schedule.kind"),
            (["--rollout.slice_rounds", "2"], "slice_rounds is now --schedule.slice_rounds"),
            (["--rollout.draft.vocab", "0"], "draft.vocab is now --rollout.draft.eagle3.vocab"),
            (
                ["--rollout.draft.layers", "2"],
                "is now --rollout.draft.mtp.layers or --rollout.draft.model.layers",
            ),
            (
                ["--rollout.draft.kind", "model", "--rollout.draft.layers", "2"],
                "draft.layers is now --rollout.draft.model.layers; see",
            ),
            (
                ["--rollout.draft.kind", "mtp", "--rollout.draft.no_embedding_first"],
                "is now --rollout.draft.mtp.no_embedding_first",
            ),
        ],
    )
    def test_a_renamed_setting_is_refused_with_its_new_name(
        self, words: list[str], told: str
    ) -> None:
        with pytest.raises(ConfigError, match=told):
            load("--config", "rl_think.py", *words)

    def test_looked_up_as_given_then_in_configs_then_shipped(self, elsewhere: Path) -> None:
        assert (
            load("--config", "rl_think.py")[0].steps
            == read_config(CONFIGS / "rl_think.py")[0].steps
        )
        local = (
            "from jaxspec.config.settings import Config\nSCALES = ('one',)\ndef"
            " get_config(scale):\n    return Config(steps={})\n"
        )
        (elsewhere / "configs").mkdir()
        (elsewhere / "configs" / "rl_think.py").write_text(local.format(7))
        assert load("--config", "rl_think.py")[0].steps == 7
        (elsewhere / "rl_think.py").write_text(local.format(8))
        config, name = load("--config", "rl_think.py")
        assert (config.steps, name) == (8, "rl_think-one")
        assert load("--config", str(elsewhere / "configs" / "rl_think.py:one"))[0].steps == 7

    def test_configs_travel_together(self, elsewhere: Path) -> None:
        shutil.copytree(CONFIGS, elsewhere / "copied")
        assert load("--config", "copied/draft_offline.py")[1] == "draft_offline-tiny"

    def test_kind_none(self) -> None:
        assert (
            load("--config", "rl_think.py", "--rollout.draft.kind", "none")[0].rollout.draft.kind
            == "none"
        )

    @pytest.mark.parametrize(
        ("kind", "foreign"),
        [
            (["--rollout.draft.kind", "none"], ["--rollout.draft.draft_length", "5"]),
            (["--rollout.draft.kind=none"], ["--rollout.draft.sampling=argmax"]),
            (["--rollout.draft.kind=ngram"], ["--rollout.draft.eagle3.vocab", "8"]),
            (["--rollout.draft.kind=ngram"], ["--rollout.lookup.past", "8"]),
            (["--rollout.draft.kind=history"], ["--rollout.lookup.rule", "hf"]),
            (["--rollout.draft.kind=eagle3"], ["--rollout.lookup.min_match", "3"]),
            (["--rollout.draft.kind=eagle3"], ["--rollout.draft.temperature", "0.8"]),
            (["--rollout.draft.kind=mtp"], ["--rollout.draft.eagle3.vocab=8"]),
            (["--rollout.draft.kind=eagle3"], ["--rollout.draft.mtp.no_embedding_first"]),
            (["--rollout.draft.kind=ngram"], ["--rollout.draft.path", "folder"]),
            (["--rollout.draft.kind=mtp"], ["--rollout.draft.eagle3.tap_convention=boundary"]),
            (["--rollout.draft.kind=mtp"], ["--head.norm_output"]),
            (["--rollout.draft.kind=none"], ["--head.taps", "0", "4"]),
        ],
    )
    def test_settings_foreign_to_the_kind(self, kind: list[str], foreign: list[str]) -> None:
        message = refused("--config", "rl_think.py", *kind, *foreign)
        assert message == refused(
            "--config", "rl_think.py", *kind, *(word.replace("_", "-") for word in foreign)
        )
        assert f"kind {kind[-1].split('=')[-1]}" in message
        assert foreign[0].split("=")[0].replace("no_", "") in message

    @pytest.mark.parametrize(
        ("argv", "draft"),
        [
            (["--rollout.draft.draft-length", "5"], DraftConfig(draft_length=5)),
            (["--rollout.draft.draft_length", "auto"], DraftConfig(draft_length="auto")),
            (
                ["--rollout.draft.kind", "mtp", "--rollout.draft.mtp.no_embedding_first"],
                DraftConfig(kind="mtp", mtp=MtpConfig(embedding_first=False)),
            ),
            (
                ["--rollout.draft.kind=mtp", "--rollout.draft.mtp.no-embedding-first"],
                DraftConfig(kind="mtp", mtp=MtpConfig(embedding_first=False)),
            ),
            (
                ["--rollout.draft.kind=mtp", "--rollout.draft.eagle3.vocab", "auto"],
                DraftConfig(kind="mtp"),
            ),
            (
                ["--rollout.draft.kind=none", "--rollout.draft.mtp.layers=1"],
                DraftConfig(kind="none"),
            ),
        ],
    )
    def test_every_spelling_and_neutral_values(self, argv: list[str], draft: DraftConfig) -> None:
        assert load("--config", "rl_think.py", *argv)[0].rollout.draft == draft

    def test_settings_of_the_kind(self) -> None:
        lookup = load(
            "--config",
            "rl_think.py",
            "--rollout.draft.kind",
            "ngram",
            "--rollout.lookup.min_match",
            "3",
        )[0].rollout
        assert (lookup.draft.kind, lookup.lookup.min_match, lookup.lookup_kind) == (
            "ngram",
            3,
            "ngram",
        )
        beside = load(
            "--config",
            "rl_think.py",
            "--rollout.lookup.beside",
            "history",
            "--rollout.lookup.past",
            "4",
        )[0].rollout
        assert (beside.lookup_kind, beside.past_answers) == ("history", 4)


class TestRefusals:
    def test_no_config(self) -> None:
        message = refused("--steps", "3")
        assert all(
            name in message for name in (*NAMES, "python -m jaxspec.train --config rl_think.py")
        )

    @pytest.mark.parametrize("given", ["rl_thnk.py", "rl_think", "configs/rl_thin.py:tiny"])
    def test_config_name(self, given: str) -> None:
        assert "did you mean rl_think.py?" in refused("--config", given)

    def test_scale_name(self) -> None:
        message = refused("--config", "rl_think.py:qwen3_0.6")
        assert "did you mean qwen3_0.6b?" in message
        assert "tiny" in message

    def test_key(self) -> None:
        message = refused("--config", "rl_think.py", "--rollout.draft.draf_length", "5")
        assert "did you mean --rollout.draft.draft_length" in message

    def test_value(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "eagle3" in exit_message(
            capsys, "--config", "rl_think.py", "--rollout.draft.kind", "eagle4"
        )

    def test_local_check_behind_an_override(self) -> None:
        assert refused("--config", "rl_think.py", "--batch.group_size", "1").startswith(
            "batch.group_size 1 with advantage.baseline group: an answer without others"
        )

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("steps: 60, seed: 0", "not a Python file"),
            ("x = 1", "must define SCALES and get_config"),
            (
                "SCALES = ('a',)\ndef get_config(scale):\n    return 3",
                "returns a int, not a jaxspec.config.Config",
            ),
        ],
    )
    def test_files_that_are_no_configs(self, elsewhere: Path, text: str, reason: str) -> None:
        (elsewhere / "mine.py").write_text(text)
        assert reason in refused("--config", "mine.py")

    @pytest.mark.parametrize(
        ("body", "line", "reason"),
        [
            ("return Config(steps=1.5)", 4, "steps is 1.5; it must be a whole number"),
            ("return Config(steps='4')", 4, "steps is '4'; it must be a whole number"),
            ("return Config(model=None)", 4, "model is None; it must be of type ModelConfig"),
            (
                "return Config(rollout=RolloutConfig(verify='greedy'))",
                4,
                "rollout.verify is 'greedy'; it must be one of block, token, coupled",
            ),
            (
                "return Config(rollout=RolloutConfig(banned=[3]))",
                4,
                "rollout.banned is [3]; it must be a tuple",
            ),
            (
                "return Config(stepz=3)",
                4,
                "TypeError: Config.__init__() got an unexpected keyword argument 'stepz'",
            ),
            (
                "config = Config()\n    config.steps = 3",
                5,
                "FrozenInstanceError: cannot assign to field 'steps'",
            ),
            ("return Confg()", 4, "NameError: name 'Confg' is not defined"),
            ("return 1 / 0", 4, "ZeroDivisionError: division by zero"),
            ("raise ValueError('two\\nlines')", 4, "ValueError: two lines"),
            (
                "import nothing_of_this_name",
                4,
                "ModuleNotFoundError: No module named 'nothing_of_this_name'",
            ),
            ("raise SystemExit(0)", 4, "SystemExit: 0"),
        ],
    )
    def test_files_that_raise_are_named_with_their_line(
        self, elsewhere: Path, body: str, line: int, reason: str
    ) -> None:
        head = (
            "from jaxspec.config.settings import Config, RolloutConfig\nSCALES = ('a',)\ndef"
            " get_config(scale):\n    "
        )
        (elsewhere / "mine.py").write_text(head + body)
        message = refused("--config", "mine.py")
        assert message.startswith(f"mine.py, line {line}: {reason}")
        assert len(message.splitlines()) == 1

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (
                "SCALES = 3\ndef get_config(scale): ...",
                "mine.py: SCALES is 3; it must be a tuple of names",
            ),
            (
                "SCALES = 'tiny'\ndef get_config(scale): ...",
                "mine.py: SCALES is 'tiny'; it must be a tuple of names",
            ),
            (
                "SCALES = ('a',)\ndef get_config(): ...",
                "mine.py: TypeError: get_config() takes 0 positional arguments",
            ),
            ("SCALES = ('a',)\nget_config = 3", "mine.py: TypeError: 'int' object is not callable"),
            ("import sys\n\nsys.exit()", "mine.py, line 3: SystemExit: "),
        ],
    )
    def test_files_that_raise_around_their_config(
        self, elsewhere: Path, text: str, reason: str
    ) -> None:
        (elsewhere / "mine.py").write_text(text)
        assert refused("--config", "mine.py").startswith(reason)

    def test_a_file_names_the_one_that_it_reads(self, elsewhere: Path) -> None:
        (elsewhere / "inner.py").write_text(
            "SCALES = ('a',)\ndef get_config(scale):\n    return nothing"
        )
        (elsewhere / "mine.py").write_text(
            "from pathlib import Path\nfrom jaxspec.config.cli import"
            " read_config\nread_config(Path('inner.py'))"
        )
        assert (
            refused("--config", "mine.py")
            == "mine.py, line 3: inner.py, line 3: NameError: name 'nothing' is not defined"
        )

    def test_help_without_config_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            load("--help")
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for part in (
            *NAMES,
            "Trains.",
            "Examples:",
            "--rollout.draft.kind none",
            "Batches to generate and learn from.",
        ):
            assert part in text


def test_help_whose_reader_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jaxspec.train", "--config", "rl_think.py", "--help"]
    # In a new process, where imports may print warnings.
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, cwd=CONFIGS.parent, timeout=120, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
