"""Prompts of each call, placed on the devices."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from jaxspec.data.history import AnswerHistory, Answers
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import ProblemSets, pad_prompts
from jaxspec.host.programs import abstract_prompts, put_like
from jaxspec.inputs.streams import Stream
from jaxspec.processes import global_arrays
from jaxspec.rollout.generator import Generator
from jaxspec.state import Prompts, Rollout


class PromptSource:
    """Source of the prompts of each call: training, comparison and evaluation.

    Each process places the prompts of which its devices hold a copy.

    Args:
      sets: the problems. The generator's seed orders those for training.
      generator: generator that answers the prompts.
      prompts: number of prompts in a call.
      pad_id: token that fills prompts.
      history: earlier answers for drafts that look them up. By default a new one without answers.
    """

    def __init__(
        self,
        sets: ProblemSets,
        generator: Generator,
        prompts: int,
        pad_id: int,
        history: AnswerHistory | None = None,
    ) -> None:
        self.sets, process = sets, jax.process_index()
        self.group_size = generator.settings.group_size
        self.history = history or AnswerHistory(generator.past_answers, process)
        self._problems = sets.make_stream(generator.seed)
        self._count, self._width, self._pad_id = prompts, generator.prompt_length, pad_id
        self._layout = abstract_prompts(generator, prompts)
        # A process may hold copies of prompts whose rows another process owns.
        self._copies, _ = global_arrays.locate_rows(generator.mesh, prompts)
        self._is_held = self._copies[process]
        rows = prompts * self.group_size
        _, self._row_owners = global_arrays.locate_rows(generator.mesh, rows)
        self.is_local_row: Bool[np.ndarray, " B"] = self._row_owners == process
        """Rows that this process owns."""

    @property
    def is_local_prompt(self) -> Bool[np.ndarray, " n"]:
        """Prompts whose rows this process owns."""
        return self.is_local_row[:: self.group_size]

    def place_training(self, rollout: int) -> Prompts:
        """Places the prompts of a training rollout."""
        return self._place_training_prompts(rollout, Stream.TRAIN)

    def place_comparison(self, rollout: int) -> Prompts:
        """Places the prompts of a training rollout again, with other noise."""
        # By now the history has this rollout's answers. With the same noise, drafts would find the
        # very answers that are generated.
        return self._place_training_prompts(rollout, Stream.COMPARE)

    def place_evaluation(self, problems: Mapping[int, Problem], call: int) -> Prompts:
        """Places problems of an evaluation call, by their place among the prompts.

        Places without a problem are not answered.
        """
        held_problems = {
            place: problem for place, problem in problems.items() if self._is_held[place]
        }
        return self._place_prompts(held_problems, Stream.EVALUATE, call, {})

    def place_padding(self, rollout: int) -> Prompts:
        """Places padding prompts, which are not answered, for a call that only learns."""
        return self._place_prompts({}, Stream.TRAIN, rollout, {})

    def local_problems(self, rollout: int) -> dict[int, Problem]:
        """Returns a training rollout's problems whose rows this process owns, by place."""
        return self._select_problems(rollout, self.is_local_prompt)

    def remember_answers(self, rollout_number: int, rollout: Rollout) -> None:
        """Stores the answers of a training rollout in `history`, if that keeps any."""
        if not self.history.past:
            return
        group = self.group_size
        places = np.flatnonzero(self.is_local_prompt)
        count = min(group, self.history.past)
        rows = [place * group + answer for place in places for answer in range(count)]
        tokens, prompt_lengths, lengths = (
            global_arrays.read_local_rows(leaf, np.asarray(rows, np.int32))
            for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths)
        )
        answers = [
            text[first:stop]
            for text, first, stop in zip(tokens, prompt_lengths, lengths, strict=True)
        ]
        numbers, owners = (
            self._list_problem_numbers(rollout_number),
            self._row_owners[::group].tolist(),
        )
        # If a batch asks a problem twice, the answers at the last of its places are kept.
        by_problem = {
            numbers[place]: answers[index * count : (index + 1) * count]
            for index, place in enumerate(places)
        }
        self.history.store_answers(dict(zip(numbers, owners, strict=True)), by_problem)

    def _select_problems(self, rollout: int, mask: Bool[np.ndarray, " n"]) -> dict[int, Problem]:
        first = rollout * self._count
        return {int(place): self._problems[first + int(place)] for place in np.flatnonzero(mask)}

    def _list_problem_numbers(self, rollout: int) -> list[int]:
        """Returns the problem numbers of a training rollout, over all processes."""
        first = rollout * self._count
        return [self._problems.problem_number(first + place) for place in range(self._count)]

    def _place_training_prompts(self, rollout: int, stream: int) -> Prompts:
        numbers, askers = self._list_problem_numbers(rollout), dict[int, set[int]]()
        if self.history.past:
            for number, copies in zip(numbers, self._copies.T, strict=True):
                askers.setdefault(number, set()).update(np.flatnonzero(copies).tolist())
        answers = self.history.fetch_answers(askers)
        by_place = {place: answers.get(number, []) for place, number in enumerate(numbers)}
        return self._place_prompts(
            self._select_problems(rollout, self._is_held), stream, rollout, by_place
        )

    def _place_prompts(
        self, problems: dict[int, Problem], stream: int, batch: int, answers: Answers
    ) -> Prompts:
        """Places prompts that have a copy here, with earlier answers.

        `problems` and `answers` are given by place. Places without a problem are not answered.
        """
        layout, local_places = self._layout, np.flatnonzero(self._is_held)
        rows = np.searchsorted(local_places, list(problems))
        tokens = np.full((len(local_places), self._width), self._pad_id, np.int32)
        lengths, live = np.ones(len(local_places), np.int32), np.zeros(len(local_places), bool)
        history = np.zeros((len(local_places), *layout.history.shape[1:]), np.int32)
        history_lengths = np.zeros((len(local_places), self.history.past), np.int32)
        if problems:
            tokens[rows], lengths[rows] = pad_prompts(
                list(problems.values()), self._width, self._pad_id
            )
            live[rows] = True
        for row, (place, problem) in zip(rows, problems.items(), strict=True):
            for number, answer in enumerate(answers.get(place, [])):
                text = np.concatenate([problem.ids, answer])
                history[row, number, : len(text)] = text
                history_lengths[row, number] = len(text)
        columns = {
            "tokens": tokens,
            "lengths": lengths,
            "live": live,
            "history": history,
            "history_lengths": history_lengths,
        }
        by_row: dict[str, Any] = {
            name: global_arrays.from_local_rows(getattr(layout, name), local_places, values)
            for name, values in columns.items()
        }
        scalars = put_like((jnp.int32(stream), jnp.int32(batch)), (layout.stream, layout.batch))
        return Prompts(**by_row, stream=scalars[0], batch=scalars[1])
