"""A feed-forward layer of many experts, of which each token passes through a few (Shazeer et al.,
arXiv 1701.06538)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


def mixture(
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    per_token: int,
    normalize: bool,
) -> Float[Array, "B T D"]:
    """Sum of the SwiGLU layers of each token's `per_token` likeliest experts, weighted by their
    probabilities; no token is dropped.

    `normalize` makes the weights of a token sum to 1. The router's softmax is taken in at least
    float32 (Qwen3, arXiv 2505.09388).
    """
    tokens = x.reshape(-1, x.shape[-1])
    scores = jnp.einsum("TD,DE->TE", tokens, router)
    weights, chosen = lax.top_k(
        jax.nn.softmax(scores.astype(np.promote_types(scores.dtype, np.float32)), axis=-1),
        per_token,
    )
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    # Grouped products want the rows of an expert side by side.
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    sizes = jnp.sum(
        experts[:, None] == jnp.arange(router.shape[1], dtype=experts.dtype),
        axis=0,
        dtype=jnp.int32,
    )
    rows = tokens[order // per_token]
    inner = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    outputs = lax.ragged_dot(inner, down, sizes)[jnp.argsort(order)]
    outputs = outputs.reshape(*chosen.shape, -1) * weights[:, :, None].astype(x.dtype)
    return jnp.sum(outputs, axis=1).reshape(x.shape)
