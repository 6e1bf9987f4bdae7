"""A bug that a test must notice."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """Text that must be in a file exactly once, and the text that takes its place."""

    row: str
    """Number of its class of bugs, which several mutants may share; `-`: it is in none."""
    bug: str
    file: str
    old: str
    new: str
    killer: str
    """The test that fails, under tests/."""
