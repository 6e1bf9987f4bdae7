"""Prompts with checkable answers, by number: generated exercises or JSON lines, in one set or
several, their shuffled stream, and padded batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Int32

from jaxspec.config.settings import DataConfig, ResolvedConfig
from jaxspec.data import arithmetic
from jaxspec.data.json_lines import RowParser
from jaxspec.data.problem_file import ProblemFile, load_file
from jaxspec.data.problem_source import LeftOut, Problem, Problems, normal_form
from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import is_whole_text, shown
from jaxspec.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Generated(Problems):
    """The first `rows` problems of one side of a generated task."""

    tokenizer: Tokenizer
    task: arithmetic.Task
    digits: int
    held_out: bool
    rows: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self.rows:
            raise IndexError(f"problem {index} of {self.rows}")
        problem = arithmetic.make_problem(self.task, self.digits, index, held_out=self.held_out)
        prompt = self.tokenizer.render(problem.question)
        ids = tuple(self.tokenizer.encode(prompt))
        asked = normal_form(problem.question)
        return Problem(prompt, ids, problem.answer, index, question=asked)


class PromptStream:
    """Problems without end, each set shuffled anew each epoch and asked as often as its weight
    says; `stream[i]` depends on the seed and the global position i alone."""

    def __init__(
        self, sets: Sequence[Problems], seed: int, weights: Sequence[float] = (1.0,)
    ) -> None:
        self._sets = sets
        numbers = [
            range(place, len(each) * len(sets), len(sets)) for place, each in enumerate(sets)
        ]
        streams = [grain.MapDataset.source(each).seed(seed).shuffle().repeat() for each in numbers]
        mixed = len(streams) > 1
        self._numbers = grain.MapDataset.mix(streams, weights) if mixed else streams[0]

    def number(self, position: int) -> int:
        """What tells the problem at a position from all others, also of other sets."""
        number = self._numbers[position]
        assert number is not None  # only a filtered MapDataset has holes
        return number

    def __getitem__(self, position: int) -> Problem:
        index, place = divmod(self.number(position), len(self._sets))
        return dataclasses.replace(self._sets[place][index], judge=place)


class Measured(NamedTuple):
    """Problems that the policy is measured on."""

    problems: Problems
    judge: int
    """Number of the set that says what their responses are paid for."""

    def of(self, number: int) -> Problem:
        """One of them, which says by whom it is judged."""
        return dataclasses.replace(self.problems[number], judge=self.judge)


class ProblemSets(NamedTuple):
    """All that a run asks."""

    training: tuple[Problems, ...]
    """By set: the config's `training_sets`."""
    weights: tuple[float, ...]
    """How often each of them is asked."""
    measured: Mapping[str, Measured]
    """What the policy is measured on, by name."""

    def stream(self, seed: int) -> PromptStream:
        """The problems to train on, without end."""
        return PromptStream(self.training, seed, self.weights)

    def with_judges(self) -> Iterator[tuple[int, Problems]]:
        """All problems, with the number of the set that says what their responses are paid for."""
        yield from enumerate(self.training)
        yield from ((each.judge, each.problems) for each in self.measured.values())


def load_sets(config: ResolvedConfig, tokenizer: Tokenizer, *, answers: bool = True) -> ProblemSets:
    """Return the problems of a run: those to train on, and those that the policy is measured on,
    which are held out of them, or those of `eval.sets`, which change nothing in what is trained on.
    `answers` are as in `load_problems`.

    Raises `ConfigError` as `load_problems` does.
    """
    named, trained = [*config.judged_sets.items()], len(config.training_sets)
    loaded = [
        load_problems(
            each.data, tokenizer, where, answers=answers, judged="answer" in each.reward.all_parts
        )
        for where, each in named[:trained]
    ]
    found = [held_out for _, held_out in loaded]
    found += [
        all_problems(each.data, tokenizer, where, judged="answer" in each.reward.all_parts)
        for where, each in named[trained:]
    ]
    first = trained if config.eval.sets else 0
    return ProblemSets(
        training=tuple(train for train, _ in loaded),
        weights=tuple(each.weight for _, each in named[:trained]),
        measured={
            named[number][1].name: Measured(found[number], number)
            for number in range(first, len(named))
        },
    )


