"""The draft's training objective: training-time test under one of several losses.

It trains on the policy's detached hidden states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec.drafts.base import Unroll
from jaxspec.kernels.chunks import map_in_chunks
from jaxspec.metrics.mean import Mean
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.state import Pack, PyTree

KL_DECAY = 3.0
"""Rate at which `kl_tv_hybrid` moves from KL to total variation with rising acceptance.

It is eta of arXiv 2602.23881.
"""

DraftLossFunction = Callable[[Float[Array, "*B W"], Float[Array, "*B W"]], Float[Array, "*B"]]
"""(target logprobs, draft logprobs) -> loss at each position.

Target logprobs cover the draft's tokens and are not renormalized.
"""


def cross_entropy(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """Computes soft cross-entropy to the renormalized target."""
    # Renormalized over the draft's vocabulary, as the draft has no probability outside it.
    return -jnp.sum(jax.nn.softmax(target_logprobs, axis=-1) * draft_logprobs, axis=-1)


def kl_divergence(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """Computes KL divergence to the renormalized target.

    Its gradient equals that of cross-entropy.
    """
    renormalized = jax.nn.log_softmax(target_logprobs, axis=-1)
    return jnp.sum(jnp.exp(renormalized) * (renormalized - draft_logprobs), axis=-1)


def negative_log_acceptance(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """Computes -log sum_v min(target, draft).

    It is the alpha form of LK (arXiv 2602.23881).
    """
    return -jax.nn.logsumexp(jnp.minimum(target_logprobs, draft_logprobs), axis=-1)


def kl_tv_hybrid(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """Mixes KL and total variation by acceptance.

    KL has the larger weight at low acceptance. It is the lambda form of LK (arXiv 2602.23881).
    """
    rejection = total_variation(target_logprobs, draft_logprobs)
    # The weight follows each position's acceptance, but must not be a way to lower the loss.
    weight = jnp.exp(-KL_DECAY * (1 - jax.lax.stop_gradient(rejection)))
    return weight * kl_divergence(target_logprobs, draft_logprobs) + (1 - weight) * rejection


def total_variation(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """Computes 1 - sum_v min(target, draft), the rejection probability."""
    return 1 - expected_acceptance(target_logprobs, draft_logprobs)


def expected_acceptance(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    """Computes sum_v min(target, draft), the acceptance probability."""
    return jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1)


LOSSES: dict[str, DraftLossFunction] = {
    "ce": cross_entropy,
    "kl": kl_divergence,
    "lk": negative_log_acceptance,
    "lambda": kl_tv_hybrid,
    "tv": total_variation,
}

COVERED_ONLY_LOSSES: frozenset[DraftLossFunction] = frozenset({cross_entropy, kl_divergence})
"""Losses that skip positions whose most likely target token is not in the draft's vocabulary.

The renormalized target carries no information there.
"""


def detach_policy(target: Decoder, outputs: PyTree) -> Any:
    """Detaches the policy and its outputs, which the draft's loss reads but must not change."""
    # Callers detach outside of every `cond`, which would hold zeros in place of the gradients.
    return jax.lax.stop_gradient((target, outputs))


class DraftComparison(NamedTuple):
    """Comparison of draft and target, by depth.

    It holds values at positions of packed texts, or sums over the positions that a depth predicts.
    """

    loss: Float[Array, "*P A"]
    """Loss; 0 at positions that the loss skips (see `COVERED_ONLY_LOSSES`)."""
    acceptance: Float[Array, "*P A"]
    """Acceptance probability at this depth, given that the depths before were accepted."""
    agreement: Float[Array, "*P A"]
    """1 where draft and target have the same most likely token."""

    def acceptance_metrics(
        self, label_counts: Num[Array, " A"], is_present: Bool[Array, ""]
    ) -> dict[str, Mean]:
        """Returns the mean acceptance by depth. The fields must be sums.

        A depth without labels has no mean, as in texts that are too short for it.
        """
        means = self.acceptance / jnp.maximum(label_counts, 1)
        return {
            f"draft/expected_acceptance_{depth}": Mean.from_value(mean, is_present & (count > 0))
            for depth, (mean, count) in enumerate(zip(means, label_counts, strict=True), start=1)
        }


