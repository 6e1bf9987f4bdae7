"""Whether a model's program passes tests. The tests run in the worker; the program runs in a
process of its own, and only plain values come out of it.

So neither its exit status nor an object whose `==` is always true says anything. What the process
may do is limited by namespaces or bubblewrap where the system has them, and else by limits of
resources, which contain accidents, not attacks.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxspec.rewards import candidate, namespaces

_CANDIDATE_FILE = Path(candidate.__file__)
_NAMESPACES_FILE = Path(namespaces.__file__)
_BUBBLEWRAP_OPTIONS = (
    *("--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"),
    *(word for path in namespaces.VISIBLE_PATHS for word in ("--ro-bind-try", path, path)),
    *("--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--tmpfs", "/tmp"),
)
SANDBOXES = {
    "namespaces": "Linux namespaces: as a user of their own, without network, with no files but"
    " Python's",
    "bubblewrap": "bubblewrap: without network, with no files but Python's",
    "": "no sandbox, as none works here: with all that you may read, write and reach",
}
"""How programs may run, from the strictest."""
MAX_MEMORY = 2**30
"""Bytes of all processes of a program together."""
MAX_PROCESSES = 64
_WATCH_INTERVAL = 0.05
"""Seconds between two looks at them."""
_SANDBOX_TIMEOUT = 30.0
"""Seconds that a sandbox may take to be tried."""
_MAX_KILL_ROUNDS = 1000
"""Times that processes are ended which start others meanwhile."""


class ProgramError(Exception):
    """A program cannot be run, or a call of it raised what has no name here."""


class RemoteObject:
    """An object of the program's: its attributes and calls are asked for; it equals nothing but
    itself."""

    def __init__(self, number: int, process: "_ProgramProcess") -> None:
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
    """Name of the strictest of `SANDBOXES` that works here."""
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
    """What runs a source of Python in a sandbox and a folder."""
    python = [os.path.realpath(sys.executable), "-I", "-B", "-c"]
    match sandbox:
        case "namespaces":
            return [*python, _NAMESPACES_FILE.read_text("utf-8"), folder, source, *arguments]
        case "bubblewrap":
            folder_options = ["--bind", folder, folder, "--chdir", folder]
            bubblewrap = shutil.which("bwrap") or "bwrap"
            return [bubblewrap, *_BUBBLEWRAP_OPTIONS, *folder_options, *python, source, *arguments]
        case _:
            return [*python, source, *arguments]


def is_test(tests: str) -> bool:
    """Whether a text is a program that asserts something when it runs: outside functions, or in
    one that it calls there."""
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
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from _walk_outside_functions(node)


class _AssertCounter(ast.NodeTransformer):
    """Has every assert that holds counted, so that tests which never come to one prove nothing."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        """The assert, and a call after it."""
        count_call = ast.parse("__held__()").body
        return [node, *(ast.copy_location(statement, node) for statement in count_call)]


def passes_tests(tests: str, program: str, seconds: float, folder: str, sandbox: str) -> bool:
    """Whether all of `tests`, a program of asserts whose author is trusted, hold of what `program`
    defines, and there is one. The program runs in one of `SANDBOXES`, in `folder`, which is made,
    and removed.

    Raises:
      OSError: no process can be started here, which says nothing of the program.
    """
    passed_asserts: list[None] = []
    # what is suppressed is of tests that fail, and of whatever they call
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
        return bool(passed_asserts)
    return False


def remove_folder(folder: str) -> None:
    """Removes a folder, however deep, if it is there."""
    subprocess.run(["/bin/rm", "-rf", folder], capture_output=True, check=False)


class _ProgramProcess:
    """The process that a program runs in."""

    def __init__(self, folder: str, seconds: float, sandbox: str) -> None:
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
                env={"PATH": "/usr/bin:/bin", "HOME": folder},
                cwd=folder,
            )
        except OSError:
            os.close(self._write_fd)
            os.close(self._read_fd)
            raise
        finally:
            os.close(child_read_fd)
            os.close(child_write_fd)
        self._question_file = os.fdopen(self._write_fd, "w", encoding="utf-8")
        self._answer_file = os.fdopen(self._read_fd, encoding="utf-8")
        self._stop_event = threading.Event()
        self._watcher = threading.Thread(target=self._watch_resources)
        self._watcher.start()
        if not self._answer_file.readline():  # nothing of the program has run yet
            self.__exit__()
            raise OSError("the process that is to run the program has ended")

    def __enter__(self) -> "_ProgramProcess":
        return self

    def _watch_resources(self) -> None:
        """Ends the program once all its processes together are too many or too large: limits of the
        system are for each of them."""
        while not self._stop_event.wait(_WATCH_INTERVAL):
            children = [pid for pid in list_children() if pid not in self._existing_children]
            program_pids = [*children, *list_descendants(children)]
            if (
                len(program_pids) > MAX_PROCESSES + len(children)
                or sum(map(measure_memory, program_pids)) > MAX_MEMORY
            ):
                end_descendants(self._existing_children)
                return

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._watcher.join()
        with contextlib.suppress(OSError):
            self._question_file.close()
        self._answer_file.close()
        end_descendants(self._existing_children)
        self._process.wait()
        remove_folder(self._folder)

    def _send_question(self, question: dict[str, Any]) -> dict[str, Any]:
        self._question_file.write(json.dumps(question) + "\n")
        self._question_file.flush()
        line = self._answer_file.readline(2**24)
        if not line.endswith("\n"):
            raise ProgramError("the program's process has ended, or says too much")
        answer = json.loads(line)
        if "raised" in answer:
            builtin = getattr(builtins, str(answer["raised"]), None)
            # A StopIteration would end what the tests go through as if nothing had come after it.
            error_type = (
                builtin
                if isinstance(builtin, type) and issubclass(builtin, Exception)
                else ProgramError
            )
            ends_iteration = issubclass(error_type, StopIteration | StopAsyncIteration)
            raise (ProgramError if ends_iteration else error_type)(answer.get("why", ""))
        return answer

    def load_program(self, program: str, used_names: set[str]) -> dict[str, Any]:
        """Runs a program; returns what stands here for its functions and modules among the names
        that tests use.

        A function with the name of one of Python's own is among them only where there is no other:
        or else a program could redefine what the tests measure with.
        """
        answer = self._send_question({"program": program})
        functions, modules = ({str(name) for name in answer[key]} for key in ("names", "modules"))
        functions &= used_names
        new_functions = functions - {*dir(builtins)}
        functions = new_functions if new_functions or len(functions) > 1 else functions
        module_names = modules & used_names & sys.stdlib_module_names
        return {
            **{name: importlib.import_module(name) for name in module_names},
            **{name: functools.partial(self.request_value, "call", name) for name in functions},
        }

    def request_value(
        self, action: str, receiver: str | int, /, *arguments: Any, **keywords: Any
    ) -> Any:
        """What a call of a function or an object of the program, or an attribute of it, gives."""
        question = {
            "do": action,
            "to": receiver,
            "arguments": [self._encode_argument(argument) for argument in arguments],
            "named": {name: self._encode_argument(argument) for name, argument in keywords.items()},
        }
        value = self._send_question(question)["value"]
        return candidate.decode_value(value, lambda number: RemoteObject(number, self))

    @staticmethod
    def _encode_argument(value: Any) -> Any:
        """An argument, in which things go back as the objects that they stand for."""
        objects: list[Any] = []
        encoded = candidate.encode_value(value, objects)
        if not objects:
            return encoded
        return _replace_object_numbers(encoded, objects)


def _replace_object_numbers(encoded: Any, objects: list[Any]) -> Any:
    """What was sent, with the numbers of the program's objects in place of those here."""
    if isinstance(encoded, list) and len(encoded) == 2 and encoded[0] == "object":
        remote_object = objects[encoded[1]]
        if not isinstance(remote_object, RemoteObject):
            raise ProgramError(
                f"a test gives a {type(remote_object).__name__}, which cannot be sent"
            )
        return ["object", remote_object._number]
    return (
        [_replace_object_numbers(item, objects) for item in encoded]
        if isinstance(encoded, list)
        else encoded
    )


