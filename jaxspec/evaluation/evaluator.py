"""Evaluation of policies on sets of problems.

The policy answers each problem several times. Records of the answers give estimates for each set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.config.settings import DataConfig, ResolvedConfig
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import EvaluationSet
from jaxspec.data.scoring import RolloutScores
from jaxspec.evaluation.estimates import AnswerTally, Estimate, estimate_metrics, majority_accuracy
from jaxspec.host.prompts import PromptSource
from jaxspec.host.scoring import RolloutScorer
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import join_names
from jaxspec.processes import global_arrays, roles
from jaxspec.rewards.extract import (
    Style,
    extract_answer,
    normalize_answer,
    normalize_dapo_answer,
    opens_thought,
)
from jaxspec.rewards.outcome import Outcome
from jaxspec.state import Prompts, Rollout

PolicyAnswerer = Callable[[Prompts], Rollout]
"""Answerer with weights: it answers prompts by the policy that is evaluated."""
ProblemRecord = dict[str, Any]
"""Record of the answers to a problem: a line of `records.RecordFile` without its step."""


class ProblemChunk(NamedTuple):
    """Problems that are answered in the same calls."""

    set_name: str
    """Name of their set."""
    indices: range
    """Positions of the problems in their set."""
    first_call: int
    """Number of their first call in the evaluation."""


class Evaluator:
    """Evaluates policies on the evaluation sets of `source`.

    Args:
      source: places the problems. A call gives each problem one group of answers.
      scorer: scores the answers.
      config: the config of `source`.
      samples: answers to each problem, a multiple of the group size.
      with_text: whether records include the text of responses.
    """

    def __init__(
        self,
        source: PromptSource,
        scorer: RolloutScorer,
        config: ResolvedConfig,
        samples: int,
        with_text: bool = False,
    ) -> None:
        self._source, self._scorer, self._samples = source, scorer, samples
        self._with_text = with_text
        self._problem_sets: Mapping[str, EvaluationSet] = source.sets.evaluation
        self._set_configs = [*config.sets_by_prefix.values()]
        self._prompts_per_call, self._calls_per_problem = (
            config.batch.prompts,
            samples // config.batch.group_size,
        )

    @property
    def chunks(self) -> list[ProblemChunk]:
        """All chunks of an evaluation, in order."""
        chunks: list[ProblemChunk] = []
        for name, problem_set in self._problem_sets.items():
            count = len(problem_set.problems)
            for first in range(0, count, self._prompts_per_call):
                indices = range(first, min(first + self._prompts_per_call, count))
                chunks.append(ProblemChunk(name, indices, len(chunks) * self._calls_per_problem))
        return chunks

    def require_metric(self, name: str) -> None:
        """Raises ConfigError if `name` is neither empty nor a metric of evaluations."""
        # Without records, the estimates are NaN, but their names are the same.
        names = list(flatten_estimates(self.estimate_sets([])))
        require(
            not name or name in names,
            f"eval.keep_best is {name!r}, and evaluations give {join_names(names)}; choose one of"
            " these metrics",
        )

    def __call__(
        self, answer_prompts: PolicyAnswerer, stop: Callable[[], bool]
    ) -> list[ProblemRecord] | None:
        """Evaluates a policy.

        Args:
          answer_prompts: answers prompts by that policy.
          stop: asked before each call whether to stop.

        Returns:
          The records of this process's problems, or None if `stop` returned true.
        """
        records: list[ProblemRecord] = []
        for chunk in self.chunks:
            chunk_records = self.answer_chunk(answer_prompts, chunk, stop)
            if chunk_records is None:
                return None
            records += chunk_records
        return records

    def list_remaining_chunks(self, records: list[ProblemRecord]) -> list[ProblemChunk]:
        """Lists the chunks that are not answered yet.

        Args:
          records: records of this process.
        """
        answered = {(record["set"], record["problem"]) for record in records}
        local_prompts = self._source.is_local_prompt
        is_done = [
            all(
                (chunk.set_name, index) in answered
                for index, is_local in zip(chunk.indices, local_prompts, strict=False)
                if is_local
            )
            for chunk in self.chunks
        ]
        # All processes take part in each call, so they must choose the same chunks. But each has
        # records of its own problems only.
        done_everywhere = (
            global_arrays.sum_over_processes(np.asarray(is_done, np.float32))
            == roles.member_count()
        )
        return [chunk for chunk, done in zip(self.chunks, done_everywhere, strict=True) if not done]

    def answer_chunk(
        self, answer_prompts: PolicyAnswerer, chunk: ProblemChunk, stop: Callable[[], bool]
    ) -> list[ProblemRecord] | None:
        """Answers the problems of a chunk. Arguments and result are those of `__call__`."""
        problem_set = self._problem_sets[chunk.set_name]
        problems: dict[int, Problem] = {
            position: problem_set.get_problem(number)
            for position, number in enumerate(chunk.indices)
        }
        calls: list[RolloutScores] = []
        for number in range(self._calls_per_problem):
            # A chunk is dropped as a whole, since records need all answers to a problem.
            if stop():
                return None
            prompts = self._source.place_evaluation(problems, chunk.first_call + number)
            rollout = answer_prompts(prompts)
            calls.append(self._scorer.score_evaluation(problems, rollout))
        return list(self._build_records(chunk, calls))

    def _build_records(
        self, chunk: ProblemChunk, calls: list[RolloutScores]
    ) -> Iterator[ProblemRecord]:
        """Builds the records of this process's problems.

        Args:
          chunk: the problems.
          calls: scores of each call.
        """
        data, has_votes = self._data_config(chunk.set_name), self._has_votes(chunk.set_name)
        group = self._source.group_size
        for first in range(0, len(calls[0].rows), group):
            answers: dict[str, list[Any]] = {}
            for call_scores in calls:
                for row in range(first, first + group):
                    for key, value in _describe_answer(call_scores, row).items():
                        answers.setdefault(key, []).append(value)
            responses = answers.pop("responses")
            # Votes compare final answers, which are not those in a thought.
            if has_votes:
                in_thought = opens_thought(calls[0].problems[first].prompt)
                answers["stated"] = [
                    _extract_answer(text, data.answer_style, in_thought) for text in responses
                ]
            if self._with_text:
                answers["responses"] = responses
            problem = calls[0].problems[first]
            yield {
                "set": chunk.set_name,
                "problem": chunk.indices[int(calls[0].rows[first]) // group],
                "prompt": problem.prompt,
                "question": problem.question,
                "answer": problem.answer,
                **answers,
            }

    def estimate_sets(self, records: list[ProblemRecord]) -> dict[str, dict[str, Estimate]]:
        """Estimates the metrics of each set over all processes.

        Args:
          records: records of this process.
        """
        results = {}
        for name, problem_set in self._problem_sets.items():
            # Each process fills the columns of its own problems. The sum joins them.
            table = np.zeros((len(AnswerTally._fields), len(problem_set.problems)), np.float32)
            for record in records:
                if record["set"] == name:
                    table[:, record["problem"]] = _tally_record(record)
            tally = AnswerTally(*global_arrays.sum_over_processes(table).astype(np.float64))
            results[name] = estimate_metrics(tally, self._samples, self._has_votes(name))
        return results

    def _data_config(self, name: str) -> DataConfig:
        """Returns the data settings of a set."""
        return self._set_configs[self._problem_sets[name].set_number].data

    def _has_votes(self, name: str) -> bool:
        """Returns whether answers to a set's problems can be compared."""
        # Different programs may be equally correct, so code has no votes.
        set_config = self._set_configs[self._problem_sets[name].set_number]
        return "answer" in set_config.reward.all_parts and set_config.data.answer_style != "code"


