"""Command lines of programs with settings of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from jaxspec.config.cli import override_settings, settle_draft_settings, take_option
from jaxspec.config.settings import Config, DraftConfig, RolloutConfig
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.inputs.checked import CheckedConfig, ConfigError


@dataclass(frozen=True, kw_only=True)
class Other(CheckedConfig):
    """The options of another command line."""

    rows: int = 3
    """Rows."""
    draft: DraftConfig = field(default_factory=DraftConfig)


class TestAnotherCommandLine:
    @pytest.mark.parametrize("argv", [["--file", "a", "--rows", "5"], ["--rows=5", "--file=a"]])
    def test_an_option_that_comes_first_is_taken_out(self, argv: list[str]) -> None:
        given, rest = take_option(argv, "python -m jaxspec.other", "file", "FILE")
        assert given == "a"
        assert override_settings(Other(rows=4), rest, "other", "Another.") == Other(rows=5)

    def test_it_may_be_absent(self) -> None:
        assert take_option(["--rows", "5"], "other", "file", "FILE", "b") == ("b", ["--rows", "5"])

    def test_its_value_may_not(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            take_option(["--file"], "other", "file", "FILE")
        assert caught.value.code == 2
        assert "usage: other --file FILE ..." in capsys.readouterr().err

    def test_defaults_are_those_of_the_instance(self) -> None:
        default = Other(rows=7, draft=DraftConfig(kind="mtp", mtp=MtpConfig(layers=2)))
        assert override_settings(default, ["--draft.draft_length", "5"], "other", "") == replace(
            default, draft=replace(default.draft, draft_length=5)
        )

    def test_options_may_go_without_the_name_of_their_section(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"draft\.kind ngram there is no use for --rollout\.draft\.eagle3\.vocab; ",
        ):
            settle_draft_settings(
                Config(
                    rollout=RolloutConfig(
                        draft=DraftConfig(kind="ngram", eagle3=Eagle3Config(vocab=3))
                    )
                ),
                ["--draft.eagle3.vocab", "3"],
                prefix="rollout.",
            )
