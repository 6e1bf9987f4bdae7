"""What the checkpoints that a config names say of it, and the draft that one of them holds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from jaxspec.config.rollout import LARGE_VOCAB, PUBLISHED_VOCAB
from jaxspec.config.settings import Config, DataConfig, ResolvedConfig, SetConfig
from jaxspec.drafts.kinds import DraftKind, get_kind, get_learned
from jaxspec.hf.pretrained import (
    ADAPTER_FILE,
    absolute_path,
    find_folder,
    load_policy_config,
    make_adapter_merger,
    open_policy_checkpoint,
)
from jaxspec.hf.tensor_files import WEIGHTS_FILE, list_unread_weights, open_tensors
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import join_names
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.state import PyTree
from jaxspec.system.files import expand_user_path
from jaxspec.tokens.vocabulary import TOKENIZER_FILE, check_same_tokens

Reporter = Callable[[str], Any]
_MODEL, _DRAFT, _LORA = "model.path", "rollout.draft.path", "lora.path"


def resolve_config(config: Config, report: Reporter) -> ResolvedConfig:
    """The config with what its checkpoints say in place of what it says of them.

    `rollout.draft.vocab` auto becomes a number, where the draft can have a vocabulary of its own.

    A policy with layers of its own that draft (MTP) lends them to a draft of that kind. `report` is
    told how what is ambiguous was read.

    Raises:
      ConfigError: a folder, a file or a key is missing, or a checkpoint is of a kind that is not
        supported.
    """
    config = ResolvedConfig.from_config(expand_home(config))
    if config.model.path:
        model = load_policy_config(config.model)
        tokenizer = config.data.tokenizer or str(find_folder(model.path, _MODEL))
        config = replace(config, model=model, data=replace(config.data, tokenizer=tokenizer))
        _report_unread_weights(model.path, _MODEL, WEIGHTS_FILE, report)
    if config.lora.path:
        # what is wrong is named before anything else reads it
        _report_unread_weights(config.lora.path, _LORA, ADAPTER_FILE, report)
        config = replace(config, lora=replace(config.lora, path=absolute_path(config.lora.path)))
    draft = config.rollout.draft
    for kind, layers in () if draft.path else _native_drafts(config.model):
        if draft.kind == kind:
            draft = replace(draft, path=config.model.path)
        else:
            report(
                f"{config.model.path} has {layers} {kind.upper()} layers of its own, which are left"
                f" out; --rollout.draft.kind {kind} drafts with them"
            )
    return _resolve_draft(config, draft.path, report) if draft.path else _resolve_vocabulary(config)


def _resolve_vocabulary(config: ResolvedConfig) -> ResolvedConfig:
    """The config with the size of the draft's own vocabulary, where it can have one."""
    draft, policy_vocab = config.rollout.draft, config.model.vocab
    if draft.vocab != "auto" or "rollout.draft.vocab" not in get_kind(draft.kind).settings:
        return config
    is_large = config.offline.steps > 0 and policy_vocab > LARGE_VOCAB
    # a multiple of 128 can be split over `tensor`
    draft_vocab = min(policy_vocab // 512 * 128, PUBLISHED_VOCAB) if is_large else 0
    return replace(config, rollout=replace(config.rollout, draft=replace(draft, vocab=draft_vocab)))


def _resolve_draft(config: ResolvedConfig, path: str, report: Reporter) -> ResolvedConfig:
    """The config with what the folder of its draft says."""
    draft = config.rollout.draft
    names = [name for name in get_args(DraftKind) if get_kind(name).learned]
    require(
        draft.is_learned,
        f"{_DRAFT} {path} is for drafts of kind {', '.join(names[:-1])} and {names[-1]};"
        f" rollout.draft.kind is {draft.kind}",
    )
    folder = find_folder(path, _DRAFT)
    if path != config.model.path:
        _report_unread_weights(path, _DRAFT, WEIGHTS_FILE, report)
    draft = replace(draft, path=absolute_path(path))
    config = replace(config, rollout=replace(config.rollout, draft=draft))
    spec = get_learned(draft.kind).resolve_spec(config.draft_spec, folder, report)
    draft_model, policy = spec.decoder, config.model
    if (
        policy.rope_factor != 1 and draft_model is not None
    ):  # a draft's positions follow the policy's
        draft_model = replace(draft_model, rope_factor=policy.rope_factor, rope=policy.rope)
    draft = replace(
        draft,
        vocab=spec.vocab,
        ffn=spec.ffn,
        layers=spec.layers,
        embedding_first=spec.embedding_first,
    )
    rollout = replace(config.rollout, draft=draft)
    return replace(config, draft_model=draft_model, head=spec.head, rollout=rollout)


def _report_unread_weights(path: str, setting: str, name: str, report: Reporter) -> None:
    """Says which weights of a folder are left unread, since it may hold those of two trainings."""
    folder = find_folder(path, setting)
    unread = list_unread_weights(folder, name)
    if ADAPTER_FILE in unread:
        report(
            f"{setting} {path}: the adapters in {ADAPTER_FILE} are not merged; --{_LORA} {path}"
            " merges them"
        )
    other_files = [file for file in unread if file != ADAPTER_FILE]
    if other_files:
        report(f"{setting} {path}: {name} or its index is read, and not {join_names(other_files)}")


def expand_home(config: Config) -> Config:
    """The config with home directories for `~` in the names of its data, whoever reads or digests
    them."""

    def expand_path(text: str, name: str) -> str:
        return str(expand_user_path(text, name)) if text.startswith("~") else text

    def expand_data(data: DataConfig, prefix: str) -> DataConfig:
        paths = {
            name: expand_path(getattr(data, name), f"{prefix}data.{name}")
            for name in ("path", "eval_path", "tokenizer")
        }
        return replace(data, **paths)

    def expand_sets(sets: tuple[SetConfig, ...], prefix: str) -> tuple[SetConfig, ...]:
        return tuple(
            replace(dataset, data=expand_data(dataset.data, f"{prefix}.{index}."))
            for index, dataset in enumerate(sets)
        )

    offline = replace(config.offline, text=expand_path(config.offline.text, "offline.text"))
    return replace(
        config,
        data=expand_data(config.data, ""),
        mixture=expand_sets(config.mixture, "mixture"),
        eval=replace(config.eval, sets=expand_sets(config.eval.sets, "eval.sets")),
        offline=offline,
    )


def _native_drafts(model: ModelSpec) -> list[tuple[str, int]]:
    """Kinds of draft of which the policy's own checkpoint has layers, and how many."""
    if not model.path:
        return []
    names = list(open_tensors(find_folder(model.path, _MODEL)))
    kinds = {name: get_kind(name).learned for name in get_args(DraftKind)}
    layer_counts = {
        name: learned_kind.count_native_layers(names, model.layers)
        for name, learned_kind in kinds.items()
        if learned_kind
    }
    return [(name, layers) for name, layers in layer_counts.items() if layers]


def check_folders(config: ResolvedConfig, policy: Decoder, tokens: int) -> None:
    """Judges the checkpoints that a config names by their headers, so that what is wrong is named
    before anything is compiled.

    `policy` has the policy's shapes, and the tokenizer so many tokens.

    Raises:
      ConfigError: as `open_policy_checkpoint`, `make_adapter_merger` and `Learned.check_files` do,
        or a draft has another tokenizer.
    """
    if config.model.path:
        open_policy_checkpoint(config.model, policy)
    if _is_available(config.lora.path):
        make_adapter_merger(config.lora.path, policy)
    draft, tokenizer = config.rollout.draft, config.data.tokenizer
    if _is_available(draft.path):
        folder = find_folder(draft.path, _DRAFT)
        if tokenizer and str(folder) != tokenizer and (folder / TOKENIZER_FILE).is_file():
            check_same_tokens(Path(tokenizer), folder)
        get_learned(draft.kind).check_files(config.draft_spec, folder, tokens)


def _is_available(path: str) -> bool:
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
    return get_learned(draft.kind).load_network(config.draft_spec, folder, abstract)
