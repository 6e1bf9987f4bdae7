"""Sets of problems, their stream and padded prompts.

A set is generated, or read from data files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Int, Int32

from jaxspec.config.settings import DataConfig, ResolvedConfig
from jaxspec.data import arithmetic
from jaxspec.data.json_lines import RowParser
from jaxspec.data.problem_file import ProblemFile, load_problem_file
from jaxspec.data.problem_source import Problem, Problems, SkippedLines, normalize_text
from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import format_value, is_valid_utf8
from jaxspec.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class GeneratedProblems(Problems):
    """Problems of one side of a generated task."""

    tokenizer: Tokenizer
    task: arithmetic.Task
    digits: int
    held_out: bool
    """Whether these are the held-out problems."""
    rows: int
    """Number of problems, from the first on."""

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self.rows:
            raise IndexError(f"problem {index} of {self.rows}")
        problem = arithmetic.make_problem(self.task, self.digits, index, held_out=self.held_out)
        prompt = self.tokenizer.render_prompt(problem.question)
        ids = tuple(self.tokenizer.encode(prompt))
        question = normalize_text(problem.question)
        return Problem(prompt, ids, problem.answer, index, question=question)


class PromptStream:
    """Endless stream of shuffled problems.

    It mixes one or more sets. Each is shuffled anew every epoch, and sampled in proportion to its
    weight. `stream[i]` depends only on the seed and on the global position i.
    """

    def __init__(
        self, sets: Sequence[Problems], seed: int, weights: Sequence[float] = (1.0,)
    ) -> None:
        self._sets = sets
        # Numbers of set s are congruent to s modulo the number of sets, so no two sets share one.
        numbers = [
            range(set_number, len(problems) * len(sets), len(sets))
            for set_number, problems in enumerate(sets)
        ]
        streams = [
            grain.MapDataset.source(number_range).seed(seed).shuffle().repeat()
            for number_range in numbers
        ]
        is_mixed = len(streams) > 1
        self._numbers = grain.MapDataset.mix(streams, weights) if is_mixed else streams[0]

    def problem_number(self, position: int) -> int:
        """Returns the number of the problem at a position.

        It is unique among the problems of all sets.
        """
        number = self._numbers[position]
        assert number is not None  # only a filtered MapDataset has holes
        return number

    def __getitem__(self, position: int) -> Problem:
        index, set_number = divmod(self.problem_number(position), len(self._sets))
        return dataclasses.replace(self._sets[set_number][index], set_number=set_number)


class EvaluationSet(NamedTuple):
    """Problems for evaluation."""

    problems: Problems
    set_number: int
    """Number of the set whose rewards their responses get."""

    def get_problem(self, index: int) -> Problem:
        """Returns a problem with its set number."""
        return dataclasses.replace(self.problems[index], set_number=self.set_number)


class ProblemSets(NamedTuple):
    """All problems of a run."""

    training: tuple[Problems, ...]
    """Training problems of each of the config's `training_sets`."""
    weights: tuple[float, ...]
    """Sampling weight of each training set."""
    evaluation: Mapping[str, EvaluationSet]
    """Problems for evaluation, by name of their set."""

    def make_stream(self, seed: int) -> PromptStream:
        """Makes the endless stream of training problems."""
        return PromptStream(self.training, seed, self.weights)

    def enumerate_sets(self) -> Iterator[tuple[int, Problems]]:
        """Yields all sets of problems with their numbers."""
        yield from enumerate(self.training)
        yield from (
            (evaluation_set.set_number, evaluation_set.problems)
            for evaluation_set in self.evaluation.values()
        )


def load_sets(
    config: ResolvedConfig, tokenizer: Tokenizer, *, require_answers: bool = True
) -> ProblemSets:
    """Loads all problems of a run.

    Problems for evaluation are held out of the training sets, or are those of `eval.sets`.

    Args:
      config: config of the run.
      tokenizer: tokenizer of the prompts.
      require_answers: as in `load_problems`.

    Raises:
      ConfigError: as `load_problems`.
    """
    named_sets, training_count = [*config.sets_by_prefix.items()], len(config.training_sets)
    loaded = [
        load_problems(
            set_config.data,
            tokenizer,
            prefix,
            require_answers=require_answers,
            is_judged="answer" in set_config.reward.all_parts,
        )
        for prefix, set_config in named_sets[:training_count]
    ]
    evaluated = [held_out for _, held_out in loaded]
    evaluated += [
        load_all_problems(
            set_config.data, tokenizer, prefix, is_judged="answer" in set_config.reward.all_parts
        )
        for prefix, set_config in named_sets[training_count:]
    ]
    # Problems are held out even if they are not evaluated, so that `eval.sets` does not change the
    # training problems.
    first_evaluated = training_count if config.eval.sets else 0
    return ProblemSets(
        training=tuple(train for train, _ in loaded),
        weights=tuple(set_config.weight for _, set_config in named_sets[:training_count]),
        evaluation={
            named_sets[number][1].name: EvaluationSet(evaluated[number], number)
            for number in range(first_evaluated, len(named_sets))
        },
    )


