"""Where every weight lives, for training and for rollouts, and what moves between the two."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import MeshConfig
from jaxspec.mesh import ROWS, TRAIN_RULES, assign_shardings
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import cast_floats
from jaxspec.rollout.generator import to_rollout_layout
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network, trimmed

MODEL = tiny_model(vocab=16, kv_heads=4, dtype="float32")

# (train layout, rollout layout) by attribute name; norms are whole everywhere.
LAYOUTS = {
    "embedding": (("tensor", ROWS), ("tensor",)),
    "head": ((ROWS, "tensor"), (None, "tensor")),
    "query": ((None, ROWS, "tensor"), (None, None, "tensor")),
    "key": ((None, ROWS, "tensor"), (None, None, "tensor")),
    "value": ((None, ROWS, "tensor"), (None, None, "tensor")),
    "output": ((None, "tensor", None, ROWS), (None, "tensor")),
    "gate": ((None, ROWS, "tensor"), (None, None, "tensor")),
    "up": ((None, ROWS, "tensor"), (None, None, "tensor")),
    "down": ((None, "tensor", ROWS), (None, "tensor")),
    "fuse": ((None, ROWS), ()),
}


def networks() -> dict[str, Any]:
    return {"policy": tiny_network(Decoder, MODEL), "draft": tiny_network(eagle3, MODEL)}


def placements(tree: Any) -> dict[str, tuple[Any, ...]]:
    """The partition of every leaf (an array or a sharding) by dotted path, without trailing
    Nones."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [
            str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path
        ]
        found[".".join(names[:-1] if names[-1] == "value" else names)] = trimmed(
            getattr(leaf, "sharding", leaf).spec
        )
    return found


def wanted(name: str, rollout: bool) -> tuple[Any, ...]:
    return LAYOUTS.get(name.rpartition(".")[2], ((), ()))[rollout]


def in_train_layout(mesh: Any) -> dict[str, Any]:
    made = networks()
    return jax.device_put(made, assign_shardings(mesh, made, TRAIN_RULES, 0))


def test_every_weight_has_its_train_layout() -> None:
    found = placements(in_train_layout(small_mesh(4, 2)))
    assert len(found) == 14 + 13
    for name, spec in found.items():
        assert spec == wanted(name, rollout=False), name
    assert sum(ROWS in spec for spec in found.values()) == 9 + 9  # all but the norms


def test_shard_above_keeps_small_weights_whole_over_data() -> None:
    mesh, made = small_mesh(4, 2), networks()
    limit = made["policy"].layers.gate[...].size
    found = placements(assign_shardings(mesh, made, TRAIN_RULES, limit))
    sizes = {
        name: leaf.size
        for (name, _), leaf in zip(found.items(), jax.tree.leaves(made), strict=True)
    }
    for name, spec in found.items():
        assert (ROWS in spec) == (sizes[name] >= limit and ROWS in wanted(name, rollout=False)), (
            name
        )
        assert ("tensor" in spec) == ("tensor" in wanted(name, rollout=False)), name
    assert {ROWS in spec for spec in found.values()} == {True, False}


@pytest.mark.parametrize(("data", "tensor"), [(8, 1), (4, 2), (2, 4)])
def test_rollout_layout_is_one_all_gather_for_each_sharded_weight(data: int, tensor: int) -> None:
    mesh = small_mesh(data, tensor)
    trained = in_train_layout(mesh)
    program = jax.jit(lambda tree: to_rollout_layout(tree, mesh)).lower(trained).compile()
    synced = program(trained)
    for name, spec in placements(synced).items():
        # an axis of one device shards nothing
        assert spec == (wanted(name, rollout=True) if tensor > 1 else ()), name
    jax.tree.map(np.testing.assert_array_equal, synced, networks())
    text = str(program.as_text())
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 9 + 9
    assert not re.findall(
        r" (?:all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text
    )


def test_cast_changes_floats_only_and_keeps_the_structure() -> None:
    tree = {"weight": jnp.ones((2,), jnp.float32), "count": jnp.zeros((), jnp.int32), "none": None}
    found = cast_floats(tree, jnp.dtype("bfloat16"))
    assert (found["weight"].dtype, found["count"].dtype, found["none"]) == (
        jnp.bfloat16,
        jnp.int32,
        None,
    )
    policy = networks()["policy"]
    half = cast_floats(policy, jnp.dtype("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    assert jax.tree.structure(half) == jax.tree.structure(policy)


def test_optimizer_state_follows_its_weights() -> None:
    step = build_step(
        tiny_config(MODEL, mesh=MeshConfig(shard_above=0)), small_mesh(4, 2), (1,), MODEL.vocab
    )
    found = placements(step.state_shardings())
    assert any(".mu." in name for name in found)
    for name, spec in found.items():
        assert spec == wanted(name, rollout=False), name
    for moment in ("mu", "nu"):
        for learner in ("policy", "draft"):
            held = {
                name.split(f".{moment}.")[1]: spec
                for name, spec in found.items()
                if name.startswith(learner) and f".{moment}." in name
            }
            assert held == {
                name.removeprefix(f"{learner}.network."): spec
                for name, spec in found.items()
                if name.startswith(f"{learner}.network.")
            }
