"""The plan of a batch: every row once, no pack too full, shards balanced; and what a shard gathers
by it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxspec.mesh import ROWS
from jaxspec.rl.train_batch import (
    Pack,
    TrainBatch,
    build_text_batch,
    count_response_tokens,
    count_tokens_to_read,
    filler_token,
    gather_pack,
    move_rows_to_plan,
    plan_packing,
    rows_to_pack,
)
from jaxspec.state import PackingPlan
from tests.conftest import small_mesh


def stands(
    plan: PackingPlan, read: np.ndarray, shards: int, tokens: int
) -> tuple[dict[int, tuple[int, int, int]], np.ndarray]:
    """Row -> (shard, micro-batch, start) of those that are read; and by shard, micro-batch and
    position the row that stands there."""
    found, there = {}, np.full((shards, int(plan.micro_batch_count[0]), tokens), -1)
    places = len(read) // shards
    for place, row in enumerate(np.asarray(plan.row_order)):
        micro, start = int(plan.micro_batch[0, place]), int(plan.text_start[0, place])
        if micro >= 0:
            found[int(row)] = place // places, micro, start
            span = there[place // places, micro, start : start + read[row]]
            assert len(span) == read[row], "a text ends beyond its pack"
            assert (span == -1).all(), "two texts overlap"
            span[:] = row
    return found, there


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(9, 30))
def test_every_row_stands_once_and_no_pack_overflows(
    shards: int, lengths: list[int], tokens: int
) -> None:
    read = np.array(lengths * shards, np.int32)
    plan = plan_packing(read, shards, tokens, np.zeros_like(read))
    assert sorted(np.asarray(plan.row_order).tolist()) == list(range(len(read)))
    found, _ = stands(plan, read, shards, tokens)
    assert sorted(found) == np.flatnonzero(read).tolist()
    assert int(plan.micro_batch_count[0]) == max(
        (micro + 1 for _, micro, _ in found.values()), default=0
    )


def test_a_row_that_fits_no_micro_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="a row of 11 tokens does not fit a micro-batch of 10"):
        plan_packing(np.array([3, 11], np.int32), 1, 10, np.zeros(2, np.int32))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_a_mini_batch_reads_its_own_rows_and_is_dealt_to_all_shards(
    shards: int, minis: int, rows: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    read = random.integers(0, 9, shards * minis * rows).astype(np.int32)
    mini = np.repeat(np.arange(minis, dtype=np.int32), shards * rows)
    plan = plan_packing(read, shards, 9, mini)
    order, micro = np.asarray(plan.row_order), np.asarray(plan.micro_batch)
    assert sorted(order.tolist()) == list(range(len(read)))
    for number in range(minis):
        there = order[micro[number] >= 0]
        assert sorted(there.tolist()) == np.flatnonzero((mini == number) & (read > 0)).tolist()
        alone = plan_packing(np.where(mini == number, read, 0), shards, 9, np.zeros_like(mini))
        assert plan.micro_batch_count[number] <= alone.micro_batch_count[0] + 1
    # however the lengths fall, no shard has more than its places
    assert len(order) // shards == minis * rows


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_get_about_as_much_text_though_groups_differ(shards: int) -> None:
    """64 answers in groups of 8 whose lengths spread 1:8, all of a group alike: whole groups would
    differ by far more."""
    random = np.random.default_rng(0)
    read = np.repeat(random.integers(24, 193, 8), 8).astype(np.int32)
    by_group = read.reshape(shards, -1).sum(1)
    plan = plan_packing(read, shards, 8 * 192, np.zeros_like(read))
    dealt = read[np.asarray(plan.row_order)].reshape(shards, -1).sum(1)
    assert dealt.max() <= 1.05 * dealt.mean() < by_group.max()


def batch_of(shards: int, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of random text, of which some tokens are to be learnt; one row has none."""
    random = np.random.default_rng(seed)
    text = random.integers(1, 50, (4 * shards, 9)).astype(np.int32)
    chosen = random.random(text.shape) < 0.4
    chosen[1] = False
    return text, chosen, np.asarray(count_tokens_to_read(chosen))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_shard_gathers_the_texts_that_the_plan_gives_it(shards: int) -> None:
    tokens, mesh = 12, small_mesh(shards)
    text, chosen, read = batch_of(shards, tokens)
    batch = build_text_batch(text, chosen, mesh, tokens)
    _, there = stands(jax.tree.map(np.asarray, batch.plan), read, shards, tokens)

    def gather(batch: TrainBatch, number: Any) -> Any:
        batch = move_rows_to_plan(batch, shards)
        return tuple(gather_pack(batch, jnp.int32(0), number, tokens, filler_token(batch))[0])

    plan = batch.plan.replace(
        row_order=P(ROWS),
        micro_batch=P(None, ROWS),
        text_start=P(None, ROWS),
        micro_batch_count=P(),
    )
    specs = jax.tree.map(lambda _: P(ROWS), batch).replace(plan=plan)
    outputs: Any = tuple([P(ROWS)] * 5)
    run = jax.jit(
        jax.shard_map(
            gather,
            mesh=mesh,
            in_specs=(specs, P()),
            out_specs=outputs,
            axis_names={*ROWS},
            check_vma=False,
        )
    )
    for micro in range(int(batch.plan.micro_batch_count[0])):
        arrays: list[Any] = [np.asarray(part) for part in run(batch, jnp.int32(micro))]
        pack = Pack(*arrays)
        for shard in range(shards):
            rows, previous, first = there[shard, micro], -2, 0
            for t, row in enumerate(rows):
                first = t if row != previous or row < 0 else first
                previous = row
                assert pack.text_start[shard, t] == first
                assert pack.positions[shard, t] == t - first
                if row >= 0:
                    assert pack.tokens[shard, t] == text[row, t - first]
                    assert pack.labels[shard, t] == text[row, t - first + 1]
                    assert pack.loss_mask[shard, t] == chosen[row, t - first + 1]
                else:
                    assert not pack.loss_mask[shard, t]
                    assert pack.tokens[shard, t] in text[read > 0, 0]


def test_whole_rows_are_texts_of_their_own() -> None:
    tokens, chosen = jnp.array([[5, 6, 7]], jnp.int32), jnp.array([[True, False, True]])
    found = rows_to_pack(tokens, chosen)
    assert [np.asarray(part).tolist() for part in found] == [
        [[5, 6, 7]],
        [[6, 7, 0]],
        [[False, True, False]],
        [[0, 1, 2]],
        [[0, 0, 0]],
    ]


def test_labels_before_are_counted_within_each_text() -> None:
    """Two texts side by side and a position beyond them."""
    chosen = jnp.array([[False, True, True, False, True, True, False]])
    first = jnp.array([[0, 0, 0, 0, 4, 4, 6]], jnp.int32)
    pack = Pack(tokens=first, labels=first, loss_mask=chosen, positions=first, text_start=first)
    assert np.asarray(count_response_tokens(pack)).tolist() == [[0, 0, 1, 2, 0, 1, 0]]
