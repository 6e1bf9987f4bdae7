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
from jaxspec.mesh import ROWS, keep_row_axes, row_shard_count, shard_map_rows
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.rl import optimizers
from jaxspec.rl.fsdp import NetworkPair, WeightShards
from jaxspec.rl.loss_terms import LogprobGap
from jaxspec.rl.micro_batch import BatchCounts, BatchSums, MicroBatchObjective
from jaxspec.rl.train_batch import (
    PolicyStates,
    TrainBatch,
    filler_token,
    gather_from_shards,
    gather_pack,
    move_rows_to_plan,
    scatter_pack,
)
from jaxspec.state import Pack, PyTree


@dataclasses.dataclass(frozen=True)
class Passes:
    """Passes over batches whose rows are at the places that their plan says (`at_places`)."""

    mesh: Mesh
    dtype: str
    """Of products."""
    micro_tokens: int
    """Positions of a micro-batch on each data shard."""
    objective: MicroBatchObjective
    train_layout: Callable[[PyTree], PyTree]
    """Shardings of networks."""

    def place_rows(self, batch: TrainBatch) -> TrainBatch:
        """The batch with every row on the shard, and at the place, that the plan says."""
        specs = _batch_specs(batch)
        move_rows = partial(move_rows_to_plan, shard_count=row_shard_count(self.mesh))
        return shard_map_rows(self.mesh, move_rows, (specs,), specs)(batch)

    def compute_gradients(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: TrainBatch,
        mini_batch: Int[Array, ""],
    ) -> tuple[PyTree, BatchSums, BatchCounts]:
        """Gradients of a mini-batch's losses in the train layout, in at least float32, with sums
        and counts of all of it; the draft learns where it is `online`."""
        return self._run_pass(policy, draft, online, batch, mini_batch, learning=True)

    def compute_sums(
        self, policy: Decoder | AdaptedDecoder, draft: PyTree, batch: TrainBatch
    ) -> tuple[BatchSums, BatchCounts]:
        """Sums and counts of the first mini-batch by forward passes alone."""
        _, sums, counts = self._run_pass(
            policy, draft, jnp.ones((), bool), batch, jnp.int32(0), learning=False
        )
        return sums, counts

    def compute_logprobs(
        self,
        policy: Decoder | AdaptedDecoder,
        first_mini_batch: Int[Array, ""] | int,
        batch: TrainBatch,
    ) -> tuple[Float[Array, "B S"], TrainBatch]:
        """Log-probabilities of the labels under a policy, by a forward pass.

        It reads the mini-batches from number `first_mini_batch` on. A label's stands at the place
        of its token; elsewhere are zeros. Also returns the batch, tied to this pass so that later
        reads are ordered after it.
        """
        shards, specs = self._shard_weights((policy, None))
        run_on_shard = partial(self._logprobs_on_shard, shards=shards)
        batch_specs = _batch_specs(batch)
        return shard_map_rows(
            self.mesh, run_on_shard, (specs[0], P(), batch_specs), (P(ROWS), batch_specs)
        )(policy, jnp.asarray(first_mini_batch, jnp.int32), batch)

    def compare_logprobs(
        self, logprobs: Float[Array, "B S"], first_mini_batch: int, batch: TrainBatch
    ) -> tuple[LogprobGap, TrainBatch]:
        """Compares the labels' `logprobs` with the recorded ones, from `first_mini_batch` on.

        Rows of older versions are left out. Also returns the batch, tied to what is added up here.
        """

        def compare_on_shard(
            logprobs: Float[Array, "b S"], batch: TrainBatch
        ) -> tuple[LogprobGap, TrainBatch]:
            is_read = jnp.any(batch.plan.micro_batch[first_mini_batch:] >= 0, axis=0)
            is_current = is_read if batch.is_current is None else is_read & batch.is_current
            # nothing predicts a row's first token
            loss_mask = batch.loss_mask.at[:, 0].set(False) & is_current[:, None]
            recorded_logprobs = batch.sampled_logprobs.astype(logprobs.dtype)
            gap = LogprobGap.from_logprobs(logprobs, recorded_logprobs, loss_mask)
            max_absolute = lax.pmax(gap.max_absolute, ROWS)
            if self.objective.needs_order:
                gap = jax.tree.map(
                    lambda total: order_after(total, [signal_ready(max_absolute)]), gap
                )
            gap = lax.psum(gap, ROWS)._replace(max_absolute=max_absolute)
            return gap, order_batch_after(batch, *gap) if self.objective.needs_order else batch

        batch_specs = _batch_specs(batch)
        compare = shard_map_rows(
            self.mesh, compare_on_shard, (P(ROWS), batch_specs), (P(), batch_specs)
        )
        return compare(logprobs, batch)

    def restore_row_order(self, placed_values: PyTree, batch: TrainBatch) -> PyTree:
        """Moves arrays of the rows [B ...] from their places back to the order of the rows."""

        def restore_on_shard(values: PyTree, order: Int[Array, " b"]) -> PyTree:
            # After the values: collectives of the pass that made them come first.
            signals = [signal_ready(leaf) for leaf in jax.tree.leaves(values)]
            full_order = lax.all_gather(order_after(order, signals), ROWS, tiled=True)
            row_places = jnp.arange(len(full_order), dtype=jnp.int32)
            row_places = jnp.zeros_like(full_order).at[full_order].set(row_places)
            first_row = lax.axis_index(ROWS) * len(order)
            local_places = lax.dynamic_slice_in_dim(row_places, first_row, len(order))
            return gather_from_shards(values, local_places, row_shard_count(self.mesh))

        return shard_map_rows(self.mesh, restore_on_shard, (P(ROWS), P(ROWS)), P(ROWS))(
            placed_values, batch.plan.row_order
        )

    def compute_states(self, policy: Decoder | AdaptedDecoder, batch: TrainBatch) -> PolicyStates:
        """What the draft reads of the policy at each token, in the order of the rows.

        The batch is as it was made: its rows are not yet at their places.
        """
        batch = self.place_rows(batch)
        shards, specs = self._shard_weights((policy, None))
        run_on_shard = partial(self._states_on_shard, shards=shards)
        compute = shard_map_rows(self.mesh, run_on_shard, (specs[0], _batch_specs(batch)), P(ROWS))
        states = compute(policy, batch)
        return self.restore_row_order(states, batch)

    # ---- what is common to them

    def _shard_weights(self, networks: NetworkPair) -> tuple[WeightShards, NetworkPair]:
        """How networks are split, in all and over `data`."""
        specs: Any = jax.tree.map(lambda sharding: sharding.spec, self.train_layout(networks))
        return WeightShards(specs, self.dtype, self.objective.needs_order), jax.tree.map(
            keep_row_axes, specs
        )

    def _delay_gathering(
        self, networks: NetworkPair, shards: WeightShards, filler: Int[Array, ""]
    ) -> NetworkPair:
        """Networks of which nothing is gathered before the batch is there: the compiler moves
        gathering of what no micro-batch changes out of the loop."""
        return shards.order_collectives(
            networks, [signal_ready(filler)] if self.objective.needs_order else []
        )

    # ---- gradients and sums

    def _run_pass(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: TrainBatch,
        mini_batch: Int[Array, ""],
        learning: bool,
    ) -> tuple[PyTree, BatchSums, BatchCounts]:
        shards, specs = self._shard_weights((policy, draft))
        run_on_shard = partial(self._run_on_shard, shards=shards, learning=learning)
        gradients = self._select_trained(specs) if learning else (None, None)
        inputs = (*specs, P(), _batch_specs(batch), P())
        mapped = shard_map_rows(self.mesh, run_on_shard, inputs, (gradients, P(), P()))
        return mapped(policy, draft, online, batch, mini_batch)

    def _select_trained(self, networks: NetworkPair) -> NetworkPair:
        """What is trained of policy and draft; None for one that is only read."""
        policy, draft = map(optimizers.trainable_parameters, networks)
        return (
            None if self.objective.policy_loss is None else policy,
            None if self.objective.draft is None else draft,
        )

    def _run_on_shard(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: TrainBatch,
        mini_batch: Int[Array, ""],
        shards: WeightShards,
        learning: bool,
    ) -> tuple[PyTree, BatchSums, BatchCounts]:
        """One shard's part of the pass: gradients accumulated over the micro-batches in use."""
        objective = self.objective
        counts, filler = objective.count_mini_batch(batch, mini_batch), filler_token(batch)
        policy, draft = self._delay_gathering((policy, draft), shards, filler)
        weights, trained_shards = (
            self._select_trained((policy, draft)),
            shards.map_specs(self._select_trained),
        )

        def gather_networks(weights: NetworkPair) -> tuple[NetworkPair, NetworkPair]:
            networks = shards.gather_outside_layers(*_fill_weights((policy, draft), weights))
            return self._select_trained(networks), networks

        def compute_loss(
            weights: NetworkPair, networks: NetworkPair, pack: Pack, row: Int[Array, "1 T"]
        ) -> tuple[Float[Array, ""], BatchSums]:
            filled_networks = _fill_weights(networks, weights)
            sums = objective.sum_micro_batch(
                *filled_networks, shards, online, pack, row, batch, counts
            )
            return objective.total_loss(sums, counts), sums

        def add_micro_batch(
            number: Int[Array, ""], carry: tuple[PyTree, BatchSums]
        ) -> tuple[PyTree, BatchSums]:
            pack, row = gather_pack(batch, mini_batch, number, self.micro_tokens, filler)
            gathered_weights, scatter_gradients, networks = jax.vjp(
                gather_networks, weights, has_aux=True
            )
            pack = pack._replace(tokens=order_after(pack.tokens, shards.signal_gathering(networks)))
            if not learning:
                return carry[0], carry[1].merge_with(
                    compute_loss(gathered_weights, networks, pack, row)[1]
                )
            (_, sums), gradients = jax.value_and_grad(compute_loss, has_aux=True)(
                gathered_weights, networks, pack, row
            )
            (gradients,) = scatter_gradients(
                trained_shards.order_collectives(
                    gradients, trained_shards.signal_layer_gradients(gradients)
                )
            )
            return jax.tree.map(jnp.add, carry[0], gradients), carry[1].merge_with(sums)

        zero_gradients = jax.tree.map(jnp.zeros_like, weights if learning else (None, None))
        # The plan says at run time how many micro-batches there are: one program for every batch.
        gradients, sums = lax.fori_loop(
            0,
            batch.plan.micro_batch_count[mini_batch],
            add_micro_batch,
            (zero_gradients, objective.empty_sums(counts, policy.config)),
        )
        # once a batch, and not for every micro-batch
        return (
            trained_shards.sum_gradients(gradients) if learning else gradients,
            sums.sum_over_shards(),
            counts,
        )

    # ---- logprobs

    def _logprobs_on_shard(
        self,
        policy: Decoder | AdaptedDecoder,
        first_mini_batch: Int[Array, ""],
        batch: TrainBatch,
        shards: WeightShards,
    ) -> tuple[Float[Array, "B S"], TrainBatch]:
        filler, (row_count, row_length) = filler_token(batch), batch.tokens.shape
        policy, _ = self._delay_gathering((policy, None), shards, filler)

        def score_micro_batch(
            mini_batch: Int[Array, ""], number: Int[Array, ""], logprobs: Float[Array, "B S"]
        ) -> Float[Array, "B S"]:
            pack, row = gather_pack(batch, mini_batch, number, self.micro_tokens, filler)
            networks = shards.gather_outside_layers(policy, None)
            pack = pack._replace(tokens=order_after(pack.tokens, shards.signal_gathering(networks)))
            pack_logprobs = self.objective.compute_logprobs(networks[0], shards, pack)
            # what is not learnt is beyond the rows, and dropped
            row = jnp.where(pack.loss_mask, row, row_count)
            next_positions = jnp.minimum(pack.positions + 1, row_length - 1)
            return logprobs.at[row, next_positions].set(
                pack_logprobs.astype(logprobs.dtype), mode="drop"
            )

        def score_mini_batch(
            mini_batch: Int[Array, ""], logprobs: Float[Array, "B S"]
        ) -> Float[Array, "B S"]:
            micro_batch_count = jnp.where(
                mini_batch >= first_mini_batch, batch.plan.micro_batch_count[mini_batch], 0
            )
            return lax.fori_loop(
                0, micro_batch_count, partial(score_micro_batch, mini_batch), logprobs
            )

        zeros = jnp.zeros((row_count, row_length), self.objective.accum_dtype)
        logprobs = lax.fori_loop(0, len(batch.plan.micro_batch_count), score_mini_batch, zeros)
        # What is read of the batch later, on any shard, comes after this on all of them.
        ready = lax.psum(signal_ready(logprobs).astype(jnp.int32), ROWS)
        return logprobs, order_batch_after(batch, ready) if self.objective.needs_order else batch

    # ---- states

    def _states_on_shard(
        self, policy: Decoder | AdaptedDecoder, batch: TrainBatch, shards: WeightShards
    ) -> PolicyStates:
        filler, (row_count, row_length) = filler_token(batch), batch.tokens.shape
        policy, _ = self._delay_gathering((policy, None), shards, filler)
        config, mini_batch = policy.config, jnp.int32(0)
        taps = self.objective.taps

        def make_zeros(width: int) -> Float[Array, "b S D"]:
            return jnp.zeros((row_count, row_length, width), config.dtype)

        def add_micro_batch(number: Int[Array, ""], states: PolicyStates) -> PolicyStates:
            pack, _ = gather_pack(batch, mini_batch, number, self.micro_tokens, filler)
            networks = shards.gather_outside_layers(policy, None)
            tokens = order_after(pack.tokens, shards.signal_gathering(networks))
            forward = attach_lora(networks[0])(
                tokens,
                pack.positions,
                taps=taps,
                first=pack.text_start,
                prepare_layer=shards.gather_layer,
            )
            pack_states = PolicyStates(forward.hidden, forward.taps if taps else None)
            pack_states = jax.tree.map(lambda leaf: leaf.astype(config.dtype), pack_states)
            return scatter_pack(pack_states, batch, mini_batch, number, states)

        tap_zeros = make_zeros(len(taps) * config.embed) if taps else None
        return lax.fori_loop(
            0,
            batch.plan.micro_batch_count[0],
            add_micro_batch,
            PolicyStates(make_zeros(config.embed), tap_zeros),
        )


def order_batch_after(batch: TrainBatch, *results: Num[Array, ""]) -> TrainBatch:
    """The batch, of which whatever is read comes after numbers that are `results`."""
    signals = [signal_ready(result) for result in results]
    return batch.replace(
        tokens=order_after(batch.tokens, signals), loss_mask=order_after(batch.loss_mask, signals)
    )


def _batch_specs(batch: TrainBatch) -> Any:
    """How a batch is split over `data`."""
    specs = jax.tree.map(lambda leaf: P(ROWS), batch)
    plan = batch.plan.replace(
        row_order=P(ROWS),
        micro_batch=P(None, ROWS),
        text_start=P(None, ROWS),
        micro_batch_count=P(),
    )
    return specs.replace(plan=plan)


def _fill_weights(networks: NetworkPair, weights: NetworkPair) -> NetworkPair:
    """Networks with what is trained of them from `weights`."""
    policy, draft = (
        network
        if trained_weights is None
        else optimizers.replace_parameters(network, trained_weights)
        for network, trained_weights in zip(networks, weights, strict=True)
    )
    return policy, draft
