"""The rollout engine.

`begin` prefills, `advance` runs rounds of draft, verify and commit, and `collect` returns the
rollout. They work on the rows of one shard, in slices of rounds.

`begin_sharded` and `advance_sharded` run them on every shard of a mesh. `generate_sharded` makes a
whole rollout in one program. Shards that differ only in `expert` run in lockstep.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Key

from jaxspec.drafts.base import Draft
from jaxspec.mesh import ROWS, row_shard_count, shard_map_rows
from jaxspec.models.decoder import Decoder
from jaxspec.models.weight_layout import shard_specs
from jaxspec.rollout.decode_state import (
    DecodeState,
    pages_may_run_out,
    row_specs,
    slot_count,
)
from jaxspec.rollout.loops import build_loops, has_unfinished_rows, run_loops
from jaxspec.rollout.prefill import append_unread_texts, prepare_state
from jaxspec.rollout.settings import Settings
from jaxspec.state import Drafter, Prompts, PyTree, Rollout


def advance(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    state: DecodeState,
    max_rounds: Int[Array, ""] | int,
    settings: Settings,
    is_prefilled: bool = True,
) -> DecodeState:
    """Runs up to `max_rounds` rounds, or until all rows end.

    Slices give the same tokens as one long call. `is_prefilled` says whether `begin` has read the
    prompts of paged caches.
    """
    # Without a limit, `max_rounds` is the largest integer. The sum must not overflow.
    round_limit = state.round[0] + jnp.minimum(
        max_rounds, jnp.iinfo(jnp.int32).max - state.round[0]
    )
    # A shard of few rows may have fewer slots than the first tail loop.
    tail = tuple(size for size in settings.tail if size < slot_count(state))
    may_evict = pages_may_run_out(state, settings.max_new_tokens)
    loops = build_loops(target, drafter, draft, settings, round_limit, may_evict)

    def read_texts(state: DecodeState) -> DecodeState:
        return append_unread_texts(target, drafter, draft, state, settings)

    # Without eviction there is only the text of the prompts, which is read once.
    if not may_evict and not is_prefilled:
        state = read_texts(state)

    # Prompts are read before slots copy their pages. A row that is admitted with unread text stops
    # the rounds at once, and the next iteration reads it.
    def fill_slots_and_run(state: DecodeState) -> DecodeState:
        return run_loops(loops, loops.fill_slots(read_texts(state) if may_evict else state), tail)

    return loops.repeat(
        lambda state: has_unfinished_rows(state, 0, round_limit), fill_slots_and_run, state
    )


def begin(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    prompts: Prompts,
    first_prompt: Int[Array, ""],
    key: Key[Array, ""],
    settings: Settings,
) -> DecodeState:
    """Builds the state before the first round, with all prompts read.

    Arguments are those of `prepare_state`.
    """
    state = prepare_state(target, drafter, draft, prompts, first_prompt, key, settings)
    return append_unread_texts(target, drafter, draft, state, settings)


def collect(state: DecodeState) -> Rollout:
    """Returns the rows generated so far, without caches and queue."""
    return state.rollout


def generate_sharded(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    prompts: Prompts,
    key: Key[Array, ""],
    settings: Settings,
    mesh: Mesh,
) -> Rollout:
    """Answers every prompt `group_size` times, in one program.

    No Python runs between the first token and the last. Each data shard leaves its loop when its
    own rows have ended.
    """
    # Trip counts differ between data shards, so devices communicate only within one.

    def run_shard(
        target: Decoder,
        drafter: Drafter,
        prompts: Prompts,
        prompt_numbers: Int[Array, " n"],
        key: Key[Array, ""],
    ) -> Rollout:
        state = prepare_state(target, drafter, draft, prompts, prompt_numbers[0], key, settings)
        no_limit = jnp.iinfo(jnp.int32).max
        return collect(
            advance(target, drafter, draft, state, no_limit, settings, is_prefilled=False)
        )

    inputs, prompt_numbers = _prepare_inputs(mesh, (target, drafter), prompts)
    return shard_map_rows(mesh, run_shard, inputs, P(ROWS))(
        target, drafter, prompts, prompt_numbers, key
    )


def begin_sharded(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    prompts: Prompts,
    key: Key[Array, ""],
    settings: Settings,
    mesh: Mesh,
) -> DecodeState:
    """Runs `begin` on every shard of `mesh`."""

    def run_shard(
        target: Decoder,
        drafter: Drafter,
        prompts: Prompts,
        prompt_numbers: Int[Array, " n"],
        key: Key[Array, ""],
    ) -> DecodeState:
        return begin(target, drafter, draft, prompts, prompt_numbers[0], key, settings)

    inputs, prompt_numbers = _prepare_inputs(mesh, (target, drafter), prompts)
    shard_count = row_shard_count(mesh)

    def shard_shape(leaf: Array) -> Any:
        return (
            jax.ShapeDtypeStruct((leaf.shape[0] // shard_count, *leaf.shape[1:]), leaf.dtype)
            if leaf.ndim
            else leaf
        )

    # The specs depend on a shard's caches, since only these know whether their layers are stacked.
    state = jax.eval_shape(
        run_shard, target, drafter, *jax.tree.map(shard_shape, (prompts, prompt_numbers)), key
    )
    return shard_map_rows(mesh, run_shard, inputs, row_specs(state))(
        target, drafter, prompts, prompt_numbers, key
    )


def advance_sharded(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    state: DecodeState,
    max_rounds: Int[Array, ""],
    settings: Settings,
    mesh: Mesh,
) -> DecodeState:
    """Runs `advance` on every shard of `mesh`."""

    def run_shard(
        target: Decoder, drafter: Drafter, state: DecodeState, max_rounds: Int[Array, ""]
    ) -> DecodeState:
        return advance(target, drafter, draft, state, max_rounds, settings)

    specs, networks = row_specs(state), shard_specs(mesh, (target, drafter))
    return shard_map_rows(mesh, run_shard, (*networks, specs, P()), specs)(
        target, drafter, state, max_rounds
    )


def _prepare_inputs(mesh: Mesh, networks: PyTree, prompts: Prompts) -> tuple[Any, Array]:
    """Returns the partition specs of a call's inputs, and the number of each prompt."""
    prompt_specs = jax.tree.map(lambda leaf: P(ROWS) if leaf.ndim else P(), prompts)
    # Prompt numbers are sharded like prompts, so that each shard knows its first one. Noise keys
    # of rows depend on it, so that tokens do not depend on the mesh.
    prompt_numbers = jnp.arange(prompts.tokens.shape[0], dtype=jnp.int32)
    return (*shard_specs(mesh, networks), prompt_specs, P(ROWS), P()), prompt_numbers
