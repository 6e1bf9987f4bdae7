"""Check that a loaded draft fits its policy.

Measures agreement and acceptance on a few prompts. If they are poor, looks for wrong wiring. A
wrong layer, flag or base of the positions raises no error, but makes a draft useless. In published
reports acceptance dropped from 45 % to 10 %, and from 59 % to 1 %.
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
from jaxspec.rl.draft_objective import DraftObjective, compute_draft_loss, total_variation
from jaxspec.rl.train_batch import rows_to_pack
from jaxspec.rollout.generator import Generator
from jaxspec.state import Pack, PyTree

POOR_AGREEMENT, CHANCE_AGREEMENT = 0.5, 0.2
"""Agreement below which repairs are tried, and below which a draft without a repair is reported as
trained for other weights. Published heads agree with their policy in more than half of all tokens.
Miswired heads agree in 1 to 15 %, and weak ones in between."""
REPAIR_GAIN, REPAIR_FACTOR = 0.15, 1.5
"""Minimum gain in agreement for a repair to be suggested, as a difference and as a ratio."""
MIN_TOKENS = 64
"""Minimum number of predicted tokens for a conclusion."""


class DraftCheck(NamedTuple):
    """Agreement of a draft with its policy.

    It is measured on text, and listed by depth from 1 on.
    """

    agreement: list[float]
    """Share of tokens where draft and policy have the same most likely token."""
    acceptance: list[float]
    """Mean of sum_v min(policy, draft) at the rollouts' temperature."""
    tokens: int
    """Number of tokens predicted at depth 1."""
    warning: str = ""
    """Suspected wiring error with its remedy, or a note that the draft is useless. May be empty."""


def measure_agreement(
    generator: Generator,
    kind: Learned[Any],
    policy: Decoder,
    network: PyTree,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
) -> DraftCheck:
    """Compares a draft with its policy on texts.

    If they disagree, tries repairs of the wiring.

    Args:
      generator: Generator that will use the draft.
      kind: Kind of the draft.
      policy: Policy network.
      network: Draft network.
      tokens: Texts, such as a few dozen prompts. All processes must pass the same.
      lengths: Number of tokens of each text.
    """
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    texts = rows_to_pack(
        *jax.device_put(
            (np.asarray(tokens, np.int32), is_token), meshes.replicated_sharding(generator.mesh)
        )
    )
    dtype, taps = jnp.dtype(generator.dtype), generator.taps

    def evaluate_network(
        network: PyTree, taps: tuple[int, ...], depths: int
    ) -> tuple[Float[np.ndarray, " A"], Float[np.ndarray, " A"]]:
        temperature = generator.settings.processing.temperature
        objective = DraftObjective(total_variation, depths, 1.0, temperature, kind.unroll)
        shares = _evaluate_draft(
            policy, network, _run_policy(policy, texts, taps, dtype), texts, objective, dtype
        )
        return jax.device_get(jax.device_put(shares, meshes.replicated_sharding(generator.mesh)))

    agreement, acceptance = evaluate_network(network, taps, max(2, generator.draft_length))
    # A draft predicts its first token only after some context.
    skipped = 1 + int(kind.unroll.min_context(1)[0])
    check = DraftCheck(
        agreement.tolist(), acceptance.tolist(), int(np.maximum(lengths - skipped, 0).sum())
    )
    # Depth 2 is looked at too: some faults only affect steps after the first.
    poor_depth = next(
        (depth for depth, share in enumerate(check.agreement[:2]) if share < POOR_AGREEMENT), None
    )
    if poor_depth is None or check.tokens < MIN_TOKENS:
        return check
    readings = {}
    for repair in kind.list_repairs(network, taps, policy.config):
        # Depths after the poor one say nothing about a repair.
        agreement, _ = evaluate_network(repair.network, repair.taps, poor_depth + 1)
        readings[repair[:2]] = float(agreement[poor_depth])
    return check._replace(warning=_diagnose(check.agreement[poor_depth], poor_depth + 1, readings))


def describe_check(check: DraftCheck) -> str:
    """Formats agreement and acceptance in one line."""
    if not check.tokens:
        return "the draft could not be compared with the policy: no prompt has three tokens"
    shares = ", ".join(f"{share:.0%}" for share in check.agreement)
    overlaps = ", ".join(f"{share:.2f}" for share in check.acceptance)
    # A depth counts only if all depths before it were accepted.
    round_tokens = 1 + np.cumprod(check.acceptance).sum()
    agreement_text = (
        f"the draft's likeliest token is the policy's in {shares} of {check.tokens} prompt tokens"
    )
    return (
        f"{agreement_text} (by depth); expected acceptance {overlaps}, hence"
        f" {round_tokens:.2f} tokens a round"
    )


def _diagnose(share: float, depth: int, readings: dict[tuple[str, str], float]) -> str:
    """Returns a warning about poor agreement.

    It is empty if the draft is only weak. `readings` has the agreement with each repair, by fault
    and remedy.
    """
    poor_text = f"the draft agrees with the policy in {share:.0%} of the tokens at depth {depth}"
    best_repair = max(readings, key=lambda repair: readings[repair], default=None)
    # Both margins must hold, so that noise on a few prompts suggests no repair.
    if best_repair is not None and readings[best_repair] >= max(
        share + REPAIR_GAIN, share * REPAIR_FACTOR
    ):
        fault, remedy = best_repair
        return f"{poor_text}, but in {readings[best_repair]:.0%} if {fault}: set {remedy}"
    if share >= CHANCE_AGREEMENT:
        return ""
    tried_text = (
        f"; none of these mends it: {', '.join(fault for fault, _ in readings)}" if readings else ""
    )
    return (
        f"{poor_text}{tried_text}. Most likely it was trained for other weights; train it further"
        " (--offline.steps), or leave it out"
    )


@partial(jax.jit, static_argnames=("taps", "dtype"))
def _run_policy(policy: Decoder, texts: Pack, taps: tuple[int, ...], dtype: Any) -> DecoderOutput:
    return cast_floats(policy, dtype)(texts.tokens, texts.positions, taps=taps)


@partial(jax.jit, static_argnames=("objective", "dtype"))
def _evaluate_draft(
    policy: Decoder,
    network: PyTree,
    forward: DecoderOutput,
    texts: Pack,
    objective: DraftObjective,
    dtype: Any,
) -> tuple[Float[Array, " A"], Float[Array, " A"]]:
    outputs = compute_draft_loss(
        cast_floats(network, dtype), cast_floats(policy, dtype), forward, texts, objective
    )
    return outputs.agreement, outputs.acceptance
