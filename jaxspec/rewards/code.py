"""Runs a model's program against tests.

The tests run in the worker, and the program runs in a separate process. Only plain values and
numbers of objects cross between them. So the program cannot pass by its exit status, or by an
object whose `==` is always true.

Linux namespaces or bubblewrap confine the process. Where neither works, only resource limits do,
and these contain accidents, not attacks.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.rewards import candidate, namespaces
from jaxspec.rewards.descendants import (
    end_descendants,
    list_children,
    list_descendants,
    measure_memory,
)

_CANDIDATE_FILE = Path(candidate.__file__)
_NAMESPACES_FILE = Path(namespaces.__file__)
_BUBBLEWRAP_OPTIONS = (
    *("--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"),
    *(word for path in namespaces.VISIBLE_PATHS for word in ("--ro-bind-try", path, path)),
    # 65534 is the user and group `nobody`.
    *("--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--tmpfs", "/tmp"),
)
SANDBOXES = {
    "namespaces": "Linux namespaces: under a separate user, without network, with only Python's"
    " files visible",
    "bubblewrap": "bubblewrap: without network, with only Python's files visible",
    "": "no sandbox, as none works here: they can read, write and reach all that you can",
}
"""Sandboxes with their descriptions, strictest first."""
MAX_MEMORY = 2**30
"""Bytes for all processes of a program together."""
MAX_PROCESSES = 64
"""Processes that a program may have at the same time."""
_WATCH_INTERVAL = 0.05
"""Seconds between checks of a program's memory and processes."""
_SANDBOX_TIMEOUT = 30.0
"""Seconds within which a sandbox must run an empty program."""


class ProgramError(Exception):
    """Error in a program's process.

    It stands for an exception that is not a built-in, an end of the process, and a value that
    cannot be sent.
    """


class RemoteObject:
    """Proxy of an object in the program's process.

    Attribute access and calls are forwarded to that process. Comparison is not: a proxy equals
    only itself.
    """

    def __init__(self, number: int, process: "_ProgramProcess") -> None:
        # `self.x = ...` would be forwarded, as `__setattr__` below is.
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_process", process)

    def __getattr__(self, name: str) -> Any:
        return self._process.request_value("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._process.request_value("set", self._number, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._process.request_value("call", self._number, *arguments, **keywords)


@functools.cache
def find_sandbox() -> str:
    """Finds the strictest sandbox that works here.

    Returns its key in `SANDBOXES`, which is empty if none works.
    """
    for name in SANDBOXES:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.suppress(OSError, subprocess.TimeoutExpired),
        ):
            trial = subprocess.run(
                _build_command(name, folder, "pass"),
                capture_output=True,
                check=False,
                timeout=_SANDBOX_TIMEOUT,
            )
            if not trial.returncode:
                return name
    return ""


def _build_command(sandbox: str, folder: str, source: str, *arguments: str) -> list[str]:
    """Builds the command that runs source code in a sandbox.

    bubblewrap makes `folder` the working folder. In namespaces it is the place where the new root
    is mounted.
    """
    # The real path is needed, as a sandbox does not show the link in a virtual environment. Option
    # -I keeps out modules of the folder and of PYTHONPATH.
    python = [os.path.realpath(sys.executable), "-I", "-B", "-c"]
    match sandbox:
        case "namespaces":
            # The script sandboxes its own process and then runs the source given as an argument.
            return [*python, _NAMESPACES_FILE.read_text("utf-8"), folder, source, *arguments]
        case "bubblewrap":
            folder_options = ["--bind", folder, folder, "--chdir", folder]
            bubblewrap = shutil.which("bwrap") or "bwrap"
            return [bubblewrap, *_BUBBLEWRAP_OPTIONS, *folder_options, *python, source, *arguments]
        case _:
            return [*python, source, *arguments]


