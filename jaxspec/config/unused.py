"""Rejects command-line settings that have no effect."""

from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter
from typing import get_args

from jaxspec.config.as_json import flatten_settings, includes_setting, to_json
from jaxspec.config.settings import Config, DraftConfig, RewardConfig
from jaxspec.drafts.kinds import SECTIONS, DraftKind, get_kind
from jaxspec.inputs.checked import Unused, require


def _uses_generic_text(c: Config) -> bool:
    """Returns whether offline training uses the built-in corpus."""
    return c.rollout.draft.is_learned and c.offline.steps > 0 and c.offline.text == "generic"


def _settings_in_use(c: Config) -> frozenset[str]:
    """Returns the settings of single kinds that the draft and look-up in use read."""
    # Both, since look-up can be combined with a learned draft.
    draft, lookup = get_kind(c.rollout.draft.kind), get_kind(c.rollout.lookup_kind)
    section = f"rollout.draft.{c.rollout.draft.kind}."
    return draft.shared_settings | lookup.shared_settings | {section}


def _rule_by_kind(setting: str, fact: str) -> Unused:
    """Returns the rule of a setting that only some kinds read."""
    return Unused(setting, fact, lambda c: setting not in _settings_in_use(c))


def _rule_by_files(kind: str) -> Unused:
    """Returns the rule of settings that a draft's files define."""
    return Unused(
        " ".join(sorted(get_kind(kind).file_settings)),
        # Facts end in a comma if they have a clause, to fit the sentence of the message.
        "rollout.draft.path, whose files say it,",
        lambda c: bool(c.rollout.draft.path) and c.rollout.draft.kind == kind,
        set_by_files=True,
    )


def _all_rewards(c: Config) -> list[RewardConfig]:
    """Returns the rewards of all sets of problems."""
    return [dataset.reward for dataset in c.sets_by_prefix.values()]


_is_on_policy = attrgetter("is_on_policy")
_importance = attrgetter("resolved_loss.importance")
_ON_POLICY = "one update a batch (batch.mini_batches 1, batch.epochs 1), whose ratios are 1,"
_SIZES = "model.vocab model.layers model.embed model.heads model.kv_heads model.head_size model.ffn"
_OBJECTIVE = (
    "draft_training.loss draft_training.ttt_steps draft_training.decay draft_training.grad_clip"
)
_OFFLINE = "offline.samples offline.text offline.rows offline.learning_rate"
_KIND = "rollout.draft.kind {c.rollout.draft.kind}"
_LOOKUP = f"{_KIND} and look-up {{c.rollout.lookup_kind}}"

