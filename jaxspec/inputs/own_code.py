"""Import of users' functions, and their errors."""

import functools
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_ERROR_LENGTH = 300
"""Maximum characters of an error in a message."""
# Frames of these folders are not the user's code.
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).parent.parent)


@functools.cache
def import_function(function: str) -> Callable[..., Any]:
    """Imports the function that `package.module:name` or `file.py:name` names.

    Raises:
      ValueError, ImportError, AttributeError, TypeError: there is no such function.
      Exception: its file cannot be read, or its module raises the error.
    """
    module_name, mark, name = function.rpartition(":")
    if not mark or not module_name or not name:
        raise ValueError("write it as package.module:name or file.py:name")
    if module_name.endswith(".py"):
        path = Path(module_name).expanduser()
        # The prefix keeps a file such as `json.py` from replacing a module of the same name.
        private_name = f"jaxspec_own_{path.stem}"
        spec = importlib.util.spec_from_file_location(private_name, path)
        assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"  # noqa: PT018
        module = importlib.util.module_from_spec(spec)
        # Dataclasses and pickle look up modules by name. The file may import others of its folder.
        sys.modules[private_name] = module
        sys.path.insert(0, str(path.parent))
        spec.loader.exec_module(module)
    else:
        # Programs started with `python -m` already have this folder on the path. Scripts do not.
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(module_name)
    attribute = getattr(module, name)
    if not callable(attribute):
        raise TypeError(f"{name} is a {type(attribute).__name__}, which cannot be called")
    return attribute


def describe_error(error: BaseException) -> str:
    """Formats an error of user code as one line.

    It includes the line of the user's code that raised the error.
    """
    trace, location = error.__traceback__, ""
    # The last frame outside of libraries is the user's. Deeper frames do not help a user.
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<frozen", *_LIBRARIES)):
            location = f" ({Path(name).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' * bool(reason)}{reason}"[:MAX_ERROR_LENGTH] + location
