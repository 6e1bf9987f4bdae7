"""Settings and programs of evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jaxspec import mesh as meshes
from jaxspec.build import automatic_sizes, build_step
from jaxspec.config.settings import AdvantageConfig, DynamicSamplingConfig, ResolvedConfig
from jaxspec.config.split import check_generator
from jaxspec.data.problems import ProblemSets
from jaxspec.data.scoring import Judge
from jaxspec.evaluation.evaluator import Evaluator, PolicyAnswerer
from jaxspec.host.fit import fit_step
from jaxspec.host.loaded_run import resize_overlap
from jaxspec.host.programs import (
    Answerer,
    abstract_arguments,
    abstract_prompts,
    compile_ahead,
    compile_answerer,
)
from jaxspec.host.prompts import PromptSource
from jaxspec.host.scoring import RolloutScorer
from jaxspec.inputs.checked import prefix_errors
from jaxspec.processes import roles
from jaxspec.rewards.scorer import SetScorers
from jaxspec.rollout.pages import min_pool_size
from jaxspec.state import ExportedWeights, GeneratorState, NoChooser, PyTree, RolloutWeights
from jaxspec.step import Step
from jaxspec.system.terminal import LinePrinter
from jaxspec.tokens.tokenizer import Tokenizer


class WeightSource(NamedTuple):
    """Source of the weights that a program evaluates."""

    argument: PyTree
    """Shapes and shardings of the program's argument, such as a state."""
    export: Callable[[Any], tuple[ExportedWeights, GeneratorState]]
    """Exports the weights of such an argument, which stays as it is."""


class EvaluationProgram(NamedTuple):
    """Compiled programs that answer by the policy of a state."""

    load_weights: Callable[[Any], RolloutWeights]
    """Loads the policy of an argument of the weight source, which stays as it is."""
    answerer: Answerer

    @property
    def programs(self) -> Mapping[str, Any]:
        """Compiled programs, by phase."""
        return {"prepare": self.load_weights, "generate": self.answerer}

    def bind(self, argument: Any) -> PolicyAnswerer:
        """Returns an answerer with the policy of an argument of the weight source."""
        return partial(self.answerer, self.load_weights(argument))


# The choice among several lengths relies on measurements of the run's own rollouts.
DRAFT_LENGTH = 3
"""Draft length of evaluations if the run chooses among several."""


def samples_per_problem(config: ResolvedConfig) -> int:
    """Returns the number of answers to each problem."""
    return config.eval.samples or config.batch.group_size


SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_new_tokens", "max_new_tokens", "stop")
"""Settings of `rollout` that `eval` may replace."""


def sampling_settings(config: ResolvedConfig) -> dict[str, Any]:
    """Returns the sampling settings of evaluations, by name."""
    settings, rollout = config.eval, config.rollout
    requested = {name: getattr(settings, name) for name in SAMPLING_SETTINGS}
    requested["max_new_tokens"] = settings.max_new_tokens or "same"
    values = {
        name: getattr(rollout, name) if value == "same" else value
        for name, value in requested.items()
    }
    # Evaluations may have shorter responses than the run, whose minimum could then exceed them.
    if settings.min_new_tokens == "same":
        values["min_new_tokens"] = min(rollout.min_new_tokens, values["max_new_tokens"] - 1)
    return values


def list_differing_settings(config: ResolvedConfig) -> list[str]:
    """Lists settings of evaluations that differ from the run's.

    If there are none, the run's program can answer evaluations.
    """
    differences = [
        f"eval.{name} {list(value) if isinstance(value, tuple) else value}"
        for name, value in sampling_settings(config).items()
        if value != getattr(config.rollout, name)
    ]
    # The run's program answers each prompt with one group in each call.
    if samples_per_problem(config) % config.batch.group_size:
        differences.append(
            f"eval.samples {samples_per_problem(config)}, no multiple of batch.group_size"
            f" {config.batch.group_size}"
        )
    return differences


