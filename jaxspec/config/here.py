"""Resolution of configs without all their files."""

from dataclasses import replace

from jaxspec.config.from_checkpoint import resolve_config
from jaxspec.config.presets import spec_without_checkpoint
from jaxspec.config.settings import Config, ResolvedConfig
from jaxspec.system.files import expand_user_path


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
