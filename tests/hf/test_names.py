"""Checkpoints that transformers writes give transformers' logits, with and without a cache, from
one file or several, on any mesh."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.hf.names import WeightMapping, policy_mappings, tensor_slices, to_tensor, to_weight
from jaxspec.hf.pretrained import stream_tensors
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import cast_floats
from tests.conftest import small_mesh
from tests.hf_checkpoints import CASES, load, logits, make, tokens_of, whole

pytest.importorskip("transformers")
pytestmark = pytest.mark.hf

QUICK = ("qwen3", "qwen3-moe")
FIRST = 24
"""Positions of the first of two blocks."""


@jax.jit
def in_two_blocks(policy: Decoder, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    first = policy(tokens[:, :FIRST], positions[:, :FIRST], policy.empty_cache(*tokens.shape))
    second = policy(tokens[:, FIRST:], positions[:, FIRST:], first.cache)
    return policy.logits(jnp.concatenate([first.hidden, second.hidden], axis=1))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.sweep) for name in CASES]
)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Also beyond the positions that a stretched model was made for, and for a row whose first
    positions are left out."""
    model = make(name, tmp_path)
    policy, tokens = load(tmp_path), tokens_of()
    wanted = logits(model, tokens)
    assert np.abs(wanted).max() > 1  # nothing trivial
    np.testing.assert_allclose(whole(policy, jnp.asarray(tokens)), wanted, rtol=0, atol=1e-4)
    np.testing.assert_allclose(
        in_two_blocks(policy, jnp.asarray(tokens)), wanted, rtol=0, atol=1e-4
    )
    # Their padding stands on the left, ours on the right.
    left = np.concatenate([np.zeros((2, 7), np.int32), tokens[:, :-7]], axis=1)
    mask = (np.arange(tokens.shape[1]) >= 7).astype(np.int32)[None].repeat(2, axis=0)
    padded = np.concatenate([tokens[:, :-7], np.full((2, 7), 5, np.int32)], axis=1)
    found = np.asarray(whole(policy, jnp.asarray(padded)))[:, :-7]
    np.testing.assert_allclose(found, logits(model, left, mask)[:, 7:], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_bfloat16_is_as_close_as_its_rounding(name: str, tmp_path: Path) -> None:
    """No further from the same weights in float32 than transformers' own pass in bfloat16: 1.25
    times on average, 2 times at most."""
    model = make(name, tmp_path, dtype="bfloat16")
    tokens = tokens_of()
    policy = load(tmp_path, dtype="bfloat16")
    exact = np.asarray(whole(policy, jnp.asarray(tokens)))
    ours = np.abs(np.asarray(whole(cast_floats(policy, jnp.bfloat16), jnp.asarray(tokens))) - exact)
    theirs = np.abs(logits(model, tokens) - exact)
    assert theirs.max() > 0.01
    assert ours.mean() < 1.25 * theirs.mean()
    assert ours.max() < 2 * theirs.max()


def test_files_with_an_index_fill_a_mesh(tmp_path: Path) -> None:
    """Each device gets its part of the same weights, bit for bit."""
    make("qwen3-moe", tmp_path / "one")
    make("qwen3-moe", tmp_path / "several", shards="20KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 3
    wanted, found = load(tmp_path / "one"), load(tmp_path / "several", small_mesh(4, 2))
    specs = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(found)}
    assert len(specs) > 4
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["qwen3-tied-biases", "qwen3-moe", "llama-biases"])
def test_export_undoes_import(name: str, tmp_path: Path) -> None:
    """Bit for bit, under the same names, in the type that was stored."""
    from safetensors.numpy import load_file

    make(name, tmp_path, dtype="bfloat16")
    policy = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    dtype = next(iter(stored.values())).dtype
    made = {
        tensor: build()
        for tensor, _, build in stream_tensors(policy_mappings(policy.config), policy, dtype)
    }
    assert made.keys() == stored.keys()
    for tensor, values in made.items():
        assert values.dtype == dtype
        np.testing.assert_array_equal(
            values.view(np.uint16), stored[tensor].view(np.uint16), err_msg=tensor
        )


@pytest.mark.parametrize(
    "layout", ["(N H) D -> D N H", "D (N H) -> N H D", "F D -> D F", "(N H) -> N H", "D -> D"]
)
def test_slices_are_those_of_the_whole(layout: str) -> None:
    """Any slice of ours comes from a slice of theirs."""
    row = WeightMapping("", "", layout)
    ours = layout.split("->")[1].split()
    shape = tuple({"N": 4, "H": 3, "D": 6, "F": 5}[axis] for axis in ours)
    weight = np.arange(np.prod(shape)).reshape(shape)
    tensor = to_tensor(row, weight)
    np.testing.assert_array_equal(to_weight(row, tensor, shape), weight)
    for index in (
        tuple(slice(None) for _ in shape),
        tuple(slice(1, 3) for _ in shape),
        tuple(slice(0, size - 1) for size in shape),
    ):
        outer, inner_shape, inner = tensor_slices(row, index, shape)
        np.testing.assert_array_equal(
            to_weight(row, tensor[outer], inner_shape)[inner], weight[index]
        )
