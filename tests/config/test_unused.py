"""What the command line names in vain is refused by name, and what a choice of draft puts out of
use gives way."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec.config.as_json import flatten_settings, to_json
from jaxspec.config.cli import load_config, settle_draft_settings
from jaxspec.config.settings import (
    Config,
    DraftConfig,
    DraftKind,
    LookupConfig,
    ResolvedConfig,
    RolloutConfig,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.inputs.checked import ConfigError
from tests.config.command_line import load, refused

USELESS = [
    ("--lora.targets q_proj", "lora.rank 0"),
    ("--lora.alpha 8", "lora.rank 0"),
    ("--lora.path folder --lora.alpha 8", "lora.rank 0"),
    ("--lora.rank 2 --optimizer.freeze_router", "lora.rank"),
    ("--loss.clip_high 0.3", "one update a batch"),
    ("--loss.reuse_below 1.1", "one update a batch"),
    ("--loss.logprobs recompute", "one update a batch"),
    ("--batch.epochs 2 --loss.logprobs recompute --loss.reuse_below 1.1", "recompute"),
    ("--batch.epochs 2 --loss.kind reinforce --loss.clip_low 0.1", "loss.kind reinforce"),
    ("--batch.epochs 2 --loss.kind cispo --loss.dual_clip 3", "loss.kind cispo"),
    ("--loss.importance_max 3", "loss.importance none"),
    (
        "--loss.logprobs recompute --loss.importance tis --loss.importance_min 0.1",
        "loss.importance tis",
    ),
    ("--kl.estimator k1", "kl.beta 0"),
    ("--kl.beta 0.1 --kl.where reward --kl.importance", "kl.where reward"),
    ("--kl.beta 0.1 --kl.where reward_to_go --kl.importance", "kl.where reward_to_go"),
    ("--optimizer.adam.decay all", "optimizer.weight_decay 0"),
    ("--optimizer.adam.schedule_floor 0.1", "optimizer.schedule constant"),
    ("--overlong.penalty 2", "overlong.buffer 0"),
    ("--loss.kind reinforce --batch.epochs 2 --loss.logprobs recompute", "loss.kind reinforce"),
    ("--dynamic_sampling.surplus carry", "dynamic_sampling.max_batches 0"),
    ("--model.path folder --model.layers 4", "model.path"),
    ("--model.path folder --model.norm_eps 1e-5", "model.path"),
    # the default, and yet not what the folder says
    ("--model.path folder --model.vocab 40", "model.path"),
    (
        "--rollout.draft.kind mtp --rollout.draft.path folder --rollout.draft.mtp.layers 1",
        "rollout.draft.path",
    ),
    ("--model.ignore", "model.path"),
    ("--model.rope_factor 2", "no checkpoint to stretch (model.path)"),
    ("--data.eval_path eval.jsonl", "no data.path"),
    ("--data.prompt_column q", "no data.path"),
    ("--data.answer_column a", "no data.path"),
    ("--data.instruction Think.", "no data.path"),
    ("--data.path train.jsonl --data.digits 3", "data.path"),
    ("--data.path train.jsonl --data.task mixed", "data.path"),
    ("--sft.steps 0 --sft.format text", "sft.steps 0"),
    ("--sft.steps 0 --sft.rows 32", "sft.steps 0"),
    ("--sft.steps 0 --sft.learning_rate 1e-4", "sft.steps 0"),
    ("--sft.steps 0 --sft.wrong_steps 0.1", "sft.steps 0"),
    ("--rollout.no_enable_thinking", "built-in tokenizer"),
    ("--schedule.slice_rounds 2", "schedule.kind fused"),
    ("--rollout.temperature 0 --rollout.top_k 5", "rollout.temperature 0"),
    ("--rollout.temperature 0 --rollout.top_p 0.5", "rollout.temperature 0"),
    ("--rollout.temperature 0 --rollout.min_p 0.1", "rollout.temperature 0"),
    ("--eval.temperature 0 --eval.top_k 5", "eval.temperature 0"),
    ("--rollout.temperature 0 --rollout.draft.sampling argmax", "rollout.temperature 0"),
    ("--rollout.draft.kind none --rollout.verify token", "kind none"),
    ("--rollout.draft.kind none --draft_training.loss kl", "kind none"),
    ("--rollout.draft.kind ngram --draft_training.learning_rate 1e-4", "kind ngram"),
    ("--rollout.draft.kind none --offline.steps 100", "kind none"),
    ("--rollout.draft.kind history --offline.samples 100", "kind history"),
    ("--rollout.draft.kind model --draft_training.ttt_steps 2", "kind model"),
    ("--rollout.draft.path folder --rollout.draft.eagle3.vocab 24", "rollout.draft.path"),
    ("--rollout.draft.path folder --head.norm_output", "rollout.draft.path"),
    (
        "--rollout.draft.kind mtp --rollout.draft.path folder --rollout.draft.mtp.layers 2",
        "rollout.draft.path",
    ),
    ("--rollout.draft.eagle3.tap_convention boundary", "no rollout.draft.path"),
    ("--draft_training.no_online --draft_training.learning_rate 1e-4", "draft_training.online off"),
    ("--draft_training.no_online --draft_training.every 2", "draft_training.online off"),
    ("--rollout.draft.kind ngram --draft_training.every auto", "kind ngram"),
    ("--rollout.draft.kind none --draft_training.alarm 0.5", "kind none"),
    ("--rollout.draft.kind none --no_compare_plain", "kind none"),
    ("--draft_training.ttt_steps 1 --draft_training.decay 0.5", "draft_training.ttt_steps 1"),
    (
        "--rollout.draft.kind mtp --rollout.draft.draft_length 1 --rollout.draft.mtp.layers 3",
        "rollout.draft.draft_length 1",
    ),
    ("--draft_training.no_online --offline.steps 0 --draft_training.grad_clip 1", "not trained"),
    ("--offline.steps 0 --offline.samples 100", "offline.steps 0"),
    ("--offline.steps 0 --offline.learning_rate 1e-4", "offline.steps 0"),
    (
        "--data.tokenizer t --data.prompt_format raw --rollout.no_enable_thinking",
        "prompt_format raw",
    ),
    ("--data.prompt_format raw", "the built-in tokenizer"),
    ("--reward.deadline 9", "no reward.function and reward.verifier exact"),
    ("--reward.max_failed 0.5", "no reward.function and reward.verifier exact"),
    ("--reward.function own.py:reward --reward.verifier math", "reward.parts ('function',)"),
]


class TestUseless:
    """What the command line names in vain."""

    @pytest.mark.parametrize(("words", "fact"), USELESS)
    def test_it_is_refused_by_name(self, words: str, fact: str) -> None:
        message = refused("--config", "rl_think.py", *words.split())
        last = next(word for word in reversed(words.split()) if word.startswith("--"))
        assert f"no use for {re.sub('no_(?=[a-z_]+$)', '', last)}" in message
        assert fact in message
        assert message.endswith("; leave it out")

    @pytest.mark.parametrize(
        "words",
        [
            "--lora.rank 4 --lora.targets q_proj --lora.alpha 8",
            "--lora.path folder",
            "--batch.mini_batches 2 --loss.clip_high 0.3 --loss.dual_clip 3 --loss.reuse_below 2",
            "--loss.logprobs recompute --loss.importance icepop --loss.importance_max 3",
            "--algorithm grpo --kl.estimator k2 --kl.importance",  # which sets kl.beta
            "--kl.beta 0.1 --kl.where reward",
            (
                "--model.path folder --model.rope_factor 2 --model.dtype bfloat16 --model.no_remat"
                " --model.ignore"
            ),
            "--rollout.draft.kind model --rollout.draft.path folder --model.ignore",
            (
                "--data.path train.jsonl --data.eval_path eval.jsonl --data.prompt_column q"
                " --data.answer_column a --data.answer_style boxed"
            ),
            "--data.path train.jsonl --data.digits 3 --offline.text generic",
            "--data.tokenizer folder --rollout.no_enable_thinking",
            "--sft.steps 0 --offline.text generic --sft.wrong_steps 0.1",
            "--schedule.kind staged --schedule.slice_rounds 2",
            (
                "--rollout.draft.kind none --rollout.verify coupled --offline.steps 0"
                " --draft_training.no_online"
            ),
            "--rollout.draft.path folder --head.taps 1 2 3"
            " --rollout.draft.eagle3.tap_convention boundary",
            "--draft_training.no_online --draft_training.loss kl",
            "--offline.steps 0 --draft_training.learning_rate 1e-4 --offline.samples 2048",
            "--lora.alpha 32 --sft.steps 0 --sft.rows 64",  # the defaults
            "--reward.function own.py:f --reward.rows 8 --reward.deadline 9 --reward.workers 2",
            "--reward.verifier math --reward.workers 2 --reward.parts stated answer",
        ],
    )
    def test_what_is_of_use_is_taken(self, words: str) -> None:
        load("--config", "rl_think.py", *words.split())

    def test_what_a_config_file_says_is_left_alone(self, elsewhere: Path) -> None:
        (elsewhere / "mine.py").write_text(
            "from jaxspec.config.settings import Config, LoraConfig\nSCALES = ('a',)\n"
            "def get_config(scale):\n    return Config(lora=LoraConfig(targets=('q_proj',)))"
        )
        assert load("--config", "mine.py")[0].lora.targets == ("q_proj",)

    def test_the_table_names_settings_that_there_are(self) -> None:
        from jaxspec.config.unused import GENERAL_RULES, list_draft_rules

        there, rows = flatten_settings(to_json(Config())), GENERAL_RULES + list_draft_rules()
        named = [name for row in rows for name in row.settings.split()]
        assert [
            name
            for name in named
            if not any(
                each == name or (name[-1] == "." and each.startswith(name)) for each in there
            )
        ] == []
        for row in rows:
            assert "{" not in row.fact.format(c=Config())


class TestSettle:
    """What a config says for its own kind of draft, once the command line chooses another."""

    own = RolloutConfig(
        draft=DraftConfig(eagle3=Eagle3Config(vocab=24)), lookup=LookupConfig(beside="ngram")
    )

    @pytest.mark.parametrize(
        ("kind", "argv", "beside"),
        [
            ("eagle3", [], "ngram"),
            ("eagle3", ["--draft.kind", "eagle3"], "ngram"),
            ("mtp", ["--draft.kind=mtp"], "ngram"),
            ("none", ["--draft.kind=none"], "none"),
            # for `check` to refuse
            ("none", ["--draft.kind=none", "--lookup.beside", "ngram"], "ngram"),
            ("none", [], "ngram"),  # a config file that contradicts itself, too
        ],
    )
    def test_what_is_not_named_gives_way(
        self, kind: DraftKind, argv: list[str], beside: str
    ) -> None:
        rollout = replace(self.own, draft=replace(self.own.draft, kind=kind))
        settled = settle_draft_settings(
            ResolvedConfig(rollout=rollout), argv, prefix="rollout."
        ).rollout
        assert (settled.draft.kind, settled.lookup.beside) == (kind, beside)
        assert settled.draft.eagle3 == self.own.draft.eagle3, "no other kind reads it"

    def test_what_is_named_does_not(self) -> None:
        draft = replace(self.own.draft, kind="none")
        config = ResolvedConfig(rollout=replace(self.own, draft=draft))
        with pytest.raises(
            ConfigError, match=r"kind none there is no use for --rollout\.draft\.eagle3\.vocab; "
        ):
            settle_draft_settings(
                config, ["--rollout.draft.kind", "none", "--rollout.draft.eagle3.vocab", "24"]
            )
        looked_up = ResolvedConfig(
            rollout=replace(
                self.own,
                draft=DraftConfig(kind="none"),
                lookup=LookupConfig(beside="ngram", max_match=6),
            )
        )
        with pytest.raises(
            ConfigError,
            match=r"kind none and look-up none there is no use for --rollout\.lookup\.max_match; ",
        ):
            settle_draft_settings(
                looked_up, ["--rollout.draft.kind", "none", "--rollout.lookup.max_match", "6"]
            )


class TestVaried:
    """A program that sets the draft itself."""

    def test_settings_of_every_kind_are_taken(self) -> None:
        argv = [
            "--config",
            "rl_think.py",
            "--rollout.draft.mtp.layers",
            "2",
            "--rollout.draft.temperature",
            "0.8",
            "--rollout.lookup.past",
            "4",
        ]
        with pytest.raises(ConfigError, match="no use for"):
            load_config(argv, "bench drafts", "")
        rollout = load_config(argv, "bench drafts", "", ["rollout.verify"])[0].rollout
        assert (rollout.draft.mtp.layers, rollout.draft.temperature, rollout.lookup.past) == (
            2,
            0.8,
            4,
        )

    def test_its_own_are_refused(self) -> None:
        argv = ["--config", "rl_think.py", "--rollout.verify=token", "--rollout.draft.kind", "mtp"]
        with pytest.raises(
            ConfigError,
            match=(
                r"jaxspec\.bench drafts .* --rollout\.verify, --rollout\.draft\.kind .*leave it out"
            ),
        ):
            load_config(
                argv,
                "bench drafts",
                "",
                ["rollout.verify", "rollout.draft.kind", "rollout.draft.sampling"],
            )
