"""Options that do not exist, and the ones that were meant."""

import re

import pytest

from jaxspec.config.settings import Config
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.options import option_names, refuse_unknown_options
from tests.config.command_line import load

KNOWN = list(option_names(Config()))


def test_names_have_their_sections() -> None:
    assert {"steps", "optimizer.learning_rate", "rollout.draft.kind"} <= set(KNOWN)
    assert not {"rollout", "rollout.draft"} & set(KNOWN)


def test_known_words_are_passed_over() -> None:
    refuse_unknown_options([], KNOWN)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--grpo.learning_rate", "optimizer.learning_rate"),
        ("--learning-rate", "optimizer.learning_rate"),
        ("--train.steps=3", "steps"),
        ("--group_size", "batch.group_size"),
        ("--rollout.draft_length", "rollout.draft.draft_length"),
        ("--batch.prompt", "batch.prompts"),
        ("--rollout.max_new_token", "rollout.max_new_tokens"),
    ],
)
def test_the_remedy_can_be_followed(given: str, meant: str) -> None:
    """The option that is named first is the one that people need most, and it is taken."""
    with pytest.raises(ConfigError) as caught:
        load("--config", "rl_think.py", *(given if "=" in given else f"{given} 3").split())
    told = re.fullmatch(
        rf"there is no {given.partition('=')[0]}; did you mean --(\S+?)( or .*)?\?",
        str(caught.value),
    )
    assert told
    assert told[1] == meant
    load("--config", "rl_think.py", f"--{told[1]}", "3")


def test_words_without_likeness_lead_to_the_help() -> None:
    with pytest.raises(ConfigError, match=r"no --wandb.entity; --help all lists all options"):
        load("--config", "rl_think.py", "--wandb.entity", "us")


def test_values_of_no_option_are_named() -> None:
    with pytest.raises(ConfigError, match="'4' is given to no option"):
        load("--config", "rl_think.py", "--steps", "3", "4")