def flatten_estimates(estimates: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Names estimates by set and metric, such as held_out/avg@8."""
    return {
        f"{name}/{key}": estimate
        for name, set_estimates in estimates.items()
        for key, estimate in set_estimates.items()
    }


def estimates_to_metrics(estimates: Mapping[str, Mapping[str, Estimate]]) -> dict[str, float]:
    """Converts estimates to metrics of a batch.

    A set whose answers were not judged has none.
    """
    # Of the intervals, only that of the share of correct answers is a metric.
    metrics = {}
    for name, estimate in flatten_estimates(estimates).items():
        if not estimate.problems:
            continue
        metrics[f"eval/{name}"] = estimate.value
        if "/avg@" in name:
            metrics |= {f"eval/{name}/low": estimate.low, f"eval/{name}/high": estimate.high}
    return metrics


def has_evaluation(metrics: Mapping[str, Any]) -> bool:
    """Returns whether a batch's metrics include an evaluation."""
    return any(name.startswith("eval/") for name in metrics)


def _describe_answer(rollout_scores: RolloutScores, row: int) -> dict[str, Any]:
    """Returns one answer's entry in each list of a record."""
    # Null marks responses that failed or were not judged, so that estimates can leave them out.
    is_judged, scores = bool(rollout_scores.has_reward[row]), rollout_scores.scores
    outcome = Outcome(int(scores.outcomes[row]))
    return {
        "correct": outcome == Outcome.CORRECT if is_judged else None,
        "reward": float(scores.rewards[row]) if is_judged else None,
        "outcome": outcome.name.lower() if rollout_scores.is_complete[row] else "failed",
        "tokens": int(rollout_scores.lengths[row] - rollout_scores.prompt_lengths[row]),
        "rounds": int(rollout_scores.rounds[row]),
        "responses": rollout_scores.requests.responses[row],
    }


def _extract_answer(response: str, style: Style, in_thought: bool) -> str | None:
    """Extracts the answer of a response, normalized for votes."""
    answer = extract_answer(response, style, in_thought=in_thought)
    return (
        None
        if answer is None
        else (normalize_dapo_answer if style == "dapo" else normalize_answer)(answer)
    )


def _tally_record(record: ProblemRecord) -> list[float | int]:
    """Returns a problem's entry in `AnswerTally`."""
    stated = record.get("stated", [None] * len(record["correct"]))
    judged_answers = [
        (is_correct, reward, answer)
        for is_correct, reward, answer in zip(
            record["correct"], record["reward"], stated, strict=True
        )
        if is_correct is not None
    ]
    correct_flags = [is_correct for is_correct, _, _ in judged_answers]
    vote_accuracy = majority_accuracy([answer for _, _, answer in judged_answers], correct_flags)
    return [
        len(judged_answers),
        sum(correct_flags),
        vote_accuracy,
        sum(reward for _, reward, _ in judged_answers),
    ]
