"""A tiny decoder with adapters that change it, for the tests of LoRA and of its PEFT form."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.settings import LoraConfig
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder
from tests.conftest import tiny_model, tiny_network

MODEL = tiny_model(heads=6, head_size=6, ffn=20)  # no two sizes of a weight are the same
TOKENS = jnp.array([[3, 7, 7, 1, 0, 9], [4, 2, 10, 5, 5, 1]], jnp.int32)
PLACES = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))


def adapted(
    rank: int = 3,
    alpha: float = 4.0,
    targets: tuple[str, ...] = (),
    noise: float = 0.3,
    model: ModelSpec = MODEL,
) -> AdaptedDecoder:
    """A random decoder with adapters that already change it, unless `noise` is 0."""
    base = tiny_network(Decoder, model, 1)
    network = AdaptedDecoder(
        base, LoraConfig(rank=rank, alpha=alpha, targets=targets), jax.random.key(0)
    )
    random = np.random.default_rng(5)
    for name in network.names if noise else ():
        old = getattr(network.adapters, f"{name}_b")
        setattr(
            network.adapters,
            f"{name}_b",
            old.copy(jnp.asarray(noise * random.normal(size=old.shape), old.dtype)),
        )
    return network


def logits(decoder: Decoder) -> jax.Array:
    return decoder.logits(decoder(TOKENS, PLACES).hidden)


def same_bits(one: Any, other: Any) -> bool:
    return jax.tree.all(
        jax.tree.map(
            lambda left, right: np.array_equal(np.asarray(left), np.asarray(right)), one, other
        )
    )
