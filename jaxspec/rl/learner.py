"""The learner: one pass over packed micro-batches gives the gradients of policy and draft, each with an optimizer of its own."""

import dataclasses
from collections.abc import Callable
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
from jaxspec.mesh import DATA, TENSOR
from jaxspec.models.decoder import Decoder, Forward, Layers
from jaxspec.models.layers import LOGICAL_AXES
from jaxspec.models.lora import ADAPTER_AXES, Adapted, applied
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import Compared, Objective, compared, depths_of, drafted, predicts
from jaxspec.rl.logprobs import in_chunks, label_logprobs
from jaxspec.rl.losses import LossInputs, PolicyLoss
from jaxspec.rl.train_batch import Pack, TrainBatch, exchanged, filler, learnt_before, packed, read_lengths
from jaxspec.sampling import Processing
from jaxspec.state import LearnerState, PyTree, Trained

Metrics = dict[str, Num[Array, ""]]


class Sums(NamedTuple):
    """What a pass adds up over the labels to learn, on all shards; A depths of the draft (none without one)."""

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
    """What sums are divided by: known of the whole batch before the first micro-batch is read, so that means are of the batch."""

    tokens: Float[Array, ""]
    """Labels to learn."""
    by_depth: Float[Array, " A"]
    """Those that each depth of the draft predicts."""
    read: Float[Array, ""]
    """Positions that hold a text."""


