"""Compiled programs of the two sides of a pipelined run."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jaxspec import mesh as meshes
from jaxspec.evaluation.program import WeightSource
from jaxspec.host.programs import (
    abstract_arguments,
    abstract_prompts,
    abstract_scored_rollout,
    compile_ahead,
    open_weight_link,
    trace_ahead,
)
from jaxspec.links import Link, open_link
from jaxspec.processes import mailbox, roles
from jaxspec.run.evaluations import AnswerMethods, WeightsAnswerer
from jaxspec.run.schedules import (
    SliceCallback,
    compile_learning,
    compile_measurement,
    compile_sliced_generation,
    uniform_slices,
)
from jaxspec.state import Prompts, PyTree, Rollout, RolloutWeights, ScoredRollout, TrainState
from jaxspec.step import Step, run_inline
from jaxspec.system.terminal import LinePrinter


class Placement(enum.Enum):
    """Placement of the two sides of a run."""

    TURNS = "on the same devices, in turn"
    THREADS = "on other devices of one process"
    PROCESSES = "in processes of their own"


@dataclasses.dataclass(frozen=True)
class PipelinedSchedule:
    """Compiled programs of a run whose batches lag behind by `lag` updates.

    Weights are published by the learner, and loaded by the generator. Batches are sent by the
    generator, and received by the learner.
    """

    lag: int
    placement: Placement
    programs: Mapping[str, Any]
    """Compiled programs of this process's side or sides, by phase."""
    weight_link: Link
    batch_link: Link
    generate: Callable[[RolloutWeights, Prompts, SliceCallback], Rollout | None]
    """Generates in slices. Returns None if the callback asks to stop."""
    generates: bool
    """Whether this process generates."""
    weight_source: WeightSource
    """Source of published weights, on the generator's mesh."""

    @property
    def answer_methods(self) -> AnswerMethods:
        """Ways to answer the prompts of evaluations by published weights."""

        def bind(published: PyTree) -> WeightsAnswerer:
            weights = self.load(published)

            def answer_prompts(prompts: Prompts) -> Rollout:
                rollout = self.generate(weights, prompts, lambda _: False)
                assert rollout is not None, "nothing asks it to stop"
                return rollout

            return WeightsAnswerer(answer_prompts, published)

        return AnswerMethods(bind, self.weight_source, self.generates)

    def learn(self, state: TrainState, scored: ScoredRollout) -> tuple[TrainState, PyTree]:
        """Learns from a batch. Donates the state, and returns the new one with metrics."""
        return self.programs["train"](state, scored)

    def pack_weights(self, state: TrainState) -> PyTree:
        """Exports the weights of a state, packed for their link."""
        return self.programs["publish"](state)

    def load(self, published: PyTree) -> RolloutWeights:
        """Loads published weights on the generator's mesh."""
        return self.programs["load"](published)

    def restart_timing(self) -> None:
        """Does nothing, since this schedule times no rounds."""

    def measure(self, rollout: Rollout, weights: RolloutWeights) -> PyTree:
        """Returns metrics of a rollout."""
        return self.programs["measure"](rollout, weights)

    def pack_batch(self, scored: ScoredRollout) -> PyTree:
        """Packs a scored rollout for its link."""
        # On the same mesh nothing else reads the rollout, so no copy is needed.
        return self.programs["send"](scored) if "send" in self.programs else scored

    def unpack_batch(self, packed: PyTree) -> ScoredRollout:
        """Unpacks a scored rollout on the learner's mesh. It has no plan."""
        return self.programs["receive"](packed) if "receive" in self.programs else packed

    def send_batch(self, packed: PyTree) -> ScoredRollout:
        """Moves a packed rollout to the learner's mesh in this process, and unpacks it."""
        return self.unpack_batch(self.batch_link.move(packed))


def compile_pipelined_schedule(
    step: Step, prompt_count: int, lag: int, slice_rounds: int
) -> PipelinedSchedule:
    """Compiles the programs of both sides.

    Generation runs in slices of `slice_rounds` rounds.
    """
    state, scored, _ = abstract_arguments(step, prompt_count)
    sent = abstract_scored_rollout(step, prompt_count, step.generator.mesh).replace(plan=None)
    weight_link = open_weight_link(step, state)
    batch_link = open_link(sent, scored.replace(plan=None))
    learns, generates = map(roles.owns_part, (step.learner.mesh, step.generator.mesh))
    placement = Placement.THREADS if learns and generates else Placement.PROCESSES
    placement = Placement.TURNS if step.shares_devices else placement
    if placement == Placement.PROCESSES:
        # Before anything long, since some devices may have no such server.
        mailbox.open_server()
    programs: dict[str, Any] = {}
    generate = _generate_nothing
    if learns:
        programs |= _compile_learner(step, state, scored, weight_link, batch_link)
    if generates:
        generate, generation_programs = _compile_generator(
            step, prompt_count, sent, weight_link, batch_link, slice_rounds
        )
        programs |= generation_programs
    return PipelinedSchedule(
        lag=lag,
        placement=placement,
        programs=programs,
        weight_link=weight_link,
        batch_link=batch_link,
        generate=generate,
        generates=generates,
        weight_source=WeightSource(weight_link.target_layout, weight_link.unpack),
    )