def load_all_problems(
    config: DataConfig, tokenizer: Tokenizer, prefix: str = "", *, is_judged: bool = True
) -> Problems:
    """Loads all problems of a file.

    None is held out. Without `data.path`, loads at most `data.eval_prompts` problems of the
    held-out side of a generated task.

    Args:
      config: settings of the problems.
      tokenizer: tokenizer of the prompts.
      prefix: as in `load_problems`.
      is_judged: as in `load_problems`.

    Raises:
      ConfigError: as `load_problems`.
    """
    if not config.path:
        return _generate_problems(config, tokenizer, prefix, held_out=True)
    parser = RowParser(config, tokenizer, f"{prefix}data.path", config.path, is_judged)
    return load_problem_file(parser)


def load_problems(
    config: DataConfig,
    tokenizer: Tokenizer,
    prefix: str = "",
    *,
    require_answers: bool = True,
    is_judged: bool = True,
) -> tuple[Problems, Problems]:
    """Loads the training and held-out problems.

    At most `data.eval_prompts` are held out. Generated tasks hold out a fixed share of their
    problems. Files hold out their last rows, unless `data.eval_path` is set.

    Args:
      config: settings of the problems.
      tokenizer: tokenizer of the prompts.
      prefix: text before the names of settings in messages.
      require_answers: whether rows must have answers. A draft can train without: rows without an
        answer are then training problems. The last rows with one are still held out, or none if
        these are too few.
      is_judged: whether rewards compare responses with answers. If not, rows with and without an
        answer are treated alike.

    Raises:
      ConfigError: a setting, file, column or line cannot be used, no prompt fits
        `data.max_prompt_length`, or there are too few problems to hold some out.
    """
    if not config.path:
        train, held_out = (
            _generate_problems(config, tokenizer, prefix, held_out=side) for side in (False, True)
        )
        return train, held_out
    same_column = (
        f"{prefix}data.prompt_column and {prefix}data.answer_column are both"
        f" {format_value(config.prompt_column)}"
    )
    require(
        config.prompt_column != config.answer_column,
        f"{same_column}, so that problems would state their answers; name two columns",
    )
    invalid_text = (
        f"{prefix}data.instruction is {format_value(config.instruction)}, which is not"
        " valid UTF-8; write it in UTF-8"
    )
    require(is_valid_utf8(config.instruction), invalid_text)
    # Rewards without the part `answer` do not need answers.
    needs_answers = require_answers and is_judged
    parser = RowParser(config, tokenizer, f"{prefix}data.path", config.path, needs_answers)
    problems = load_problem_file(parser)
    if config.eval_path:
        eval_parser = RowParser(
            config, tokenizer, f"{prefix}data.eval_path", config.eval_path, needs_answers
        )
        held_out = load_problem_file(eval_parser).select_problems(slice(config.eval_prompts))
        return problems, held_out
    # Only rows with answers are held out, since evaluations compare with them.
    answered = np.flatnonzero(problems.has_answer | (not is_judged))
    return _hold_out_last_problems(problems, answered, config, prefix)


def _hold_out_last_problems(
    problems: ProblemFile, answered: Int[np.ndarray, " n"], config: DataConfig, prefix: str
) -> tuple[ProblemFile, ProblemFile]:
    """Holds out the last of the `answered` rows, or none if these are too few.

    Raises ConfigError if all rows are answered, and too few to hold some out.
    """
    held_out_count = config.eval_prompts
    if len(problems) == len(answered) <= held_out_count:
        maximum = len(problems) - 1  # at least one is trained on
        remedy = (
            f"set --{prefix}data.eval_prompts {maximum} or less, or" if maximum else "give more, or"
        )
        raise ConfigError(
            f"{prefix}data.path {config.path}: {len(problems)} usable problems, of which"
            f" {prefix}data.eval_prompts = {held_out_count} would be held out; {remedy} hold out"
            f" those of another file with --{prefix}data.eval_path"
        )
    held_out_rows = answered[-held_out_count:] if len(answered) > held_out_count else answered[:0]
    # Both sides are from one file, whose skipped lines are reported with the training side only.
    held_out = problems.select_problems(held_out_rows, skipped_lines=SkippedLines())
    return problems.select_problems(np.delete(np.arange(len(problems)), held_out_rows)), held_out


