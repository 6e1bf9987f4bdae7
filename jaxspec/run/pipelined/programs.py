"""Compiled programs of the two sides of a pipelined run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxspec import mesh as meshes
from jaxspec.evaluation.program import WeightSource
from jaxspec.host.programs import (
    Answerer,
    abstract_arguments,
    abstract_scored_rollout,
    compile_ahead,
    open_weight_link,
)
from jaxspec.links import Link, open_link
from jaxspec.run.evaluations import AnswerMethods, WeightsAnswerer
from jaxspec.run.schedules import (
    SliceCallback,
    compile_sliced_generation,
    uniform_slices,
)
from jaxspec.state import Prompts, PyTree, Rollout, RolloutWeights, ScoredRollout, TrainState
from jaxspec.step import Step


@dataclasses.dataclass(frozen=True)
class PipelinedSchedule:
    """Compiled programs of a run whose batches lag behind by `lag` updates.

    Weights are published by the learner, and loaded by the generator. Batches are sent by the
    generator, and received by the learner.
    """

    lag: int
    shares_devices: bool
    """Whether both sides have the same mesh. They then take turns."""
    programs: Mapping[str, Any]
    """Compiled programs, by phase."""
    weight_link: Link
    batch_link: Link
    generate: Callable[[RolloutWeights, Prompts, SliceCallback], Rollout | None]
    """Generates in slices. Returns None if the callback asks to stop."""
    answerer: Answerer
    """Answers prompts by the same programs, without a callback."""
    weight_source: WeightSource
    """Source of published weights, on the generator's mesh."""

    @property
    def answer_methods(self) -> AnswerMethods:
        """Ways to answer the prompts of evaluations by published weights."""

        def bind(published: PyTree) -> WeightsAnswerer:
            weights = self.load(published)
            return WeightsAnswerer(lambda prompts: self.answerer(weights, prompts), published)

        return AnswerMethods(bind, self.weight_source)

    def learn(self, state: TrainState, scored: ScoredRollout) -> tuple[TrainState, PyTree]:
        """Learns from a batch. Donates the state, and returns the new one with metrics."""
        return self.programs["train"](state, scored)

    def publish(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Exports the weights of a state, and sends them to the generator's mesh.

        Returns what is sent, and what arrives, both perhaps before they are computed.
        """
        packed = self.programs["publish"](state)
        return packed, self.weight_link.move(packed)

    def load(self, published: PyTree) -> RolloutWeights:
        """Loads published weights on the generator's mesh."""
        return self.programs["load"](published)

    def restart_timing(self) -> None:
        """Does nothing, since this schedule times no rounds."""

    def measure(self, rollout: Rollout, weights: RolloutWeights) -> PyTree:
        """Returns metrics of a rollout."""
        return self.programs["measure"](rollout, weights)

    def send(self, scored: ScoredRollout) -> PyTree:
        """Sends a scored rollout to the learner's mesh."""
        # On the same mesh, nothing else reads the rollout, so a copy is not needed.
        if self.shares_devices:
            return scored
        return self.batch_link.move(self.programs["send"](scored))

    def receive(self, packed: PyTree) -> ScoredRollout:
        """Receives a rollout on the learner's mesh. It has no plan."""
        return packed if self.shares_devices else self.programs["receive"](packed)


def compile_pipelined_schedule(
    step: Step, prompt_count: int, lag: int, slice_rounds: int
) -> PipelinedSchedule:
    """Compiles the programs of both sides.

    Generation runs in slices of `slice_rounds` rounds.
    """
    state, scored, prompt_shapes = abstract_arguments(step, prompt_count)
    replicated = meshes.replicated_sharding(step.learner.mesh)
    learn, _ = compile_ahead(
        step.learn,
        *(state, scored),
        donate_argnums=0,
        out_shardings=(step.state_shardings(), replicated),
    )
    sent = abstract_scored_rollout(step, prompt_count, step.generator.mesh).replace(plan=None)
    received = scored.replace(plan=None)
    weight_link, batch_link = open_weight_link(step, state), open_link(sent, received)

    def publish(state: TrainState) -> PyTree:
        return weight_link.pack(step.export(state))

    def load(published: PyTree) -> RolloutWeights:
        return step.generator.load(*weight_link.unpack(published))

    publish_program, _ = compile_ahead(
        publish, state, out_shardings=_shardings(weight_link.source_layout)
    )
    load_program, weights = compile_ahead(load, weight_link.target_layout)
    generate, generation_programs = compile_sliced_generation(
        step, weights, prompt_shapes, uniform_slices(slice_rounds)
    )
    measure, _ = compile_ahead(
        step.generator.measure_rollout,
        *(sent.rollout, weights),
        out_shardings=meshes.replicated_sharding(step.generator.mesh),
    )
    programs = {
        "train": learn,
        "publish": publish_program,
        "load": load_program,
        **generation_programs,
        "measure": measure,
    }
    if not step.shares_devices:
        programs["send"], _ = compile_ahead(batch_link.pack, sent)
        programs["receive"], _ = compile_ahead(
            batch_link.unpack,
            batch_link.target_layout,
            out_shardings=_shardings(received),
        )

    def answer_prompts(weights: RolloutWeights, prompts: Prompts) -> Rollout:
        rollout = generate(weights, prompts, lambda _: False)
        assert rollout is not None, "nothing asks it to stop"
        return rollout

    return PipelinedSchedule(
        lag=lag,
        shares_devices=step.shares_devices,
        programs=programs,
        weight_link=weight_link,
        batch_link=batch_link,
        generate=generate,
        answerer=answer_prompts,
        weight_source=WeightSource(weight_link.target_layout, weight_link.unpack),
    )


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
