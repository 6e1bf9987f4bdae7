"""Scorers of responses: each reward is a weighted sum of parts."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.rewards.extract import (
    Style,
    extract_answer,
    is_number,
    normalize_answer,
    normalize_dapo_answer,
    opens_thought,
)
from jaxspec.rewards.outcome import Outcome, Scores, make_invalid_scores
from jaxspec.rewards.pool import PoolError, RewardPool

CANARIES = {
    "math": (
        ("\\frac{1}{2}", "0.5", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("\\frac{1}{2}", "2", False),
    ),
    "code": (
        ("assert two() == 2", "def two():\n    return 2", True),
        ("assert two() == 2", "def two():\n    return 3", False),
    ),
}
"""Pairs of reference and answer with their known verdicts, by verifier. Every batch has them."""
MAX_REWARD = float(np.finfo(np.float32).max)
"""Largest absolute value of a reward."""


class RewardInputs(NamedTuple):
    """Rows to score, column by column."""

    prompts: Sequence[str]
    responses: Sequence[str]
    answers: Sequence[str]
    """Reference answers."""
    columns: Sequence[dict[str, Any]]
    """All columns of each row of the data file."""

    def select_rows(self, indices: Sequence[int]) -> "RewardInputs":
        """Selects rows by index."""
        return RewardInputs(
            [self.prompts[index] for index in indices],
            [self.responses[index] for index in indices],
            [self.answers[index] for index in indices],
            [self.columns[index] for index in indices],
        )


class PartReward(NamedTuple):
    """Unweighted value of one part of a reward."""

    value: float
    outcome: Outcome
    reason: str = ""
    """Why there is no value, or empty."""

    @property
    def is_valid(self) -> bool:
        """Whether there is a value."""
        return not self.reason


class PendingScores(NamedTuple):
    """Submitted rows, to be collected by `Scorer.collect_scores`."""

    rows: RewardInputs
    outcomes: list[Outcome | None]
    """Outcome of each answer, or None if a worker must decide."""
    call_slices: list[slice]
    """Rows of each call of the user's function."""
    batch_id: int | None
    """Batch of the pool, or None if no worker is needed. Its tasks are canaries, answers, calls."""


