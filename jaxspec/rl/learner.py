"""The learner: one pass over packed micro-batches gives the gradients of policy and draft, each
with an optimizer of its own."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec import mesh as meshes
from jaxspec.kernels.order import after, computed, needed_on, sequence
from jaxspec.mesh import DATA
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.layers import LOGICAL_AXES
from jaxspec.models.lora import ADAPTER_AXES, Adapted, applied
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import Compared, Objective, compared, depths_of, drafted, predicts
from jaxspec.rl.fsdp import Pair, Shards
from jaxspec.rl.logprobs import in_chunks, label_logprobs
from jaxspec.rl.losses import LossInputs, PolicyLoss
from jaxspec.rl.train_batch import (
    Pack,
    TrainBatch,
    exchanged,
    filler,
    learnt_before,
    packed,
    read_lengths,
)
from jaxspec.sampling import Processing
from jaxspec.state import LearnerState, PyTree, Trained

Metrics = dict[str, Num[Array, ""]]


class Sums(NamedTuple):
    """What a pass adds up over the labels to learn, on all shards; A depths of the draft (none
    without one)."""

    policy_loss: Float[Array, ""]
    entropy: Float[Array, ""]
    gap: Float[Array, ""]
    """Of |sampled - policy| logprobs."""
    largest_gap: Float[Array, ""]
    draft: Compared

    def plus(self, other: "Sums") -> "Sums":
        """Both together."""
        largest = jnp.maximum(self.largest_gap, other.largest_gap)
        return jax.tree.map(jnp.add, self, other)._replace(largest_gap=largest)


class Counts(NamedTuple):
    """What sums are divided by: known of the whole batch before the first micro-batch is read, so
    that means are of the batch."""

    tokens: Float[Array, ""]
    """Labels to learn."""
    by_depth: Float[Array, " A"]
    """Those that each depth of the draft predicts."""
    read: Float[Array, ""]
    """Positions that hold a text."""


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

    @property
    def wide(self) -> np.dtype:
        """Type of losses and of what is added up."""
        return np.promote_types(self.dtype, np.float32)

    def layout(self, tree: PyTree) -> PyTree:
        """Shardings of networks and optimizer states: split over all axes of the mesh (ZeRO-3), but
        small ones over `tensor` alone."""
        return meshes.shardings(
            self.mesh, tree, LOGICAL_AXES | ADAPTER_AXES, meshes.TRAIN_RULES, self.shard_above
        )

    def start(self, policy: Decoder | Adapted, network: PyTree, online: bool) -> LearnerState:
        """The state before the first update; `online` says whether the draft learns."""
        return LearnerState(
            policy=optimizers.start(policy, self.policy_optimizer),
            draft=None if network is None else optimizers.start(network, self.draft_optimizer),
            online=jnp.asarray(online and network is not None),
            version=jnp.zeros((), jnp.int32),
        )

    def learn(
        self, state: LearnerState, batch: TrainBatch, wanted: Bool[Array, ""] | bool = True
    ) -> tuple[LearnerState, Metrics]:
        """One update of the policy, and of the draft where it learns, both on the weights that
        `state` has.

        A loss or a gradient that is not finite skips the update and counts it; so does a batch
        without a label to learn. Where it is not `wanted` no micro-batch is read, nothing changes,
        and metrics are NaN, or 0 for counts: without a branch, which would hold the state twice.
        """
        wanted = jnp.asarray(wanted)
        batch = batch.replace(plan=batch.plan.replace(used=jnp.where(wanted, batch.plan.used, 0)))
        draft = None if state.draft is None else state.draft.network
        gradients, sums, counts = self._pass(
            state.policy.network, draft, state.online, batch, learning=True
        )
        metrics: Metrics = {}
        policy = state.policy
        if self.policy_loss is not None:
            loss = jnp.where(counts.tokens > 0, sums.policy_loss / counts.tokens, jnp.nan)
            policy, norm = optimizers.update(
                state.policy, gradients[0], loss, self.policy_optimizer, wanted
            )
            positions = self.mesh.shape[DATA] * self.tokens * batch.plan.used[0]
            least = jnp.maximum(counts.tokens, 1)
            metrics |= {
                "loss/policy": loss,
                "grad_norm/policy": norm,
                "entropy": sums.entropy / least,
                "rollout/logprob_gap_mean": sums.gap / least,
                "rollout/logprob_gap_max": sums.largest_gap,
                "skipped/policy": policy.skipped,
                "skipped_in_row/policy": policy.skipped_in_row,
                "learner/micro_batches": batch.plan.used[0],
                "learner/packing": counts.read
                / jnp.maximum(positions, 1).astype(counts.read.dtype),
                "learner/lag": jnp.max(
                    jnp.where(read_lengths(batch.chosen) > 0, state.version - batch.version, 0)
                ),
            }
        trained = state.draft
        if trained is not None and self.objective is not None:
            trained, more = self._draft_update(
                trained, gradients[1], state.online & wanted, sums, counts
            )
            metrics |= more
        policy, trained = (
            self._kept_split(policy),
            None if trained is None else self._kept_split(trained),
        )
        nothing = {
            name: jnp.nan if jnp.issubdtype(value.dtype, jnp.floating) else 0
            for name, value in metrics.items()
        }
        metrics = {
            name: jnp.where(wanted, value, jnp.asarray(nothing[name], value.dtype))
            for name, value in metrics.items()
        }
        version = state.version + wanted.astype(jnp.int32)
        # what goes on with this version comes after all that was added up for these numbers
        if self._ordered:
            version = after(version, [computed(value) for value in metrics.values()])
        return LearnerState(
            policy=policy, draft=trained, online=state.online, version=version
        ), metrics

    def evaluate(self, policy: Decoder | Adapted, batch: TrainBatch) -> Sums:
        """What a forward pass of the policy alone says of a batch: sums, whose `policy_loss` and
        `gap` are those of `learn`."""
        return dataclasses.replace(self, objective=None, taps=())._pass(
            policy, None, jnp.zeros((), bool), batch, learning=False
        )[1]

    def compare(
        self, policy: Decoder, network: PyTree, batch: TrainBatch
    ) -> tuple[Compared, Float[Array, " A"]]:
        """What the draft is worth on a batch, by depth: sums over the labels that each depth
        predicts, and how many these are.

        Nothing learns.
        """
        _, sums, counts = self._pass(policy, network, jnp.ones((), bool), batch, learning=False)
        return sums.draft, counts.by_depth

    @property
    def _ordered(self) -> bool:
        """Whether collectives need an order by data, as on several CPU devices."""
        return needed_on(self.mesh)

    def _kept_split(self, trained: Trained) -> Trained:
        """The same: old and new weights are chosen between where they are, before they go anywhere
        else."""
        return trained.replace(
            network=lax.with_sharding_constraint(trained.network, self.layout(trained.network))
        )

    def _draft_update(
        self, draft: Trained, gradients: PyTree, online: Bool[Array, ""], sums: Sums, counts: Counts
    ) -> tuple[Trained, Metrics]:
        """The draft after its update where it is `online`; where it is frozen, as it was, with NaN
        for metrics."""
        loss = self._draft_loss(sums.draft.loss, counts)
        loss = jnp.where(counts.tokens > 0, loss, jnp.nan)
        draft, norm = optimizers.update(draft, gradients, loss, self.draft_optimizer, online)
        acceptance = sums.draft.acceptance / jnp.maximum(counts.by_depth, 1)
        measured = {"loss/draft": loss, "grad_norm/draft": norm}
        measured |= {
            f"draft/expected_acceptance_{depth}": value
            for depth, value in enumerate(acceptance, start=1)
        }
        counted = {"skipped/draft": draft.skipped, "skipped_in_row/draft": draft.skipped_in_row}
        return draft, {
            name: jnp.where(online, value, jnp.nan) for name, value in measured.items()
        } | counted

    def _draft_loss(self, by_depth: Float[Array, " A"], counts: Counts) -> Float[Array, ""]:
        """The weighted sum of the depths' means."""
        assert self.objective is not None, "only a draft with an objective has a loss"
        weights = jnp.asarray(self.objective.weights(len(by_depth)), by_depth.dtype)
        return jnp.sum(weights * by_depth / jnp.maximum(counts.by_depth, 1))

    # ---- the pass, on every data shard

    def _pass(
        self,
        policy: Decoder | Adapted,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: TrainBatch,
        learning: bool,
    ) -> tuple[PyTree, Sums, Counts]:
        """Gradients in the train layout, in at least float32, with sums and counts of the whole
        batch.

        It runs in a `shard_map` that is manual over `data`: a shard has its own rows from the
        embedding to the loss, and all that goes between shards is what is written here.
        """
        splits = jax.tree.map(
            lambda sharding: sharding.spec, (self.layout(policy), self.layout(draft))
        )
        shards = Shards(splits, self.dtype, self._ordered)
        specs = jax.tree.map(
            lambda spec: P(*(DATA if axis == DATA else None for axis in spec)), splits
        )
        by_row = jax.tree.map(lambda leaf: P(DATA), batch)
        plan = batch.plan.replace(order=P(DATA), micro=P(None, DATA), start=P(None, DATA), used=P())
        inputs = (*specs, P(), by_row.replace(plan=plan))
        run = partial(self._on_a_shard, shards=shards, learning=learning)
        outputs = (self._trained(specs) if learning else (None, None), P(), P())
        mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=inputs,
            out_specs=outputs,
            axis_names={DATA},
            check_vma=False,
        )
        return mapped(policy, draft, online, batch)

    def _trained(self, networks: Pair) -> Pair:
        """What is trained of policy and draft; None for one that is only read."""
        policy, draft = map(optimizers.parameters, networks)
        return (
            None if self.policy_loss is None else policy,
            None if self.objective is None else draft,
        )

    def _on_a_shard(
        self,
        policy: Decoder | Adapted,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: TrainBatch,
        shards: Shards,
        learning: bool,
    ) -> tuple[PyTree, Sums, Counts]:
        """One shard's part of the pass: gradients accumulated over the micro-batches in use."""
        batch = exchanged(batch, self.mesh.shape[DATA])
        counts, spare = self._count(batch, draft), filler(batch)
        # The compiler moves gathering of what no micro-batch changes out of the loop.
        policy, draft = shards.tied((policy, draft), [computed(spare)] if self._ordered else [])
        weights, trained = self._trained((policy, draft)), shards.of(self._trained)

        def whole(weights: Pair) -> tuple[Pair, Pair]:
            networks = shards.outside_whole(*_filled((policy, draft), weights))
            return self._trained(networks), networks

        def loss_of(
            weights: Pair, networks: Pair, pack: Pack, row: Int[Array, "1 T"]
        ) -> tuple[Float[Array, ""], Sums]:
            sums = self._sums(*_filled(networks, weights), shards, online, pack, row, batch)
            loss = jnp.zeros((), sums.policy_loss.dtype)
            if self.policy_loss is not None:
                loss = loss + sums.policy_loss / jnp.maximum(counts.tokens, 1)
            if self.objective is not None:
                loss = loss + self._draft_loss(sums.draft.loss, counts)
            return loss, sums

        def read(number: Int[Array, ""], before: tuple[PyTree, Sums]) -> tuple[PyTree, Sums]:
            pack, row = packed(batch, 0, number, self.tokens, spare)
            gathered, split, networks = jax.vjp(whole, weights, has_aux=True)
            pack = pack._replace(tokens=after(pack.tokens, shards.gathered(networks)))
            if not learning:
                return before[0], before[1].plus(loss_of(gathered, networks, pack, row)[1])
            (_, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(
                gathered, networks, pack, row
            )
            (gradients,) = split(trained.tied(gradients, trained.layers_learnt(gradients)))
            return jax.tree.map(jnp.add, before[0], gradients), before[1].plus(sums)

        nothing = jax.tree.map(jnp.zeros_like, weights if learning else (None, None))
        gradients, sums = lax.fori_loop(
            0, batch.plan.used[0], read, (nothing, self._no_sums(counts))
        )
        largest = lax.pmax(sums.largest_gap, DATA)
        sums = lax.psum(sums, DATA)._replace(largest_gap=largest)
        return trained.summed(gradients) if learning else gradients, sums, counts

    def _count(self, batch: TrainBatch, draft: PyTree) -> Counts:
        """Counts over all shards."""
        depths = 0 if self.objective is None else depths_of(draft, self.objective)
        here = batch.chosen[:, 1:] & (batch.plan.micro[0] >= 0)[:, None]
        positions = jnp.broadcast_to(jnp.arange(here.shape[1], dtype=jnp.int32), here.shape)
        wide = self.wide
        by_depth = (
            jnp.sum(predicts(draft, here, positions, depths), axis=(0, 1), dtype=wide)
            if depths
            else jnp.zeros((0,), wide)
        )
        read = jnp.sum(
            jnp.where(batch.plan.micro[0] >= 0, read_lengths(batch.chosen), 0), dtype=wide
        )
        return lax.psum(Counts(jnp.sum(here, dtype=wide), by_depth, read), DATA)

    def _no_sums(self, counts: Counts) -> Sums:
        zero = jnp.zeros_like(counts.tokens)
        return Sums(zero, zero, zero, zero, Compared(*[jnp.zeros_like(counts.by_depth)] * 3))

    def _sums(
        self,
        policy: Decoder | Adapted,
        draft: PyTree,
        shards: Shards,
        online: Bool[Array, ""],
        pack: Pack,
        row: Int[Array, "1 T"],
        batch: TrainBatch,
    ) -> Sums:
        """One micro-batch: the policy's forward pass, and from the same logits its own loss and the
        draft's."""
        target = applied(policy)
        forward = target(
            pack.tokens, pack.positions, taps=self.taps, first=pack.first, enter=shards.layer_whole
        )
        following = jnp.minimum(pack.positions + 1, batch.tokens.shape[1] - 1)
        wide = self.wide
        sampled, produced = batch.sampled_logprobs[row, following].astype(wide), learnt_before(pack)
        depths = 0 if self.objective is None else depths_of(draft, self.objective)
        network, hidden = draft, jnp.zeros((*pack.tokens.shape, depths, 0), wide)
        if self.objective is not None:
            last, network = shards.draft_first(forward.hidden, draft)
            forward = forward._replace(hidden=last)
            hidden = self._drafted(network, online, target, forward, pack, depths)
            if self._ordered:
                (hidden,), last = sequence((hidden,), last)
                forward = forward._replace(hidden=last)

        def chunk(
            hidden_target: Any, hidden: Any, labels: Any, produced: Any
        ) -> tuple[Any, Any, Compared]:
            logits = target.logits(hidden_target)
            logprobs, entropy = label_logprobs(logits, labels, produced, self.processing)
            nothing = Compared(*[jnp.zeros(hidden.shape[:3], wide)] * 3)
            if self.objective is None:
                return logprobs, entropy, nothing
            if self._ordered:
                (logprobs, entropy), hidden = sequence((logprobs, entropy), hidden)
            run = partial(compared, network, lax.stop_gradient(target), objective=self.objective)
            return (
                logprobs,
                entropy,
                lax.cond(online, run, lambda *_: nothing, lax.stop_gradient(logits), hidden),
            )

        elements = len(pack.tokens) * target.config.vocab * (1 + depths)
        logprobs, entropy, found = in_chunks(
            chunk, elements, forward.hidden, hidden, pack.labels, produced
        )

        def total(values: Float[Array, "1 T"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(pack.chosen, values, 0))

        loss, gap = jnp.zeros((), wide), jnp.abs(lax.stop_gradient(logprobs) - sampled)
        if self.policy_loss is not None:
            advantages = batch.advantages[row].astype(wide)
            loss = total(
                self.policy_loss(
                    LossInputs(
                        logprobs, lax.stop_gradient(logprobs), sampled, advantages, pack.chosen
                    )
                )
            )
        inside = (
            predicts(network, pack.chosen, pack.positions, depths)
            if depths
            else jnp.zeros(found.loss.shape, bool)
        )
        draft_sums = Compared(*(jnp.sum(jnp.where(inside, part, 0), axis=(0, 1)) for part in found))
        return Sums(
            loss,
            total(lax.stop_gradient(entropy)),
            total(gap),
            jnp.max(jnp.where(pack.chosen, gap, 0)),
            draft_sums,
        )

    def _drafted(
        self,
        network: PyTree,
        online: Bool[Array, ""],
        target: Decoder,
        forward: Forward,
        pack: Pack,
        depths: int,
    ) -> Float[Array, "1 T A D"]:
        """What the draft's head reads; zeros where it does not learn."""
        detached = lax.stop_gradient((target, forward))
        if self._ordered:
            pack = pack._replace(tokens=after(pack.tokens, [computed(forward.hidden)]))

        def unroll(network: PyTree) -> Float[Array, "1 T A D"]:
            return drafted(network, *detached, pack, depths)

        shape = jax.eval_shape(unroll, network)
        return lax.cond(online, unroll, lambda _: jnp.zeros(shape.shape, shape.dtype), network)


def _filled(networks: Pair, weights: Pair) -> Pair:
    """Networks with what is trained of them from `weights`."""
    policy, draft = (
        network if own is None else optimizers.with_parameters(network, own)
        for network, own in zip(networks, weights, strict=True)
    )
    return policy, draft
