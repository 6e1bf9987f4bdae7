"""The rewards of responses: parts that are added up, each with its outcome."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.rewards.extract import Style, dapo_form, extract, is_number, normalise, opens_thought
from jaxspec.rewards.outcome import Outcome, Scores, nothing_known
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


LARGEST = float(np.finfo(np.float32).max)


class Rows(NamedTuple):
    """What is judged, row by row."""

    prompts: Sequence[str]
    responses: Sequence[str]
    answers: Sequence[str]
    """References."""
    columns: Sequence[dict[str, Any]]
    """What the data says of each row."""

    def chosen(self, places: Sequence[int]) -> "Rows":
        """Those at some places."""
        return Rows(
            [self.prompts[place] for place in places],
            [self.responses[place] for place in places],
            [self.answers[place] for place in places],
            [self.columns[place] for place in places],
        )


class Judged(NamedTuple):
    """What a part gives a row."""

    reward: float
    outcome: Outcome
    reason: str = ""
    """Why it gives nothing."""

    @property
    def known(self) -> bool:
        """Whether it gives anything."""
        return not self.reason


class Begun(NamedTuple):
    """Rows that are being judged."""

    rows: Rows
    outcomes: list[Outcome | None]
    """Of the answers; None: the pool will say."""
    calls: list[slice]
    """Rows of each call of the user's function."""
    number: int | None
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
      rows: that a user's function is called with, at most.
    """

    def __init__(
        self,
        style: Style = "hash",
        parts: Sequence[str] = ("answer",),
        weights: Sequence[float] = (1.0,),
        pool: RewardPool | None = None,
        verifier: str = "exact",
        rows: int = 32,
    ) -> None:
        self._style: Style = style
        self._weights = dict(zip(parts, weights, strict=True))
        self._pool, self._rows = pool, rows
        self.has_workers = pool is not None
        """Whether anything is gained by beginning early."""
        self._verifier = verifier if "answer" in parts else "exact"
        self._canaries = CANARIES.get(self._verifier, ())

    def __call__(self, rows: Rows) -> Scores:
        """The scores of rows; raises as `begin` and `end` do."""
        return self.end(self.begin(rows))

    def begin(self, rows: Rows) -> Begun:
        """Has the workers begin with rows.

        Raises:
          ValueError: there are different numbers of prompts, responses, answers and columns.
          PoolError: the pool is broken.
        """
        whole = list(zip(*rows, strict=True))
        found = [
            extract(response, self._style, in_thought=opens_thought(prompt))
            for prompt, response, _, _ in whole
        ]
        outcomes = [
            self._settled(each, answer)
            for each, (_, _, answer, _) in zip(found, whole, strict=True)
        ]
        tasks: list[list[Any]] = []
        pairs = [(reference, answer) for reference, answer, _ in self._canaries]
        pairs += [
            (rows.answers[row], found[row])
            for row, outcome in enumerate(outcomes)
            if outcome is None
        ]
        tasks += [[self._verifier, *pair] for pair in pairs]
        calls = []
        if "function" in self._weights:
            starts = range(0, len(whole), self._rows)
            calls = [slice(start, min(start + self._rows, len(whole))) for start in starts]
            tasks += [["rows", *(list(column[call]) for column in rows)] for call in calls]
        number = self._pool.submit(tasks) if self._pool and tasks else None
        return Begun(rows, outcomes, calls, number)

    def end(self, begun: Begun) -> Scores:
        """The scores of rows that were begun with, once all are there.

        Raises:
          PoolError: the pool is broken, or the verifier does not know what is equal any more.
        """
        answers = [] if begun.number is None or not self._pool else self._pool.collect(begun.number)
        verdicts = iter(answers)
        self._listen(verdicts)
        answered = [
            _verdict(next(verdicts)) if each is None else _settled(each) for each in begun.outcomes
        ]
        rewarded: list[Judged] = []
        for call, answer in zip(begun.calls, verdicts, strict=True):
            rewarded += _of_call(answer, call.stop - call.start)
        judged = [
            [
                self._part(part, response, answer, rewarded[row] if rewarded else None)
                for part in self._weights
            ]
            for row, (response, answer) in enumerate(
                zip(begun.rows.responses, answered, strict=True)
            )
        ]
        return self._added(judged)

    def try_function(self, rows: Rows) -> str:
        """Calls the user's function on rows; returns why one has no reward, if one has none.

        Raises:
          PoolError: the pool is broken.
        """
        if "function" not in self._weights or self._pool is None:
            return ""
        [answer] = self._pool([["rows", *(list(column) for column in rows)]])
        judged = _of_call(answer, len(rows.prompts))
        return next((each.reason for each in judged if not each.known), "")

    def unreadable(self, answers: Sequence[str]) -> list[int]:
        """Which references the verifier cannot read; raises PoolError."""
        if self._verifier == "exact" or self._pool is None:
            return []
        code = self._verifier == "code"
        asked = [number for number, answer in enumerate(answers) if code or not is_number(answer)]
        read = self._pool([["readable", self._verifier, answers[number]] for number in asked])
        return [number for number, answer in zip(asked, read, strict=True) if answer is not True]

    def _settled(self, found: str | None, answer: str) -> Outcome | None:
        """What is known of an answer without a worker."""
        if found is None:
            return Outcome.NO_ANSWER
        if self._verifier == "code":
            return None
        form = dapo_form if self._style == "dapo" else normalise
        if form(found) == form(answer):
            return Outcome.CORRECT
        if self._verifier == "math" and not (is_number(found) and is_number(answer)):
            return None
        return Outcome.WRONG

    def _listen(self, verdicts: Iterator[Any]) -> None:
        """Whether all canaries are alive; one that is merely late says nothing."""
        found = [(canary, next(verdicts)) for canary in self._canaries]
        late = found and all(isinstance(verdict, dict) for _, verdict in found)
        for (reference, answer, right), verdict in found:
            if verdict is not right and (late or not isinstance(verdict, dict)):
                raise PoolError(
                    f"reward.verifier {self._verifier} says {verdict!r} of {answer!r} for"
                    f" {reference!r}, which is {right}: no reward of it can be trusted"
                )

    @staticmethod
    def _part(part: str, response: str, answer: Judged, given: Judged | None) -> Judged:
        match part:
            case "answer":
                return answer
            case "stated":
                holds = answer.outcome != Outcome.NO_ANSWER
            case "thought":
                holds = thinks_first(response)
            case _:
                assert given is not None, "every row was given to the function"
                return given
        return Judged(float(holds), Outcome.CORRECT if holds else Outcome.WRONG)

    def _added(self, judged: Sequence[Sequence[Judged]]) -> Scores:
        """Sums over the parts. The outcome is that of what judges the answer, if something does."""
        weights = list(self._weights.values())
        names = list(self._weights)
        first = next((i for i, name in enumerate(names) if name in ("answer", "function")), 0)
        rewards, outcomes, known, reason = [], [], [], ""
        for parts in judged:
            lost = next((part for part in parts if not part.known), None)
            total = sum(w * part.reward for w, part in zip(weights, parts, strict=True))
            if not lost and not abs(total) <= LARGEST:
                lost = Judged(0.0, Outcome.ERROR, f"a reward of {total:g} is beyond float32")
            rewards.append(0.0 if lost else total)
            outcomes.append((lost or parts[first]).outcome)
            known.append(lost is None)
            reason = reason or (lost.reason if lost else "")
        return Scores(
            np.array(rewards, np.float32),
            np.array(outcomes, np.int8),
            np.array(known, bool),
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

    def begin(self, rows: Rows, judges: Sequence[int]) -> list[tuple[list[int], Scorer, Begun]]:
        """Has rows judged by the scorers with the numbers `judges`, row by row: which of the rows,
        by whom; raises as `Scorer.begin` does."""
        begun = []
        for number, scorer in enumerate(self._scorers):
            places = [place for place, judge in enumerate(judges) if judge == number]
            if places:
                chosen = rows.chosen(places)
                begun.append((places, scorer, scorer.begin(chosen)))
        return begun


class Ahead:
    """Rows whose judging begins before the others are there."""

    def __init__(self) -> None:
        self._begun: list[tuple[list[int], Scorer, Begun]] = []

    def left(self, numbers: Sequence[int]) -> list[int]:
        """Those rows that were not begun with yet."""
        begun = {number for numbers, _, _ in self._begun for number in numbers}
        return [number for number in numbers if number not in begun]

    def begin(
        self, scorers: SetScorers, numbers: Sequence[int], rows: Rows, judges: Sequence[int]
    ) -> None:
        """Has rows judged; raises as `SetScorers.begin` does."""
        for places, scorer, begun in scorers.begin(rows, judges):
            self._begun.append(([numbers[place] for place in places], scorer, begun))

    def end(self) -> Scores:
        """The scores of all that was begun with, in the order of the numbers; raises as
        `Scorer.end` does."""
        parts = [(numbers, scorer.end(begun)) for numbers, scorer, begun in self._begun]
        if not parts:
            return nothing_known(0, "")
        numbers = np.concatenate([np.asarray(numbers, np.int64) for numbers, _ in parts])
        order = np.argsort(numbers)
        columns = [np.concatenate([part[i] for _, part in parts])[order] for i in range(3)]
        return Scores(*columns, reason=next((p.reason for _, p in parts if p.reason), ""))


def thinks_first(response: str) -> bool:
    """Whether a response begins with one <think>...</think> (the first mark may stand in the
    prompt), and has something after it."""
    thought, mark, rest = response.partition("</think>")
    opened = thought.strip().removeprefix("<think>")
    once = "<think>" not in opened + rest and "</think>" not in rest
    return bool(mark and opened.strip() and rest.strip()) and once


def _settled(outcome: Outcome) -> Judged:
    return Judged(float(outcome == Outcome.CORRECT), outcome)


def _verdict(answer: Any) -> Judged:
    """Of the verifier. One that is late, or dies, over what a response says counts as wrong: or
    else to hang or break it would pay. What fails here says nothing of the response."""
    if isinstance(answer, bool):
        return _settled(Outcome.CORRECT if answer else Outcome.WRONG)
    if "error" in answer:
        return Judged(0.0, Outcome.ERROR, answer["error"])
    if "unjudged" in answer:
        return _unjudged(answer)
    return _settled(Outcome.TIMEOUT)


def _unjudged(answer: dict[str, float]) -> Judged:
    """Of a row that had not begun when the time of its batch was over."""
    reason = (
        f"others of the batch kept the workers busy for {answer['unjudged']:.0f} s, the most that a"
        " batch may take; raise --reward.workers, or lower --reward.deadline"
    )
    return Judged(0.0, Outcome.TIMEOUT, reason)


def _of_call(answer: dict[str, Any], count: int) -> list[Judged]:
    """What a call of a user's function gives each of its rows."""
    if "timeout" in answer:
        return [Judged(0.0, Outcome.TIMEOUT, "a call was not through in time")] * count
    if "unjudged" in answer:
        return [_unjudged(answer)] * count
    if "rewards" not in answer:
        reason = answer.get("error", "a call ended its process")
        return [Judged(0.0, Outcome.ERROR, reason)] * count
    return [
        Judged(0.0, Outcome.ERROR, outcome)
        if reward is None
        else Judged(reward, Outcome[outcome.upper()])
        for reward, outcome in answer["rewards"]
    ]
