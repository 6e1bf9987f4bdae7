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
from jaxtyping import Array, Bool, Float, Int

from jaxspec import mesh as meshes
from jaxspec.kernels.order import CollectiveOrder
from jaxspec.mesh import row_shard_count
from jaxspec.metrics.mean import Mean, Metrics, as_means
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import cast_floats
from jaxspec.models.lora import AdaptedDecoder
from jaxspec.rl import optimizers
from jaxspec.rl.accumulate import Passes
from jaxspec.rl.batch_sums import BatchCounts, BatchSums
from jaxspec.rl.draft_objective import DraftComparison, DraftObjective, UntrainedDraft
from jaxspec.rl.loss_terms import KlPenalty, LogprobGap, zero_gap
from jaxspec.rl.objective import FrozenPolicy, MicroBatchObjective, PolicyObjective
from jaxspec.rl.train_batch import PlacedBatch, TrainBatch, count_tokens_to_read
from jaxspec.sampling import Processing
from jaxspec.state import AbsentNetwork, ExportedWeights, LearnerState, NetworkState, PyTree
from jaxspec.transfer import export_weights


class UpdateState(NamedTuple):
    """State after some of the updates on a batch."""

    policy: NetworkState
    draft: NetworkState | AbsentNetwork
    gap: LogprobGap
    """Gap before the first update, of the mini-batches compared so far."""
    # Collectives that depend on the counter run after the previous update.
    updates: Int[Array, ""]
    """Update counter that depends on every output of the previous update."""


