"""Losses of policy and draft on one micro-batch.

Both use the same forward pass and logits.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.inputs.spec import ModelSpec
from jaxspec.kernels.chunks import map_in_chunks
from jaxspec.kernels.order import CollectiveOrder
from jaxspec.mesh import ROWS
from jaxspec.models.decoder import Decoder, DecoderOutput, cast_head, extract_head
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.models.moe import NoTraffic, Traffic
from jaxspec.rl.batch_sums import BatchCounts, BatchSums
from jaxspec.rl.draft_objective import (
    DraftComparison,
    DraftObjective,
    UntrainedDraft,
    detach_policy,
)
from jaxspec.rl.fsdp import WeightShards
from jaxspec.rl.loss_terms import (
    LogprobGap,
    LossInputs,
    clamp_log_ratio,
    k3,
    label_logprobs,
    mask_labels,
    zero_gap,
)
from jaxspec.rl.losses import Aggregation, PolicyLoss, token_mean
from jaxspec.rl.train_batch import (
    NoStates,
    PlacedBatch,
    PolicyStates,
    TrainBatch,
    count_response_tokens,
    count_tokens_to_read,
)
from jaxspec.sampling import Processing
from jaxspec.state import Pack, PyTree

COMMON_METRICS = ("advantage/zero", "ratio/kl")
"""Metrics of every policy loss."""
EXTREMES = ("advantage/max", "advantage/min", "ratio/max", "ratio/min")
"""Names of the extreme values measured for every policy loss."""


def _old_log_ratio(inputs: LossInputs) -> Float[Array, "B T"]:
    """Computes clamped log ratios to the old policy.

    They are 0 outside the loss mask.
    """
    log_ratio = mask_labels(inputs, inputs.policy_logprobs - inputs.old_logprobs)
    return lax.stop_gradient(clamp_log_ratio(log_ratio))


def _common_metrics(inputs: LossInputs) -> dict[str, Float[Array, "B T"]]:
    """Computes `COMMON_METRICS` per label."""
    is_zero = (inputs.advantages == 0).astype(inputs.advantages.dtype)
    return {"advantage/zero": is_zero, "ratio/kl": k3(_old_log_ratio(inputs))}


def _label_maxima(inputs: LossInputs) -> dict[str, Float[Array, ""]]:
    """Computes each of `EXTREMES` over the loss mask, minima as maxima of negatives."""
    values = {"advantage": inputs.advantages, "ratio": jnp.exp(_old_log_ratio(inputs))}

    def find_maximum(values: Float[Array, "B T"]) -> Float[Array, ""]:
        return jnp.max(jnp.where(inputs.loss_mask, values, -jnp.inf))

    return {
        f"{name}/{bound}": find_maximum(sign * value)
        for name, value in values.items()
        for bound, sign in (("max", 1), ("min", -1))
    }


def count_labels(loss_mask: Bool[Array, "B S"], dtype: np.dtype) -> Float[Array, " B"]:
    """Counts each row's labels to learn from."""
    # Nothing predicts a row's first token.
    return jnp.sum(loss_mask[:, 1:], axis=1, dtype=dtype)


class LossSums(NamedTuple):
    """Sums of a policy's loss and metrics, and maxima."""

    loss: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]
    maxima: dict[str, Float[Array, ""]]


