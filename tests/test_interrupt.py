"""Signals are obeyed at the right moment, also while the main thread is inside a long native call."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from jaxspec.interrupt import Interrupt

_PREAMBLE = """
import hashlib, os, signal, sys, time
from jaxspec.interrupt import Interrupt

def native():
    # C code that holds the main thread for a long time and lets other threads run, like a compilation.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000_000)

def ready():
    print("ready", flush=True)

"""


def _run(body: str, *numbers: int, pause: float = 0.3) -> tuple[int, str, float]:
    """Status, output and seconds from the first signal to the end of a program that gets these signals once it is ready."""
    run = subprocess.Popen(
        [sys.executable, "-c", _PREAMBLE + textwrap.dedent(body)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_unsaved_ends_at_once(number: int) -> None:
    body = """
        with Interrupt() as interrupt, interrupt.nothing_unsaved("compiling the step", lambda: print("cleaned up")):
            ready()
            native()
    """
    status, text, seconds = _run(body, number)
    assert (status, text) == (0, "cleaned up\nstopped while compiling the step; nothing to save; the same command starts again\n")
    assert seconds < 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_flag_is_seen_between_steps(number: int) -> None:
    body = """
        with Interrupt() as interrupt:
            ready()
            step = 0
            while not interrupt.agreed(step):
                time.sleep(0.05)
                step += 1
            assert interrupt.requested
            print("saved")
    """
    status, text, _ = _run(body, number)
    assert (status, text.splitlines()[-1]) == (0, "saved")


def test_second_interrupt_forces_the_end_and_second_termination_does_not() -> None:
    body = """
        with Interrupt() as interrupt:
            ready()
            native()
    """
    status, text, seconds = _run(body, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
    assert status == 130
    assert text.splitlines()[-1] == "stopped at once; the same command goes on from the last checkpoint"
    assert seconds < 4


def test_flag_set_before_the_region_ends_there() -> None:
    body = """
        with Interrupt() as interrupt:
            with interrupt.nothing_unsaved("loading"):
                pass
            ready()
            while not interrupt.requested:
                time.sleep(0.01)
            with interrupt.nothing_unsaved("compiling"):
                print("not reached")
    """
    status, text, _ = _run(body, signal.SIGTERM)
    assert status == 0
    assert text.splitlines()[1:] == ["stopped while compiling; nothing to save; the same command starts again"]


def test_a_hanging_or_failing_cleanup_does_not_keep_the_process() -> None:
    body = """
        from jaxspec import interrupt as module
        module._GRACE_SECONDS = 0.5
        with Interrupt() as interrupt, interrupt.nothing_unsaved("loading", lambda: time.sleep(60)):
            ready()
            native()
    """
    status, _, seconds = _run(body, signal.SIGTERM)
    assert status == 0
    assert seconds < 3


def test_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interrupt(announce=lambda _: None) as interrupt:
        with interrupt.nothing_unsaved("loading"):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while not interrupt.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert interrupt.requested
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_watches_before_jax_is_imported() -> None:
    assert _run("ready(); assert 'jax' not in sys.modules")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("retaken", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_distributed_processes_agree(number: int, retaken: bool) -> None:
    body = """
        import jax
        with Interrupt() as interrupt:
            jax.distributed.initialize("127.0.0.1:{port}", 1, 0, initialization_timeout=30)
            if {retaken}:
                with interrupt.nothing_unsaved("compiling"):
                    pass
            ready()
            for step in range(200):
                if interrupt.agreed(step):
                    break
                time.sleep(0.05)
            print("saved", interrupt.requested)
            jax.distributed.shutdown()
    """
    status, text, _ = _run(body.format(port=_free_port(), retaken=retaken), number)
    assert status == 0, text
    assert text.splitlines()[-1] == "saved True"


@pytest.mark.slow
def test_distributed_process_with_nothing_unsaved_ends_at_once() -> None:
    body = """
        import jax
        jax.distributed.initialize("127.0.0.1:{port}", 1, 0, initialization_timeout=30)
        with Interrupt() as interrupt, interrupt.nothing_unsaved("compiling"):
            ready()
            native()
    """
    status, text, seconds = _run(body.format(port=_free_port()), signal.SIGTERM)
    assert (status, text.splitlines()[-1]) == (0, "stopped while compiling; nothing to save; the same command starts again")
    assert seconds < 2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