def all_problems(
    config: DataConfig, tokenizer: Tokenizer, where: str = "", *, judged: bool = True
) -> Problems:
    """Return every problem of the file `data.path`, of which none is held out, or the held-out side
    of a generated task; `where` and `judged` are as in `load_problems`, which also says what is
    raised."""
    if not config.path:
        return _generated(config, tokenizer, where, held_out=True)
    parser = RowParser(config, tokenizer, f"{where}data.path", config.path, judged)
    return load_file(parser)


def load_problems(
    config: DataConfig,
    tokenizer: Tokenizer,
    where: str = "",
    *,
    answers: bool = True,
    judged: bool = True,
) -> tuple[Problems, Problems]:
    """Return the training and the held-out problems; the latter are at most `data.eval_prompts`.

    Generated tasks hold out a fixed share of the operands. Of a file, the last rows are held out
    unless `data.eval_path` is set. Without `answers`, for a draft, rows that state none are among
    the training problems, and those that do are held out as with them, or not at all where they are
    too few; where no answer is `judged`, for rewards look at responses alone, all rows are alike.
    `where` comes before the names of settings in messages.
    Raises `ConfigError` where a file or column is missing, a line is damaged, or too few prompts
    fit `data.max_prompt_length`.
    """
    if not config.path:
        train, held = (
            _generated(config, tokenizer, where, held_out=side) for side in (False, True)
        )
        return train, held
    same = (
        f"{where}data.prompt_column and {where}data.answer_column are both"
        f" {shown(config.prompt_column)}"
    )
    require(
        config.prompt_column != config.answer_column,
        f"{same}, so that problems would state their answers; name two columns",
    )
    halved = (
        f"{where}data.instruction is {shown(config.instruction)}, which is no text in UTF-8; write"
        " it in UTF-8"
    )
    require(is_whole_text(config.instruction), halved)
    needed = answers and judged
    parser = RowParser(config, tokenizer, f"{where}data.path", config.path, needed)
    found = load_file(parser)
    held_out = config.eval_prompts
    if config.eval_path:
        other = RowParser(config, tokenizer, f"{where}data.eval_path", config.eval_path, needed)
        return found, load_file(other).take(slice(held_out))
    answered = np.flatnonzero(found.answered | (not judged))
    if len(found) == len(answered) <= held_out:
        most = len(found) - 1  # one at least is trained on
        lower = f"set --{where}data.eval_prompts {most} or less, or" if most else "give more, or"
        raise ConfigError(
            f"{where}data.path {config.path}: {len(found)} usable problems, of which"
            f" {where}data.eval_prompts = {held_out} would be held out; {lower} hold out those of"
            f" another file with --{where}data.eval_path"
        )
    last = answered[-held_out:] if len(answered) > held_out else answered[:0]
    held = found.take(last, left_out=LeftOut())
    return found.take(np.delete(np.arange(len(found)), last)), held


def remarks(config: ResolvedConfig, sets: ProblemSets) -> list[str]:
    """Return what a user should know of the problems: what was left out, held-out ones that are
    trained on, numbers below those asked, and of several sets how much there is."""
    lines, batch, single = [], config.batch.prompts, len(sets.training) == 1
    for number, (each, problems) in enumerate(
        zip(config.training_sets, sets.training, strict=True)
    ):
        where = "" if single else f"mixture.{number}."
        measured = sets.measured.get(each.name) if not config.eval.sets else None
        held_out = measured.problems if measured else None
        lines += _of_set(each.data, problems, held_out, batch if single else 1, where)
        if not single:
            share = each.weight / sum(sets.weights)
            lines.append(f"{each.name}: {len(problems)} problems, {share:.0%} of those asked")
    for each in config.eval.sets:
        found = sets.measured[each.name].problems
        counted = f"; {found.left_out}" if str(found.left_out) else ""
        lines.append(f"{each.name}: {len(found)} problems to measure by{counted}")
        lines += _unrendered(found, each.name)
        for train in sets.training:
            lines += _shared(found, train, each.name)
    return lines


