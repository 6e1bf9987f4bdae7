"""Measures a policy on named sets of problems: asks each some number of times, and tells what the
answers say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.config.settings import DataConfig, ResolvedConfig
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import Measured
from jaxspec.data.scoring import Judged
from jaxspec.evaluation.estimates import Estimate, Tally, consensus, estimates
from jaxspec.host.batches import Batches
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import listed
from jaxspec.rewards.extract import Style, dapo_form, extract, normalise, opens_thought
from jaxspec.rewards.outcome import Outcome
from jaxspec.state import Prompts, Rollout

Ask = Callable[[Any, Prompts], tuple[Any, Rollout]]
"""Answers prompts by a state, which it may consume: gives the state again, and the rollout."""
Record = dict[str, Any]
"""What became of a problem, as a line of `records.Records`, but for its step."""


class Part(NamedTuple):
    """Problems that are asked together: all their answers, call after call."""

    name: str
    """Of their set."""
    places: range
    """Where they are in it."""
    number: int
    """Of their first call, in the whole evaluation."""


class Evaluator:
    """Measures policies on the measured sets of `batches`, by calls of one program.

    Args:
      batches: asks and judges; a call answers each problem with one group.
      config: the one of `batches`.
      samples: answers to each problem, a multiple of the group.
      ask: the program.
      prepare: makes of a state what the program takes instead, once an evaluation.
      with_text: whether records have the responses themselves.
    """

    def __init__(
        self,
        batches: Batches,
        config: ResolvedConfig,
        samples: int,
        ask: Ask,
        prepare: Callable[[Any], Any] | None = None,
        with_text: bool = False,
    ) -> None:
        self._batches, self._samples, self._ask, self._with_text = batches, samples, ask, with_text
        self._prepare = prepare
        self._sets: Mapping[str, Measured] = batches.sets.measured
        self._judges = [*config.judged_sets.values()]
        self._prompts, self._repeats = config.batch.prompts, samples // config.batch.group_size

    @property
    def parts(self) -> list[Part]:
        """All that is asked, in its order."""
        found: list[Part] = []
        for name, measured in self._sets.items():
            count = len(measured.problems)
            for first in range(0, count, self._prompts):
                places = range(first, min(first + self._prompts, count))
                found.append(Part(name, places, len(found) * self._repeats))
        return found

    def require_metric(self, name: str) -> None:
        """Refuses the name of a metric that this does not give."""
        names = list(named(self.estimated([])))
        require(
            not name or name in names,
            f"eval.keep_best is {name!r}, and evaluations give {listed(names)}; choose one of"
            " these",
        )

    def __call__(self, state: Any, stop: Callable[[], bool]) -> tuple[Any, list[Record] | None]:
        """Measures the policy of a state, which may be consumed: gives it again, with the records
        of this process's problems; None for them if it was asked to stop before a call."""
        records: list[Record] = []
        given = self.prepared(state)
        for part in self.parts:
            given, found = self.answer(given, part, stop)
            if found is None:
                return state if self._prepare else given, None
            records += found
        return state if self._prepare else given, records

    def prepared(self, state: Any) -> Any:
        """What the program takes of a state."""
        return self._prepare(state) if self._prepare else state

    def left(self, records: list[Record]) -> list[Part]:
        """What is not answered yet, in any process; `records` are this one's."""
        known = {(record["set"], record["problem"]) for record in records}
        here = self._batches.prompts_here
        done = [
            all(
                (part.name, place) in known
                for place, own in zip(part.places, here, strict=False)
                if own
            )
            for part in self.parts
        ]
        agreed = meshes.sum_over_processes(np.asarray(done, np.float32)) == jax.process_count()
        return [part for part, all_done in zip(self.parts, agreed, strict=True) if not all_done]

    def answer(
        self, state: Any, part: Part, stop: Callable[[], bool]
    ) -> tuple[Any, list[Record] | None]:
        """As a call, for some problems; the state is a prepared one."""
        source = self._sets[part.name]
        problems: dict[int, Problem] = {
            place: source.of(number) for place, number in enumerate(part.places)
        }
        calls: list[Judged] = []
        for number in range(self._repeats):
            if stop():
                return state, None
            prompts = self._batches.evaluate(problems, part.number + number)
            state, rollout = self._ask(state, prompts)
            calls.append(self._batches.score_evaluation(problems, rollout))
        return state, list(self._records(part, calls))

    def _records(self, part: Part, calls: list[Judged]) -> Iterator[Record]:
        """Of this process's problems, from all calls that answered them."""
        data, votes = self._data(part.name), self._votes(part.name)
        group = self._batches.group
        for first in range(0, len(calls[0].rows), group):
            answers: dict[str, list[Any]] = {}
            for judged in calls:
                for row in range(first, first + group):
                    for key, value in _answer(judged, row).items():
                        answers.setdefault(key, []).append(value)
            responses = answers.pop("responses")
            if votes:
                opened = opens_thought(calls[0].problems[first].prompt)
                answers["stated"] = [_stated(text, data.answer_style, opened) for text in responses]
            if self._with_text:
                answers["responses"] = responses
            problem = calls[0].problems[first]
            yield {
                "set": part.name,
                "problem": part.places[int(calls[0].rows[first]) // group],
                "prompt": problem.prompt,
                "question": problem.question,
                "answer": problem.answer,
                **answers,
            }

    def estimated(self, records: list[Record]) -> dict[str, dict[str, Estimate]]:
        """What the records of all processes say, by set; `records` are those of this one."""
        found = {}
        for name, measured in self._sets.items():
            table = np.zeros((len(Tally._fields), len(measured.problems)), np.float32)
            for record in records:
                if record["set"] == name:
                    table[:, record["problem"]] = _tally(record)
            tally = Tally(*meshes.sum_over_processes(table).astype(np.float64))
            found[name] = estimates(tally, self._samples, self._votes(name))
        return found

    def _data(self, name: str) -> DataConfig:
        return self._judges[self._sets[name].judge].data

    def _votes(self, name: str) -> bool:
        """Whether answers to a set's problems can be compared with one another."""
        judge = self._judges[self._sets[name].judge]
        return "answer" in judge.reward.all_parts and judge.data.answer_style != "code"


def named(found: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Estimates by set and metric, such as held_out/avg@8."""
    return {f"{name}/{key}": each for name, part in found.items() for key, each in part.items()}


def metrics_of(found: Mapping[str, Mapping[str, Estimate]]) -> dict[str, float]:
    """Estimates as metrics of a batch: values, and the interval of the share of correct answers."""
    metrics = {}
    for name, each in named(found).items():
        metrics[f"eval/{name}"] = each.value
        if "/avg@" in name:
            metrics |= {f"eval/{name}/low": each.low, f"eval/{name}/high": each.high}
    return metrics


def measured(line: Mapping[str, Any]) -> bool:
    """Whether a batch's metrics have those of an evaluation."""
    return any(name.startswith("eval/") for name in line)


def _answer(judged: Judged, row: int) -> dict[str, Any]:
    """One answer, as items of the lists of a record."""
    known, scores = bool(judged.rewarded[row]), judged.scores
    outcome = Outcome(int(scores.outcomes[row]))
    return {
        "correct": outcome == Outcome.CORRECT if known else None,
        "reward": float(scores.rewards[row]) if known else None,
        "outcome": outcome.name.lower() if judged.ended[row] else "failed",
        "tokens": int(judged.ends[row] - judged.starts[row]),
        "rounds": int(judged.rounds[row]),
        "responses": judged.asked.responses[row],
    }


def _stated(response: str, style: Style, in_thought: bool) -> str | None:
    """The answer that a response states, in the form in which votes are counted."""
    found = extract(response, style, in_thought=in_thought)
    return None if found is None else (dapo_form if style == "dapo" else normalise)(found)


def _tally(record: Record) -> list[float | int]:
    """A problem's entry in `Tally`."""
    stated = record.get("stated", [None] * len(record["correct"]))
    known = [
        (right, reward, said)
        for right, reward, said in zip(record["correct"], record["reward"], stated, strict=True)
        if right is not None
    ]
    rights = [right for right, _, _ in known]
    voted = consensus([said for _, _, said in known], rights)
    return [len(known), sum(rights), voted, sum(reward for _, reward, _ in known)]
