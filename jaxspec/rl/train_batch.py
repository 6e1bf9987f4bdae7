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
    by_update_sharding,
    from_host,
    replicated,
    row_shards,
    rows_sharding,
)
from jaxspec.state import AnyArray, Pack, Plan, PyTree, Tree, pytree


class States(NamedTuple):
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
    chosen: Bool[AnyArray, "B S"]
    """The tokens to learn from: those that the policy sampled. Nothing after a row's last one is
    read."""
    advantages: Float[AnyArray, "B ..."]
    """Of each row, or of each token, at its place."""
    version: Int[AnyArray, " B"]
    """Batches that the policy had learnt from when it sampled the row."""
    plan: Plan
    old_logprobs: Float[AnyArray, "B S"] | None = None
    """Of each token under the policy before the updates on this batch; None: that of the pass that
    reads it."""
    current: Bool[AnyArray, " B"] | None = None
    """Rows that were sampled by the policy before the updates on this batch; None: all."""
    on_policy: Bool[AnyArray, " B"] | None = None
    """Rows whose old policy is the one of the pass that reads them, whatever `old_logprobs` says;
    None: none of them."""
    reference_logprobs: Float[AnyArray, "B S"] | None = None
    """Of each token under the reference policy; None: no loss asks for them."""
    states: States | None = None
    """Of the policy, which is then not run: it does not learn. None: the pass runs it."""


def read_lengths(chosen: Any) -> Any:
    """Tokens of each row that a pass reads, [B] of a mask [B S] of the tokens to learn: those
    before the last of these."""
    library: Any = jnp if isinstance(chosen, jax.Array) else np
    return library.max(
        library.where(chosen, library.arange(chosen.shape[1], dtype=np.int32), 0), axis=1
    )


