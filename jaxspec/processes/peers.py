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

from jaxspec.processes.places import JobMember
from jaxspec.system.terminal import print_line

_HEARTBEAT_SECONDS = 1.0
"""Seconds between two signs of life."""
_SILENT_SECONDS = 6.0
"""After so long without one, a process is named before JAX gives it up: also what only keeps
Python busy can be silent, so nothing is done about it here."""
_ERROR_GRACE, _SIGNAL_GRACE = 10.0, 2.0
"""Seconds in which a process may end by itself after another has told of its end: most errors, and
most signals, come to all."""
_ALIVE_MESSAGE, _LEFT_MESSAGE, _ENDED_PREFIX = "jaxspec here", "jaxspec left", "jaxspec ended"
_RESUME_HINT = "the same command goes on from the last checkpoint"
_MAX_REASON = 500
"""Characters of a reason that are passed on."""


class Peers:
    """The other ends of this process's lines: process 0 for most, and for it all the others."""

    def __init__(self, member: JobMember, connections: Mapping[int, socket.socket]) -> None:
        self._member, self._connections = member, dict(connections)
        self._last_heard = dict.fromkeys(connections, time.monotonic())
        self._buffers = dict.fromkeys(connections, b"")
        self._is_ending = False
        self._departed: set[int] = set()  # those who have said their last word, or hung up
        self._disconnected: set[int] = set()
        self._leave_event, self._release_event = threading.Event(), threading.Event()
        self._print_lock = threading.Lock()
        for connection in self._connections.values():
            connection.settimeout(_HEARTBEAT_SECONDS)
        threading.Thread(target=self._watch_connections, name="peers", daemon=True).start()

    def announce_end(self, status: int, reason: str) -> None:
        """Tells the others that this process ends: without a reason as they do, with one ahead of
        them; then returns when it may go, or after some seconds.

        Process 0 goes last, and the others when it has said that it goes: JAX's own end is loud
        where it misses one of them.
        """
        with self._print_lock:  # Python aborts where a thread prints while the main one goes
            self._leave_event.set()
        grace = _SIGNAL_GRACE if status > 128 else _ERROR_GRACE
        self._broadcast(
            self._format_end(status, grace, f"has ended: {reason}") if reason else _LEFT_MESSAGE
        )
        if reason:
            self._release_event.wait(_ERROR_GRACE + 2 * _HEARTBEAT_SECONDS)

    def _format_end(
        self, status: int, grace: float, cause: str, process_id: int | None = None
    ) -> str:
        process_id = self._member.process_id if process_id is None else process_id
        return f"{_ENDED_PREFIX} {status} {process_id} {grace} {cause}"

    def _broadcast(self, message: str) -> None:
        text = " ".join(message.splitlines())[:_MAX_REASON]
        for process_id, connection in self._connections.items():
            if process_id not in self._disconnected:
                with contextlib.suppress(OSError):  # who has hung up is noticed where it is read
                    connection.sendall(f"{text}\n".encode())

    def _watch_connections(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process_id, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, process_id)
            last_beat = time.monotonic()
            while selector.get_map():
                for key, _ in selector.select(_HEARTBEAT_SECONDS):
                    if not self._receive_from(key.data):
                        selector.unregister(key.fileobj)
                current_time = time.monotonic()
                if current_time - last_beat >= _HEARTBEAT_SECONDS:
                    self._broadcast(_ALIVE_MESSAGE)
                    # After being held up itself, it has not read yet what came meanwhile.
                    if current_time - last_beat < 2 * _HEARTBEAT_SECONDS:
                        self._report_silent_peers(current_time)
                    last_beat = current_time

    def _receive_from(self, process_id: int) -> bool:
        """Takes what has come from a process; whether there may be more."""
        try:
            data = self._connections[process_id].recv(4096)
        except TimeoutError:
            return True
        except OSError:
            data = b""
        self._last_heard[process_id] = time.monotonic()
        *messages, self._buffers[process_id] = (self._buffers[process_id] + data).split(b"\n")
        for message in messages:
            self._handle_message(process_id, message.decode(errors="replace"))
        if not data:
            self._disconnected.add(process_id)
        if not data and process_id not in self._departed:
            cause = "has ended without a word (killed, or out of memory)"
            self._departed.add(process_id)
            self._follow_end(process_id, 1, f"{cause}; {_RESUME_HINT}", 0.0)
        if len(self._disconnected if self._member.process_id == 0 else self._departed) == len(
            self._connections
        ):
            self._release_event.set()
        return bool(data)

    def _handle_message(self, process_id: int, message: str) -> None:
        if message == _LEFT_MESSAGE:
            self._departed.add(process_id)
        if message.startswith(_ENDED_PREFIX):
            status, ended_id, grace, cause = message.removeprefix(_ENDED_PREFIX).split(maxsplit=3)
            if int(ended_id) == process_id:  # process 0 tells of others too
                self._departed.add(process_id)
            self._follow_end(int(ended_id), int(status), cause, float(grace))

    def _follow_end(self, ended_id: int, status: int, cause: str, grace: float) -> None:
        """Ends this process because another has ended, unless it ends by itself meanwhile."""
        if self._leave_event.is_set() or self._is_ending:
            return
        self._is_ending = True  # what others do because of that is no news
        if self._member.process_id == 0:
            self._broadcast(self._format_end(status, grace, cause, ended_id))
        notice = f"process {ended_id} of {self._member.process_count} {cause}"
        threading.Thread(
            target=self._end_process, args=(notice, status, grace), daemon=True
        ).start()

    def _end_process(self, notice: str, status: int, grace: float) -> None:
        if grace and self._leave_event.wait(_HEARTBEAT_SECONDS):  # it was the end of all
            return
        self._print_message(f"{notice}; this process ends too")
        if grace and self._leave_event.wait(grace):
            return
        if self._member.process_id == 0:
            self._broadcast(self._format_end(status, grace, "has ended too"))
            self._release_event.wait(2 * _HEARTBEAT_SECONDS)
        os._exit(status)

    def _report_silent_peers(self, current_time: float) -> None:
        if self._is_ending:
            return
        for process_id, last_heard in self._last_heard.items():
            if process_id not in self._departed and current_time - last_heard > _SILENT_SECONDS:
                self._last_heard[process_id] = current_time + 3600.0  # once is enough
                self._print_message(
                    f"process {process_id} of {self._member.process_count} has not been heard of"
                    f" for {current_time - last_heard:.0f} s: it is stopped, or its machine is gone"
                    " or very busy. JAX ends the others when its heartbeats stay away;"
                    f" {_RESUME_HINT}"
                )

    def _print_message(self, text: str) -> None:
        """Says it, unless this process is leaving, whose own last words are said."""
        with self._print_lock:
            if not self._leave_event.is_set():
                print_line(text)


_peers: Peers | None = None
"""This process's, as JAX has one client for it."""


def watch_peers(member: JobMember, connections: Mapping[int, socket.socket]) -> None:
    """Keeps the lines of a meeting, and from now on notices who ends."""
    global _peers
    if connections:
        _peers = Peers(member, connections)


def has_peers() -> bool:
    """Whether there are others who should know how this process ends."""
    return _peers is not None


def wait_for_peer_failure() -> None:
    """Gives the lines time to end this process with the name of who has ended, before it says by
    itself that somebody has."""
    if _peers is not None:
        time.sleep(2 * _HEARTBEAT_SECONDS)


def leave_job(status: int, reason: str = "") -> None:
    """Tells the other processes, if there are any, that this one ends, as `Peers.announce_end`
    does; with a reason the process ends here."""
    if _peers is not None:
        _peers.announce_end(status, reason)
        if reason:
            os._exit(status)
