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


def own_settings(config: ResolvedConfig) -> list[str]:
    """What evaluations have otherwise than the run, so that its program cannot answer for them;
    none where it can."""
    settings, rollout = config.eval, config.rollout
    pairs = {
        "temperature": (settings.temperature, rollout.temperature),
        "top_p": (settings.top_p, rollout.top_p),
        "max_new_tokens": (
            settings.max_new_tokens or rollout.max_new_tokens,
            rollout.max_new_tokens,
        ),
    }
    found = [
        f"eval.{name} {mine}" for name, (mine, its) in pairs.items() if mine not in ("same", its)
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
    settings, rollout, batch = config.eval, config.rollout, config.batch
    samples = samples_of(config)
    prompts = max(1, batch.prompts * batch.group_size // samples // shards) * shards
    temperature = rollout.temperature if settings.temperature == "same" else settings.temperature
    top_p = rollout.top_p if settings.top_p == "same" else settings.top_p
    longest = settings.max_new_tokens or rollout.max_new_tokens
    draft, engine = rollout.draft, rollout.engine
    if draft.draft_lengths:
        draft = replace(draft, draft_length=DRAFT_LENGTH)
    if engine.pages and isinstance(engine.page_size, int):
        row = config.data.max_prompt_length, longest, draft.max_draft_length
        least = smallest_pool(prompts // shards, *row, engine.page_size)
        engine = replace(engine, pages=max(engine.pages, least))
    return replace(
        config,
        rollout=replace(
            rollout,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=longest,
            min_new_tokens=min(rollout.min_new_tokens, longest - 1),
            draft=draft,
            engine=engine,
        ),
        batch=replace(batch, prompts=prompts, group_size=samples, mini_batches=1),
        # one answer is no group to learn from, and nothing is learnt
        advantage=AdvantageConfig(baseline="none"),
        dynamic_sampling=DynamicSamplingConfig(),
    )


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
    stop = job.step.generator.settings.stop
    asking = build_step(config, job.mesh, job.tokenizer.stop_ids, job.tokenizer.size, stop)
    # beside it lies what the job keeps, not what this config would
    asking = replace(asking, learner=job.step.learner)
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
