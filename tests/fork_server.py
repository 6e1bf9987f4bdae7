"""Programs in forks of a server that has imported what they import.

Imports take most of a short program's time. A fork has its own arguments, environment, folder,
streams, signals, session and exit status. It shares the server's hash seed, and does not print
warnings of imports. `/proc` shows the server's words and variables for it.

New processes remain where a test is about imports, options of the interpreter, terminals, signals
or another tree. Programs without JAX start faster in one, too: a fork's end takes 0.1 s.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
from jax._src import config, xla_bridge

ROOT = Path(__file__).parent.parent
PROGRAMS = (
    *("train", "train_sft", "train_draft", "evaluate", "sample", "export", "check", "__main__"),
    "bench.__main__",
)
# The others cannot be, or are set by Python itself.
CHANGED_SIGNALS = signal.valid_signals() - {
    *(signal.SIGKILL, signal.SIGSTOP),
    *(signal.SIGPIPE, signal.SIGXFSZ),
}
EXECUTE_CHILD = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]


class ForkServer:
    """A process that forks for each program, and ends with its client."""

    def __init__(self, tree: Path, imports: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self.variables = variables
        # JAX's options keep their defaults until a program's variables set them.
        own = {name: value for name, value in variables.items() if not name.startswith("JAX_")}
        own.pop("PYTHONPATH", None)
        self.requests, server_end = socket.socketpair()
        with server_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(server_end.fileno()), *imports],
                cwd=tree,
                env=own,
                # Not a terminal's, whose lines would not be buffered.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[server_end.fileno()],
            )

    def close(self) -> None:
        self.requests.close()
        self.process.wait()


def starting_variables(variables: Mapping[str, str]) -> set[tuple[str, str]]:
    """Returns those that an interpreter reads before it runs code."""
    return {
        (name, value)
        for name, value in variables.items()
        if name.startswith(("PYTHON", "LANG", "LC_")) and name != "PYTHONPATH"
    }


@functools.cache
def package_server() -> ForkServer:
    """This process's server for the programs of its tree."""
    return ForkServer(ROOT, tuple(f"jaxspec.{name}" for name in PROGRAMS), os.environ.copy())


class Program(subprocess.Popen[Any]):
    """`python -m MODULE` or `python -c CODE`, in a fork of a server."""

    def __init__(self, words: list[str], server: ForkServer | None = None, **options: Any) -> None:
        self.server = server or package_server()
        super().__init__(words, **options)

    def _execute_child(self, *values: Any) -> None:
        given = inspect.signature(EXECUTE_CHILD).bind(self, *values).arguments
        python, *words = given["args"]
        variables = dict(os.environ if given["env"] is None else given["env"])
        assert python == sys.executable
        assert words[0] in ("-m", "-c")
        different = starting_variables(variables) ^ starting_variables(self.server.variables)
        assert not different, f"a new interpreter would read {different}"
        stdin, stdout, stderr = (given[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        streams = [
            number if stream == -1 else stream
            for number, stream in enumerate((stdin, stdout, stderr))
        ]
        program = {
            "words": words,
            "variables": variables,
            "folder": os.fspath(given["cwd"] or Path.cwd()),
            "has_session": given["start_new_session"],
            "ignored": [n for n in CHANGED_SIGNALS if signal.getsignal(n) == signal.SIG_IGN],
        }
        self.connection, server_end = multiprocessing.Pipe()
        try:
            with server_end:
                descriptors = [server_end.fileno(), *streams]
                socket.send_fds(self.server.requests, [b"\0"], descriptors)
            self.connection.send(program)
            self.pid = self.connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the fork server has ended, and says above why") from error
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # pyright: ignore[reportAttributeAccessIssue]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """Returns process ID and status, or zeros while it runs."""
        if flags & os.WNOHANG and not self.connection.poll():
            return 0, 0
        return self.pid, self.connection.recv()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode


def run(
    words: list[str],
    *,
    input: str | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a program."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Program(words, **options) as program:
        try:
            output, errors = program.communicate(input, timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(words, program.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


# The server, and what becomes of its forks.


def main() -> None:
    # Ctrl-C ends programs and their client, and the server with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # No fork of the server is waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    path, variables = sys.path[1:], os.environ.copy()
    for name in sys.argv[2:]:
        if not hasattr(importlib.import_module(name), "__path__"):
            # A program is imported for its imports, and runs anew.
            del sys.modules[name]
    set_by_imports = {name: os.environ[name] for name in os.environ.keys() - variables.keys()}
    # Threads of OpenBLAS end with the first fork, and start again where they are used.
    if os.fork() == 0:
        os._exit(0)
    gc.freeze()
    if program := fork_programs(socket.socket(fileno=int(sys.argv[1]))):
        os.environ.clear()
        os.environ.update(set_by_imports | program["variables"])
        run_program(program["words"], path)


def fork_programs(requests: socket.socket) -> dict[str, Any] | None:
    """Returns its program in each fork, and None in the server at the end."""
    while files := socket.recv_fds(requests, 1, 4)[1]:
        require_single_thread()
        if os.fork() == 0:
            requests.close()
            return start_program(Connection(files[0]), files[1:])
        for file in files:
            os.close(file)
    return None


def require_single_thread() -> None:
    """Refuses to fork threads or backends, which do not work in a fork."""
    threads = [thread.name for thread in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"the fork server has threads: {threads}"
    assert not xla_bridge.backends_are_initialized(), "the fork server has a backend of JAX"


def start_program(client: Connection, streams: list[int]) -> dict[str, Any]:
    """Returns in the program's process, whose parent reports its status."""
    program = client.recv()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(OSError):  # of a client that has ended before
            client.send(status)
        os._exit(0)
    if program["has_session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number in CHANGED_SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in program["ignored"] else default)
    os.chdir(program["folder"])
    client.send(os.getpid())
    client.close()
    return program


def run_program(words: list[str], path: list[str]) -> None:
    """Runs what a new interpreter would run in this environment and folder."""
    kind, name, *arguments = words
    own_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = ["" if kind == "-c" else str(Path.cwd()), *own_path, *path]
    sys.argv[:] = [kind, *arguments]
    if imported := sys.modules.get("jaxspec"):
        found = PathFinder.find_spec("jaxspec")
        assert found, sys.path
        assert found.origin == imported.__file__, f"{found.origin} needs a process of its own"
    set_jax_options()
    if kind == "-c":
        main_module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(name, "<string>", "exec"), main_module.__dict__)
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def set_jax_options() -> None:
    """Sets those that JAX's import would have read from the environment."""
    for name, (kind, *_) in jax.config.meta.items():
        variable = name.upper()
        if variable in os.environ:
            text = os.environ[variable]
            number = kind(text) if kind in (int, float) else text
            jax.config.update(name, config.bool_env(variable, False) if kind is bool else number)


if __name__ == "__main__":
    main()
