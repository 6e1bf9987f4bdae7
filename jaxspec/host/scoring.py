"""Rewards of rollouts, over all processes."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from jaxspec import mesh as meshes
from jaxspec.data.problem_source import Problem
from jaxspec.data.scoring import Judge, RolloutScores, make_scorers
from jaxspec.host.job import Job
from jaxspec.host.programs import abstract_finished, put
from jaxspec.host.prompts import PromptSource
from jaxspec.rewards.outcome import Outcome
from jaxspec.rewards.scorer import SetScorers
from jaxspec.rewards.shaping import overlong_penalty
from jaxspec.rl import dynamic_sampling
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import LENGTH, Finished, Plan, Rollout
from jaxspec.system.metrics import standard_deviation


class ScoringResult(NamedTuple):
    """A scored rollout, and its rewards over all processes."""

    finished: Finished
    reward: float
    """Mean over rows with a reward. NaN without any."""
    outcomes: dict[str, float]
    """Share of rows by outcome. With several problem sets also the mean reward of each."""
    samples: list[dict[str, Any]]
    """Some rows of this process, as text."""
    differing: Bool[np.ndarray, " n"]
    """Groups with different rewards, before the penalty for length."""
    std: float = 0.0
    """Standard deviation of the rewards, exactly 0 if all are equal."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the rewards."""
        known = {"reward/mean": self.reward, "reward/std": self.std}
        return {**known, **self.outcomes, "reward/frac_zero_std": 1 - float(self.differing.mean())}


