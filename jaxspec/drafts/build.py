"""From the config to a `Draft` and to the network it learns: the one place that knows the kinds."""

import dataclasses

from jaxtyping import Array, Key

from jaxspec.config.settings import Config, HeadConfig, ModelConfig, require
from jaxspec.drafts.base import Draft
from jaxspec.drafts.lookup import history, ngram, preferring
from jaxspec.drafts.model import external
from jaxspec.drafts.recurrent import recurrent
from jaxspec.models.decoder import Decoder, tap_boundaries
from jaxspec.models.eagle3 import Eagle3, llama_head, tap_count
from jaxspec.models.mtp import Mtp


def build_draft(config: Config, stop_ids: tuple[int, ...]) -> Draft | None:
    """The draft of a run; None is plain decoding."""
    draft = config.rollout.draft
    match draft.kind:
        case "none":
            return None
        case "ngram" | "history":
            return _lookup(config, stop_ids)
        case "eagle3":
            learned = recurrent(draft.longest, taps_of(config.head, config.model.layers))
        case "mtp":
            learned = recurrent(draft.longest, depth=draft.layers)
        case "model":
            learned = external(draft.longest)
    return (
        learned
        if config.rollout.lookup.beside == "none"
        else preferring(_lookup(config, stop_ids), learned)
    )


def _lookup(config: Config, stop_ids: tuple[int, ...]) -> Draft:
    length, lookup = config.rollout.draft.longest, config.rollout.lookup
    if config.rollout.lookup_kind == "history":
        return history(length, config.grpo.group_size, lookup.min_match, lookup.max_match)
    return ngram(length, lookup.rule, lookup.min_match, lookup.max_match, stop_ids)


def taps_of(head: HeadConfig, layers: int) -> tuple[int, ...]:
    """Boundaries at which an EAGLE-3 head reads a policy of `layers` layers; none: it reads the
    final-norm hidden states."""
    return (head.taps or tap_boundaries(layers)) if head.use_taps else ()


def draft_model(config: Config) -> ModelConfig:
    """The draft's own decoder: that of a loaded draft, else of the policy's sizes and, but for
    EAGLE-3, its family."""
    draft, model = config.rollout.draft, config.model
    if config.draft_model is not None:
        return dataclasses.replace(config.draft_model, dtype=model.dtype, remat=model.remat)
    if draft.kind == "eagle3":
        return llama_head(model, draft.ffn)
    return dataclasses.replace(model, path="", layers=draft.layers, ffn=draft.ffn or model.ffn)


def build_network(config: Config, key: Key[Array, ""]) -> Eagle3 | Mtp | Decoder | None:
    """The draft's network with fresh weights; None when the kind has nothing to learn."""
    draft = config.rollout.draft
    match draft.kind:
        case "eagle3":
            return Eagle3(draft_model(config), config.head, config.model, key, draft.vocab)
        case "mtp":
            return Mtp(draft_model(config), key, draft.layers, draft.embedding_first)
        case "model":
            return Decoder(draft_model(config), key)
        case "none" | "ngram" | "history":
            return None


def check_fits(network: Eagle3 | Mtp | Decoder, target: ModelConfig) -> None:
    """Whether a draft's network can draft for a target: it reads the target's hidden states and
    embedding, and speaks its vocabulary.

    Raises:
      ConfigError: names what differs, with both numbers.
    """
    if isinstance(network, Decoder):
        sizes = {"vocabulary": (network.embedding.shape[0], target.vocab)}
    elif isinstance(network, Mtp):
        sizes = {"hidden size": (network.project.shape[-1], target.embed)}
    else:
        sizes, taps = {}, tap_count(network.form)
        if network.embedding is None or network.fuse is None:
            sizes["hidden size"] = network.config.embed, target.embed
        if network.fuse is not None:
            sizes[f"width of {taps} taps"] = network.fuse.shape[0], taps * target.embed
        sizes["vocabulary"] = (
            network.config.vocab if network.vocabulary is not None else network.head.shape[-1],
            target.vocab,
        )
        if network.embedding is not None:
            sizes["embedding table"] = network.embedding.shape[0], target.vocab
    wrong = [
        f"its {name} is {own}, the policy's {wanted}"
        for name, (own, wanted) in sizes.items()
        if own != wanted
    ]
    kind = type(network).__name__
    require(
        not wrong,
        f"the {kind} draft does not fit the policy: {'; '.join(wrong)}. Train or load one that was"
        " made for this policy",
    )