GENERAL_RULES = (
    Unused(
        f"{_SIZES} model.rope_theta model.norm_eps model.tied",
        "model.path, whose config.json says it,",
        lambda c: bool(c.model.path),
        set_by_files=True,
    ),
    Unused(
        "model.ignore",
        "no checkpoint to read (model.path)",
        lambda c: (
            not c.model.path
            # This setting covers the draft's checkpoint as well.
            and not ("model.ignore" in _settings_in_use(c) and c.rollout.draft.path)
        ),
    ),
    Unused(
        "model.rope_factor", "no checkpoint to stretch (model.path)", lambda c: not c.model.path
    ),
    Unused(
        "rollout.top_k rollout.top_p rollout.min_p",
        "rollout.temperature 0",
        lambda c: c.rollout.temperature == 0,
    ),
    Unused(
        "eval.top_k eval.top_p",
        "eval.temperature 0",
        lambda c: (
            # Evaluations inherit the run's temperature.
            (c.rollout.temperature if c.eval.temperature == "same" else c.eval.temperature) == 0
        ),
    ),
    Unused(
        "rollout.enable_thinking",
        "data.prompt_format {c.data.prompt_format}",
        lambda c: c.data.prompt_format != "chat",
    ),
    Unused(
        # The built-in tokenizer has no chat template.
        "rollout.enable_thinking data.prompt_format",
        "the built-in tokenizer (no data.tokenizer, no model.path)",
        lambda c: not c.data.tokenizer and not c.model.path,
    ),
    Unused("schedule.slice_rounds", "schedule.kind fused", lambda c: c.schedule.kind == "fused"),
    Unused(
        "schedule.lag generation.devices",
        "schedule.kind {c.schedule.kind}",
        lambda c: c.schedule.kind != "pipelined",
    ),
    Unused(
        "generation.data generation.expert generation.tensor",
        "generation.devices 0",
        lambda c: c.generation.devices == 0,
    ),
    Unused(
        "data.eval_path data.prompt_column data.answer_column data.instruction",
        "no data.path",
        lambda c: not c.data.path,
    ),
    Unused(
        "data.path data.eval_path data.prompt_column data.answer_column data.answer_style"
        " data.instruction data.eval_prompts reward.verifier reward.run_code reward.function"
        " reward.parts reward.weights reward.rows",
        "mixture, whose sets say it,",
        lambda c: bool(c.mixture),
    ),
    Unused(
        "data.task data.digits",
        # The warm start and the generic corpus are built from these tasks.
        "mixture and no warm start (sft.steps 0)",
        lambda c: bool(c.mixture) and c.sft.steps == 0 and not _uses_generic_text(c),
    ),
    Unused(
        "data.task data.digits",
        "data.path",
        lambda c: bool(c.data.path) and not _uses_generic_text(c),
    ),
    Unused(
        "optimizer.freeze_router",
        "lora.rank, whose adapters leave routers as they are,",
        lambda c: c.lora.rank > 0,
    ),
    Unused("sft.format sft.rows sft.learning_rate", "sft.steps 0", lambda c: c.sft.steps == 0),
    Unused(
        "sft.wrong_steps", "sft.steps 0", lambda c: c.sft.steps == 0 and not _uses_generic_text(c)
    ),
    Unused(
        "loss.kind loss.clip_low loss.clip_high loss.dual_clip",
        "loss.function, which takes their place,",
        lambda c: bool(c.loss.function),
    ),
    Unused(
        "loss.clip_low loss.clip_high loss.dual_clip",
        "loss.kind reinforce",
        lambda c: c.loss.kind == "reinforce",
    ),
    Unused(
        "loss.logprobs loss.reuse_below",
        "loss.kind reinforce, which has no ratio, and no loss.importance,",
        lambda c: not c.needs_old_logprobs,
    ),
    Unused("loss.dual_clip", "loss.kind cispo", lambda c: c.loss.kind == "cispo"),
    # Ratios that are all 1 are never clipped.
    Unused("loss.clip_low loss.clip_high loss.dual_clip", _ON_POLICY, _is_on_policy),
    Unused("loss.reuse_below", _ON_POLICY, _is_on_policy),
    Unused(
        "loss.reuse_below",
        "loss.logprobs recompute",
        lambda c: c.loss.logprobs == "recompute",
    ),
    Unused(
        "loss.logprobs",
        "one update a batch, whose own pass has the old logprobs, and no loss.importance,",
        lambda c: _is_on_policy(c) and _importance(c) == "none",
    ),
    Unused(
        "loss.importance_min loss.importance_max",
        "loss.importance {c.resolved_loss.importance}",
        lambda c: _importance(c) == "none",
    ),
    Unused("loss.importance_min", "loss.importance tis", lambda c: _importance(c) == "tis"),
    Unused(
        "dynamic_sampling.surplus",
        "dynamic_sampling.max_batches 0",
        lambda c: c.dynamic_sampling.max_batches == 0,
    ),
    Unused(
        "reward.verifier reward.run_code",
        "reward.parts {c.reward.all_parts}",
        lambda c: "answer" not in c.reward.all_parts,
    ),
    Unused(
        "reward.run_code",
        "reward.verifier {c.reward.verifier}",
        lambda c: c.reward.verifier != "code",
    ),
    Unused(
        # Comparing texts takes no worker. Functions and other verifiers run in one.
        "reward.workers reward.deadline",
        "no reward.function and reward.verifier exact",
        lambda c: all(
            not reward.function and reward.verifier == "exact" for reward in _all_rewards(c)
        ),
    ),
    Unused("reward.rows", "no reward.function", lambda c: not c.reward.function),
    Unused(
        "reward.max_failed",
        "no reward.function and reward.verifier exact",
        lambda c: all(
            not reward.function and reward.verifier == "exact" for reward in _all_rewards(c)
        ),
    ),
    Unused(
        "optimizer.adam.decay",
        "optimizer.weight_decay 0",
        lambda c: c.optimizer.weight_decay == 0,
    ),
    Unused(
        "optimizer.adam.schedule_floor",
        "optimizer.schedule constant",
        lambda c: c.optimizer.schedule == "constant",
    ),
    Unused("overlong.penalty", "overlong.buffer 0", lambda c: c.overlong.buffer == 0),
    Unused("kl.estimator kl.where kl.importance", "kl.beta 0", lambda c: c.kl.beta == 0),
    Unused("kl.importance", "kl.where {c.kl.where}", lambda c: c.kl.where != "loss"),
    Unused(
        "lora.alpha lora.targets",
        "lora.rank 0, which trains no adapters,",
        lambda c: c.lora.rank == 0,
    ),
)
"""Rules that apply to all runs."""