class RolloutScorer:
    """Scores the rows of this process, and joins the rewards of all processes."""

    def __init__(self, job: Job, source: PromptSource, scorers: SetScorers | None = None) -> None:
        self._job, self._source, self._scorers = job, source, scorers
        self._like = abstract_finished(job.step, job.config.batch.prompts)

    @cached_property
    def _judge(self) -> Judge:
        # Its workers start here: a program that never scores needs none.
        scorers = self._scorers or make_scorers(self._job.config)
        return Judge(scorers, self._job.tokenizer, self._source.group_size)

    def score_training(self, number: int, rollout: Rollout) -> ScoringResult:
        """Scores a training rollout, and remembers its answers.

        Raises:
          Diverged: more rows than `reward.max_failed` have no reward.
        """
        self._source.remember(number, rollout)
        return self._score(self._judge(self._source.local_problems(number), rollout), rollout)

    def score_evaluation(self, problems: Mapping[int, Problem], rollout: Rollout) -> RolloutScores:
        """Scores the answers to this process's problems of an evaluation call."""
        is_local = self._source.is_local_prompt
        judged = self._judge(
            {place: problem for place, problem in problems.items() if is_local[place]}, rollout
        )
        counts = np.asarray([judged.is_complete.sum(), judged.has_reward.sum()], np.float32)
        ended, rewarded = meshes.sum_over_processes(counts).tolist()
        self._report_failed(ended - rewarded, ended, judged.scores.reason)
        return judged

    def begin_scoring(self, number: int, rollout: Rollout) -> None:
        """Has the workers score rows of a training rollout that have ended, while others still
        generate."""
        if self._judge.has_workers:
            rows = np.flatnonzero(self._source.is_local_row).astype(np.int32)
            self._judge.start_scoring(self._source.local_problems(number), rollout, rows)

    def empty_rollout(self) -> Finished:
        """Returns a scored rollout with nothing to learn."""
        rows = len(self._source.is_local_row)
        return put(self._job.step.nothing_finished(rows), self._like)

    def plan(self, finished: Finished) -> Finished:
        """Plans the micro-batches of a scored rollout for this mesh.

        A plan made for another mesh, or for micro-batches of another size, is replaced.
        """
        is_local = self._source.is_local_row
        rows = np.flatnonzero(is_local).astype(np.int32)
        read = np.zeros(len(is_local), np.float32)
        lengths, status, valid = (
            meshes.local_rows(leaf, rows)
            for leaf in (finished.rollout.lengths, finished.rollout.status, finished.valid)
        )
        read[rows] = self._tokens_read(lengths, status, valid)
        return finished.replace(plan=self._place_plan(meshes.sum_over_processes(read)))

    def is_learnable(self, finished: Finished) -> Finished:
        """Sets `learn` of a planned rollout: whether any token is read."""
        learn = bool(np.asarray(finished.plan.used).any())
        return finished.replace(learn=put(learn, self._like.learn))

    def _tokens_read(
        self, lengths: np.ndarray, status: np.ndarray, valid: np.ndarray
    ) -> np.ndarray:
        """Returns the number of tokens of each row that the learner reads."""
        is_filtered = (status == LENGTH) & self._job.config.overlong.filter
        return np.where(valid & ~is_filtered, lengths - 1, 0)

    def _place_plan(self, read: np.ndarray) -> Plan:
        return put(self._job.step.planned(read.astype(np.int32)), self._like.plan)

    def _score(self, judged: RolloutScores, rollout: Rollout) -> ScoringResult:
        config, scores, rows = self._job.config, judged.scores, judged.rows
        rewarded, overlong = judged.has_reward, config.overlong
        penalty = overlong_penalty(
            judged.lengths - judged.prompt_lengths,
            config.rollout.max_new_tokens,
            overlong.buffer,
            overlong.penalty,
        )
        # A process learns only these four numbers of the rows of other processes.
        local_columns = {
            "rewarded": rewarded,
            "reward": np.where(rewarded, scores.rewards, 0),
            "penalty": np.where(rewarded, penalty, 0),
            "read": self._tokens_read(judged.lengths, judged.status, rewarded),
        }
        columns = np.zeros((len(local_columns), len(self._source.is_local_row)), np.float32)
        for number, column in enumerate(local_columns.values()):
            columns[number, rows] = column
        local_counts = self._count_outcomes(judged, local_columns["reward"])
        totals = meshes.sum_over_processes(
            np.concatenate([columns.ravel(), np.asarray([*local_counts.values()], np.float32)])
        )
        columns, counts = totals[: columns.size].reshape(columns.shape), totals[columns.size :]
        by_name = dict(zip(local_columns, columns, strict=True))
        count_of = dict(zip(local_counts, counts.tolist(), strict=True))
        ended, valid = count_of["ended"], by_name["rewarded"] > 0
        failed = ended - float(valid.sum())
        self._require_few_failed(failed, ended, scores.reason)
        # Where overlong.filter leaves nothing to read, the update is not at fault.
        learn = bool(by_name["read"].any() or not valid.any())
        rewards, is_valid, learn = put(
            (by_name["reward"] + by_name["penalty"], valid, learn),
            (self._like.rewards, self._like.valid, self._like.learn),
        )
        finished = Finished(
            rollout=rollout,
            rewards=rewards,
            valid=is_valid,
            plan=self._place_plan(by_name["read"]),
            learn=learn,
        )
        valid_count = float(valid.sum()) or math.nan
        outcomes = self._outcome_metrics(count_of)
        if overlong.buffer:
            outcomes["reward/overlong"] = float(by_name["penalty"].sum()) / valid_count
        return ScoringResult(
            finished,
            float(by_name["reward"].sum()) / valid_count,
            outcomes,
            self._samples(judged),
            dynamic_sampling.differing(by_name["reward"], valid, self._source.group_size),
            standard_deviation(by_name["reward"][valid]),
        )

    def _count_outcomes(self, judged: RolloutScores, rewards: np.ndarray) -> dict[str, float]:
        """Counts this process's rows by outcome and by problem set."""
        sets = np.asarray([problem.set_number for problem in judged.problems], np.int32)
        masks = [sets == number for number in range(len(self._job.config.training_sets))]
        is_outcome = {
            each: judged.is_complete & (judged.scores.outcomes == each) for each in Outcome
        }
        return {
            "ended": judged.is_complete.sum(),
            **{outcome_metric(outcome): mask.sum() for outcome, mask in is_outcome.items()},
            **{f"rewarded/{i}": (mask & judged.has_reward).sum() for i, mask in enumerate(masks)},
            **{f"reward/{i}": rewards[mask].sum() for i, mask in enumerate(masks)},
        }

    def _outcome_metrics(self, counts: Mapping[str, float]) -> dict[str, float]:
        names = [outcome_metric(outcome) for outcome in Outcome]
        metrics = {name: counts[name] / (counts["ended"] or math.nan) for name in names}
        if len(self._source.sets.training) > 1:
            for number, problem_set in enumerate(self._job.config.training_sets):
                count = counts[f"rewarded/{number}"] or math.nan
                metrics[f"reward/{problem_set.name}/mean"] = counts[f"reward/{number}"] / count
        return metrics

    def _samples(self, judged: RolloutScores) -> list[dict[str, Any]]:
        """Returns the first answer to each problem of this process, as text."""
        scores, asked = judged.scores, judged.requests
        return [
            {
                "prompt": asked.prompts[row],
                "response": asked.responses[row],
                "answer": asked.answers[row],
                "reward": float(scores.rewards[row]) if scores.valid[row] else None,
                "outcome": Outcome(scores.outcomes[row]).name.lower(),
                "rounds": int(judged.rounds[row]),
            }
            for row in range(0, len(judged.rows), self._source.group_size)
        ]

    def _require_few_failed(self, failed: float, rows: float, reason: str) -> None:
        limit = self._job.config.reward.max_failed
        if failed > limit * rows:
            raise Diverged(
                f"{_unknown_rewards(failed, rows)}, and reward.max_failed is {limit:g}:"
                f" {reason or _ELSEWHERE}. Mend that; the same command goes on from the newest"
                " checkpoint"
            )
        self._report_failed(failed, rows, reason)

    def _report_failed(self, failed: float, rows: float, reason: str) -> None:
        if failed:
            self._job.say(
                f"warning: {_unknown_rewards(failed, rows)}, which are left out:"
                f" {reason or _ELSEWHERE}"
            )


_ELSEWHERE = "another process knows why"


def _unknown_rewards(failed: float, rows: float) -> str:
    return f"no reward is known of {failed:.0f} of {rows:.0f} responses"


def outcome_metric(outcome: Outcome) -> str:
    """Name of the metric that holds an outcome's share of the rows."""
    return f"reward/{outcome.name.lower()}"
