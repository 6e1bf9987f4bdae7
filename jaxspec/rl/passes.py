"""Passes of the learner over a batch, on every data shard: for gradients, for sums, for logprobs.

Each runs in a `shard_map` that is manual over what splits rows: a shard has its own from the
embedding to the loss, and all that goes between shards is what is written here and for experts in
`models/moe.py`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec.kernels.order import order_after, signal_ready
from jaxspec.mesh import ROWS, by_rows, on_each_shard, row_shards
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.rl import optimizers
from jaxspec.rl.fsdp import Pair, Shards
from jaxspec.rl.loss_terms import Gap
from jaxspec.rl.micro_batch import Counts, Losses, Sums
from jaxspec.rl.train_batch import (
    States,
    TrainBatch,
    exchanged,
    filler,
    from_shards,
    packed,
    unpacked,
)
from jaxspec.state import Pack, PyTree


@dataclasses.dataclass(frozen=True)
class Passes:
    """Passes over batches whose rows are at the places that their plan says (`at_places`)."""

    mesh: Mesh
    dtype: str
    """Of products."""
    tokens: int
    """Positions of a micro-batch on each data shard."""
    losses: Losses
    layout: Callable[[PyTree], PyTree]
    """Shardings of networks."""

    def at_places(self, batch: TrainBatch) -> TrainBatch:
        """The batch with every row on the shard, and at the place, that the plan says."""
        specs = _specs(batch)
        move = partial(exchanged, shards=row_shards(self.mesh))
        return on_each_shard(self.mesh, move, (specs,), specs)(batch)

    def gradients(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: TrainBatch,
        mini: Int[Array, ""],
    ) -> tuple[PyTree, Sums, Counts]:
        """Gradients of a mini-batch's losses in the train layout, in at least float32, with sums
        and counts of all of it; the draft learns where it is `online`."""
        return self._pass(policy, draft, online, batch, mini, learning=True)

    def sums(
        self, policy: Decoder | AdaptedDecoder, draft: PyTree, batch: TrainBatch
    ) -> tuple[Sums, Counts]:
        """Sums and counts of the first mini-batch by forward passes alone."""
        _, sums, counts = self._pass(
            policy, draft, jnp.ones((), bool), batch, jnp.int32(0), learning=False
        )
        return sums, counts

    def logprobs(
        self, policy: Decoder | AdaptedDecoder, first: Int[Array, ""] | int, batch: TrainBatch
    ) -> tuple[Float[Array, "B S"], TrainBatch]:
        """Log-probabilities of the labels under a policy, by a forward pass.

        It reads the mini-batches from number `first` on. A label's stands at the place of its
        token; elsewhere are zeros. Also returns the batch, tied to this pass so that later reads
        are ordered after it.
        """
        shards, specs = self._shards((policy, None))
        run = partial(self._logprobs_on_a_shard, shards=shards)
        by_row = _specs(batch)
        return on_each_shard(self.mesh, run, (specs[0], P(), by_row), (P(ROWS), by_row))(
            policy, jnp.asarray(first, jnp.int32), batch
        )

    def gap(
        self, logprobs: Float[Array, "B S"], first: int, batch: TrainBatch
    ) -> tuple[Gap, TrainBatch]:
        """Compares the labels' `logprobs` with the recorded ones, from mini-batch `first` on.

        Rows of older versions are left out. Also returns the batch, tied to what is added up here.
        """

        def on_a_shard(logprobs: Float[Array, "b S"], batch: TrainBatch) -> tuple[Gap, TrainBatch]:
            is_read = jnp.any(batch.plan.micro[first:] >= 0, axis=0)
            is_current = is_read if batch.current is None else is_read & batch.current
            # nothing predicts a row's first token
            chosen = batch.chosen.at[:, 0].set(False) & is_current[:, None]
            recorded = batch.sampled_logprobs.astype(logprobs.dtype)
            gap = Gap.of(logprobs, recorded, chosen)
            largest = lax.pmax(gap.largest, ROWS)
            if self.losses.ordered:
                gap = jax.tree.map(lambda total: order_after(total, [signal_ready(largest)]), gap)
            gap = lax.psum(gap, ROWS)._replace(largest=largest)
            return gap, tied(batch, *gap) if self.losses.ordered else batch

        by_row = _specs(batch)
        compare = on_each_shard(self.mesh, on_a_shard, (P(ROWS), by_row), (P(), by_row))
        return compare(logprobs, batch)

    def in_row_order(self, by_place: PyTree, batch: TrainBatch) -> PyTree:
        """Moves arrays of the rows [B ...] from their places back to the order of the rows."""

        def on_a_shard(values: PyTree, order: Int[Array, " b"]) -> PyTree:
            # After the values: collectives of the pass that made them come first.
            signs = [signal_ready(leaf) for leaf in jax.tree.leaves(values)]
            whole = lax.all_gather(order_after(order, signs), ROWS, tiled=True)
            places = jnp.arange(len(whole), dtype=jnp.int32)
            places = jnp.zeros_like(whole).at[whole].set(places)
            first = lax.axis_index(ROWS) * len(order)
            mine = lax.dynamic_slice_in_dim(places, first, len(order))
            return from_shards(values, mine, row_shards(self.mesh))

        return on_each_shard(self.mesh, on_a_shard, (P(ROWS), P(ROWS)), P(ROWS))(
            by_place, batch.plan.order
        )

    def states(self, policy: Decoder | AdaptedDecoder, batch: TrainBatch) -> States:
        """What the draft reads of the policy at each token, in the order of the rows.

        The batch is as it was made: its rows are not yet at their places.
        """
        batch = self.at_places(batch)
        shards, specs = self._shards((policy, None))
        run = partial(self._states_on_a_shard, shards=shards)
        read = on_each_shard(self.mesh, run, (specs[0], _specs(batch)), P(ROWS))
        found = read(policy, batch)
        return self.in_row_order(found, batch)

    # ---- what is common to them

    def _shards(self, networks: Pair) -> tuple[Shards, Pair]:
        """How networks are split, in all and over `data`."""
        splits: Any = jax.tree.map(lambda sharding: sharding.spec, self.layout(networks))
        return Shards(splits, self.dtype, self.losses.ordered), jax.tree.map(by_rows, splits)

    def _tied(self, networks: Pair, shards: Shards, filling: Int[Array, ""]) -> Pair:
        """Networks of which nothing is gathered before the batch is there: the compiler moves
        gathering of what no micro-batch changes out of the loop."""
        return shards.tied(networks, [signal_ready(filling)] if self.losses.ordered else [])

    # ---- gradients and sums

    def _pass(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: TrainBatch,
        mini: Int[Array, ""],
        learning: bool,
    ) -> tuple[PyTree, Sums, Counts]:
        shards, specs = self._shards((policy, draft))
        run = partial(self._on_a_shard, shards=shards, learning=learning)
        gradients = self._trained(specs) if learning else (None, None)
        inputs = (*specs, P(), _specs(batch), P())
        mapped = on_each_shard(self.mesh, run, inputs, (gradients, P(), P()))
        return mapped(policy, draft, online, batch, mini)

    def _trained(self, networks: Pair) -> Pair:
        """What is trained of policy and draft; None for one that is only read."""
        policy, draft = map(optimizers.parameters, networks)
        return (
            None if self.losses.policy is None else policy,
            None if self.losses.draft is None else draft,
        )

    def _on_a_shard(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: TrainBatch,
        mini: Int[Array, ""],
        shards: Shards,
        learning: bool,
    ) -> tuple[PyTree, Sums, Counts]:
        """One shard's part of the pass: gradients accumulated over the micro-batches in use."""
        losses = self.losses
        counts, filling = losses.counts(batch, mini), filler(batch)
        policy, draft = self._tied((policy, draft), shards, filling)
        weights, trained = self._trained((policy, draft)), shards.of(self._trained)

        def whole(weights: Pair) -> tuple[Pair, Pair]:
            networks = shards.outside_whole(*_filled((policy, draft), weights))
            return self._trained(networks), networks

        def loss_of(
            weights: Pair, networks: Pair, pack: Pack, row: Int[Array, "1 T"]
        ) -> tuple[Float[Array, ""], Sums]:
            filled = _filled(networks, weights)
            sums = losses.sums(*filled, shards, online, pack, row, batch, counts)
            return losses.total(sums, counts), sums

        def read(number: Int[Array, ""], before: tuple[PyTree, Sums]) -> tuple[PyTree, Sums]:
            pack, row = packed(batch, mini, number, self.tokens, filling)
            gathered, split, networks = jax.vjp(whole, weights, has_aux=True)
            pack = pack._replace(tokens=order_after(pack.tokens, shards.gathered(networks)))
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
            0,
            batch.plan.used[mini],
            read,
            (nothing, losses.nothing(counts, policy.config)),
        )
        # once a batch, and not for every micro-batch
        return trained.summed(gradients) if learning else gradients, sums.over_shards(), counts

    # ---- logprobs

    def _logprobs_on_a_shard(
        self,
        policy: Decoder | AdaptedDecoder,
        first: Int[Array, ""],
        batch: TrainBatch,
        shards: Shards,
    ) -> tuple[Float[Array, "B S"], TrainBatch]:
        filling, (rows, size) = filler(batch), batch.tokens.shape
        policy, _ = self._tied((policy, None), shards, filling)

        def read(
            mini: Int[Array, ""], number: Int[Array, ""], found: Float[Array, "B S"]
        ) -> Float[Array, "B S"]:
            pack, row = packed(batch, mini, number, self.tokens, filling)
            networks = shards.outside_whole(policy, None)
            pack = pack._replace(tokens=order_after(pack.tokens, shards.gathered(networks)))
            picked = self.losses.logprobs(networks[0], shards, pack)
            # what is not learnt is beyond the rows, and dropped
            row = jnp.where(pack.chosen, row, rows)
            following = jnp.minimum(pack.positions + 1, size - 1)
            return found.at[row, following].set(picked.astype(found.dtype), mode="drop")

        def read_all(mini: Int[Array, ""], found: Float[Array, "B S"]) -> Float[Array, "B S"]:
            used = jnp.where(mini >= first, batch.plan.used[mini], 0)
            return lax.fori_loop(0, used, partial(read, mini), found)

        nothing = jnp.zeros((rows, size), self.losses.wide)
        found = lax.fori_loop(0, len(batch.plan.used), read_all, nothing)
        # What is read of the batch later, on any shard, comes after this on all of them.
        there = lax.psum(signal_ready(found).astype(jnp.int32), ROWS)
        return found, tied(batch, there) if self.losses.ordered else batch

    # ---- states

    def _states_on_a_shard(
        self, policy: Decoder | AdaptedDecoder, batch: TrainBatch, shards: Shards
    ) -> States:
        filling, (rows, size) = filler(batch), batch.tokens.shape
        policy, _ = self._tied((policy, None), shards, filling)
        config, first = policy.config, jnp.int32(0)
        taps = self.losses.taps

        def nothing(width: int) -> Float[Array, "b S D"]:
            return jnp.zeros((rows, size, width), config.dtype)

        def read(number: Int[Array, ""], found: States) -> States:
            pack, _ = packed(batch, first, number, self.tokens, filling)
            networks = shards.outside_whole(policy, None)
            tokens = order_after(pack.tokens, shards.gathered(networks))
            forward = attach_lora(networks[0])(
                tokens,
                pack.positions,
                taps=taps,
                first=pack.first,
                prepare_layer=shards.layer_whole,
            )
            there = States(forward.hidden, forward.taps if taps else None)
            there = jax.tree.map(lambda leaf: leaf.astype(config.dtype), there)
            return unpacked(there, batch, first, number, found)

        taken = nothing(len(taps) * config.embed) if taps else None
        return lax.fori_loop(0, batch.plan.used[0], read, States(nothing(config.embed), taken))


def tied(batch: TrainBatch, *there: Num[Array, ""]) -> TrainBatch:
    """The batch, of which whatever is read comes after numbers that are `there`."""
    signs = [signal_ready(number) for number in there]
    return batch.replace(
        tokens=order_after(batch.tokens, signs), chosen=order_after(batch.chosen, signs)
    )


def _specs(batch: TrainBatch) -> Any:
    """How a batch is split over `data`."""
    by_row = jax.tree.map(lambda leaf: P(ROWS), batch)
    plan = batch.plan.replace(order=P(ROWS), micro=P(None, ROWS), start=P(None, ROWS), used=P())
    return by_row.replace(plan=plan)


def _filled(networks: Pair, weights: Pair) -> Pair:
    """Networks with what is trained of them from `weights`."""
    policy, draft = (
        network if own is None else optimizers.with_parameters(network, own)
        for network, own in zip(networks, weights, strict=True)
    )
    return policy, draft
