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
from jaxspec.rl.train_batch import plan_layout
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.generator import Generator
from jaxspec.state import Finished, Prompts, PyTree, Ready, Rollout, TrainState
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder
from jaxspec.system.compiling import LinePrinter, track_compilation


def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array that is not there, with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract(step: Step, prompts: int) -> tuple[TrainState, Finished, Prompts]:
    """Shapes, types and shardings of the step's arguments. Nothing is allocated."""
    state = jax.tree.map(placed, jax.eval_shape(step.fresh), step.state_shardings())
    return state, abstract_finished(step, prompts), abstract_prompts(step.generator, prompts)


def abstract_finished(step: Step, prompts: int) -> Finished:
    """Shapes, types and shardings of a scored rollout."""
    rows = prompts * step.generator.settings.group_size
    shapes = jax.eval_shape(lambda: step.nothing_finished(rows))
    plan = jax.tree.map(placed, shapes.plan, plan_layout(step.mesh))
    return _by_row(shapes, step.mesh).replace(plan=plan)


def abstract_prompts(generator: Generator, prompts: int) -> Prompts:
    """Shapes, types and shardings of a generator's prompts."""
    return _by_row(jax.eval_shape(lambda: generator.no_prompts(prompts)), generator.mesh)


def _by_row(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shapes whose first axis is rows, with the sharding of rows; scalars are everywhere."""
    rows, whole = meshes.rows_sharding(mesh), meshes.replicated(mesh)
    return jax.tree.map(lambda leaf: placed(leaf, rows if leaf.ndim else whole), tree)


def put(tree: PyTree, like: PyTree) -> PyTree:
    """Host arrays, known to every process where it needs them, as global arrays placed as
    `like`."""

    return jax.tree.map(
        lambda values, leaf: meshes.from_host(leaf, np.asarray(values, leaf.dtype)), tree, like
    )


def numbers(metrics: dict[str, Array | float]) -> dict[str, float]:
    """Metrics on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def ahead(
    function: Callable, *arguments: PyTree, tell: LinePrinter | None = None, **options: Any
) -> tuple[Callable, PyTree]:
    """Compiles a function for abstract arguments; returns it with its result's shapes and
    shardings, to compile the next one for. Reports slow compiles through `tell`."""
    lowered = jax.jit(function, **options).lower(*arguments)
    with track_compilation(function, arguments, cache_folder() / "compile_seconds", tell):
        program = lowered.compile()
    return program, jax.tree.map(placed, lowered.out_info, program.output_shardings)


def ahead_with(
    generator: Generator, function: Callable, *arguments: PyTree, **options: Any
) -> tuple[Callable, PyTree]:
    """`ahead` for what generates, by the options of the generator's programs."""
    return ahead(function, *arguments, compiler_options=generator.compiler_options, **options)


def times_real_rounds(generator: Generator) -> bool:
    """Whether a run's first rollout times rounds of each draft length, in place of a pilot.

    So do accelerators, on which compiling a pilot takes minutes.
    """
    return bool(generator.settings.lengths) and meshes.accelerated(generator.mesh)


def generation_program(step: Step, ready: Ready, prompts: Prompts) -> Any:
    """Compiles generation as one program, from its first token to its last."""
    generator, by_row = step.generator, meshes.rows_sharding(step.mesh)
    return ahead_with(generator, generator.generate, ready, prompts, out_shardings=by_row)[0]


def generation_alone(step: Step, prompts: int) -> Any:
    """The program of generation by itself, for what it takes of memory."""
    state, _, wanted = abstract(step, prompts)
    _, ready = ahead(step.sync, state)
    return generation_program(step, ready, wanted)


class Timed(NamedTuple):
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

    def __init__(self, generator: Generator, ready: Ready, prompts: Prompts):
        def to_the_end(ready: Ready, running: DecodeState) -> DecodeState:
            return generator.advance(ready, running, jnp.int32(np.iinfo(np.int32).max))

        self._generator = generator
        self._begin, running = ahead_with(generator, generator.begin, ready, prompts)
        same = jax.tree.map(lambda leaf: leaf.sharding, running)
        self._advance, _ = ahead_with(
            generator, to_the_end, ready, running, donate_argnums=1, out_shardings=same
        )

    def __call__(self, ready: Ready, prompts: Prompts) -> Timed:
        """Answers all prompts."""
        began = time.perf_counter()
        running = jax.block_until_ready(self._begin(ready, prompts))
        middle = time.perf_counter()
        rollout = jax.block_until_ready(
            self._generator.collect(ready, self._advance(ready, running))
        )
        end = time.perf_counter()
        return Timed(rollout, middle - began, end - middle, int(jnp.max(rollout.statistics.ended)))
