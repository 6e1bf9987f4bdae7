"""Rotary position embedding in the rotate-half form of Llama and Qwen (Su et al., arXiv
2104.09864), and its stretched variants."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.inputs.spec import ModelSpec, RopeSpec

RotaryTable = tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]
"""Cosines and sines of each position and pair."""


def rotary_table(positions: Int[Array, "B T"], config: ModelSpec, dtype: jnp.dtype) -> RotaryTable:
    """Cosines and sines for the model's heads, computed in float32 (float64 for float64 models)."""
    accum_dtype = np.promote_types(dtype, np.float32)
    rates, scale = rotary_frequencies(
        config.head_size, config.rope_theta, config.rope_factor, config.rope
    )
    angle = positions[:, :, None, None].astype(accum_dtype) * jnp.asarray(rates, accum_dtype)
    # The remainder changes nothing, but XLA computes cosines anew for whatever uses them, every
    # head of every layer; remainders once.
    cosine, sine = jnp.fmod(jnp.cos(angle), 2), jnp.fmod(jnp.sin(angle), 2)
    return (cosine * scale).astype(dtype), (sine * scale).astype(dtype)


def rotary_frequencies(
    size: int, theta: float, factor: float, rope: RopeSpec
) -> tuple[Float[np.ndarray, " h"], float]:
    """Radians a position turns each pair of a head of `size`, and the factor on cosines and sines.

    Sources: YaRN, arXiv 2309.00071, eq. 17-22, in the form of Hugging Face transformers; Llama 3:
    the bands of its reference code.
    """
    rates = theta ** (-np.arange(0, size, 2) / size)
    if factor == 1:
        return rates, 1.0
    match rope.kind:
        case "linear":
            return rates / factor, 1.0
        case "llama3":
            turns = rope.context * rates / (2 * math.pi)
            unscaled_share = np.clip(
                (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor),
                0,
                1,
            )
            return rates * (unscaled_share + (1 - unscaled_share) / factor), 1.0
        case "yarn":
            scale = rope.attention_factor or 0.1 * math.log(factor) + 1
            unscaled_share = 1 - _yarn_ramp(size, theta, rope)
            return rates * (unscaled_share + (1 - unscaled_share) / factor), scale


def _yarn_ramp(size: int, theta: float, rope: RopeSpec) -> Float[np.ndarray, " h"]:
    """YaRN's share of stretching for each pair: 0 for those that turn often in the original
    context, 1 for those that hardly turn."""

    def pair_with_turns(turns: float) -> float:
        return size * math.log(rope.context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    return np.clip((np.arange(size // 2) - low) / (high - low if high != low else 0.001), 0, 1)


def rotate_heads(heads: Float[Array, "B T N H"], table: RotaryTable) -> Float[Array, "B T N H"]:
    """Turns each pair (i, i + H/2) of every head by its position's angle."""
    cosine, sine = table
    low, high = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