@dataclasses.dataclass(frozen=True)
class Learner:
    """Updates weights with batches, on its own mesh."""

    mesh: Mesh
    shard_above: int
    dtype: str
    """Data type of matrix products."""
    micro_tokens: int
    """Tokens of a micro-batch on each data shard."""
    processing: Processing
    policy_objective: PolicyObjective | FrozenPolicy
    draft_objective: DraftObjective | UntrainedDraft
    taps: tuple[int, ...]
    policy_optimizer: optax.GradientTransformation
    draft_optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    """Learning rate of the policy by its update count."""
    epochs: int = 1
    """Number of passes over a batch, with one update per mini-batch."""
    keeps_reference: bool = False
    """Whether the initial policy is kept, as a copy or as the base without adapters."""
    reads_reference: bool = False
    """Whether the policy's loss uses reference logprobs."""
    recompute: bool = False
    """Whether old logprobs are recomputed from the start."""
    max_probability_factor: float = math.inf
    """Mean factor between recorded and own probabilities above which logprobs are recomputed."""
    seed: int = 0
    """Seed of the run. Exported weights are rounded by it."""

    @property
    def accum_dtype(self) -> np.dtype:
        """Data type of losses and sums."""
        return np.promote_types(self.dtype, np.float32)

    @property
    def order(self) -> CollectiveOrder:
        """Order of collectives on this mesh."""
        return CollectiveOrder(self.mesh)

    @property
    def objective(self) -> MicroBatchObjective:
        """Losses of a micro-batch."""
        return MicroBatchObjective(
            policy=self.policy_objective,
            draft=self.draft_objective,
            processing=self.processing,
            taps=self.taps,
            accum_dtype=self.accum_dtype,
            order=self.order,
        )

    def for_supervised_texts(
        self, policy_objective: PolicyObjective | FrozenPolicy, **changes: Any
    ) -> "Learner":
        """Returns a learner for supervised texts, with one update per batch."""
        defaults = {
            "epochs": 1,
            "keeps_reference": False,
            "reads_reference": False,
            "recompute": True,
        }
        return dataclasses.replace(self, policy_objective=policy_objective, **(defaults | changes))

    @property
    def passes(self) -> Passes:
        """Passes over batches of this learner."""
        return Passes(self.mesh, self.dtype, self.micro_tokens, self.objective, self.train_layout)

    def train_layout(self, tree: PyTree) -> PyTree:
        """Returns shardings of networks and optimizer states.

        Weights are split over all mesh axes (ZeRO-3), small ones not over `data`.
        """
        return meshes.assign_shardings(self.mesh, tree, meshes.TRAIN_RULES, self.shard_above)

    def init_state(
        self, policy: Decoder | AdaptedDecoder, draft: PyTree, online: bool
    ) -> LearnerState:
        """Returns the initial state. `online` trains the draft."""
        copies = self.keeps_reference and not isinstance(policy, AdaptedDecoder)
        has_draft = draft is not None
        return LearnerState(
            policy=optimizers.init_state(policy, self.policy_optimizer),
            draft=(
                optimizers.init_state(draft, self.draft_optimizer) if has_draft else AbsentNetwork()
            ),
            online=jnp.asarray(online and has_draft),
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
        labels. A mini-batch without labels is skipped silently. If not `enabled`, nothing changes
        and no metric has a value. Metrics are means over the updates, but for counts. Those of the
        logprob gap cover the full batch before its first update.
        """
        # Disabled by reading no micro-batch: a `cond` would hold the state twice.
        enabled = jnp.asarray(enabled)
        placed_batch, gap = self._place_rows(batch, enabled), zero_gap(self.accum_dtype)
        if self.policy_objective.is_trained:
            placed_batch, gap = self._add_logprobs(state, placed_batch)
        mini_batches = len(placed_batch.plan.micro_batch_count)
        update_count = mini_batches * self.epochs

        @partial(jax.jit, inline=True)  # traced once, for both `eval_shape` and the loop
        def update(
            index: Int[Array, ""], progress: UpdateState
        ) -> tuple[UpdateState, dict[str, Mean]]:
            batch = placed_batch.read_after(progress.updates, self.order)
            return self._update(progress, state.online, batch, index % mini_batches, enabled)

        def accumulate_update(
            index: Int[Array, ""] | int, carry: tuple[UpdateState, dict[str, Mean]]
        ) -> tuple[UpdateState, dict[str, Mean]]:
            progress, metrics = update(jnp.asarray(index, jnp.int32), carry[0])
            return progress, {
                name: mean.merge_with(metrics[name]) for name, mean in carry[1].items()
            }

        progress = UpdateState(state.policy, state.draft, gap, jnp.int32(0))
        _, shapes = jax.eval_shape(update, jnp.int32(0), progress)
        means = jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), shapes)
        # XLA cannot offload the optimizer state inside a loop.
        if update_count == 1 or isinstance(self.policy_optimizer, optimizers.OffloadedOptimizer):
            for index in range(update_count):
                progress, means = accumulate_update(index, (progress, means))
        else:
            progress, means = lax.fori_loop(0, update_count, accumulate_update, (progress, means))
        if self.policy_objective.is_trained:
            means |= progress.gap.metrics | self._rate_metrics(state)
        means |= self._collect_counts(state, placed_batch, progress)
        means = {name: mean.keep_if(enabled) for name, mean in means.items()}
        # Work that uses the new version must run after all sums in these metrics.
        version = self.order.run_after(state.version + enabled.astype(jnp.int32), means)
        recompute = state.recompute
        if self.policy_objective.is_trained:
            factor = means["rollout/probability_factor"].value
            recompute |= factor > self.max_probability_factor
        return state.replace(
            policy=progress.policy, draft=progress.draft, version=version, recompute=recompute
        ), dict(means)

    @jax.named_scope("export")
    def export(self, state: LearnerState) -> ExportedWeights:
        """Returns policy and draft as the generator loads them."""
        # Weights that no update changes must also move between devices after the update.
        policy = self._pin_layout(self.order.run_after(state.policy.network, state.version))
        return export_weights(policy, state.draft.network, self.dtype, state.version, self.seed)

    def evaluate_policy(self, policy: Decoder | AdaptedDecoder, batch: TrainBatch) -> BatchSums:
        """Evaluates the policy's loss and gap on a batch."""
        policy_learner = dataclasses.replace(self, draft_objective=UntrainedDraft(), taps=())
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

    def sum_reference_kl(
        self, state: LearnerState, batch: TrainBatch, penalty: KlPenalty, enabled: Bool[Array, ""]
    ) -> Float[Array, "B A"]:
        """Sums KL(sampler, reference) over each response.

        With `penalty.reward_to_go`, each token has the sum from that token on. The first of these
        is the sum over the whole response.
        """
        placed_batch = self._place_rows(batch, enabled)
        reference_logprobs, _ = self.passes.compute_logprobs(
            _reference_policy(state), 0, placed_batch
        )
        # Only rows in the plan were read. All others have no logprobs to compare.
        is_read = jnp.any(placed_batch.plan.micro_batch >= 0, axis=0)
        loss_mask = placed_batch.loss_mask & is_read[:, None]
        sampled_logprobs = placed_batch.sampled_logprobs.astype(reference_logprobs.dtype)
        token_kl = penalty.estimate_kl(sampled_logprobs, reference_logprobs, loss_mask)
        kl_sums = (
            lax.cumsum(token_kl, axis=1, reverse=True)
            if penalty.reward_to_go
            else jnp.sum(token_kl, axis=1, keepdims=True)
        )
        return self.passes.restore_row_order(kl_sums, placed_batch)

    def _place_rows(self, batch: TrainBatch, enabled: Bool[Array, ""]) -> PlacedBatch:
        """Moves rows to their places. If not `enabled`, leaves no micro-batch to read."""
        micro_batch_count = jnp.where(enabled, batch.plan.micro_batch_count, 0)
        return self.passes.place_rows(
            batch.replace(plan=batch.plan.replace(micro_batch_count=micro_batch_count))
        )

    def _add_logprobs(
        self, state: LearnerState, batch: PlacedBatch
    ) -> tuple[PlacedBatch, LogprobGap]:
        """Adds old and reference logprobs to the batch.

        Also returns the gap of all mini-batches but the first.
        """
        # The first mini-batch is compared during its own update, before anything changes.
        passes = self.passes
        if self.reads_reference:
            reference_logprobs, batch = passes.compute_logprobs(_reference_policy(state), 0, batch)
            batch = batch.replace(reference_logprobs=reference_logprobs)
        recorded, recompute = batch.sampled_logprobs, state.recompute
        batch = batch.replace(is_current=batch.version == state.version)
        # With a single update, the learning pass itself computes the old logprobs of rows sampled
        # by the current weights, so no extra pass is needed.
        if len(batch.plan.micro_batch_count) * self.epochs == 1:
            uses_current_pass = recompute | batch.is_current
            batch = batch.replace(old_logprobs=recorded, uses_current_pass=uses_current_pass)
            return batch, zero_gap(self.accum_dtype)
        logprobs, batch = passes.compute_logprobs(
            state.policy.network, jnp.where(recompute, 0, 1), batch
        )
        gap, batch = passes.compare_logprobs(logprobs, 1, batch)
        old = jnp.where(recompute, logprobs, recorded.astype(logprobs.dtype))
        uses_current_pass = jnp.zeros_like(batch.uses_current_pass)
        return batch.replace(old_logprobs=old, uses_current_pass=uses_current_pass), gap

    def _update(
        self,
        progress: UpdateState,
        online: Bool[Array, ""],
        batch: PlacedBatch,
        mini_batch: Int[Array, ""],
        enabled: Bool[Array, ""],
    ) -> tuple[UpdateState, dict[str, Mean]]:
        """Makes one update on a mini-batch."""
        # A mini-batch with nothing to read changes nothing. In an empty batch it counts as skipped.
        policy, draft, gap, updates = progress
        micro_batch_count = batch.plan.micro_batch_count
        enabled &= (micro_batch_count[mini_batch] > 0) | (jnp.sum(micro_batch_count) == 0)
        gradients, sums, counts = self.passes.compute_gradients(
            policy.network, draft.network, online, batch, mini_batch
        )
        first_gap = jax.tree.map(lambda total: jnp.where(updates == 0, total, 0), sums.gap)
        gap = gap.merge_with(first_gap)
        metrics: dict[str, Mean] = {}
        if self.policy_objective.is_trained:
            # An update without labels is skipped like one whose loss is NaN.
            loss = jnp.where(counts.labels > 0, sums.policy_loss, jnp.nan)
            policy, norm = optimizers.apply_update(
                policy, gradients[0], loss, self.policy_optimizer, enabled
            )
            values = {
                "loss/policy": loss,
                "grad_norm/policy": norm,
                "learner/packing": self._packed_share(batch, mini_batch, counts),
            }
            metrics |= as_means(values | sums.to_metrics(counts), counts.labels > 0)
        if isinstance(self.draft_objective, DraftObjective) and isinstance(draft, NetworkState):
            loss = self.draft_objective.weigh_depths(sums.draft.loss, counts.labels_by_depth)
            draft, draft_metrics = self._update_draft(
                draft, gradients[1], loss, online & enabled, sums.draft, counts
            )
            metrics |= draft_metrics
        updates = self.order.run_after(updates + 1, (metrics, gap))
        policy = policy.replace(network=self._pin_layout(policy.network))
        draft = draft.replace(network=self._pin_layout(draft.network))
        return UpdateState(policy, draft, gap, updates), metrics

    def _packed_share(
        self, batch: PlacedBatch, index: Int[Array, ""], counts: BatchCounts
    ) -> Float[Array, ""]:
        """Returns the share of the micro-batches' positions that hold text."""
        size = row_shard_count(self.mesh) * self.micro_tokens * batch.plan.micro_batch_count[index]
        return counts.positions / size.astype(counts.positions.dtype)

    def _collect_counts(
        self, state: LearnerState, batch: PlacedBatch, final: UpdateState
    ) -> dict[str, Mean]:
        """Collects the metrics that are counts."""
        metrics: dict[str, Int[Array, ""]] = {}
        for name, network, objective in (
            ("policy", final.policy, self.policy_objective),
            ("draft", final.draft, self.draft_objective),
        ):
            if objective.is_trained and isinstance(network, NetworkState):
                metrics[f"skipped/{name}"] = network.skipped
                metrics[f"skipped_in_row/{name}"] = network.skipped_in_row
        if self.policy_objective.is_trained:
            batch = batch.read_after(final.updates, self.order)
            is_read = count_tokens_to_read(batch.loss_mask) > 0
            lag = jnp.where(is_read, state.version - batch.version, 0)
            metrics["learner/lag"] = jnp.max(lag)
            metrics["learner/micro_batches"] = self.epochs * jnp.sum(batch.plan.micro_batch_count)
            metrics["learner/recompute"] = state.recompute.astype(jnp.int32)
        return {name: Mean.from_value(count) for name, count in metrics.items()}

    def _rate_metrics(self, state: LearnerState) -> dict[str, Mean]:
        """Returns the learning rate of the batch's first update."""
        updates = optimizers.count_updates(state.policy.optimizer)
        rate = jnp.asarray(self.learning_rate(updates), self.accum_dtype)
        return {"optimizer/learning_rate": Mean.from_value(rate)}

    def _update_draft(
        self,
        draft: NetworkState,
        gradients: PyTree,
        loss: Float[Array, ""],
        online: Bool[Array, ""],
        sums: DraftComparison,
        counts: BatchCounts,
    ) -> tuple[NetworkState, dict[str, Mean]]:
        """Updates the draft if `online`.

        Otherwise the draft is unchanged, and its metrics have no values.
        """
        loss = jnp.where(counts.labels > 0, loss, jnp.nan)
        draft, norm = optimizers.apply_update(draft, gradients, loss, self.draft_optimizer, online)
        metrics = as_means(
            {"loss/draft": loss, "grad_norm/draft": norm}, online & (counts.labels > 0)
        )
        return draft, metrics | sums.acceptance_metrics(counts.labels_by_depth, online)

    def _pin_layout(self, network: PyTree) -> PyTree:
        """Pins weights to the train layout."""
        # With this, old and new weights are selected in place, before any transfer.
        return jax.tree.map(lax.with_sharding_constraint, network, self.train_layout(network))


def _reference_policy(state: LearnerState) -> Decoder:
    """Returns the initial policy: a copy, or the base of the adapters."""
    policy = state.policy.network
    return policy.base if isinstance(policy, AdaptedDecoder) else state.reference
