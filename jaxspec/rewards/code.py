"""Whether a model's program passes tests. The tests run in the worker; the program runs in a
process of its own, and only plain values come out of it.

So neither its exit status nor an object whose `==` is always true says anything. What the process
may do is limited by bubblewrap or namespaces where the system has them, and else by resource
limits, which contain accidents, not attacks.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from jaxspec.rewards import candidate

_SOURCE = Path(candidate.__file__)
_SEEN = "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", sys.base_prefix
"""What Python needs to run."""
_SANDBOXES: tuple[tuple[str, ...], ...] = (
    (
        *("bwrap", "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"),
        *(word for path in _SEEN for word in ("--ro-bind-try", path, path)),
        *("--tmpfs", "/tmp", "--bind", "{folder}", "{folder}", "--chdir", "{folder}"),
    ),
    ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"),
)
"""From the strictest: no files but Python's and its own folder, no network, and no process that
outlives it; the same, with all files."""
_ROUNDS = 1000
"""Times that processes are ended which start others meanwhile."""


class Failed(Exception):
    """A program cannot be run, or a call of it raised what has no name here."""


class Thing:
    """An object of the program's: its attributes and calls are asked for; it equals nothing but
    itself."""

    def __init__(self, number: int, process: "_Process") -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_process", process)

    def __getattr__(self, name: str) -> Any:
        return self._process.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._process.ask("set", self._number, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._process.ask("call", self._number, *arguments, **named)


@functools.cache
def sandbox() -> tuple[str, ...]:
    """The strictest command that works here, to put before another; `{folder}` in it stands for
    the folder that the other runs in."""
    here = tempfile.gettempdir()
    for command in _SANDBOXES:
        if (
            shutil.which(command[0])
            and not subprocess.run(
                [*_in(command, here), "true"], capture_output=True, check=False
            ).returncode
        ):
            return command
    return ()


def _in(command: tuple[str, ...], folder: str) -> list[str]:
    return [word.replace("{folder}", folder) for word in command]


def is_test(tests: str) -> bool:
    """Whether a text is a program that asserts something when it runs: outside functions, or in
    one that it calls there."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError):
        return False
    called = {
        node.func.id
        for node in _outside_functions(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    run = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in called]
    within = [each for node in run for each in ast.walk(node)]
    return any(isinstance(node, ast.Assert) for node in (*_outside_functions(tree), *within))


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from _outside_functions(node)


class _Counted(ast.NodeTransformer):
    """Has every assert that holds counted, so that tests which never come to one prove nothing."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        """The assert, and a call after it."""
        count = ast.parse("__held__()").body
        return [node, *(ast.copy_location(each, node) for each in count)]


def passes(tests: str, program: str, seconds: float, folder: str) -> bool:
    """Whether all of `tests`, a program of asserts whose author is trusted, hold of what `program`
    defines, and there is one. The program runs in `folder`, which is made, and removed.

    Raises:
      OSError: no process can be started here, which says nothing of the program.
    """
    held: list[None] = []
    # what is suppressed is of tests that fail, and of whatever they call
    with _Process(folder, seconds) as process, contextlib.suppress(Exception, SystemExit):
        tree = ast.parse(tests)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        counted = ast.fix_missing_locations(_Counted().visit(tree))
        names = process.define(program, used)
        names |= {"__name__": "__main__", "__held__": lambda: held.append(None)}
        exec(compile(counted, "tests", "exec"), names)
        return bool(held)
    return False


def remove(folder: str) -> None:
    """Removes a folder, however deep, if it is there."""
    subprocess.run(["/bin/rm", "-rf", folder], capture_output=True, check=False)


class _Process:
    """The process that a program runs in."""

    def __init__(self, folder: str, seconds: float) -> None:
        self._folder, self._before = folder, children()
        Path(folder).mkdir(exist_ok=True)
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        here = [os.path.realpath(sys.executable), "-I", "-B", "-c", _SOURCE.read_text("utf-8")]
        limits = [str(reads), str(writes), str(int(seconds) + 1)]
        try:
            self._process = subprocess.Popen(
                [*_in(sandbox(), folder), *here, *limits],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(reads, writes),
                env={"PATH": "/usr/bin:/bin", "HOME": folder},
                cwd=folder,
            )
        finally:
            os.close(reads)
            os.close(writes)
        self._asks = os.fdopen(self._to, "w", encoding="utf-8")
        self._hears = os.fdopen(self._from, encoding="utf-8")

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._asks.close()
        self._hears.close()
        end_descendants(self._before)
        self._process.wait()
        remove(self._folder)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._asks.write(json.dumps(question) + "\n")
        self._asks.flush()
        line = self._hears.readline(2**24)
        if not line.endswith("\n"):
            raise Failed("the program's process has ended, or says too much")
        answer = json.loads(line)
        if "raised" in answer:
            raised = getattr(builtins, str(answer["raised"]), None)
            # A StopIteration would end what the tests go through as if nothing had come after it.
            kind = raised if isinstance(raised, type) and issubclass(raised, Exception) else Failed
            ends = issubclass(kind, StopIteration | StopAsyncIteration)
            raise (Failed if ends else kind)(answer.get("why", ""))
        return answer

    def define(self, program: str, used: set[str]) -> dict[str, Any]:
        """Runs a program; returns what stands here for its functions and modules among the names
        that tests use.

        A function with the name of one of Python's own is among them only where there is no other:
        or else a program could redefine what the tests measure with.
        """
        answer = self._ask({"program": program})
        functions, modules = ({str(name) for name in answer[key]} for key in ("names", "modules"))
        functions &= used
        own = functions - {*dir(builtins)}
        functions = own if own or len(functions) > 1 else functions
        imported = modules & used & sys.stdlib_module_names
        return {
            **{name: importlib.import_module(name) for name in imported},
            **{name: functools.partial(self.ask, "call", name) for name in functions},
        }

    def ask(self, do: str, to: str | int, /, *arguments: Any, **named: Any) -> Any:
        """What a call of a function or an object of the program, or an attribute of it, gives."""
        question = {
            "do": do,
            "to": to,
            "arguments": [self._sent(each) for each in arguments],
            "named": {word: self._sent(each) for word, each in named.items()},
        }
        value = self._ask(question)["value"]
        return candidate.decoded(value, lambda number: Thing(number, self))

    @staticmethod
    def _sent(value: Any) -> Any:
        """An argument, in which things go back as the objects that they stand for."""
        things: list[Any] = []
        sent = candidate.encoded(value, things)
        if not things:
            return sent
        return _numbered(sent, things)


def _numbered(sent: Any, things: list[Any]) -> Any:
    """What was sent, with the numbers of the program's objects in place of those here."""
    if isinstance(sent, list) and len(sent) == 2 and sent[0] == "object":
        thing = things[sent[1]]
        if not isinstance(thing, Thing):
            raise Failed(f"a test gives a {type(thing).__name__}, which cannot be sent")
        return ["object", thing._number]
    return [_numbered(each, things) for each in sent] if isinstance(sent, list) else sent


def end_descendants(spared: Collection[int] = ()) -> None:
    """Ends all processes below this one but those spared, also those that wanted a life of their
    own; this process must be the one that adopts orphans (`adopt_orphans`)."""
    for _ in range(_ROUNDS):
        below = [pid for pid in children() if pid not in spared]
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children() -> list[int]:
    """Processes that this one is the parent of."""
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose parent has ended, where the system can
    (Linux)."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
