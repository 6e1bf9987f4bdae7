"""Weights on their way from the learner to the generator.

The learner exports them, they are transferred to the generator's mesh, and it loads them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxspec.inputs.streams import Stream, stream_key
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import cast_floats
from jaxspec.models.lora import AdaptedDecoder, merge_lora
from jaxspec.state import ExportedWeights, PyTree


def rounding_key(seed: int, version: Int[Array, ""] | int) -> Key[Array, ""]:
    """Returns the key by which a version's merged adapters are rounded."""
    # Only seed and version enter, so a version is rounded alike whenever it generates.
    return stream_key(seed, Stream.ROUNDING, version)


def export_weights(
    policy: Decoder | AdaptedDecoder,
    draft: PyTree,
    dtype: str,
    version: Int[Array, ""] | int = 0,
    seed: int = 0,
) -> ExportedWeights:
    """Merges adapters, and casts policy and draft to the generator's `dtype`.

    The layout stays the learner's. Rounding of merged weights is keyed by the run's `seed`.
    """
    networks = merge_lora(policy, rounding_key(seed, version)), draft
    # Without the barrier XLA gathers some weights first, in the wider type, and then casts them.
    policy, draft = jax.lax.optimization_barrier(cast_floats(networks, jnp.dtype(dtype)))
    return ExportedWeights(policy=policy, draft=draft, version=jnp.asarray(version, jnp.int32))
