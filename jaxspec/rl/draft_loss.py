"""The draft's objective: training-time test on the policy's own hidden states, detached, under one of several losses."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.attention import up_to_position
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.layers import Heads
from jaxspec.models.mtp import Mtp
from jaxspec.rl.logprob import in_chunks, positions_of
from jaxspec.rl.loss import masked_mean

KL_DECAY = 3.0
"""How fast `hybrid` leaves KL as acceptance grows: eta of arXiv 2602.23881."""

Loss = Callable[[Float[Array, "*B W"], Float[Array, "*B W"]], Float[Array, "*B"]]
"""(the target's logprobs of the draft's tokens, not renormalised; the draft's logprobs) -> loss at each position."""


def cross_entropy(target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]) -> Float[Array, "*B"]:
    """Soft cross-entropy to the target renormalised over the draft's vocabulary."""
    return -jnp.sum(jax.nn.softmax(target_logprobs, axis=-1) * draft_logprobs, axis=-1)


def kl(target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]) -> Float[Array, "*B"]:
    """KL divergence from the draft to the target renormalised over the draft's vocabulary; the gradient is that of cross-entropy."""
    inside = jax.nn.log_softmax(target_logprobs, axis=-1)
    return jnp.sum(jnp.exp(inside) * (inside - draft_logprobs), axis=-1)


def log_acceptance(target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]) -> Float[Array, "*B"]:
    """-log sum_v min(target, draft): the alpha form of LK (arXiv 2602.23881)."""
    return -jax.nn.logsumexp(jnp.minimum(target_logprobs, draft_logprobs), axis=-1)


def hybrid(target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]) -> Float[Array, "*B"]:
    """KL where acceptance is low, total variation where it is high, by each position's own detached weight: the lambda form of LK."""
    missed = total_variation(target_logprobs, draft_logprobs)
    weight = jnp.exp(-KL_DECAY * (1 - jax.lax.stop_gradient(missed)))
    return weight * kl(target_logprobs, draft_logprobs) + (1 - weight) * missed


def total_variation(target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]) -> Float[Array, "*B"]:
    """1 - sum_v min(target, draft): the chance that a draft is rejected."""
    return 1 - acceptance(target_logprobs, draft_logprobs)


def acceptance(target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]) -> Float[Array, "*B"]:
    """sum_v min(target, draft): the chance that a token drawn from the draft is accepted."""
    return jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "kl": kl, "lk": log_acceptance, "lambda": hybrid, "tv": total_variation}

WHERE_COVERED: frozenset[Loss] = frozenset({cross_entropy, kl})
"""Losses that skip positions where the target's likeliest token is not the draft's: the renormalised target says nothing about them."""


class Objective(NamedTuple):
    """What a draft is trained for; static in a compiled program."""

    loss: Loss
    steps: int
    """Depths; depth i feeds the draft its own output of depth i-1 and the true token."""
    decay: float
    """Weight of depth i is decay**i."""
    temperature: float
    """Of the rollouts; both distributions are taken at it, whole: bans, ids without a token, top-k and top-p are left
    out, since verification sees to them. 0 counts as 1, since a law of one token
    teaches nothing."""


class DraftLoss(NamedTuple):
    """Loss; expected acceptance and agreement by depth."""

    loss: Float[Array, ""]
    acceptance: Float[Array, " A"]
    """Mean of sum_v min(target, draft): the chance that a draft of this depth is accepted, given that the ones before were."""
    agreement: Float[Array, " A"]
    """Share of positions where the draft's likeliest token is the target's."""


def draft_loss(
    network: Eagle3 | Mtp | Decoder,
    target: Decoder,
    forward: Forward,
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    objective: Objective,
) -> DraftLoss:
    """The draft's loss, averaged over the tokens of `mask`: at `objective.steps` depths, or at one for a small model of its own.

    Args:
      network: the draft; depth i of EAGLE-3 and MTP runs the layers of its turn i mod `network.depth`.
      target: the policy; no gradient reaches it.
      forward: the policy's own pass over `tokens`, with taps where the draft reads them.
      tokens: whole sequences.
      mask: True at those that the draft should predict (responses).
      objective: see `Objective`.

    Source: EAGLE-3, arXiv 2503.01840 (training-time test); attention sees the layer's true slots and the entry's own deeper states.
    """
    target, forward = jax.lax.stop_gradient((target, forward))
    if isinstance(network, Decoder):
        return _external_loss(network, target, forward, tokens, mask, objective)
    features = forward.taps if network.with_taps else forward.hidden
    assert features is not None, "the policy's pass was run without taps"
    embedded = network.embed(target, tokens)
    positions = positions_of(tokens)
    hidden = network.read(features)
    true: dict[int, Heads] = {}
    own: dict[int, list[Heads]] = {}
    losses, overlaps, agreements = [], [], []
    for depth in range(objective.steps):
        # Entry t stands at slot t+depth, reads token t+1+depth and predicts token t+2+depth, whose law the target gives at t+1+depth.
        turn = depth % network.depth
        for layer in range(turn * network.stack, (turn + 1) * network.stack):
            heads = network.heads(layer, hidden, _shift(embedded, depth + 1), positions + depth)
            if depth == turn:
                true[layer], own[layer] = heads, []
            if depth:
                own[layer] = [*own[layer], heads]
            attended = _attend_diagonal(heads.query, true[layer], own[layer], positions - turn)
            hidden = network.finish(layer, heads.residual, attended)
        predicts = _shift(mask, depth + 2)
        loss, overlap, agreement = _compare(network, target, hidden, _shift(forward.hidden, depth + 1), predicts, objective)
        losses.append(loss)
        overlaps.append(overlap)
        agreements.append(agreement)
    weights = [objective.decay**depth for depth in range(objective.steps)]
    total = jnp.sum(jnp.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]))
    return DraftLoss(total / sum(weights), jnp.stack(overlaps), jnp.stack(agreements))


