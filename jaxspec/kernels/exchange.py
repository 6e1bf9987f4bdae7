"""Rows that go from each member of `expert` to each other, inside a `shard_map` that is manual over
it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.mesh import EXPERT, gpus_in_scope


def arriving(counts: Int[Array, " X"]) -> Int[Array, " X"]:
    """How many rows come from each member, of how many go to each."""
    return lax.all_to_all(counts, EXPERT, 0, 0, tiled=True)


@jax.custom_vjp
def exchanged(
    rows: Float[Array, "X n D"], leave: Int[Array, " X"], arrive: Int[Array, " X"]
) -> Float[Array, "X n D"]:
    """The first `leave` rows for each member go there; returns what comes from each, of which the
    first `arrive` count.

    On GPUs only those rows travel; elsewhere XLA cannot do that, and all `n` do, the most that
    there can be.
    """
    if not gpus_in_scope():
        return lax.all_to_all(rows, EXPERT, 0, 0, tiled=True)
    members, most, width = rows.shape
    numbers = jnp.arange(members, dtype=jnp.int32)
    moved = lax.ragged_all_to_all(
        rows.reshape(-1, width),
        jnp.zeros((members * most, width), rows.dtype),
        numbers * most,
        leave,
        jnp.zeros_like(numbers) + lax.axis_index(EXPERT).astype(jnp.int32) * most,
        arrive,
        axis_name=EXPERT,
    )
    return moved.reshape(rows.shape)


def _forward(rows: Array, leave: Array, arrive: Array) -> tuple[Array, tuple[Array, Array]]:
    return exchanged(rows, leave, arrive), (leave, arrive)


def _backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    leave, arrive = kept
    back = exchanged(gradient, arrive, leave)
    # what did not leave has no gradient
    there = jnp.arange(back.shape[1], dtype=jnp.int32) < leave[:, None]
    return jnp.where(there[..., None], back, 0), None, None


exchanged.defvjp(_forward, _backward)
