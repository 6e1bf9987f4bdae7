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
"""How fast `kl_tv_hybrid` leaves KL as acceptance grows: eta of arXiv 2602.23881."""

DraftLossFunction = Callable[[Float[Array, "*B W"], Float[Array, "*B W"]], Float[Array, "*B"]]
"""(the target's logprobs of the draft's tokens, not renormalised; the draft's logprobs) -> loss at
each position."""


def cross_entropy(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """Soft cross-entropy to the target renormalised over the draft's vocabulary."""
    return -jnp.sum(jax.nn.softmax(target_logprobs, axis=-1) * draft_logprobs, axis=-1)


def kl_divergence(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """KL divergence from the draft to the target renormalised over the draft's vocabulary; the
    gradient is that of cross-entropy."""
    renormalized = jax.nn.log_softmax(target_logprobs, axis=-1)
    return jnp.sum(jnp.exp(renormalized) * (renormalized - draft_logprobs), axis=-1)


def negative_log_acceptance(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """-log sum_v min(target, draft): the alpha form of LK (arXiv 2602.23881)."""
    return -jax.nn.logsumexp(jnp.minimum(target_logprobs, draft_logprobs), axis=-1)


def kl_tv_hybrid(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """KL where acceptance is low, total variation where it is high, by each position's own detached
    weight: the lambda form of LK."""
    rejection = total_variation(target_logprobs, draft_logprobs)
    weight = jnp.exp(-KL_DECAY * (1 - jax.lax.stop_gradient(rejection)))
    return weight * kl_divergence(target_logprobs, draft_logprobs) + (1 - weight) * rejection


def total_variation(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """1 - sum_v min(target, draft): the chance that a draft is rejected."""
    return 1 - expected_acceptance(target_logprobs, draft_logprobs)


def expected_acceptance(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """sum_v min(target, draft): the chance that a token drawn from the draft is accepted."""
    return jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1)


LOSSES: dict[str, DraftLossFunction] = {
    "ce": cross_entropy,
    "kl": kl_divergence,
    "lk": negative_log_acceptance,
    "lambda": kl_tv_hybrid,
    "tv": total_variation,
}

COVERED_ONLY_LOSSES: frozenset[DraftLossFunction] = frozenset({cross_entropy, kl_divergence})
"""Losses that skip positions where the target's likeliest token is not the draft's: the
renormalised target says nothing about them."""


class DraftObjective(NamedTuple):
    """What a draft is trained for; static in a compiled program."""

    loss: DraftLossFunction
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
    def depth_count(self) -> int:
        """Depths at which this kind of draft is trained."""
        return self.unroll.depth_count(self.steps)

    def depth_weights(self, depth_count: int) -> list[float]:
        """Of each depth's mean in the loss; they sum to 1."""
        weights = [self.decay**depth for depth in range(depth_count)]
        return [weight / sum(weights) for weight in weights]


class DraftComparison(NamedTuple):
    """A draft beside its target at positions of packed texts, by depth; sums over the positions
    that a depth predicts."""

    loss: Float[Array, "*P A"]
    """Where the loss says nothing (see `COVERED_ONLY_LOSSES`), 0."""
    acceptance: Float[Array, "*P A"]
    """sum_v min(target, draft): the chance that a draft of this depth is accepted, given that the
    ones before were."""
    agreement: Float[Array, "*P A"]
    """1 where the draft's likeliest token is the target's."""


def depth_loss_mask(
    objective: DraftObjective,
    loss_mask: Bool[Array, "B T"],
    positions: Int[Array, "B T"],
    depth_count: int,
) -> Bool[Array, "B T A"]:
    """Which labels each depth predicts: those to learn before which a text has enough tokens."""
    return loss_mask[:, :, None] & (
        positions[:, :, None] >= objective.unroll.min_context(depth_count)
    )


def unroll_draft(
    network: PyTree,
    target: Decoder,
    forward: DecoderOutput,
    pack: Pack,
    depth_count: int,
    objective: DraftObjective,
) -> Float[Array, "B T A D"]:
    """What the draft's head reads, by depth, at the position whose label it then predicts.

    It is zero where a text is too short, and may be where no label is learnt. No gradient reaches
    the policy, whose own pass `forward` is.

    Source: EAGLE-3, arXiv 2503.01840 (training-time test).
    """
    target, forward = jax.lax.stop_gradient((target, forward))
    return objective.unroll.hidden_states(network, target, forward, pack, depth_count)


def compare_draft(
    network: PyTree,
    target: Decoder,
    logits: Float[Array, "B T V"],
    hidden: Float[Array, "B T A D"],
    objective: DraftObjective,
) -> DraftComparison:
    """Compares a draft with its target, whose `logits` are those of each position's label: computed
    once for all depths."""
    temperature = objective.temperature or 1.0
    vocab_ids = objective.unroll.vocabulary(network)
    full_logprobs = jax.nn.log_softmax(jax.lax.stop_gradient(logits) / temperature, axis=-1)
    target_logprobs = (
        full_logprobs if vocab_ids is None else jnp.take(full_logprobs, vocab_ids, axis=-1)
    )
    is_covered = jnp.max(target_logprobs, axis=-1) == jnp.max(full_logprobs, axis=-1)
    comparisons = []
    for depth in range(hidden.shape[2]):
        depth_hidden = hidden[:, :, depth]
        draft_logits = objective.unroll.logits(network, target, depth_hidden)
        draft_logprobs = jax.nn.log_softmax(draft_logits / temperature, axis=-1)
        loss = objective.loss(target_logprobs, draft_logprobs)
        if vocab_ids is not None and objective.loss in COVERED_ONLY_LOSSES:
            loss = jnp.where(is_covered, loss, 0)
        overlap = jax.lax.stop_gradient(expected_acceptance(target_logprobs, draft_logprobs))
        agreement = is_covered & (
            jnp.argmax(target_logprobs, axis=-1) == jnp.argmax(draft_logprobs, axis=-1)
        )
        comparisons.append(DraftComparison(loss, overlap, agreement.astype(overlap.dtype)))
    return DraftComparison(
        *(jnp.stack(values, axis=2) for values in zip(*comparisons, strict=True))
    )


class DraftLoss(NamedTuple):
    """Loss; expected acceptance and agreement by depth, each a mean over the positions to
    predict."""

    loss: Float[Array, ""]
    acceptance: Float[Array, " A"]
    agreement: Float[Array, " A"]


def compute_draft_loss(
    network: PyTree, target: Decoder, forward: DecoderOutput, pack: Pack, objective: DraftObjective
) -> DraftLoss:
    """The draft's loss on one pack alone, all at once. The learner, which has many, sums what
    `compare_draft` gives."""
    depth_count = objective.depth_count
    hidden = unroll_draft(network, target, forward, pack, depth_count, objective)

    def compare_chunk(
        networks: PyTree, hidden_target: Float[Array, "B C E"], hidden: Float[Array, "B C A D"]
    ) -> DraftComparison:
        network, target = networks
        return compare_draft(network, target, target.logits(hidden_target), hidden, objective)

    elements = len(pack.tokens) * target.config.vocab * (1 + depth_count)
    comparison = map_in_chunks(compare_chunk, (network, target), elements, forward.hidden, hidden)
    label_mask = depth_loss_mask(objective, pack.loss_mask, pack.positions, depth_count)
    count = jnp.maximum(jnp.sum(label_mask, axis=(0, 1), dtype=comparison.loss.dtype), 1)
    means = DraftComparison(
        *(jnp.sum(jnp.where(label_mask, values, 0), axis=(0, 1)) / count for values in comparison)
    )
    loss = jnp.sum(means.loss * jnp.asarray(objective.depth_weights(depth_count), means.loss.dtype))
    return DraftLoss(loss, means.acceptance, means.agreement)
