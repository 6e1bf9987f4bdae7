"""Rotary position embedding (RoPE; Su et al., arXiv 2104.09864).

Uses the rotate-half form of Llama and Qwen, with scaling for longer contexts.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.inputs.spec import ModelSpec, RopeSpec

RotaryTable = tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]
"""Cosines and sines for each position and pair of features."""


def rotary_table(positions: Int[Array, "B T"], config: ModelSpec, dtype: jnp.dtype) -> RotaryTable:
    """Computes cosines and sines for the model's heads.

    They are computed in float32 (float64 for float64 models), then cast to `dtype`.
    """
    # bfloat16 cannot represent large positions exactly.
    accum_dtype = np.promote_types(dtype, np.float32)
    rates, scale = rotary_frequencies(
        config.head_size, config.rope_theta, config.rope_factor, config.rope
    )
    angle = positions[:, :, None, None].astype(accum_dtype) * jnp.asarray(rates, accum_dtype)
    # The remainder changes no value, but makes XLA compute the table once. Otherwise XLA computes
    # the cosines again for each use, in every head of every layer.
    cosine, sine = jnp.fmod(jnp.cos(angle), 2), jnp.fmod(jnp.sin(angle), 2)
    return (cosine * scale).astype(dtype), (sine * scale).astype(dtype)


def rotary_frequencies(
    size: int, theta: float, factor: float, rope: RopeSpec
) -> tuple[Float[np.ndarray, " h"], float]:
    """Computes rotation frequencies and scale.

    Returns radians per position for each pair, and the factor on cosines and sines. YaRN follows
    arXiv 2309.00071, eq. 17-22, in the form of Hugging Face transformers. Llama 3 uses the bands of
    its reference code.
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
            # The paper's temperature: larger cosines and sines of both queries and keys sharpen
            # attention, which a longer context would flatten.
            scale = rope.attention_factor or 0.1 * math.log(factor) + 1
            unscaled_share = 1 - _yarn_ramp(size, theta, rope)
            return rates * (unscaled_share + (1 - unscaled_share) / factor), scale


def _yarn_ramp(size: int, theta: float, rope: RopeSpec) -> Float[np.ndarray, " h"]:
    """Computes YaRN's interpolation share for each pair.

    It is 0 for pairs that turn often in the original context, and 1 for pairs that hardly turn.
    """

    def pair_with_turns(turns: float) -> float:
        return size * math.log(rope.context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    # The smallest width avoids a division by zero, as in transformers.
    return np.clip((np.arange(size // 2) - low) / (high - low if high != low else 0.001), 0, 1)


def rotate_heads(heads: Float[Array, "B T N H"], table: RotaryTable) -> Float[Array, "B T N H"]:
    """Rotates pairs (i, i + H/2) of all heads."""
    cosine, sine = table
    low, high = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
