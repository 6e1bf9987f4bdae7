"""Weights on their way from the learner to the generator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.host.programs import open_weight_link
from jaxspec.mesh import make_mesh
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import merge_lora
from jaxspec.transfer import export_weights, rounding_key
from tests.conftest import small_mesh, tiny_model
from tests.models.adapters import adapted, same_bits
from tests.whole_step import MODEL as POLICY
from tests.whole_step import STOP, config_of, start

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_exported_weights_are_merged_and_cast_and_have_a_version(dtype: str) -> None:
    policy = adapted(noise=1e-3, model=tiny_model(dtype=dtype, kv_heads=4))
    with jax.numpy_dtype_promotion("standard"):
        exported = export_weights(policy, {"w": jnp.ones(3)}, "bfloat16", jnp.int32(7), seed=3)
        merged = merge_lora(policy, rounding_key(3, 7))
        other = export_weights(policy, None, dtype, 7, seed=4)
    assert isinstance(exported.policy, Decoder)
    floats = [leaf for leaf in jax.tree.leaves((exported.policy, exported.draft)) if leaf.ndim]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("bfloat16")}
    assert int(exported.version) == 7
    cast = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), merged)
    assert same_bits(exported.policy, cast)
    # Rounding depends on the run's seed where the type is narrow, and on nothing where it is not.
    assert same_bits(other.policy, merged) == (dtype == "float32")
    assert other.draft is None


def test_the_three_phases_give_what_one_program_gives() -> None:
    step = build_step(config_of(), small_mesh(4), STOP, POLICY.vocab)
    state = start(step)
    whole = jax.jit(step.sync)(state)
    exported = jax.jit(step.learner.export)(state.learner)
    loaded = jax.jit(step.generator.load)(exported, state.generator)
    jax.tree.map(np.testing.assert_array_equal, loaded, whole)
    assert jax.tree.structure(loaded) == jax.tree.structure(whole)


def test_a_learner_without_a_draft_exports_none() -> None:
    step = build_step(config_of(kind="none"), small_mesh(), STOP, POLICY.vocab)
    assert jax.eval_shape(step.learner.export, start(step).learner).draft is None


@pytest.mark.parametrize("generators", [2, 3, 5])
def test_each_weight_travels_once_whatever_number_of_devices_divides_it(generators: int) -> None:
    """No weight of this model has a multiple of 3 or 5 in any dimension but its layers."""
    learner, generator = (
        build_step(config_of(), make_mesh(count, devices=jax.devices()[first:]), STOP, POLICY.vocab)
        for first, count in ((0, 2), (2, generators))
    )
    step = dataclasses.replace(learner, generator=generator.generator)
    state = start(step)
    link = open_weight_link(step, jax.eval_shape(lambda: state))
    exported = jax.eval_shape(step.export, state)
    weights, others = [], []
    for leaf in jax.tree.leaves(exported):
        is_weight = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 1
        (weights if is_weight else others).append(leaf.size * leaf.dtype.itemsize)
    assert sum(others) < 0.05 * sum(weights)
    assert sum(weights) <= link.bytes <= sum(weights) + generators * sum(others)
    # They arrive as they were.
    packed = jax.jit(lambda state: link.pack(step.export(state)))(state)
    arrived = jax.jit(link.unpack)(link.move(packed))
    jax.tree.map(np.testing.assert_array_equal, arrived, step.export(state))