def list_draft_rules() -> tuple[Unused, ...]:
    """Lists rules for settings of drafts.

    They apply to runs with one kind of draft.
    """
    # Kinds declare their settings, so a new kind needs no rule here.
    kinds = {name: get_kind(name) for name in get_args(DraftKind)}
    settings = sorted(frozenset().union(*(kind.shared_settings for kind in kinds.values())))
    lookup_settings = [name for name in settings if name.startswith("rollout.lookup.")]
    training_settings = [name for name in settings if name.startswith("draft_training.")]
    # The settings left out have rules of their own.
    other_settings = [
        name
        for name in settings
        if name not in (*lookup_settings, *training_settings, "model.ignore")
    ]
    sections = [f"rollout.draft.{name}." for name in SECTIONS]
    return (
        Unused(
            "compare_plain rollout.draft.draft_length draft_training.alarm",
            _KIND,
            lambda c: not c.rollout.draft.is_enabled,
        ),
        # Coupled mode is exempt: its noise differs even without drafts.
        Unused(
            "rollout.verify",
            _KIND,
            lambda c: not c.rollout.draft.is_enabled and c.rollout.verify == "token",
        ),
        Unused(
            "rollout.draft.sampling rollout.draft.path",
            _KIND,
            lambda c: not c.rollout.draft.is_learned,
        ),
        *(_rule_by_kind(setting, _KIND) for setting in (*sections, *other_settings)),
        Unused(
            "rollout.draft.temperature",
            f"{_KIND} and sampling {{c.rollout.draft.sampling}}",
            lambda c: not c.rollout.draft.is_learned or c.rollout.draft.sampling != "sample",
        ),
        Unused(
            "rollout.draft.sampling rollout.draft.temperature",
            "rollout.temperature 0",
            lambda c: c.rollout.temperature == 0,
        ),
        *(_rule_by_files(name) for name, kind in kinds.items() if kind.file_settings),
        *(_rule_by_kind(setting, _LOOKUP) for setting in lookup_settings),
        Unused(
            f"{_OBJECTIVE} draft_training.learning_rate draft_training.every {_OFFLINE}",
            _KIND,
            lambda c: not c.rollout.draft.is_learned,
        ),
        Unused(
            "offline.steps", _KIND, lambda c: not c.rollout.draft.is_learned and c.offline.steps > 0
        ),
        *(
            _rule_by_kind(setting, f"{_KIND}, which has one depth,")
            for setting in training_settings
        ),
        *(rule for kind in kinds.values() for rule in kind.unused_rules),
        Unused(
            "draft_training.decay",
            "draft_training.ttt_steps 1, which is one depth of weight 1,",
            lambda c: c.draft_training.ttt_steps == 1,
        ),
        Unused(
            "draft_training.learning_rate draft_training.every",
            "draft_training.online off",
            lambda c: not c.draft_training.online,
        ),
        Unused(
            _OBJECTIVE,
            "a draft that is not trained (offline.steps 0, online off)",
            lambda c: not c.draft_training.online and not c.offline.steps,
        ),
        Unused(
            _OFFLINE,
            "offline.steps 0",
            lambda c: c.rollout.draft.is_learned and c.offline.steps == 0,
        ),
    )


