"""Docstrings of dataclass fields, read from the source."""

import ast
import functools
import inspect
import re
import textwrap
from typing import Any


@functools.cache
def field_docstrings(cls: Any) -> dict[str, str]:
    """Returns the docstrings of a class's fields, with those of its bases."""
    docstrings: dict[str, str] = {}
    # Bases come first, so that a subclass can replace their texts. The last base is `object`.
    for base in reversed(cls.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef), "the source of a class has one class"
        for node, next_node in zip(tree.body, tree.body[1:], strict=False):
            # Python drops a string below a field, so only the source has it.
            match node, next_node:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docstrings[name] = " ".join(text.split())
    return docstrings


def first_sentence(text: str) -> str:
    """Returns the first sentence of a text."""
    # The lookahead keeps abbreviations such as `i.e. some` from ending a sentence.
    return re.split(r"(?<=\.) (?=[A-Z`])", text, maxsplit=1)[0]
