"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a batch of groups whose answers differ in
reward, which several rollouts fill; its rows stay on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.mesh import ROWS, on_each_shard, row_shards
from jaxspec.rl.train_batch import from_shards
from jaxspec.state import Finished, PyTree


def differing(
    rewards: Float[np.ndarray, " B"], valid: Bool[np.ndarray, " B"], group_size: int
) -> Bool[np.ndarray, " n"]:
    """Groups in which two rows that have a reward have different ones: in all others advantages
    against the group are 0."""
    rewards, valid = rewards.reshape(-1, group_size), valid.reshape(-1, group_size)
    least = np.where(valid, rewards, np.inf).min(axis=1)
    return least < np.where(valid, rewards, -np.inf).max(axis=1)


def places(
    groups: Int[np.ndarray, " m"], first: int, prompts: int, mini_batches: int
) -> Int[np.ndarray, " n"]:
    """Where groups of a rollout go in a batch of `prompts` groups, the first `first` of which it
    has: the group that comes to each place, or -1.

    Mini-batches take turns, so that a batch that stays short has some of each.
    """
    in_turn = np.arange(prompts).reshape(mini_batches, -1).T.reshape(-1)
    taken = np.full(prompts, -1, np.int32)
    taken[in_turn[first : first + len(groups)]] = groups
    return taken


def filled(batch: Finished, rollout: Finished, taken: Int[Array, " n"], mesh: Mesh) -> Finished:
    """A batch with groups of a rollout at the places where `taken` says which; neither has a plan.

    Groups go to any shard: which of them read whose rows is planned when the batch is full.
    """
    shards, rows = row_shards(mesh), P(ROWS)

    def on_a_shard(batch: PyTree, rollout: PyTree, taken: Int[Array, " n"]) -> PyTree:
        count = len(taken)
        by_group = jax.tree.map(
            lambda leaf: leaf.reshape(count, len(leaf) // count, *leaf.shape[1:]), rollout
        )
        moved = from_shards(by_group, jnp.maximum(taken, 0), shards)

        def chosen(old: Array, new: Array) -> Array:
            there = jnp.repeat(taken >= 0, len(old) // count).reshape(-1, *(1,) * (old.ndim - 1))
            return jnp.where(there, new.reshape(old.shape), old)

        return jax.tree.map(chosen, batch, moved)

    moved = on_each_shard(mesh, on_a_shard, rows, rows)(
        batch.replace(learn=None), rollout.replace(learn=None), taken
    )
    return moved.replace(learn=batch.learn)