class PolicyObjective(NamedTuple):
    """Training objective of a policy.

    It is static in a compiled program.
    """

    loss: PolicyLoss
    aggregation: Aggregation = token_mean
    """Weight of each label in the loss."""
    is_trained = True

    def score_labels(
        self, logits: Any, labels: Any, positions: Any, processing: Processing
    ) -> tuple[Any, Any]:
        """Computes logprobs and entropies at labels."""
        return label_logprobs(logits, labels, positions, processing)

    def sum_losses(
        self, inputs: LossInputs, label_counts: Float[Array, "1 T"], counts: BatchCounts
    ) -> LossSums:
        """Sums the loss and its metrics over labels.

        `label_counts` has the number of labels of each label's row.
        """

        def sum_labels(values: Float[Array, "1 T"]) -> Float[Array, ""]:
            return jnp.sum(mask_labels(inputs, values))

        divisors = jnp.maximum(counts.labels, 1), jnp.maximum(counts.texts, 1)
        label_losses, label_metrics = self.loss(inputs)
        label_metrics = label_metrics | _common_metrics(inputs)
        return LossSums(
            sum_labels(self.aggregation(label_counts, *divisors) * label_losses),
            {name: sum_labels(values) for name, values in label_metrics.items()},
            _label_maxima(inputs),
        )

    def empty_sums(self, zero: Float[Array, ""]) -> LossSums:
        """Returns the sums over no labels."""
        # A loss may be user code, so its metrics are found by tracing it.
        inputs: dict[str, Any] = dict.fromkeys(LossInputs._fields, np.zeros((1, 1), zero.dtype))
        inputs |= {"loss_mask": np.zeros((1, 1), bool), "text_start": np.zeros((1, 1), np.int32)}
        traced_metrics = jax.eval_shape(self.loss, LossInputs(**inputs)).metrics
        names = sorted([*traced_metrics, *COMMON_METRICS])
        return LossSums(zero, dict.fromkeys(names, zero), dict.fromkeys(EXTREMES, zero - jnp.inf))


@dataclasses.dataclass(frozen=True)
class FrozenPolicy:
    """Objective of a policy that is only read."""

    is_trained: ClassVar[bool] = False

    def score_labels(
        self, logits: Any, labels: Any, positions: Any, processing: Processing
    ) -> tuple[Any, Any]:
        """Returns zeros, since no loss reads logprobs or entropies."""
        del positions, processing
        zeros = jnp.zeros(labels.shape, np.promote_types(logits.dtype, np.float32))
        return zeros, zeros

    def sum_losses(
        self, inputs: LossInputs, label_counts: Float[Array, "1 T"], counts: BatchCounts
    ) -> LossSums:
        """Returns the sums over no labels."""
        del label_counts, counts
        return self.empty_sums(jnp.zeros((), inputs.policy_logprobs.dtype))

    def empty_sums(self, zero: Float[Array, ""]) -> LossSums:
        """Returns the sums over no labels."""
        return LossSums(zero, {}, {})