class DraftObjective(NamedTuple):
    """Training objective of a draft.

    It is static in a compiled program. The policy's network, states and logits come detached, since
    the draft's loss must not change the policy.
    """

    loss: DraftLossFunction
    steps: int
    """Depths of training. Depth i reads the draft's own output of depth i-1 and the true token."""
    decay: float
    """Weight of depth i is decay**i, normalized."""
    # Bans, top-k and top-p are left out, since verification applies them. At temperature 0 the
    # target would be a single token, which carries too little to learn from.
    temperature: float
    """Rollout temperature, applied to both distributions. 0 counts as 1."""
    unroll: Unroll
    """Functions that run this kind of draft over texts."""
    is_trained = True

    @property
    def depth_count(self) -> int:
        """Number of depths that are trained."""
        return self.unroll.depth_count(self.steps)

    @property
    def depth_weights(self) -> list[float]:
        """Weight of each depth's mean.

        They sum to 1.
        """
        weights = [self.decay**depth for depth in range(self.depth_count)]
        return [weight / sum(weights) for weight in weights]

    def label_mask(
        self, loss_mask: Bool[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Bool[Array, "B T A"]:
        """Masks the labels that each depth predicts.

        They are those in the loss mask with enough context before them.
        """
        min_context = self.unroll.min_context(self.depth_count)
        return loss_mask[:, :, None] & (positions[:, :, None] >= min_context)

    def unroll_depths(
        self, network: PyTree, target: Decoder, forward: DecoderOutput, pack: Pack
    ) -> Float[Array, "B T A D"]:
        """Returns the inputs of the draft's head, by depth.

        Each is at the position of the label that it predicts. They are zero where the context is
        too short, and may be zero outside the loss mask. `forward` is the policy's pass.

        Source: EAGLE-3, arXiv 2503.01840 (training-time test).
        """
        return self.unroll.hidden_states(network, target, forward, pack, self.depth_count)

    def compare_depths(
        self,
        network: PyTree,
        target: Decoder,
        logits: Float[Array, "B T V"],
        hidden: Float[Array, "B T A D"],
    ) -> DraftComparison:
        """Compares a draft with its target, by depth.

        `logits` are the target's at each label, computed once for all depths.
        """
        temperature = self.temperature or 1.0
        vocab_ids = self.unroll.vocabulary(network)
        full_logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
        if vocab_ids is None:
            target_logprobs, skips_uncovered = full_logprobs, False
        else:
            target_logprobs = jnp.take(full_logprobs, vocab_ids, axis=-1)
            skips_uncovered = self.loss in COVERED_ONLY_LOSSES
        # The target's most likely token is covered if it keeps the maximum in the draft's
        # vocabulary.
        is_covered = jnp.max(target_logprobs, axis=-1) == jnp.max(full_logprobs, axis=-1)
        comparisons = []
        for depth in range(hidden.shape[2]):
            draft_logits = self.unroll.logits(network, target, hidden[:, :, depth])
            draft_logprobs = jax.nn.log_softmax(draft_logits / temperature, axis=-1)
            loss = self.loss(target_logprobs, draft_logprobs)
            if skips_uncovered:
                loss = jnp.where(is_covered, loss, 0)
            # Acceptance is a metric here, and must not hold memory for a backward pass.
            overlap = jax.lax.stop_gradient(expected_acceptance(target_logprobs, draft_logprobs))
            agreement = is_covered & (
                jnp.argmax(target_logprobs, axis=-1) == jnp.argmax(draft_logprobs, axis=-1)
            )
            comparisons.append(DraftComparison(loss, overlap, agreement.astype(overlap.dtype)))
        return DraftComparison(
            *(jnp.stack(values, axis=2) for values in zip(*comparisons, strict=True))
        )

    def weigh_depths(
        self, loss_sums: Float[Array, " A"], label_counts: Float[Array, " A"]
    ) -> Float[Array, ""]:
        """Computes the loss: the weighted sum of the depths' means."""
        weights = jnp.asarray(self.depth_weights, loss_sums.dtype)
        return jnp.sum(weights * loss_sums / jnp.maximum(label_counts, 1))


@dataclass(frozen=True)
class UntrainedDraft:
    """Objective without a draft to train: no depths."""

    is_trained: ClassVar[bool] = False
    depth_count: ClassVar[int] = 0

    def label_mask(
        self, loss_mask: Bool[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Bool[Array, "B T 0"]:
        """Masks the labels of no depth."""
        del positions
        return jnp.zeros((*loss_mask.shape, 0), bool)


class DraftLoss(NamedTuple):
    """Means over the predicted positions: the loss, and acceptance and agreement by depth."""

    loss: Float[Array, ""]
    acceptance: Float[Array, " A"]
    agreement: Float[Array, " A"]


def compute_draft_loss(
    network: PyTree, target: Decoder, forward: DecoderOutput, pack: Pack, objective: DraftObjective
) -> DraftLoss:
    """Computes the draft's loss on a single pack.

    The learner has many packs, and sums the results of `DraftObjective.compare_depths` instead.
    """
    target, forward = detach_policy(target, forward)
    depth_count = objective.depth_count
    hidden = objective.unroll_depths(network, target, forward, pack)

    def compare_chunk(
        networks: PyTree, hidden_target: Float[Array, "B C E"], hidden: Float[Array, "B C A D"]
    ) -> DraftComparison:
        network, target = networks
        return objective.compare_depths(network, target, target.logits(hidden_target), hidden)

    elements = len(pack.tokens) * target.config.vocab * (1 + depth_count)
    comparison = map_in_chunks(compare_chunk, (network, target), elements, forward.hidden, hidden)
    label_mask = objective.label_mask(pack.loss_mask, pack.positions)
    counts = jnp.sum(label_mask, axis=(0, 1), dtype=comparison.loss.dtype)
    sums = DraftComparison(
        *(jnp.sum(jnp.where(label_mask, values, 0), axis=(0, 1)) for values in comparison)
    )
    divisors = jnp.maximum(counts, 1)
    return DraftLoss(
        objective.weigh_depths(sums.loss, counts),
        sums.acceptance / divisors,
        sums.agreement / divisors,
    )