def planned(
    read: Int[np.ndarray, " B"],
    shards: int,
    tokens: int,
    mini_batch: Int[np.ndarray, " B"] | None = None,
) -> Plan:
    """A plan for rows of which `read` tokens are read each; 0: the row is left out. On the host.

    The rows of a mini-batch are dealt to the shards longest first, each to the shard with the least
    text that has a place left, and packed by first fit in that order: so micro-batch n has texts of
    about the same length on every shard.

    Args:
      read: see above.
      shards: of the data.
      tokens: of a micro-batch, on each shard.
      mini_batch: the number of the one that each row belongs to; None: there is one.

    Raises:
      ValueError: a row has more than `tokens` tokens to read.
    """
    if read.max(initial=0) > tokens:
        raise ValueError(f"a row of {read.max()} tokens does not fit a micro-batch of {tokens}")
    mini = np.zeros(len(read), np.int32) if mini_batch is None else mini_batch
    minis, places = int(mini.max(initial=0)) + 1, len(read) // shards
    order, used = np.zeros(len(read), np.int32), np.zeros(minis, np.int32)
    micro, start = np.full((minis, len(read)), -1, np.int32), np.zeros((minis, len(read)), np.int32)
    filled = np.zeros(shards, int)
    for number in range(minis):
        load = np.zeros(shards, int)
        # positions left in each pack of each shard
        room: list[list[int]] = [[] for _ in range(shards)]
        rows = np.flatnonzero((mini == number) & (read > 0))
        for row in rows[np.argsort(-read[rows], kind="stable")]:
            free = np.where(filled < places, load, np.iinfo(int).max)
            shard = int(np.argmin(free)) if shards > 1 else 0
            place, length = shard * places + filled[shard], int(read[row])
            order[place], filled[shard], load[shard] = row, filled[shard] + 1, load[shard] + length
            pack, begin = _first_fit(room[shard], length, tokens)
            micro[number, place], start[number, place] = pack, begin
        used[number] = max(map(len, room))
    # last, so that what is read has its choice of places in every mini-batch
    left = [place for place in range(len(read)) if place % places >= filled[place // places]]
    order[left] = np.flatnonzero(read == 0)
    plan: dict[str, Any] = {"order": order, "micro": micro, "start": start, "used": used}
    return Plan(**plan)


def _first_fit(room: list[int], length: int, tokens: int) -> tuple[int, int]:
    """The first pack with `length` positions left, or a new one, and where in it a text starts."""
    number = next((number for number, left in enumerate(room) if left >= length), len(room))
    if number == len(room):
        room.append(tokens)
    room[number] -= length
    return number, tokens - room[number] - length


def texts_to_learn(
    tokens: Int[np.ndarray, "B S"],
    chosen: Bool[np.ndarray, "B S"],
    mesh: Mesh,
    micro: int,
    states: States | None = None,
) -> TrainBatch:
    """A batch of texts that nobody sampled, on the devices of `mesh`, planned for micro-batches of
    `micro` positions a shard; with the policy's `states`, if they are known.

    Raises:
      ValueError: as `planned`.
    """
    none = np.zeros(len(tokens), np.int32)
    parts: dict[str, Any] = {
        "tokens": tokens,
        "sampled_logprobs": np.zeros(tokens.shape, np.float32),
        "chosen": chosen,
        "advantages": none.astype(np.float32),
        "version": none,
        "plan": planned(read_lengths(chosen), row_shards(mesh), micro),
        "states": states,
    }
    batch = TrainBatch(**parts)
    layout = jax.tree.map(lambda _: rows_sharding(mesh), batch).replace(plan=plan_layout(mesh))

    def put(values: Any, sharding: Any) -> jax.Array:
        host = np.asarray(values)
        return from_host(jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding), host)

    return jax.tree.map(put, batch, layout)


def plan_layout(mesh: Mesh) -> Any:
    """Shardings of a plan."""
    rows, by_update = rows_sharding(mesh), by_update_sharding(mesh)
    return jax.eval_shape(lambda: no_plan(1)).replace(
        order=rows, micro=by_update, start=by_update, used=replicated(mesh)
    )


def no_plan(rows: int, mini_batches: int = 1) -> Plan:
    """A plan that reads nothing."""
    by_row = jnp.zeros((mini_batches, rows), jnp.int32)
    return Plan(
        order=jnp.arange(rows, dtype=jnp.int32),
        micro=by_row - 1,
        start=by_row,
        used=jnp.zeros((mini_batches,), jnp.int32),
    )


def exchanged(batch: TrainBatch, shards: int) -> TrainBatch:
    """The batch with every row at its place. Inside a `shard_map`."""
    plan = batch.plan
    return from_shards(batch.replace(plan=None), plan.order, shards).replace(plan=plan)


def from_shards(tree: PyTree, order: Int[Array, " n"], shards: int) -> PyTree:
    """What stands at the places `order` of the first axis, which all shards' parts make up: a
    shard's part goes round all shards, which take what is theirs. Inside a `shard_map`.

    No shard ever holds more than twice its own part.
    """
    if shards == 1:
        return _at(order, tree)
    count = len(order)
    me = lax.axis_index(ROWS).astype(jnp.int32)
    around = [((shard + 1) % shards, shard) for shard in range(shards)]

    def turn(number: Int[Array, ""], carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        taken, passing = carry
        here = order // count == (me + number) % shards
        taken = jax.tree.map(
            lambda old, new: jnp.where(here.reshape(-1, *(1,) * (old.ndim - 1)), new, old),
            taken,
            _at(order % count, passing),
        )
        return taken, jax.tree.map(lambda leaf: lax.ppermute(leaf, ROWS, around), passing)

    taken, _ = lax.fori_loop(0, shards, turn, (jax.tree.map(jnp.zeros_like, tree), tree))
    return taken


def _at(places: Int[Array, " n"], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.take(leaf, places, axis=0), tree)


def filler(batch: TrainBatch) -> Int[Array, ""]:
    """A token that some row of the batch starts with and that a pass reads anyway, for positions
    without a text. Inside a `shard_map`.

    Just any token might be one that makes activations overflow: behind the mask, zero cotangents
    times NaN are NaN.
    """
    read = read_lengths(batch.chosen) > 0
    return lax.pmax(
        jnp.max(jnp.where(read & jnp.any(batch.plan.micro >= 0, axis=0), batch.tokens[:, 0], 0)),
        ROWS,
    )


def packed(
    batch: TrainBatch,
    mini: Int[Array, ""],
    micro: Int[Array, ""],
    tokens: int,
    filler: Int[Array, ""],
) -> tuple[Pack, Int[Array, "1 T"]]:
    """This shard's pack in a micro-batch of a mini-batch, gathered from its rows; also the row that
    each position belongs to."""
    rows, size = batch.tokens.shape
    plan = batch.plan
    starts = jnp.where(plan.micro[mini] == micro, plan.start[mini], tokens)
    starting = (
        jnp.full((tokens,), -1, jnp.int32)
        .at[starts]
        .set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    )
    index = jnp.arange(tokens, dtype=jnp.int32)
    first = lax.cummax(jnp.where(starting >= 0, index, 0))
    row = jnp.maximum(starting[first], 0)
    inside = (starting[first] >= 0) & (index - first < read_lengths(batch.chosen)[row])
    first = jnp.where(inside, first, index)
    positions = index - first
    following = jnp.minimum(positions + 1, size - 1)
    pack = Pack(
        tokens=jnp.where(inside, batch.tokens[row, positions], filler),
        labels=batch.tokens[row, following],
        chosen=inside & batch.chosen[row, following],
        positions=positions,
        first=first,
    )
    return jax.tree.map(lambda leaf: leaf[None], pack), row[None]


def unpacked(
    tree: PyTree,
    batch: TrainBatch,
    mini: Int[Array, ""],
    micro: Int[Array, ""],
    before: PyTree,
) -> PyTree:
    """What a pack has at each position [1 T ...], at its row and token [b S ...], in place of what
    was there `before`.

    Beyond a row's last token that was read stands something that nothing may look at.
    """
    plan, size = batch.plan, batch.tokens.shape[1]
    here = (plan.micro[mini] == micro)[:, None, None]
    places = plan.start[mini][:, None] + jnp.arange(size, dtype=jnp.int32)
    return jax.tree.map(
        lambda by_position, old: jnp.where(
            here, jnp.take(by_position[0], places, axis=0, mode="clip"), old
        ),
        tree,
        before,
    )


def learnt_before(pack: Pack) -> Int[Array, "B T"]:
    """Labels to learn that stand before each label in its own text: of a rollout, tokens of the
    response so far."""
    before = jnp.cumsum(pack.chosen, axis=1, dtype=jnp.int32) - pack.chosen.astype(jnp.int32)
    return before - jnp.take_along_axis(before, pack.first, axis=1)


def whole_rows(tokens: Int[Array, "B S"], chosen: Bool[Array, "B S"]) -> Pack:
    """Padded rows as sequences of one text each."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    shift = ((0, 0), (0, 1))
    return Pack(
        tokens=tokens,
        labels=jnp.pad(tokens[:, 1:], shift),
        chosen=jnp.pad(chosen[:, 1:], shift),
        positions=positions,
        first=jnp.zeros_like(positions),
    )
