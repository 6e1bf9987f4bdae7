"""The learner: one pass over packed micro-batches gives the gradients of policy and draft, each
with an optimizer of its own."""

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
from jaxspec.mesh import row_shards
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import LOGICAL_AXES, cast_floats
from jaxspec.models.lora import ADAPTER_AXES, AdaptedDecoder
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import Compared, Objective
from jaxspec.rl.loss_terms import Gap, KlPenalty, no_gap
from jaxspec.rl.losses import Aggregation, PolicyLoss, by_token
from jaxspec.rl.micro_batch import Counts, Losses, Sums
from jaxspec.rl.passes import Passes, tied
from jaxspec.rl.train_batch import TrainBatch, read_lengths
from jaxspec.sampling import Processing
from jaxspec.state import LearnerState, PyTree, Trained

Metrics = dict[str, Num[Array, ""]]
GAP = tuple(f"gap/{name}" for name in Gap._fields)
"""Names of the first update's sums, from which metrics are made."""


class Updated(NamedTuple):
    """Where the updates on a batch have got to."""

    policy: Trained
    draft: Trained | None
    turn: Int[Array, ""]
    """A number that is there once all of the last update is."""


class Measured(NamedTuple):
    """Metrics of the updates so far, by name."""

    sums: Metrics
    """Over the updates that had a number."""
    counts: Metrics
    """How many updates had one."""

    def plus(self, found: Metrics) -> "Measured":
        there = {name: ~jnp.isnan(value) for name, value in found.items()}
        numbers = {name: jnp.where(there[name], value, 0) for name, value in found.items()}
        return jax.tree.map(
            lambda total, one: total + one.astype(total.dtype), self, Measured(numbers, there)
        )

    def means(self) -> Metrics:
        return {
            name: jnp.where(count > 0, self.sums[name] / jnp.maximum(count, 1), jnp.nan)
            for name, count in self.counts.items()
        }


