"""A program in a fork of the server is like one in a new interpreter."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.fork_server import ROOT, ForkServer, Program, package_server

PROBE = """
import json, os, signal, sys
import jax
from jax._src import xla_bridge
print(json.dumps({
    "input": sys.stdin.read(),
    "arguments": sys.argv,
    "folder": os.getcwd(),
    "path": list(dict.fromkeys(sys.path)),
    "variables": dict(os.environ),
    "signals": {n: str(signal.getsignal(n)) for n in signal.valid_signals()},
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "terminals": [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "buffers": [stream.line_buffering for stream in (sys.stdout, sys.stderr)],
    "files": sorted(os.listdir("/proc/self/fd")),
    "name": __name__,
    "backends": xla_bridge.backends_are_initialized(),
    "options": {name: repr(value) for name, value in jax.config.values.items()},
    "devices": [str(device) for device in jax.devices()],
    "dtype": str(jax.numpy.zeros(1).dtype),
}))
"""
VARIABLES = [
    {"JAX_NUM_CPU_DEVICES": "3", "JAX_ENABLE_X64": "true", "JAX_DEBUG_NANS": "1"},
    {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COMPILATION_CACHE_DIR": "/nowhere",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "0.5",
        "JAX_ERROR_CHECKING_BEHAVIOR_NAN": "raise",
    },
]


@pytest.mark.parametrize("variables", VARIABLES, ids=["numbers", "words"])
@pytest.mark.usefixtures("ctrl_c")
def test_a_program_finds_what_it_would_find_in_a_new_process(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    options = {
        "env": inherited | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables,
        "cwd": tmp_path,
        "input": "asked",
        "capture_output": True,
        "text": True,
        "start_new_session": "JAX_DEBUG_NANS" in variables,
    }
    words = [sys.executable, "-c", PROBE, "--word", "two words"]
    try:
        done, expected = fork_server.run(words, **options), subprocess.run(words, **options)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert expected.returncode == 0, expected.stderr
    assert (done.returncode, done.stderr) == (0, "")
    found, wanted = json.loads(done.stdout), json.loads(expected.stdout)
    # Packages that the probe does not import set more.
    assert found["variables"].items() >= wanted.pop("variables").items()
    del found["variables"]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, name
    assert wanted["backends"] is False
    assert len(wanted["devices"]) > 1


@pytest.mark.parametrize(
    "code",
    [
        "print('told')",
        "import sys; print('told'); sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "import atexit; atexit.register(print, 'told at the end')",
        "import threading, time; threading.Timer(0.1, print, ['told by a thread']).start()",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os._exit(7)",
    ],
)
def test_a_program_ends_as_in_a_new_process(code: str) -> None:
    words = [sys.executable, "-c", code]
    # A traceback has frames of the server, too.
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    done, expected = fork_server.run(words, **options), subprocess.run(words, **options)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)


def test_a_module_runs_as_the_main_one(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(__name__, __spec__.name, sys.argv)")
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    words = [sys.executable, "-m", "shown", "--word"]
    done, expected = fork_server.run(words, **options), subprocess.run(words, **options)
    assert (done.stdout, done.stderr) == (expected.stdout, "")
    words = [sys.executable, "-m", "jaxspec.train", "--version"]
    done = fork_server.run(words, capture_output=True, text=True)
    assert done.stdout.startswith("jaxspec-rl ")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_is_waited_for_and_killed_with_its_session() -> None:
    code = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
    words = [sys.executable, "-c", code]
    with Program(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout
        told = {int(program.stdout.readline()) for _ in range(2)}
        assert program.pid in told
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(timeout=0.01)
        os.killpg(program.pid, signal.SIGTERM)
        assert program.stdout.read() == "", "both have ended"
    assert program.poll() == program.returncode == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server.run(words, stdout=subprocess.DEVNULL, start_new_session=True, timeout=0.01)


def test_a_program_of_another_tree_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jaxspec").mkdir()
    (tmp_path / "jaxspec/__init__.py").touch()
    words = [sys.executable, "-c", "print('imported')"]
    for folder, path in ((tmp_path, ROOT), (Path("/"), tmp_path)):
        variables = os.environ | {"PYTHONPATH": str(path)}
        done = fork_server.run(words, env=variables, cwd=folder, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert "needs a process of its own" in done.stderr


def test_variables_that_an_interpreter_reads_are_those_of_the_server() -> None:
    with pytest.raises(AssertionError, match="PYTHONUTF8"):
        Program([sys.executable, "-c", ""], env=os.environ | {"PYTHONUTF8": "0"})


def test_the_server_has_one_thread() -> None:
    """Seen from outside, and it has forked by then."""
    fork_server.run([sys.executable, "-c", ""], check=True)
    threads = Path(f"/proc/{package_server().process.pid}/task")
    assert len(list(threads.iterdir())) == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()",
            "has threads",
        ),
        ("import jax; jax.devices()", "has "),
        (
            "from jax._src import xla_bridge\nxla_bridge.backends_are_initialized = lambda: True",
            "has a backend",
        ),
    ],
    ids=["thread", "device", "backend"],
)
def test_threads_and_backends_are_not_forked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, said: str
) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "imported.py").write_text(code)
    server = ForkServer(tmp_path, ("imported",), os.environ)
    with pytest.raises(RuntimeError):
        Program([sys.executable, "-c", ""], server)
    server.close()
    assert f"the fork server {said}" in capfd.readouterr().err


def test_the_server_ends_with_its_client() -> None:
    server = ForkServer(ROOT, (), os.environ)
    fork_server.run([sys.executable, "-c", ""], server=server, check=True)
    server.close()
    assert server.process.returncode == 0