class Scorer:
    """Scores rows by a weighted sum of parts.

    Args:
      style: form in which responses state their answers.
      parts: parts of the reward, as in `reward.parts`.
      weights: weight of each part.
      pool: worker processes. Needed by the part `function` and by verifiers other than `exact`.
      verifier: verifier of answers, as in `reward.verifier`.
      rows_per_call: maximum number of rows in a call of the user's function.
    """

    def __init__(
        self,
        style: Style = "hash",
        parts: Sequence[str] = ("answer",),
        weights: Sequence[float] = (1.0,),
        pool: RewardPool | None = None,
        verifier: str = "exact",
        rows_per_call: int = 32,
    ) -> None:
        self._style: Style = style
        self._weights = dict(zip(parts, weights, strict=True))
        self._pool, self._call_size = pool, rows_per_call
        self.has_workers = pool is not None
        """Whether rows are scored in the background, so that it helps to submit them early."""
        # Without the part `answer` no verdict is needed, so no worker is asked for one.
        self._verifier = verifier if "answer" in parts else "exact"
        self._canaries = CANARIES.get(self._verifier, ())

    def __call__(self, rows: RewardInputs) -> Scores:
        """Scores rows. Raises the errors of `submit_rows` and `collect_scores`."""
        return self.collect_scores(self.submit_rows(rows))

    def submit_rows(self, rows: RewardInputs) -> PendingScores:
        """Starts to score rows in the workers.

        Raises:
          ValueError: the columns of `rows` have different lengths.
          PoolError: the pool has failed.
        """
        examples = list(zip(*rows, strict=True))
        extracted = [
            extract_answer(response, self._style, in_thought=opens_thought(prompt))
            for prompt, response, _, _ in examples
        ]
        outcomes = [
            self._match_answer(extracted_answer, answer)
            for extracted_answer, (_, _, answer, _) in zip(extracted, examples, strict=True)
        ]
        tasks: list[list[Any]] = []
        pairs = [(reference, answer) for reference, answer, _ in self._canaries]
        pairs += [
            (rows.answers[row], extracted[row])
            for row, outcome in enumerate(outcomes)
            if outcome is None
        ]
        tasks += [[self._verifier, *pair] for pair in pairs]
        calls = []
        if "function" in self._weights:
            first_rows = range(0, len(examples), self._call_size)
            calls = [slice(row, min(row + self._call_size, len(examples))) for row in first_rows]
            tasks += [["rows", *(list(column[call]) for column in rows)] for call in calls]
        batch_id = self._pool.submit_tasks(tasks) if self._pool and tasks else None
        return PendingScores(rows, outcomes, calls, batch_id)

    def collect_scores(self, pending: PendingScores) -> Scores:
        """Waits for the scores of submitted rows.

        Raises:
          PoolError: the pool has failed, or the verifier gives a wrong verdict on a canary.
        """
        answers = (
            []
            if pending.batch_id is None or not self._pool
            else self._pool.collect_answers(pending.batch_id)
        )
        # Consumed in the order of the tasks in `submit_rows`: canaries, answers, calls.
        verdicts = iter(answers)
        self._check_canaries(verdicts)
        answer_rewards = [
            _reward_from_verdict(next(verdicts))
            if outcome is None
            else _reward_from_outcome(outcome)
            for outcome in pending.outcomes
        ]
        function_rewards: list[PartReward] = []
        for call_slice, answer in zip(pending.call_slices, verdicts, strict=True):
            function_rewards += _rewards_from_call(answer, call_slice.stop - call_slice.start)
        part_rewards = [
            [
                self._score_part(
                    part, response, answer, function_rewards[row] if function_rewards else None
                )
                for part in self._weights
            ]
            for row, (response, answer) in enumerate(
                zip(pending.rows.responses, answer_rewards, strict=True)
            )
        ]
        return self._add_parts(part_rewards)

    def try_function(self, rows: RewardInputs) -> str:
        """Calls the user's function once, if any. Returns why a row has no reward, or "".

        Raises:
          PoolError: the pool has failed.
        """
        if "function" not in self._weights or self._pool is None:
            return ""
        [answer] = self._pool([["rows", *(list(column) for column in rows)]])
        rewards = _rewards_from_call(answer, len(rows.prompts))
        return next((reward.reason for reward in rewards if not reward.is_valid), "")

    def find_unreadable_answers(self, answers: Sequence[str]) -> list[int]:
        """Returns the indices of answers that the verifier cannot read. Raises PoolError."""
        if self._verifier == "exact" or self._pool is None:
            return []
        is_code = self._verifier == "code"
        # Plain numbers are compared as text, without a worker.
        rows = [row for row, answer in enumerate(answers) if is_code or not is_number(answer)]
        verdicts = self._pool([["readable", self._verifier, answers[row]] for row in rows])
        return [row for row, verdict in zip(rows, verdicts, strict=True) if verdict is not True]

    def _match_answer(self, extracted_answer: str | None, answer: str) -> Outcome | None:
        """Judges an answer without a worker. Returns None if that is not possible."""
        if extracted_answer is None:
            return Outcome.NO_ANSWER
        if self._verifier == "code":
            return None
        normalize = normalize_dapo_answer if self._style == "dapo" else normalize_answer
        if normalize(extracted_answer) == normalize(answer):
            return Outcome.CORRECT
        # Plain numbers with different normal forms are different. Workers are not asked.
        if self._verifier == "math" and not (is_number(extracted_answer) and is_number(answer)):
            return None
        return Outcome.WRONG

    def _check_canaries(self, verdicts: Iterator[Any]) -> None:
        """Checks the canaries. Raises PoolError if a verdict is wrong, or if all are missing."""
        # Without this check, a broken verifier would silently give no rewards at all.
        checks = [(canary, next(verdicts)) for canary in self._canaries]
        # A dictionary reports a late or failed task. If others pass, the machine may only be busy.
        all_late = checks and all(isinstance(verdict, dict) for _, verdict in checks)
        for (reference, answer, is_correct), verdict in checks:
            if verdict is not is_correct and (all_late or not isinstance(verdict, dict)):
                raise PoolError(
                    f"reward.verifier {self._verifier} gave {verdict!r} for reference {reference!r}"
                    f" and answer {answer!r}, not {is_correct}: its rewards cannot be trusted"
                )

    @staticmethod
    def _score_part(
        part: str, response: str, answer_reward: PartReward, function_reward: PartReward | None
    ) -> PartReward:
        """Returns the value of one part for one row."""
        match part:
            case "answer":
                return answer_reward
            case "stated":
                condition = answer_reward.outcome != Outcome.NO_ANSWER
            case "thought":
                condition = begins_with_thought(response)
            case "function":
                assert function_reward is not None, "the function is called on every row"
                return function_reward
            case _:
                raise AssertionError(f"reward.parts has {part}, which nothing scores")
        return PartReward(float(condition), Outcome.CORRECT if condition else Outcome.WRONG)

    def _add_parts(self, part_rewards: Sequence[Sequence[PartReward]]) -> Scores:
        """Sums the parts of each row.

        A row has no reward if one of its parts has no value, or if the sum is beyond float32.
        Otherwise the outcome is that of `answer` or `function`, or else of the first part.
        """
        weights = list(self._weights.values())
        names = list(self._weights)
        main_part = next((i for i, name in enumerate(names) if name in ("answer", "function")), 0)
        rewards, outcomes, valid, reason = [], [], [], ""
        for row_rewards in part_rewards:
            failure = next((reward for reward in row_rewards if not reward.is_valid), None)
            total = sum(w * reward.value for w, reward in zip(weights, row_rewards, strict=True))
            # `not <=` also catches NaN, the sum of infinite terms with opposite signs.
            if not failure and not abs(total) <= MAX_REWARD:
                failure = PartReward(0.0, Outcome.ERROR, f"a reward of {total:g} is beyond float32")
            rewards.append(0.0 if failure else total)
            outcomes.append((failure or row_rewards[main_part]).outcome)
            valid.append(failure is None)
            reason = reason or (failure.reason if failure else "")
        return Scores(
            np.array(rewards, np.float32),
            np.array(outcomes, np.int8),
            np.array(valid, bool),
            reason,
        )


