"""The draft's objective: training-time test on the policy's own hidden states, detached, under one
of several losses."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.kernels.segment_attention import attend_visible
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.layers import Heads
from jaxspec.models.mtp import Mtp
from jaxspec.rl.logprobs import in_chunks
from jaxspec.rl.train_batch import Pack

KL_DECAY = 3.0
"""How fast `hybrid` leaves KL as acceptance grows: eta of arXiv 2602.23881."""

Loss = Callable[[Float[Array, "*B W"], Float[Array, "*B W"]], Float[Array, "*B"]]
"""(the target's logprobs of the draft's tokens, not renormalised; the draft's logprobs) -> loss at
each position."""


def cross_entropy(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """Soft cross-entropy to the target renormalised over the draft's vocabulary."""
    return -jnp.sum(jax.nn.softmax(target_logprobs, axis=-1) * draft_logprobs, axis=-1)


def kl(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """KL divergence from the draft to the target renormalised over the draft's vocabulary; the
    gradient is that of cross-entropy."""
    inside = jax.nn.log_softmax(target_logprobs, axis=-1)
    return jnp.sum(jnp.exp(inside) * (inside - draft_logprobs), axis=-1)


def log_acceptance(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """-log sum_v min(target, draft): the alpha form of LK (arXiv 2602.23881)."""
    return -jax.nn.logsumexp(jnp.minimum(target_logprobs, draft_logprobs), axis=-1)


def hybrid(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """KL where acceptance is low, total variation where it is high, by each position's own detached
    weight: the lambda form of LK."""
    missed = total_variation(target_logprobs, draft_logprobs)
    weight = jnp.exp(-KL_DECAY * (1 - jax.lax.stop_gradient(missed)))
    return weight * kl(target_logprobs, draft_logprobs) + (1 - weight) * missed


def total_variation(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """1 - sum_v min(target, draft): the chance that a draft is rejected."""
    return 1 - acceptance(target_logprobs, draft_logprobs)


def acceptance(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """sum_v min(target, draft): the chance that a token drawn from the draft is accepted."""
    return jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1)


LOSSES: dict[str, Loss] = {
    "ce": cross_entropy,
    "kl": kl,
    "lk": log_acceptance,
    "lambda": hybrid,
    "tv": total_variation,
}

WHERE_COVERED: frozenset[Loss] = frozenset({cross_entropy, kl})
"""Losses that skip positions where the target's likeliest token is not the draft's: the
renormalised target says nothing about them."""


class Objective(NamedTuple):
    """What a draft is trained for; static in a compiled program."""

    loss: Loss
    steps: int
    """Depths; depth i feeds the draft its own output of depth i-1 and the true token."""
    decay: float
    """Weight of depth i is decay**i."""
    temperature: float
    """Of the rollouts; both distributions are taken at it, whole: bans, ids without a token, top-k
    and top-p are left out, since verification sees to them. 0 counts as 1, since a law of one token
    teaches nothing."""

    def weights(self, depths: int) -> list[float]:
        """Of each depth's mean in the loss; they sum to 1."""
        weights = [self.decay**depth for depth in range(depths)]
        return [weight / sum(weights) for weight in weights]


class Compared(NamedTuple):
    """A draft beside its target at positions of packed texts, by depth; sums over the positions
    that a depth predicts."""

    loss: Float[Array, "*P A"]
    """Where the loss says nothing (see `WHERE_COVERED`), 0."""
    acceptance: Float[Array, "*P A"]
    """sum_v min(target, draft): the chance that a draft of this depth is accepted, given that the
    ones before were."""
    agreement: Float[Array, "*P A"]
    """1 where the draft's likeliest token is the target's."""


Network = Eagle3 | Mtp | Decoder


def depths_of(network: Network, objective: Objective) -> int:
    """Depths that a draft is trained at. A small model of its own reads true tokens only, so it has
    one."""
    return 1 if isinstance(network, Decoder) else objective.steps


def predicts(
    network: Network, chosen: Bool[Array, "B T"], positions: Int[Array, "B T"], depths: int
) -> Bool[Array, "B T A"]:
    """Which labels each depth predicts: those to learn before which a text has enough tokens.

    Depth d of EAGLE-3 and MTP has read the policy's hidden state 1 + d positions before the one
    whose label it predicts.
    """
    needed = (
        jnp.zeros((1,), jnp.int32)
        if isinstance(network, Decoder)
        else 1 + jnp.arange(depths, dtype=jnp.int32)
    )
    return chosen[:, :, None] & (positions[:, :, None] >= needed)


def drafted(
    network: Network, target: Decoder, forward: Forward, pack: Pack, depths: int
) -> Float[Array, "B T A D"]:
    """What the draft's head reads, by depth, at the position whose label it then predicts; zeros
    where a text is too short.

    Args:
      network: the draft; depth i of EAGLE-3 and MTP runs the layers of its turn i mod
        `network.depth`.
      target: the policy, which lends its embedding; no gradient reaches it.
      forward: the policy's own pass over the pack, with taps where the draft reads them.
      pack: texts side by side; the draft's attention stays inside each.
      depths: of the unroll.

    Source: EAGLE-3, arXiv 2503.01840 (training-time test); attention sees the layer's true slots
    and the entry's own deeper states.
    """
    target, forward = jax.lax.stop_gradient((target, forward))
    if isinstance(network, Decoder):
        return network(pack.tokens, pack.positions, first=pack.first).hidden[:, :, None]
    features = forward.taps if network.with_taps else forward.hidden
    assert features is not None, "the policy's pass was run without taps"
    embedded = network.embed(target, pack.tokens).astype(features.dtype)
    index = jnp.broadcast_to(jnp.arange(pack.tokens.shape[1], dtype=jnp.int32), pack.tokens.shape)
    hidden = network.read(features)
    true: dict[int, Heads] = {}
    own: dict[int, list[Heads]] = {}
    outputs = []
    for depth in range(depths):
        # Entry t stands at slot t+depth, reads token t+1+depth and predicts the label of t+1+depth,
        # as the target does there.
        turn = depth % network.depth
        for layer in range(turn * network.stack, (turn + 1) * network.stack):
            heads = network.heads(
                layer, hidden, _earlier(embedded, depth + 1), pack.positions + depth
            )
            if depth == turn:
                true[layer], own[layer] = heads, []
            if depth:
                own[layer] = [*own[layer], heads]
            attended = _attend_diagonal(
                heads.query, true[layer], own[layer], pack.first, index - turn
            )
            hidden = network.finish(layer, heads.residual, attended)
        outputs.append(_later(hidden, depth + 1))
    return jnp.stack(outputs, axis=2)


def compared(
    network: Network,
    target: Decoder,
    logits: Float[Array, "B T V"],
    hidden: Float[Array, "B T A D"],
    objective: Objective,
) -> Compared:
    """Compares a draft with its target, whose `logits` are those of each position's label: computed
    once for all depths."""
    temperature = objective.temperature or 1.0
    mapped = None if isinstance(network, Decoder) else network.vocabulary
    whole = jax.nn.log_softmax(jax.lax.stop_gradient(logits) / temperature, axis=-1)
    target_logprobs = whole if mapped is None else jnp.take(whole, mapped[...], axis=-1)
    covered = jnp.max(target_logprobs, axis=-1) == jnp.max(whole, axis=-1)
    found = []
    for depth in range(hidden.shape[2]):
        output = hidden[:, :, depth]
        drawn = (
            network.logits(output)
            if isinstance(network, Decoder)
            else network.draft_logits(target, output)
        )
        draft_logprobs = jax.nn.log_softmax(drawn / temperature, axis=-1)
        loss = objective.loss(target_logprobs, draft_logprobs)
        if mapped is not None and objective.loss in WHERE_COVERED:
            loss = jnp.where(covered, loss, 0)
        overlap = jax.lax.stop_gradient(acceptance(target_logprobs, draft_logprobs))
        same = covered & (
            jnp.argmax(target_logprobs, axis=-1) == jnp.argmax(draft_logprobs, axis=-1)
        )
        found.append(Compared(loss, overlap, same.astype(overlap.dtype)))
    return Compared(*(jnp.stack(part, axis=2) for part in zip(*found, strict=True)))


class DraftLoss(NamedTuple):
    """Loss; expected acceptance and agreement by depth, each a mean over the positions to
    predict."""

    loss: Float[Array, ""]
    acceptance: Float[Array, " A"]
    agreement: Float[Array, " A"]


def draft_loss(
    network: Network, target: Decoder, forward: Forward, pack: Pack, objective: Objective
) -> DraftLoss:
    """The draft's loss on one pack alone, all at once. The learner, which has many, sums what
    `compared` gives."""
    depths = depths_of(network, objective)
    hidden = drafted(network, target, forward, pack, depths)

    def chunk(hidden_target: Float[Array, "B C E"], hidden: Float[Array, "B C A D"]) -> Compared:
        return compared(network, target, target.logits(hidden_target), hidden, objective)

    found = in_chunks(
        chunk, len(pack.tokens) * target.config.vocab * (1 + depths), forward.hidden, hidden
    )
    inside = predicts(network, pack.chosen, pack.positions, depths)
    count = jnp.maximum(jnp.sum(inside, axis=(0, 1), dtype=found.loss.dtype), 1)
    means = Compared(*(jnp.sum(jnp.where(inside, part, 0), axis=(0, 1)) / count for part in found))
    loss = jnp.sum(means.loss * jnp.asarray(objective.weights(depths), means.loss.dtype))
    return DraftLoss(loss, means.acceptance, means.agreement)


def _earlier(array: Float[Array, "B T D"], by: int) -> Float[Array, "B T D"]:
    """Position t gets what stood at t + by; zeros come in at the end."""
    return jnp.pad(array[:, by:], ((0, 0), (0, min(by, array.shape[1])), (0, 0)))


def _later(array: Float[Array, "B T D"], by: int) -> Float[Array, "B T D"]:
    """Position t gets what stood at t - by; zeros come in at the start."""
    return jnp.pad(
        array[:, : max(array.shape[1] - by, 0)], ((0, 0), (min(by, array.shape[1]), 0), (0, 0))
    )


def _attend_diagonal(
    query: Float[Array, "B T N H"],
    true: Heads,
    own: list[Heads],
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Joint softmax over the true entries from `first` to `last`, and the own states of each entry
    alone: merged by log-sum-exp."""
    attended, total = attend_visible(query, true.key, true.value, first, last)
    if not own:
        return attended
    rows, length, count, size = query.shape
    grouped = query.reshape(rows, length, true.key.shape[2], -1, size)

    def score(step: Heads) -> Float[Array, "B T N"]:
        scores = jnp.einsum(
            "BTMRH,BTMH->BTMR", grouped, step.key, preferred_element_type=total.dtype
        )
        return scores.reshape(rows, length, count) * np.asarray(size**-0.5, total.dtype)

    parts = jnp.stack([total, *map(score, own)], axis=-1)
    weights = jax.nn.softmax(parts, axis=-1).astype(query.dtype)
    merged = attended * weights[..., :1]
    for number, step in enumerate(own, start=1):
        value = jnp.repeat(step.value, count // step.value.shape[2], axis=2)
        merged = merged + value * weights[..., number, None]
    return merged
