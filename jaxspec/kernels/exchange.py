"""Rows that go from each member of `expert` to each other, inside a `shard_map` that is manual over
it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.mesh import EXPERT, has_gpus_in_scope


def all_to_all_counts(counts: Int[Array, " X"]) -> Int[Array, " X"]:
    """How many rows come from each member, of how many go to each."""
    return lax.all_to_all(counts, EXPERT, 0, 0, tiled=True)


@jax.custom_vjp
def all_to_all_rows(
    rows: Float[Array, "X n D"], send_counts: Int[Array, " X"], receive_counts: Int[Array, " X"]
) -> Float[Array, "X n D"]:
    """The first `send_counts` rows for each member go there; returns what comes from each, of
    which the first `receive_counts` count.

    On GPUs only those rows travel; elsewhere XLA cannot do that, and all `n` do, the most that
    there can be.
    """
    if not has_gpus_in_scope():
        return lax.all_to_all(rows, EXPERT, 0, 0, tiled=True)
    members, capacity, width = rows.shape
    member_ids = jnp.arange(members, dtype=jnp.int32)
    received = lax.ragged_all_to_all(
        rows.reshape(-1, width),
        jnp.zeros((members * capacity, width), rows.dtype),
        member_ids * capacity,
        send_counts,
        jnp.zeros_like(member_ids) + lax.axis_index(EXPERT).astype(jnp.int32) * capacity,
        receive_counts,
        axis_name=EXPERT,
    )
    return received.reshape(rows.shape)


def _forward(
    rows: Array, send_counts: Array, receive_counts: Array
) -> tuple[Array, tuple[Array, Array]]:
    return all_to_all_rows(rows, send_counts, receive_counts), (send_counts, receive_counts)


def _backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    send_counts, receive_counts = residuals
    row_gradient = all_to_all_rows(gradient, receive_counts, send_counts)
    # what did not leave has no gradient
    is_sent = jnp.arange(row_gradient.shape[1], dtype=jnp.int32) < send_counts[:, None]
    return jnp.where(is_sent[..., None], row_gradient, 0), None, None


all_to_all_rows.defvjp(_forward, _backward)
