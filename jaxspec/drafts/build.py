"""From the config to a `Draft` and to the network it learns: the one place that knows the kinds."""

from jaxtyping import Array, Key

from jaxspec.config import Config
from jaxspec.drafts.base import Draft
from jaxspec.drafts.eagle3 import eagle3
from jaxspec.models.eagle3 import Eagle3


def build_draft(config: Config) -> Draft | None:
    """The draft of a run; None is plain decoding."""
    match config.rollout.draft.kind:
        case "none":
            return None
        case "eagle3":
            return eagle3(config.rollout.draft.draft_length)


def build_network(config: Config, key: Key[Array, ""]) -> Eagle3 | None:
    """The draft's network with fresh weights; None when the kind has nothing to learn."""
    match config.rollout.draft.kind:
        case "none":
            return None
        case "eagle3":
            return Eagle3(config.model, key)
