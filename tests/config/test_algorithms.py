"""Algorithms by name: what they set, what stays, what is set beside them, and what is refused."""

from __future__ import annotations

import pytest

from jaxspec.build import build_step
from jaxspec.config.algorithms import ALGORITHMS, described, remarks, with_algorithm
from jaxspec.config.as_json import flat, to_json
from jaxspec.config.cli import load_config
from jaxspec.config.settings import Config, LossConfig, ResolvedConfig
from jaxspec.inputs.checked import ConfigError
from tests.config.command_line import load, refused
from tests.conftest import small_mesh


def differing(name: str) -> dict[str, object]:
    """What the command line's config has otherwise with an algorithm."""
    plain, config = (
        flat(to_json(load("--config", "rl_think.py", *words)[0]))
        for words in ([], ["--algorithm", name])
    )
    return {key: value for key, value in config.items() if value != plain[key]}


def test_an_algorithm_sets_its_own_settings_and_no_others() -> None:
    assert differing("dr_grpo") == {
        "advantage.std": "none",
        "loss.clip_high": 0.2,
        "loss.aggregation": "constant",
    }
    assert differing("rloo") == {
        "advantage.baseline": "leave_one_out",
        "advantage.std": "none",
        "loss.kind": "reinforce",
    }
    for name in ALGORITHMS:
        sections = {key.partition(".")[0] for key in differing(name)}
        assert sections <= {"advantage", "loss", "kl", "overlong", "dynamic_sampling"}, name
        assert f"  {name}: " in described()


def test_single_settings_are_set_beside_it() -> None:
    words = [
        "--algorithm",
        "gspo",
        "--batch.epochs",
        "2",
        "--loss.clip_high",
        "0.001",
        "--kl.beta",
        "0.1",
    ]
    config = load("--config", "rl_think.py", *words)[0]
    assert (config.loss.kind, config.loss.clip_low, config.loss.clip_high) == ("gspo", 3e-4, 0.001)
    assert config.kl.beta == 0.1
    assert remarks(config) == []


def test_help_says_what_each_sets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--config", "rl_think.py", "--algorithm", "grpo", "--help", "all")
    told = " ".join(capsys.readouterr().out.split())
    assert "gspo: loss.kind gspo, loss.clip_low 0.0003, loss.clip_high 0.0004" in told
    # and the defaults that are shown are those of the algorithm
    assert "0.04)" in told


def test_unknown_ones_are_refused_and_so_is_one_where_nothing_is_learnt_by_it() -> None:
    assert "--algorithm 'ppo' is none of grpo, dapo" in refused(
        "--config", "rl_think.py", "--algorithm", "ppo"
    )
    with pytest.raises(ConfigError, match="train_sft has no use for --algorithm"):
        load_config(["--config", "rl_think.py", "--algorithm", "dapo"], "train_sft", "", (), "sft.")


def test_bounds_of_tokens_on_ratios_of_answers_are_remarked() -> None:
    (told,) = remarks(Config(loss=LossConfig(kind="gspo")))
    for words in ("loss.clip_low 0.2", "loss.clip_high 0.28", "3e-4", "4e-4"):
        assert words in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kl.beta -0.1", "kl.beta is -0.1; it must be at least 0 (a penalty"),
        ("--batch.group_size 1", "advantage.baseline group: an answer without others"),
        (
            "--batch.group_size 1 --advantage.baseline leave_one_out",
            "batch.group_size 1 with advantage.baseline leave_one_out",
        ),
        ("--batch.mini_batches 3", "batch.mini_batches 3 does not divide batch.prompts 16"),
        ("--loss.importance tis", "set --loss.logprobs recompute"),
        (
            "--loss.logprobs recompute --loss.importance icepop --loss.importance_min 6",
            "loss.importance_min 6 is not below loss.importance_max 5",
        ),
        ("--loss.dual_clip 0.5", "loss.dual_clip is 0.5; it must be 0, or above 1"),
        ("--overlong.buffer 2", "overlong.buffer is 2"),
        (
            "--batch.group_size 1 --advantage.baseline none --dynamic_sampling.max_batches 3",
            "dynamic_sampling.max_batches 3 with batch.group_size 1",
        ),
        (
            "--overlong.filter --kl.beta 0.1 --kl.where reward",
            "overlong.filter with kl.beta 0.1 in the reward",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_numbers(words: str, said: str) -> None:
    assert said in refused("--config", "rl_think.py", *words.split())


def test_a_group_of_one_is_for_reinforce() -> None:
    load("--config", "rl_think.py", "--batch.group_size", "1", "--algorithm", "reinforce_pp")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_built(name: str) -> None:
    config = with_algorithm(ResolvedConfig(), name)
    learner = build_step(config, small_mesh(), (1,), 40).learner
    measures = learner.losses.measures
    assert ("kl" in measures) == (name == "grpo")
    assert ("ratio/mean" in measures) == (name != "rloo")
    assert learner.keeps_reference == learner.reads_reference == (name == "grpo")
