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

_SOURCE = Path(candidate.__file__)
_NAMESPACES = Path(namespaces.__file__)
_BUBBLEWRAP = (
    *("--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"),
    *(word for path in namespaces.SEEN for word in ("--ro-bind-try", path, path)),
    *("--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--tmpfs", "/tmp"),
)
SANDBOXES = {
    "namespaces": "Linux namespaces: as a user of their own, without network, with no files but"
    " Python's",
    "bubblewrap": "bubblewrap: without network, with no files but Python's",
    "": "no sandbox, as none works here: with all that you may read, write and reach",
}
"""How programs may run, from the strictest."""
MEMORY = 2**30
"""Bytes of all processes of a program together."""
PROCESSES = 64
_INTERVAL = 0.05
"""Seconds between two looks at them."""
_PATIENCE = 30.0
"""Seconds that a sandbox may take to be tried."""
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
def find_sandbox() -> str:
    """Name of the strictest of `SANDBOXES` that works here."""
    for name in SANDBOXES:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.suppress(OSError, subprocess.TimeoutExpired),
        ):
            tried = subprocess.run(
                _command(name, folder, "pass"),
                capture_output=True,
                check=False,
                timeout=_PATIENCE,
            )
            if not tried.returncode:
                return name
    return ""


def _command(sandbox: str, folder: str, source: str, *arguments: str) -> list[str]:
    """What runs a source of Python in a sandbox and a folder."""
    python = [os.path.realpath(sys.executable), "-I", "-B", "-c"]
    match sandbox:
        case "namespaces":
            return [*python, _NAMESPACES.read_text("utf-8"), folder, source, *arguments]
        case "bubblewrap":
            place = ["--bind", folder, folder, "--chdir", folder]
            program = shutil.which("bwrap") or "bwrap"
            return [program, *_BUBBLEWRAP, *place, *python, source, *arguments]
        case _:
            return [*python, source, *arguments]


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


def passes(tests: str, program: str, seconds: float, folder: str, sandbox: str) -> bool:
    """Whether all of `tests`, a program of asserts whose author is trusted, hold of what `program`
    defines, and there is one. The program runs in one of `SANDBOXES`, in `folder`, which is made,
    and removed.

    Raises:
      OSError: no process can be started here, which says nothing of the program.
    """
    held: list[None] = []
    # what is suppressed is of tests that fail, and of whatever they call
    with _Process(folder, seconds, sandbox) as process, contextlib.suppress(Exception, SystemExit):
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

    def __init__(self, folder: str, seconds: float, sandbox: str) -> None:
        self._folder, self._before = folder, children()
        Path(folder).mkdir(exist_ok=True)
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        limits = [str(reads), str(writes), str(int(seconds) + 1)]
        try:
            self._process = subprocess.Popen(
                _command(sandbox, folder, _SOURCE.read_text("utf-8"), *limits),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(reads, writes),
                env={"PATH": "/usr/bin:/bin", "HOME": folder},
                cwd=folder,
            )
        except OSError:
            os.close(self._to)
            os.close(self._from)
            raise
        finally:
            os.close(reads)
            os.close(writes)
        self._asks = os.fdopen(self._to, "w", encoding="utf-8")
        self._hears = os.fdopen(self._from, encoding="utf-8")
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        if not self._hears.readline():  # nothing of the program has run yet
            self.__exit__()
            raise OSError("the process that is to run the program has ended")

    def __enter__(self) -> "_Process":
        return self

    def _watch(self) -> None:
        """Ends the program once all its processes together are too many or too large: limits of the
        system are for each of them."""
        while not self._over.wait(_INTERVAL):
            own = [pid for pid in children() if pid not in self._before]
            below = [*own, *descendants(own)]
            if len(below) > PROCESSES + len(own) or sum(map(memory, below)) > MEMORY:
                end_descendants(self._before)
                return

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
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
        killed = []
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        if not killed:  # to wait for others could take for ever
            return
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children() -> list[int]:
    """Processes that this one is the parent of."""
    return _children(os.getpid())


def descendants(pids: Iterable[int]) -> list[int]:
    """Processes below others."""
    found, left = [], [*pids]
    while left:
        nearer = _children(left.pop())
        found += nearer
        left += nearer
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it may have ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def memory(pid: int) -> int:
    """Bytes of a process that no file holds."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    sizes = re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", text, re.MULTILINE)
    return 1024 * sum(map(int, sizes))


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose parent has ended, where the system can
    (Linux)."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def signal_parent_death(number: int, parent: int) -> None:
    """Has this process get a signal when its parent ends, where the system can (Linux); at once if
    `parent` is its parent no more."""
    _prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
