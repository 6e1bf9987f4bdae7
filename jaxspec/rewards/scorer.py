"""The rewards of responses: parts that are added up, each with its outcome."""

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
"""By verifier, references, answers, and whether these are right, which it must find every time."""


MAX_REWARD = float(np.finfo(np.float32).max)


class RewardInputs(NamedTuple):
    """What is judged, row by row."""

    prompts: Sequence[str]
    responses: Sequence[str]
    answers: Sequence[str]
    """References."""
    columns: Sequence[dict[str, Any]]
    """What the data says of each row."""

    def select_rows(self, indices: Sequence[int]) -> "RewardInputs":
        """Those at some places."""
        return RewardInputs(
            [self.prompts[index] for index in indices],
            [self.responses[index] for index in indices],
            [self.answers[index] for index in indices],
            [self.columns[index] for index in indices],
        )


class PartReward(NamedTuple):
    """What a part gives a row."""

    value: float
    outcome: Outcome
    reason: str = ""
    """Why it gives nothing."""

    @property
    def is_valid(self) -> bool:
        """Whether it gives anything."""
        return not self.reason


class PendingScores(NamedTuple):
    """Rows that are being judged."""

    rows: RewardInputs
    outcomes: list[Outcome | None]
    """Of the answers; None: the pool will say."""
    call_slices: list[slice]
    """Rows of each call of the user's function."""
    batch_id: int | None
    """Of the pool's batch, which has the canaries first, then answers, then calls; None: there is
    none."""


class Scorer:
    """Rewards of rows, which are weighted sums of parts.

    Args:
      style: how responses state their answers.
      parts: as in `reward.parts`.
      weights: of each part.
      pool: workers, where a part needs them.
      verifier: as in `reward.verifier`.
      rows_per_call: that a user's function is called with, at most.
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
        """Whether anything is gained by beginning early."""
        self._verifier = verifier if "answer" in parts else "exact"
        self._canaries = CANARIES.get(self._verifier, ())

    def __call__(self, rows: RewardInputs) -> Scores:
        """The scores of rows; raises as `submit_rows` and `collect_scores` do."""
        return self.collect_scores(self.submit_rows(rows))

    def submit_rows(self, rows: RewardInputs) -> PendingScores:
        """Has the workers begin with rows.

        Raises:
          ValueError: there are different numbers of prompts, responses, answers and columns.
          PoolError: the pool is broken.
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
        """The scores of rows that were begun with, once all are there.

        Raises:
          PoolError: the pool is broken, or the verifier does not know what is equal any more.
        """
        answers = (
            []
            if pending.batch_id is None or not self._pool
            else self._pool.collect_answers(pending.batch_id)
        )
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
        """Calls the user's function on rows; returns why one has no reward, if one has none.

        Raises:
          PoolError: the pool is broken.
        """
        if "function" not in self._weights or self._pool is None:
            return ""
        [answer] = self._pool([["rows", *(list(column) for column in rows)]])
        rewards = _rewards_from_call(answer, len(rows.prompts))
        return next((reward.reason for reward in rewards if not reward.is_valid), "")

    def find_unreadable(self, answers: Sequence[str]) -> list[int]:
        """Which references the verifier cannot read; raises PoolError."""
        if self._verifier == "exact" or self._pool is None:
            return []
        is_code = self._verifier == "code"
        rows = [row for row, answer in enumerate(answers) if is_code or not is_number(answer)]
        verdicts = self._pool([["readable", self._verifier, answers[row]] for row in rows])
        return [row for row, verdict in zip(rows, verdicts, strict=True) if verdict is not True]

    def _match_answer(self, extracted_answer: str | None, answer: str) -> Outcome | None:
        """What is known of an answer without a worker."""
        if extracted_answer is None:
            return Outcome.NO_ANSWER
        if self._verifier == "code":
            return None
        normalize = normalize_dapo_answer if self._style == "dapo" else normalize_answer
        if normalize(extracted_answer) == normalize(answer):
            return Outcome.CORRECT
        if self._verifier == "math" and not (is_number(extracted_answer) and is_number(answer)):
            return None
        return Outcome.WRONG

    def _check_canaries(self, verdicts: Iterator[Any]) -> None:
        """Whether all canaries are alive; one that is merely late says nothing."""
        checks = [(canary, next(verdicts)) for canary in self._canaries]
        all_late = checks and all(isinstance(verdict, dict) for _, verdict in checks)
        for (reference, answer, is_correct), verdict in checks:
            if verdict is not is_correct and (all_late or not isinstance(verdict, dict)):
                raise PoolError(
                    f"reward.verifier {self._verifier} says {verdict!r} of {answer!r} for"
                    f" {reference!r}, which is {is_correct}: no reward of it can be trusted"
                )

    @staticmethod
    def _score_part(
        part: str, response: str, answer_reward: PartReward, function_reward: PartReward | None
    ) -> PartReward:
        match part:
            case "answer":
                return answer_reward
            case "stated":
                condition = answer_reward.outcome != Outcome.NO_ANSWER
            case "thought":
                condition = begins_with_thought(response)
            case _:
                assert function_reward is not None, "every row was given to the function"
                return function_reward
        return PartReward(float(condition), Outcome.CORRECT if condition else Outcome.WRONG)

    def _add_parts(self, part_rewards: Sequence[Sequence[PartReward]]) -> Scores:
        """Sums over the parts. The outcome is that of what judges the answer, if something does."""
        weights = list(self._weights.values())
        names = list(self._weights)
        main_part = next((i for i, name in enumerate(names) if name in ("answer", "function")), 0)
        rewards, outcomes, valid, reason = [], [], [], ""
        for row_rewards in part_rewards:
            failure = next((reward for reward in row_rewards if not reward.is_valid), None)
            total = sum(w * reward.value for w, reward in zip(weights, row_rewards, strict=True))
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
    """Scorers of several sets of problems, by the number of the set."""

    def __init__(self, scorers: Sequence[Scorer], remarks: Sequence[str] = ()) -> None:
        self._scorers = scorers
        self.remarks = remarks
        """What a user should know of them."""
        self.has_workers = any(scorer.has_workers for scorer in scorers)
        """Whether anything is gained by beginning early."""

    def __getitem__(self, number: int) -> Scorer:
        return self._scorers[number]

    def submit_rows(
        self, rows: RewardInputs, set_numbers: Sequence[int]
    ) -> list[tuple[list[int], Scorer, PendingScores]]:
        """Has rows judged by the scorers with the numbers `set_numbers`, row by row: which of the
        rows, by whom; raises as `Scorer.submit_rows` does."""
        submissions = []
        for number, scorer in enumerate(self._scorers):
            indices = [i for i, set_number in enumerate(set_numbers) if set_number == number]
            if indices:
                set_rows = rows.select_rows(indices)
                submissions.append((indices, scorer, scorer.submit_rows(set_rows)))
        return submissions