# The number of prompts decides the mesh.
POLICY_SETTINGS = (
    "seed model. data. mesh. sft. batch.prompts rollout.max_new_tokens batch.micro_tokens"
)
"""Settings that `train_sft` reads."""
_FORM_OF_DRAFT = " ".join(
    f"rollout.draft.{item.name}" + "." * (item.name in SECTIONS)
    for item in fields(DraftConfig)
    # Training samples from the policy, never from the draft.
    if item.name not in ("sampling", "temperature")
)
_SAMPLING = (
    "rollout.min_new_tokens rollout.banned rollout.temperature rollout.top_k rollout.top_p"
    " rollout.min_p rollout.stop rollout.stop_ids rollout.enable_thinking rollout.engine."
)
DRAFT_SETTINGS = (
    f"{POLICY_SETTINGS} {_SAMPLING} {_FORM_OF_DRAFT} {_OBJECTIVE} offline. head. lora.path"
)
"""Settings that `train_draft` reads."""


def refuse_unused_settings(
    config: Config, named_settings: Iterable[str], with_draft: bool = True
) -> None:
    """Raises ConfigError for named settings without effect.

    Settings from a config file are accepted, and so are values equal to the default unless a
    checkpoint's files override them. Without `with_draft`, rules for drafts are skipped, for
    programs that try several kinds. The message names the settings, and those that disable them.
    """
    rules = GENERAL_RULES + (list_draft_rules() if with_draft else ())
    defaults, values = flatten_settings(to_json(Config())), flatten_settings(to_json(config))
    # Sets have no order, and messages must not vary.
    candidates = sorted(values.keys() & set(named_settings))
    # The first rule that applies explains a setting. Others would repeat it.
    reported: set[str] = set()
    names_by_fact: dict[str, list[str]] = {}
    for rule in rules:
        active_names = [
            name
            for name in candidates
            # A checkpoint's files override a setting even if it equals the default.
            if name not in reported and (rule.set_by_files or values[name] != defaults.get(name))
        ]
        unused_names = [
            name for name in active_names if includes_setting(rule.settings.split(), name)
        ]
        if unused_names and rule.applies(config):
            reported |= set(unused_names)
            # Settings with the same cause share a sentence.
            names_by_fact.setdefault(rule.fact.format(c=config), []).extend(unused_names)
    facts = [
        f"with {fact} there is no use for {', '.join(f'--{name}' for name in sorted(names))}"
        for fact, names in names_by_fact.items()
    ]
    require(not facts, f"{'; '.join(facts)}; leave {'it' if len(reported) == 1 else 'them'} out")


def refuse_unread_settings(named_settings: Iterable[str], used_settings: str, command: str) -> None:
    """Raises ConfigError for named settings that a program never reads.

    `used_settings` are those that it reads, as in `Unused`. The message suggests similar ones.
    """
    idle_names = [
        name for name in sorted(named_settings) if not includes_setting(used_settings.split(), name)
    ]
    # A setting of the same name in another section is probably the one that was meant.
    field_names = {name.rpartition(".")[2] for name in idle_names}
    similar_names = [
        name
        for name in flatten_settings(to_json(Config()))
        if name.rpartition(".")[2] in field_names and includes_setting(used_settings.split(), name)
    ]
    suggestion = (
        f" (did you mean {' or '.join(f'--{name}' for name in similar_names)}?)"
        if similar_names
        else ""
    )
    options, pronoun = (
        ", ".join(f"--{name}" for name in idle_names),
        "it" if len(idle_names) == 1 else "them",
    )
    require(not idle_names, f"{command} has no use for {options}{suggestion}; leave {pronoun} out")
