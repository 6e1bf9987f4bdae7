"""What one micro-batch adds to a batch: one forward pass of the policy, and from the same logits
its own loss and the draft's."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.inputs.spec import ModelSpec
from jaxspec.kernels.chunks import map_in_chunks
from jaxspec.kernels.order import enforce_order, order_after, signal_ready
from jaxspec.mesh import ROWS
from jaxspec.models.decoder import Decoder, DecoderOutput, cast_head, extract_head
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.models.moe import Traffic
from jaxspec.rl.draft_objective import (
    DraftComparison,
    DraftObjective,
    compare_draft,
    depth_loss_mask,
    unroll_draft,
)
from jaxspec.rl.fsdp import WeightShards
from jaxspec.rl.logprobs import label_logprobs
from jaxspec.rl.loss_terms import LogprobGap, LossInputs, clamp_log_ratio, k3, mask_labels, zero_gap
from jaxspec.rl.losses import Aggregation, PolicyLoss
from jaxspec.rl.train_batch import Pack, TrainBatch, count_response_tokens, read_lengths
from jaxspec.sampling import Processing
from jaxspec.state import PyTree


class BatchSums(NamedTuple):
    """What a pass adds up over the labels to learn, on all shards; A depths of the draft (none
    without one)."""

    policy_loss: Float[Array, ""]
    """Each label with its weight: the loss of the batch."""
    entropy: Float[Array, ""]
    gap: LogprobGap
    loss_metrics: dict[str, Float[Array, ""]]
    """What the policy's loss measures."""
    maxima: dict[str, Float[Array, ""]]
    """Not a sum: the largest of `NAME/max`, and of the negative of `NAME/min`."""
    traffic: Traffic | None
    """Of the policy, if it has experts and learns."""
    draft: DraftComparison

    def merge_with(self, other: "BatchSums") -> "BatchSums":
        """Both together."""
        maxima = jax.tree.map(jnp.maximum, self.maxima, other.maxima)
        sums = jax.tree.map(jnp.add, self, other)
        return sums._replace(gap=self.gap.merge_with(other.gap), maxima=maxima)

    def sum_over_shards(self) -> "BatchSums":
        """Of all data shards together, from one of them."""
        max_gap, maxima = lax.pmax((self.gap.max_absolute, self.maxima), ROWS)
        sums = lax.psum(self, ROWS)
        return sums._replace(gap=sums.gap._replace(max_absolute=max_gap), maxima=maxima)

    @property
    def extremes(self) -> dict[str, Float[Array, ""]]:
        """The largest and least values by name."""
        return {
            name: -value if name.endswith("/min") else value for name, value in self.maxima.items()
        }


class BatchCounts(NamedTuple):
    """What sums are divided by: known of the whole batch before the first micro-batch is read, so
    that means are of the batch."""

    labels: Float[Array, ""]
    """Labels to learn."""
    texts: Float[Array, ""]
    """Rows that have some."""
    labels_by_depth: Float[Array, " A"]
    """Labels that each depth of the draft predicts."""
    positions: Float[Array, ""]
    """Positions that hold a text."""


COMMON_METRICS = ("advantage/zero", "ratio/kl")
"""Measured whatever the policy's loss is."""
EXTREMES = ("advantage/max", "advantage/min", "ratio/max", "ratio/min")


def _old_log_ratio(inputs: LossInputs) -> Float[Array, "B T"]:
    """Of policy to old policy, within bounds; 0 outside the labels to learn."""
    log_ratio = mask_labels(inputs, inputs.policy_logprobs - inputs.old_logprobs)
    return lax.stop_gradient(clamp_log_ratio(log_ratio))


def _common_metrics(inputs: LossInputs) -> dict[str, Float[Array, "B T"]]:
    """Labels that teach nothing, and the divergence of the old policy from this one."""
    is_zero = (inputs.advantages == 0).astype(inputs.advantages.dtype)
    return {"advantage/zero": is_zero, "ratio/kl": k3(_old_log_ratio(inputs))}


