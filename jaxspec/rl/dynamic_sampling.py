"""Dynamic sampling: fills a batch with groups of mixed rewards from several rollouts.

Rows stay on the devices. Source: DAPO, arXiv 2503.14476, section 3.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.mesh import ROWS, row_shard_count, shard_map_rows
from jaxspec.rl.train_batch import gather_from_shards
from jaxspec.state import PyTree, ScoredRollout


def has_mixed_rewards(
    rewards: Float[np.ndarray, " B"], valid: Bool[np.ndarray, " B"], group_size: int
) -> Bool[np.ndarray, " n"]:
    """Returns which groups have different valid rewards."""
    # In all other groups, advantages relative to the group are 0.
    rewards, valid = rewards.reshape(-1, group_size), valid.reshape(-1, group_size)
    lowest = np.where(valid, rewards, np.inf).min(axis=1)
    return lowest < np.where(valid, rewards, -np.inf).max(axis=1)


def assign_places(
    groups: Int[np.ndarray, " m"], filled_count: int, capacity: int, mini_batches: int
) -> Int[np.ndarray, " n"]:
    """Assigns groups to the free places of a batch.

    The batch has `capacity` places, of which `filled_count` are taken. Every group must have a free
    place. Returns the new group for each place, or -1.
    """
    # Mini-batches take turns, so that each has some groups even if the batch is never full.
    interleaved_places = np.arange(capacity).reshape(mini_batches, -1).T.reshape(-1)
    group_at_place = np.full(capacity, -1, np.int32)
    group_at_place[interleaved_places[filled_count : filled_count + len(groups)]] = groups
    return group_at_place


def insert_groups(
    batch: ScoredRollout, rollout: ScoredRollout, group_at_place: Int[Array, " n"], mesh: Mesh
) -> ScoredRollout:
    """Inserts groups of a rollout into a batch.

    `group_at_place` has the group for each place, or -1. Neither argument has a packing plan.
    """
    # A group may go to any shard. The plan of the full batch balances rows over shards.
    shard_count, rows = row_shard_count(mesh), P(ROWS)

    def insert_on_shard(batch: PyTree, rollout: PyTree, group_at_place: Int[Array, " n"]) -> PyTree:
        place_count = len(group_at_place)
        grouped_rollout = jax.tree.map(
            lambda leaf: leaf.reshape(place_count, len(leaf) // place_count, *leaf.shape[1:]),
            rollout,
        )
        # An unset place gathers group 0, which `select_values` discards.
        gathered_groups = gather_from_shards(
            grouped_rollout, jnp.maximum(group_at_place, 0), shard_count
        )

        def select_values(old: Array, new: Array) -> Array:
            is_filled = jnp.repeat(group_at_place >= 0, len(old) // place_count).reshape(
                -1, *(1,) * (old.ndim - 1)
            )
            return jnp.where(is_filled, new.reshape(old.shape), old)

        return jax.tree.map(select_values, batch, gathered_groups)

    gathered_groups = shard_map_rows(mesh, insert_on_shard, rows, rows)(
        batch.replace(learn=None), rollout.replace(learn=None), group_at_place
    )
    return gathered_groups.replace(learn=batch.learn)
