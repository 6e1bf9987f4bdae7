"""The learner: one pass over packed micro-batches gives the gradients of policy and draft, each
with an optimizer of its own."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec import mesh as meshes
from jaxspec.kernels.order import after, computed, needed_on
from jaxspec.mesh import DATA
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import LOGICAL_AXES
from jaxspec.models.lora import ADAPTER_AXES, Adapted
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import Compared, Objective
from jaxspec.rl.fsdp import Pair, Shards
from jaxspec.rl.losses import PolicyLoss
from jaxspec.rl.micro_batch import Counts, Losses, Sums
from jaxspec.rl.train_batch import Pack, TrainBatch, exchanged, filler, packed, read_lengths
from jaxspec.sampling import Processing
from jaxspec.state import LearnerState, PyTree, Trained

Metrics = dict[str, Num[Array, ""]]


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

    @property
    def losses(self) -> Losses:
        """What a micro-batch is read for."""
        ordered = needed_on(self.mesh)
        return Losses(
            self.policy_loss, self.objective, self.processing, self.taps, self.wide, ordered
        )

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
        policy, draft = state.policy, state.draft
        network = None if draft is None else draft.network
        gradients, sums, counts = self._pass(
            policy.network, network, state.online, batch, learning=True
        )
        metrics: Metrics = {}
        if self.policy_loss is not None:
            loss = jnp.where(counts.tokens > 0, sums.policy_loss / counts.tokens, jnp.nan)
            policy, norm = optimizers.update(
                policy, gradients[0], loss, self.policy_optimizer, wanted
            )
            metrics |= {
                "loss/policy": loss,
                "grad_norm/policy": norm,
                "skipped/policy": policy.skipped,
                "skipped_in_row/policy": policy.skipped_in_row,
                **self._read(state, batch, sums, counts),
            }
        if draft is not None and self.objective is not None:
            online = state.online & wanted
            draft, of_draft = self._draft_update(draft, gradients[1], online, sums, counts)
            metrics |= of_draft
        policy = self._kept_split(policy)
        draft = None if draft is None else self._kept_split(draft)
        metrics = {name: _where_wanted(wanted, value) for name, value in metrics.items()}
        version = state.version + wanted.astype(jnp.int32)
        # what goes on with this version comes after all that was added up for these numbers
        if self.losses.ordered:
            version = after(version, [computed(value) for value in metrics.values()])
        return LearnerState(
            policy=policy, draft=draft, online=state.online, version=version
        ), metrics

    def evaluate(self, policy: Decoder | Adapted, batch: TrainBatch) -> Sums:
        """What a forward pass of the policy alone says of a batch: sums, whose `policy_loss` and
        `gap` are those of `learn`."""
        alone = dataclasses.replace(self, objective=None, taps=())
        return alone._pass(policy, None, jnp.zeros((), bool), batch, learning=False)[1]

    def compare(
        self, policy: Decoder, network: PyTree, batch: TrainBatch
    ) -> tuple[Compared, Float[Array, " A"]]:
        """What the draft is worth on a batch, by depth: sums over the labels that each depth
        predicts, and how many these are.

        Nothing learns.
        """
        _, sums, counts = self._pass(policy, network, jnp.ones((), bool), batch, learning=False)
        return sums.draft, counts.by_depth

    def _read(self, state: LearnerState, batch: TrainBatch, sums: Sums, counts: Counts) -> Metrics:
        """Metrics of what was read, and how."""
        least, used = jnp.maximum(counts.tokens, 1), batch.plan.used[0]
        positions = jnp.maximum(self.mesh.shape[DATA] * self.tokens * used, 1)
        lag = jnp.where(read_lengths(batch.chosen) > 0, state.version - batch.version, 0)
        return {
            "entropy": sums.entropy / least,
            "rollout/logprob_gap_mean": sums.gap / least,
            "rollout/logprob_gap_max": sums.largest_gap,
            "learner/micro_batches": used,
            "learner/packing": counts.read / positions.astype(counts.read.dtype),
            "learner/lag": jnp.max(lag),
        }

    def _draft_update(
        self, draft: Trained, gradients: PyTree, online: Bool[Array, ""], sums: Sums, counts: Counts
    ) -> tuple[Trained, Metrics]:
        """The draft after its update where it is `online`; where it is frozen, as it was, with NaN
        for metrics."""
        loss = self.losses.of_draft(sums.draft.loss, counts)
        loss = jnp.where(counts.tokens > 0, loss, jnp.nan)
        draft, norm = optimizers.update(draft, gradients, loss, self.draft_optimizer, online)
        measured = {"loss/draft": loss, "grad_norm/draft": norm}
        acceptance = sums.draft.acceptance / jnp.maximum(counts.by_depth, 1)
        for depth, value in enumerate(acceptance, start=1):
            measured[f"draft/expected_acceptance_{depth}"] = value
        counted = {"skipped/draft": draft.skipped, "skipped_in_row/draft": draft.skipped_in_row}
        return draft, {
            name: jnp.where(online, value, jnp.nan) for name, value in measured.items()
        } | counted

    def _kept_split(self, trained: Trained) -> Trained:
        """Weights pinned to the train layout: old and new ones are chosen between where they are,
        before they go anywhere else."""
        layout = self.layout(trained.network)
        return trained.replace(network=lax.with_sharding_constraint(trained.network, layout))

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
        layouts = self.layout(policy), self.layout(draft)
        splits = jax.tree.map(lambda sharding: sharding.spec, layouts)
        shards = Shards(splits, self.dtype, self.losses.ordered)
        specs = jax.tree.map(
            lambda spec: P(*(DATA if axis == DATA else None for axis in spec)), splits
        )
        by_row = jax.tree.map(lambda leaf: P(DATA), batch)
        plan = batch.plan.replace(order=P(DATA), micro=P(None, DATA), start=P(None, DATA), used=P())
        mapped = jax.shard_map(
            partial(self._on_a_shard, shards=shards, learning=learning),
            mesh=self.mesh,
            in_specs=(*specs, P(), by_row.replace(plan=plan)),
            out_specs=(self._trained(specs) if learning else (None, None), P(), P()),
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
        losses = self.losses
        batch = exchanged(batch, self.mesh.shape[DATA])
        counts, filling = losses.counts(batch), filler(batch)
        # The compiler moves gathering of what no micro-batch changes out of the loop.
        policy, draft = shards.tied((policy, draft), [computed(filling)] if losses.ordered else [])
        weights, trained = self._trained((policy, draft)), shards.of(self._trained)

        def whole(weights: Pair) -> tuple[Pair, Pair]:
            networks = shards.outside_whole(*_filled((policy, draft), weights))
            return self._trained(networks), networks

        def loss_of(
            weights: Pair, networks: Pair, pack: Pack, row: Int[Array, "1 T"]
        ) -> tuple[Float[Array, ""], Sums]:
            sums = losses.sums(*_filled(networks, weights), shards, online, pack, row, batch)
            return losses.total(sums, counts), sums

        def read(number: Int[Array, ""], before: tuple[PyTree, Sums]) -> tuple[PyTree, Sums]:
            pack, row = packed(batch, 0, number, self.tokens, filling)
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
        # The plan says at run time how many micro-batches there are: one program for every batch.
        gradients, sums = lax.fori_loop(
            0, batch.plan.used[0], read, (nothing, losses.nothing(counts))
        )
        # once a batch, and not for every micro-batch
        largest = lax.pmax(sums.largest_gap, DATA)
        sums = lax.psum(sums, DATA)._replace(largest_gap=largest)
        return trained.summed(gradients) if learning else gradients, sums, counts


def _where_wanted(wanted: Bool[Array, ""], value: Num[Array, ""]) -> Num[Array, ""]:
    """A metric; NaN, or 0 for a count, where it is not of an update."""
    nothing = jnp.nan if jnp.issubdtype(value.dtype, jnp.floating) else 0
    return jnp.where(wanted, value, jnp.asarray(nothing, value.dtype))


def _filled(networks: Pair, weights: Pair) -> Pair:
    """Networks with what is trained of them from `weights`."""
    policy, draft = (
        network if own is None else optimizers.with_parameters(network, own)
        for network, own in zip(networks, weights, strict=True)
    )
    return policy, draft
