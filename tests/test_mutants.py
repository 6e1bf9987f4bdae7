"""Bugs that speculative engines have shipped, and bugs of learning, put into jaxspec one at a time:
each must make a test fail.

The former are the rows of the table in docs/losslessness.md. A mutant replaces text that
must be there exactly once, so that none of them can rot into a change that changes nothing.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import fork_server
from tests.fork_server import ForkServer
from tests.mutants import learning, speculation
from tests.mutants.mutant import Mutant

MUTANTS = [*speculation.MUTANTS, *learning.MUTANTS]
NOT_OF_THE_TREE = (
    *("flax.nnx", "grain", "optax", "orbax.checkpoint"),
    *("pytest", "scipy.stats", "tensorboardX", "tyro"),
)
ONE_OF_EACH_FILE = {mutant.killer.partition("::")[0]: mutant for mutant in reversed(MUTANTS)}
"""The first bug that the tests of each file must see."""


class Done(NamedTuple):
    code: int
    output: str


Run = Callable[..., Done]


def mutated(mutant: Mutant, text: str) -> str:
    """The file with the bug in it, however its lines are broken."""
    tokens = re.findall(r"\w+|[^\w\s]", mutant.old)
    before = dict.fromkeys(")]}", r",?\s*")
    place = r"\s*".join(before.get(token, "") + re.escape(token) for token in tokens)
    # The first line keeps its own indentation, which is before the place that is found.
    changed, count = re.subn(place, lambda _: mutant.new.lstrip(), text)
    assert count == 1, f"{mutant.file} has {count} places like {mutant.old!r}"
    return changed


@pytest.fixture(scope="module")
def copied(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, to be changed."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("jaxspec", "tests", "configs"):
        shutil.copytree(
            repository / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(repository / "pyproject.toml", tree)
    return tree


@pytest.fixture(scope="module")
def run(copied: Path) -> Iterator[Run]:
    """Runs tests of the copied tree, for 15 minutes at most; what they import from elsewhere is
    imported once."""
    environment = os.environ | {"PYTHONPATH": str(copied)}
    # Modules that no bug is put into are translated once: shape checks make that slow.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    server = ForkServer(copied, NOT_OF_THE_TREE, environment)

    def call(*tests: str, options: tuple[str, ...] = ()) -> Done:
        words = [sys.executable, "-m", "pytest", "-x", "-q", *options]
        done = fork_server.run(
            [*words, *(f"tests/{test}" for test in tests)],
            server=server,
            cwd=copied,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        return Done(done.returncode, done.stdout)

    yield call
    server.close()


def test_every_bug_has_one_place(repository: Path) -> None:
    """And is a program with it: one that cannot be read would fail every test."""
    for mutant in MUTANTS:
        text = mutated(mutant, (repository / "jaxspec" / mutant.file).read_text())
        compile(text, mutant.file, "exec")


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant,
            id=f"{mutant.row}: {mutant.bug}",
            marks=pytest.mark.slow if mutant in ONE_OF_EACH_FILE.values() else pytest.mark.sweep,
        )
        for mutant in MUTANTS
    ],
)
def test_the_suite_fails_on_every_mutant(mutant: Mutant, copied: Path, run: Run) -> None:
    file = copied / "jaxspec" / mutant.file
    text = file.read_text()
    file.write_text(mutated(mutant, text))
    try:
        done = run(mutant.killer)
    finally:
        file.write_text(text)
    assert done.code == 1, done.output[-2000:]
    # By what it checks, not because the bug broke the program.
    failure = r"^E +(assert |AssertionError)"
    assert re.search(failure, done.output, re.MULTILINE), done.output[-2000:]


@pytest.mark.slow
def test_without_a_bug_such_tests_pass(run: Run) -> None:
    """In the copied tree, those that are not slow; in this one all of them run anyway."""
    one_of_each = {mutant.killer.partition("[")[0]: mutant.killer for mutant in MUTANTS}
    done = run(*sorted(one_of_each.values()), options=("-m", "not slow and not sweep"))
    assert done.code == 0, done.output[-2000:]
    assert re.search(r"^\d+ passed, \d+ deselected\b", done.output, re.MULTILINE), done.output


def test_every_mutant_is_a_change(repository: Path) -> None:
    for mutant in MUTANTS:
        text = (repository / "jaxspec" / mutant.file).read_text()
        assert mutated(mutant, text) != text


def test_the_documents_list_every_mutant_and_nothing_else(repository: Path) -> None:
    """Bug and killing test stand side by side in the section on losslessness."""
    table = re.findall(
        r"^\| (.+) \| `(.+::.+)` \|$",
        (repository / "docs/losslessness.md").read_text(),
        re.MULTILINE,
    )
    assert len(table) == len(speculation.MUTANTS)
    assert set(table) == {
        (mutant.bug, re.sub(r"\[.*", "", mutant.killer)) for mutant in speculation.MUTANTS
    }
