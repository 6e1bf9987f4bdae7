"""What became of each problem of an evaluation, as JSON lines, and two such files compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.data.problem_source import normalize_text
from jaxspec.evaluation.estimates import PairedDifference, compare_shares
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import join_names
from jaxspec.system.files import expand_user_path
from jaxspec.system.metrics import append_records, read_records, truncate_records

FILE_STEM = "evaluations"
_REQUIRED_KEYS = {"set": str, "problem": int, "prompt": str, "correct": list}


class RecordFile:
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
        self.file = folder / f"{FILE_STEM}{f'-{process}' * (process > 0)}.jsonl"

    def append_records(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends one line a problem."""
        append_records(self.file, ({"step": step, **line} for line in lines))

    def truncate_from(self, step: float | int) -> None:
        """Drops the lines of `step` and later, and one that a kill has torn."""
        truncate_records(self.file, step)

    def load_records(self) -> list[dict[str, Any]]:
        """Its lines, oldest first."""
        return read_records(self.file)


def _load_valid_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, each with what is compared."""
    lines = read_records(file)
    for number, line in enumerate(lines, start=1):
        invalid = [
            name for name, kind in _REQUIRED_KEYS.items() if not isinstance(line.get(name), kind)
        ]
        require(
            not invalid,
            f"{file}, line {number} has no {join_names(invalid)} of an evaluation; mend or remove"
            " that line",
        )
    return lines


def compare_evaluations(first: str, second: str) -> dict[str, PairedDifference]:
    """Compares two evaluations of the same problems, by set.

    Each is the folder of a run or of an evaluation, of which the newest counts, or FOLDER:STEP.

    Raises:
      ConfigError: there is no such evaluation; a line is damaged; they have no problem in common.
    """
    lines = [_load_evaluation(source) for source in (first, second)]
    # evaluations of earlier versions know their problems by the prompts alone
    key = (
        "question"
        if all(line.get("question") for evaluation in lines for line in evaluation)
        else "prompt"
    )
    shares = [_correct_shares(evaluation, key) for evaluation in lines]
    differences = {}
    for name in shares[0]:
        if name in shares[1]:
            differences[name] = compare_shares(shares[0][name], shares[1][name])
    descriptions = [
        f"{source} has {join_names(names)}"
        for source, names in zip((first, second), shares, strict=True)
    ]
    require(
        any(difference.estimate.problems for difference in differences.values()),
        f"{' and '.join(descriptions)}: no problem is in the same set of both; evaluate both on"
        " the same sets",
    )
    return differences


def _load_evaluation(source: str) -> list[dict[str, Any]]:
    """The lines of an evaluation."""
    path, _, number = source.rpartition(":")
    if not path or not number.isdecimal():
        path, number = source, ""
    folder = expand_user_path(path, "--compare")
    files = sorted(folder.glob(f"{FILE_STEM}*.jsonl"))
    require(
        bool(files),
        f"--compare {source}: {folder} has no {FILE_STEM}.jsonl; give the folder of a run that has"
        " been evaluated, or of jaxspec.evaluate, or FOLDER:STEP",
    )
    lines = [line for file in files for line in _load_valid_lines(file)]
    steps = sorted({line["step"] for line in lines})
    require(bool(steps), f"--compare {source}: {files[0]} is empty; evaluate again")
    step = int(number) if number else steps[-1]
    require(
        step in steps,
        f"--compare {source}: no evaluation at step {step}; there are"
        f" {join_names(map(str, steps))}",
    )
    return [line for line in lines if line["step"] == step]


def _correct_shares(lines: Iterable[Mapping[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """Share of correct answers by set and problem, which is known by its `key`."""
    shares: dict[str, dict[str, float]] = {}
    for line in lines:
        judged = [is_correct for is_correct in line["correct"] if is_correct is not None]
        if judged:
            problem = normalize_text(line[key])
            shares.setdefault(line["set"], {})[problem] = sum(map(bool, judged)) / len(judged)
    return shares