@dataclasses.dataclass(frozen=True)
class Learner:
    """How a batch changes the weights, on a mesh of its own. Without `policy_loss` the policy is only read, for the draft's training."""

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
        """Shardings of networks and optimizer states: split over all axes of the mesh (ZeRO-3), but small ones over `tensor` alone."""
        return meshes.shardings(self.mesh, tree, LOGICAL_AXES | ADAPTER_AXES, meshes.TRAIN_RULES, self.shard_above)

    def start(self, policy: Decoder | Adapted, network: PyTree, online: bool) -> LearnerState:
        """The state before the first update; `online` says whether the draft learns."""
        return LearnerState(
            policy=optimizers.start(policy, self.policy_optimizer),
            draft=None if network is None else optimizers.start(network, self.draft_optimizer),
            online=jnp.asarray(online and network is not None),
            version=jnp.zeros((), jnp.int32),
        )

    def learn(self, state: LearnerState, batch: TrainBatch) -> tuple[LearnerState, Metrics]:
        """One update of the policy, and of the draft where it learns, both on the weights that `state` has.

        A loss or a gradient that is not finite skips the update and counts it; so does a batch without a label to learn.
        """
        draft = None if state.draft is None else state.draft.network
        gradients, sums, counts = self._pass(state.policy.network, draft, state.online, batch, learning=True)
        metrics: Metrics = {}
        policy = state.policy
        if self.policy_loss is not None:
            loss = jnp.where(counts.tokens > 0, sums.policy_loss / counts.tokens, jnp.nan)
            policy, norm = optimizers.update(state.policy, gradients[0], loss, self.policy_optimizer)
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
                "learner/packing": counts.read / jnp.maximum(positions, 1).astype(counts.read.dtype),
                "learner/lag": jnp.max(jnp.where(read_lengths(batch.chosen) > 0, state.version - batch.version, 0)),
            }
        trained = state.draft
        if trained is not None and self.objective is not None:
            trained, more = self._draft_update(trained, gradients[1], state.online, sums, counts)
            metrics |= more
        return LearnerState(policy=policy, draft=trained, online=state.online, version=state.version + 1), metrics

    def evaluate(self, policy: Decoder | Adapted, batch: TrainBatch) -> Sums:
        """What a forward pass of the policy alone says of a batch: sums, whose `policy_loss` and `gap` are those of `learn`."""
        return dataclasses.replace(self, objective=None)._pass(policy, None, jnp.zeros((), bool), batch, learning=False)[1]

    def compare(self, policy: Decoder, network: PyTree, batch: TrainBatch) -> Compared:
        """What the draft is worth on a batch, by depth: means over the labels that each depth predicts. Nothing learns."""
        _, sums, counts = self._pass(policy, network, jnp.ones((), bool), batch, learning=False)
        return Compared(*(part / jnp.maximum(counts.by_depth, 1) for part in sums.draft))

    def _draft_update(
        self, draft: Trained, gradients: PyTree, online: Bool[Array, ""], sums: Sums, counts: Counts
    ) -> tuple[Trained, Metrics]:
        """The draft after its update where it is `online`; where it is frozen, as it was, with NaN for metrics."""
        loss = self._draft_loss(sums.draft.loss, counts)
        loss = jnp.where(counts.tokens > 0, loss, jnp.nan)

        def update(draft: Trained) -> tuple[Trained, Float[Array, ""]]:
            return optimizers.update(draft, gradients, loss, self.draft_optimizer)

        draft, norm = lax.cond(online, update, lambda draft: (draft, jnp.full_like(loss, jnp.nan)), draft)
        acceptance = sums.draft.acceptance / jnp.maximum(counts.by_depth, 1)
        measured = {"loss/draft": loss, "grad_norm/draft": norm}
        measured |= {f"draft/expected_acceptance_{depth}": value for depth, value in enumerate(acceptance, start=1)}
        counted = {"skipped/draft": draft.skipped, "skipped_in_row/draft": draft.skipped_in_row}
        return draft, {name: jnp.where(online, value, jnp.nan) for name, value in measured.items()} | counted

    def _draft_loss(self, by_depth: Float[Array, " A"], counts: Counts) -> Float[Array, ""]:
        """The weighted sum of the depths' means."""
        assert self.objective is not None, "only a draft with an objective has a loss"
        weights = jnp.asarray(self.objective.weights(len(by_depth)), by_depth.dtype)
        return jnp.sum(weights * by_depth / jnp.maximum(counts.by_depth, 1))

    # ---- the pass, on every data shard

    def _pass(
        self, policy: Decoder | Adapted, draft: PyTree, online: Bool[Array, ""], batch: TrainBatch, learning: bool
    ) -> tuple[PyTree, Sums, Counts]:
        """Gradients in the train layout, in at least float32, with sums and counts of the whole batch.

        It runs in a `shard_map` that is manual over `data`: a shard has its own rows from the embedding to the loss, and all that goes
        between shards is what is written here.
        """
        layouts = self.layout(policy), self.layout(draft)
        splits = jax.tree.map(lambda sharding: sharding.spec, layouts)
        specs = jax.tree.map(lambda spec: P(*(DATA if axis == DATA else None for axis in spec)), splits)
        by_row = jax.tree.map(lambda leaf: P(DATA), batch)
        plan = batch.plan.replace(order=P(DATA), micro=P(None, DATA), start=P(None, DATA), used=P())
        inputs = (*specs, P(), by_row.replace(plan=plan))
        trained = optimizers.parameters(specs[0]), optimizers.parameters(specs[1])
        run = partial(self._on_a_shard, splits=splits, learning=learning)
        outputs = (self._learning(trained) if learning else (None, None), P(), P())
        mapped = jax.shard_map(run, mesh=self.mesh, in_specs=inputs, out_specs=outputs, axis_names={DATA}, check_vma=False)
        return mapped(policy, draft, online, batch)

    def _learning(self, pair: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """Of something for the policy and something for the draft, what belongs to those that learn."""
        policy, draft = pair
        return None if self.policy_loss is None else policy, None if self.objective is None else draft

    def _on_a_shard(
        self, policy: Decoder | Adapted, draft: PyTree, online: Bool[Array, ""], batch: TrainBatch, splits: PyTree, learning: bool
    ) -> tuple[PyTree, Sums, Counts]:
        """One shard's part of the pass: gradients accumulated over the micro-batches in use."""
        batch = exchanged(batch, self.mesh.shape[DATA])
        counts, spare = self._count(batch, draft), filler(batch)
        weights = self._learning((optimizers.parameters(policy), optimizers.parameters(draft)))

        def loss_of(weights: tuple[PyTree, PyTree], pack: Pack, row: Int[Array, "1 T"]) -> tuple[Float[Array, ""], Sums]:
            networks = zip((policy, draft), weights, strict=True)
            given = (network if own is None else optimizers.with_parameters(network, own) for network, own in networks)
            read_policy, read_draft = given
            sums = self._sums(read_policy, read_draft, splits, online, pack, row, batch)
            loss = jnp.zeros((), sums.policy_loss.dtype)
            if self.policy_loss is not None:
                loss = loss + sums.policy_loss / jnp.maximum(counts.tokens, 1)
            if self.objective is not None:
                loss = loss + self._draft_loss(sums.draft.loss, counts)
            return loss, sums

        def read(number: Int[Array, ""], before: tuple[PyTree, Sums]) -> tuple[PyTree, Sums]:
            pack, row = packed(batch, 0, number, self.tokens, spare)
            if not learning:
                return before[0], before[1].plus(loss_of(weights, pack, row)[1])
            (_, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, pack, row)
            return jax.tree.map(jnp.add, before[0], gradients), before[1].plus(sums)

        nothing = jax.tree.map(jnp.zeros_like, weights if learning else (None, None))
        gradients, sums = lax.fori_loop(0, batch.plan.used[0], read, (nothing, self._no_sums(counts)))
        largest = lax.pmax(sums.largest_gap, DATA)
        sums = lax.psum(sums, DATA)._replace(largest_gap=largest)
        if learning:  # of what is split, every micro-batch has added up the shards' parts already
            own = self._learning((optimizers.parameters(splits[0]), optimizers.parameters(splits[1])))
            gradients = jax.tree.map(lambda leaf, spec: leaf if _split_axis(spec) >= 0 else lax.psum(leaf, DATA), gradients, own)
        return gradients, sums, counts

    def _count(self, batch: TrainBatch, draft: PyTree) -> Counts:
        """Counts over all shards."""
        depths = 0 if self.objective is None else depths_of(draft, self.objective)
        here = batch.chosen[:, 1:] & (batch.plan.micro[0] >= 0)[:, None]
        positions = jnp.broadcast_to(jnp.arange(here.shape[1], dtype=jnp.int32), here.shape)
        wide = self.wide
        by_depth = jnp.sum(predicts(draft, here, positions, depths), axis=(0, 1), dtype=wide) if depths else jnp.zeros((0,), wide)
        read = jnp.sum(jnp.where(batch.plan.micro[0] >= 0, read_lengths(batch.chosen), 0), dtype=wide)
        return lax.psum(Counts(jnp.sum(here, dtype=wide), by_depth, read), DATA)

    def _no_sums(self, counts: Counts) -> Sums:
        zero = jnp.zeros_like(counts.tokens)
        return Sums(zero, zero, zero, zero, Compared(*[jnp.zeros_like(counts.by_depth)] * 3))

    def _sums(
        self,
        policy: Decoder | Adapted,
        draft: PyTree,
        splits: PyTree,
        online: Bool[Array, ""],
        pack: Pack,
        row: Int[Array, "1 T"],
        batch: TrainBatch,
    ) -> Sums:
        """One micro-batch: the policy's forward pass, and from the same logits its own loss and the draft's."""
        target, enter = self._entered(applied(policy), applied(splits[0]))
        forward = target(pack.tokens, pack.positions, taps=self.taps, first=pack.first, enter=enter)
        following = jnp.minimum(pack.positions + 1, batch.tokens.shape[1] - 1)
        wide = self.wide
        sampled, produced = batch.sampled_logprobs[row, following].astype(wide), learnt_before(pack)
        depths = 0 if self.objective is None else depths_of(draft, self.objective)
        network, hidden = draft, jnp.zeros((*pack.tokens.shape, depths, 0), wide)
        if self.objective is not None:
            network, hidden = self._drafted(draft, splits[1], online, target, forward, pack, depths)

        def chunk(hidden_target: Any, hidden: Any, labels: Any, produced: Any) -> tuple[Any, Any, Compared]:
            logits = target.logits(hidden_target)
            logprobs, entropy = label_logprobs(logits, labels, produced, self.processing)
            nothing = Compared(*[jnp.zeros(hidden.shape[:3], wide)] * 3)
            if self.objective is None:
                return logprobs, entropy, nothing
            run = partial(compared, network, lax.stop_gradient(target), objective=self.objective)
            return logprobs, entropy, lax.cond(online, run, lambda *_: nothing, lax.stop_gradient(logits), hidden)

        elements = len(pack.tokens) * target.config.vocab * (1 + depths)
        logprobs, entropy, found = in_chunks(chunk, elements, forward.hidden, hidden, pack.labels, produced)

        def total(values: Float[Array, "1 T"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(pack.chosen, values, 0))

        loss, gap = jnp.zeros((), wide), jnp.abs(lax.stop_gradient(logprobs) - sampled)
        if self.policy_loss is not None:
            advantages = batch.advantages[row].astype(wide)
            loss = total(self.policy_loss(LossInputs(logprobs, lax.stop_gradient(logprobs), sampled, advantages, pack.chosen)))
        inside = predicts(network, pack.chosen, pack.positions, depths) if depths else jnp.zeros(found.loss.shape, bool)
        draft_sums = Compared(*(jnp.sum(jnp.where(inside, part, 0), axis=(0, 1)) for part in found))
        return Sums(loss, total(lax.stop_gradient(entropy)), total(gap), jnp.max(jnp.where(pack.chosen, gap, 0)), draft_sums)

    def _drafted(
        self, draft: PyTree, splits: PyTree, online: Bool[Array, ""], target: Decoder, forward: Forward, pack: Pack, depths: int
    ) -> tuple[PyTree, Float[Array, "1 T A D"]]:
        """The draft's weights, whole, and what its head reads; zeros where it does not learn."""
        network = self._whole(draft, splits)
        detached = lax.stop_gradient((target, forward))

        def unroll(network: PyTree) -> Float[Array, "1 T A D"]:
            return drafted(network, *detached, pack, depths)

        shape = jax.eval_shape(unroll, network)
        return network, lax.cond(online, unroll, lambda _: jnp.zeros(shape.shape, shape.dtype), network)

    def _entered(self, network: Decoder, splits: Decoder) -> tuple[Decoder, Callable[[Layers], Layers]]:
        """The decoder with its embedding, norm and head whole, and what makes a layer whole when it is run."""
        whole = jax.tree.map(lambda leaf: leaf, network)
        for name in ("embedding", "norm", "head"):
            outer = {name: getattr(network, name)}, {name: getattr(splits, name)}
            setattr(whole, name, self._whole(*outer)[name])

        def enter(layer: Layers) -> Layers:
            return jax.tree.map(lambda leaf, spec: _whole(leaf, P(*tuple(spec)[1:]), self.dtype), layer, splits.layers)

        return whole, enter

    def _whole(self, network: PyTree, splits: PyTree) -> PyTree:
        """Weights whole over `data`. Embeddings and heads keep the master type, in which chunks of positions add up their gradients."""

        def one(path: Any, leaf: Array, spec: P) -> Array:
            names = {getattr(key, "name", getattr(key, "key", None)) for key in path}
            return _whole(leaf, spec, self.dtype, wide=bool(names & {"embedding", "head"}))

        return jax.tree_util.tree_map_with_path(one, network, splits)


def _whole(leaf: Array, spec: P, dtype: str, wide: bool = False) -> Array:
    """A weight in the type of products, whole over `data`; its gradient comes out as the weight went in: in the weight's type, added up
    over the shards and split. `wide`: the value keeps the weight's type after the gathering."""
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return _gathered(leaf, spec, dtype, leaf.dtype.name, wide) if floating else leaf


def _gather(leaf: Array, spec: P, dtype: str, master: str, wide: bool) -> Array:
    value = _between_shards(partial(lax.all_gather, axis_name=DATA, axis=_split_axis(spec), tiled=True), leaf.astype(dtype), spec)
    return value.astype(master) if wide else value


def _gathered_forward(leaf: Array, spec: P, dtype: str, master: str, wide: bool) -> tuple[Array, None]:
    return _gather(leaf, spec, dtype, master, wide), None


def _gathered_backward(spec: P, dtype: str, master: str, wide: bool, _: None, gradient: Array) -> tuple[Array]:
    scatter = partial(lax.psum_scatter, axis_name=DATA, scatter_dimension=_split_axis(spec), tiled=True)
    return (_between_shards(scatter, gradient.astype(master), spec),)


_gathered = jax.custom_vjp(_gather, nondiff_argnums=(1, 2, 3, 4))
_gathered.defvjp(_gathered_forward, _gathered_backward)


def _between_shards(collective: Callable[[Array], Array], leaf: Array, spec: P) -> Array:
    """A collective over `data` on a leaf that is split over it; on each member of `tensor` alone, since left to the compiler such a leaf
    would be made whole over `tensor` first."""
    if _split_axis(spec) < 0:
        return leaf
    if TENSOR not in tuple(spec):
        return collective(leaf)
    peers = P(*(TENSOR if axis == TENSOR else None for axis in spec))
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(collective, mesh=mesh, in_specs=peers, out_specs=peers, axis_names={TENSOR}, check_vma=False)(leaf)


def _split_axis(spec: P) -> int:
    """The axis that is split over `data`; -1: none."""
    return tuple(spec).index(DATA) if DATA in tuple(spec) else -1
