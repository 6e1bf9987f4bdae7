"""Whether a draft that was loaded fits its policy: agreement and acceptance on a few prompts, and
what is wired wrongly if they are poor.

A wrong layer, flag or base of the positions raises no error anywhere; it only makes a draft useless
(in published reports, acceptance of 45 % becomes 10 %, and 59 % becomes 1 %).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import mesh as meshes
from jaxspec.drafts.base import Learned
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.models.layers import cast_floats
from jaxspec.rl.draft_objective import Objective, draft_loss, total_variation
from jaxspec.rl.train_batch import whole_rows
from jaxspec.rollout.generator import Generator
from jaxspec.state import Pack, PyTree

POOR, CHANCE = 0.5, 0.2
"""Agreement below which repairs are tried, and below which a draft for which none helps is taken to
be made for other weights: published heads agree with their policy in more than half of all tokens,
miswired ones in 1 to 15 %, weak ones in between."""
BETTER, TIMES = 0.15, 1.5
"""A repair must agree in so much more of the tokens, and so many times as often, to be named."""
LEAST = 64
"""Predicted tokens without which nothing is concluded."""


class Reading(NamedTuple):
    """What a draft does on text, by depth (1, 2, ...), after true tokens."""

    agreement: list[float]
    """Share of tokens where the draft's likeliest is the policy's."""
    acceptance: list[float]
    """Mean of sum_v min(policy, draft) at the rollouts' temperature."""
    tokens: int
    """Predicted at depth 1."""
    warning: str = ""
    """What is wired wrongly, and what mends it; or that the draft is useless; empty: neither."""


def measured_agreement(
    generator: Generator,
    kind: Learned,
    policy: Decoder,
    network: PyTree,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
) -> Reading:
    """Compares a draft with its policy on texts of `lengths` tokens, and looks for the wrong wire
    where they do not agree.

    `tokens` are the same in all processes: a few dozen prompts, or whole texts.
    """
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    texts = whole_rows(
        *jax.device_put((np.asarray(tokens, np.int32), inside), meshes.replicated(generator.mesh))
    )
    dtype, taps = jnp.dtype(generator.dtype), generator.taps

    def read(
        network: PyTree, taps: tuple[int, ...], depths: int
    ) -> tuple[Float[np.ndarray, " A"], Float[np.ndarray, " A"]]:
        temperature = generator.settings.processing.temperature
        objective = Objective(total_variation, depths, 1.0, temperature, kind.unroll)
        found = _read(policy, network, _pass(policy, texts, taps, dtype), texts, objective, dtype)
        return jax.device_get(jax.device_put(found, meshes.replicated(generator.mesh)))

    agreement, acceptance = read(network, taps, max(2, generator.draft_length))
    skipped = 1 + int(kind.unroll.before(1)[0])  # tokens before the first that is predicted
    reading = Reading(
        agreement.tolist(), acceptance.tolist(), int(np.maximum(lengths - skipped, 0).sum())
    )
    poor = next((depth for depth, share in enumerate(reading.agreement[:2]) if share < POOR), None)
    if poor is None or reading.tokens < LEAST:
        return reading
    readings = {}
    for repair in kind.repairs(network, taps, policy.config):
        agreement, _ = read(repair.network, repair.taps, poor + 1)
        readings[repair[:2]] = float(agreement[poor])
    return reading._replace(warning=_diagnosis(reading.agreement[poor], poor + 1, readings))


def report(reading: Reading) -> str:
    """What `measured_agreement` found, in one line."""
    if not reading.tokens:
        return "the draft could not be compared with the policy: no prompt has three tokens"
    shares = ", ".join(f"{share:.0%}" for share in reading.agreement)
    overlaps = ", ".join(f"{share:.2f}" for share in reading.acceptance)
    kept = 1 + np.cumprod(reading.acceptance).sum()
    agrees = (
        f"the draft's likeliest token is the policy's in {shares} of {reading.tokens} prompt tokens"
    )
    return f"{agrees} (by depth); expected acceptance {overlaps}, hence {kept:.2f} tokens a round"


def _diagnosis(share: float, depth: int, readings: dict[tuple[str, str], float]) -> str:
    poor = f"the draft agrees with the policy in {share:.0%} of the tokens at depth {depth}"
    best = max(readings, key=lambda repair: readings[repair], default=None)
    if best is not None and readings[best] >= max(share + BETTER, share * TIMES):
        says, mend = best
        return f"{poor}, but in {readings[best]:.0%} if {says}: set {mend}"
    if share >= CHANCE:
        return ""
    tried = (
        f"; none of these mends it: {', '.join(says for says, _ in readings)}" if readings else ""
    )
    return (
        f"{poor}{tried}. Most likely it was trained for other weights; train it further"
        " (--offline.steps), or leave it out"
    )


@partial(jax.jit, static_argnames=("taps", "dtype"))
def _pass(policy: Decoder, texts: Pack, taps: tuple[int, ...], dtype: Any) -> DecoderOutput:
    return cast_floats(policy, dtype)(texts.tokens, texts.positions, taps=taps)


@partial(jax.jit, static_argnames=("objective", "dtype"))
def _read(
    policy: Decoder,
    network: PyTree,
    forward: DecoderOutput,
    texts: Pack,
    objective: Objective,
    dtype: Any,
) -> tuple[Float[Array, " A"], Float[Array, " A"]]:
    found = draft_loss(
        cast_floats(network, dtype), cast_floats(policy, dtype), forward, texts, objective
    )
    return found.agreement, found.acceptance
