"""Log-probabilities of given tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling import Processing, compute_logprobs, entropy
from jaxspec.state import UNDRAFTED, Rollout


def response_mask(rollout: Rollout) -> Bool[Array, "B S"]:
    """Masks the tokens that the policy sampled."""
    return rollout.origin >= UNDRAFTED


def label_logprobs(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    response_positions: Int[Array, "B T"],
    processing: Processing,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes logprobs and entropies at labels.

    Both use the sampling distribution. `response_positions` counts the response tokens before each
    label. A sampled label counts as inside top-k and top-p, even if rounding puts it just outside.
    """
    logprobs = compute_logprobs(logits, processing, response_positions, sampled_ids=labels)
    return _take_label_logprobs(logprobs, labels), entropy(logprobs)


@jax.custom_vjp
def _take_label_logprobs(
    logprobs: Float[Array, "B T V"], labels: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    return jnp.take_along_axis(logprobs, labels[:, :, None], axis=2)[:, :, 0]


def _label_gradient(
    labels_and_vocab: tuple[Int[Array, "B T"], Int[Array, " V"]], gradient: Float[Array, "B T"]
) -> tuple[Float[Array, "B T V"], None]:
    """Computes the gradient by comparison with labels."""
    # XLA fuses a comparison into its neighbors. A scatter would write zeros for the full
    # vocabulary and read them again.
    labels, ids = labels_and_vocab
    zero = jnp.zeros((), gradient.dtype)
    return jnp.where(ids == labels[:, :, None], gradient[:, :, None], zero), None


_take_label_logprobs.defvjp(
    lambda logprobs, labels: (
        _take_label_logprobs(logprobs, labels),
        (labels, jnp.arange(logprobs.shape[-1], dtype=labels.dtype)),
    ),
    _label_gradient,
)