def _generate_nothing(
    weights: RolloutWeights, prompts: Prompts, on_slice: SliceCallback
) -> Rollout | None:
    raise AssertionError("other processes generate")


def _compile_learner(
    step: Step, state: TrainState, scored: ScoredRollout, weight_link: Link, batch_link: Link
) -> dict[str, Any]:
    """Compiles the programs of the learner's side."""

    def publish(state: TrainState) -> PyTree:
        return weight_link.pack(step.export(state))

    published = _shardings(weight_link.source_layout)
    programs = {
        "train": compile_learning(step, state, scored),
        "publish": compile_ahead(publish, state, out_shardings=published)[0],
    }
    if not step.shares_devices:
        received = _shardings(scored.replace(plan=None))
        programs["receive"], _ = compile_ahead(
            batch_link.unpack, batch_link.target_layout, out_shardings=received
        )
    return programs


def _compile_generator(
    step: Step,
    prompt_count: int,
    sent: ScoredRollout,
    weight_link: Link,
    batch_link: Link,
    slice_rounds: int,
) -> tuple[Callable, dict[str, Any]]:
    """Compiles the programs of the generator's side. Returns generation apart, and all by phase."""

    def load(published: PyTree) -> RolloutWeights:
        return step.generator.load(*weight_link.unpack(published))

    load_program, weights = compile_ahead(load, weight_link.target_layout)
    generate, programs = compile_sliced_generation(
        step, weights, abstract_prompts(step.generator, prompt_count), uniform_slices(slice_rounds)
    )
    measure = compile_measurement(step.generator, sent.rollout, weights)
    programs |= {"load": load_program, "measure": measure}
    if not step.shares_devices:
        programs["send"], _ = compile_ahead(batch_link.pack, sent)
    return generate, programs


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


class SidePrograms(NamedTuple):
    """A program of each side, to analyze it without running it."""

    programs: Mapping[str, Any]
    """Programs of learner and generator, in this order."""
    weight_bytes: int
    """Bytes of the weights that travel for each version."""
    batch_bytes: int
    """Bytes of a batch that travel back."""


def compile_side_programs(
    step: Step, prompt_count: int, print_line: LinePrinter | None = None
) -> SidePrograms:
    """Compiles all work of each side between two transfers as one program.

    The phases have the names that they have in a fused step.
    """
    state, scored, prompts = abstract_arguments(step, prompt_count)
    sent = abstract_scored_rollout(step, prompt_count, step.generator.mesh).replace(plan=None)
    weight_link = open_weight_link(step, state)
    batch_link = open_link(sent, scored.replace(plan=None))

    def learn(state: TrainState, scored: ScoredRollout) -> Any:
        state, metrics = run_inline("train", step.learn, state, scored)
        return state, metrics, run_inline("prepare", weight_link.pack, step.export(state))

    def generate(published: PyTree, prompts: Prompts) -> Any:
        weights = run_inline(
            "prepare", lambda packed: step.generator.load(*weight_link.unpack(packed)), published
        )
        rollout = run_inline("generate", step.generator.generate, weights, prompts)
        return rollout, run_inline("measure", step.generator.measure_rollout, rollout, weights)

    learner_layout = (
        step.state_shardings(),
        meshes.replicated_sharding(step.learner.mesh),
        _shardings(weight_link.source_layout),
    )
    generator_layout = (
        meshes.row_sharding(step.generator.mesh),
        meshes.replicated_sharding(step.generator.mesh),
    )
    compile_calls = {
        "train": trace_ahead(
            learn,
            *(state, scored),
            print_line=print_line,
            donate_argnums=0,
            out_shardings=learner_layout,
        ),
        "generate": trace_ahead(
            generate,
            *(weight_link.target_layout, prompts),
            print_line=print_line,
            compiler_options=step.generator.compiler_options,
            out_shardings=generator_layout,
        ),
    }
    # For thousands of devices most of the compiler's work is on a single core.
    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(call) for name, call in compile_calls.items()}
    programs = {name: future.result()[0] for name, future in futures.items()}
    return SidePrograms(programs, weight_link.bytes, batch_link.bytes)
