"""Pytrees that cross files: what they hold survives every transformation, and nothing is changed in
place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.state import EOS, FAILED, IDLE, LENGTH, RUNNING, Prompts, Rollout, Tree, pytree
from tests.conftest import tiny_prompts


@pytree
class Pair(Tree):
    """Two leaves, one of them a tree."""

    left: jax.Array
    right: object


def test_statuses_are_distinct() -> None:
    assert len({RUNNING, EOS, LENGTH, FAILED, IDLE}) == 5


def test_leaves_and_paths() -> None:
    pair = Pair(left=jnp.ones(2), right={"a": jnp.zeros(3), "b": None})
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(pair)[0]
    ]
    assert paths == [".left", ".right['a']"]
    doubled = jax.tree.map(lambda leaf: leaf * 2, pair)
    assert isinstance(doubled, Pair)
    assert doubled.left.tolist() == [2, 2]
    assert doubled.right["b"] is None  # pyright: ignore[reportIndexIssue]


def test_a_tree_may_hold_what_its_annotations_do_not_say() -> None:
    """Shapes, shardings and None take the places of arrays, also where annotations are checked."""
    prompts = tiny_prompts(3)
    shapes = jax.eval_shape(lambda: prompts)
    assert shapes.tokens == jax.ShapeDtypeStruct((3, 5), jnp.int32)
    assert jax.tree.map(lambda leaf: None, prompts).lengths is None
    assert jax.tree.map(lambda leaf: str(leaf.dtype), prompts).live == "bool"
    assert prompts.replace(tokens="anything").tokens == "anything"


def test_jit_grad_and_loops_keep_the_class() -> None:
    pair = Pair(left=jnp.arange(3.0), right=(jnp.ones(()),))
    assert isinstance(jax.jit(lambda tree: tree)(pair), Pair)
    slope = jax.grad(lambda tree: jnp.sum(tree.left**2) * tree.right[0])(pair)
    np.testing.assert_allclose(slope.left, [0, 2, 4])
    assert float(slope.right[0]) == 5
    looped = jax.lax.fori_loop(0, 4, lambda _, tree: tree.replace(left=tree.left + 1), pair)
    np.testing.assert_allclose(looped.left, [4, 5, 6])


def test_replace_leaves_the_original_and_refuses_unknown_fields() -> None:
    pair = Pair(left=jnp.zeros(1), right=1)
    assert pair.replace(right=2).right == 2
    assert pair.right == 1
    with pytest.raises(TypeError, match=r"Pair has no field \['middle'\]"):
        pair.replace(middle=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.right = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_fields_are_named_and_complete() -> None:
    with pytest.raises(TypeError):
        Pair(jnp.zeros(1), 2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        Prompts(tokens=jnp.zeros((1, 2), jnp.int32))  # pyright: ignore[reportCallIssue]
    assert [field.name for field in dataclasses.fields(Rollout)] == [
        "tokens", "prompt_lengths", "lengths", "logprobs",
        "origin", "status", "version", "statistics",
    ]  # fmt: skip
