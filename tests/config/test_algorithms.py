"""Algorithms by name: what they set, what stays, what is set beside them, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.algorithms import (
    ALGORITHMS,
    collect_draft_warnings,
    collect_warnings,
    describe_algorithms,
    with_algorithm,
)
from jaxspec.config.as_json import flatten_settings, to_json
from jaxspec.config.cli import load_config
from jaxspec.config.settings import (
    AdamConfig,
    BatchConfig,
    Config,
    LossConfig,
    OptimizerConfig,
    ResolvedConfig,
)
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import LoraConfig, ModelConfig, ModelSpec
from jaxspec.rl.objective import PolicyObjective
from tests.config.command_line import load, refused
from tests.conftest import small_mesh


def differing(name: str) -> dict[str, object]:
    """What the command line's config has otherwise with an algorithm."""
    plain, config = (
        flatten_settings(to_json(load("--config", "rl_think.py", *words)[0]))
        for words in ([], ["--algorithm", name])
    )
    return {key: value for key, value in config.items() if value != plain[key]}


def test_an_algorithm_sets_its_own_settings_and_no_others() -> None:
    assert differing("dr_grpo") == {
        "advantage.std": "none",
        "loss.clip_low": 0.2,
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
        assert f"  {name}: " in describe_algorithms()


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
    assert collect_warnings(config) == []


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


@pytest.mark.parametrize(
    ("kind", "bounds"), [("clip", (0.2, 0.28)), ("gspo", (3e-4, 4e-4)), ("cispo", (1.0, 4.0))]
)
def test_bounds_of_ratios_follow_from_the_kind_of_loss(kind: Any, bounds: Any) -> None:
    """Those of tokens on ratios of answers, or on weights, are remarked."""
    assert LossConfig(kind=kind).clip_bounds == bounds
    assert collect_warnings(Config(loss=LossConfig(kind=kind))) == []
    config = ResolvedConfig(loss=LossConfig(kind=kind), batch=BatchConfig(epochs=2))
    objective = build_step(config, small_mesh(), (1,), 40).learner.policy_objective
    assert isinstance(objective, PolicyObjective)
    loss = objective.loss
    assert isinstance(loss, functools.partial)
    surrogate = loss.keywords["surrogate"].keywords
    assert (surrogate["clip_low"], surrogate["clip_high"]) == bounds
    told = collect_warnings(Config(loss=LossConfig(kind=kind, clip_low=0.2, clip_high=0.28)))
    assert len(told) == (kind != "clip")
    for word in ("loss.clip_low 0.2", "loss.clip_high 0.28", "usual are --loss.clip_low"):
        assert all(word in line for line in told)


def remarks_on(words: str) -> str:
    """What is remarked on a command line, in one line."""
    return " ".join(collect_warnings(load("--config", "rl_think.py", *words.split())[0]))


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("--kl.where loss", "k3"),
        ("--kl.where reward", "k1"),
        ("--kl.where reward_to_go", "k1"),
        ("--algorithm grpo", "k3"),
        ("--algorithm grpo --kl.where reward", "k1"),
        ("--algorithm reinforce_pp", "k1"),
    ],
)
def test_the_estimator_of_the_divergence_follows_from_its_place(words: str, place: str) -> None:
    config, _ = load("--config", "rl_think.py", "--kl.beta", "0.1", *words.split())
    assert config.kl.active_estimator == place
    assert collect_warnings(config) == []


@pytest.mark.parametrize("where", ["reward", "reward_to_go"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_estimates_whose_value_is_no_reward_are_remarked(where: str, estimator: str) -> None:
    words = f"--kl.beta 0.1 --kl.where {where} --kl.estimator {estimator}"
    assert f"kl.estimator {estimator} with kl.where {where}" in remarks_on(words)
    assert remarks_on(words.replace(estimator, "k1")) == ""


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--algorithm rloo --batch.mini_batches 2", "loss.kind reinforce has no ratio"),
        ("--algorithm rloo --batch.epochs 2", "loss.kind reinforce has no ratio"),
        (
            "--algorithm rloo --dynamic_sampling.max_batches 3 --dynamic_sampling.surplus carry",
            "several updates or older rows",
        ),
        ("--algorithm rloo", ""),
        ("--algorithm rloo --loss.kind clip --batch.epochs 2", ""),
        (
            "--algorithm reinforce_pp --dynamic_sampling.max_batches 3",
            "max_batches 3 with advantage.baseline none and advantage.std whiten:",
        ),
        ("--advantage.std whiten --dynamic_sampling.max_batches 3", "advantage.std whiten: groups"),
        (
            "--kl.beta 0.1 --kl.where reward --dynamic_sampling.max_batches 3",
            "with kl.where reward: groups whose answers earn the same",
        ),
        ("--algorithm dapo", ""),
        ("--algorithm rloo --dynamic_sampling.max_batches 3", ""),
    ],
)
def test_what_hardly_goes_together_is_remarked(words: str, parts: str) -> None:
    assert parts in remarks_on(words)
    assert bool(remarks_on(words)) == bool(parts)


