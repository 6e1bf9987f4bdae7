"""Token log-probabilities of given sequences, without ever holding the logits of all positions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.mesh import gpus_in_scope
from jaxspec.sampling import Processing, entropy, processed_logprobs
from jaxspec.state import Rollout

CHUNK_ELEMENTS = 2**25
"""Logits alive at once: positions are taken in chunks so that rows x chunk x vocabulary stays below
this."""
ON_GPUS = 8
"""Times as many on GPUs: every chunk reads the whole head again, which 55 positions of a vocabulary
of 151,936 are too few for."""


def in_chunks(function: Callable[..., Any], elements_per_position: int, *arrays: Array) -> Any:
    """Maps `function` over chunks of the position axis (the second) and joins the results; the
    backward pass recomputes each chunk.

    One chunk, without a loop, when everything fits.
    """
    length, most = arrays[0].shape[1], CHUNK_ELEMENTS * (ON_GPUS if gpus_in_scope() else 1)
    chunk = max(1, min(length, most // max(elements_per_position, 1)))
    if chunk == length:
        return function(*arrays)
    count = -(-length // chunk)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(array.shape[0], count, chunk, *array.shape[2:]), 1, 0)

    def join(array: Array) -> Array:
        moved = jnp.moveaxis(array, 0, 1)
        return moved.reshape(moved.shape[0], count * chunk, *moved.shape[3:])[:, :length]

    mapped = jax.lax.map(
        lambda parts: jax.checkpoint(function)(*parts), tuple(split(array) for array in arrays)
    )
    return jax.tree.map(join, mapped)


def response_mask(rollout: Rollout) -> Bool[Array, "B S"]:
    """True at response tokens."""
    positions = jnp.arange(rollout.tokens.shape[1], dtype=jnp.int32)
    return (positions >= rollout.prompt_lengths[:, None]) & (positions < rollout.lengths[:, None])


def label_logprobs(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    produced: Int[Array, "B T"],
    processing: Processing,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each label under the sampling distribution, and the entropy of that.

    `produced` counts the tokens of the response before each label. A label that rounding puts just
    outside top-k or top-p here, though it was sampled, counts as inside.
    """
    logprobs = processed_logprobs(logits, processing, produced, keep=labels)
    return jnp.take_along_axis(logprobs, labels[:, :, None], axis=2)[:, :, 0], entropy(logprobs)
