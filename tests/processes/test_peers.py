"""A process that ends is noticed by the others at once, and told of in words; those that end
together let each other."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

SCRIPT = """
import socket, sys, threading, time
from jaxspec.processes import peers
from jaxspec.processes.places import JobMember
peers._HEARTBEAT_SECONDS, peers._SILENT_SECONDS = 0.3, 1.5
peers._ERROR_GRACE, peers._SIGNAL_GRACE = 2.0, 0.5
me, count, port = map(int, sys.argv[1:])
lines = {}
if me:
    lines[0] = socket.create_connection(("127.0.0.1", port))
    lines[0].sendall(bytes([me]))
else:
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", flush=True)
        while len(lines) < count - 1:
            line, _ = listener.accept()
            lines[line.recv(1)[0]] = line
peers.watch_peers(JobMember(f"127.0.0.1:{port}", count, me), lines)
print("ready", flush=True)
for words in sys.stdin:
    exec(words)
"""
"""Holds lines as after a meeting, and does what it is told."""


class Process:
    """One of several that hold lines."""

    def __init__(self, me: int, count: int, port: int) -> None:
        self.handle = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), *map(str, (me, count, port))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def heard(self, word: str) -> None:
        assert self.handle.stdout
        assert self.handle.stdout.readline() == f"{word}\n"

    def do(self, words: str) -> None:
        assert self.handle.stdin
        self.handle.stdin.write(f"{words}\n")
        self.handle.stdin.flush()

    def ended(self) -> tuple[int, str]:
        assert self.handle.stdout
        said = self.handle.stdout.read()
        return self.handle.wait(timeout=30), said


@contextlib.contextmanager
def joined(count: int) -> Iterator[list[Process]]:
    port = 20000 + os.getpid() % 20000
    started: list[Process] = []
    try:
        for me in range(count):
            started.append(Process(me, count, port))
            if me == 0:
                started[0].heard("listening")
        for each in started:
            each.heard("ready")
        yield started
    finally:
        for each in started:
            each.handle.kill()
            each.handle.wait()


@pytest.mark.parametrize("killed", [0, 2])
def test_all_others_end_within_seconds_of_one_that_is_killed(killed: int) -> None:
    with joined(3) as processes:
        began = time.monotonic()
        processes[killed].handle.send_signal(signal.SIGKILL)
        told = (
            f"process {killed} of 3 has ended without notice (killed, or out of memory); the same"
            " command goes on from the last checkpoint; this process ends too\n"
        )
        others = [each for number, each in enumerate(processes) if number != killed]
        assert [each.ended() for each in others] == [(1, told)] * 2
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("failed", [0, 1])
def test_the_reason_of_one_that_fails_alone_is_told_by_all_others(failed: int) -> None:
    with joined(3) as processes:
        processes[failed].do("peers.leave_job(2, 'it lacks\\na file')")
        told = f"process {failed} of 3 has ended: it lacks a file; this process ends too\n"
        for number, each in enumerate(processes):
            assert each.ended() == (2, "" if number == failed else told)


def test_those_that_fail_alike_end_with_their_own_status_and_word() -> None:
    with joined(3) as processes:
        for each in processes:
            each.do("print('mine', flush=True); peers.leave_job(2, 'all refuse this')")
        assert [each.ended() for each in processes] == [(2, "mine\n")] * 3


def test_a_signal_to_one_ends_all_with_its_status() -> None:
    with joined(2) as processes:
        processes[1].do("peers.leave_job(143, 'stopped while starting')")
        assert processes[1].ended() == (143, "")
        status, told = processes[0].ended()
        assert (status, told) == (
            143,
            "process 1 of 2 has ended: stopped while starting; this process ends too\n",
        )


def test_who_has_finished_is_not_missed() -> None:
    with joined(3) as processes:
        for number in (0, 2):
            processes[number].do("peers.leave_job(0); sys.exit()")
            assert processes[number].ended() == (0, "")
        time.sleep(1.5)
        processes[1].do("print('still here', flush=True); peers.leave_job(0); sys.exit()")
        assert processes[1].ended() == (0, "still here\n")


def test_one_that_is_stopped_is_named_and_left_to_jax() -> None:
    with joined(2) as processes:
        processes[1].handle.send_signal(signal.SIGSTOP)
        assert processes[0].handle.stdout
        told = processes[0].handle.stdout.readline()
        assert told.startswith("process 1 of 2 has not been heard from for ")
        assert "it is stopped, or its machine is gone or very busy" in told
        assert processes[0].handle.poll() is None
        processes[1].handle.send_signal(signal.SIGCONT)
        for each in processes:
            each.do("peers.leave_job(0); sys.exit()")
        # The other has not been silent: it was this one that did not read.
        assert [each.ended() for each in processes] == [(0, "")] * 2


def test_a_process_does_not_leave_in_the_middle_of_a_word() -> None:
    """Python aborts a process whose main thread ends while another prints."""
    with joined(2) as processes:
        processes[1].do(
            "begun = threading.Event();"
            " peers.print_line = lambda text: (begun.set(), time.sleep(1), print(text, flush=True))"
        )
        processes[0].handle.send_signal(signal.SIGSTOP)
        processes[1].do("begun.wait(); peers.leave_job(0); sys.exit()")
        status, told = processes[1].ended()
        assert status == 0
        assert told.startswith("process 0 of 2 has not been heard from for ")