class ScoreCollector:
    """Rows whose judging begins before the others are there."""

    def __init__(self) -> None:
        self._pending: list[tuple[list[int], Scorer, PendingScores]] = []

    def select_unsubmitted(self, numbers: Sequence[int]) -> list[int]:
        """Those rows that were not begun with yet."""
        submitted = {number for numbers, _, _ in self._pending for number in numbers}
        return [number for number in numbers if number not in submitted]

    def submit_rows(
        self,
        scorers: SetScorers,
        numbers: Sequence[int],
        rows: RewardInputs,
        set_numbers: Sequence[int],
    ) -> None:
        """Has rows judged; raises as `SetScorers.submit_rows` does."""
        for indices, scorer, pending in scorers.submit_rows(rows, set_numbers):
            self._pending.append(([numbers[index] for index in indices], scorer, pending))

    def collect_scores(self) -> Scores:
        """The scores of all that was begun with, in the order of the numbers; raises as
        `Scorer.collect_scores` does."""
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
    """Whether a response begins with one <think>...</think> (the first mark may stand in the
    prompt), and has something after it."""
    thought, closing_mark, remainder = response.partition("</think>")
    thought_text = thought.strip().removeprefix("<think>")
    is_single = "<think>" not in thought_text + remainder and "</think>" not in remainder
    return bool(closing_mark and thought_text.strip() and remainder.strip()) and is_single


def _reward_from_outcome(outcome: Outcome) -> PartReward:
    return PartReward(float(outcome == Outcome.CORRECT), outcome)


def _reward_from_verdict(answer: Any) -> PartReward:
    """Of the verifier. One that is late, or dies, over what a response says counts as wrong: or
    else to hang or break it would pay. What fails here says nothing of the response."""
    if isinstance(answer, bool):
        return _reward_from_outcome(Outcome.CORRECT if answer else Outcome.WRONG)
    if "error" in answer:
        return PartReward(0.0, Outcome.ERROR, answer["error"])
    if "unjudged" in answer:
        return _reward_from_unjudged(answer)
    return _reward_from_outcome(Outcome.TIMEOUT)


def _reward_from_unjudged(answer: dict[str, float]) -> PartReward:
    """Of a row that had not begun when the time of its batch was over."""
    reason = (
        f"others of the batch kept the workers busy for {answer['unjudged']:.0f} s, the most that a"
        " batch may take; raise --reward.workers, or lower --reward.deadline"
    )
    return PartReward(0.0, Outcome.TIMEOUT, reason)


def _rewards_from_call(answer: dict[str, Any], row_count: int) -> list[PartReward]:
    """What a call of a user's function gives each of its rows."""
    if "timeout" in answer:
        return [PartReward(0.0, Outcome.TIMEOUT, "a call was not through in time")] * row_count
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
