"""Prompts with checkable answers, by number: generated exercises or JSON lines, their shuffled
stream, and padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grain
import numpy as np
from jaxtyping import Int32

from jaxspec.config.settings import DataConfig
from jaxspec.data import arithmetic
from jaxspec.data.json_lines import JsonLines, RowParser, scan
from jaxspec.data.problem_source import LeftOut, Problem, Problems
from jaxspec.data.tokenizer import Tokenizer
from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import is_whole_text, shown


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
        return Problem(prompt, tuple(self.tokenizer.encode(prompt)), problem.answer, index)


class PromptStream:
    """Problems without end, shuffled anew each epoch; `stream[i]` depends on the seed and the
    global position i alone."""

    def __init__(self, problems: Problems, seed: int) -> None:
        self._problems = grain.MapDataset.source(problems).seed(seed).shuffle().repeat()

    def __getitem__(self, position: int) -> Problem:
        problem = self._problems[position]
        assert problem is not None  # only a filtered MapDataset has holes
        return problem


def all_problems(config: DataConfig, tokenizer: Tokenizer) -> Problems:
    """Return every problem of the file `data.path`; none is held out. Raises `ConfigError` as
    `load_problems` does."""
    parser = RowParser(config, tokenizer, "data.path", config.path)
    return JsonLines(parser, *scan(parser))


def load_problems(config: DataConfig, tokenizer: Tokenizer) -> tuple[Problems, Problems]:
    """Return the training and the held-out problems; the latter are at most `data.eval_prompts`.

    Generated tasks hold out a fixed share of the operands. Of a file, the last rows are held out
    unless `data.eval_path` is set.
    Raises `ConfigError` where a file or column is missing, a line is damaged, or too few prompts
    fit `data.max_prompt_length`.
    """
    if not config.path:
        train, held = (_generated(config, tokenizer, held_out=side) for side in (False, True))
        return train, held
    same = f"data.prompt_column and data.answer_column are both {shown(config.prompt_column)}"
    require(
        config.prompt_column != config.answer_column,
        f"{same}, so that problems would state their answers; name two columns",
    )
    halved = (
        f"data.instruction is {shown(config.instruction)}, which is no text in UTF-8; write it in"
        " UTF-8"
    )
    require(is_whole_text(config.instruction), halved)
    parser, held_out = RowParser(config, tokenizer, "data.path", config.path), config.eval_prompts
    places, left_out = scan(parser)
    if config.eval_path:
        other = RowParser(config, tokenizer, "data.eval_path", config.eval_path)
        eval_places, eval_left_out = scan(other)
        held = JsonLines(other, eval_places[:held_out], eval_left_out)
        return JsonLines(parser, places, left_out), held
    if len(places) <= held_out:
        raise ConfigError(
            f"data.path {config.path}: {len(places)} usable problems, of which data.eval_prompts ="
            f" {held_out} would be held out; lower data.eval_prompts or set data.eval_path"
        )
    held = JsonLines(parser, places[-held_out:], LeftOut())
    return JsonLines(parser, places[:-held_out], left_out), held


def remarks(
    config: DataConfig, problems: Problems, held_out: Problems, batch: int = 1
) -> list[str]:
    """Return what a user should know of the problems: what was left out, held-out ones that are
    trained on, and numbers below those asked.

    A batch of training takes `batch` problems.
    """
    lines = []
    if str(problems.left_out):
        lines.append(f"data.path {config.path}: {problems.left_out}; {len(problems)} to train on")
    if str(held_out.left_out):
        lines.append(
            f"data.eval_path {config.eval_path}: {held_out.left_out}; {len(held_out)} held out"
        )
    if (
        isinstance(problems, JsonLines)
        and isinstance(held_out, JsonLines)
        and (shared := held_out.shared(problems))
    ):
        lines.append(
            f"warning: {shared} of the {len(held_out)} held-out problems are among those to train"
            " on, too"
        )
    if len(problems) < batch:
        lines.append(
            f"warning: a batch takes {batch} problems, and there are {len(problems)} to train on,"
            " so that some are in it repeatedly"
        )
    if len(held_out) < config.eval_prompts:
        lines.append(
            f"{len(held_out)} problems are held out: there are no more, though data.eval_prompts is"
            f" {config.eval_prompts}"
        )
    return lines


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


def _generated(config: DataConfig, tokenizer: Tokenizer, *, held_out: bool) -> Generated:
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
            f"data.max_prompt_length is {config.max_prompt_length}, but prompts of data.digits"
            f" {config.digits} take {longest} tokens; set --data.max_prompt_length {longest} or"
            " more"
        )
    return problems
