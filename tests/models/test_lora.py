"""Adapters beside a frozen decoder: where they start, what an update changes, and where they
lie."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import DraftConfig, LoraConfig
from jaxspec.hf.peft import adapter_config_json
from jaxspec.host.programs import abstract_arguments
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import FamilySpec
from jaxspec.mesh import ROWS, TRAIN_RULES, assign_shardings
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import cast_floats
from jaxspec.models.lora import (
    TARGETS,
    AdaptedDecoder,
    attach_lora,
    measure_retention,
    merge_lora,
    round_stochastically,
)
from jaxspec.rl import optimizers
from jaxspec.state import TrainState
from jaxspec.transfer import export_weights
from tests.conftest import (
    small_mesh,
    tiny_config,
    tiny_model,
    tiny_network,
    trimmed,
    value_and_grad,
    weight_name,
)
from tests.models.adapters import MODEL, adapted, logits, same_bits
from tests.twins import numpy_weights

pytestmark = pytest.mark.usefixtures("x64")


def test_fresh_adapters_change_nothing_and_start_as_peft_does() -> None:
    network, base = adapted(rank=8, noise=0.0), tiny_network(Decoder, MODEL, 1)
    assert jax.tree.structure(merge_lora(network)) == jax.tree.structure(base)
    assert same_bits(merge_lora(network), base)
    assert merge_lora(base) is base
    assert network.names == tuple(TARGETS)
    for name, fan_in in {"q_proj": 16, "o_proj": 36, "down_proj": 20, "up_proj": 16}.items():
        a = np.asarray(getattr(network.adapters, f"{name}_a")[...])
        assert a.shape[0] == 4
        assert a.shape[-1] == 8
        assert a.size == 4 * 8 * fan_in
        assert 0.93 < np.abs(a).max() * np.sqrt(fan_in) <= 1  # uniform within 1 / sqrt(inputs)
        assert a.std() * np.sqrt(3 * fan_in) == pytest.approx(1, abs=0.1)
    weights = numpy_weights(network.adapters)
    assert not np.array_equal(weights["q_proj_a"], weights["k_proj_a"])


def test_the_merged_decoder_is_the_sum_in_numpy() -> None:
    network = adapted(targets=("o_proj", "gate_proj"))
    wide, after = numpy_weights(network), numpy_weights(merge_lora(network))
    changed = {
        "layers.output": np.einsum(
            "lnhr,lrd->lnhd", wide["adapters.o_proj_a"], wide["adapters.o_proj_b"]
        ),
        "layers.gate": np.einsum(
            "ldr,lrf->ldf", wide["adapters.gate_proj_a"], wide["adapters.gate_proj_b"]
        ),
    }
    for name, weight in after.items():
        change = 4.0 / 3 * changed[name] if name in changed else 0
        np.testing.assert_allclose(
            weight, wide[f"base.{name}"] + change, rtol=0, atol=1e-14, err_msg=name
        )
    assert {name for name in wide if name.startswith("adapters")} == {
        f"adapters.{name}_{part}" for name in network.names for part in "ab"
    }


def kept(network: AdaptedDecoder, decoder: Decoder) -> float:
    """Share of the adapters' change that a decoder has, by numpy."""
    base, whole, other = (
        np.concatenate([leaf.ravel() for leaf in numpy_weights(each.layers).values()])
        for each in (network.base, merge_lora(network), decoder)
    )
    change = whole - base
    return float(((other - base) @ change) / (change @ change))