def _external_loss(
    network: Decoder, target: Decoder, forward: Forward, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], objective: Objective
) -> DraftLoss:
    """A small model predicts what the target predicts at each position; it reads true tokens only, so there is one depth."""
    hidden = network(tokens, positions_of(tokens)).hidden
    loss, overlap, agreement = _compare(network, target, hidden, forward.hidden, _shift(mask, 1), objective)
    return DraftLoss(loss, overlap[None], agreement[None])


def _shift(array: Array, by: int) -> Array:
    """Position t gets what stood at t + by; zeros come in at the end."""
    return jnp.pad(array[:, by:], [(0, 0), (0, min(by, array.shape[1]))] + [(0, 0)] * (array.ndim - 2))


def _attend_diagonal(query: Float[Array, "B T N H"], true: Heads, own: list[Heads], last: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
    """Joint softmax over the true entries up to `last`, and the own states of each entry alone."""
    rows, length, count, size = query.shape
    kv_heads = true.key.shape[2]
    grouped = query.reshape(rows, length, kv_heads, count // kv_heads, size)
    scale = size**-0.5
    scores = jnp.einsum("BTMRH,BSMH->BTMRS", grouped, true.key) * scale
    scores = jnp.where(up_to_position(last, length)[:, :, None, None], scores, -jnp.inf)
    diagonal = [jnp.einsum("BTMRH,BTMH->BTMR", grouped, step.key)[..., None] * scale for step in own]
    joined = jnp.concatenate([scores, *diagonal], axis=-1)
    weights = jax.nn.softmax(joined.astype(np.promote_types(joined.dtype, np.float32)), axis=-1).astype(joined.dtype)
    attended = jnp.einsum("BTMRS,BSMH->BTMRH", weights[..., :length], true.value)
    for index, step in enumerate(own):
        attended = attended + weights[..., length + index, None] * step.value[:, :, :, None]
    return attended.reshape(rows, length, count, size)


def _compare(
    network: Eagle3 | Mtp | Decoder,
    target: Decoder,
    hidden: Float[Array, "B T D"],
    hidden_target: Float[Array, "B T E"],
    predicts: Bool[Array, "B T"],
    objective: Objective,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Mean loss, acceptance and agreement over the positions of `predicts`."""
    temperature = objective.temperature or 1.0
    mapped = None if isinstance(network, Decoder) else network.vocabulary
    ids = None if mapped is None else mapped[...]
    only_covered = ids is not None and objective.loss in WHERE_COVERED

    def chunk(
        hidden: Float[Array, "B C D"], hidden_target: Float[Array, "B C E"]
    ) -> tuple[Float[Array, "B C"], Float[Array, "B C"], Bool[Array, "B C"], Bool[Array, "B C"]]:
        logits = network.logits(hidden) if isinstance(network, Decoder) else network.draft_logits(target, hidden)
        draft_logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
        whole = jax.nn.log_softmax(target.logits(hidden_target) / temperature, axis=-1)
        target_logprobs = whole if ids is None else jnp.take(whole, ids, axis=-1)
        covered = jnp.max(target_logprobs, axis=-1) == jnp.max(whole, axis=-1)
        overlap = jax.lax.stop_gradient(acceptance(target_logprobs, draft_logprobs))
        same = covered & (jnp.argmax(target_logprobs, axis=-1) == jnp.argmax(draft_logprobs, axis=-1))
        return objective.loss(target_logprobs, draft_logprobs), overlap, covered, same

    vocab = target.config.vocab + (target.config.vocab if ids is None else ids.size)
    loss, overlap, covered, same = in_chunks(chunk, hidden.shape[0] * vocab, hidden, hidden_target)
    trained = predicts & covered if only_covered else predicts
    return masked_mean(loss, trained), masked_mean(overlap, predicts), masked_mean(same.astype(overlap.dtype), predicts)
