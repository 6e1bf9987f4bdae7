"""The lines that all processes of a job hold with process 0 while it runs, over which one that ends
is noticed at once.

Without them, the others would wait in a collective for a process that has failed alone, until JAX
misses its heartbeats and ends them with a stack trace of C++. JAX's heartbeats see what no line
shows: a process that is stopped, and a machine that is gone.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping

from jaxspec.processes.places import Place
from jaxspec.system.terminal import say

_BEAT = 1.0
"""Seconds between two signs of life."""
_SILENT_SECONDS = 6.0
"""After so long without one, a process is named before JAX gives it up: also what only keeps
Python busy can be silent, so nothing is done about it here."""
_ERROR_GRACE, _SIGNAL_GRACE = 10.0, 2.0
"""Seconds in which a process may end by itself after another has told of its end: most errors, and
most signals, come to all."""
_HERE, _LEFT, _ENDED = "jaxspec here", "jaxspec left", "jaxspec ended"
_GOES_ON = "the same command goes on from the last checkpoint"
_WHY = 500
"""Characters of a reason that are passed on."""


class Peers:
    """The other ends of this process's lines: process 0 for most, and for it all the others."""

    def __init__(self, place: Place, lines: Mapping[int, socket.socket]) -> None:
        self._place, self._lines = place, dict(lines)
        self._heard = dict.fromkeys(lines, time.monotonic())
        self._texts = dict.fromkeys(lines, b"")
        self._ending = False
        self._gone: set[int] = set()  # those who have said their last word, or hung up
        self._hung_up: set[int] = set()
        self._leaving, self._let_go = threading.Event(), threading.Event()
        self._saying = threading.Lock()
        for line in self._lines.values():
            line.settimeout(_BEAT)
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def leave(self, status: int, why: str) -> None:
        """Tells the others that this process ends: without a reason as they do, with one ahead of
        them; then returns when it may go, or after some seconds.

        Process 0 goes last, and the others when it has said that it goes: JAX's own end is loud
        where it misses one of them.
        """
        with self._saying:  # Python aborts where a thread prints while the main one goes
            self._leaving.set()
        grace = _SIGNAL_GRACE if status > 128 else _ERROR_GRACE
        self._tell(self._ended(status, grace, f"has ended: {why}") if why else _LEFT)
        if why:
            self._let_go.wait(_ERROR_GRACE + 2 * _BEAT)

    def _ended(self, status: int, grace: float, how: str, process: int | None = None) -> str:
        process = self._place.process if process is None else process
        return f"{_ENDED} {status} {process} {grace} {how}"

    def _tell(self, word: str) -> None:
        text = " ".join(word.splitlines())[:_WHY]
        for process, line in self._lines.items():
            if process not in self._hung_up:
                with contextlib.suppress(OSError):  # who has hung up is noticed where it is read
                    line.sendall(f"{text}\n".encode())

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, process)
            beat = time.monotonic()
            while selector.get_map():
                for key, _ in selector.select(_BEAT):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - beat >= _BEAT:
                    self._tell(_HERE)
                    # After being held up itself, it has not read yet what came meanwhile.
                    if now - beat < 2 * _BEAT:
                        self._name_the_silent(now)
                    beat = now

    def _hear(self, process: int) -> bool:
        """Takes what has come from a process; whether there may be more."""
        try:
            data = self._lines[process].recv(4096)
        except TimeoutError:
            return True
        except OSError:
            data = b""
        self._heard[process] = time.monotonic()
        *words, self._texts[process] = (self._texts[process] + data).split(b"\n")
        for word in words:
            self._take(process, word.decode(errors="replace"))
        if not data:
            self._hung_up.add(process)
        if not data and process not in self._gone:
            without = "has ended without a word (killed, or out of memory)"
            self._gone.add(process)
            self._end_too(process, 1, f"{without}; {_GOES_ON}", 0.0)
        if len(self._hung_up if self._place.process == 0 else self._gone) == len(self._lines):
            self._let_go.set()
        return bool(data)

    def _take(self, process: int, word: str) -> None:
        if word == _LEFT:
            self._gone.add(process)
        if word.startswith(_ENDED):
            status, ended, grace, how = word.removeprefix(_ENDED).split(maxsplit=3)
            if int(ended) == process:  # process 0 tells of others too
                self._gone.add(process)
            self._end_too(int(ended), int(status), how, float(grace))

    def _end_too(self, ended: int, status: int, how: str, grace: float) -> None:
        """Ends this process because another has ended, unless it ends by itself meanwhile."""
        if self._leaving.is_set() or self._ending:
            return
        self._ending = True  # what others do because of that is no news
        if self._place.process == 0:
            self._tell(self._ended(status, grace, how, ended))
        told = f"process {ended} of {self._place.processes} {how}"
        threading.Thread(target=self._end, args=(told, status, grace), daemon=True).start()

    def _end(self, told: str, status: int, grace: float) -> None:
        if grace and self._leaving.wait(_BEAT):  # it was the end of all
            return
        self._say(f"{told}; this process ends too")
        if grace and self._leaving.wait(grace):
            return
        if self._place.process == 0:
            self._tell(self._ended(status, grace, "has ended too"))
            self._let_go.wait(2 * _BEAT)
        os._exit(status)

    def _name_the_silent(self, now: float) -> None:
        if self._ending:
            return
        for process, heard in self._heard.items():
            if process not in self._gone and now - heard > _SILENT_SECONDS:
                self._heard[process] = now + 3600.0  # once is enough
                self._say(
                    f"process {process} of {self._place.processes} has not been heard of for"
                    f" {now - heard:.0f} s: it is stopped, or its machine is gone or very busy. JAX"
                    f" ends the others when its heartbeats stay away; {_GOES_ON}"
                )

    def _say(self, text: str) -> None:
        """Says it, unless this process is leaving, whose own last words are said."""
        with self._saying:
            if not self._leaving.is_set():
                say(text)


_held: Peers | None = None
"""This process's, as JAX has one client for it."""


def hold(place: Place, lines: Mapping[int, socket.socket]) -> None:
    """Keeps the lines of a meeting, and from now on notices who ends."""
    global _held
    if lines:
        _held = Peers(place, lines)


def held() -> bool:
    """Whether there are others who should know how this process ends."""
    return _held is not None


def wait_for_word() -> None:
    """Gives the lines time to end this process with the name of who has ended, before it says by
    itself that somebody has."""
    if _held is not None:
        time.sleep(2 * _BEAT)


def leave(status: int, why: str = "") -> None:
    """Tells the other processes, if there are any, that this one ends, as `Peers.leave` does; with
    a reason the process ends here."""
    if _held is not None:
        _held.leave(status, why)
        if why:
            os._exit(status)