def evaluation_config(config: ResolvedConfig, shards: int) -> ResolvedConfig:
    """Returns the config of a program for evaluations.

    A call samples all answers to each of its prompts. It has about as many rows as the run's batch.

    Args:
      config: the run's config.
      shards: number of row shards.
    """
    rollout, batch = config.rollout, config.batch
    samples = samples_per_problem(config)
    prompts = max(1, batch.prompts * batch.group_size // samples // shards) * shards
    sampling = sampling_settings(config)
    max_new_tokens = sampling["max_new_tokens"]
    draft, engine = rollout.draft, rollout.engine
    if draft.length_choices:
        draft = replace(draft, draft_length=DRAFT_LENGTH)
    if engine.pages and isinstance(engine.page_size, int):
        # A pool that suffices for the run's rows may be too small for those of evaluations.
        row = config.data.max_prompt_length, max_new_tokens, draft.max_draft_length
        min_pages = min_pool_size(prompts // shards, *row, engine.page_size)
        engine = replace(engine, pages=max(engine.pages, min_pages))
    return replace(
        config,
        rollout=replace(rollout, draft=draft, engine=engine, **sampling),
        batch=replace(batch, prompts=prompts, group_size=samples, mini_batches=1),
        # Nothing is learned, and a group of one answer has no advantage relative to the others.
        advantage=AdvantageConfig(baseline="none"),
        dynamic_sampling=DynamicSamplingConfig(),
    )


def build_evaluation_step(
    config: ResolvedConfig, run_stop: tuple[str, ...], run_step: Step, tokenizer: Tokenizer
) -> Step:
    """Builds the step of an evaluation.

    Args:
      config: config from `evaluation_config`.
      run_stop: the run's stop strings.
      run_step: the run's step. The result has its learner.
      tokenizer: the run's tokenizer.
    """
    stop = run_step.generator.settings.stop
    if config.rollout.stop != run_stop:
        tokenizer = tokenizer.with_stops(config.rollout.stop, config.rollout.stop_ids)
        stop = tokenizer.build_stop_table(config.rollout.stop)
    mesh = run_step.generator.mesh
    step = build_step(config, mesh, tokenizer.stop_ids, tokenizer.size, stop)
    # Memory is planned next to the run's training state, not one built from this config.
    return replace(step, learner=run_step.learner)


def compile_evaluator(
    run_config: ResolvedConfig,
    run_step: Step,
    tokenizer: Tokenizer,
    sets: ProblemSets,
    scorers: SetScorers,
    say: LinePrinter,
    with_text: bool = False,
    source: WeightSource | None = None,
) -> tuple[Evaluator, EvaluationProgram]:
    """Compiles an evaluator's own program. Returns both.

    Args:
      run_config: the run's config.
      run_step: the run's step.
      tokenizer: the run's tokenizer.
      sets: the problems.
      scorers: scorers of the answers.
      say: prints warnings.
      with_text: whether records include the text of responses.
      source: source of the weights. None: states of the run's step.

    Raises:
      ConfigError: the settings are invalid, or the program does not fit next to the run's state.
    """
    mesh = run_step.generator.mesh
    config = evaluation_config(run_config, meshes.row_shard_count(mesh))
    with prefix_errors("evaluations"):
        check_generator(config, mesh.size, len(roles.find_owners(mesh)))
    stop = run_config.rollout.stop
    evaluation_step = build_evaluation_step(config, stop, run_step, tokenizer)
    prompts, grid = config.batch.prompts, run_step.generator.settings.grid
    if source is None:
        state, _, _ = abstract_arguments(run_step, run_config.batch.prompts)
        source = WeightSource(state, run_step.export)
    argument, export = source

    # Called for each size that `fit_step` tries.
    def compile_program(step: Step) -> EvaluationProgram:
        def load(argument: Any) -> RolloutWeights:
            exported, state = export(argument)
            factors = resize_overlap(state.overlap_by_factor, step.generator, grid)
            # A fixed draft length needs no chooser. The overlap table must have the new depth.
            state = state.replace(overlap_by_factor=factors, chooser=NoChooser())
            return step.generator.load(exported, state)

        load_weights, weights = compile_ahead(load, argument)
        prompt_shapes = abstract_prompts(step.generator, prompts)
        answerer = compile_answerer(step.generator, weights, prompt_shapes)
        return EvaluationProgram(load_weights, answerer)

    # Evaluations do not learn, so the size of micro-batches has no effect on their memory.
    choices = automatic_sizes(config, mesh)._replace(tokens=False)
    fit = fit_step(evaluation_step, prompts, compile_program, choices)
    prompt_source = PromptSource(sets, fit.step.generator, prompts, tokenizer.pad_id)
    judge = Judge(scorers, tokenizer, prompt_source.group_size)
    scorer = RolloutScorer(config, fit.step, prompt_source, judge, say)
    evaluator = Evaluator(prompt_source, scorer, config, config.batch.group_size, with_text)
    return evaluator, fit.compiled
