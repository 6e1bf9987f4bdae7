"""Resolution of configs by their checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from jaxspec.config.presets import spec_without_checkpoint
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
    """Replaces settings by the facts of the config's checkpoints.

    The draft's own settings get the values of its files. Without files, `auto` is resolved. MTP
    layers of the policy's checkpoint become its draft if the kind is mtp. `report` receives a
    message for each ambiguity.

    Raises:
      ConfigError: A folder, a file or a key is missing, or a kind of checkpoint is not supported.
    """
    # Expanded once, here, so that all readers and digests see the same paths.
    config = ResolvedConfig.from_config(expand_home(config))
    if config.model.path:
        model = load_policy_config(config.model)
        # The tokenizer set by the user wins over that of the checkpoint.
        tokenizer = config.data.tokenizer or str(find_folder(model.path, _MODEL))
        config = replace(config, model=model, data=replace(config.data, tokenizer=tokenizer))
        _report_unread_weights(model.path, _MODEL, WEIGHTS_FILE, report)
    if config.lora.path:
        # First, so that errors in the folder are reported before anything else reads it.
        _report_unread_weights(config.lora.path, _LORA, ADAPTER_FILE, report)
        config = replace(config, lora=replace(config.lora, path=absolute_path(config.lora.path)))
    draft = config.rollout.draft
    # A path of the user's draft wins over layers in the policy's checkpoint.
    for kind, layers in () if draft.path else _find_native_drafts(config.model):
        if draft.kind == kind:
            draft = replace(draft, path=config.model.path)
        else:
            report(
                f"{config.model.path} has {layers} {kind.upper()} layers, which are not used;"
                f" --rollout.draft.kind {kind} drafts with them"
            )
    if draft.path:
        return _resolve_draft(config, draft.path, report)
    # `auto` depends on the policy's sizes, so it is resolved after them.
    learned_kind = get_kind(draft.kind).learned
    if learned_kind is None or learned_kind.resolve_settings is None:
        return config
    return _with_draft(config, **{draft.kind: learned_kind.resolve_settings(config.draft_spec)})


def _with_draft(config: ResolvedConfig, **settings: Any) -> ResolvedConfig:
    """Returns the config with other settings of its draft."""
    draft = replace(config.rollout.draft, **settings)
    return replace(config, rollout=replace(config.rollout, draft=draft))


def _resolve_draft(config: ResolvedConfig, path: str, report: Reporter) -> ResolvedConfig:
    """Resolves the draft by its folder."""
    draft = config.rollout.draft
    names = [name for name in get_args(DraftKind) if get_kind(name).learned]
    require(
        # Kinds without weights would silently ignore the folder.
        draft.is_learned,
        f"{_DRAFT} {path} is for drafts of kind {', '.join(names[:-1])} and {names[-1]};"
        f" rollout.draft.kind is {draft.kind}",
    )
    folder = find_folder(path, _DRAFT)
    # The policy's own folder was reported already, and its layers are read by name.
    if path != config.model.path:
        _report_unread_weights(path, _DRAFT, WEIGHTS_FILE, report)
    # `draft_spec` below reads the absolute path.
    config = _with_draft(config, path=absolute_path(path))
    facts = get_learned(draft.kind).read_facts(config.draft_spec, folder, report)
    decoder, policy = facts.decoder, config.model
    # A draft's positions must be scaled like the policy's.
    if policy.rope_factor != 1 and decoder is not None:
        decoder = replace(decoder, rope_factor=policy.rope_factor, rope=policy.rope)
    if facts.settings is not None:
        config = _with_draft(config, **{draft.kind: facts.settings})
    return replace(config, draft_model=decoder, head=facts.head or config.head)


def _report_unread_weights(path: str, setting: str, name: str, report: Reporter) -> None:
    """Reports weights that are not read."""
    # A folder may hold the weights of two trainings, of which only one is read.
    folder = find_folder(path, setting)
    unread = list_unread_weights(folder, name)
    if ADAPTER_FILE in unread:
        report(
            f"{setting} {path}: the adapters in {ADAPTER_FILE} are not merged; --{_LORA} {path}"
            " merges them"
        )
    # Adapters have a remedy of their own, in the message above.
    other_files = [file for file in unread if file != ADAPTER_FILE]
    if other_files:
        report(f"{setting} {path}: {name} or its index is read, but not {join_names(other_files)}")


def expand_home(config: Config) -> Config:
    """Expands `~` in the names of data files and of the tokenizer."""

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


def _find_native_drafts(model: ModelSpec) -> list[tuple[str, int]]:
    """Returns kinds and numbers of draft layers in the policy's checkpoint."""
    if not model.path:
        return []
    # Names are in the headers, so no weights are read.
    names = list(open_tensors(find_folder(model.path, _MODEL)))
    kinds = {name: get_kind(name).learned for name in get_args(DraftKind)}
    layer_counts = {
        name: learned_kind.count_native_layers(names, model.layers)
        for name, learned_kind in kinds.items()
        if learned_kind
    }
    return [(name, layers) for name, layers in layer_counts.items() if layers]


