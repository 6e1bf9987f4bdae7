"""Signals are obeyed at the right moment, with the right status, also while the main thread is
inside a long native call."""

import ast
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxspec.__main__ import PROGRAMS
from jaxspec.system import interrupt
from jaxspec.system.interrupt import Interrupt
from tests.conftest import free_port

_PREAMBLE = """
import hashlib, os, signal, sys, time
for number in (signal.SIGINT, signal.SIGHUP):  # as from a terminal, whatever runs the tests
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
from jaxspec.system.begin import prepare_process
from jaxspec.system.interrupt import Interrupt

def native():
    # C code that holds the main thread for long and lets other threads run, like a compilation.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000_000)

def steps(interrupt):
    step = 0
    while not interrupt.should_stop(step):
        time.sleep(0.05)
        step += 1

def ready():
    print("ready", flush=True)

"""


def _run(body: str, *numbers: int, pause: float = 0.3) -> tuple[int, str, float]:
    """Status, output and seconds from the first signal to the end of a program that gets these
    signals once it is ready."""
    run = subprocess.Popen(
        [sys.executable, "-c", _PREAMBLE + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout
    try:
        assert run.stdout.readline() == "ready\n"
        time.sleep(0.2)
        start = time.monotonic()
        for number in numbers:
            run.send_signal(number)
            time.sleep(pause)
        text, _ = run.communicate(timeout=30)
    finally:
        run.kill()
    return run.returncode, text, time.monotonic() - start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_unsaved_ends_at_once(number: int) -> None:
    body = """
        cleanup = lambda: print("cleaned up")
        with Interrupt() as interrupt, interrupt.exit_on_signal("compiling the step", cleanup):
            ready()
            native()
    """
    status, text, seconds = _run(body, number)
    assert (status, text) == (
        128 + number,
        (
            "cleaned up\nstopped while compiling the step; nothing to save; the same command starts"
            " again\n"
        ),
    )
    assert seconds < 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_flag_is_seen_between_steps(number: int) -> None:
    body = """
        with Interrupt() as interrupt:
            ready()
            steps(interrupt)
            assert interrupt.stop_requested
            print("saved")
        sys.exit(interrupt.exit_status)
    """
    status, text, _ = _run(body, number)
    assert status == 128 + number
    # the line that says what is waited for is another thread's, and may come after it
    assert "saved" in text.splitlines()


def test_the_first_signal_is_the_status() -> None:
    body = """
        with Interrupt() as interrupt:
            ready()
            steps(interrupt)
            time.sleep(1)
        sys.exit(interrupt.exit_status)
    """
    assert _run(body, signal.SIGHUP, signal.SIGTERM)[0] == 129


def test_what_nohup_ignores_stays_ignored() -> None:
    body = """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        prepare_process()
        with Interrupt() as interrupt, interrupt.exit_on_signal("compiling"):
            ready()
            native()
    """
    assert _run(body, signal.SIGHUP, signal.SIGTERM)[0] == 143


def test_a_terminal_that_is_gone_does_not_keep_a_run_from_saving(tmp_path: Path) -> None:
    """Closing a terminal sends SIGHUP, and whatever is printed from then on fails."""
    body = f"""
        import pathlib
        with Interrupt() as interrupt:
            ready()
            step = 0
            while not interrupt.should_stop(step):
                time.sleep(0.05)
            for stream in (sys.stdout, sys.stderr):
                print("one more line of metrics", file=stream, flush=True)
            pathlib.Path({str(tmp_path / "saved")!r}).write_text("all")
        sys.exit(interrupt.exit_status)
    """
    ours, theirs = pty.openpty()
    program = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        + _PREAMBLE
        + textwrap.dedent(body)
    )
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", program], **terminal) as run:
        os.close(theirs)
        with open(ours, "rb", closefd=False) as screen:
            said = screen.readline()
        os.close(ours)
        try:
            assert said == b"ready\r\n"
            assert run.wait(timeout=30) == 129
        finally:
            run.kill()
    assert (tmp_path / "saved").read_text() == "all"


def test_second_interrupt_forces_the_end_and_second_termination_does_not() -> None:
    body = """
        with Interrupt() as interrupt:
            ready()
            native()
    """
    status, text, seconds = _run(body, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
    assert status == 130
    assert (
        text.splitlines()[-1]
        == "stopped at once; the same command goes on from the last checkpoint"
    )
    assert seconds < 4


def test_flag_set_before_the_region_ends_there() -> None:
    body = """
        with Interrupt() as interrupt:
            with interrupt.exit_on_signal("loading"):
                pass
            ready()
            while not interrupt.stop_requested:
                time.sleep(0.01)
            with interrupt.exit_on_signal("compiling"):
                print("not reached")
    """
    status, text, _ = _run(body, signal.SIGTERM)
    assert status == 143
    assert text.splitlines()[1:] == [
        "stopped while compiling; nothing to save; the same command starts again"
    ]


@pytest.mark.parametrize(
    ("cleanup", "said"),
    [
        ("time.sleep(60)", ""),
        (
            "1 / 0",
            "cleaned up\nstopped while loading; nothing to save; the same command starts again\n",
        ),
    ],
)
def test_a_hanging_or_failing_cleanup_does_not_keep_the_process(cleanup: str, said: str) -> None:
    """Nor does one that fails keep the others from cleaning up, or the last line from being
    said."""
    body = f"""
        from jaxspec.system import interrupt as module
        module._GRACE_SECONDS = 0.5
        cleanups = (lambda: {cleanup}), (lambda: print("cleaned up"))
        with Interrupt() as interrupt, interrupt.exit_on_signal("loading", *cleanups):
            ready()
            native()
    """
    status, text, seconds = _run(body, signal.SIGTERM)
    assert (status, text) == (143, said)
    assert seconds < 3


def test_a_signal_is_obeyed_where_standard_output_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after `>&-`; the thread that watches goes on."""
    monkeypatch.setattr(sys, "stdout", None)
    with Interrupt() as interrupt:
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 5
            while interrupt._first_signal != signal.SIGTERM and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)
        assert interrupt.exit_status == 143
        assert interrupt._watcher.is_alive()


@pytest.mark.usefixtures("ctrl_c")
def test_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interrupt(announce=lambda _: None) as interrupt:
        with interrupt.exit_on_signal("loading"):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while not interrupt.stop_requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert interrupt.stop_requested
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_watches_before_jax_is_imported() -> None:
    assert _run("ready(); assert 'jax' not in sys.modules")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_importing_is_one_line(number: int) -> None:
    status, text, _ = _run(
        "sys.modules['jax'] = sys; prepare_process(); ready(); time.sleep(30)", number, pause=0
    )
    assert (status, text) == (
        128 + number,
        "stopped; nothing to save; the same command starts again\n",
    )


def test_every_program_begins_before_it_imports_anything_slow() -> None:
    """Read off the source: what stands before the call is imports of the standard library."""
    package = Path(interrupt.__file__).parents[1]
    programs = [
        (
            package / f"{name}.py"
            if (package / f"{name}.py").exists()
            else package / name / "__main__.py"
        )
        for name in PROGRAMS
    ]
    for file in programs:
        _, first, second, *_ = ast.parse(file.read_text()).body
        assert ast.unparse(first) == "import sys", file
        assert (
            ast.unparse(second)
            == "if __name__ == '__main__':\n    from jaxspec.system.begin import prepare_process\n"
            "    prepare_process()"
        ), file


def test_an_environment_that_jax_cannot_read_is_one_line() -> None:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "x"}
    run = subprocess.run(
        [sys.executable, "-m", "jaxspec.train"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(r'error: .*"x".*jax_num_cpu_devices.*\n', run.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("retaken", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_distributed_processes_agree(number: int, retaken: bool) -> None:
    body = """
        import jax
        with Interrupt() as interrupt:
            jax.distributed.initialize("127.0.0.1:{port}", 1, 0, initialization_timeout=30)
            if {retaken}:
                with interrupt.exit_on_signal("compiling"):
                    pass
            ready()
            for step in range(200):
                if interrupt.should_stop(step):
                    break
                time.sleep(0.05)
            print("saved", interrupt.stop_requested)
            jax.distributed.shutdown()
        sys.exit(interrupt.exit_status)
    """
    status, text, _ = _run(body.format(port=free_port(), retaken=retaken), number)
    # Without the watcher's retaking, SIGTERM belongs to JAX, as it does in every process that got
    # no signal itself.
    assert status == 128 + number, text
    assert text.splitlines()[-1] == "saved True"


@pytest.mark.slow
def test_distributed_process_with_nothing_unsaved_ends_at_once() -> None:
    body = """
        import jax
        jax.distributed.initialize("127.0.0.1:{port}", 1, 0, initialization_timeout=30)
        with Interrupt() as interrupt, interrupt.exit_on_signal("compiling"):
            ready()
            native()
    """
    status, text, seconds = _run(body.format(port=free_port()), signal.SIGTERM)
    assert (status, text.splitlines()[-1]) == (
        143,
        "stopped while compiling; nothing to save; the same command starts again",
    )
    assert seconds < 2
