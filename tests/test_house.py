"""What keeps the tree readable: short files, few of them in a folder, names that say what they are
about, and reasons that stand where they are needed."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = ("jaxspec", "tests", "configs")
FILES = sorted(file for tree in TREES for file in (ROOT / tree).rglob("*.py"))
NAMES = {"utils", "common", "helpers", "misc", "lib", "core"}
"""Of files and folders that would hold whatever fits nowhere else."""
NOTES = ("drafters", "engine", "learner", "jax-facts", "house", "gpu", "roadmap", "frontier")
"""Papers of the authors that are not in the repository."""


def of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def long_lines(text: str) -> Iterator[int]:
    """Numbers of lines over 100 characters; as for ruff, marks for tools do not count, and what
    cannot be broken may be longer."""
    for number, line in enumerate(text.splitlines(), start=1):
        shown = re.sub(r"\s+# (noqa|pyright|type):.*", "", line)
        if len(shown) > 100 and len(shown.split()) > 1:
            yield number


def test_there_is_something_to_count() -> None:
    assert len(FILES) > 200


def test_no_file_is_over_400_lines() -> None:
    lines = {of(file): len(file.read_text().splitlines()) for file in FILES}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_no_line_is_over_100_characters() -> None:
    found = {of(file): list(long_lines(file.read_text())) for file in FILES}
    assert {name: numbers for name, numbers in found.items() if numbers} == {}


@pytest.mark.parametrize(
    ("line", "is_long"),
    [
        ("x = 1", False),
        ("x = " + "1 + " * 23 + "1", False),
        ("x = " + "1 + " * 23 + "10", False),
        ("x = " + "1 + " * 23 + "1000", False),
        ("x = " + "1 + " * 23 + "10000", True),
        ("x = 1  # noqa: F401" + " and why" * 20, False),
        ("x = 1  # a comment" + " and more" * 20, True),
        ('    "' + "a" * 200 + '",', False),
    ],
)
def test_long_lines_are_found(line: str, is_long: bool) -> None:
    assert list(long_lines(f"\n{line}\n")) == [2] * is_long


def test_the_root_has_at_most_14_modules_beside_the_programs() -> None:
    programs = {"train", "train_sft", "train_draft", "evaluate", "sample", "export", "check"}
    modules = {file.stem for file in (ROOT / "jaxspec").glob("*.py")} - programs
    assert len(modules) <= 14


def test_a_wing_has_at_most_12_modules() -> None:
    wings = {file.parent for file in FILES if of(file).startswith("jaxspec/")} - {ROOT / "jaxspec"}
    assert len(wings) >= 13
    modules = {of(wing): len(list(wing.glob("*.py"))) - 1 for wing in wings}
    assert {name: count for name, count in modules.items() if count > 12} == {}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of the package, with its place."""
    for file in FILES:
        if of(file).startswith("jaxspec/"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef):
                    yield f"{of(file).removeprefix('jaxspec/')} {node.name}", node


LONG = {
    "kernels/paged_attention.py _run_kernel",
    "kernels/paged_attention.py body",
    "drafts/recurrent.py recurrent_draft",
    "drafts/lookup/drafting.py prefer_lookup",
    "config/unused.py list_draft_rules",
    "rl/objective.py sum_micro_batch",
    "rl/train_batch.py plan_packing",
    "rl/accumulate.py _run_on_shard",
}
"""Functions of over 60 lines: kernels, functions that return several, tables, and the learner's
path in order of time."""


def test_only_those_named_have_over_60_lines() -> None:
    ends = {place: (node.end_lineno or 0) - node.lineno + 1 for place, node in functions()}
    assert {place for place, lines in ends.items() if lines > 60} == LONG
    assert len(LONG) <= 8


def test_few_functions_take_the_whole_job() -> None:
    takers = [
        place
        for place, node in functions()
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None and ast.unparse(argument.annotation) == "Job"
    ]
    assert 0 < len(takers) <= 15, takers


def test_no_name_says_nothing() -> None:
    parts = {part for file in FILES for part in Path(of(file)).with_suffix("").parts}
    assert parts & NAMES == set()


def test_an_init_is_empty_or_one_docstring() -> None:
    for file in FILES:
        if file.name == "__init__.py":
            body = ast.parse(file.read_text()).body
            assert len(body) <= 1, of(file)
            assert all(isinstance(node, ast.Expr) for node in body), of(file)
            assert ast.get_docstring(ast.parse(file.read_text())) or not body, of(file)


def test_evidence_travels_with_the_code() -> None:
    """A comment gives the reason, or the paper: never a note that its reader does not have."""
    note = re.compile(rf"\b({'|'.join(NOTES)})[\w-]*\.md\b|\bjax-facts\b")
    texts = [
        *(file for file in FILES if file != Path(__file__)),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "pyproject.toml")),
        *(ROOT / "docs").rglob("*.md"),
        *(file for folder in ("launch", ".ci") for file in (ROOT / folder).iterdir()),
    ]
    found = {of(file): note.findall(file.read_text()) for file in texts if file.is_file()}
    assert {name: notes for name, notes in found.items() if notes} == {}


def path_to_read_first(page: str) -> list[str]:
    """Files that a page lists under that title, in their order."""
    text = (ROOT / page).read_text().split("path to read first", 1)[1]
    text = text.split("Imports only" if page == "README.md" else "Weights change sides", 1)[0]
    return [name.removeprefix("jaxspec/") for name in re.findall(r"`([\w/]+\.py)`", text)]


def test_the_path_of_a_step_is_one_list_that_is_read_in_an_hour() -> None:
    path = path_to_read_first("README.md")
    listed = [name for name in path_to_read_first("docs/architecture.md") if name in path]
    assert listed == path
    assert {"run/loop.py", "rl/accumulate.py", "rl/losses.py", "rollout/verify.py"} <= set(path)
    assert len(path) <= 12
    files = [(ROOT / "jaxspec" / name).read_text() for name in path]
    assert sum(len(text.splitlines()) for text in files) <= 3000


PRIVATE = frozenset(
    [
        "Engine",
        "Known",
        "Pace",
        "pace",
        "Sight",
        "sight",
        "stretch",
        "stretches",
        "Arrangement",
        "arrangement",
        "apart",
        "together",
        "joined_layers",
        "spare",
        "Called",
        "Session",
        "session",
        "probe",
        "GrpoConfig",
        "LearnerConfig",
        "Position",
        "consistency",
    ]
)
"""Identifiers that meant something to the authors alone; the field's own words took their place."""


def test_identifiers_are_the_fields_words() -> None:
    found = {
        of(file): names
        for file in FILES
        if of(file).startswith("jaxspec/") and (names := identifiers(file.read_text()) & PRIVATE)
    }
    assert found == {}
    assert identifiers("sight = Sight(stretch.apart)  # pace") & PRIVATE >= {"Sight", "apart"}


def identifiers(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}
