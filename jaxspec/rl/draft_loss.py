"""The EAGLE-3 objective: training-time test, on the policy's own hidden states, detached."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.attention import up_to_position
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.eagle3 import Eagle3, Heads
from jaxspec.rl.logprob import in_chunks, positions_of
from jaxspec.rl.loss import masked_mean
from jaxspec.sampling import processed_logprobs


class DraftLoss(NamedTuple):
    """Loss and expected acceptance, by depth."""

    loss: Float[Array, ""]
    acceptance: Float[Array, " S"]
    """Mean of sum_v min(target, draft): the chance that a draft of this depth is accepted, given that the ones before were."""


def draft_loss(
    network: Eagle3,
    target: Decoder,
    forward: Forward,
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    steps: int,
    decay: float,
    temperature: float,
) -> DraftLoss:
    """Soft cross-entropy of the draft's distribution to the target's at `steps` depths, averaged over the tokens of `mask`.

    Args:
      network: the draft.
      target: the policy; no gradient reaches it.
      forward: the policy's own pass over `tokens`, with taps.
      tokens: whole sequences; `mask` is True at those that the draft should predict (responses).
      steps: depths; depth i feeds the draft its own output of depth i-1 and the true token.
      decay: weight of depth i is decay**i.
      temperature: of the rollouts; both distributions are taken at it.

    Source: EAGLE-3, arXiv 2503.01840 (training-time test); attention sees true slots up to t and the slot's own deeper states.
    """
    target = jax.lax.stop_gradient(target)
    hidden_target, taps = jax.lax.stop_gradient(forward.hidden), jax.lax.stop_gradient(forward.taps)
    assert taps is not None, "the policy's pass was run without taps"
    embedded = target.embedding[...][tokens]
    positions = positions_of(tokens)
    hidden, deeper = network.fuse_taps(taps), []
    total, acceptance = jnp.zeros((), hidden_target.dtype), []
    first: Heads | None = None
    for depth in range(steps):
        # Slot t reads token t+1+depth and predicts token t+2+depth, whose law the target's position t+1+depth gives.
        heads = network.heads(hidden, _shift(embedded, depth + 1), positions + depth)
        first = first or heads
        deeper = [*deeper, heads] if depth else []
        hidden = network.finish(hidden, _attend_diagonal(heads, first, deeper, positions))
        loss, accepted = _compare(network, target, hidden, _shift(hidden_target, depth + 1), temperature)
        predicts = _shift(mask, depth + 2)
        total = total + decay**depth * masked_mean(loss, predicts)
        acceptance.append(masked_mean(accepted, predicts))
    return DraftLoss(total / sum(decay**depth for depth in range(steps)), jnp.stack(acceptance))


def _shift(array: Array, by: int) -> Array:
    """Position t gets what stood at t + by; zeros come in at the end."""
    return jnp.pad(array[:, by:], [(0, 0), (0, min(by, array.shape[1]))] + [(0, 0)] * (array.ndim - 2))


def _attend_diagonal(heads: Heads, first: Heads, deeper: list[Heads], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
    """Joint softmax over the true slots (depth 0) up to t, and the deeper states of slot t alone."""
    rows, length, count, size = heads.query.shape
    kv_heads = first.key.shape[2]
    query = heads.query.reshape(rows, length, kv_heads, count // kv_heads, size)
    scale = size**-0.5
    scores = jnp.einsum("BTMRH,BSMH->BTMRS", query, first.key) * scale
    scores = jnp.where(up_to_position(positions, length)[:, :, None, None], scores, -jnp.inf)
    own = [jnp.einsum("BTMRH,BTMH->BTMR", query, step.key)[..., None] * scale for step in deeper]
    joined = jnp.concatenate([scores, *own], axis=-1)
    weights = jax.nn.softmax(joined.astype(np.promote_types(joined.dtype, np.float32)), axis=-1).astype(joined.dtype)
    attended = jnp.einsum("BTMRS,BSMH->BTMRH", weights[..., :length], first.value)
    for index, step in enumerate(deeper):
        attended = attended + weights[..., length + index, None] * step.value[:, :, :, None]
    return attended.reshape(rows, length, count, size)


def _compare(
    network: Eagle3, target: Decoder, hidden: Float[Array, "B T D"], hidden_target: Float[Array, "B T D"], temperature: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Cross-entropy and overlap of the two distributions at each position."""

    def chunk(hidden: Float[Array, "B C D"], hidden_target: Float[Array, "B C D"]) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
        target_probs = jnp.exp(processed_logprobs(target.logits(hidden_target), temperature))
        draft_logprobs = processed_logprobs(network.logits(hidden), temperature)
        overlap = jnp.sum(jnp.minimum(target_probs, jnp.exp(draft_logprobs)), axis=-1)
        return -jnp.sum(target_probs * draft_logprobs, axis=-1), jax.lax.stop_gradient(overlap)

    return in_chunks(chunk, 2 * hidden.shape[0] * network.config.vocab, hidden, hidden_target)
