"""What became of each problem of an evaluation, as JSON lines, and two such files compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.data.problem_source import normal_form
from jaxspec.evaluation.estimates import Difference, difference
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import listed
from jaxspec.system.files import expanded
from jaxspec.system.metrics import append_lines, cut_lines, read_lines

NAME = "evaluations"
_KEYS = {"set": str, "problem": int, "prompt": str, "correct": list}


class Records:
    """The lines of a run's evaluations: each process writes those of its own problems, process 0 to
    evaluations.jsonl, the others to files with their number.

    A line is of one problem: `step` (the batch that the policy sampled), `set`, `problem` (its
    place in the set), `prompt`, `question` (the problem in it), `answer` (the reference), and of
    each response to it, in lists, whether it is `correct` and its `reward` (null: it failed, or
    nothing is known of it), its `outcome`, its `tokens` and the `rounds` that they took, and where
    answers can be compared what it `stated`.

    Every method raises ConfigError if the file cannot be read or written.
    """

    def __init__(self, folder: Path, process: int) -> None:
        self.file = folder / f"{NAME}{f'-{process}' * (process > 0)}.jsonl"

    def write(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends one line a problem."""
        append_lines(self.file, ({"step": step, **line} for line in lines))

    def cut_back(self, step: float | int) -> None:
        """Drops the lines of `step` and later, and one that a kill has torn."""
        cut_lines(self.file, step)

    def read(self) -> list[dict[str, Any]]:
        """Its lines, oldest first."""
        return read_lines(self.file)


def _checked(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, each with what is compared."""
    lines = read_lines(file)
    for number, line in enumerate(lines, start=1):
        wrong = [name for name, kind in _KEYS.items() if not isinstance(line.get(name), kind)]
        require(
            not wrong,
            f"{file}, line {number} has no {listed(wrong)} of an evaluation; mend or remove that"
            " line",
        )
    return lines


def compare(first: str, second: str) -> dict[str, Difference]:
    """Compares two evaluations of the same problems, by set.

    Each is the folder of a run or of an evaluation, of which the newest counts, or FOLDER:STEP.

    Raises:
      ConfigError: there is no such evaluation; a line is damaged; they have no problem in common.
    """
    lines = [_lines_of(named) for named in (first, second)]
    # evaluations of earlier versions know their problems by the prompts alone
    key = "question" if all(line.get("question") for each in lines for line in each) else "prompt"
    shares = [_shares(each, key) for each in lines]
    found = {}
    for name in shares[0]:
        if name in shares[1]:
            found[name] = difference(shares[0][name], shares[1][name])
    told = [
        f"{where} has {listed(names)}" for where, names in zip((first, second), shares, strict=True)
    ]
    require(
        any(each.estimate.problems for each in found.values()),
        f"{' and '.join(told)}: no problem is in the same set of both; evaluate both on the same"
        " sets",
    )
    return found


def _lines_of(named: str) -> list[dict[str, Any]]:
    """The lines of an evaluation."""
    path, _, number = named.rpartition(":")
    if not path or not number.isdecimal():
        path, number = named, ""
    folder = expanded(path, "--compare")
    files = sorted(folder.glob(f"{NAME}*.jsonl"))
    require(
        bool(files),
        f"--compare {named}: {folder} has no {NAME}.jsonl; give the folder of a run that has been"
        " evaluated, or of jaxspec.evaluate, or FOLDER:STEP",
    )
    lines = [line for file in files for line in _checked(file)]
    steps = sorted({line["step"] for line in lines})
    require(bool(steps), f"--compare {named}: {files[0]} is empty; evaluate again")
    step = int(number) if number else steps[-1]
    require(
        step in steps,
        f"--compare {named}: no evaluation at step {step}; there are {listed(map(str, steps))}",
    )
    return [line for line in lines if line["step"] == step]


def _shares(lines: Iterable[Mapping[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """Share of correct answers by set and problem, which is known by its `key`."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        known = [right for right in line["correct"] if right is not None]
        if known:
            problem = normal_form(line[key])
            found.setdefault(line["set"], {})[problem] = sum(map(bool, known)) / len(known)
    return found
