"""Ahead-of-time compilation, and placement of arguments."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.links import Link, MeshLink, SameMesh
from jaxspec.processes import global_arrays
from jaxspec.rl.train_batch import plan_shardings
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.generator import Generator
from jaxspec.state import Prompts, PyTree, Rollout, RolloutWeights, ScoredRollout, TrainState
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder
from jaxspec.system.compiling import track_compilation
from jaxspec.system.terminal import LinePrinter

Answerer = Callable[[RolloutWeights, Prompts], Rollout]
"""Function that answers prompts.

Evaluations, offline draft data, `sample`, the closing comparison and benchmarks use one.
"""
ALL_ROUNDS = np.iinfo(np.int32).max
"""Number of rounds of a slice that runs until all rows have ended."""


def abstract_leaf(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Returns an array's shape and dtype with `sharding`."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract_arguments(step: Step, prompts: int) -> tuple[TrainState, ScoredRollout, Prompts]:
    """Describes the step's arguments without allocating them.

    The results have shapes, dtypes and shardings.
    """
    state = jax.tree.map(
        abstract_leaf, jax.eval_shape(step.init_random_state), step.state_shardings()
    )
    scored = abstract_scored_rollout(step, prompts, step.learner.mesh)
    return state, scored, abstract_prompts(step.generator, prompts)


def abstract_scored_rollout(step: Step, prompts: int, mesh: Mesh) -> ScoredRollout:
    """Describes a scored rollout on a mesh without allocating it."""
    rows = prompts * step.generator.settings.group_size
    shapes = jax.eval_shape(lambda: step.empty_scored_rollout(rows))
    # The plan's first axis is not rows, so it has shardings of its own.
    plan = jax.tree.map(abstract_leaf, shapes.plan, plan_shardings(mesh))
    return _abstract_rows(shapes, mesh).replace(plan=plan)


def abstract_prompts(generator: Generator, prompts: int) -> Prompts:
    """Describes a generator's prompts without allocating them."""
    return _abstract_rows(jax.eval_shape(lambda: generator.empty_prompts(prompts)), generator.mesh)


def _abstract_rows(tree: PyTree, mesh: Mesh) -> PyTree:
    """Describes a tree whose leaves are sharded by rows, and whose scalars are replicated."""
    row_sharding, replicated = meshes.row_sharding(mesh), meshes.replicated_sharding(mesh)
    return jax.tree.map(
        lambda leaf: abstract_leaf(leaf, row_sharding if leaf.ndim else replicated), tree
    )


def put_like(tree: PyTree, layout: PyTree) -> PyTree:
    """Places host arrays on the devices.

    The global arrays have the dtypes and shardings of `layout`. Each process must have the values
    of the shards on its own devices.
    """

    return jax.tree.map(
        lambda values, leaf: global_arrays.from_host_values(leaf, np.asarray(values, leaf.dtype)),
        tree,
        layout,
    )


def compile_ahead(
    function: Callable, *arguments: PyTree, print_line: LinePrinter | None = None, **options: Any
) -> tuple[Callable, PyTree]:
    """Compiles a function for abstract arguments.

    Returns the program, and its result's shapes and shardings. These can be arguments for
    compiling the next function. Reports slow compiles through `print_line`. `options` are those of
    `jax.jit`.
    """
    return trace_ahead(function, *arguments, print_line=print_line, **options)()


def trace_ahead(
    function: Callable, *arguments: PyTree, print_line: LinePrinter | None = None, **options: Any
) -> Callable[[], tuple[Callable, PyTree]]:
    """Traces a function for abstract arguments.

    Returns a call that compiles it as `compile_ahead` does. It may run in another thread.
    """
    lowered = jax.jit(function, **options).lower(*arguments)

    def compile_lowered() -> tuple[Callable, PyTree]:
        # Past compile times are kept in the cache, so that a report can say how long this one
        # takes.
        with track_compilation(function, arguments, cache_folder() / "compile_seconds", print_line):
            program = lowered.compile()
        return program, jax.tree.map(abstract_leaf, lowered.out_info, program.output_shardings)

    return compile_lowered


def open_weight_link(step: Step, state: TrainState) -> Link:
    """Opens the link of exported weights, from shapes and shardings of a state."""
    exported = jax.eval_shape(step.export, state)
    source = jax.tree.map(abstract_leaf, exported, step.learner.train_layout(exported))
    if step.shares_devices:
        return SameMesh(source)
    # Weights arrive split over all devices of the generator. Those that cannot be split arrive on
    # some. So each travels once. Loading spreads them.
    landing = meshes.split_rollout_layout(step.generator.mesh, exported)
    return MeshLink(source, jax.tree.map(abstract_leaf, exported, landing), spreads=True)