def _of_set(
    config: DataConfig, problems: Problems, held_out: Problems | None, batch: int, where: str
) -> Iterator[str]:
    """What a user should know of a set of problems, of which a batch takes so many."""
    if str(problems.left_out):
        yield f"{where}data.path {config.path}: {problems.left_out}; {len(problems)} to train on"
    unanswered = len(problems) - sum(problems.answered) if isinstance(problems, ProblemFile) else 0
    if unanswered:
        yield (
            f"{where}data.path {config.path}: {unanswered} of {len(problems)} prompts have"
            " no reference answer, which is not needed here"
        )
    yield from _unrendered(problems, f"{where}data.path {config.path}")
    if held_out is not None and str(held_out.left_out):
        yield (
            f"{where}data.eval_path {config.eval_path}: {held_out.left_out}; {len(held_out)} held"
            " out"
        )
    if held_out is not None:
        yield from _shared(held_out, problems, "held-out")
    if held_out is not None and config.eval_path:
        yield from _unrendered(held_out, f"{where}data.eval_path {config.eval_path}")
    if len(problems) < batch:
        yield (
            f"warning: a batch takes {batch} problems, and there are {len(problems)} to train on,"
            " so that some are in it repeatedly"
        )
    if held_out is not None and 0 < len(held_out) < config.eval_prompts:
        yield (
            f"{len(held_out)} problems are held out: there are no more, though"
            f" {where}data.eval_prompts is {config.eval_prompts}"
        )


def _unrendered(problems: Problems, name: str) -> Iterator[str]:
    for part, count in problems.unrendered.items():
        yield f"warning: {name}: prompts do not hold {part}, in {count} problems"


def _shared(measured: Problems, train: Problems, what: str) -> Iterator[str]:
    if isinstance(train, ProblemFile) and isinstance(measured, ProblemFile):
        shared = measured.shared(train)
        if shared:
            yield (
                f"warning: {shared} of the {len(measured)} {what} problems are among those to train"
                " on, too"
            )


def pad_prompts(
    problems: Sequence[Problem], length: int, pad_id: int
) -> tuple[Int32[np.ndarray, "n length"], Int32[np.ndarray, " n"]]:
    """Return the prompts' ids padded on the right to `length`, and their lengths; raises ValueError
    for a longer prompt."""
    tokens = np.full((len(problems), length), pad_id, np.int32)
    lengths = np.array([len(problem.ids) for problem in problems], np.int32)
    if len(problems) and lengths.max() > length:
        raise ValueError(f"a prompt of {lengths.max()} tokens does not fit rows of {length}")
    for row, problem in enumerate(problems):
        tokens[row, : len(problem.ids)] = problem.ids
    return tokens, lengths


def _generated(
    config: DataConfig, tokenizer: Tokenizer, where: str, *, held_out: bool
) -> Generated:
    rows = arithmetic.count(config.task, config.digits, held_out=held_out)
    problems = Generated(
        tokenizer,
        config.task,
        config.digits,
        held_out,
        min(rows, config.eval_prompts) if held_out else rows,
    )
    longest = max(len(problems[position].ids) for position in range(min(len(problems), 64)))
    if longest > config.max_prompt_length:
        raise ConfigError(
            f"data.max_prompt_length is {config.max_prompt_length}, but prompts of"
            f" {where}data.digits {config.digits} take {longest} tokens; set"
            f" --data.max_prompt_length {longest} or more"
        )
    return problems
