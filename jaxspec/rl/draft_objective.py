"""The draft's objective: training-time test on the policy's own hidden states, detached, under one
of several losses."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import Unroll
from jaxspec.kernels.chunks import map_in_chunks
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.state import Pack, PyTree

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
    and top-p are left out, since verification sees to them. 0 counts as 1, since a distribution
    of one token teaches nothing."""
    unroll: Unroll
    """How the draft's kind is run over texts."""

    @property
    def depths(self) -> int:
        """Depths at which this kind of draft is trained."""
        return self.unroll.depths(self.steps)

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


def predicts(
    objective: Objective, chosen: Bool[Array, "B T"], positions: Int[Array, "B T"], depths: int
) -> Bool[Array, "B T A"]:
    """Which labels each depth predicts: those to learn before which a text has enough tokens."""
    return chosen[:, :, None] & (positions[:, :, None] >= objective.unroll.before(depths))


def drafted(
    network: PyTree,
    target: Decoder,
    forward: DecoderOutput,
    pack: Pack,
    depths: int,
    objective: Objective,
) -> Float[Array, "B T A D"]:
    """What the draft's head reads, by depth, at the position whose label it then predicts.

    It is zero where a text is too short, and may be where no label is learnt. No gradient reaches
    the policy, whose own pass `forward` is.

    Source: EAGLE-3, arXiv 2503.01840 (training-time test).
    """
    target, forward = jax.lax.stop_gradient((target, forward))
    return objective.unroll.hidden(network, target, forward, pack, depths)


def compared(
    network: PyTree,
    target: Decoder,
    logits: Float[Array, "B T V"],
    hidden: Float[Array, "B T A D"],
    objective: Objective,
) -> Compared:
    """Compares a draft with its target, whose `logits` are those of each position's label: computed
    once for all depths."""
    temperature = objective.temperature or 1.0
    mapped = objective.unroll.vocabulary(network)
    whole = jax.nn.log_softmax(jax.lax.stop_gradient(logits) / temperature, axis=-1)
    target_logprobs = whole if mapped is None else jnp.take(whole, mapped, axis=-1)
    covered = jnp.max(target_logprobs, axis=-1) == jnp.max(whole, axis=-1)
    found = []
    for depth in range(hidden.shape[2]):
        output = hidden[:, :, depth]
        drawn = objective.unroll.logits(network, target, output)
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
    network: PyTree, target: Decoder, forward: DecoderOutput, pack: Pack, objective: Objective
) -> DraftLoss:
    """The draft's loss on one pack alone, all at once. The learner, which has many, sums what
    `compared` gives."""
    depths = objective.depths
    hidden = drafted(network, target, forward, pack, depths, objective)

    def chunk(
        networks: PyTree, hidden_target: Float[Array, "B C E"], hidden: Float[Array, "B C A D"]
    ) -> Compared:
        network, target = networks
        return compared(network, target, target.logits(hidden_target), hidden, objective)

    elements = len(pack.tokens) * target.config.vocab * (1 + depths)
    found = map_in_chunks(chunk, (network, target), elements, forward.hidden, hidden)
    inside = predicts(objective, pack.chosen, pack.positions, depths)
    count = jnp.maximum(jnp.sum(inside, axis=(0, 1), dtype=found.loss.dtype), 1)
    means = Compared(*(jnp.sum(jnp.where(inside, part, 0), axis=(0, 1)) / count for part in found))
    loss = jnp.sum(means.loss * jnp.asarray(objective.weights(depths), means.loss.dtype))
    return DraftLoss(loss, means.acceptance, means.agreement)
