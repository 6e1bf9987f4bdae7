"""Where the randomness of a run comes from: every use of its seed has a stream of its own."""

from enum import IntEnum, auto

import jax
import numpy as np
from jaxtyping import Array, Int, Key


class Stream(IntEnum):
    """Uses of a run's seed; those of calls stand in `Prompts.stream`."""

    TRAIN = 0
    EVALUATE = auto()
    OFFLINE = auto()
    """Responses on which a draft is trained."""
    SAMPLE = auto()
    REMEMBER = auto()
    """Answers of an earlier epoch, in a benchmark."""
    COMPARE = auto()
    """Plain and speculative decoding of the same prompts."""
    PILOT = auto()
    """What a draft is worth, before draft lengths are chosen by it."""
    POLICY_WEIGHTS = auto()
    DRAFT_WEIGHTS = auto()
    ADAPTERS = auto()
    DOCUMENTS = auto()
    """Of the warm start."""
    ORDER = auto()
    """In which a draft is trained on texts."""
    CORPUS = auto()
    """The built-in text."""
    ROUNDING = auto()
    """Of merged adapters, by the version of the weights."""


def stream_key(
    seed: int, stream: Int[Array, ""] | int, number: Int[Array, ""] | int = 0
) -> Key[Array, ""]:
    """The key of use `number` of a stream, such as a batch; both may be traced."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), number)


def stream_rng(seed: int, stream: Stream, number: int = 0) -> np.random.Generator:
    """The generator of use `number` of a stream, for what is drawn on the host."""
    return np.random.default_rng([seed, stream, number])