def describe_problems(config: ResolvedConfig, sets: ProblemSets) -> list[str]:
    """Returns report lines about the problems of a run.

    They tell how many lines were skipped, which parts the prompts leave out, how many problems for
    evaluation are also trained on, and which sets have too few problems. If there are several sets,
    they also tell the size of each.
    """
    lines, batch, single = [], config.batch.prompts, len(sets.training) == 1
    for number, (set_config, problems) in enumerate(
        zip(config.training_sets, sets.training, strict=True)
    ):
        prefix = "" if single else f"mixture.{number}."
        evaluation_set = sets.evaluation.get(set_config.name) if not config.eval.sets else None
        held_out = evaluation_set.problems if evaluation_set else None
        # A batch of a mixture has no fixed number of problems of each set, so no set is reported as
        # too small for a batch.
        lines += _describe_set(set_config.data, problems, held_out, batch if single else 1, prefix)
        if not single:
            share = set_config.weight / sum(sets.weights)
            lines.append(f"{set_config.name}: {len(problems)} problems, {share:.0%} of those asked")
    for set_config in config.eval.sets:
        evaluated = sets.evaluation[set_config.name].problems
        skipped_text = f"; {evaluated.skipped_lines}" if str(evaluated.skipped_lines) else ""
        lines.append(f"{set_config.name}: {len(evaluated)} problems to measure by{skipped_text}")
        lines += _unrendered_warnings(evaluated, set_config.name)
        for train in sets.training:
            lines += _shared_warnings(evaluated, train, set_config.name)
    return lines


def _describe_set(
    config: DataConfig, problems: Problems, held_out: Problems | None, batch_size: int, prefix: str
) -> Iterator[str]:
    """Yields report lines about a training set. A batch takes `batch_size` of its problems."""
    if str(problems.skipped_lines):
        yield (
            f"{prefix}data.path {config.path}: {problems.skipped_lines}; {len(problems)} to train"
            " on"
        )
    unanswered = (
        len(problems) - sum(problems.has_answer) if isinstance(problems, ProblemFile) else 0
    )
    if unanswered:
        yield (
            f"{prefix}data.path {config.path}: {unanswered} of {len(problems)} prompts have"
            " no reference answer, which is not needed here"
        )
    yield from _unrendered_warnings(problems, f"{prefix}data.path {config.path}")
    if held_out is not None and str(held_out.skipped_lines):
        yield (
            f"{prefix}data.eval_path {config.eval_path}: {held_out.skipped_lines};"
            f" {len(held_out)} held out"
        )
    if held_out is not None:
        yield from _shared_warnings(held_out, problems, "held-out")
    if held_out is not None and config.eval_path:
        yield from _unrendered_warnings(held_out, f"{prefix}data.eval_path {config.eval_path}")
    if len(problems) < batch_size:
        yield (
            f"warning: a batch takes {batch_size} problems, and there are {len(problems)} to train"
            " on, so that some are in it repeatedly"
        )
    if held_out is not None and 0 < len(held_out) < config.eval_prompts:
        yield (
            f"{len(held_out)} problems are held out: there are no more, though"
            f" {prefix}data.eval_prompts is {config.eval_prompts}"
        )


def _unrendered_warnings(problems: Problems, source: str) -> Iterator[str]:
    for description, count in problems.unrendered.items():
        yield f"warning: {source}: prompts do not hold {description}, in {count} problems"


def _shared_warnings(evaluated: Problems, train: Problems, kind: str) -> Iterator[str]:
    if isinstance(train, ProblemFile) and isinstance(evaluated, ProblemFile):
        shared_count = evaluated.count_shared_problems(train)
        if shared_count:
            yield (
                f"warning: {shared_count} of the {len(evaluated)} {kind} problems are among those"
                " to train on, too"
            )


def pad_prompts(
    problems: Sequence[Problem], length: int, pad_id: int
) -> tuple[Int32[np.ndarray, "n length"], Int32[np.ndarray, " n"]]:
    """Pads prompts on the right to `length`.

    Returns their ids and lengths.

    Raises:
      ValueError: a prompt is longer.
    """
    tokens = np.full((len(problems), length), pad_id, np.int32)
    lengths = np.array([len(problem.ids) for problem in problems], np.int32)
    if len(problems) and lengths.max() > length:
        raise ValueError(f"a prompt of {lengths.max()} tokens does not fit rows of {length}")
    for row, problem in enumerate(problems):
        tokens[row, : len(problem.ids)] = problem.ids
    return tokens, lengths


def _generate_problems(
    config: DataConfig, tokenizer: Tokenizer, prefix: str, *, held_out: bool
) -> GeneratedProblems:
    rows = arithmetic.count_problems(config.task, config.digits, held_out=held_out)
    problems = GeneratedProblems(
        tokenizer,
        config.task,
        config.digits,
        held_out,
        min(rows, config.eval_prompts) if held_out else rows,
    )
    # Questions have equally many characters, but a tokenizer may merge digits. A few prompts show
    # about how many tokens they take.
    longest = max(len(problems[position].ids) for position in range(min(len(problems), 64)))
    if longest > config.max_prompt_length:
        raise ConfigError(
            f"data.max_prompt_length is {config.max_prompt_length}, but prompts of"
            f" {prefix}data.digits {config.digits} take {longest} tokens; set"
            f" --data.max_prompt_length {longest} or more"
        )
    return problems
