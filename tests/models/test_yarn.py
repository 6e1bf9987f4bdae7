"""Stretched positions: the frequencies are transformers', and a policy that was trained on short
texts goes on with longer ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.hf.rope_config import parse_rope
from jaxspec.inputs.json_keys import JsonObject
from jaxspec.inputs.spec import ModelSpec, RopeSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.rope import rotary_frequencies
from jaxspec.rl import optimizers
from jaxspec.state import NetworkState
from tests.conftest import FOR_LONG_RUNS, tiny_model, value_and_grad
from tests.dense import positions_of

QWEN3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "Qwen3": QWEN3,
    "Qwen3, band not rounded": {**QWEN3, "truncate": False},
    "own band": {**QWEN3, "beta_fast": 16.0, "beta_slow": 2.0, "factor": 2.0},
    "attention factor": {**QWEN3, "attention_factor": 1.25},
    "DeepSeek's mscale": {
        **QWEN3,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "Llama 3.1": LLAMA31,
    "Llama 3.2": {**LLAMA31, "factor": 32.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
}


@pytest.mark.hf
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """For heads of 128, from the keys of config.json."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given, longest = PARAMETERS[name], 131_072
    config = transformers.Qwen3Config(
        head_dim=128, max_position_embeddings=longest, rope_parameters=given
    )
    wanted, wanted_scale = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, None)
    theta, factor, rope = parse_rope(
        JsonObject({"max_position_embeddings": longest, "rope_parameters": given}, "config.json")
    )
    rates, scale = rotary_frequencies(128, theta, factor, rope)
    np.testing.assert_allclose(rates, wanted.numpy(), rtol=1e-6, atol=0)
    assert scale == pytest.approx(wanted_scale, rel=1e-6)
    unstretched = theta ** (-np.arange(0, 128, 2) / 128)
    assert np.abs(rates / unstretched - 1).max() > 0.3


SHORT, FACTOR, ROWS = 16, 4, 32


def patterns(
    random: np.random.Generator, updates: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Texts [updates ROWS length] that repeat a random pattern of a quarter to a half of their
    length, and where prediction begins."""
    period = random.integers(length // 4, length // 2 + 1, (updates, ROWS, 1))
    tokens = random.integers(2, 12, (updates, ROWS, length))
    repeated = np.take_along_axis(tokens, np.arange(length) % period, axis=-1)
    return repeated.astype(np.int32), np.maximum(
        period[..., 0], SHORT if length > SHORT else 0
    ).astype(np.int32)


@jax.jit
def loss(policy: Decoder, tokens: jax.Array, firsts: jax.Array) -> jax.Array:
    """Mean negative log-likelihood, in nats a token, of what stands in each text from `firsts`
    on."""
    positions = positions_of(tokens)
    logprobs = jax.nn.log_softmax(policy.logits(policy(tokens, positions).hidden)[:, :-1])
    picked = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=2)[:, :, 0]
    return -jnp.mean(picked, where=positions[:, 1:] >= firsts[:, None])


def trained(
    policy: Decoder, batches: tuple[np.ndarray, np.ndarray], learning_rate: float
) -> Decoder:
    optimizer = optimizers.adamw(
        optimizers.warmup_schedule("constant", learning_rate, 30, 60), grad_clip=1.0
    )

    def step(learnt: NetworkState, batch: tuple[jax.Array, jax.Array]) -> tuple[NetworkState, None]:
        value, gradients = value_and_grad(lambda network: loss(network, *batch), learnt.network)
        return optimizers.apply_update(learnt, gradients, value, optimizer)[0], None

    return jax.jit(
        lambda learnt, batches: jax.lax.scan(step, learnt, batches)[0],
        compiler_options=FOR_LONG_RUNS,
    )(optimizers.init_state(policy, optimizer), batches).network


def with_config(policy: Decoder, config: ModelSpec) -> Decoder:
    shapes = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    return jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(policy))


@pytest.mark.slow
def test_a_policy_of_short_texts_goes_on_with_longer_ones() -> None:
    """Texts of 16 tokens, then of 64 with factor 4: the loss at positions from 16 on starts lower
    than without YaRN, and falls.

    In nats a token, chance being ln 10 = 2.30, with seeds 0, 1 and 2: on short texts 0.21, 0.20,
    0.75; on long ones unstretched 4.77, 4.52, 3.73, stretched 2.46, 2.29, 3.29, and after 100
    updates 0.24, 0.22, 1.84. The bounds hold for all three.
    """
    random = np.random.default_rng(0)
    rope = RopeSpec(context=SHORT)
    config = tiny_model(
        vocab=12, layers=2, embed=32, heads=2, head_size=16, ffn=64, dtype="float32", rope=rope
    )
    short = trained(Decoder(config, jax.random.key(0)), patterns(random, 600, SHORT), 3e-3)
    stretched = with_config(short, dataclasses.replace(config, rope_factor=float(FACTOR)))
    unseen_short, unseen_long = (
        [part[0] for part in patterns(random, 1, length)] for length in (SHORT, SHORT * FACTOR)
    )
    assert float(loss(short, *unseen_short)) < 1.0
    unstretched, start = (float(loss(policy, *unseen_long)) for policy in (short, stretched))
    end = float(loss(trained(stretched, patterns(random, 100, SHORT * FACTOR), 1e-3), *unseen_long))
    assert start < 0.95 * unstretched
    assert end < 0.6 * start
    assert end < 2.0