class SetScorers:
    """Scorers of several problem sets, by number."""

    def __init__(self, scorers: Sequence[Scorer], remarks: Sequence[str] = ()) -> None:
        self._scorers = scorers
        self.remarks = remarks
        """Messages for the user about the scorers."""
        self.has_workers = any(scorer.has_workers for scorer in scorers)
        """Whether some rows are scored in the background."""

    def __getitem__(self, number: int) -> Scorer:
        return self._scorers[number]

    def submit_rows(
        self, rows: RewardInputs, set_numbers: Sequence[int]
    ) -> list[tuple[list[int], Scorer, PendingScores]]:
        """Submits each row to the scorer of its set. Raises the errors of `Scorer.submit_rows`.

        Returns the row indices of each set, its scorer, and its pending scores.
        """
        submissions = []
        for number, scorer in enumerate(self._scorers):
            indices = [i for i, set_number in enumerate(set_numbers) if set_number == number]
            if indices:
                set_rows = rows.select_rows(indices)
                submissions.append((indices, scorer, scorer.submit_rows(set_rows)))
        return submissions


class ScoreCollector:
    """Collects the scores of separately submitted rows."""

    def __init__(self) -> None:
        self._pending: list[tuple[list[int], Scorer, PendingScores]] = []

    def select_unsubmitted_rows(self, numbers: Sequence[int]) -> list[int]:
        """Selects the rows that are not submitted yet."""
        submitted = {number for numbers, _, _ in self._pending for number in numbers}
        return [number for number in numbers if number not in submitted]

    def submit_rows(
        self,
        scorers: SetScorers,
        numbers: Sequence[int],
        rows: RewardInputs,
        set_numbers: Sequence[int],
    ) -> None:
        """Submits rows under their numbers. Raises the errors of `SetScorers.submit_rows`."""
        for indices, scorer, pending in scorers.submit_rows(rows, set_numbers):
            self._pending.append(([numbers[index] for index in indices], scorer, pending))

    def collect_scores(self) -> Scores:
        """Collects the scores in order of row numbers. Raises PoolError."""
        results = [
            (numbers, scorer.collect_scores(pending)) for numbers, scorer, pending in self._pending
        ]
        if not results:
            return make_invalid_scores(0, "")
        numbers = np.concatenate([np.asarray(numbers, np.int64) for numbers, _ in results])
        order = np.argsort(numbers)
        columns = [np.concatenate([scores[i] for _, scores in results])[order] for i in range(3)]
        return Scores(
            *columns,
            reason=next((scores.reason for _, scores in results if scores.reason), ""),
        )


