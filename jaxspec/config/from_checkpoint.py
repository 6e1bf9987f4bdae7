"""What the checkpoints that a config names say of it, and the draft that one of them holds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from jaxspec.config.rollout import LARGE_VOCAB, PUBLISHED_VOCAB
from jaxspec.config.settings import Config, DataConfig, ResolvedConfig, SetConfig
from jaxspec.drafts.kinds import DraftKind, kind_of, learned
from jaxspec.hf.pretrained import (
    ADAPTERS,
    absolute,
    find_folder,
    merger,
    policy_checkpoint,
    policy_config,
)
from jaxspec.hf.tensor_files import WEIGHTS, open_tensors, unread_weights
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import listed
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.state import PyTree
from jaxspec.system.files import expanded
from jaxspec.tokens.vocabulary import TOKENIZER, check_same_tokens

Say = Callable[[str], Any]
_MODEL, _DRAFT, _LORA = "model.path", "rollout.draft.path", "lora.path"


def resolved(config: Config, say: Say) -> ResolvedConfig:
    """The config with what its checkpoints say in place of what it says of them.

    `rollout.draft.vocab` auto becomes a number, where the draft can have a vocabulary of its own.

    A policy with layers of its own that draft (MTP) lends them to a draft of that kind. `say` is
    told how what is ambiguous was read.

    Raises:
      ConfigError: a folder, a file or a key is missing, or a checkpoint is of a kind that is not
        supported.
    """
    config = ResolvedConfig.of(from_home(config))
    if config.model.path:
        model = policy_config(config.model)
        tokenizer = config.data.tokenizer or str(find_folder(model.path, _MODEL))
        config = replace(config, model=model, data=replace(config.data, tokenizer=tokenizer))
        _say_unread(model.path, _MODEL, WEIGHTS, say)
    if config.lora.path:
        # what is wrong is named before anything else reads it
        _say_unread(config.lora.path, _LORA, ADAPTERS, say)
        config = replace(config, lora=replace(config.lora, path=absolute(config.lora.path)))
    draft = config.rollout.draft
    for kind, layers in () if draft.path else _native(config.model):
        if draft.kind == kind:
            draft = replace(draft, path=config.model.path)
        else:
            say(
                f"{config.model.path} has {layers} {kind.upper()} layers of its own, which are left"
                f" out; --rollout.draft.kind {kind} drafts with them"
            )
    return _with_draft(config, draft.path, say) if draft.path else _with_vocabulary(config)


def _with_vocabulary(config: ResolvedConfig) -> ResolvedConfig:
    """The config with the size of the draft's own vocabulary, where it can have one."""
    draft, tokens = config.rollout.draft, config.model.vocab
    if draft.vocab != "auto" or "rollout.draft.vocab" not in kind_of(draft.kind).settings:
        return config
    is_large = config.offline.steps > 0 and tokens > LARGE_VOCAB
    # a multiple of 128 can be split over `tensor`
    own = min(tokens // 512 * 128, PUBLISHED_VOCAB) if is_large else 0
    return replace(config, rollout=replace(config.rollout, draft=replace(draft, vocab=own)))


def _with_draft(config: ResolvedConfig, path: str, say: Say) -> ResolvedConfig:
    """The config with what the folder of its draft says."""
    draft = config.rollout.draft
    names = [name for name in get_args(DraftKind) if kind_of(name).learned]
    require(
        draft.learned,
        f"{_DRAFT} {path} is for drafts of kind {', '.join(names[:-1])} and {names[-1]};"
        f" rollout.draft.kind is {draft.kind}",
    )
    folder = find_folder(path, _DRAFT)
    if path != config.model.path:
        _say_unread(path, _DRAFT, WEIGHTS, say)
    draft = replace(draft, path=absolute(path))
    config = replace(config, rollout=replace(config.rollout, draft=draft))
    spec = learned(draft.kind).resolve(config.draft_spec, folder, say)
    own, policy = spec.own, config.model
    if policy.rope_factor != 1 and own is not None:  # a draft's positions follow the policy's
        own = replace(own, rope_factor=policy.rope_factor, rope=policy.rope)
    draft = replace(
        draft,
        vocab=spec.vocab,
        ffn=spec.ffn,
        layers=spec.layers,
        embedding_first=spec.embedding_first,
    )
    rollout = replace(config.rollout, draft=draft)
    return replace(config, draft_model=own, head=spec.head, rollout=rollout)


def _say_unread(path: str, setting: str, name: str, say: Say) -> None:
    """Says which weights of a folder are left unread, since it may hold those of two trainings."""
    folder = find_folder(path, setting)
    unread = unread_weights(folder, name)
    if ADAPTERS in unread:
        say(
            f"{setting} {path}: the adapters in {ADAPTERS} are not merged; --{_LORA} {path} merges"
            " them"
        )
    others = [file for file in unread if file != ADAPTERS]
    if others:
        say(f"{setting} {path}: {name} or its index is read, and not {listed(others)}")


def from_home(config: Config) -> Config:
    """The config with home directories for `~` in the names of its data, whoever reads or digests
    them."""

    def whole(text: str, name: str) -> str:
        return str(expanded(text, name)) if text.startswith("~") else text

    def of(data: DataConfig, where: str) -> DataConfig:
        paths = {
            name: whole(getattr(data, name), f"{where}data.{name}")
            for name in ("path", "eval_path", "tokenizer")
        }
        return replace(data, **paths)

    def of_all(sets: tuple[SetConfig, ...], where: str) -> tuple[SetConfig, ...]:
        return tuple(
            replace(each, data=of(each.data, f"{where}.{number}."))
            for number, each in enumerate(sets)
        )

    offline = replace(config.offline, text=whole(config.offline.text, "offline.text"))
    return replace(
        config,
        data=of(config.data, ""),
        mixture=of_all(config.mixture, "mixture"),
        eval=replace(config.eval, sets=of_all(config.eval.sets, "eval.sets")),
        offline=offline,
    )


def _native(model: ModelSpec) -> list[tuple[str, int]]:
    """Kinds of draft of which the policy's own checkpoint has layers, and how many."""
    if not model.path:
        return []
    names = list(open_tensors(find_folder(model.path, _MODEL)))
    kinds = {name: kind_of(name).learned for name in get_args(DraftKind)}
    found = {name: own.native(names, model.layers) for name, own in kinds.items() if own}
    return [(name, layers) for name, layers in found.items() if layers]


def check_folders(config: ResolvedConfig, policy: Decoder, tokens: int) -> None:
    """Judges the checkpoints that a config names by their headers, so that what is wrong is named
    before anything is compiled.

    `policy` has the policy's shapes, and the tokenizer so many tokens.

    Raises:
      ConfigError: as `policy_checkpoint`, `merger` and `Learned.judge` do, or a draft has another
        tokenizer.
    """
    if config.model.path:
        policy_checkpoint(config.model, policy)
    if _is_there(config.lora.path):
        merger(config.lora.path, policy)
    draft, tokenizer = config.rollout.draft, config.data.tokenizer
    if _is_there(draft.path):
        folder = find_folder(draft.path, _DRAFT)
        if tokenizer and str(folder) != tokenizer and (folder / TOKENIZER).is_file():
            check_same_tokens(Path(tokenizer), folder)
        learned(draft.kind).judge(config.draft_spec, folder, tokens)


def _is_there(path: str) -> bool:
    """Whether a folder is named that is not gone, or an id on the hub.

    A run that is evaluated has its weights in its checkpoints, and needs the folder no more.
    """
    return bool(path) and (not path.startswith("/") or Path(path).is_dir())


def read_draft(config: ResolvedConfig, abstract: PyTree) -> PyTree:
    """The draft's network of `rollout.draft.path`, in the shapes, types and shardings of
    `abstract`.

    Raises:
      ConfigError: tensors are missing, foreign, or of another shape.
    """
    draft = config.rollout.draft
    folder = find_folder(draft.path, _DRAFT)
    return learned(draft.kind).load(config.draft_spec, folder, abstract)