def test_dapo_takes_half_of_what_right_is_worth() -> None:
    """The paper's rewards of right and wrong differ by 2."""
    assert load("--config", "rl_think.py", "--algorithm", "dapo")[0].overlong.penalty == 0.5


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
            "--kl.beta 0.1 --kl.estimator k1",
            "kl.estimator k1 with kl.where loss and kl.beta 0.1: the gradient of k1 is 0",
        ),
        ("--optimizer.adam.betas 0.9", "optimizer.adam.betas has 1 numbers; give two"),
        ("--optimizer.adam.betas 0.9 1", "optimizer.adam.betas is (0.9, 1.0)"),
        (
            "--overlong.filter --kl.beta 0.1 --kl.where reward_to_go",
            "overlong.filter with kl.beta 0.1 in the reward",
        ),
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
    measures = learner.policy_objective.empty_sums(jnp.zeros(())).metrics
    assert ("kl" in measures) == (name == "grpo")
    assert ("ratio/mean" in measures) == (name != "rloo")
    assert learner.keeps_reference == learner.reads_reference == (name == "grpo")


# ---- learning rates


def loaded(*words: str, name: str = "rl_think.py:qwen3_0.6b") -> Config:
    given = ("--config", name, "--model.path", "folder", "--data.path", "problems")
    return load(*given, *words)[0]


LARGER = [f"rl_think.py:{scale}" for scale in ("qwen3_0.6b", "qwen3_8b", "qwen3_30b_a3b")]


@pytest.mark.parametrize("name", [*LARGER, "dapo.py:qwen3_8b", "rl_zero.py:qwen3_8b"])
@pytest.mark.parametrize(("words", "rate"), [("", 1e-6), ("--lora.rank 16", 2e-5)])
def test_rates_of_loaded_policies_follow_from_what_is_trained(
    name: str, words: str, rate: float
) -> None:
    config = loaded(*words.split(), name=name)
    assert config.learning_rates.policy == rate
    assert config.learning_rates.draft == 1e-4
    assert collect_warnings(config) == []


def test_rates_that_are_left_out_are_those_of_a_checkpoint_where_there_is_one() -> None:
    """A config that says none, such as a newcomer's own."""
    made, read = Config(), Config(model=ModelConfig(path="folder"))
    assert made.learning_rates == (2e-4, 4e-4, 1e-2)
    assert read.learning_rates == (1e-6, 1e-4, 1e-4)
    assert collect_warnings(made) == collect_warnings(read) == []


def test_the_demo_learns_as_it_did() -> None:
    """And its rates are remarked beside a checkpoint."""
    config, _ = load("--config", "rl_think.py")
    assert config.learning_rates == (2e-4, 4e-4, 1e-2)
    assert config.optimizer.adam.betas == (0.9, 0.95)
    assert collect_warnings(config) == []
    words = ("--config", "rl_think.py", "--model.path", "folder", "--sft.steps", "0")
    told = collect_warnings(load(*words)[0])
    assert [line.split()[1:3] for line in told] == [
        ["optimizer.learning_rate", "0.0002"],
        ["offline.learning_rate", "0.01"],
    ]
    assert "all weights of a loaded policy; --optimizer.learning_rate auto is 1e-06" in told[0]
    auto = [f"--{name}.learning_rate" for name in ("optimizer", "offline")]
    assert collect_warnings(load(*words, auto[0], "auto", auto[1], "auto")[0]) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optimizer.learning_rate 1e-4", "usual for all weights of a loaded policy"),
        ("--optimizer.learning_rate 1e-9", "outside 1e-07 to 1e-05"),
        ("--lora.rank 16 --optimizer.learning_rate 1e-6", "outside 5e-06 to 0.0002"),
        ("--draft_training.learning_rate 1e-2", "draft_training.learning_rate 0.01 is outside"),
        ("--offline.learning_rate 1e-2", "--offline.learning_rate auto is 0.0001"),
    ],
)
def test_rates_outside_the_usual_range_are_remarked(words: str, said: str) -> None:
    (told,) = collect_warnings(loaded(*words.split()))
    assert said in told
    of_draft = collect_draft_warnings(loaded(*words.split()))
    assert of_draft == ([told] if "draft" in words or "offline" in words else [])


def test_rates_are_those_that_are_trained_with() -> None:
    """By the change of a first update, whose size is the rate."""
    adam = AdamConfig(decay="all")  # weights without names
    config = ResolvedConfig(
        lora=LoraConfig(rank=2),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, adam=adam),
    )
    optimizer = build_step(config, small_mesh(), (1,), 40).learner.policy_optimizer
    weights = {"a": jnp.ones(3)}
    changes, _ = optimizer.update({"a": jnp.ones(3)}, optimizer.init(weights), weights)
    np.testing.assert_allclose(changes["a"], -3e-3, rtol=1e-5)  # pyright: ignore
    config = replace(config, model=ModelSpec(path="folder"), optimizer=OptimizerConfig())
    assert config.learning_rates.policy == 2e-5
