"""From the config to a `Draft` and to the network it learns: the one place that knows the kinds."""

import dataclasses

from jaxtyping import Array, Key

from jaxspec.config import Config, ModelConfig, require
from jaxspec.drafts.base import Draft
from jaxspec.drafts.lookup import history, ngram, preferring
from jaxspec.drafts.model import external
from jaxspec.drafts.recurrent import recurrent
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
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
            learned = recurrent(draft.draft_length, with_taps=True)
        case "mtp":
            learned = recurrent(draft.draft_length, with_taps=False, depth=draft.layers)
        case "model":
            learned = external(draft.draft_length)
    return learned if config.rollout.lookup.beside == "none" else preferring(_lookup(config, stop_ids), learned)


def _lookup(config: Config, stop_ids: tuple[int, ...]) -> Draft:
    length, lookup = config.rollout.draft.draft_length, config.rollout.lookup
    if config.rollout.lookup_kind == "history":
        return history(length, config.grpo.group_size, lookup.min_match, lookup.max_match)
    return ngram(length, lookup.rule, lookup.min_match, lookup.max_match, stop_ids)


def draft_model(config: Config) -> ModelConfig:
    """The small decoder of kind `model`: the policy's sizes with `layers` layers and a narrower SwiGLU."""
    draft = config.rollout.draft
    return dataclasses.replace(config.model, layers=draft.layers, ffn=draft.ffn or config.model.ffn)


def build_network(config: Config, key: Key[Array, ""]) -> Eagle3 | Mtp | Decoder | None:
    """The draft's network with fresh weights; None when the kind has nothing to learn."""
    draft = config.rollout.draft
    match draft.kind:
        case "eagle3":
            return Eagle3(config.model, key, vocab=draft.vocab, ffn=draft.ffn)
        case "mtp":
            return Mtp(config.model, key, layers=draft.layers, embedding_first=draft.embedding_first, ffn=draft.ffn)
        case "model":
            return Decoder(draft_model(config), key)
        case "none" | "ngram" | "history":
            return None


def check_fits(network: Eagle3 | Mtp | Decoder, target: ModelConfig) -> None:
    """Whether a draft's network can draft for a target: it reads the target's hidden states and embedding, and speaks its vocabulary.

    Raises:
      ConfigError: names what differs, with both numbers.
    """
    if isinstance(network, Decoder):
        sizes = {"vocabulary": (network.embedding.shape[0], target.vocab)}
    elif isinstance(network, Mtp):
        sizes = {"hidden size": (network.project.shape[-1], target.embed)}
    else:
        sizes = {
            "hidden size": (network.fuse.shape[1], target.embed),
            "width of three taps": (network.fuse.shape[0], 3 * target.embed),
            "vocabulary": (network.config.vocab if network.vocabulary is not None else network.head.shape[-1], target.vocab),
        }
    wrong = [f"its {name} is {own}, the policy's {wanted}" for name, (own, wanted) in sizes.items() if own != wanted]
    kind = type(network).__name__
    require(not wrong, f"the {kind} draft does not fit the policy: {'; '.join(wrong)}. Train or load one that was made for this policy")
