"""Settings that do nothing beside the others: what the command line names in vain is refused."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import NamedTuple

from jaxspec.config.as_json import flat, to_json
from jaxspec.config.checked import require
from jaxspec.config.settings import Config, DraftConfig, HeadConfig


class Unused(NamedTuple):
    """Settings, and where they do nothing."""

    settings: str
    """Names; one that ends in a dot stands for all that start with it."""
    fact: str
    """What makes them useless, with `c` for the config."""
    holds: Callable[[Config], bool]
    said_by_files: bool = False
    """Files say what is used instead, so that even a value that is the default is in vain."""


def _kind(*kinds: str) -> Callable[[Config], bool]:
    return lambda c: c.rollout.draft.kind in kinds


def _generic(c: Config) -> bool:
    """Whether offline training reads the built-in corpus."""
    return c.rollout.draft.learned and c.offline.steps > 0 and c.offline.text == "generic"


def _loaded(*kinds: str) -> Callable[[Config], bool]:
    return lambda c: bool(c.rollout.draft.path) and c.rollout.draft.kind in kinds


_SIZES = "model.vocab model.layers model.embed model.heads model.kv_heads model.head_size model.ffn"
_YARN = "model.rope.beta_fast model.rope.beta_slow model.rope.attention_factor model.rope.truncate"
_LLAMA3 = "model.rope.low_freq_factor model.rope.high_freq_factor"
_OBJECTIVE = (
    "draft_training.loss draft_training.ttt_steps draft_training.decay draft_training.grad_clip"
)
_OFFLINE = "offline.samples offline.text offline.rows offline.learning_rate"
_FORM = " ".join(f"head.{item.name}" for item in fields(HeadConfig) if item.name != "taps")
_KIND, _PATH = (
    "rollout.draft.kind {c.rollout.draft.kind}",
    "rollout.draft.path, whose files say it,",
)
_LOOKUP = f"{_KIND} and look-up {{c.rollout.lookup_kind}}"

WITH_ANY_DRAFT = (
    Unused(
        f"{_SIZES} model.rope_theta model.norm_eps model.tied model.rope. model.family.",
        "model.path, whose config.json says it,",
        lambda c: bool(c.model.path),
        said_by_files=True,
    ),
    Unused(
        "model.ignore",
        "no checkpoint to read (model.path)",
        lambda c: not c.model.path and not _loaded("model")(c),
    ),
    Unused(
        f"model.rope.kind {_YARN} {_LLAMA3}",
        "model.rope_factor 1",
        lambda c: not c.model.path and c.model.rope_factor == 1,
    ),
    Unused(
        _YARN,
        "model.rope.kind {c.model.rope.kind}",
        lambda c: c.model.rope_factor != 1 and c.model.rope.kind != "yarn",
    ),
    Unused(
        _LLAMA3,
        "model.rope.kind {c.model.rope.kind}",
        lambda c: c.model.rope_factor != 1 and c.model.rope.kind != "llama3",
    ),
    Unused(
        "model.family.experts_per_token model.family.normalize_experts",
        "model.family.experts 0",
        lambda c: not c.model.path and c.model.family.experts == 0,
    ),
    Unused(
        "rollout.top_k rollout.top_p", "rollout.temperature 0", lambda c: c.rollout.temperature == 0
    ),
    Unused(
        "rollout.enable_thinking",
        "the built-in tokenizer (no data.tokenizer, no model.path)",
        lambda c: not c.data.tokenizer and not c.model.path,
    ),
    Unused(
        "rollout.slice_rounds", "a step that is one program (no --staged)", lambda c: not c.staged
    ),
    Unused(
        "data.eval_path data.prompt_column data.answer_column data.instruction",
        "no data.path",
        lambda c: not c.data.path,
    ),
    Unused("data.task data.digits", "data.path", lambda c: bool(c.data.path) and not _generic(c)),
    Unused("data.format sft.rows sft.learning_rate", "sft.steps 0", lambda c: c.sft.steps == 0),
    Unused("sft.wrong_steps", "sft.steps 0", lambda c: c.sft.steps == 0 and not _generic(c)),
    Unused(
        "lora.alpha lora.targets",
        "lora.rank 0, which trains no adapters,",
        lambda c: c.lora.rank == 0,
    ),
)
"""What is judged whatever the draft."""
BY_DRAFT = (
    Unused("rollout.draft.draft_length", _KIND, _kind("none")),
    # coupled noise differs even there
    Unused("rollout.verify", _KIND, lambda c: _kind("none")(c) and c.rollout.verify == "token"),
    Unused(
        "rollout.draft.sampling rollout.draft.ffn rollout.draft.path",
        _KIND,
        _kind("none", "ngram", "history"),
    ),
    Unused(
        "rollout.draft.vocab rollout.draft.tap_convention head.",
        _KIND,
        lambda c: not _kind("eagle3")(c),
    ),
    Unused("rollout.draft.layers", _KIND, lambda c: not _kind("mtp", "model")(c)),
    Unused("rollout.draft.embedding_first", _KIND, lambda c: not _kind("mtp")(c)),
    Unused(
        "rollout.draft.temperature",
        f"{_KIND} and sampling {{c.rollout.draft.sampling}}",
        lambda c: not c.rollout.draft.learned or c.rollout.draft.sampling != "sample",
    ),
    Unused(
        "rollout.draft.sampling rollout.draft.temperature",
        "rollout.temperature 0",
        lambda c: c.rollout.temperature == 0,
    ),
    Unused(
        "rollout.draft.tap_convention", "no rollout.draft.path", lambda c: not c.rollout.draft.path
    ),
    Unused("rollout.draft.ffn", _PATH, _loaded("eagle3", "mtp", "model"), said_by_files=True),
    Unused(f"rollout.draft.vocab {_FORM}", _PATH, _loaded("eagle3"), said_by_files=True),
    Unused("rollout.draft.layers", _PATH, _loaded("mtp", "model"), said_by_files=True),
    Unused("rollout.draft.embedding_first", _PATH, _loaded("mtp"), said_by_files=True),
    Unused("rollout.lookup.rule", _LOOKUP, lambda c: c.rollout.lookup_kind != "ngram"),
    Unused("rollout.lookup.past", _LOOKUP, lambda c: c.rollout.lookup_kind != "history"),
    Unused(
        "rollout.lookup.min_match rollout.lookup.max_match",
        _LOOKUP,
        lambda c: c.rollout.lookup_kind == "none",
    ),
    Unused(
        f"{_OBJECTIVE} draft_training.learning_rate {_OFFLINE}",
        _KIND,
        lambda c: not c.rollout.draft.learned,
    ),
    Unused("offline.steps", _KIND, lambda c: not c.rollout.draft.learned and c.offline.steps > 0),
    Unused(
        "draft_training.ttt_steps draft_training.decay",
        "rollout.draft.kind model, which has one depth,",
        _kind("model"),
    ),
    Unused(
        "rollout.draft.layers",
        "rollout.draft.draft_length {c.rollout.draft.draft_length}, whose tokens the first layers"
        " draft,",
        lambda c: (
            _kind("mtp")(c)
            and not c.rollout.draft.path
            and c.rollout.draft.layers > c.rollout.draft.longest
        ),
    ),
    Unused(
        "draft_training.decay",
        "draft_training.ttt_steps 1, which is one depth of weight 1,",
        lambda c: c.draft_training.ttt_steps == 1,
    ),
    Unused(
        "draft_training.learning_rate",
        "draft_training.online off",
        lambda c: not c.draft_training.online,
    ),
    Unused(
        _OBJECTIVE,
        "a draft that is not trained (offline.steps 0, online off)",
        lambda c: not c.draft_training.online and not c.offline.steps,
    ),
    Unused(_OFFLINE, "offline.steps 0", lambda c: c.rollout.draft.learned and c.offline.steps == 0),
)
"""What is left to a program that goes through the kinds of draft by itself."""

OF_POLICY = "seed model. data. mesh. sft. grpo.prompts rollout.max_new_tokens learner.tokens"
"""Settings that `train_sft` has a use for; prompts count for the mesh."""
_FORM_OF_DRAFT = " ".join(
    f"rollout.draft.{item.name}"
    for item in fields(DraftConfig)
    if item.name not in ("sampling", "temperature")
)
_LAW = (
    "rollout.min_new_tokens rollout.banned rollout.temperature rollout.top_k rollout.top_p"
    " rollout.enable_thinking rollout.engine."
)
OF_DRAFT = f"{OF_POLICY} {_LAW} {_FORM_OF_DRAFT} {_OBJECTIVE} offline. head. lora.path"
"""Those of `train_draft`."""


def refuse_unused(
    config: Config, named: Iterable[str], table: tuple[Unused, ...] = WITH_ANY_DRAFT + BY_DRAFT
) -> None:
    """Refuses settings among `named` that do nothing; what only a config file says is left alone,
    and so is a default that would hold.

    Raises:
      ConfigError: names them, and the settings that make them useless.
    """
    defaults, values = flat(to_json(Config())), flat(to_json(config))
    given = sorted(values.keys() & set(named))
    told: set[str] = set()
    said = []
    for row in table:
        judged = [
            name
            for name in given
            if name not in told and (row.said_by_files or values[name] != defaults.get(name))
        ]
        found = [name for name in judged if _stands_for(row.settings.split(), name)]
        if found and row.holds(config):
            told |= set(found)
            said.append(
                f"with {row.fact.format(c=config)} there is no use for"
                f" {', '.join(f'--{name}' for name in found)}"
            )
    require(not said, f"{'; '.join(said)}; leave {'it' if len(told) == 1 else 'them'} out")


def refuse_idle(named: Iterable[str], used: str, command: str) -> None:
    """Refuses settings among `named` that a program never looks at, whatever their values; `used`
    are those that it does, as in `Unused`.

    Raises:
      ConfigError: names them, and settings in use of the same name elsewhere.
    """
    idle = [name for name in sorted(named) if not _stands_for(used.split(), name)]
    lasts = {name.rpartition(".")[2] for name in idle}
    there = [
        name
        for name in flat(to_json(Config()))
        if name.rpartition(".")[2] in lasts and _stands_for(used.split(), name)
    ]
    meant = f" (did you mean {' or '.join(f'--{name}' for name in there)}?)" if there else ""
    listed, whole = ", ".join(f"--{name}" for name in idle), "it" if len(idle) == 1 else "them"
    require(not idle, f"{command} has no use for {listed}{meant}; leave {whole} out")


def _stands_for(settings: list[str], name: str) -> bool:
    return any(
        name.startswith(setting) if setting.endswith(".") else name == setting
        for setting in settings
    )
