"""From the command line to a config: files, scales, overrides, and what is refused."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import pytest

from jaxspec.checked import Checked, ConfigError
from jaxspec.cli import load_config, override, read_config, settle, take_option
from jaxspec.config import Config, DraftConfig, DraftKind, LookupConfig, RolloutConfig
from jaxspec.consistency import check

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = ("draft_offline.py", "rl_think.py", "rl_zero.py")


def load(*argv: str) -> tuple[Config, str]:
    return load_config(argv, "train", "Trains.")


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def exit_message(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    return printed.out + printed.err


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestLoad:
    def test_every_setting_is_documented_in_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            load("--config", "rl_think.py", "--help")
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for key in ("--rollout.draft.draft_length", "--staged, --no_staged", "Longest response, in tokens.", "(default: 40)"):
            assert key in text

    def test_defaults_name_and_workdir(self) -> None:
        config, name = load("--config", "rl_think.py")
        assert name == "rl_think-tiny"
        assert config == replace(read_config(CONFIGS / "rl_think.py")[0], workdir="runs/rl_think-tiny")

    @pytest.mark.parametrize("argv", [["--config", "rl_think.py:qwen3_8b"], ["--config=rl_think.py:qwen3_8b"]])
    def test_scale(self, argv: list[str]) -> None:
        config, name = load(*argv)
        assert (name, config.model.layers, config.model.dtype) == ("rl_think-qwen3_8b", 36, "bfloat16")

    def test_overrides_on_either_side(self) -> None:
        argv = ["--grpo.group_size", "32", "--config", "rl_think.py", "--rollout.draft.draft_length=5", "--workdir", "here"]
        config, _ = load(*argv)
        assert (config.grpo.group_size, config.rollout.draft.draft_length, config.workdir) == (32, 5, "here")

    def test_values_keep_their_text(self) -> None:
        argv = ["--data.path", "train.jsonl", "--data.instruction", "Answer: $X, in \\boxed{}", "--draft_training.learning_rate", "1e-5"]
        config, _ = load("--config", "rl_think.py", *argv)
        assert config.data.instruction == "Answer: $X, in \\boxed{}"
        assert config.draft_training.learning_rate == 1e-5

    @pytest.mark.parametrize(("flag", "staged"), [("--staged", True), ("--no-staged", False), ("--no_staged", False)])
    def test_booleans(self, flag: str, staged: bool) -> None:
        assert load("--config", "rl_think.py", flag)[0].staged is staged

    def test_looked_up_as_given_then_in_configs_then_shipped(self, elsewhere: Path) -> None:
        assert load("--config", "rl_think.py")[0].steps == read_config(CONFIGS / "rl_think.py")[0].steps
        local = "from jaxspec.config import Config\nSCALES = ('one',)\ndef get_config(scale):\n    return Config(steps={})\n"
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
        assert load("--config", "rl_think.py", "--rollout.draft.kind", "none")[0].rollout.draft.kind == "none"

    @pytest.mark.parametrize(
        ("kind", "foreign"),
        [
            (["--rollout.draft.kind", "none"], ["--rollout.draft.draft_length", "5"]),
            (["--rollout.draft.kind=none"], ["--rollout.draft.sampling=argmax"]),
            (["--rollout.draft.kind=ngram"], ["--rollout.draft.vocab", "8"]),
            (["--rollout.draft.kind=ngram"], ["--rollout.lookup.past", "8"]),
            (["--rollout.draft.kind=history"], ["--rollout.lookup.rule", "hf"]),
            (["--rollout.draft.kind=eagle3"], ["--rollout.lookup.min_match", "3"]),
            (["--rollout.draft.kind=eagle3"], ["--rollout.draft.temperature", "0.8"]),
            (["--rollout.draft.kind=mtp"], ["--rollout.draft.vocab=8"]),
            (["--rollout.draft.kind=eagle3"], ["--rollout.draft.no_embedding_first"]),
            (["--rollout.draft.kind=ngram"], ["--rollout.draft.path", "folder"]),
            (["--rollout.draft.kind=mtp"], ["--rollout.draft.tap_convention=boundary"]),
            (["--rollout.draft.kind=mtp"], ["--head.norm_output"]),
            (["--rollout.draft.kind=none"], ["--head.taps", "0", "4"]),
        ],
    )
    def test_settings_foreign_to_the_kind(self, kind: list[str], foreign: list[str]) -> None:
        message = refused("--config", "rl_think.py", *kind, *foreign)
        assert message == refused("--config", "rl_think.py", *kind, *(word.replace("_", "-") for word in foreign))
        assert f"kind {kind[-1].split('=')[-1]}" in message
        assert foreign[0].split("=")[0].replace("no_", "") in message

    @pytest.mark.parametrize(
        ("argv", "draft"),
        [
            (["--rollout.draft.draft-length", "5"], DraftConfig(draft_length=5)),
            (["--rollout.draft.draft_length", "auto"], DraftConfig(draft_length="auto")),
            (["--rollout.draft.kind", "mtp", "--rollout.draft.no_embedding_first"], DraftConfig(kind="mtp", embedding_first=False)),
            (["--rollout.draft.kind=mtp", "--rollout.draft.no-embedding-first"], DraftConfig(kind="mtp", embedding_first=False)),
            (["--rollout.draft.kind=mtp", "--rollout.draft.vocab", "0"], DraftConfig(kind="mtp")),
            (["--rollout.draft.kind=none", "--rollout.draft.layers=1"], DraftConfig(kind="none")),
        ],
    )
    def test_every_spelling_and_neutral_values(self, argv: list[str], draft: DraftConfig) -> None:
        assert load("--config", "rl_think.py", *argv)[0].rollout.draft == draft

    def test_settings_of_the_kind(self) -> None:
        lookup = load("--config", "rl_think.py", "--rollout.draft.kind", "ngram", "--rollout.lookup.min_match", "3")[0].rollout
        assert (lookup.draft.kind, lookup.lookup.min_match, lookup.lookup_kind) == ("ngram", 3, "ngram")
        beside = load("--config", "rl_think.py", "--rollout.lookup.beside", "history", "--rollout.lookup.past", "4")[0].rollout
        assert (beside.lookup_kind, beside.past) == ("history", 4)


class TestRefusals:
    def test_no_config(self) -> None:
        message = refused("--steps", "3")
        assert all(name in message for name in (*NAMES, "python -m jaxspec.train --config rl_think.py"))

    @pytest.mark.parametrize("given", ["rl_thnk.py", "rl_think", "configs/rl_thin.py:tiny"])
    def test_config_name(self, given: str) -> None:
        assert "did you mean rl_think.py?" in refused("--config", given)

    def test_scale_name(self) -> None:
        message = refused("--config", "rl_think.py:qwen3_0.6")
        assert "did you mean qwen3_0.6b?" in message
        assert "tiny" in message

    def test_key(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--rollout.draft.draft_length" in exit_message(capsys, "--config", "rl_think.py", "--rollout.draft.draf_length", "5")

    def test_value(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "eagle3" in exit_message(capsys, "--config", "rl_think.py", "--rollout.draft.kind", "eagle4")

    def test_local_check_behind_an_override(self) -> None:
        assert refused("--config", "rl_think.py", "--grpo.group_size", "1").startswith("grpo.group_size is 1; it must be at least 2")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("steps: 60, seed: 0", "not a Python file"),
            ("x = 1", "must define SCALES and get_config"),
            ("SCALES = ('a',)\ndef get_config(scale):\n    return 3", "returns a int, not a jaxspec.config.Config"),
        ],
    )
    def test_files_that_are_no_configs(self, elsewhere: Path, text: str, reason: str) -> None:
        (elsewhere / "mine.py").write_text(text)
        assert reason in refused("--config", "mine.py")

    def test_help_without_config_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            load("--help")
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for part in (*NAMES, "Trains.", "Examples:", "--rollout.draft.kind none", "Batches to generate and learn from."):
            assert part in text


@pytest.mark.parametrize("name", NAMES)
def test_config_files(name: str) -> None:
    for scale in ("tiny", "qwen3_0.6b", "qwen3_8b"):
        config, run = read_config(CONFIGS / name, scale)
        assert run == f"{Path(name).stem}-{scale}"
        check(config if scale == "tiny" else replace(config, data=replace(config.data, path="train.jsonl")), devices=1)


@pytest.mark.parametrize(("name", "program"), list(zip(NAMES, ("train_draft", "train", "train"), strict=True)))
def test_config_files_say_how_to_run_them_and_what_to_expect_where(name: str, program: str) -> None:
    head = (CONFIGS / name).read_text().split('"""')[1]
    assert f"\n\n  python -m jaxspec.{program} --config {name}\n" in head
    assert set(re.findall(r"python -m (\S+) --config ([\w.]+)", head)) == {(f"jaxspec.{program}", name)}
    assert "\nVary: " in head
    stated = re.search(r"\nExpect \(tiny, seeds? [\d to]+,\son\s[^,:()]*\w[^,:()]*,\s(\d+\s[A-Z][a-z]+\s\d{4})\):\s", head)
    assert stated, "a machine and a date"
    datetime.strptime(" ".join(stated[1].split()), "%d %B %Y")