def check_folders(config: ResolvedConfig, policy: Decoder, tokens: int) -> None:
    """Checks the headers of the checkpoints that a config names.

    Args:
      config: config whose paths are checked.
      policy: the policy's network, of which only shapes are read.
      tokens: number of tokens of the tokenizer.

    Raises:
      ConfigError: A checkpoint does not fit its network, or a draft has another tokenizer.
    """
    if config.model.path:
        # Headers alone, so that errors come before anything is compiled.
        open_policy_checkpoint(config.model, policy)
    if _is_available(config.lora.path):
        make_adapter_merger(config.lora.path, policy)
    draft, tokenizer = config.rollout.draft, config.data.tokenizer
    if _is_available(draft.path):
        folder = find_folder(draft.path, _DRAFT)
        # A draft proposes token ids, which must mean the same to the policy.
        if tokenizer and str(folder) != tokenizer and (folder / TOKENIZER_FILE).is_file():
            check_same_tokens(Path(tokenizer), folder)
        get_learned(draft.kind).check_files(config.draft_spec, folder, tokens)


def _is_available(path: str) -> bool:
    """Returns whether a path is an existing folder or a hub id."""
    # An evaluated run has its weights in its checkpoints, and does not need the folder.
    return bool(path) and (not path.startswith("/") or Path(path).is_dir())


def read_draft(config: ResolvedConfig, abstract: PyTree) -> PyTree:
    """Loads the draft of `rollout.draft.path`.

    Shapes, types and shardings are those of `abstract`.

    Raises:
      ConfigError: Tensors are missing, unknown, or of another shape.
    """
    draft = config.rollout.draft
    folder = find_folder(draft.path, _DRAFT)
    return get_learned(draft.kind).load_network(config.draft_spec, folder, abstract)


def resolve_from_local_files(config: Config) -> tuple[ResolvedConfig, list[str]]:
    """Resolves a config by the files here.

    Missing folders are replaced by the sizes in the config. Also returns the inputs that were not
    checked.
    """
    unchecked: list[str] = []

    def local_path(setting: str, path: str) -> str:
        # A hub id is no local path, so it is not downloaded for a mere check.
        if path and expand_user_path(path, setting).exists():
            return path
        unchecked.append(
            f"{setting} {path}, which is not here" if path else f"{setting}: none is set"
        )
        return ""

    model = config.model
    # Without a path, a warm start or a tokenizer implies that the policy is built here.
    if model.path or not (config.sft.steps or config.data.tokenizer):
        model = replace(model, path=local_path("model.path", model.path))
    draft, lora, data = config.rollout.draft, config.lora, config.data
    if draft.path:
        draft = replace(draft, path=local_path("rollout.draft.path", draft.path))
    if lora.path:
        lora = replace(lora, path=local_path("lora.path", lora.path))
    if data.tokenizer:
        data = replace(data, tokenizer=local_path("data.tokenizer", data.tokenizer))
    # Generated tasks have one of these two styles, so any other implies a file.
    if data.path or data.answer_style not in ("hash", "code"):
        # Only the presence of a name counts below. The file itself is not read.
        data = replace(data, path=local_path("data.path", data.path) or "problems.jsonl")
    rollout = replace(config.rollout, draft=draft)
    if not (model.path or data.tokenizer):
        # Stop strings become token tables, which need the vocabulary.
        names = [name for name in ("stop", "stop_ids") if getattr(rollout, name)]
        unchecked += [f"rollout.{name}, which needs the tokenizer" for name in names]
        rollout = replace(rollout, stop=(), stop_ids=())
    local_config = replace(config, rollout=rollout, lora=lora, data=data)
    if model.path:
        # The folder of the policy is here, and states everything.
        return resolve_config(replace(local_config, model=model), unchecked.append), unchecked
    # Scaled positions are refused if the context is unknown. The spec below knows it.
    resolved = resolve_config(
        replace(local_config, model=replace(model, rope_factor=1.0)), unchecked.append
    )
    return replace(resolved, model=spec_without_checkpoint(model)), unchecked