def sync_weights(step: Step, state: TrainState) -> RolloutWeights:
    """Returns a state's weights on the generator's mesh, as it loads them."""
    if step.shares_devices:
        return jax.jit(step.sync)(state)
    link = open_weight_link(step, state)
    packed = jax.jit(lambda state: link.pack(step.export(state)))(state)
    return jax.jit(lambda packed: step.generator.load(*link.unpack(packed)))(link.move(packed))


def compile_for_generator(
    generator: Generator, function: Callable, *arguments: PyTree, **options: Any
) -> tuple[Callable, PyTree]:
    """Compiles a function with the generator's compiler options."""
    return compile_ahead(
        function, *arguments, compiler_options=generator.compiler_options, **options
    )


def times_real_rounds(generator: Generator) -> bool:
    """Whether the first rollout of a run times rounds of each draft length, in place of a pilot."""
    # On accelerators, to compile a pilot would take minutes.
    return bool(generator.settings.lengths) and meshes.has_accelerators(generator.mesh)


def compile_answerer(generator: Generator, weights: RolloutWeights, prompts: Prompts) -> Answerer:
    """Compiles a whole rollout as one program."""
    by_row = meshes.row_sharding(generator.mesh)
    return compile_for_generator(
        generator, generator.generate, weights, prompts, out_shardings=by_row
    )[0]


def compile_generation_alone(step: Step, prompts: int) -> Answerer:
    """Compiles generation without learning, to measure its memory."""
    state, _, abstract_prompts = abstract_arguments(step, prompts)
    _, weights = compile_ahead(step.sync, state)
    return compile_answerer(step.generator, weights, abstract_prompts)


class TimedRollout(NamedTuple):
    """A rollout with its times."""

    rollout: Rollout
    prefill_seconds: float
    loop_seconds: float
    rounds: int
    """Rounds of the data shard that made the most."""

    @property
    def seconds(self) -> float:
        """Time of the whole rollout, prefill included."""
        return self.prefill_seconds + self.loop_seconds


class SlicedAnswerer:
    """Answerer whose generation the host can stop between rounds."""

    begin: Callable[[RolloutWeights, Prompts], DecodeState]
    """Compiled prefill."""
    advance: Callable[[RolloutWeights, DecodeState, np.int32], DecodeState]
    """Compiled slice of the given number of rounds. Donates the decode state."""
    decode_state: DecodeState
    """Shapes and shardings of the decode state."""

    def __init__(self, generator: Generator, weights: RolloutWeights, prompts: Prompts) -> None:
        """Compiles prefill and slices for arguments like `weights` and `prompts`."""
        self._generator = generator
        self.begin, self.decode_state = compile_for_generator(
            generator, generator.begin, weights, prompts
        )
        # A slice's state is donated to the next slice, so both must have the same layout.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.decode_state)
        # The number of rounds is an array, so one program runs slices of any size.
        rounds = jax.ShapeDtypeStruct((), jnp.int32)
        self.advance, _ = compile_for_generator(
            generator,
            generator.advance,
            *(weights, self.decode_state, rounds),
            donate_argnums=1,
            out_shardings=shardings,
        )

    def collect(self, weights: RolloutWeights, decode_state: DecodeState) -> Rollout:
        """Returns the rows generated so far."""
        by_row = meshes.row_sharding(self._generator.mesh)
        # Arrays without elements come back without their sharding.
        return jax.device_put(self._generator.collect(weights, decode_state), by_row)

    def __call__(self, weights: RolloutWeights, prompts: Prompts) -> Rollout:
        """Answers all prompts."""
        decode_state = self.begin(weights, prompts)
        return self.collect(weights, self.advance(weights, decode_state, np.int32(ALL_ROUNDS)))

    def time_call(self, weights: RolloutWeights, prompts: Prompts) -> TimedRollout:
        """Answers all prompts, and times prefill and loop."""
        start_time = time.perf_counter()
        # Calls return before the device has finished, so each time waits for its result.
        decode_state = jax.block_until_ready(self.begin(weights, prompts))
        prefill_time = time.perf_counter()
        decode_state = self.advance(weights, decode_state, np.int32(ALL_ROUNDS))
        rollout = jax.block_until_ready(self.collect(weights, decode_state))
        end_time = time.perf_counter()
        return TimedRollout(
            rollout,
            prefill_time - start_time,
            end_time - prefill_time,
            int(jnp.max(rollout.statistics.end_round)),
        )
