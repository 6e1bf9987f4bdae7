"""What a config says of itself where the folders and files that it names are elsewhere."""

from dataclasses import replace

from jaxspec.config.from_checkpoint import resolved
from jaxspec.config.presets import as_published
from jaxspec.config.settings import Config, ResolvedConfig
from jaxspec.system.files import expanded


def with_what_is_here(config: Config) -> tuple[ResolvedConfig, list[str]]:
    """The config as a run reads it, but for folders that are not here, of which its own sizes stand
    for what they say; and what was not looked at."""
    unseen: list[str] = []

    def here(setting: str, path: str) -> str:
        if path and expanded(path, setting).exists():
            return path
        unseen.append(f"{setting} {path}, which is not here" if path else f"{setting}: none is set")
        return ""

    model = config.model
    if model.path or not (config.sft.steps or config.data.tokenizer):
        model = replace(model, path=here("model.path", model.path))
    draft, lora, data = config.rollout.draft, config.lora, config.data
    if draft.path:
        draft = replace(draft, path=here("rollout.draft.path", draft.path))
    if lora.path:
        lora = replace(lora, path=here("lora.path", lora.path))
    if data.tokenizer:
        data = replace(data, tokenizer=here("data.tokenizer", data.tokenizer))
    if data.path or data.answer_style not in ("hash", "code"):
        # a name, of which nothing is read, says that there will be a file
        data = replace(data, path=here("data.path", data.path) or "problems.jsonl")
    rollout = replace(config.rollout, draft=draft)
    if not (model.path or data.tokenizer):
        told = [name for name in ("stop", "stop_ids") if getattr(rollout, name)]
        unseen += [f"rollout.{name}, which needs the tokenizer" for name in told]
        rollout = replace(rollout, stop=(), stop_ids=())
    given = replace(config, rollout=rollout, lora=lora, data=data)
    if model.path:
        return resolved(replace(given, model=model), unseen.append), unseen
    whole = resolved(replace(given, model=replace(model, rope_factor=1.0)), unseen.append)
    return replace(whole, model=as_published(model)), unseen