@dataclasses.dataclass(frozen=True)
class MicroBatchObjective:
    """Losses of policy and draft on a micro-batch."""

    policy: PolicyObjective | FrozenPolicy
    draft: DraftObjective | UntrainedDraft
    processing: Processing
    taps: tuple[int, ...]
    """Layer boundaries whose hidden states the draft reads."""
    accum_dtype: np.dtype
    """Data type of losses and sums."""
    order: CollectiveOrder
    """Order of the collectives that losses and drafts add, on CPUs."""

    def compute_counts(self, batch: TrainBatch, mini_batch: Int[Array, ""]) -> BatchCounts:
        """Computes the counts of a mini-batch over all shards. Runs on each of them."""
        dtype = self.accum_dtype
        is_read = batch.plan.micro_batch[mini_batch] >= 0
        labels = count_labels(batch.loss_mask, dtype)
        mask = batch.loss_mask[:, 1:] & is_read[:, None]
        positions = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape)
        depth_mask = self.draft.label_mask(mask, positions)
        labels_by_depth = jnp.sum(depth_mask, axis=(0, 1), dtype=dtype)
        read_count = jnp.sum(
            jnp.where(is_read, count_tokens_to_read(batch.loss_mask), 0), dtype=dtype
        )
        label_count = jnp.sum(jnp.where(is_read, labels, 0))
        text_count = jnp.sum(is_read & (labels > 0), dtype=dtype)
        return lax.psum(BatchCounts(label_count, text_count, labels_by_depth, read_count), ROWS)

    def empty_sums(self, counts: BatchCounts, config: ModelSpec) -> BatchSums:
        """Returns zero sums for the policy's `config`."""
        zero = jnp.zeros_like(counts.labels)
        layer_zeros, experts = jnp.zeros((config.layers,), zero.dtype), config.family.experts
        expert_zeros = jnp.zeros((config.layers, experts), zero.dtype)
        has_traffic = bool(experts) and self.policy.is_trained
        loss_sums = self.policy.empty_sums(zero)
        return BatchSums(
            policy_loss=loss_sums.loss,
            entropy=zero,
            gap=zero_gap(zero.dtype),
            loss_metrics=loss_sums.metrics,
            maxima=loss_sums.maxima,
            traffic=Traffic(expert_zeros, layer_zeros) if has_traffic else NoTraffic(),
            draft=DraftComparison(*[jnp.zeros_like(counts.labels_by_depth)] * 3),
        )

    def total_loss(self, sums: BatchSums, counts: BatchCounts) -> Float[Array, ""]:
        """Adds the policy's and the draft's loss. Each has a gradient in its own weights only."""
        loss = jnp.zeros((), sums.policy_loss.dtype)
        if self.policy.is_trained:
            loss = loss + sums.policy_loss
        if isinstance(self.draft, DraftObjective):
            loss = loss + self.draft.weigh_depths(sums.draft.loss, counts.labels_by_depth)
        return loss

    def sum_micro_batch(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        shards: WeightShards,
        online: Bool[Array, ""],
        pack: Pack,
        row: Int[Array, "1 T"],
        batch: PlacedBatch,
        counts: BatchCounts,
    ) -> BatchSums:
        """Computes the sums of one micro-batch. The draft runs only if it is `online`.

        `row[0, i]` is the batch row that position i of the pack came from.
        """
        target, accum_dtype = attach_lora(policy), self.accum_dtype
        depth_count = self.draft.depth_count
        forward = self._compute_outputs(target, shards, pack, row, batch.states)
        network, hidden = draft, jnp.zeros((*pack.tokens.shape, depth_count, 0), accum_dtype)
        if isinstance(self.draft, DraftObjective):
            # The draft's backward pass comes first, which frees its memory for the policy's.
            last_hidden, network = shards.order_draft_backward(forward.hidden, draft)
            forward = forward._replace(hidden=last_hidden)
            hidden = self._unroll_draft(self.draft, network, online, target, forward, pack)
            # Both passes have collectives, which CPU devices could start in different order.
            hidden, last_hidden = self.order.put_in_order(hidden, last_hidden)
            forward = forward._replace(hidden=last_hidden)
        # Cast once. Inside a chunk the full head would be cast for every chunk, forward and back.
        dtype = target.config.dtype
        target, network = cast_head(target, dtype), cast_head(network, dtype)

        def score_chunk(
            networks: Any, hidden_target: Any, hidden: Any, labels: Any, positions: Any
        ) -> tuple[Any, Any, DraftComparison]:
            target, network = networks
            logits = target.logits(hidden_target)
            logprobs, entropy = self.policy.score_labels(logits, labels, positions, self.processing)
            empty = DraftComparison(*[jnp.zeros(hidden.shape[:3], accum_dtype)] * 3)
            if not isinstance(self.draft, DraftObjective):
                return logprobs, entropy, empty
            # The draft's collectives are in a `cond` and must follow the policy's.
            (logprobs, entropy), hidden = self.order.put_in_order((logprobs, entropy), hidden)
            target, logits = detach_policy(target, logits)
            compare = partial(self.draft.compare_depths, network, target)
            return (logprobs, entropy, lax.cond(online, compare, lambda *_: empty, logits, hidden))

        elements = len(pack.tokens) * target.config.vocab * (1 + depth_count)
        chunk_inputs = forward.hidden, hidden, pack.labels, count_response_tokens(pack)
        heads = extract_head(target), network
        logprobs, entropy, comparison = map_in_chunks(
            score_chunk, heads, elements, *chunk_inputs, mask=pack.loss_mask
        )

        inputs = self._build_loss_inputs(logprobs, entropy, pack, row, batch)
        # Older rows differ by updates since they were sampled, which is no fault of the recording.
        is_current = pack.loss_mask & batch.is_current[row]
        label_counts = count_labels(batch.loss_mask, accum_dtype)[row]
        loss_sums = self.policy.sum_losses(inputs, label_counts, counts)
        depth_mask = self.draft.label_mask(pack.loss_mask, pack.positions)
        return BatchSums(
            policy_loss=loss_sums.loss,
            entropy=jnp.sum(jnp.where(pack.loss_mask, lax.stop_gradient(entropy), 0)),
            gap=LogprobGap.from_logprobs(
                lax.stop_gradient(logprobs), inputs.sampled_logprobs, is_current
            ),
            loss_metrics=loss_sums.metrics,
            maxima=loss_sums.maxima,
            traffic=forward.traffic,
            draft=DraftComparison(
                *(jnp.sum(jnp.where(depth_mask, values, 0), axis=(0, 1)) for values in comparison)
            ),
        )

    def _compute_outputs(
        self,
        target: Decoder,
        shards: WeightShards,
        pack: Pack,
        row: Int[Array, "1 T"],
        states: PolicyStates | NoStates,
    ) -> DecoderOutput:
        """Computes the policy's outputs at a pack, or reads stored ones."""
        # Stored states have no gradient, so a policy that is trained always runs.
        if isinstance(states, PolicyStates) and not self.policy.is_trained:
            pack_states = jax.tree.map(lambda row_states: row_states[row, pack.positions], states)
            return DecoderOutput(pack_states.hidden, pack_states.taps, None, NoTraffic())
        return target(
            pack.tokens,
            pack.positions,
            taps=self.taps,
            first=pack.text_start,
            prepare_layer=shards.gather_layer,
            traffic_mask=pack.loss_mask if self.policy.is_trained else None,
        )

    def _build_loss_inputs(
        self,
        logprobs: Float[Array, "1 T"],
        entropy: Float[Array, "1 T"],
        pack: Pack,
        row: Int[Array, "1 T"],
        batch: PlacedBatch,
    ) -> LossInputs:
        """Builds the policy loss's inputs for a pack."""
        # A position predicts the next token, and recorded values are stored at that token.
        next_positions = jnp.minimum(pack.positions + 1, batch.tokens.shape[1] - 1)

        def take_next(by_row: Float[Array, "B S"]) -> Float[Array, "1 T"]:
            return by_row[row, next_positions].astype(self.accum_dtype)

        current, advantages = lax.stop_gradient(logprobs), batch.advantages
        is_by_row = advantages.ndim == 1
        return LossInputs(
            policy_logprobs=logprobs,
            old_logprobs=jnp.where(
                batch.uses_current_pass[row], current, take_next(batch.old_logprobs)
            ),
            sampled_logprobs=take_next(batch.sampled_logprobs),
            reference_logprobs=take_next(batch.reference_logprobs),
            entropy=entropy,
            advantages=advantages[row].astype(self.accum_dtype)
            if is_by_row
            else take_next(advantages),
            loss_mask=pack.loss_mask,
            text_start=pack.text_start,
        )

    def compute_logprobs(
        self, policy: Decoder | AdaptedDecoder, shards: WeightShards, pack: Pack
    ) -> Array:
        """Computes logprobs of a pack's labels [1 T]."""
        target = attach_lora(policy)
        forward = target(
            pack.tokens, pack.positions, first=pack.text_start, prepare_layer=shards.gather_layer
        )
        target = cast_head(target, target.config.dtype)

        def score_chunk(
            target: Any, hidden: Any, labels: Any, positions: Any
        ) -> Float[Array, "B T"]:
            return label_logprobs(target.logits(hidden), labels, positions, self.processing)[0]

        elements = len(pack.tokens) * target.config.vocab
        chunk_inputs = forward.hidden, pack.labels, count_response_tokens(pack)
        return map_in_chunks(
            score_chunk, extract_head(target), elements, *chunk_inputs, mask=pack.loss_mask
        )

    def _unroll_draft(
        self,
        objective: DraftObjective,
        network: PyTree,
        online: Bool[Array, ""],
        target: Decoder,
        forward: DecoderOutput,
        pack: Pack,
    ) -> Float[Array, "1 T A D"]:
        """Computes the draft head's inputs, zeros if not `online`."""
        target, forward = detach_policy(target, forward)
        pack = pack._replace(tokens=self.order.run_after(pack.tokens, forward.hidden))

        def run_draft(network: PyTree) -> Float[Array, "1 T A D"]:
            return objective.unroll_depths(network, target, forward, pack)

        shape = jax.eval_shape(run_draft, network)
        return lax.cond(online, run_draft, lambda _: jnp.zeros(shape.shape, shape.dtype), network)
