"""What rounds of each draft length cost on this machine, and how much of the draft is accepted, for
runs that choose lengths by it."""

import functools
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.host.job import sources
from jaxspec.host.runner import ahead_with, placed, put
from jaxspec.inputs.json_keys import parse_json
from jaxspec.inputs.streams import Stream
from jaxspec.mesh import machine, replicated, row_shards
from jaxspec.rollout import length_chooser
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.generator import Generator
from jaxspec.state import EOS, AcceptanceEstimate, LengthChooser, Prompts, Ready, TrainState
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder, content_key
from jaxspec.system.files import SaveError, replacing
from jaxspec.system.terminal import say

ROUNDS = 16
"""Rounds that are timed together, at most."""
REPEATS, MOST_REPEATS, SECONDS = 7, 100, 0.3
"""Calls of each number of rounds: at least and at most so many, and as long as they take."""


def with_chooser(step: Step, state: TrainState, prompts: Prompts) -> TrainState:
    """The state with what draft lengths are chosen by, measured now; as it is where all rounds
    draft alike."""
    if state.generator.chooser is None:
        return state
    chooser = measured_chooser(step.generator, jax.jit(step.sync)(state), prompts)
    chooser = put(chooser, jax.tree.map(placed, chooser, step.state_shardings().generator.chooser))
    return state.replace(generator=state.generator.replace(chooser=chooser))