@pytest.mark.slow
def test_a_young_adapter_of_a_bfloat16_model_reaches_generation_whole() -> None:
    """Rounded to nearest, less than half of it would; in float32 nothing is rounded."""
    model = replace(MODEL, embed=64, ffn=96, dtype="bfloat16")
    network = adapted(noise=1e-4, model=model)
    with jax.numpy_dtype_promotion("standard"):
        nearest = cast_floats(merge_lora(network), jnp.dtype(jnp.bfloat16))
        versions = [merge_lora(network, jax.random.key(seed)) for seed in range(8)]
    share = float(measure_retention(network, jnp.dtype(jnp.bfloat16)))
    assert share == pytest.approx(kept(network, nearest), abs=1e-3)
    assert share < 0.5
    shares = [kept(network, version) for version in versions]
    assert np.mean(shares) == pytest.approx(1, abs=0.1)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(versions[0])} == {"bfloat16"}
    assert not same_bits(versions[0], versions[1])


def test_stochastic_rounding_keeps_means_and_what_needs_none() -> None:
    values = jnp.full((40_000,), 1 + 2**-10, jnp.float32)  # an eighth of the way to the next number
    rounded = np.asarray(round_stochastically(values, jnp.dtype(jnp.bfloat16), jax.random.key(0)))
    assert set(rounded.astype(np.float64).tolist()) == {1.0, 1 + 2**-7}
    assert np.mean(rounded.astype(np.float64) > 1) == pytest.approx(1 / 8, abs=0.01)
    exact = jnp.array([0.0, -0.0, 1.5, -3.0, np.inf, -np.inf, np.nan], jnp.float32)
    same = round_stochastically(exact, jnp.dtype(jnp.bfloat16), jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(same, np.float64), np.asarray(exact, np.float64))
    low = round_stochastically(-values, jnp.dtype(jnp.bfloat16), jax.random.key(2))
    assert np.mean(np.asarray(low, np.float64)) == pytest.approx(-1 - 2**-10, abs=1e-4)


def test_a_version_is_rounded_alike_whenever_it_generates() -> None:
    """And on every mesh; another version otherwise."""
    model = tiny_model(dtype="bfloat16", kv_heads=4)
    network = adapted(noise=1e-3, model=model)
    config = tiny_config(model, DraftConfig(kind="none"), lora=LoraConfig(rank=3))
    made = []
    for data, version in ((1, 5), (4, 5), (1, 6)):
        generator = build_step(config, small_mesh(data), (1,), 11).generator
        sync = jax.jit(
            lambda network, version, of=generator: of.load(
                export_weights(network, None, of.dtype, version), of.init_state()
            )
        )
        with jax.numpy_dtype_promotion("standard"):
            made.append(sync(network, jnp.int32(version)).target)
    assert same_bits(made[0], made[1])
    assert not same_bits(made[0], made[2])


@pytest.mark.parametrize("targets", [(), ("o_proj", "gate_proj")])
def test_adapters_beside_the_weights_give_what_the_merged_decoder_gives(
    targets: tuple[str, ...],
) -> None:
    network = adapted(targets=targets)
    np.testing.assert_allclose(
        logits(attach_lora(network)), logits(merge_lora(network)), rtol=0, atol=1e-12
    )
    assert np.abs(logits(attach_lora(network)) - logits(network.base)).max() > 0.1
    base = tiny_network(Decoder, MODEL, 1)
    assert attach_lora(base) is base