def _label_maxima(inputs: LossInputs) -> dict[str, Float[Array, ""]]:
    """The largest of each of `EXTREMES` over the labels to learn."""
    values = {"advantage": inputs.advantages, "ratio": jnp.exp(_old_log_ratio(inputs))}

    def find_maximum(values: Float[Array, "B T"]) -> Float[Array, ""]:
        return jnp.max(jnp.where(inputs.loss_mask, values, -jnp.inf))

    return {
        f"{name}/{bound}": find_maximum(sign * value)
        for name, value in values.items()
        for bound, sign in (("max", 1), ("min", -1))
    }


def count_labels(loss_mask: Bool[Array, "B S"], dtype: np.dtype) -> Float[Array, " B"]:
    """Labels to learn from of each row. Nothing predicts a row's first token."""
    return jnp.sum(loss_mask[:, 1:], axis=1, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class MicroBatchObjective:
    """The losses of policy and draft; None for one that does not learn."""

    policy_loss: PolicyLoss | None
    aggregation: Aggregation
    draft: DraftObjective | None
    processing: Processing
    taps: tuple[int, ...]
    """Layer boundaries whose hidden states the draft reads."""
    accum_dtype: np.dtype
    """Type of losses and of what is added up."""
    needs_order: bool
    """Whether collectives need an order by data, as on several CPU devices."""

    @property
    def depth_count(self) -> int:
        """Depths of the draft that learn."""
        return 0 if self.draft is None else self.draft.depth_count

    def count_mini_batch(self, batch: TrainBatch, mini_batch: Int[Array, ""]) -> BatchCounts:
        """Counts of a mini-batch over all shards, from one of them."""
        dtype = self.accum_dtype
        is_read = batch.plan.micro_batch[mini_batch] >= 0
        labels = count_labels(batch.loss_mask, dtype)
        mask = batch.loss_mask[:, 1:] & is_read[:, None]
        labels_by_depth = jnp.zeros((0,), dtype)
        if self.draft is not None:
            positions = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape)
            depth_mask = depth_loss_mask(self.draft, mask, positions, self.depth_count)
            labels_by_depth = jnp.sum(depth_mask, axis=(0, 1), dtype=dtype)
        read_count = jnp.sum(jnp.where(is_read, read_lengths(batch.loss_mask), 0), dtype=dtype)
        label_count = jnp.sum(jnp.where(is_read, labels, 0))
        text_count = jnp.sum(is_read & (labels > 0), dtype=dtype)
        return lax.psum(BatchCounts(label_count, text_count, labels_by_depth, read_count), ROWS)

    def empty_sums(self, counts: BatchCounts, config: ModelSpec) -> BatchSums:
        """The sums before the first micro-batch; `config` is the policy's."""
        zero = jnp.zeros_like(counts.labels)
        layer_zeros, experts = jnp.zeros((config.layers,), zero.dtype), config.family.experts
        expert_zeros = jnp.zeros((config.layers, experts), zero.dtype)
        return BatchSums(
            policy_loss=zero,
            entropy=zero,
            gap=zero_gap(zero.dtype),
            loss_metrics=dict.fromkeys(self.metric_names, zero),
            maxima=dict.fromkeys(EXTREMES if self.policy_loss else (), zero - jnp.inf),
            traffic=Traffic(expert_zeros, layer_zeros) if experts and self.policy_loss else None,
            draft=DraftComparison(*[jnp.zeros_like(counts.labels_by_depth)] * 3),
        )

    @property
    def metric_names(self) -> list[str]:
        """Names of what the policy's loss measures."""
        if self.policy_loss is None:
            return []
        inputs: dict[str, Any] = dict.fromkeys(
            LossInputs._fields, np.zeros((1, 1), self.accum_dtype)
        )
        inputs |= {"loss_mask": np.zeros((1, 1), bool), "text_start": np.zeros((1, 1), np.int32)}
        return sorted(
            [*jax.eval_shape(self.policy_loss, LossInputs(**inputs)).metrics, *COMMON_METRICS]
        )

    def total_loss(self, sums: BatchSums, counts: BatchCounts) -> Float[Array, ""]:
        """The sums' part of the batch's loss, the draft's beside the policy's: neither has a
        gradient in the other's weights."""
        loss = jnp.zeros((), sums.policy_loss.dtype)
        if self.policy_loss is not None:
            loss = loss + sums.policy_loss
        if self.draft is not None:
            loss = loss + self.draft_loss(sums.draft.loss, counts)
        return loss

    def draft_loss(self, depth_sums: Float[Array, " A"], counts: BatchCounts) -> Float[Array, ""]:
        """The weighted sum of the depths' means."""
        assert self.draft is not None, "only a draft with an objective has a loss"
        weights = jnp.asarray(self.draft.depth_weights(len(depth_sums)), depth_sums.dtype)
        return jnp.sum(weights * depth_sums / jnp.maximum(counts.labels_by_depth, 1))

    def sum_micro_batch(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        shards: WeightShards,
        online: Bool[Array, ""],
        pack: Pack,
        row: Int[Array, "1 T"],
        batch: TrainBatch,
        counts: BatchCounts,
    ) -> BatchSums:
        """What one micro-batch adds to the sums; the draft is read where it is `online`.

        `row` says of which row of the batch each position of the pack is.
        """
        target, accum_dtype, depth_count = attach_lora(policy), self.accum_dtype, self.depth_count
        if batch.states is None:
            forward = target(
                pack.tokens,
                pack.positions,
                taps=self.taps,
                first=pack.text_start,
                prepare_layer=shards.gather_layer,
                traffic_mask=pack.loss_mask if self.policy_loss else None,
            )
        else:
            assert self.policy_loss is None, "layers that are not run would learn nothing"
            states = jax.tree.map(lambda row_states: row_states[row, pack.positions], batch.states)
            forward = DecoderOutput(states.hidden, states.taps, cache=None, traffic=None)
        network, hidden = draft, jnp.zeros((*pack.tokens.shape, depth_count, 0), accum_dtype)
        if self.draft is not None:
            last_hidden, network = shards.order_draft_backward(forward.hidden, draft)
            forward = forward._replace(hidden=last_hidden)
            hidden = self._unroll_draft(network, online, target, forward, pack, depth_count)
            if self.needs_order:
                (hidden,), last_hidden = enforce_order((hidden,), last_hidden)
                forward = forward._replace(hidden=last_hidden)
        # Once, not in every chunk: a chunk would cast the whole head forward and backward.
        dtype = target.config.dtype
        target, network = cast_head(target, dtype), cast_head(network, dtype)

        def score_chunk(
            networks: Any, hidden_target: Any, hidden: Any, labels: Any, positions: Any
        ) -> tuple[Any, Any, DraftComparison]:
            target, network = networks
            logits = target.logits(hidden_target)
            logprobs, entropy = self._score_labels(logits, labels, positions)
            empty = DraftComparison(*[jnp.zeros(hidden.shape[:3], accum_dtype)] * 3)
            if self.draft is None:
                return logprobs, entropy, empty
            if self.needs_order:
                (logprobs, entropy), hidden = enforce_order((logprobs, entropy), hidden)
            compare = partial(
                compare_draft, network, lax.stop_gradient(target), objective=self.draft
            )
            # The draft's loss reads the policy's logits and must have no gradient in its weights.
            logits = lax.stop_gradient(logits)
            return (logprobs, entropy, lax.cond(online, compare, lambda *_: empty, logits, hidden))

        elements = len(pack.tokens) * target.config.vocab * (1 + depth_count)
        chunk_inputs = forward.hidden, hidden, pack.labels, count_response_tokens(pack)
        heads = extract_head(target), network
        logprobs, entropy, comparison = map_in_chunks(
            score_chunk, heads, elements, *chunk_inputs, mask=pack.loss_mask
        )

        def sum_labels(values: Float[Array, "1 T"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(pack.loss_mask, values, 0))

        inputs = self._build_loss_inputs(logprobs, entropy, pack, row, batch)
        # older rows differ by what was learnt since, which is no fault of what was recorded
        is_current = (
            pack.loss_mask if batch.is_current is None else pack.loss_mask & batch.is_current[row]
        )
        loss, loss_metrics, maxima = jnp.zeros((), accum_dtype), {}, {}
        if self.policy_loss is not None:
            labels = count_labels(batch.loss_mask, accum_dtype)[row]
            divisors = jnp.maximum(counts.labels, 1), jnp.maximum(counts.texts, 1)
            label_losses, label_metrics = self.policy_loss(inputs)
            loss = sum_labels(self.aggregation(labels, *divisors) * label_losses)
            label_metrics = label_metrics | _common_metrics(inputs)
            loss_metrics = {name: sum_labels(value) for name, value in label_metrics.items()}
            maxima = _label_maxima(inputs)
        depth_mask = jnp.zeros(comparison.loss.shape, bool)
        if self.draft is not None:
            depth_mask = depth_loss_mask(self.draft, pack.loss_mask, pack.positions, depth_count)
        return BatchSums(
            policy_loss=loss,
            entropy=sum_labels(lax.stop_gradient(entropy)),
            gap=LogprobGap.from_logprobs(
                lax.stop_gradient(logprobs), inputs.sampled_logprobs, is_current
            ),
            loss_metrics=loss_metrics,
            maxima=maxima,
            traffic=forward.traffic,
            draft=DraftComparison(
                *(jnp.sum(jnp.where(depth_mask, values, 0), axis=(0, 1)) for values in comparison)
            ),
        )

    def _score_labels(self, logits: Any, labels: Any, positions: Any) -> tuple[Any, Any]:
        """Log-probabilities of labels, and the entropy of their distributions; zeros where the
        policy does not learn, and nothing looks at them."""
        if self.policy_loss is None:
            zeros = jnp.zeros(labels.shape, self.accum_dtype)
            return zeros, zeros
        return label_logprobs(logits, labels, positions, self.processing)

    def _build_loss_inputs(
        self,
        logprobs: Float[Array, "1 T"],
        entropy: Float[Array, "1 T"],
        pack: Pack,
        row: Int[Array, "1 T"],
        batch: TrainBatch,
    ) -> LossInputs:
        """What the policy's loss reads at the labels of a pack."""
        # A position predicts the next one's token, and what was recorded stands with the token.
        next_positions = jnp.minimum(pack.positions + 1, batch.tokens.shape[1] - 1)

        def take_next(by_row: Float[Array, "B S"] | None) -> Float[Array, "1 T"]:
            return (
                jnp.zeros_like(logprobs)
                if by_row is None
                else by_row[row, next_positions].astype(self.accum_dtype)
            )

        sampled, current = (take_next(batch.sampled_logprobs), lax.stop_gradient(logprobs))
        old = current if batch.old_logprobs is None else take_next(batch.old_logprobs)
        advantages = batch.advantages
        by_row = advantages.ndim == 1
        if batch.is_on_policy is not None:
            old = jnp.where(batch.is_on_policy[row], current, old)
        return LossInputs(
            policy_logprobs=logprobs,
            old_logprobs=old,
            sampled_logprobs=sampled,
            reference_logprobs=take_next(batch.reference_logprobs),
            entropy=entropy,
            advantages=advantages[row].astype(self.accum_dtype)
            if by_row
            else take_next(advantages),
            loss_mask=pack.loss_mask,
            text_start=pack.text_start,
        )

    def compute_logprobs(
        self, policy: Decoder | AdaptedDecoder, shards: WeightShards, pack: Pack
    ) -> Array:
        """Log-probabilities of a pack's labels [1 T], by a forward pass alone."""
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
        network: PyTree,
        online: Bool[Array, ""],
        target: Decoder,
        forward: DecoderOutput,
        pack: Pack,
        depth_count: int,
    ) -> Float[Array, "1 T A D"]:
        """What the draft's head reads; zeros where it does not learn."""
        detached, objective = lax.stop_gradient((target, forward)), self.draft
        assert objective is not None, "only a draft with an objective is read"
        if self.needs_order:
            pack = pack._replace(tokens=order_after(pack.tokens, [signal_ready(forward.hidden)]))

        def run_draft(network: PyTree) -> Float[Array, "1 T A D"]:
            return unroll_draft(network, *detached, pack, depth_count, objective)

        shape = jax.eval_shape(run_draft, network)
        return lax.cond(online, run_draft, lambda _: jnp.zeros(shape.shape, shape.dtype), network)