def is_test_program(tests: str) -> bool:
    """Returns whether `tests` is a program with asserts.

    An assert counts if it is outside of functions and classes. It also counts in a top-level
    function that is called there by name.
    """
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError):
        return False
    called_names = {
        node.func.id
        for node in _walk_outside_functions(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    called_functions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in called_names
    ]
    inner_nodes = [inner_node for node in called_functions for inner_node in ast.walk(node)]
    return any(
        isinstance(node, ast.Assert) for node in (*_walk_outside_functions(tree), *inner_nodes)
    )


def _walk_outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes outside of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from _walk_outside_functions(node)


class _AssertCounter(ast.NodeTransformer):
    """Adds code that counts the asserts that hold."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        """Returns the assert, followed by a call of `__held__`."""
        count_call = ast.parse("__held__()").body
        return [node, *(ast.copy_location(statement, node) for statement in count_call)]


def passes_tests(tests: str, program: str, seconds: float, folder: str, sandbox: str) -> bool:
    """Returns whether `program` passes `tests`.

    It passes if no assert fails, no error is raised, and at least one assert is reached.

    Args:
      tests: a trusted program with asserts. It runs in this process.
      program: an untrusted program. It runs in its own process.
      seconds: each process of the program gets int(seconds) + 1 seconds of processor time.
      folder: working folder of the program. It is created, and removed afterwards.
      sandbox: a key of `SANDBOXES`.

    Raises:
      OSError: the process did not start. The program was not judged.
    """
    passed_asserts: list[None] = []
    # A failed assert and an error in the program both mean that the tests fail.
    with (
        _ProgramProcess(folder, seconds, sandbox) as process,
        contextlib.suppress(Exception, SystemExit),
    ):
        tree = ast.parse(tests)
        used_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        counted_tree = ast.fix_missing_locations(_AssertCounter().visit(tree))
        namespace = process.load_program(program, used_names)
        namespace |= {"__name__": "__main__", "__held__": lambda: passed_asserts.append(None)}
        exec(compile(counted_tree, "tests", "exec"), namespace)
        # If the program returns an empty list, a loop over it never reaches the assert inside.
        return bool(passed_asserts)
    return False


def remove_folder(folder: str) -> None:
    """Removes a folder and its contents, if present."""
    # A program can nest folders deeper than Python's recursive `shutil.rmtree` can follow.
    subprocess.run(["/bin/rm", "-rf", folder], capture_output=True, check=False)


class _ProgramProcess:
    """Process that runs a program (`candidate.py`).

    The process and all its descendants end with the context.

    Raises:
      OSError: the process cannot be started, or ends before it runs the program.
    """

    def __init__(self, folder: str, seconds: float, sandbox: str) -> None:
        # Later children belong to the program, including orphans that this process adopts.
        self._folder, self._existing_children = folder, list_children()
        Path(folder).mkdir(exist_ok=True)
        child_read_fd, self._write_fd = os.pipe()
        self._read_fd, child_write_fd = os.pipe()
        child_arguments = [str(child_read_fd), str(child_write_fd), str(int(seconds) + 1)]
        try:
            self._process = subprocess.Popen(
                _build_command(
                    sandbox, folder, _CANDIDATE_FILE.read_text("utf-8"), *child_arguments
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(child_read_fd, child_write_fd),
                # The environment of the run may hold credentials.
                env={"PATH": "/usr/bin:/bin", "HOME": folder},
                cwd=folder,
            )
        except OSError:
            os.close(self._write_fd)
            os.close(self._read_fd)
            raise
        finally:
            # With a copy of these ends open here, reading would not end when the process does.
            os.close(child_read_fd)
            os.close(child_write_fd)
        self._question_file = os.fdopen(self._write_fd, "w", encoding="utf-8")
        self._answer_file = os.fdopen(self._read_fd, encoding="utf-8")
        self._stop_event = threading.Event()
        self._watcher = threading.Thread(target=self._watch_resources)
        self._watcher.start()
        # The process reports that it is ready before it receives the program, so an end at this
        # point is a fault of the system.
        if not self._answer_file.readline():
            self.__exit__()
            raise OSError("the program's process ended before it ran the program")

    def __enter__(self) -> "_ProgramProcess":
        return self

    def _watch_resources(self) -> None:
        """Ends the program when it exceeds `MAX_PROCESSES` or `MAX_MEMORY`."""
        # The system's resource limits apply to each process, so the total is checked here.
        while not self._stop_event.wait(_WATCH_INTERVAL):
            children = [pid for pid in list_children() if pid not in self._existing_children]
            program_pids = [*children, *list_descendants(children)]
            # Direct children are not counted: in a sandbox they are processes of the sandbox.
            if (
                len(program_pids) > MAX_PROCESSES + len(children)
                or sum(map(measure_memory, program_pids)) > MAX_MEMORY
            ):
                end_descendants(self._existing_children)
                return

    def __exit__(self, *_: object) -> None:
        # The watcher also kills and reaps processes, so it must end before this method does.
        self._stop_event.set()
        self._watcher.join()
        # Closing flushes, which fails if the process has ended.
        with contextlib.suppress(OSError):
            self._question_file.close()
        self._answer_file.close()
        end_descendants(self._existing_children)
        # Only lets `subprocess` notice the end: `end_descendants` has reaped the process.
        self._process.wait()
        remove_folder(self._folder)

    def _ask_process(self, question: dict[str, Any]) -> dict[str, Any]:
        self._question_file.write(json.dumps(question) + "\n")
        self._question_file.flush()
        # The limit keeps a program from filling this process's memory by one answer.
        line = self._answer_file.readline(2**24)
        if not line.endswith("\n"):
            raise ProgramError("the program's process ended, or its answer is over 16 MiB")
        answer = json.loads(line)
        if "raised" in answer:
            # Tests may catch built-in exceptions by type. The program's own classes do not exist
            # in this process.
            builtin = getattr(builtins, str(answer["raised"]), None)
            error_type = (
                builtin
                if isinstance(builtin, type) and issubclass(builtin, Exception)
                else ProgramError
            )
            # A StopIteration inside `all(map(f, items))` would end the loop without an error.
            ends_iteration = issubclass(error_type, StopIteration | StopAsyncIteration)
            raise (ProgramError if ends_iteration else error_type)(answer.get("why", ""))
        return answer

    def load_program(self, program: str, used_names: set[str]) -> dict[str, Any]:
        """Runs a program, and returns names for the tests.

        The names are those in `used_names` that the program defines. Their values are proxies of
        its functions, and modules of the standard library that it imported.

        A function named like a built-in is left out, unless it is the only function that the tests
        use. Raises the errors of `request_value`.
        """
        answer = self._ask_process({"program": program})
        functions, modules = ({str(name) for name in answer[key]} for key in ("names", "modules"))
        functions &= used_names
        # A program could otherwise replace `abs` or `sorted` in the tests. If the tests use a
        # single function of the program, it is the one to judge, whatever its name.
        new_functions = functions - {*dir(builtins)}
        functions = new_functions if new_functions or len(functions) > 1 else functions
        # The tests may rely on imports of the program, such as `math`. Names outside of the
        # standard library are not imported, as the program chooses them.
        module_names = modules & used_names & sys.stdlib_module_names
        return {
            **{name: importlib.import_module(name) for name in module_names},
            **{name: functools.partial(self.request_value, "call", name) for name in functions},
        }

    def request_value(
        self, action: str, receiver: str | int, /, *arguments: Any, **keywords: Any
    ) -> Any:
        """Runs one operation in the program's process.

        Args:
          action: "call", "get" or "set" (an attribute).
          receiver: name of a global of the program, or number of an object.
          arguments: arguments of the call, or the attribute's name and value.
          keywords: keyword arguments of the call.

        Raises:
          ProgramError: an argument or the answer cannot be sent, the process ended, or the program
            raised an exception that is not a built-in.
          OSError: the process had already ended.
          Exception: the built-in exception that the program raised.
        """
        question = {
            "do": action,
            "to": receiver,
            "arguments": [self._encode_argument(argument) for argument in arguments],
            "named": {name: self._encode_argument(argument) for name, argument in keywords.items()},
        }
        value = self._ask_process(question)["value"]
        return candidate.decode_value(value, lambda number: RemoteObject(number, self))

    @staticmethod
    def _encode_argument(value: Any) -> Any:
        """Encodes an argument. Proxies become the objects that they stand for."""
        objects: list[Any] = []
        encoded = candidate.encode_value(value, objects)
        if not objects:
            return encoded
        return _replace_object_numbers(encoded, objects)


def _replace_object_numbers(encoded: Any, objects: list[Any]) -> Any:
    """Replaces the numbers of objects in an encoded value.

    Positions in `objects` become the numbers that the program's process uses.

    Raises:
      ProgramError: an object is not a proxy.
    """
    if isinstance(encoded, list) and len(encoded) == 2 and encoded[0] == "object":
        remote_object = objects[encoded[1]]
        if not isinstance(remote_object, RemoteObject):
            raise ProgramError(
                f"a test passes a {type(remote_object).__name__}, which cannot be sent"
            )
        return ["object", remote_object._number]
    return (
        [_replace_object_numbers(item, objects) for item in encoded]
        if isinstance(encoded, list)
        else encoded
    )