def measured_chooser(generator: Generator, ready: Ready, prompts: Prompts) -> LengthChooser:
    """The cost table of this machine, measured once for each model and shape, and the acceptance of
    the draft on some prompts.

    Every round is one of the program that a run uses, with the table that makes it choose that
    length; end tokens and stop strings are off. The same on every process: process 0's seconds
    count. What a draft reads more after rounds of other lengths is in no cost: a wide pass now and
    then.
    """
    # With the coins of a batch, its lengths would be chosen by what these bring, and its tokens
    # would follow another distribution.
    prompts = prompts.replace(
        stream=put(np.int32(Stream.PILOT), placed(prompts.stream, replicated(generator.mesh)))
    )
    settings, mesh = generator.settings, generator.mesh
    generator = generator.with_(processing=settings.processing._replace(stop_ids=()), stop=None)
    longest = prompts.tokens.shape[1] + settings.max_new_tokens
    empty = length_chooser.unmeasured(settings.lengths, longest)

    def forced(place: int) -> Ready:
        cost = jnp.full_like(empty.round_cost, 1e6).at[place].set(1e-6)
        chooser = jax.device_put(
            LengthChooser(acceptance=empty.acceptance, round_cost=cost), replicated(mesh)
        )
        return ready.replace(drafter=ready.drafter.replace(chooser=chooser))

    begin, running = ahead_with(generator, generator.begin, forced(0), prompts)
    same = jax.tree.map(lambda leaf: leaf.sharding, running)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    advance, _ = ahead_with(
        generator, generator.advance, forced(0), running, rounds, out_shardings=same
    )
    few = max(1, min(ROUNDS, settings.max_new_tokens // (settings.lengths[-1] + 1) - 1))
    state = begin(forced(0), prompts)
    made = advance(forced(len(settings.lengths) - 1), state, jnp.int32(few)).rollout.statistics
    total = jax.jit(
        lambda counts: jnp.sum(counts, axis=0, dtype=jnp.float32), out_shardings=replicated(mesh)
    )
    offered_in_turn, accepted = (
        np.asarray(total(leaf)) for leaf in (made.offered_in_turn, made.accepted)
    )
    file = cache_folder() / "costs" / f"{_key(generator, prompts.tokens.shape[1])}.json"
    cost = _from_process_0(_saved(file, empty.round_cost.shape))
    if not cost.any():
        shards, room = row_shards(mesh), (few + 1) * (settings.lengths[-1] + 1)
        for loop, live in enumerate((settings.slots, *settings.tail)):
            for context, end in enumerate(length_chooser.contexts(longest)):
                placed_at = functools.partial(_with, live=live, shards=shards, start=end - room)
                prepared = jax.jit(placed_at, out_shardings=same)(state)
                for place, length in enumerate(settings.lengths):
                    run = functools.partial(advance, forced(place), prepared)
                    cost[place, loop:, context] = _seconds(
                        run, max(1, min(ROUNDS, room // (length + 1) - 1))
                    )
        cost = _from_process_0(cost)
        if jax.process_index() == 0:
            _save(file, cost)
    estimate = AcceptanceEstimate(
        offered_in_turn=jnp.asarray(offered_in_turn),
        accepted=jnp.asarray(accepted),
        seconds_to_lose=jnp.zeros((), jnp.float32),
    )
    return LengthChooser(acceptance=estimate, round_cost=jnp.asarray(cost))


def _save(file: Path, cost: np.ndarray) -> None:
    """Writes the table for the next run; where that cannot be done, a run goes on without."""
    try:
        with replacing(file, "the next run times its rounds anew", shared=True) as fresh:
            fresh.write_text(
                json.dumps({"cost": cost.tolist(), "digest": content_key(cost.tolist())}),
                encoding="utf-8",
            )
    except SaveError as reason:
        say(f"warning: {reason}")


def _saved(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The table in a file, or zeros where there is none of this shape, or one that does not hold
    any more what was written."""
    table, damage = [], ""
    try:
        saved = parse_json(file.read_text(encoding="utf-8"))
        table = saved["cost"]
        damage = "" if saved["digest"] == content_key(saved["cost"]) else "is damaged"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as reason:
        damage = f"cannot be read ({reason.strerror})"
    except (ValueError, KeyError, TypeError):
        damage = "is damaged"
    if damage and jax.process_index() == 0:
        say(f"warning: {file} {damage}: rounds are timed anew")
    return (
        np.asarray(table, np.float32)
        if not damage and np.shape(table) == shape
        else np.zeros(shape, np.float32)
    )


def _from_process_0(table: np.ndarray) -> np.ndarray:
    return (
        np.array(multihost_utils.broadcast_one_to_all(table)) if jax.process_count() > 1 else table
    )


def _key(generator: Generator, prompt: int) -> str:
    """What a cost table depends on."""
    shape = generator.settings._replace(rule=getattr(generator.settings.rule, "__name__", None))
    code = sources(
        "host/round_cost.py",
        "models/*.py",
        "kernels/*.py",
        "drafts/*.py",
        "rollout/*.py",
        "sampling.py",
    )
    parts = (
        jax.__version__,
        machine(generator.mesh),
        shape,
        prompt,
        generator.weight_layouts,
        generator.compiler_options,
        generator.about,
        code,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _with(state: DecodeState, live: int, shards: int, start: int) -> DecodeState:
    """The state with `live` rows of each shard, which begin at about position `start`."""
    rollout = state.rollout
    numbers = jnp.arange(len(rollout.status), dtype=jnp.int32) % (len(rollout.status) // shards)
    status = jnp.where(numbers < live, rollout.status, EOS)
    ahead_by = jnp.maximum(start - rollout.prompt_lengths, 0)
    queue = state.queue
    moved = rollout.replace(
        status=status,
        prompt_lengths=rollout.prompt_lengths + ahead_by,
        lengths=rollout.lengths + ahead_by,
    )
    queue = queue.replace(waiting=queue.waiting & (numbers < live))
    return state.replace(rollout=moved, queue=queue)


def _seconds(run: Any, rounds: int) -> float:
    """Seconds of a round: what `rounds` more of them add to a call, both at their fastest, since
    others' work only ever adds."""

    def taken(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(count)))
        return time.perf_counter() - began

    taken(1)
    # all must make the same number of calls
    once = float(_from_process_0(np.asarray(taken(1) + taken(1 + rounds), np.float32)))
    pairs = [
        (taken(1), taken(1 + rounds))
        for _ in range(max(REPEATS, min(MOST_REPEATS, int(SECONDS / once))))
    ]
    short, long = (min(times) for times in zip(*pairs, strict=True))
    # a round is then less than what calls differ by
    return (long - short) / rounds if long > short else long / (1 + rounds)
