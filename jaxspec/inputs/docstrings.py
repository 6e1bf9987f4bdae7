"""The texts below the fields of a dataclass, as its source has them."""

import ast
import functools
import inspect
import re
import textwrap
from typing import Any


@functools.cache
def field_docstrings(cls: Any) -> dict[str, str]:
    """Returns the text below each field of a class and of those that it extends."""
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef), "it is the source of a class"
        for node, next_node in zip(tree.body, tree.body[1:], strict=False):
            match node, next_node:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docstrings[name] = " ".join(text.split())
    return docstrings


def first_sentence(text: str) -> str:
    """Returns a text up to its first full stop before a new sentence."""
    return re.split(r"(?<=\.) (?=[A-Z`])", text, maxsplit=1)[0]
