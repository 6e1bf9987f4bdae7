"""Dynamic sampling: which groups teach something, and how they come together in one batch, from
whatever shards they were generated on."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import BatchConfig, DraftConfig, RolloutConfig
from jaxspec.mesh import replicated_sharding, row_sharding
from jaxspec.rl.dynamic_sampling import assign_places, has_mixed_rewards, insert_groups
from jaxspec.state import ScoredRollout
from tests.conftest import small_mesh, tiny_config, tiny_model

PROMPTS, GROUP = 8, 2
MODEL = tiny_model(vocab=16, kv_heads=4, dtype="float32")


def test_only_rows_that_have_a_reward_can_differ() -> None:
    rewards = np.array([1, 1, 1, 0, 0, 0, 1, 0, 0.5, 0.25], np.float32)
    valid = np.array([1, 1, 1, 1, 1, 1, 0, 1, 1, 1], bool)
    assert has_mixed_rewards(rewards, valid, 2).tolist() == [False, True, False, False, True]
    assert has_mixed_rewards(rewards, np.zeros(10, bool), 5).tolist() == [False, False]
    assert has_mixed_rewards(rewards[:9], valid[:9], 3).tolist() == [False, False, True]


def test_mini_batches_take_turns() -> None:
    found = np.array([5, 6, 7], np.int32)
    assert assign_places(found, 0, 6, 1).tolist() == [5, 6, 7, -1, -1, -1]
    assert assign_places(found, 2, 6, 1).tolist() == [-1, -1, 5, 6, 7, -1]
    # the first halves are places 0 to 2
    assert assign_places(found, 0, 6, 2).tolist() == [5, 7, -1, 6, -1, -1]
    assert assign_places(found, 3, 6, 2).tolist() == [-1, -1, 6, -1, 5, 7]


def numbered(like: ScoredRollout, first: int) -> ScoredRollout:
    """Every number once, so that any that is lost or out of place shows."""
    leaves, tree = jax.tree.flatten(like.replace(learn=None))
    made, count = [], first
    for leaf in leaves:
        made.append((np.arange(leaf.size).reshape(leaf.shape) + count).astype(leaf.dtype))
        count += leaf.size
    return jax.tree.unflatten(tree, made).replace(learn=np.asarray(False))


def with_group(
    batch: ScoredRollout, place: int, rollout: ScoredRollout, group: int
) -> ScoredRollout:
    def moved(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        size = len(old) // PROMPTS  # rows of a group, or one entry for it
        old[size * place : size * (place + 1)] = new[size * group : size * (group + 1)]
        return old

    rows = jax.tree.map(moved, batch.replace(learn=None), rollout.replace(learn=None))
    return rows.replace(learn=batch.learn)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("kind", ["eagle3", "none"])
def test_groups_of_rollouts_come_to_their_places_from_any_shard(
    data: int, tensor: int, kind: Any
) -> None:
    mesh = small_mesh(data, tensor)
    config = tiny_config(
        MODEL,
        batch=BatchConfig(prompts=PROMPTS, group_size=GROUP),
        rollout=RolloutConfig(draft=DraftConfig(kind=kind)),
    )
    step = build_step(config, mesh, (1,), MODEL.vocab)
    like = jax.eval_shape(lambda: step.empty_scored_rollout(PROMPTS * GROUP)).replace(plan=None)

    def put(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.device_put(
                leaf, row_sharding(mesh) if np.ndim(leaf) else replicated_sharding(mesh)
            ),
            tree,
        )

    wanted, batch = numbered(like, 0), put(numbered(like, 0))
    fill = jax.jit(partial(insert_groups, mesh=mesh), donate_argnums=0)
    for taken in ([6, 1, -1, 3, 7, -1, -1, -1], [-1, -1, 5, -1, -1, 0, 7, 2]):
        rollout = numbered(like, 1000 * (1 + taken[0]))
        batch = fill(batch, put(rollout), put(np.array(taken, np.int32)))
        for place, group in enumerate(taken):
            if group >= 0:
                wanted = with_group(wanted, place, rollout, group)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, batch), wanted)
    assert not jax.tree.leaves(batch.plan)