def end_descendants(excluded_pids: Collection[int] = ()) -> None:
    """Ends all processes below this one but those spared, also those that wanted a life of their
    own; this process must be the one that adopts orphans (`adopt_orphans`)."""
    for _ in range(_MAX_KILL_ROUNDS):
        pids = [pid for pid in list_children() if pid not in excluded_pids]
        if not pids:
            return
        killed_pids = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed_pids.append(pid)
        if not killed_pids:  # to wait for others could take for ever
            return
        for pid in killed_pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def list_children() -> list[int]:
    """Processes that this one is the parent of."""
    return _read_child_pids(os.getpid())


def list_descendants(pids: Iterable[int]) -> list[int]:
    """Processes below others."""
    descendant_pids, pending_pids = [], [*pids]
    while pending_pids:
        child_pids = _read_child_pids(pending_pids.pop())
        descendant_pids += child_pids
        pending_pids += child_pids
    return descendant_pids


def _read_child_pids(pid: int) -> list[int]:
    child_pids: list[int] = []
    with contextlib.suppress(OSError):  # it may have ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            child_pids += map(int, (thread / "children").read_text().split())
    return child_pids


def measure_memory(pid: int) -> int:
    """Bytes of a process that no file holds."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    sizes = re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", text, re.MULTILINE)
    return 1024 * sum(map(int, sizes))


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose parent has ended, where the system can
    (Linux)."""
    _call_prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def signal_parent_death(number: int, parent: int) -> None:
    """Has this process get a signal when its parent ends, where the system can (Linux); at once if
    `parent` is its parent no more."""
    _call_prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _call_prctl(option: int, value: int) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
