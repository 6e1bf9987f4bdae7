"""What the learner reads: rows as they were left, and a plan that packs their texts into
micro-batches without ever copying all of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxspec.mesh import (
    ROWS,
    replicated_sharding,
    row_shard_count,
    row_sharding,
    update_row_sharding,
)
from jaxspec.processes.global_arrays import from_host_values
from jaxspec.state import AnyArray, Pack, PackingPlan, PyTree, Tree, pytree


class PolicyStates(NamedTuple):
    """What a pass of the policy gives at each token of some rows."""

    hidden: Float[AnyArray, "B S D"]
    """After the final norm."""
    taps: Float[AnyArray, "B S C"] | None
    """Where the draft reads the residual stream; None: it does not."""


@pytree
class TrainBatch(Tree):
    """Rows to learn from. It knows nothing of prompts, groups or slots."""

    tokens: Int[AnyArray, "B S"]
    sampled_logprobs: Float[AnyArray, "B S"]
    """Of each token under the weights and the distribution that sampled it."""
    loss_mask: Bool[AnyArray, "B S"]
    """The tokens to learn from: those that the policy sampled. Nothing after a row's last one is
    read."""
    advantages: Float[AnyArray, "B ..."]
    """Of each row, or of each token, at its place."""
    version: Int[AnyArray, " B"]
    """Batches that the policy had learnt from when it sampled the row."""
    plan: PackingPlan
    old_logprobs: Float[AnyArray, "B S"] | None = None
    """Of each token under the policy before the updates on this batch; None: that of the pass that
    reads it."""
    is_current: Bool[AnyArray, " B"] | None = None
    """Rows that were sampled by the policy before the updates on this batch; None: all."""
    is_on_policy: Bool[AnyArray, " B"] | None = None
    """Rows whose old policy is the one of the pass that reads them, whatever `old_logprobs` says;
    None: none of them."""
    reference_logprobs: Float[AnyArray, "B S"] | None = None
    """Of each token under the reference policy; None: no loss asks for them."""
    states: PolicyStates | None = None
    """Of the policy, which is then not run: it does not learn. None: the pass runs it."""


def read_lengths(loss_mask: Any) -> Any:
    """Tokens of each row that a pass reads, [B] of a mask [B S] of the tokens to learn: those
    before the last of these."""
    library: Any = jnp if isinstance(loss_mask, jax.Array) else np
    return library.max(
        library.where(loss_mask, library.arange(loss_mask.shape[1], dtype=np.int32), 0), axis=1
    )


def plan_packing(
    token_counts: Int[np.ndarray, " B"],
    shard_count: int,
    micro_tokens: int,
    mini_batch: Int[np.ndarray, " B"] | None = None,
) -> PackingPlan:
    """A plan for rows of which `read` tokens are read each; 0: the row is left out. On the host.

    The rows of a mini-batch are dealt to the shards longest first, each to the shard with the least
    text that has a place left, and packed by first fit in that order: so micro-batch n has texts of
    about the same length on every shard.

    Args:
      read: see above.
      shard_count: of the data.
      tokens: of a micro-batch, on each shard.
      mini_batch: the number of the one that each row belongs to; None: there is one.

    Raises:
      ValueError: a row has more than `tokens` tokens to read.
    """
    if token_counts.max(initial=0) > micro_tokens:
        raise ValueError(
            f"a row of {token_counts.max()} tokens does not fit a micro-batch of {micro_tokens}"
        )
    mini_batches = np.zeros(len(token_counts), np.int32) if mini_batch is None else mini_batch
    mini_batch_count, places_per_shard = (
        int(mini_batches.max(initial=0)) + 1,
        len(token_counts) // shard_count,
    )
    row_order, micro_batch_count = (
        np.zeros(len(token_counts), np.int32),
        np.zeros(mini_batch_count, np.int32),
    )
    micro_batch, text_start = (
        np.full((mini_batch_count, len(token_counts)), -1, np.int32),
        np.zeros((mini_batch_count, len(token_counts)), np.int32),
    )
    filled_places = np.zeros(shard_count, int)
    for number in range(mini_batch_count):
        shard_load = np.zeros(shard_count, int)
        # positions left in each pack of each shard
        free_positions: list[list[int]] = [[] for _ in range(shard_count)]
        rows = np.flatnonzero((mini_batches == number) & (token_counts > 0))
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
        micro_batch_count[number] = max(map(len, free_positions))
    # last, so that what is read has its choice of places in every mini-batch
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
    """The first pack with `length` positions left, or a new one, and where in it a text starts."""
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
    states: PolicyStates | None = None,
) -> TrainBatch:
    """A batch of texts that nobody sampled, on the devices of `mesh`, planned for micro-batches of
    `micro` positions a shard; with the policy's `states`, if they are known.

    Raises:
      ValueError: as `plan_packing`.
    """
    row_zeros = np.zeros(len(tokens), np.int32)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "sampled_logprobs": np.zeros(tokens.shape, np.float32),
        "loss_mask": loss_mask,
        "advantages": row_zeros.astype(np.float32),
        "version": row_zeros,
        "plan": plan_packing(read_lengths(loss_mask), row_shard_count(mesh), micro_tokens),
        "states": states,
    }
    batch = TrainBatch(**fields)
    layout = jax.tree.map(lambda _: row_sharding(mesh), batch).replace(plan=plan_shardings(mesh))

    def place_on_mesh(values: Any, sharding: Any) -> jax.Array:
        host = np.asarray(values)
        return from_host_values(
            jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding), host
        )

    return jax.tree.map(place_on_mesh, batch, layout)


def plan_shardings(mesh: Mesh) -> Any:
    """Shardings of a plan."""
    by_row, by_update = row_sharding(mesh), update_row_sharding(mesh)
    return jax.eval_shape(lambda: empty_plan(1)).replace(
        row_order=by_row,
        micro_batch=by_update,
        text_start=by_update,
        micro_batch_count=replicated_sharding(mesh),
    )


def empty_plan(row_count: int, mini_batch_count: int = 1) -> PackingPlan:
    """A plan that reads nothing."""
    zeros = jnp.zeros((mini_batch_count, row_count), jnp.int32)
    return PackingPlan(
        row_order=jnp.arange(row_count, dtype=jnp.int32),
        micro_batch=zeros - 1,
        text_start=zeros,
        micro_batch_count=jnp.zeros((mini_batch_count,), jnp.int32),
    )


def move_rows_to_plan(batch: TrainBatch, shard_count: int) -> TrainBatch:
    """The batch with every row at its place. Inside a `shard_map`."""
    plan = batch.plan
    return gather_from_shards(batch.replace(plan=None), plan.row_order, shard_count).replace(
        plan=plan
    )


def gather_from_shards(tree: PyTree, order: Int[Array, " n"], shard_count: int) -> PyTree:
    """What stands at the places `order` of the first axis, which all shards' parts make up: a
    shard's part goes round all shards, which take what is theirs. Inside a `shard_map`.

    No shard ever holds more than twice its own part.
    """
    if shard_count == 1:
        return _take_rows(order, tree)
    local_count = len(order)
    shard_index = lax.axis_index(ROWS).astype(jnp.int32)
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
    """A token that some row of the batch starts with and that a pass reads anyway, for positions
    without a text. Inside a `shard_map`.

    Just any token might be one that makes activations overflow: behind the mask, zero cotangents
    times NaN are NaN.
    """
    is_read = read_lengths(batch.loss_mask) > 0
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
    """This shard's pack in a micro-batch of a mini-batch, gathered from its rows; also the row that
    each position belongs to."""
    row_count, row_length = batch.tokens.shape
    plan = batch.plan
    text_starts = jnp.where(
        plan.micro_batch[mini_batch] == micro_batch, plan.text_start[mini_batch], micro_tokens
    )
    row_at_start = (
        jnp.full((micro_tokens,), -1, jnp.int32)
        .at[text_starts]
        .set(jnp.arange(row_count, dtype=jnp.int32), mode="drop")
    )
    indices = jnp.arange(micro_tokens, dtype=jnp.int32)
    text_start = lax.cummax(jnp.where(row_at_start >= 0, indices, 0))
    row = jnp.maximum(row_at_start[text_start], 0)
    is_text = (row_at_start[text_start] >= 0) & (
        indices - text_start < read_lengths(batch.loss_mask)[row]
    )
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
    """What a pack has at each position [1 T ...], at its row and token [b S ...], in place of what
    was there `old_values`.

    Beyond a row's last token that was read stands something that nothing may look at.
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
    """Labels to learn that stand before each label in its own text: of a rollout, tokens of the
    response so far."""
    earlier_labels = jnp.cumsum(pack.loss_mask, axis=1, dtype=jnp.int32) - pack.loss_mask.astype(
        jnp.int32
    )
    return earlier_labels - jnp.take_along_axis(earlier_labels, pack.text_start, axis=1)


def rows_to_pack(tokens: Int[Array, "B S"], loss_mask: Bool[Array, "B S"]) -> Pack:
    """Padded rows as sequences of one text each."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    shift = ((0, 0), (0, 1))
    return Pack(
        tokens=tokens,
        labels=jnp.pad(tokens[:, 1:], shift),
        loss_mask=jnp.pad(loss_mask[:, 1:], shift),
        positions=positions,
        text_start=jnp.zeros_like(positions),
    )
