"""Prompts and rewards of a job together."""

from typing import NamedTuple

from jaxspec.data.problems import ProblemSets
from jaxspec.host.job import Job
from jaxspec.host.prompts import PromptSource
from jaxspec.host.scoring import RolloutScorer
from jaxspec.rewards.scorer import SetScorers


class Batches(NamedTuple):
    source: PromptSource
    scorer: RolloutScorer


def batches_of(job: Job, sets: ProblemSets, scorers: SetScorers | None = None) -> Batches:
    source = PromptSource(job, sets)
    return Batches(source, RolloutScorer(job, source, scorers))