def begins_with_thought(response: str) -> bool:
    """Returns whether a response begins with a thought.

    It must have a single <think>...</think> block, with text inside and after it. The opening mark
    may be missing, as it may be in the prompt.
    """
    thought, closing_mark, remainder = response.partition("</think>")
    thought_text = thought.strip().removeprefix("<think>")
    is_single = "<think>" not in thought_text + remainder and "</think>" not in remainder
    return bool(closing_mark and thought_text.strip() and remainder.strip()) and is_single


def _reward_from_outcome(outcome: Outcome) -> PartReward:
    return PartReward(float(outcome == Outcome.CORRECT), outcome)


def _reward_from_verdict(answer: Any) -> PartReward:
    """Converts a worker's verdict to a reward."""
    if isinstance(answer, bool):
        return _reward_from_outcome(Outcome.CORRECT if answer else Outcome.WRONG)
    if "error" in answer:
        return PartReward(0.0, Outcome.ERROR, answer["error"])
    if "unjudged" in answer:
        return _reward_from_unjudged(answer)
    # The worker was late or died. The answer is scored 0 rather than left out, as the policy would
    # otherwise gain by answers that hang or crash the verifier.
    return _reward_from_outcome(Outcome.TIMEOUT)


def _reward_from_unjudged(answer: dict[str, float]) -> PartReward:
    """Makes the invalid reward of a task that did not start in time."""
    reason = (
        f"other tasks kept the workers busy for {answer['unjudged']:.0f} s, the time limit of a"
        " batch; raise --reward.workers, or lower --reward.deadline"
    )
    return PartReward(0.0, Outcome.TIMEOUT, reason)


def _rewards_from_call(answer: dict[str, Any], row_count: int) -> list[PartReward]:
    """Converts a call's answer to the rewards of its rows."""
    # A failure of a user's function is not the policy's fault, so its rows have no reward.
    if "timeout" in answer:
        return [PartReward(0.0, Outcome.TIMEOUT, "a call exceeded reward.deadline")] * row_count
    if "unjudged" in answer:
        return [_reward_from_unjudged(answer)] * row_count
    if "rewards" not in answer:
        reason = answer.get("error", "a call ended its process")
        return [PartReward(0.0, Outcome.ERROR, reason)] * row_count
    return [
        PartReward(0.0, Outcome.ERROR, outcome)
        if reward is None
        else PartReward(reward, Outcome[outcome.upper()])
        for reward, outcome in answer["rewards"]
    ]
