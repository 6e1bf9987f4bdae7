"""Records of evaluations as JSON lines, and their comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.data.problem_source import normalize_text
from jaxspec.evaluation.estimates import PairedDifference, compare_shares
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import join_names
from jaxspec.metrics.files import append_records, read_records, truncate_records
from jaxspec.system.files import expand_user_path

FILE_STEM = "evaluations"
_REQUIRED_KEYS = {"set": str, "problem": int, "prompt": str, "correct": list}


class RecordFile:
    """File with one process's records of evaluations.

    Each process writes the records of its own problems. The file of process 0 is evaluations.jsonl.
    The names of the others have the process number.

    A line has these keys for one problem:

    - `step`: number of the batch that the evaluated policy sampled. 0 outside of runs.
    - `set`, `problem`: name of the set, and position in it.
    - `prompt`, `question`, `answer`: prompt, the problem in it, and the reference answer.
    - `correct`, `reward`: lists over responses. Null if a response failed or was not judged.
    - `outcome`, `tokens`, `rounds`: lists over responses. Rounds are those that generated it.
    - `stated`: list of the stated answers, if answers can be compared.

    Every method raises ConfigError if the file cannot be read or written.
    """

    def __init__(self, folder: Path, process: int) -> None:
        self.file = folder / f"{FILE_STEM}{f'-{process}' * (process > 0)}.jsonl"

    def append_records(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends one line for each problem."""
        append_records(self.file, ({"step": step, **line} for line in lines))

    def truncate_from(self, step: float | int) -> None:
        """Removes the lines of `step` and later.

        An incomplete last line is removed, too.
        """
        # A killed process may leave half a line, and a resumed run repeats the later steps.
        truncate_records(self.file, step)

    def load_records(self) -> list[dict[str, Any]]:
        """Reads the lines, oldest first."""
        return read_records(self.file)


def _load_valid_lines(file: Path) -> list[dict[str, Any]]:
    """Reads and checks the lines of a file."""
    # Only the keys that comparisons need are checked.
    lines = read_records(file)
    for number, line in enumerate(lines, start=1):
        invalid = [
            name for name, kind in _REQUIRED_KEYS.items() if not isinstance(line.get(name), kind)
        ]
        require(
            not invalid,
            f"{file}, line {number} has no {join_names(invalid)} of an evaluation; correct or"
            " remove that line",
        )
    return lines


def compare_evaluations(first: str, second: str) -> dict[str, PairedDifference]:
    """Compares two evaluations on the problems of each set.

    Args:
      first: folder of a run or of an evaluation, whose newest step is taken, or FOLDER:STEP.
      second: the same for the other evaluation.

    Returns:
      The difference for each set that both have, by name.

    Raises:
      ConfigError: there is no such evaluation, a line is damaged, or no problem is in both.
    """
    lines = [_load_evaluation(source) for source in (first, second)]
    # Earlier versions wrote no question. Problems are then matched by prompt.
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
    """Reads the lines of one evaluation."""
    # A folder's name may have a colon of its own, so only digits after the last one are a step.
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
    # Each process has written a file.
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
    """Computes the share of correct answers by set and problem.

    Args:
      lines: lines of an evaluation.
      key: key whose text identifies a problem.
    """
    shares: dict[str, dict[str, float]] = {}
    for line in lines:
        judged = [is_correct for is_correct in line["correct"] if is_correct is not None]
        if judged:
            # Texts identify problems, because positions change with the files of a set.
            problem = normalize_text(line[key])
            shares.setdefault(line["set"], {})[problem] = sum(map(bool, judged)) / len(judged)
    return shares
