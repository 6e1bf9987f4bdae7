"""Rewards of rollouts, over all processes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.problem_source import Problem
from jaxspec.data.scoring import Judge, RolloutScores
from jaxspec.host.programs import abstract_scored_rollout, put_like
from jaxspec.host.prompts import PromptSource
from jaxspec.metrics.batch import standard_deviation
from jaxspec.processes import global_arrays
from jaxspec.rewards.outcome import Outcome
from jaxspec.rewards.shaping import overlong_penalty
from jaxspec.rl import dynamic_sampling
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import Rollout, ScoredRollout
from jaxspec.step import Step
from jaxspec.system.terminal import LinePrinter


class ScoringResult(NamedTuple):
    """A scored rollout, and its rewards over all processes."""

    scored: ScoredRollout
    """On the generator's mesh, without a plan."""
    reward_metrics: dict[str, float]
    """Metrics of rewards and outcomes, except of groups."""
    samples: list[dict[str, Any]]
    """Some rows of this process, as text."""
    differing_groups: Bool[np.ndarray, " n"]
    """Groups with different rewards, before the penalty for length."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the rewards."""
        equal_share = 1 - float(self.differing_groups.mean())
        return self.reward_metrics | {"reward/frac_zero_std": equal_share}


class RolloutScorer:
    """Scores the rows of this process, and joins the rewards of all processes."""

    def __init__(
        self,
        config: ResolvedConfig,
        step: Step,
        source: PromptSource,
        judge: Judge,
        say: LinePrinter,
    ) -> None:
        self._config, self._say = config, say
        self._source, self._judge = source, judge
        self._layout = abstract_scored_rollout(step, config.batch.prompts, step.generator.mesh)

    def score_training(self, number: int, rollout: Rollout) -> ScoringResult:
        """Scores a training rollout, and stores its answers for drafts that look them up.

        Raises:
          Diverged: a larger share of rows than `reward.max_failed` has no reward, or rewards can no
            longer be computed.
        """
        self._source.remember_answers(number, rollout)
        return self._join_rewards(
            self._judge(self._source.local_problems(number), rollout), rollout
        )

    def score_evaluation(self, problems: Mapping[int, Problem], rollout: Rollout) -> RolloutScores:
        """Scores the answers to this process's problems of an evaluation call.

        Warns if some of them have no reward.

        Raises:
          Diverged: rewards can no longer be computed.
        """
        is_local = self._source.is_local_prompt
        scores = self._judge(
            {place: problem for place, problem in problems.items() if is_local[place]}, rollout
        )
        counts = np.asarray([scores.is_complete.sum(), scores.has_reward.sum()], np.float32)
        ended_count, rewarded_count = global_arrays.sum_over_processes(counts).tolist()
        self._report_failed(ended_count - rewarded_count, ended_count, scores.scores.reason)
        return scores

    def begin_scoring(self, number: int, rollout: Rollout) -> None:
        """Starts to score the rows that have ended, while others still generate.

        Does nothing without workers.
        """
        if self._judge.has_workers:
            rows = np.flatnonzero(self._source.is_local_row).astype(np.int32)
            self._judge.start_scoring(self._source.local_problems(number), rollout, rows)

    def _join_rewards(self, judged: RolloutScores, rollout: Rollout) -> ScoringResult:
        config, scores, rows = self._config, judged.scores, judged.rows
        rewarded, overlong = judged.has_reward, config.overlong
        penalties = overlong_penalty(
            judged.lengths - judged.prompt_lengths,
            config.rollout.max_new_tokens,
            overlong.buffer,
            overlong.penalty,
        )
        # Of the rows of other processes, a process gets only these three numbers.
        local_columns = {
            "rewarded": rewarded,
            "reward": np.where(rewarded, scores.rewards, 0),
            "penalty": np.where(rewarded, penalties, 0),
        }
        columns = np.zeros((len(local_columns), len(self._source.is_local_row)), np.float32)
        for number, column in enumerate(local_columns.values()):
            columns[number, rows] = column
        local_counts = self._count_outcomes(judged, local_columns["reward"])
        totals = global_arrays.sum_over_processes(
            np.concatenate([columns.ravel(), np.asarray([*local_counts.values()], np.float32)])
        )
        columns, counts = totals[: columns.size].reshape(columns.shape), totals[columns.size :]
        by_name = dict(zip(local_columns, columns, strict=True))
        count_of = dict(zip(local_counts, counts.tolist(), strict=True))
        ended_count, valid = count_of["ended"], by_name["rewarded"] > 0
        failed_count = ended_count - float(valid.sum())
        self._require_few_failed(failed_count, ended_count, scores.reason)
        rewards, is_valid, learn = put_like(
            (by_name["reward"] + by_name["penalty"], valid, False),
            (self._layout.rewards, self._layout.valid, self._layout.learn),
        )
        # The learner's side plans it, and decides whether to learn from it.
        scored = self._layout.replace(
            rollout=rollout, rewards=rewards, valid=is_valid, plan=None, learn=learn
        )
        valid_count, metrics = float(valid.sum()), self._outcome_metrics(count_of)
        if valid_count:
            metrics["reward/mean"] = float(by_name["reward"].sum()) / valid_count
            metrics["reward/std"] = standard_deviation(by_name["reward"][valid])
            if overlong.buffer:
                metrics["reward/overlong"] = float(by_name["penalty"].sum()) / valid_count
        return ScoringResult(
            scored,
            metrics,
            self._list_samples(judged),
            dynamic_sampling.has_mixed_rewards(by_name["reward"], valid, self._source.group_size),
        )

    def _count_outcomes(self, judged: RolloutScores, rewards: np.ndarray) -> dict[str, float]:
        """Counts this process's rows by outcome, and by problem set with the sum of rewards."""
        sets = np.asarray([problem.set_number for problem in judged.problems], np.int32)
        masks = [sets == number for number in range(len(self._config.training_sets))]
        is_outcome = {
            outcome: judged.is_complete & (judged.scores.outcomes == outcome) for outcome in Outcome
        }
        counts = {
            "ended": judged.is_complete.sum(),
            **{outcome_metric(outcome): mask.sum() for outcome, mask in is_outcome.items()},
            **{f"rewarded/{i}": (mask & judged.has_reward).sum() for i, mask in enumerate(masks)},
            **{f"reward/{i}": rewards[mask].sum() for i, mask in enumerate(masks)},
        }
        return {name: float(count) for name, count in counts.items()}

    def _outcome_metrics(self, counts: Mapping[str, float]) -> dict[str, float]:
        divisions = {
            outcome_metric(outcome): (counts[outcome_metric(outcome)], counts["ended"])
            for outcome in Outcome
        }
        if len(self._source.sets.training) > 1:
            divisions |= {
                f"reward/{problem_set.name}/mean": (
                    counts[f"reward/{number}"],
                    counts[f"rewarded/{number}"],
                )
                for number, problem_set in enumerate(self._config.training_sets)
            }
        return {name: total / count for name, (total, count) in divisions.items() if count}

    def _list_samples(self, judged: RolloutScores) -> list[dict[str, Any]]:
        """Returns the first answer to each problem of this process, as text."""
        scores, requests = judged.scores, judged.requests
        return [
            {
                "prompt": requests.prompts[row],
                "response": requests.responses[row],
                "answer": requests.answers[row],
                "reward": float(scores.rewards[row]) if scores.valid[row] else None,
                "outcome": Outcome(scores.outcomes[row]).name.lower(),
                "rounds": int(judged.rounds[row]),
            }
            for row in range(0, len(judged.rows), self._source.group_size)
        ]

    def _require_few_failed(self, failed_count: float, row_count: float, reason: str) -> None:
        limit = self._config.reward.max_failed
        if failed_count > limit * row_count:
            raise Diverged(
                f"{_unknown_rewards(failed_count, row_count)}, and reward.max_failed is {limit:g}:"
                f" {reason or _ELSEWHERE}. Mend that; the same command goes on from the newest"
                " checkpoint"
            )
        self._report_failed(failed_count, row_count, reason)

    def _report_failed(self, failed_count: float, row_count: float, reason: str) -> None:
        if failed_count:
            self._say(
                f"warning: {_unknown_rewards(failed_count, row_count)}, which are left out:"
                f" {reason or _ELSEWHERE}"
            )


_ELSEWHERE = "another process knows why"


def _unknown_rewards(failed_count: float, row_count: float) -> str:
    return f"no reward is known of {failed_count:.0f} of {row_count:.0f} responses"


def outcome_metric(outcome: Outcome) -> str:
    """Returns the metric name of an outcome's share of rows."""
    return f"reward/{outcome.name.lower()}"
