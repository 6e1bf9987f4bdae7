"""All-to-all exchange of rows between expert shards.

Shards are the members of the mesh axis `expert`. The functions run inside a `shard_map` that is
manual over `expert`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.mesh import EXPERT, has_gpus_in_scope


def all_to_all_counts(counts: Int[Array, " X"]) -> Int[Array, " X"]:
    """Exchanges row counts: sends one to each member, and returns those received."""
    return lax.all_to_all(counts, EXPERT, 0, 0, tiled=True)


@jax.custom_vjp
def all_to_all_rows(
    rows: Float[Array, "X n D"], send_counts: Int[Array, " X"], receive_counts: Int[Array, " X"]
) -> Float[Array, "X n D"]:
    """Exchanges rows between all members.

    Sends the first `send_counts[x]` rows of `rows[x]` to member x. Returns the rows received from
    each member. Only the first `receive_counts[x]` rows from member x are meaningful.
    """
    # XLA has no ragged all-to-all for CPUs, so all `n` rows are sent there.
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
    # Rows that were not sent have no gradient, but on CPUs the exchange returns rows for them too.
    is_sent = jnp.arange(row_gradient.shape[1], dtype=jnp.int32) < send_counts[:, None]
    return jnp.where(is_sent[..., None], row_gradient, 0), None, None


all_to_all_rows.defvjp(_forward, _backward)