@dataclass(frozen=True, kw_only=True)
class Other(Checked):
    """The options of another command line."""

    rows: int = 3
    """Rows."""
    draft: DraftConfig = field(default_factory=DraftConfig)


class TestAnotherCommandLine:
    @pytest.mark.parametrize("argv", [["--file", "a", "--rows", "5"], ["--rows=5", "--file=a"]])
    def test_an_option_that_comes_first_is_taken_out(self, argv: list[str]) -> None:
        given, rest = take_option(argv, "python -m jaxspec.other", "file", "FILE")
        assert given == "a"
        assert override(Other(rows=4), rest, "other", "Does something else.") == Other(rows=5)

    def test_it_may_be_absent(self) -> None:
        assert take_option(["--rows", "5"], "other", "file", "FILE", "b") == ("b", ["--rows", "5"])

    def test_its_value_may_not(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            take_option(["--file"], "other", "file", "FILE")
        assert caught.value.code == 2
        assert "usage: other --file FILE ..." in capsys.readouterr().err

    def test_defaults_are_those_of_the_instance(self) -> None:
        default = Other(rows=7, draft=DraftConfig(kind="mtp", layers=2))
        assert override(default, ["--draft.draft_length", "5"], "other", "") == replace(
            default, draft=replace(default.draft, draft_length=5)
        )

    def test_options_may_go_without_the_name_of_their_section(self) -> None:
        with pytest.raises(ConfigError, match=r"draft\.kind ngram there is no use for --rollout\.draft\.vocab; "):
            settle(Config(rollout=RolloutConfig(draft=DraftConfig(kind="ngram", vocab=3))), ["--draft.vocab", "3"], under="rollout.")


class TestSettle:
    """What a config says for its own kind of draft, once the command line chooses another."""

    own = RolloutConfig(draft=DraftConfig(vocab=24), lookup=LookupConfig(beside="ngram"))

    @pytest.mark.parametrize(
        ("kind", "argv", "vocab", "beside"),
        [
            ("eagle3", [], 24, "ngram"),
            ("eagle3", ["--draft.kind", "eagle3"], 24, "ngram"),
            ("mtp", ["--draft.kind=mtp"], 0, "ngram"),
            ("none", ["--draft.kind=none"], 0, "none"),
            ("none", ["--draft.kind=none", "--lookup.beside", "ngram"], 0, "ngram"),  # for `check` to refuse
            ("mtp", [], 24, "ngram"),  # a config file that contradicts itself, too
        ],
    )
    def test_what_is_not_named_gives_way(self, kind: DraftKind, argv: list[str], vocab: int, beside: str) -> None:
        rollout = replace(self.own, draft=replace(self.own.draft, kind=kind))
        settled = settle(Config(rollout=rollout), argv, under="rollout.").rollout
        assert (settled.draft.kind, settled.draft.vocab, settled.lookup.beside) == (kind, vocab, beside)

    def test_what_is_named_does_not(self) -> None:
        config = Config(rollout=replace(self.own, draft=DraftConfig(kind="none", vocab=24)))
        with pytest.raises(ConfigError, match=r"kind none there is no use for --rollout\.draft\.vocab; "):
            settle(config, ["--rollout.draft.kind", "none", "--rollout.draft.vocab", "24"])
        looked_up = Config(rollout=replace(self.own, draft=DraftConfig(kind="none"), lookup=LookupConfig(beside="ngram", max_match=6)))
        with pytest.raises(ConfigError, match=r"kind none and look-up none there is no use for --rollout\.lookup\.max_match; "):
            settle(looked_up, ["--rollout.draft.kind", "none", "--rollout.lookup.max_match", "6"])


class TestVaried:
    """A program that sets the draft itself."""

    def test_settings_of_every_kind_are_taken(self) -> None:
        argv = [
            "--config",
            "rl_think.py",
            "--rollout.draft.layers",
            "2",
            "--rollout.draft.temperature",
            "0.8",
            "--rollout.lookup.past",
            "4",
        ]
        with pytest.raises(ConfigError, match="no use for"):
            load_config(argv, "bench drafts", "")
        rollout = load_config(argv, "bench drafts", "", ["rollout.verify"])[0].rollout
        assert (rollout.draft.layers, rollout.draft.temperature, rollout.lookup.past) == (2, 0.8, 4)

    def test_its_own_are_refused(self) -> None:
        argv = ["--config", "rl_think.py", "--rollout.verify=token", "--rollout.draft.kind", "mtp"]
        with pytest.raises(ConfigError, match=r"jaxspec\.bench drafts .* --rollout\.verify, --rollout\.draft\.kind .*leave it out"):
            load_config(argv, "bench drafts", "", ["rollout.verify", "rollout.draft.kind", "rollout.draft.sampling"])
