"""A user's own function, by the name of its module or file."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def imported(function: str) -> Callable[..., Any]:
    """The function that `package.module:name` or `file.py:name` names.

    Raises:
      ValueError, ImportError, AttributeError, TypeError: there is no such function; whatever its
        module raises.
    """
    where, mark, name = function.rpartition(":")
    if not mark or not where or not name:
        raise ValueError("write it as package.module:name or file.py:name")
    if where.endswith(".py"):
        path = Path(where).expanduser()
        own = f"jaxspec_own_{path.stem}"  # which replaces no module of that name
        spec = importlib.util.spec_from_file_location(own, path)
        assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"  # noqa: PT018
        module = importlib.util.module_from_spec(spec)
        sys.modules[own] = module
        sys.path.insert(0, str(path.parent))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(where)
    found = getattr(module, name)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, which cannot be called")
    return found
