"""Passes of the learner over a batch: for gradients, sums, logprobs and policy states.

Each runs in a `shard_map` that is manual over the row axes, so a shard computes its own rows from
embedding to loss. Shards exchange weights and gradients (`rl/fsdp.py`), sums (`rl/batch_sums.py`),
rows (`rl/train_batch.py`), and tokens of experts (`models/moe.py`).
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
from jaxtyping import Array, Bool, Float, Int

from jaxspec.kernels.order import signal_ready
from jaxspec.mesh import ROWS, keep_row_axes, row_shard_count, shard_map_rows
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.rl import optimizers
from jaxspec.rl.batch_sums import BatchCounts, BatchSums
from jaxspec.rl.fsdp import NetworkPair, WeightShards
from jaxspec.rl.loss_terms import LogprobGap
from jaxspec.rl.objective import MicroBatchObjective
from jaxspec.rl.train_batch import (
    PlacedBatch,
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
    """Passes over batches placed by `place_rows`."""

    mesh: Mesh
    dtype: str
    """Data type of matrix products."""
    micro_tokens: int
    """Tokens of a micro-batch on each data shard."""
    objective: MicroBatchObjective
    train_layout: Callable[[PyTree], PyTree]
    """Returns the shardings of networks."""

    def place_rows(self, batch: TrainBatch) -> PlacedBatch:
        """Moves every row to its place in the plan."""
        specs = _batch_specs(batch)
        move_rows = partial(move_rows_to_plan, shard_count=row_shard_count(self.mesh))
        placed_rows = shard_map_rows(self.mesh, move_rows, (specs,), specs)(batch)
        return PlacedBatch.from_placed_rows(placed_rows)

    def compute_gradients(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: PlacedBatch,
        mini_batch: Int[Array, ""],
    ) -> tuple[PyTree, BatchSums, BatchCounts]:
        """Computes gradients of a mini-batch.

        They have the train layout and at least float32. Also returns sums and counts over the
        mini-batch. The draft is trained only if `online`.
        """
        return self._run_pass(policy, draft, online, batch, mini_batch, learning=True)

    def compute_sums(
        self, policy: Decoder | AdaptedDecoder, draft: PyTree, batch: PlacedBatch
    ) -> tuple[BatchSums, BatchCounts]:
        """Computes sums and counts by forward passes.

        Reads the first mini-batch.
        """
        _, sums, counts = self._run_pass(
            policy, draft, jnp.ones((), bool), batch, jnp.int32(0), learning=False
        )
        return sums, counts

    def compute_logprobs(
        self,
        policy: Decoder | AdaptedDecoder,
        first_mini_batch: Int[Array, ""] | int,
        batch: PlacedBatch,
    ) -> tuple[Float[Array, "B S"], PlacedBatch]:
        """Computes logprobs of the labels under a policy.

        Mini-batches before `first_mini_batch` are left out. Each logprob is stored at its token's
        position, and all others are zero. Also returns the batch, tied to this pass so that later
        reads are ordered after it.
        """
        shards, specs = self._make_weight_shards((policy, None))
        run_on_shard = partial(self._logprobs_on_shard, shards=shards)
        batch_specs = _batch_specs(batch)
        return shard_map_rows(
            self.mesh, run_on_shard, (specs[0], P(), batch_specs), (P(ROWS), batch_specs)
        )(policy, jnp.asarray(first_mini_batch, jnp.int32), batch)

    def compare_logprobs(
        self, logprobs: Float[Array, "B S"], first_mini_batch: int, batch: PlacedBatch
    ) -> tuple[LogprobGap, PlacedBatch]:
        """Compares `logprobs` with the recorded ones.

        Mini-batches before `first_mini_batch` and rows of older versions are left out. Also returns
        the batch, tied to the sums.
        """

        def compare_on_shard(
            logprobs: Float[Array, "b S"], batch: PlacedBatch
        ) -> tuple[LogprobGap, PlacedBatch]:
            is_read = jnp.any(batch.plan.micro_batch[first_mini_batch:] >= 0, axis=0)
            is_compared = (is_read & batch.is_current)[:, None]
            # Nothing predicts a row's first token.
            loss_mask = batch.loss_mask.at[:, 0].set(False) & is_compared
            recorded_logprobs = batch.sampled_logprobs.astype(logprobs.dtype)
            gap = LogprobGap.from_logprobs(logprobs, recorded_logprobs, loss_mask)
            max_absolute = lax.pmax(gap.max_absolute, ROWS)
            # Independent collectives may start in different order on CPU devices and deadlock.
            gap = self.objective.order.run_after(gap, max_absolute)
            gap = lax.psum(gap, ROWS)._replace(max_absolute=max_absolute)
            return gap, batch.read_after(gap, self.objective.order)

        batch_specs = _batch_specs(batch)
        compare = shard_map_rows(
            self.mesh, compare_on_shard, (P(ROWS), batch_specs), (P(), batch_specs)
        )
        return compare(logprobs, batch)

    def restore_row_order(self, placed_values: PyTree, batch: PlacedBatch) -> PyTree:
        """Moves arrays [B ...] back to row order."""

        def restore_on_shard(values: PyTree, row_order: Int[Array, " b"]) -> PyTree:
            # Collectives of the pass that computed the values must run first.
            row_order = self.objective.order.run_after(row_order, values)
            full_order = lax.all_gather(row_order, ROWS, tiled=True)
            row_places = jnp.arange(len(full_order), dtype=jnp.int32)
            # Inverts the permutation: place of each row.
            row_places = jnp.zeros_like(full_order).at[full_order].set(row_places)
            first_row = lax.axis_index(ROWS) * len(row_order)
            local_places = lax.dynamic_slice_in_dim(row_places, first_row, len(row_order))
            return gather_from_shards(values, local_places, row_shard_count(self.mesh))

        return shard_map_rows(self.mesh, restore_on_shard, (P(ROWS), P(ROWS)), P(ROWS))(
            placed_values, batch.plan.row_order
        )

    def compute_states(self, policy: Decoder | AdaptedDecoder, batch: TrainBatch) -> PolicyStates:
        """Computes the policy states that the draft reads.

        They are in row order, one per token. The batch's rows are not placed yet.
        """
        placed_batch = self.place_rows(batch)
        shards, specs = self._make_weight_shards((policy, None))
        run_on_shard = partial(self._states_on_shard, shards=shards)
        batch_specs = _batch_specs(placed_batch)
        compute = shard_map_rows(self.mesh, run_on_shard, (specs[0], batch_specs), P(ROWS))
        return self.restore_row_order(compute(policy, placed_batch), placed_batch)

    # ---- shared by all passes

    def _make_weight_shards(self, networks: NetworkPair) -> tuple[WeightShards, NetworkPair]:
        """Returns the networks' shards for collectives, and their specs over the row axes."""
        specs: Any = jax.tree.map(lambda sharding: sharding.spec, self.train_layout(networks))
        shards = WeightShards(specs, self.dtype, self.objective.order)
        return shards, jax.tree.map(keep_row_axes, specs)

    # ---- gradients and sums

    def _run_pass(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: PlacedBatch,
        mini_batch: Int[Array, ""],
        learning: bool,
    ) -> tuple[PyTree, BatchSums, BatchCounts]:
        shards, specs = self._make_weight_shards((policy, draft))
        run_on_shard = partial(self._run_on_shard, shards=shards, learning=learning)
        gradients = self._select_trained(specs) if learning else (None, None)
        inputs = (*specs, P(), _batch_specs(batch), P())
        mapped = shard_map_rows(self.mesh, run_on_shard, inputs, (gradients, P(), P()))
        return mapped(policy, draft, online, batch, mini_batch)

    def _select_trained(self, networks: NetworkPair) -> NetworkPair:
        """Selects trained weights. Untrained networks have none."""
        policy, draft = (
            optimizers.trainable_parameters(network)
            if objective.is_trained
            else optimizers.no_parameters(network)
            for objective, network in zip(
                (self.objective.policy, self.objective.draft), networks, strict=True
            )
        )
        return policy, draft

    def _run_on_shard(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        online: Bool[Array, ""],
        batch: PlacedBatch,
        mini_batch: Int[Array, ""],
        shards: WeightShards,
        learning: bool,
    ) -> tuple[PyTree, BatchSums, BatchCounts]:
        """Runs a pass on one shard's micro-batches."""
        objective = self.objective
        counts, filler = objective.compute_counts(batch, mini_batch), filler_token(batch)
        policy, draft = shards.gather_after((policy, draft), filler)
        weights = self._select_trained((policy, draft))
        trained_shards = shards.map_specs(self._select_trained)

        def gather_networks(weights: NetworkPair) -> tuple[NetworkPair, NetworkPair]:
            networks = shards.gather_outside_layers(*_replace_weights((policy, draft), weights))
            return self._select_trained(networks), networks

        def compute_loss(
            weights: NetworkPair, networks: NetworkPair, pack: Pack, row: Int[Array, "1 T"]
        ) -> tuple[Float[Array, ""], BatchSums]:
            complete_networks = _replace_weights(networks, weights)
            sums = objective.sum_micro_batch(
                *complete_networks, shards, online, pack, row, batch, counts
            )
            return objective.total_loss(sums, counts), sums

        def add_micro_batch(
            number: Int[Array, ""], carry: tuple[PyTree, BatchSums]
        ) -> tuple[PyTree, BatchSums]:
            pack, row = gather_pack(batch, mini_batch, number, self.micro_tokens, filler)
            # Gathered anew for every micro-batch, so that no full copy outlives one.
            gathered_weights, scatter_gradients, networks = jax.vjp(
                gather_networks, weights, has_aux=True
            )
            pack = shards.read_after_gathering(pack, networks)
            if not learning:
                return carry[0], carry[1].merge_with(
                    compute_loss(gathered_weights, networks, pack, row)[1]
                )
            (_, sums), gradients = jax.value_and_grad(compute_loss, has_aux=True)(
                gathered_weights, networks, pack, row
            )
            (gradients,) = scatter_gradients(trained_shards.scatter_after_layers(gradients))
            return jax.tree.map(jnp.add, carry[0], gradients), carry[1].merge_with(sums)

        zero_gradients = jax.tree.map(jnp.zeros_like, weights if learning else (None, None))
        # The count is data, not a constant, so that one program serves every batch.
        gradients, sums = lax.fori_loop(
            0,
            batch.plan.micro_batch_count[mini_batch],
            add_micro_batch,
            (zero_gradients, objective.empty_sums(counts, policy.config)),
        )
        # Summed over shards once per pass, which takes fewer collectives than per micro-batch.
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
        batch: PlacedBatch,
        shards: WeightShards,
    ) -> tuple[Float[Array, "B S"], PlacedBatch]:
        filler, (row_count, row_length) = filler_token(batch), batch.tokens.shape
        policy, _ = shards.gather_after((policy, None), filler)

        def score_micro_batch(
            mini_batch: Int[Array, ""], number: Int[Array, ""], logprobs: Float[Array, "B S"]
        ) -> Float[Array, "B S"]:
            pack, row = gather_pack(batch, mini_batch, number, self.micro_tokens, filler)
            networks = shards.gather_outside_layers(policy, None)
            pack = shards.read_after_gathering(pack, networks)
            pack_logprobs = self.objective.compute_logprobs(networks[0], shards, pack)
            # Labels outside the loss mask get a row past the end, which `mode="drop"` ignores.
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
        # Later reads of the batch, on any shard, must run after this pass on all shards.
        ready = lax.psum(signal_ready(logprobs).astype(jnp.int32), ROWS)
        return logprobs, batch.read_after(ready, self.objective.order)

    # ---- states

    def _states_on_shard(
        self, policy: Decoder | AdaptedDecoder, batch: PlacedBatch, shards: WeightShards
    ) -> PolicyStates:
        filler, (row_count, row_length) = filler_token(batch), batch.tokens.shape
        policy, _ = shards.gather_after((policy, None), filler)
        config, mini_batch = policy.config, jnp.int32(0)
        taps = self.objective.taps

        def make_zeros(width: int) -> Float[Array, "b S D"]:
            return jnp.zeros((row_count, row_length, width), config.dtype)

        def add_micro_batch(number: Int[Array, ""], states: PolicyStates) -> PolicyStates:
            pack, _ = gather_pack(batch, mini_batch, number, self.micro_tokens, filler)
            networks = shards.gather_outside_layers(policy, None)
            pack = shards.read_after_gathering(pack, networks)
            forward = attach_lora(networks[0])(
                pack.tokens,
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


def _batch_specs(batch: TrainBatch) -> Any:
    """Returns a batch's specs over the row axes."""
    specs = jax.tree.map(lambda leaf: P(ROWS), batch)
    plan = batch.plan.replace(
        row_order=P(ROWS),
        micro_batch=P(None, ROWS),
        text_start=P(None, ROWS),
        micro_batch_count=P(),
    )
    return specs.replace(plan=plan)


def _replace_weights(networks: NetworkPair, weights: NetworkPair) -> NetworkPair:
    """Replaces the trained weights of networks."""
    policy, draft = map(optimizers.replace_parameters, networks, weights)
    return policy, draft
