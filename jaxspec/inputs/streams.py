"""Random streams of a run. Each use of its seed has a separate stream."""

from enum import IntEnum, auto

import jax
import numpy as np
from jaxtyping import Array, Int, Key


class Stream(IntEnum):
    """Uses of a run's seed. `Prompts.stream` holds that of a generation call."""

    # New uses are added at the end: the values are part of the keys of all streams.
    TRAIN = 0
    EVALUATE = auto()
    OFFLINE = auto()
    """Responses for offline training of a draft."""
    SAMPLE = auto()
    REMEMBER = auto()
    """Answers of an earlier epoch, in a benchmark."""
    COMPARE = auto()
    """Comparison of plain and speculative decoding on the same prompts."""
    PILOT = auto()
    """Measurement of a draft before draft lengths are chosen."""
    POLICY_WEIGHTS = auto()
    DRAFT_WEIGHTS = auto()
    ADAPTERS = auto()
    DOCUMENTS = auto()
    """Documents of the warm start."""
    ORDER = auto()
    """Order of texts in the training of a draft."""
    CORPUS = auto()
    """Built-in corpus of texts."""
    ROUNDING = auto()
    """Rounding of merged adapters, numbered by weight version."""


def stream_key(
    seed: int, stream: Int[Array, ""] | int, number: Int[Array, ""] | int = 0
) -> Key[Array, ""]:
    """Returns the key of an item of a stream.

    Items are numbered, such as batches. Stream and number may be traced.
    """
    # Two folds, since a sum of stream and number would give some pairs the same key.
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), number)


def stream_rng(seed: int, stream: Stream, number: int = 0) -> np.random.Generator:
    """Returns the NumPy generator of an item of a stream."""
    # For draws on the host, where a JAX key would start a computation on a device.
    return np.random.default_rng([seed, stream, number])