@dataclasses.dataclass(frozen=True)
class Learner:
    """How a batch changes the weights, on a mesh of its own. Without `policy_loss` the policy is
    only read, for the draft's training."""

    mesh: Mesh
    shard_above: int
    dtype: str
    """Of products."""
    tokens: int
    """Positions of a micro-batch on each data shard."""
    processing: Processing
    policy_loss: PolicyLoss | None
    objective: Objective | None
    """None: there is no draft to train."""
    taps: tuple[int, ...]
    policy_optimizer: optax.GradientTransformation
    draft_optimizer: optax.GradientTransformation
    aggregation: Aggregation = by_token
    """What a label weighs in the policy's loss."""
    epochs: int = 1
    """How often a batch is gone through, a mini-batch an update."""
    keeps_reference: bool = False
    """Whether the policy that training began with is kept, as it is or without its adapters."""
    reads_reference: bool = False
    """Whether the policy's loss asks for its logprobs."""
    recompute: bool = False
    """Whether old logprobs are computed anew from the start."""
    learning_rate: optax.Schedule | None = None
    """Of the policy, by its updates so far; None: it is not reported."""
    largest_factor: float = math.inf
    """Recorded logprobs whose probabilities differ by more than this factor on average are computed
    anew from then on."""

    @property
    def wide(self) -> np.dtype:
        """Type of losses and of what is added up."""
        return np.promote_types(self.dtype, np.float32)

    @property
    def losses(self) -> Losses:
        """What a micro-batch is read for."""
        ordered = needs_ordering(self.mesh)
        return Losses(
            policy=self.policy_loss,
            aggregation=self.aggregation,
            draft=self.objective,
            processing=self.processing,
            taps=self.taps,
            wide=self.wide,
            ordered=ordered,
        )

    def for_texts(self, policy_loss: PolicyLoss | None, **changes: Any) -> "Learner":
        """This learner for texts that nobody sampled: one update a batch, on the mean over its
        labels."""
        plain = {
            "aggregation": by_token,
            "epochs": 1,
            "keeps_reference": False,
            "reads_reference": False,
            "recompute": True,
            "learning_rate": None,
        }
        return dataclasses.replace(self, policy_loss=policy_loss, **(plain | changes))

    @property
    def passes(self) -> Passes:
        """Over batches of this learner."""
        return Passes(self.mesh, self.dtype, self.tokens, self.losses, self.layout)

    def layout(self, tree: PyTree) -> PyTree:
        """Shardings of networks and optimizer states: split over all axes of the mesh (ZeRO-3), but
        small ones over `tensor` alone."""
        return meshes.shardings(
            self.mesh, tree, LOGICAL_AXES | ADAPTER_AXES, meshes.TRAIN_RULES, self.shard_above
        )

    def start(
        self, policy: Decoder | AdaptedDecoder, network: PyTree, online: bool
    ) -> LearnerState:
        """The state before the first update; `online` says whether the draft learns."""
        kept = self.keeps_reference and not isinstance(policy, AdaptedDecoder)
        return LearnerState(
            policy=optimizers.start(policy, self.policy_optimizer),
            draft=None if network is None else optimizers.start(network, self.draft_optimizer),
            online=jnp.asarray(online and network is not None),
            version=jnp.zeros((), jnp.int32),
            recompute=jnp.asarray(self.recompute),
            # a buffer of its own: the policy's is given away
            reference=jax.tree.map(jnp.copy, cast_floats(policy, self.dtype)) if kept else None,
        )

    def learn(
        self, state: LearnerState, batch: TrainBatch, wanted: Bool[Array, ""] | bool = True
    ) -> tuple[LearnerState, Metrics]:
        """Updates the policy once for each mini-batch of each epoch, and the draft where it learns,
        both on the weights that the update before left.

        A loss or a gradient that is not finite skips the update and counts it; so does a batch
        without a label to learn, but not a mini-batch of another. Where it is not `wanted` no
        micro-batch is read, nothing changes, and metrics are NaN, or 0 for counts: without a
        branch, which would hold the state twice. Metrics are means over the updates; those of the
        gap between recorded and own logprobs are of the whole batch before its first update.
        """
        wanted = jnp.asarray(wanted)
        batch, gap = self._placed(batch, wanted), None
        if self.policy_loss is not None:
            batch, gap = self._with_logprobs(state, batch)
        minis = len(batch.plan.used)
        count = minis * self.epochs

        @partial(jax.jit, inline=True)  # traced once, for what it measures and for the loop
        def update(number: Int[Array, ""], at: Updated) -> tuple[Updated, Metrics]:
            here = state.replace(policy=at.policy, draft=at.draft)
            then = tied(batch, at.turn) if self.losses.ordered and count > 1 else batch
            return self._update(here, then, number % minis, wanted, at.turn)

        def go_on(
            number: Int[Array, ""] | int, before: tuple[Updated, Measured]
        ) -> tuple[Updated, Measured]:
            at, found = update(jnp.asarray(number, jnp.int32), before[0])
            return at, before[1].plus(found)

        done = Updated(state.policy, state.draft, jnp.int32(0))
        _, found = jax.eval_shape(update, jnp.int32(0), done)
        zeros = {name: jnp.zeros((), leaf.dtype) for name, leaf in found.items()}
        measured = Measured(zeros, zeros)
        # in a loop XLA moves nothing to the host and back
        if count == 1 or isinstance(self.policy_optimizer, optimizers.Offloaded):
            for number in range(count):
                done, measured = go_on(number, (done, measured))
        else:
            done, measured = lax.fori_loop(0, count, go_on, (done, measured))
        metrics = measured.means()
        if gap is not None:
            of_first = Gap(*(metrics.pop(name) for name in GAP))
            metrics |= of_first.plus(gap).metrics
        metrics |= self._counted(state, batch, done) | self._rate(state)
        metrics = {name: _where_wanted(wanted, value) for name, value in metrics.items()}
        version = state.version + wanted.astype(jnp.int32)
        # what goes on with this version comes after all that was added up for these numbers
        if self.losses.ordered:
            version = order_after(version, [signal_ready(value) for value in metrics.values()])
        recompute = state.recompute
        if self.policy_loss is not None:
            recompute |= metrics["rollout/probability_factor"] > self.largest_factor
        return state.replace(
            policy=done.policy, draft=done.draft, version=version, recompute=recompute
        ), metrics

    def evaluate(self, policy: Decoder | AdaptedDecoder, batch: TrainBatch) -> Sums:
        """What a forward pass of the policy alone says of a batch: sums, whose `policy_loss` and
        `gap` are those of `learn`."""
        alone = dataclasses.replace(self, objective=None, taps=())
        return alone.passes.sums(policy, None, self.passes.at_places(batch))[0]

    def compare(
        self, policy: Decoder, network: PyTree, batch: TrainBatch
    ) -> tuple[Compared, Float[Array, " A"]]:
        """What the draft is worth on a batch, by depth: sums over the labels that each depth
        predicts, and how many these are.

        Nothing learns.
        """
        sums, counts = self.passes.sums(policy, network, self.passes.at_places(batch))
        return sums.draft, counts.by_depth

    def reference_kl(
        self, state: LearnerState, batch: TrainBatch, penalty: KlPenalty, wanted: Bool[Array, ""]
    ) -> Float[Array, "B A"]:
        """Sums the divergence of what sampled from the reference policy over each response.

        With `penalty.to_go`, over the rest of the response from each token on; the first of these
        sums is that of the whole response.
        """
        placed = self._placed(batch, wanted)
        reference, _ = self.passes.logprobs(_reference(state), 0, placed)
        learnt = placed.chosen & jnp.any(placed.plan.micro >= 0, axis=0)[:, None]
        sampled = placed.sampled_logprobs.astype(reference.dtype)
        by_token = penalty.estimated(sampled, reference, learnt)
        to_go = (
            lax.cumsum(by_token, axis=1, reverse=True)
            if penalty.to_go
            else jnp.sum(by_token, axis=1, keepdims=True)
        )
        return self.passes.in_row_order(to_go, placed)

    def _placed(self, batch: TrainBatch, wanted: Bool[Array, ""]) -> TrainBatch:
        """The batch with its rows at their places; where it is not `wanted`, nothing of it is to be
        read."""
        used = jnp.where(wanted, batch.plan.used, 0)
        return self.passes.at_places(batch.replace(plan=batch.plan.replace(used=used)))

    def _with_logprobs(self, state: LearnerState, batch: TrainBatch) -> tuple[TrainBatch, Gap]:
        """Adds the logprobs that the losses ask for, of the old and of the reference policy.

        Also returns the gap of all mini-batches but the first. The first is compared while it is
        learned from, before anything changes. With a single update, the learning pass itself
        computes the old logprobs of rows sampled by the current weights.
        """
        passes = self.passes
        if self.reads_reference:
            found, batch = passes.logprobs(_reference(state), 0, batch)
            batch = batch.replace(reference_logprobs=found)
        recorded, again = batch.sampled_logprobs, state.recompute
        current = batch.version == state.version
        batch = batch.replace(current=current)
        if len(batch.plan.used) * self.epochs == 1:
            batch = batch.replace(old_logprobs=recorded, on_policy=again | current)
            return batch, no_gap(self.wide)
        found, batch = passes.logprobs(state.policy.network, jnp.where(again, 0, 1), batch)
        gap, batch = passes.gap(found, 1, batch)
        old = jnp.where(again, found, recorded.astype(found.dtype))
        return batch.replace(old_logprobs=old), gap

    def _update(
        self,
        state: LearnerState,
        batch: TrainBatch,
        mini: Int[Array, ""],
        wanted: Bool[Array, ""],
        turn: Int[Array, ""],
    ) -> tuple[Updated, Metrics]:
        """One update on a mini-batch, and its metrics, NaN where it has none; nothing changes on
        one of which nothing is read, unless that is all of the batch."""
        policy, draft = state.policy, state.draft
        used = batch.plan.used
        wanted &= (used[mini] > 0) | (jnp.sum(used) == 0)
        network = None if draft is None else draft.network
        gradients, sums, counts = self.passes.gradients(
            policy.network, network, state.online, batch, mini
        )
        metrics: dict[str, Float[Array, ""]] = {}
        if self.policy_loss is not None:
            loss = jnp.where(counts.tokens > 0, sums.policy_loss, jnp.nan)
            policy, norm = optimizers.update(
                policy, gradients[0], loss, self.policy_optimizer, wanted
            )
            metrics |= {"loss/policy": loss, "grad_norm/policy": norm}
            metrics |= self._read(batch, mini, sums, counts)
            for name, value in zip(GAP, sums.gap, strict=True):
                metrics[name] = jnp.where(turn == 0, value, jnp.nan)
        if draft is not None and self.objective is not None:
            online = state.online & wanted
            draft, of_draft = self._draft_update(draft, gradients[1], online, sums, counts)
            metrics |= of_draft
        turn = turn + 1
        if self.losses.ordered:
            turn = order_after(turn, [signal_ready(value) for value in metrics.values()])
        kept = None if draft is None else self._kept_split(draft)
        return Updated(self._kept_split(policy), kept, turn), metrics

    def _read(
        self, batch: TrainBatch, mini: Int[Array, ""], sums: Sums, counts: Counts
    ) -> dict[str, Float[Array, ""]]:
        """Metrics of what was read, and how."""
        positions = row_shards(self.mesh) * self.tokens * batch.plan.used[mini]
        means = {
            "entropy": sums.entropy / counts.tokens,
            "learner/packing": counts.read / positions.astype(counts.read.dtype),
            **{name: value / counts.tokens for name, value in sums.measured.items()},
            **sums.extremes,
        }
        if sums.experts is not None:
            means |= sums.experts.to_metrics(counts.tokens)
        return {name: jnp.where(counts.tokens > 0, value, jnp.nan) for name, value in means.items()}

    def _counted(self, state: LearnerState, batch: TrainBatch, done: Updated) -> Metrics:
        """Metrics that are counts."""
        counted: Metrics = {}
        for name, trained in (("policy", done.policy), ("draft", done.draft)):
            learns = self.policy_loss if name == "policy" else self.objective
            if trained is not None and learns is not None:
                counted[f"skipped/{name}"] = trained.skipped
                counted[f"skipped_in_row/{name}"] = trained.skipped_in_row
        if self.policy_loss is not None:
            batch = tied(batch, done.turn) if self.losses.ordered else batch
            read = read_lengths(batch.chosen) > 0
            lag = jnp.where(read, state.version - batch.version, 0)
            counted["learner/lag"] = jnp.max(lag)
            counted["learner/micro_batches"] = self.epochs * jnp.sum(batch.plan.used)
            counted["learner/recompute"] = state.recompute.astype(jnp.int32)
        return counted

    def _rate(self, state: LearnerState) -> Metrics:
        """The learning rate of the batch's first update."""
        if self.policy_loss is None or self.learning_rate is None:
            return {}
        updates = optimizers.update_count(state.policy.optimizer)
        return {"optimizer/learning_rate": jnp.asarray(self.learning_rate(updates), self.wide)}

    def _draft_update(
        self, draft: Trained, gradients: PyTree, online: Bool[Array, ""], sums: Sums, counts: Counts
    ) -> tuple[Trained, dict[str, Float[Array, ""]]]:
        """The draft after its update where it is `online`; where it is frozen, as it was, with NaN
        for metrics."""
        loss = self.losses.of_draft(sums.draft.loss, counts)
        loss = jnp.where(counts.tokens > 0, loss, jnp.nan)
        draft, norm = optimizers.update(draft, gradients, loss, self.draft_optimizer, online)
        measured = {"loss/draft": loss, "grad_norm/draft": norm}
        acceptance = sums.draft.acceptance / jnp.maximum(counts.by_depth, 1)
        for depth, value in enumerate(acceptance, start=1):
            measured[f"draft/expected_acceptance_{depth}"] = value
        return draft, {name: jnp.where(online, value, jnp.nan) for name, value in measured.items()}

    def _kept_split(self, trained: Trained) -> Trained:
        """Weights pinned to the train layout: old and new ones are chosen between where they are,
        before they go anywhere else."""
        layout = self.layout(trained.network)
        return trained.replace(network=lax.with_sharding_constraint(trained.network, layout))


def _reference(state: LearnerState) -> Decoder:
    """The policy that is not to be left too far: kept aside, or without its adapters."""
    return state.policy.network.base if state.reference is None else state.reference


def _where_wanted(wanted: Bool[Array, ""], value: Num[Array, ""]) -> Num[Array, ""]:
    """A metric; NaN, or 0 for a count, where it is not of an update."""
    nothing = jnp.nan if jnp.issubdtype(value.dtype, jnp.floating) else 0
    return jnp.where(wanted, value, jnp.asarray(nothing, value.dtype))
