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
CHUNK_POSITIONS_GPU, CHUNK_ELEMENTS_GPU = 2048, 2**29
"""Positions of a chunk on GPUs, and logits alive at once: 2 GiB in float32.

For each weight of the head a chunk of n positions moves 12 bytes in the backward pass, 8 of them
for the gradient, and makes 6n operations. An H100 makes 295 operations a byte: from 600
positions on the products take longer, and from 1,200 on also the one that adds up the gradient (2n
operations on 8 bytes). Beyond 2,048 positions a chunk would only take more memory."""
TILE = 16
"""Chunks on GPUs are a multiple of so many positions: XLA pads other products by copies."""


def in_chunks(function: Callable[..., Any], elements_per_position: int, *arrays: Array) -> Any:
    """Maps `function` over chunks of the position axis (the second) and joins the results; the
    backward pass recomputes each chunk.

    One chunk, without a loop, when everything fits.
    """
    length = arrays[0].shape[1]
    chunk = _chunk_length(length, max(elements_per_position, 1))
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


def _chunk_length(length: int, elements_per_position: int) -> int:
    """Positions of a chunk; on GPUs chunks are about equal, so that the last one is not padded."""
    if not gpus_in_scope():
        return max(1, min(length, CHUNK_ELEMENTS // elements_per_position))
    most = max(1, min(CHUNK_POSITIONS_GPU, CHUNK_ELEMENTS_GPU // elements_per_position))
    even = -(-length // -(-length // most))
    return min(length, -(-even // TILE) * TILE)


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
    return _at_labels(logprobs, labels), entropy(logprobs)


@jax.custom_vjp
def _at_labels(logprobs: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.take_along_axis(logprobs, labels[:, :, None], axis=2)[:, :, 0]


def _to_labels(
    labels_and_vocab: tuple[Int[Array, "B T"], Int[Array, " V"]], gradient: Float[Array, "B T"]
) -> tuple[Float[Array, "B T V"], None]:
    """The gradient by comparison, which joins the kernels around; a scatter would write zeros for
    the whole vocabulary and read them again."""
    labels, ids = labels_and_vocab
    zero = jnp.zeros((), gradient.dtype)
    return jnp.where(ids == labels[:, :, None], gradient[:, :, None], zero), None


_at_labels.defvjp(
    lambda logprobs, labels: (
        _at_labels(logprobs, labels),
        (labels, jnp.arange(logprobs.shape[-1], dtype=labels.dtype)),
    ),
    _to_labels,
)
