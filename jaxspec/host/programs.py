"""Compiles the programs of a job ahead of time, and places their arguments."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxspec import mesh as meshes
from jaxspec.rl.train_batch import plan_shardings
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.generator import Generator
from jaxspec.state import Prompts, PyTree, Rollout, RolloutWeights, ScoredRollout, TrainState
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder
from jaxspec.system.compiling import LinePrinter, track_compilation


def abstract_leaf(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array that is not there, with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract_arguments(step: Step, prompts: int) -> tuple[TrainState, ScoredRollout, Prompts]:
    """Shapes, types and shardings of the step's arguments. Nothing is allocated."""
    state = jax.tree.map(
        abstract_leaf, jax.eval_shape(step.init_random_state), step.state_shardings()
    )
    return state, abstract_scored_rollout(step, prompts), abstract_prompts(step.generator, prompts)


def abstract_scored_rollout(step: Step, prompts: int) -> ScoredRollout:
    """Shapes, types and shardings of a scored rollout."""
    rows = prompts * step.generator.settings.group_size
    shapes = jax.eval_shape(lambda: step.empty_scored_rollout(rows))
    plan = jax.tree.map(abstract_leaf, shapes.plan, plan_shardings(step.mesh))
    return _abstract_rows(shapes, step.mesh).replace(plan=plan)


def abstract_prompts(generator: Generator, prompts: int) -> Prompts:
    """Shapes, types and shardings of a generator's prompts."""
    return _abstract_rows(jax.eval_shape(lambda: generator.no_prompts(prompts)), generator.mesh)


def _abstract_rows(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shapes whose first axis is rows, with the sharding of rows; scalars are everywhere."""
    row_sharding, replicated = meshes.row_sharding(mesh), meshes.replicated_sharding(mesh)
    return jax.tree.map(
        lambda leaf: abstract_leaf(leaf, row_sharding if leaf.ndim else replicated), tree
    )


def put_like(tree: PyTree, layout: PyTree) -> PyTree:
    """Host arrays, known to every process where it needs them, as global arrays placed as
    `layout`."""

    return jax.tree.map(
        lambda values, leaf: meshes.from_host_values(leaf, np.asarray(values, leaf.dtype)),
        tree,
        layout,
    )


def metrics_to_host(metrics: dict[str, Array | float]) -> dict[str, float]:
    """Metrics on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def compile_ahead(
    function: Callable, *arguments: PyTree, print_line: LinePrinter | None = None, **options: Any
) -> tuple[Callable, PyTree]:
    """Compiles a function for abstract arguments; returns it with its result's shapes and
    shardings, to compile the next one for. Reports slow compiles through `print_line`."""
    lowered = jax.jit(function, **options).lower(*arguments)
    with track_compilation(function, arguments, cache_folder() / "compile_seconds", print_line):
        program = lowered.compile()
    return program, jax.tree.map(abstract_leaf, lowered.out_info, program.output_shardings)


def compile_for_generator(
    generator: Generator, function: Callable, *arguments: PyTree, **options: Any
) -> tuple[Callable, PyTree]:
    """`compile_ahead` for what generates, by the options of the generator's programs."""
    return compile_ahead(
        function, *arguments, compiler_options=generator.compiler_options, **options
    )


def times_real_rounds(generator: Generator) -> bool:
    """Whether a run's first rollout times rounds of each draft length, in place of a pilot.

    So do accelerators, on which compiling a pilot takes minutes.
    """
    return bool(generator.settings.lengths) and meshes.has_accelerators(generator.mesh)


def compile_generation(step: Step, weights: RolloutWeights, prompts: Prompts) -> Any:
    """Compiles generation as one program, from its first token to its last."""
    generator, by_row = step.generator, meshes.row_sharding(step.mesh)
    return compile_for_generator(
        generator, generator.generate, weights, prompts, out_shardings=by_row
    )[0]


def compile_generation_alone(step: Step, prompts: int) -> Any:
    """The program of generation by itself, for what it takes of memory."""
    state, _, abstract_prompts = abstract_arguments(step, prompts)
    _, weights = compile_ahead(step.sync, state)
    return compile_generation(step, weights, abstract_prompts)


class TimedRollout(NamedTuple):
    """A rollout against the clock."""

    rollout: Rollout
    prefill_seconds: float
    loop_seconds: float
    rounds: int
    """Of the longest loop: that of the shard that made most."""

    @property
    def seconds(self) -> float:
        """Prefill and loop together."""
        return self.prefill_seconds + self.loop_seconds


class TimedGeneration:
    """Generation compiled in two parts, so that its rounds are timed without the prefill."""

    def __init__(self, generator: Generator, weights: RolloutWeights, prompts: Prompts):
        def advance_to_end(weights: RolloutWeights, decode_state: DecodeState) -> DecodeState:
            return generator.advance(weights, decode_state, jnp.int32(np.iinfo(np.int32).max))

        self._generator = generator
        self._begin, decode_state = compile_for_generator(
            generator, generator.begin, weights, prompts
        )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, decode_state)
        self._advance, _ = compile_for_generator(
            generator,
            advance_to_end,
            weights,
            decode_state,
            donate_argnums=1,
            out_shardings=shardings,
        )

    def __call__(self, weights: RolloutWeights, prompts: Prompts) -> TimedRollout:
        """Answers all prompts."""
        start_time = time.perf_counter()
        decode_state = jax.block_until_ready(self._begin(weights, prompts))
        prefill_time = time.perf_counter()
        rollout = jax.block_until_ready(
            self._generator.collect(weights, self._advance(weights, decode_state))
        )
        end_time = time.perf_counter()
        return TimedRollout(
            rollout,
            prefill_time - start_time,
            end_time - prefill_time,
            int(jnp.max(rollout.statistics.end_round)),
        )