def test_an_update_moves_the_adapters_by_the_chained_gradient_and_nothing_else() -> None:
    """Of a loss of the merged weights: dL/da = scale dL/dW b', dL/db = scale a' dL/dW; every bit of
    the base stays."""
    network, optimizer = adapted(), optax.sgd(0.1)
    aim = jnp.asarray(np.random.default_rng(2).normal(size=(2, 6, MODEL.vocab)))

    def plain(decoder: Decoder) -> jax.Array:
        return jnp.sum(aim * jax.nn.log_softmax(logits(decoder)))

    @jax.jit
    def both(network: AdaptedDecoder) -> Any:
        learner = optimizers.init_state(network, optimizer)
        loss, gradients = value_and_grad(lambda trained: plain(merge_lora(trained)), network)
        return optimizers.apply_update(learner, gradients, loss, optimizer)[0], jax.grad(plain)(
            merge_lora(network)
        )

    learner, slopes = both(network)
    assert same_bits(learner.network.base, network.base)
    slope, before, after = (
        numpy_weights(tree) for tree in (slopes, network.adapters, learner.network.adapters)
    )
    for name, target in TARGETS.items():
        a, b = before[f"{name}_a"], before[f"{name}_b"]
        whole = slope[f"layers.{target.weight}"].reshape(4, a[0, ..., 0].size, -1)
        flat_a, flat_b = a.reshape(4, -1, 3), b.reshape(4, 3, -1)
        wanted_a = flat_a - 0.1 * 4 / 3 * whole @ flat_b.transpose(0, 2, 1)
        wanted_b = flat_b - 0.1 * 4 / 3 * flat_a.transpose(0, 2, 1) @ whole
        np.testing.assert_allclose(
            after[f"{name}_a"].reshape(flat_a.shape), wanted_a, rtol=0, atol=1e-11
        )
        np.testing.assert_allclose(
            after[f"{name}_b"].reshape(flat_b.shape), wanted_b, rtol=0, atol=1e-11
        )
        assert np.abs(wanted_a - flat_a).max() > 1e-3


def test_the_optimizer_holds_adapters_only_and_they_lie_where_their_weights_do() -> None:
    step = build_step(
        tiny_config(MODEL, lora=LoraConfig(rank=2, targets=("q_proj", "down_proj"))),
        small_mesh(4, 2),
        (1,),
        MODEL.vocab,
    )
    state = jax.eval_shape(step.init_random_state)
    moments = jax.tree.leaves(state.learner.policy.optimizer)
    adapters = jax.tree.leaves(state.learner.policy.network.adapters)
    assert sorted(leaf.shape for leaf in moments if leaf.ndim) == sorted(
        2 * [leaf.shape for leaf in adapters]
    )
    layout = assign_shardings(small_mesh(4, 2), state.learner.policy.network, TRAIN_RULES)
    specs = {
        weight_name(path): trimmed(leaf.spec)
        for path, leaf in jax.tree_util.tree_flatten_with_path(layout)[0]
    }
    assert {name: spec for name, spec in specs.items() if "_proj_" in name} == {
        "q_proj_a": (None, ROWS),
        "q_proj_b": (None, None, "tensor"),
        "down_proj_a": (None, "tensor"),
        "down_proj_b": (None, None, ROWS),
    }
    assert specs["query"] == (None, ROWS, "tensor"), "the base lies as it did"


def test_every_phase_of_a_step_takes_adapters() -> None:
    """Traced only: from a state with adapters to one of the same shapes, with a rollout that a
    plain decoder made."""
    step = build_step(tiny_config(lora=LoraConfig(rank=2)), small_mesh(), (1,), 11)
    state, finished, prompts = abstract_arguments(step, 8)
    after: TrainState = jax.eval_shape(step.train_step, state, finished, prompts)[0]
    assert isinstance(after.learner.policy.network, AdaptedDecoder)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [leaf.shape for leaf in jax.tree.leaves(after)] == [
        leaf.shape for leaf in jax.tree.leaves(state)
    ]
    assert isinstance(jax.eval_shape(step.sync, state).target, Decoder)


def test_targets_that_the_policy_lacks_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"lora.targets has 'head'; choose from q_proj, k_proj"):
        adapted(targets=("q_proj", "head"))
    experts = tiny_model(family=FamilySpec(experts=8, experts_per_token=2))
    with pytest.raises(
        ConfigError,
        match=(
            r"lora.targets has 'up_proj' \(a decoder with 8 experts .*; choose from q_proj, k_proj,"
            r" v_proj, o_proj$"
        ),
    ):
        adapter_config_json(LoraConfig(rank=2, targets=("up_proj",)), experts, "base")
    assert adapter_config_json(LoraConfig(rank=2), experts, "base")["target_modules"] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    ]
