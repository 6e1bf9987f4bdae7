"""Round costs by draft length.

On a CPU a pilot times rounds before the first batch. On an accelerator public figures of the card
predict them, and the first rollout corrects the predictions (`run/round_timer.py`).
"""

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.compiled.roofline import DEFAULT_CARD, GeneratorDevices, find_card_by_kind
from jaxspec.host.programs import (
    abstract_leaf,
    compile_for_generator,
    put_like,
    sync_weights,
    times_real_rounds,
)
from jaxspec.inputs.streams import Stream
from jaxspec.mesh import EXPERT, TENSOR, replicated_sharding, row_shard_count
from jaxspec.processes.devices import describe_machine
from jaxspec.processes.process_0 import broadcast_table
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.feedback import cost_table, length_chooser
from jaxspec.rollout.generator import Generator
from jaxspec.rollout.settings import Settings
from jaxspec.state import (
    EOS,
    AcceptanceEstimate,
    LengthChooser,
    NoChooser,
    Prompts,
    RolloutWeights,
    Statistics,
    TrainState,
)
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder, read_sources
from jaxspec.storage.tables import load_table, save_table
from jaxspec.system.terminal import print_line
from jaxspec.tokens.stop_strings import NO_STOP_STRINGS

RunRounds = Callable[[jax.Array], DecodeState]
"""Runs the given number of rounds from a fixed decode state."""
PILOT_ROUNDS = 16
"""Largest number of rounds in a timed call of the pilot."""
MIN_REPEATS, MAX_REPEATS, PILOT_SECONDS = 7, 100, 0.3
"""Minimum and maximum repeats of a pilot's pair of calls, and the seconds to spend on them within
these limits."""


def fill_length_chooser(step: Step, state: TrainState, prompts: Prompts) -> TrainState:
    """Fills in round costs and acceptance, if the generator chooses draft lengths."""
    if isinstance(state.generator.chooser, NoChooser):
        return state
    predicts_costs = times_real_rounds(step.generator)  # predictions need only shapes
    weights = jax.eval_shape(step.sync, state) if predicts_costs else sync_weights(step, state)
    chooser = make_length_chooser(step.generator, weights, prompts)
    chooser = put_like(
        chooser, jax.tree.map(abstract_leaf, chooser, step.state_shardings().generator.chooser)
    )
    return state.replace(generator=state.generator.replace(chooser=chooser))


def make_length_chooser(
    generator: Generator, weights: RolloutWeights, prompts: Prompts
) -> LengthChooser:
    """Returns round costs and the draft's acceptance.

    Costs that an earlier run saved are reused. Otherwise they are measured on a CPU, and predicted
    on an accelerator. Acceptance is measured on a CPU, and unknown on an accelerator.
    """
    if times_real_rounds(generator):
        return predict_chooser(generator, weights)
    return _run_pilot(generator, weights, prompts)


# ---- by a pilot


