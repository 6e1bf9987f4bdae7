"""Prompts and rewards of a job together."""

from typing import NamedTuple

from jaxspec.data.problems import ProblemSets
from jaxspec.data.scoring import Judge, make_scorers
from jaxspec.host.job import Job
from jaxspec.host.prompts import PromptSource
from jaxspec.host.scoring import RolloutScorer
from jaxspec.rewards.scorer import SetScorers
from jaxspec.run.batches import BatchPlanner


class Batches(NamedTuple):
    source: PromptSource
    scorer: RolloutScorer
    planner: BatchPlanner


def batches_of(job: Job, sets: ProblemSets, scorers: SetScorers | None = None) -> Batches:
    source = PromptSource(sets, job.step.generator, job.config.batch.prompts, job.tokenizer.pad_id)
    judge = Judge(scorers or make_scorers(job.config), job.tokenizer, source.group_size)
    scorer = RolloutScorer(job.config, job.step, source, judge, job.say)
    return Batches(source, scorer, BatchPlanner(job.config, job.step))
