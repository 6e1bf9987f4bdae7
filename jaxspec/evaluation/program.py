"""The program that answers for an evaluation: the run's own, or one with other settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jaxspec import mesh as meshes
from jaxspec.build import automatic, build_step
from jaxspec.config.check import check
from jaxspec.config.settings import AdvantageConfig, DynamicSamplingConfig, ResolvedConfig
from jaxspec.data.problems import ProblemSets
from jaxspec.evaluation.evaluator import Evaluator
from jaxspec.host import memory
from jaxspec.host.batches import Batches
from jaxspec.host.job import Job
from jaxspec.host.loaded_run import measured_factors
from jaxspec.host.runner import Runner, abstract, ahead, ahead_with
from jaxspec.inputs.checked import read_from
from jaxspec.rewards.scorer import SetScorers
from jaxspec.rollout.pages import smallest_pool
from jaxspec.state import Prompts, Ready, Rollout, TrainState
from jaxspec.step import Step

DRAFT_LENGTH = 3
"""Tokens drafted a round where a run chooses among several: what it chooses by was measured on its
own rollouts."""


def samples_of(config: ResolvedConfig) -> int:
    """Answers to each problem."""
    return config.eval.samples or config.batch.group_size


SAMPLING = ("temperature", "top_k", "top_p", "min_new_tokens", "max_new_tokens", "stop")
"""Settings that `eval` may have otherwise than `rollout`."""


def sampling_of(config: ResolvedConfig) -> dict[str, Any]:
    """How evaluations sample, by the names of settings of `rollout`."""
    settings, rollout = config.eval, config.rollout
    given = {name: getattr(settings, name) for name in SAMPLING}
    given["max_new_tokens"] = settings.max_new_tokens or "same"
    found = {
        name: getattr(rollout, name) if value == "same" else value for name, value in given.items()
    }
    if settings.min_new_tokens == "same":  # shorter responses may end earlier
        found["min_new_tokens"] = min(rollout.min_new_tokens, found["max_new_tokens"] - 1)
    return found


def own_settings(config: ResolvedConfig) -> list[str]:
    """What evaluations have otherwise than the run, so that its program cannot answer for them;
    none where it can."""
    found = [
        f"eval.{name} {list(value) if isinstance(value, tuple) else value}"
        for name, value in sampling_of(config).items()
        if value != getattr(config.rollout, name)
    ]
    if samples_of(config) % config.batch.group_size:
        found.append(
            f"eval.samples {samples_of(config)}, no multiple of batch.group_size"
            f" {config.batch.group_size}"
        )
    return found


def measuring(config: ResolvedConfig, shards: int) -> ResolvedConfig:
    """The config of a program that answers for evaluations: `eval.samples` rows of each prompt, and
    about as many rows a call as the run's batch."""
    rollout, batch = config.rollout, config.batch
    samples = samples_of(config)
    prompts = max(1, batch.prompts * batch.group_size // samples // shards) * shards
    sampling = sampling_of(config)
    longest = sampling["max_new_tokens"]
    draft, engine = rollout.draft, rollout.engine
    if draft.draft_lengths:
        draft = replace(draft, draft_length=DRAFT_LENGTH)
    if engine.pages and isinstance(engine.page_size, int):
        row = config.data.max_prompt_length, longest, draft.max_draft_length
        least = smallest_pool(prompts // shards, *row, engine.page_size)
        engine = replace(engine, pages=max(engine.pages, least))
    return replace(
        config,
        rollout=replace(rollout, draft=draft, engine=engine, **sampling),
        batch=replace(batch, prompts=prompts, group_size=samples, mini_batches=1),
        # one answer is no group to learn from, and nothing is learnt
        advantage=AdvantageConfig(baseline="none"),
        dynamic_sampling=DynamicSamplingConfig(),
    )


def asking_step(job: Job, config: ResolvedConfig) -> Step:
    """The step of a config as `measuring` gives it, beside the job's learner."""
    tokenizer, stop = job.tokenizer, job.step.generator.settings.stop
    if config.rollout.stop != job.config.rollout.stop:
        tokenizer = tokenizer.ending_with(config.rollout.stop, config.rollout.stop_ids)
        stop = tokenizer.stop_table(config.rollout.stop)
    asking = build_step(config, job.mesh, tokenizer.stop_ids, tokenizer.size, stop)
    # beside it lies what the job keeps, not what this config would
    return replace(asking, learner=job.step.learner)


def with_own_program(
    job: Job, sets: ProblemSets, scorers: SetScorers, with_text: bool = False
) -> Evaluator:
    """What measures policies by a program of its own, which is compiled now; the states that it is
    given are those of the job's step, and stay as they are.

    Raises:
      ConfigError: it does not fit the devices beside such a state.
    """
    config = measuring(job.config, meshes.row_shards(job.mesh))
    with read_from("evaluations"):
        check(config, job.mesh.size, jax.process_count())
    asking = asking_step(job, config)
    prompts, grid = config.batch.prompts, job.step.generator.settings.grid
    state, _, _ = abstract(job.step, job.config.batch.prompts)

    def runner_of(step: Step) -> Runner:
        def sync(state: TrainState) -> Ready:
            factors = measured_factors(state.generator.overlap_by_factor, step.generator, grid)
            known = state.generator.replace(overlap_by_factor=factors, chooser=None)
            return step.sync(state.replace(generator=known))

        _, _, wanted = abstract(step, prompts)
        prepare, ready = ahead(sync, state)
        rows = meshes.rows_sharding(step.mesh)
        asked = step.generator
        generate, _ = ahead_with(asked, asked.generate, ready, wanted, out_shardings=rows)
        return Runner(_never, {"prepare": prepare, "generate": generate})

    may = automatic(config, job.mesh)._replace(tokens=False)
    fit = memory.fitted(asking, prompts, runner_of, may)
    programs = fit.runner.programs
    batches = Batches(replace(job, config=config, step=fit.step), sets, scorers)

    def ask(ready: Ready, prompts: Prompts) -> tuple[Ready, Rollout]:
        return ready, programs["generate"](ready, prompts)

    samples = config.batch.group_size
    return Evaluator(batches, config, samples, ask, programs["prepare"], with_text)


def _never(*_: Any) -> Any:
    raise AssertionError("an evaluation learns nothing, and its phases are called one by one")
