"""The learner's input: rollout rows, and a plan that packs them into micro-batches.

Rows are gathered one micro-batch at a time.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxspec.kernels.order import CollectiveOrder
from jaxspec.mesh import (
    ROWS,
    replicated_sharding,
    row_shard_count,
    row_sharding,
    update_row_sharding,
)
from jaxspec.processes.global_arrays import from_host_values
from jaxspec.state import UNDRAFTED, AnyArray, Pack, PackingPlan, PyTree, Rollout, Tree, pytree


class PolicyStates(NamedTuple):
    """Policy outputs at each token."""

    hidden: Float[AnyArray, "B S D"]
    """Hidden states after the final norm."""
    taps: Float[AnyArray, "B S C"] | None
    """Aux hidden states. None if the draft does not use them."""


class NoStates(NamedTuple):
    """No stored policy outputs. Every pass runs the policy."""


NO_STATES = NoStates()


@pytree
class TrainBatch(Tree):
    """Rows to learn from, without prompts, groups and slots."""

    tokens: Int[AnyArray, "B S"]
    sampled_logprobs: Float[AnyArray, "B S"]
    """Log-probability of each token under the weights and distribution that sampled it."""
    loss_mask: Bool[AnyArray, "B S"]
    """Tokens to learn from, which are those that the policy sampled.

    Tokens after a row's last such token are never read.
    """
    advantages: Float[AnyArray, "B ..."]
    """Advantage of each row, or of each token at its position."""
    version: Int[AnyArray, " B"]
    """Weight version that sampled the row (number of batches trained on)."""
    plan: PackingPlan
    states: PolicyStates | NoStates = NO_STATES
    """Outputs of the policy, if they are stored. Only a policy that is not trained reads them."""


@pytree
class PlacedBatch(TrainBatch):
    """A batch with every row at its place in the plan."""

    old_logprobs: Float[Array, "B S"]
    """Log-probabilities under the policy before the updates on this batch."""
    uses_current_pass: Bool[Array, " B"]
    """Rows that use the logprobs of the current pass in place of `old_logprobs`."""
    is_current: Bool[Array, " B"]
    """Rows sampled by the policy before the updates on this batch."""
    reference_logprobs: Float[Array, "B S"]
    """Log-probabilities under the reference policy; zeros if no loss uses them."""

    @classmethod
    def from_placed_rows(cls, batch: TrainBatch) -> "PlacedBatch":
        """Adds defaults, with which the policy of a pass is also the old policy."""
        rows = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
        zeros, all_rows = jnp.zeros_like(batch.sampled_logprobs), jnp.ones_like(batch.version, bool)
        return cls(
            **rows,
            old_logprobs=zeros,
            uses_current_pass=all_rows,
            is_current=all_rows,
            reference_logprobs=zeros,
        )

    def read_after(self, results: PyTree, order: CollectiveOrder) -> "PlacedBatch":
        """Returns the batch, whose tokens and loss mask are read only once `results` exist."""
        tokens, loss_mask = order.run_after((self.tokens, self.loss_mask), results)
        return self.replace(tokens=tokens, loss_mask=loss_mask)


def response_mask(rollout: Rollout) -> Bool[Array, "B S"]:
    """Masks the tokens that the policy sampled."""
    return rollout.origin >= UNDRAFTED


def count_tokens_to_read(loss_mask: Any) -> Any:
    """Counts the tokens of each row to read.

    Returns [B] for a loss mask [B S]. The counted tokens are the tokens before the row's last
    label.
    """
    library: Any = jnp if isinstance(loss_mask, jax.Array) else np
    return library.max(
        library.where(loss_mask, library.arange(loss_mask.shape[1], dtype=np.int32), 0), axis=1
    )


def plan_packing(
    token_counts: Int[np.ndarray, " B"],
    shard_count: int,
    micro_tokens: int,
    mini_batch: Int[np.ndarray, " B"],
) -> PackingPlan:
    """Assigns rows to shards and micro-batches, on the host.

    Args:
      token_counts: Number of tokens to read from each row. 0 leaves the row out.
      shard_count: Number of data shards.
      micro_tokens: Tokens of a micro-batch on each shard.
      mini_batch: Mini-batch of each row.

    Raises:
      ValueError: A row has more than `micro_tokens` tokens to read.
    """
    if token_counts.max(initial=0) > micro_tokens:
        raise ValueError(
            f"a row of {token_counts.max()} tokens does not fit a micro-batch of {micro_tokens}"
        )
    mini_batch_count = int(mini_batch.max(initial=0)) + 1
    places_per_shard = len(token_counts) // shard_count
    row_order = np.zeros(len(token_counts), np.int32)
    micro_batch_count = np.zeros(mini_batch_count, np.int32)
    micro_batch, text_start = (
        np.full((mini_batch_count, len(token_counts)), -1, np.int32),
        np.zeros((mini_batch_count, len(token_counts)), np.int32),
    )
    filled_places = np.zeros(shard_count, int)
    for number in range(mini_batch_count):
        shard_load = np.zeros(shard_count, int)
        # positions left in each pack of each shard
        free_positions: list[list[int]] = [[] for _ in range(shard_count)]
        rows = np.flatnonzero((mini_batch == number) & (token_counts > 0))
        # Longest first, each to the shard with the fewest tokens and a free place. First fit in
        # this order gives micro-batch n texts of similar lengths on every shard.
        for row in rows[np.argsort(-token_counts[rows], kind="stable")]:
            candidate_load = np.where(
                filled_places < places_per_shard, shard_load, np.iinfo(int).max
            )
            shard = int(np.argmin(candidate_load)) if shard_count > 1 else 0
            place, length = shard * places_per_shard + filled_places[shard], int(token_counts[row])
            row_order[place], filled_places[shard], shard_load[shard] = (
                row,
                filled_places[shard] + 1,
                shard_load[shard] + length,
            )
            pack, start = _first_fit(free_positions[shard], length, micro_tokens)
            micro_batch[number, place], text_start[number, place] = pack, start
        # Shards run the same number of micro-batches, since collectives need all of them.
        micro_batch_count[number] = max(map(len, free_positions))
    # Rows without tokens come last, so that all others have a choice of places.
    empty_places = [
        place
        for place in range(len(token_counts))
        if place % places_per_shard >= filled_places[place // places_per_shard]
    ]
    row_order[empty_places] = np.flatnonzero(token_counts == 0)
    plan: dict[str, Any] = {
        "row_order": row_order,
        "micro_batch": micro_batch,
        "text_start": text_start,
        "micro_batch_count": micro_batch_count,
    }
    return PackingPlan(**plan)


def _first_fit(free_positions: list[int], length: int, micro_tokens: int) -> tuple[int, int]:
    """Finds or adds a pack with `length` free positions.

    Returns the pack's index and the position at which the text starts.
    """
    number = next(
        (number for number, free in enumerate(free_positions) if free >= length),
        len(free_positions),
    )
    if number == len(free_positions):
        free_positions.append(micro_tokens)
    free_positions[number] -= length
    return number, micro_tokens - free_positions[number] - length


def build_text_batch(
    tokens: Int[np.ndarray, "B S"],
    loss_mask: Bool[np.ndarray, "B S"],
    mesh: Mesh,
    micro_tokens: int,
    states: PolicyStates | NoStates = NO_STATES,
) -> TrainBatch:
    """Builds a batch of supervised texts on `mesh`.

    Micro-batches have `micro_tokens` positions per shard.

    Raises:
      ValueError: As in `plan_packing`.
    """
    row_zeros, shards = np.zeros(len(tokens), np.int32), row_shard_count(mesh)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "sampled_logprobs": np.zeros(tokens.shape, np.float32),
        "loss_mask": loss_mask,
        "advantages": row_zeros.astype(np.float32),
        "version": row_zeros,
        "plan": plan_packing(count_tokens_to_read(loss_mask), shards, micro_tokens, row_zeros),
        "states": states,
    }
    batch = TrainBatch(**fields)
    layout = jax.tree.map(lambda _: row_sharding(mesh), batch).replace(plan=plan_shardings(mesh))

    def place_on_mesh(values: Any, sharding: Any) -> jax.Array:
        host = np.asarray(values)
        shape = jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding)
        return from_host_values(shape, host)

    return jax.tree.map(place_on_mesh, batch, layout)


def plan_shardings(mesh: Mesh) -> Any:
    """Returns the shardings of a plan."""
    by_row, by_update = row_sharding(mesh), update_row_sharding(mesh)
    return jax.eval_shape(lambda: empty_plan(1)).replace(
        row_order=by_row,
        micro_batch=by_update,
        text_start=by_update,
        micro_batch_count=replicated_sharding(mesh),
    )


def empty_plan(row_count: int, mini_batch_count: int = 1) -> PackingPlan:
    """Returns a plan without micro-batches."""
    zeros = jnp.zeros((mini_batch_count, row_count), jnp.int32)
    return PackingPlan(
        row_order=jnp.arange(row_count, dtype=jnp.int32),
        micro_batch=zeros - 1,
        text_start=zeros,
        micro_batch_count=jnp.zeros((mini_batch_count,), jnp.int32),
    )


def move_rows_to_plan(batch: TrainBatch, shard_count: int) -> TrainBatch:
    """Moves every row to its place in the plan. Runs inside a `shard_map`."""
    plan = batch.plan
    rows = gather_from_shards(batch.replace(plan=None), plan.row_order, shard_count)
    return rows.replace(plan=plan)


def gather_from_shards(tree: PyTree, order: Int[Array, " n"], shard_count: int) -> PyTree:
    """Gathers entries of the first axis from all shards.

    `order` numbers them over all shards. Runs inside a `shard_map`.
    """
    # Parts travel around a ring, and each shard copies its entries from the part that passes. So
    # no shard ever holds more than twice its own part.
    if shard_count == 1:
        return _take_rows(order, tree)
    local_count = len(order)
    shard_index = lax.axis_index(ROWS).astype(jnp.int32)
    # Each shard receives the part of the next one.
    ring = [((shard + 1) % shard_count, shard) for shard in range(shard_count)]

    def exchange(distance: Int[Array, ""], carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        gathered, visiting = carry
        is_visiting = order // local_count == (shard_index + distance) % shard_count
        gathered = jax.tree.map(
            lambda old, new: jnp.where(is_visiting.reshape(-1, *(1,) * (old.ndim - 1)), new, old),
            gathered,
            _take_rows(order % local_count, visiting),
        )
        return gathered, jax.tree.map(lambda leaf: lax.ppermute(leaf, ROWS, ring), visiting)

    gathered, _ = lax.fori_loop(
        0, shard_count, exchange, (jax.tree.map(jnp.zeros_like, tree), tree)
    )
    return gathered


def _take_rows(places: Int[Array, " n"], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.take(leaf, places, axis=0), tree)


def filler_token(batch: TrainBatch) -> Int[Array, ""]:
    """Returns the token for positions without a text.

    The token is the first one of a row that is read, or 0 without such rows. Runs inside a
    `shard_map`.
    """
    # An arbitrary token might make activations overflow. The mask would not help in the backward
    # pass, since zero cotangents times NaN are NaN.
    is_read = count_tokens_to_read(batch.loss_mask) > 0
    return lax.pmax(
        jnp.max(
            jnp.where(is_read & jnp.any(batch.plan.micro_batch >= 0, axis=0), batch.tokens[:, 0], 0)
        ),
        ROWS,
    )


def gather_pack(
    batch: TrainBatch,
    mini_batch: Int[Array, ""],
    micro_batch: Int[Array, ""],
    micro_tokens: int,
    filler: Int[Array, ""],
) -> tuple[Pack, Int[Array, "1 T"]]:
    """Gathers this shard's pack of a micro-batch.

    Also returns the batch row that each position came from.
    """
    row_count, row_length = batch.tokens.shape
    plan = batch.plan
    # Rows of other micro-batches start past the end, where `mode="drop"` ignores them.
    text_starts = jnp.where(
        plan.micro_batch[mini_batch] == micro_batch, plan.text_start[mini_batch], micro_tokens
    )
    row_at_start = (
        jnp.full((micro_tokens,), -1, jnp.int32)
        .at[text_starts]
        .set(jnp.arange(row_count, dtype=jnp.int32), mode="drop")
    )
    indices = jnp.arange(micro_tokens, dtype=jnp.int32)
    # The latest start at or before a position is that of its text.
    text_start = lax.cummax(jnp.where(row_at_start >= 0, indices, 0))
    row = jnp.maximum(row_at_start[text_start], 0)
    is_text = (row_at_start[text_start] >= 0) & (
        indices - text_start < count_tokens_to_read(batch.loss_mask)[row]
    )
    # A position without a text is a text of its own, so attention never leaves it.
    text_start = jnp.where(is_text, text_start, indices)
    positions = indices - text_start
    next_positions = jnp.minimum(positions + 1, row_length - 1)
    pack = Pack(
        tokens=jnp.where(is_text, batch.tokens[row, positions], filler),
        labels=batch.tokens[row, next_positions],
        loss_mask=is_text & batch.loss_mask[row, next_positions],
        positions=positions,
        text_start=text_start,
    )
    return jax.tree.map(lambda leaf: leaf[None], pack), row[None]


def scatter_pack(
    tree: PyTree,
    batch: TrainBatch,
    mini_batch: Int[Array, ""],
    micro_batch: Int[Array, ""],
    old_values: PyTree,
) -> PyTree:
    """Writes a pack's values to their rows and tokens.

    Values [1 T ...] become [b S ...]. Rows of other packs keep their old values. Values after a
    row's last token read are undefined.
    """
    plan, row_length = batch.plan, batch.tokens.shape[1]
    is_in_pack = (plan.micro_batch[mini_batch] == micro_batch)[:, None, None]
    pack_positions = plan.text_start[mini_batch][:, None] + jnp.arange(row_length, dtype=jnp.int32)
    return jax.tree.map(
        lambda pack_values, old: jnp.where(
            is_in_pack, jnp.take(pack_values[0], pack_positions, axis=0, mode="clip"), old
        ),
        tree,
        old_values,
    )


def count_response_tokens(pack: Pack) -> Int[Array, "B T"]:
    """Counts labels before each label in its text.

    In a rollout this is the number of response tokens so far.
    """
    earlier_labels = jnp.cumsum(pack.loss_mask, axis=1, dtype=jnp.int32) - pack.loss_mask.astype(
        jnp.int32
    )
    return earlier_labels - jnp.take_along_axis(earlier_labels, pack.text_start, axis=1)


def rows_to_pack(tokens: Int[Array, "B S"], loss_mask: Bool[Array, "B S"]) -> Pack:
    """Converts padded rows to sequences of one text each."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    shift = ((0, 0), (0, 1))
    return Pack(
        tokens=tokens,
        labels=jnp.pad(tokens[:, 1:], shift),
        loss_mask=jnp.pad(loss_mask[:, 1:], shift),
        positions=positions,
        text_start=jnp.zeros_like(positions),
    )
