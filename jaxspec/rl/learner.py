"""The learner, which updates policy and draft.

One pass over micro-batches gives the gradients of both. Each has its own optimizer.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec import mesh as meshes
from jaxspec.kernels.order import needs_ordering, order_after, signal_ready
from jaxspec.mesh import row_shard_count
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import LOGICAL_AXES, cast_floats
from jaxspec.models.lora import ADAPTER_AXES, AdaptedDecoder
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import DraftComparison, DraftObjective
from jaxspec.rl.loss_terms import KlPenalty, LogprobGap, zero_gap
from jaxspec.rl.losses import Aggregation, PolicyLoss, token_mean
from jaxspec.rl.micro_batch import BatchCounts, BatchSums, MicroBatchObjective
from jaxspec.rl.optimizers import Metrics, MetricSums
from jaxspec.rl.passes import Passes, order_batch_after
from jaxspec.rl.train_batch import TrainBatch, read_lengths
from jaxspec.sampling import Processing
from jaxspec.state import ExportedWeights, LearnerState, NetworkState, PyTree
from jaxspec.transfer import export_weights

GAP_METRICS = tuple(f"gap/{name}" for name in LogprobGap._fields)
"""Names of the sums from which gap metrics are computed."""


class UpdateState(NamedTuple):
    """State after some of the updates on a batch."""

    policy: NetworkState
    draft: NetworkState | None
    updates: Int[Array, ""]
    """Update counter that depends on every output of the previous update."""
    # Collectives that depend on it therefore run after the previous update.


@dataclasses.dataclass(frozen=True)
class Learner:
    """Updates weights with batches, on its own mesh.

    Without `policy_loss` the policy is only read, to train the draft.
    """

    mesh: Mesh
    shard_above: int
    dtype: str
    """Data type of matrix products."""
    micro_tokens: int
    """Tokens of a micro-batch on each data shard."""
    processing: Processing
    policy_loss: PolicyLoss | None
    draft_objective: DraftObjective | None
    """Training objective of the draft. None if it is not trained."""
    taps: tuple[int, ...]
    policy_optimizer: optax.GradientTransformation
    draft_optimizer: optax.GradientTransformation
    aggregation: Aggregation = token_mean
    """Weight of each label in the policy's loss."""
    epochs: int = 1
    """Number of passes over a batch, with one update per mini-batch."""
    keeps_reference: bool = False
    """Whether the initial policy is kept, as a copy or as the base without adapters."""
    reads_reference: bool = False
    """Whether the policy's loss uses reference logprobs."""
    recompute: bool = False
    """Whether old logprobs are recomputed from the start."""
    learning_rate: optax.Schedule | None = None
    """Learning rate of the policy by its update count. None if it is not reported."""
    max_probability_factor: float = math.inf
    """Mean factor between recorded and own probabilities above which logprobs are recomputed."""
    seed: int = 0
    """Seed of the run. Exported weights are rounded by it."""

    @property
    def accum_dtype(self) -> np.dtype:
        """Data type of losses and sums."""
        return np.promote_types(self.dtype, np.float32)

    @property
    def objective(self) -> MicroBatchObjective:
        """Losses of a micro-batch."""
        needs_order = needs_ordering(self.mesh)
        return MicroBatchObjective(
            policy_loss=self.policy_loss,
            aggregation=self.aggregation,
            draft=self.draft_objective,
            processing=self.processing,
            taps=self.taps,
            accum_dtype=self.accum_dtype,
            needs_order=needs_order,
        )

    def for_supervised_texts(self, policy_loss: PolicyLoss | None, **changes: Any) -> "Learner":
        """Returns a learner for supervised texts.

        It makes one update per batch, on the mean over its labels.
        """
        defaults = {
            "aggregation": token_mean,
            "epochs": 1,
            "keeps_reference": False,
            "reads_reference": False,
            "recompute": True,
            "learning_rate": None,
        }
        return dataclasses.replace(self, policy_loss=policy_loss, **(defaults | changes))

    @property
    def passes(self) -> Passes:
        """Passes over batches of this learner."""
        return Passes(self.mesh, self.dtype, self.micro_tokens, self.objective, self.train_layout)

    def train_layout(self, tree: PyTree) -> PyTree:
        """Returns shardings of networks and optimizer states.

        Weights are split over all mesh axes (ZeRO-3), small ones over `tensor` only.
        """
        return meshes.assign_shardings(
            self.mesh, tree, LOGICAL_AXES | ADAPTER_AXES, meshes.TRAIN_RULES, self.shard_above
        )

    def init_state(
        self, policy: Decoder | AdaptedDecoder, draft: PyTree, online: bool
    ) -> LearnerState:
        """Returns the initial state. `online` trains the draft."""
        copies = self.keeps_reference and not isinstance(policy, AdaptedDecoder)
        return LearnerState(
            policy=optimizers.init_state(policy, self.policy_optimizer),
            draft=None if draft is None else optimizers.init_state(draft, self.draft_optimizer),
            online=jnp.asarray(online and draft is not None),
            version=jnp.zeros((), jnp.int32),
            recompute=jnp.asarray(self.recompute),
            # A copy, because the policy's own buffer is donated.
            reference=jax.tree.map(jnp.copy, cast_floats(policy, self.dtype)) if copies else None,
        )

    def learn(
        self, state: LearnerState, batch: TrainBatch, enabled: Bool[Array, ""] | bool = True
    ) -> tuple[LearnerState, Metrics]:
        """Updates policy and draft, once per mini-batch and epoch.

        A non-finite loss or gradient skips the update and counts it, as does a batch without
        labels. A mini-batch without labels is skipped silently. If not `enabled`, nothing changes,
        float metrics are NaN, and counts are 0. Metrics are means over the updates. Those of the
        logprob gap cover the full batch before its first update.
        """
        # Disabled by reading no micro-batch: a `cond` would hold the state twice.
        enabled = jnp.asarray(enabled)
        batch, gap = self._place_rows(batch, enabled), None
        if self.policy_loss is not None:
            batch, gap = self._add_logprobs(state, batch)
        mini_batches = len(batch.plan.micro_batch_count)
        update_count = mini_batches * self.epochs

        @partial(jax.jit, inline=True)  # traced once, for both `eval_shape` and the loop
        def update(index: Int[Array, ""], progress: UpdateState) -> tuple[UpdateState, Metrics]:
            current = state.replace(policy=progress.policy, draft=progress.draft)
            ordered = (
                order_batch_after(batch, progress.updates)
                if self.objective.needs_order and update_count > 1
                else batch
            )
            return self._update(current, ordered, index % mini_batches, enabled, progress.updates)

        def accumulate_update(
            index: Int[Array, ""] | int, carry: tuple[UpdateState, MetricSums]
        ) -> tuple[UpdateState, MetricSums]:
            progress, metrics = update(jnp.asarray(index, jnp.int32), carry[0])
            return progress, carry[1].add_update(metrics)

        progress = UpdateState(state.policy, state.draft, jnp.int32(0))
        _, metrics = jax.eval_shape(update, jnp.int32(0), progress)
        zeros = {name: jnp.zeros((), leaf.dtype) for name, leaf in metrics.items()}
        sums = MetricSums(zeros, zeros)
        # XLA cannot offload the optimizer state inside a loop.
        if update_count == 1 or isinstance(self.policy_optimizer, optimizers.OffloadedOptimizer):
            for index in range(update_count):
                progress, sums = accumulate_update(index, (progress, sums))
        else:
            progress, sums = lax.fori_loop(0, update_count, accumulate_update, (progress, sums))
        metrics = sums.to_means()
        if gap is not None:
            first_gap = LogprobGap(*(metrics.pop(name) for name in GAP_METRICS))
            metrics |= first_gap.merge_with(gap).metrics
        metrics |= self._count_metrics(state, batch, progress) | self._rate_metrics(state)
        metrics = {name: _mask_metric(enabled, value) for name, value in metrics.items()}
        version = state.version + enabled.astype(jnp.int32)
        # Work that uses the new version must run after all sums in these metrics.
        if self.objective.needs_order:
            version = order_after(version, [signal_ready(value) for value in metrics.values()])
        recompute = state.recompute
        if self.policy_loss is not None:
            recompute |= metrics["rollout/probability_factor"] > self.max_probability_factor
        return state.replace(
            policy=progress.policy, draft=progress.draft, version=version, recompute=recompute
        ), metrics

    @jax.named_scope("export")
    def export(self, state: LearnerState) -> ExportedWeights:
        """Returns policy and draft as the generator loads them."""
        policy, draft = state.policy.network, state.draft.network if state.draft else None
        # Weights that no update changes must also move between devices after the update.
        if needs_ordering(self.mesh):
            ordered_policy = jax.tree.map(
                lambda leaf: order_after(leaf, [signal_ready(state.version)]), policy
            )
            policy = jax.lax.with_sharding_constraint(ordered_policy, self.train_layout(policy))
        return export_weights(policy, draft, self.dtype, state.version, self.seed)

    def evaluate_policy(self, policy: Decoder | AdaptedDecoder, batch: TrainBatch) -> BatchSums:
        """Evaluates the policy's loss and gap on a batch."""
        policy_learner = dataclasses.replace(self, draft_objective=None, taps=())
        return policy_learner.passes.compute_sums(policy, None, self.passes.place_rows(batch))[0]

    def compare_draft(
        self, policy: Decoder, draft: PyTree, batch: TrainBatch
    ) -> tuple[DraftComparison, Float[Array, " A"]]:
        """Compares draft and policy on a batch, by depth.

        Nothing is trained. Returns sums over the labels that each depth predicts, and the counts of
        these labels.
        """
        sums, counts = self.passes.compute_sums(policy, draft, self.passes.place_rows(batch))
        return sums.draft, counts.labels_by_depth

    def reference_kl(
        self, state: LearnerState, batch: TrainBatch, penalty: KlPenalty, enabled: Bool[Array, ""]
    ) -> Float[Array, "B A"]:
        """Sums KL(sampler, reference) over each response.

        With `penalty.reward_to_go`, each token has the sum from that token on. The first of these
        is the sum over the whole response.
        """
        batch = self._place_rows(batch, enabled)
        reference_logprobs, _ = self.passes.compute_logprobs(_reference_policy(state), 0, batch)
        # Only rows in the plan were read. All others have no logprobs to compare.
        loss_mask = batch.loss_mask & jnp.any(batch.plan.micro_batch >= 0, axis=0)[:, None]
        sampled_logprobs = batch.sampled_logprobs.astype(reference_logprobs.dtype)
        token_kl = penalty.estimate_kl(sampled_logprobs, reference_logprobs, loss_mask)
        kl_sums = (
            lax.cumsum(token_kl, axis=1, reverse=True)
            if penalty.reward_to_go
            else jnp.sum(token_kl, axis=1, keepdims=True)
        )
        return self.passes.restore_row_order(kl_sums, batch)

    def _place_rows(self, batch: TrainBatch, enabled: Bool[Array, ""]) -> TrainBatch:
        """Moves rows to their places. If not `enabled`, leaves no micro-batch to read."""
        micro_batch_count = jnp.where(enabled, batch.plan.micro_batch_count, 0)
        return self.passes.place_rows(
            batch.replace(plan=batch.plan.replace(micro_batch_count=micro_batch_count))
        )

    def _add_logprobs(
        self, state: LearnerState, batch: TrainBatch
    ) -> tuple[TrainBatch, LogprobGap]:
        """Adds old and reference logprobs to the batch.

        Also returns the gap of all mini-batches but the first.
        """
        # The first mini-batch is compared during its own update, before anything changes.
        passes = self.passes
        if self.reads_reference:
            reference_logprobs, batch = passes.compute_logprobs(_reference_policy(state), 0, batch)
            batch = batch.replace(reference_logprobs=reference_logprobs)
        recorded, recompute = batch.sampled_logprobs, state.recompute
        is_current = batch.version == state.version
        batch = batch.replace(is_current=is_current)
        # With a single update, the learning pass itself computes the old logprobs of rows sampled
        # by the current weights, so no extra pass is needed.
        if len(batch.plan.micro_batch_count) * self.epochs == 1:
            batch = batch.replace(old_logprobs=recorded, is_on_policy=recompute | is_current)
            return batch, zero_gap(self.accum_dtype)
        logprobs, batch = passes.compute_logprobs(
            state.policy.network, jnp.where(recompute, 0, 1), batch
        )
        gap, batch = passes.compare_logprobs(logprobs, 1, batch)
        old = jnp.where(recompute, logprobs, recorded.astype(logprobs.dtype))
        return batch.replace(old_logprobs=old), gap

    def _update(
        self,
        state: LearnerState,
        batch: TrainBatch,
        mini_batch: Int[Array, ""],
        enabled: Bool[Array, ""],
        updates: Int[Array, ""],
    ) -> tuple[UpdateState, Metrics]:
        """Makes one update on a mini-batch. Metrics without a value are NaN."""
        # An empty mini-batch is skipped, unless the batch is empty, which counts as a skip.
        policy, draft = state.policy, state.draft
        micro_batch_count = batch.plan.micro_batch_count
        enabled &= (micro_batch_count[mini_batch] > 0) | (jnp.sum(micro_batch_count) == 0)
        draft_network = None if draft is None else draft.network
        gradients, sums, counts = self.passes.compute_gradients(
            policy.network, draft_network, state.online, batch, mini_batch
        )
        metrics: dict[str, Float[Array, ""]] = {}
        if self.policy_loss is not None:
            loss = jnp.where(counts.labels > 0, sums.policy_loss, jnp.nan)
            policy, norm = optimizers.apply_update(
                policy, gradients[0], loss, self.policy_optimizer, enabled
            )
            metrics |= {"loss/policy": loss, "grad_norm/policy": norm}
            metrics |= self._batch_metrics(batch, mini_batch, sums, counts)
            for name, value in zip(GAP_METRICS, sums.gap, strict=True):
                metrics[name] = jnp.where(updates == 0, value, jnp.nan)
        if draft is not None and self.draft_objective is not None:
            online = state.online & enabled
            draft, draft_metrics = self._update_draft(draft, gradients[1], online, sums, counts)
            metrics |= draft_metrics
        updates = updates + 1
        if self.objective.needs_order:
            updates = order_after(updates, [signal_ready(value) for value in metrics.values()])
        pinned_draft = None if draft is None else self._pin_layout(draft)
        return UpdateState(self._pin_layout(policy), pinned_draft, updates), metrics

    def _batch_metrics(
        self, batch: TrainBatch, index: Int[Array, ""], sums: BatchSums, counts: BatchCounts
    ) -> dict[str, Float[Array, ""]]:
        """Computes metrics of the mini-batch and its packing."""
        size = row_shard_count(self.mesh) * self.micro_tokens * batch.plan.micro_batch_count[index]
        means = {
            "entropy": sums.entropy / counts.labels,
            "learner/packing": counts.positions / size.astype(counts.positions.dtype),
            **{name: value / counts.labels for name, value in sums.loss_metrics.items()},
            **sums.extremes,
        }
        if sums.traffic is not None:
            means |= sums.traffic.to_metrics(counts.labels)
        return {name: jnp.where(counts.labels > 0, value, jnp.nan) for name, value in means.items()}

    def _count_metrics(self, state: LearnerState, batch: TrainBatch, final: UpdateState) -> Metrics:
        """Collects the metrics that are counts."""
        metrics: Metrics = {}
        for name, network in (("policy", final.policy), ("draft", final.draft)):
            objective = self.policy_loss if name == "policy" else self.draft_objective
            if network is not None and objective is not None:
                metrics[f"skipped/{name}"] = network.skipped
                metrics[f"skipped_in_row/{name}"] = network.skipped_in_row
        if self.policy_loss is not None:
            batch = order_batch_after(batch, final.updates) if self.objective.needs_order else batch
            is_read = read_lengths(batch.loss_mask) > 0
            lag = jnp.where(is_read, state.version - batch.version, 0)
            metrics["learner/lag"] = jnp.max(lag)
            metrics["learner/micro_batches"] = self.epochs * jnp.sum(batch.plan.micro_batch_count)
            metrics["learner/recompute"] = state.recompute.astype(jnp.int32)
        return metrics

    def _rate_metrics(self, state: LearnerState) -> Metrics:
        """Returns the learning rate of the batch's first update."""
        if self.policy_loss is None or self.learning_rate is None:
            return {}
        updates = optimizers.update_count(state.policy.optimizer)
        return {
            "optimizer/learning_rate": jnp.asarray(self.learning_rate(updates), self.accum_dtype)
        }

    def _update_draft(
        self,
        draft: NetworkState,
        gradients: PyTree,
        online: Bool[Array, ""],
        sums: BatchSums,
        counts: BatchCounts,
    ) -> tuple[NetworkState, dict[str, Float[Array, ""]]]:
        """Updates the draft if it is `online`. Else returns it unchanged, with NaN metrics."""
        loss = self.objective.draft_loss(sums.draft.loss, counts)
        loss = jnp.where(counts.labels > 0, loss, jnp.nan)
        draft, norm = optimizers.apply_update(draft, gradients, loss, self.draft_optimizer, online)
        metrics = {"loss/draft": loss, "grad_norm/draft": norm}
        acceptance = sums.draft.acceptance / jnp.maximum(counts.labels_by_depth, 1)
        for depth, value in enumerate(acceptance, start=1):
            metrics[f"draft/expected_acceptance_{depth}"] = value
        return draft, {name: jnp.where(online, value, jnp.nan) for name, value in metrics.items()}

    def _pin_layout(self, state: NetworkState) -> NetworkState:
        """Pins weights to the train layout."""
        # So that old and new weights are selected in place, before any transfer.
        layout = self.train_layout(state.network)
        return state.replace(network=lax.with_sharding_constraint(state.network, layout))


def _reference_policy(state: LearnerState) -> Decoder:
    """Returns the initial policy: a copy, or the base."""
    return state.policy.network.base if state.reference is None else state.reference


def _mask_metric(enabled: Bool[Array, ""], value: Num[Array, ""]) -> Num[Array, ""]:
    """Masks a metric of a disabled update: NaN for floats, 0 for counts."""
    empty_value = jnp.nan if jnp.issubdtype(value.dtype, jnp.floating) else 0
    return jnp.where(enabled, value, jnp.asarray(empty_value, value.dtype))