def _run_pilot(generator: Generator, weights: RolloutWeights, prompts: Prompts) -> LengthChooser:
    """Measures round costs and the draft's acceptance.

    Costs are measured once for each model and shape, then cached. End tokens and stop strings are
    off. All processes use the times of process 0. Costs leave out the tokens that a draft catches
    up on after rounds of other lengths.
    """
    # With the noise of a training batch, lengths would depend on that batch's own tokens, and the
    # tokens would follow another distribution.
    prompts = prompts.replace(
        stream=put_like(
            np.int32(Stream.PILOT),
            abstract_leaf(prompts.stream, replicated_sharding(generator.mesh)),
        )
    )
    settings, generator = generator.settings, _without_ends(generator)
    longest = prompts.tokens.shape[1] + settings.max_new_tokens
    empty = length_chooser.init_chooser(settings.lengths, longest)
    force_length = functools.partial(_force_length, weights, empty, generator.mesh)
    begin, decode_state = compile_for_generator(
        generator, generator.begin, force_length(0), prompts
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, decode_state)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    advance, _ = compile_for_generator(
        generator, generator.advance, force_length(0), decode_state, rounds, out_shardings=shardings
    )
    warmup_rounds = max(
        1, min(PILOT_ROUNDS, settings.max_new_tokens // (settings.lengths[-1] + 1) - 1)
    )
    state = begin(force_length(0), prompts)
    warm_state = advance(force_length(len(settings.lengths) - 1), state, jnp.int32(warmup_rounds))
    acceptance = _sum_acceptance(warm_state.rollout.statistics, generator.mesh)
    file = cost_file(generator, prompts.tokens.shape[1])
    cost = load_costs(file, empty.round_cost.shape)
    if not cost.any():
        room_tokens = (warmup_rounds + 1) * (settings.lengths[-1] + 1)

        def start_workload(live: int, context_end: int) -> DecodeState:
            set_workload = functools.partial(
                _set_workload,
                live=live,
                shards=row_shard_count(generator.mesh),
                first_position=context_end - room_tokens,
            )
            return jax.jit(set_workload, out_shardings=shardings)(state)

        def bind_length(length_index: int, state: DecodeState) -> RunRounds:
            return functools.partial(advance, force_length(length_index), state)

        _time_lengths(cost, settings, longest, room_tokens, start_workload, bind_length)
        cost = broadcast_table(cost)
        if jax.process_index() == 0:
            save_table(file, cost, "the next run times its rounds anew")
    return LengthChooser(acceptance=acceptance, round_cost=jnp.asarray(cost))


def _force_length(
    weights: RolloutWeights, empty: LengthChooser, mesh: Mesh, length_index: int
) -> RolloutWeights:
    """Returns weights whose chooser always takes one length."""
    # A table in which one length is cheapest makes the run's own program choose that length.
    cost = jnp.asarray(cost_table.single_length_cost(empty.round_cost.shape, length_index))
    chooser = jax.device_put(
        LengthChooser(acceptance=empty.acceptance, round_cost=cost), replicated_sharding(mesh)
    )
    return weights.replace(drafter=weights.drafter.replace(chooser=chooser))


def _sum_acceptance(statistics: Statistics, mesh: Mesh) -> AcceptanceEstimate:
    """Sums the acceptance of all rows."""
    total = jax.jit(
        lambda counts: jnp.sum(counts, axis=0, dtype=jnp.float32),
        out_shardings=replicated_sharding(mesh),
    )
    reached, accepted = (
        np.asarray(total(leaf)) for leaf in (statistics.reached, statistics.accepted)
    )
    return AcceptanceEstimate(
        reached=jnp.asarray(reached),
        accepted=jnp.asarray(accepted),
        seconds_to_lose=jnp.zeros((), jnp.float32),
    )


def _time_lengths(
    cost: np.ndarray,
    settings: Settings,
    longest: int,
    room_tokens: int,
    start_workload: Callable[[int, int], DecodeState],
    bind_length: Callable[[int, DecodeState], RunRounds],
) -> None:
    """Times a round of each length in each loop and context.

    Args:
      cost: table to fill.
      settings: settings of the generator.
      longest: tokens of the longest row.
      room_tokens: tokens that fit between a workload and the end of its context.
      start_workload: (rows per shard, end of the context) -> decode state.
      bind_length: (length index, decode state) -> function that runs rounds from there.
    """
    for loop, live in enumerate((settings.slots, *settings.tail)):
        for context, context_end in enumerate(cost_table.context_buckets(longest)):
            state = start_workload(live, context_end)
            for length_index, length in enumerate(settings.lengths):
                cost[length_index, loop:, context] = _time_round(
                    bind_length(length_index, state),
                    max(1, min(PILOT_ROUNDS, room_tokens // (length + 1) - 1)),
                )


def _set_workload(state: DecodeState, live: int, shards: int, first_position: int) -> DecodeState:
    """Limits a state to `live` rows per shard, and moves them to `first_position` if below it."""
    rollout = state.rollout
    numbers = jnp.arange(len(rollout.status), dtype=jnp.int32) % (len(rollout.status) // shards)
    status = jnp.where(numbers < live, rollout.status, EOS)
    skipped_tokens = jnp.maximum(first_position - rollout.prompt_lengths, 0)
    queue = state.queue
    moved_rollout = rollout.replace(
        status=status,
        prompt_lengths=rollout.prompt_lengths + skipped_tokens,
        lengths=rollout.lengths + skipped_tokens,
    )
    queue = queue.replace(waiting=queue.waiting & (numbers < live))
    return state.replace(rollout=moved_rollout, queue=queue)


def _time_round(run: RunRounds, rounds: int) -> float:
    """Measures the seconds of a round by the time that `rounds` more of them add to a call."""

    def time_call(count: int) -> float:
        start_time = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(count)))
        return time.perf_counter() - start_time

    time_call(1)  # warm-up
    # Calls have collectives, so all processes must make the same number of them.
    pair_seconds = float(
        broadcast_table(np.asarray(time_call(1) + time_call(1 + rounds), np.float32))
    )
    pairs = [
        (time_call(1), time_call(1 + rounds))
        for _ in range(max(MIN_REPEATS, min(MAX_REPEATS, int(PILOT_SECONDS / pair_seconds))))
    ]
    # Other programs can only slow a call down, so the minimum is the best estimate.
    short_seconds, long_seconds = (min(times) for times in zip(*pairs, strict=True))
    return cost_table.compute_round_seconds(short_seconds, long_seconds, rounds)


# ---- by public figures


def predict_chooser(generator: Generator, weights: RolloutWeights) -> LengthChooser:
    """Loads costs of an earlier run, or predicts them. Acceptance stays unknown.

    `weights` may be shapes only.
    """
    empty = length_chooser.init_chooser(generator.settings.lengths, generator.row_length)
    cost = load_costs(cost_file(generator, generator.prompt_length), empty.round_cost.shape)
    if not cost.any():
        settings = generator.settings
        cost = cost_table.predict_costs(
            _find_devices(generator.mesh),
            weights.target,
            weights.drafter.network,
            settings.lengths,
            (settings.slots, *settings.tail),
            generator.row_length,
        )
    return empty.replace(round_cost=jnp.asarray(cost))


def _find_devices(mesh: Mesh) -> GeneratorDevices:
    """Returns the public figures of a shard's devices.

    If they are unknown, uses those of `DEFAULT_CARD` and prints a remark.
    """
    kind = mesh.devices.flat[0].device_kind
    card = find_card_by_kind(kind)
    if card is None and jax.process_index() == 0:
        print_line(
            f"no public figures of {kind} are known: until its rounds are timed, draft lengths are"
            f" chosen by those of {DEFAULT_CARD}"
        )
    return GeneratorDevices(card or DEFAULT_CARD, mesh.shape[TENSOR], mesh.shape[EXPERT])


# ---- saved for the next run


def load_costs(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Loads the costs in process 0's file. Returns zeros if they cannot be used."""
    return broadcast_table(load_table(file, shape, "rounds are timed anew"))


def cost_file(generator: Generator, prompt_length: int) -> Path:
    """Returns the cache file of a generator's costs."""
    # Rounds cost the same whatever ends a row, so end tokens are not part of the key.
    return cache_folder() / "costs" / f"{_cost_key(_without_ends(generator), prompt_length)}.json"


def _without_ends(generator: Generator) -> Generator:
    """Removes end tokens and stop strings from a generator."""
    processing = generator.settings.processing._replace(stop_ids=())
    return generator.make_variant(processing=processing, stop=NO_STOP_STRINGS)


def _cost_key(generator: Generator, prompt_length: int) -> str:
    """Returns the cache key of a cost table."""
    settings = generator.settings
    # By name, since the repr of a function contains its address.
    names = {"mode": settings.mode.name, "verification": settings.verification.name}
    shape = settings._replace(**names)
    code = read_sources(
        *("host/round_cost.py", "run/round_timer.py", "compiled/roofline.py"),
        *("models/*.py", "kernels/*.py"),
        *("drafts/*.py", "rollout/**/*.py", "sampling.py"),
    )
    environment = jax.__version__, describe_machine(generator.mesh), generator.compiler_options
    networks = generator.weight_layouts, generator.description
    key_parts = *environment, shape, prompt_length, *networks, code
    return hashlib.sha256(repr(key_parts).encode()).hexdigest()[:16]
