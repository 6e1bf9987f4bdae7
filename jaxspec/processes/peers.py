"""Ends all processes of a job when one ends.

While the job runs, each process keeps a connection with process 0. It shows at once that the other
end has ended. Otherwise processes would wait in a collective for one that has failed. After missed
heartbeats, JAX would end them with a stack trace of C++. Connections do not show that a process is
stopped or that a machine is lost. JAX's heartbeats do.
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
"""Seconds between two messages that a process is alive."""
# Only reported: code that keeps Python busy delays the messages, too. JAX may end the job later.
_SILENT_SECONDS = 6.0
"""Seconds without a message after which a process is reported."""
_ERROR_GRACE, _SIGNAL_GRACE = 10.0, 2.0
"""Seconds that a process has to end by itself after another one has announced its end.

Most errors, and most signals, reach all processes.
"""
_ALIVE_MESSAGE, _LEFT_MESSAGE, _ENDED_PREFIX = "jaxspec here", "jaxspec left", "jaxspec ended"
_RESUME_HINT = "the same command goes on from the last checkpoint"
_MAX_REASON = 500
"""Maximum length of a message in characters."""


class Peers:
    """Processes connected with this one.

    For process 0 these are all others, and for each other only process 0.
    """

    def __init__(self, member: JobMember, connections: Mapping[int, socket.socket]) -> None:
        self._member, self._connections = member, dict(connections)
        self._last_heard = dict.fromkeys(connections, time.monotonic())
        self._buffers = dict.fromkeys(connections, b"")
        self._is_ending = False
        self._departed: set[int] = set()  # announced their end, or hung up
        self._disconnected: set[int] = set()
        self._leave_event, self._release_event = threading.Event(), threading.Event()
        self._print_lock = threading.Lock()
        for connection in self._connections.values():
            connection.settimeout(_HEARTBEAT_SECONDS)
        # A daemon, so that it does not keep Python from ending.
        threading.Thread(target=self._watch_connections, name="peers", daemon=True).start()

    def announce_end(self, status: int, reason: str) -> None:
        """Tells the others that this process ends.

        Without a reason, the job has ended. With one, the others end too, and this method waits for
        them, some seconds at most: process 0 for their ends, the others for its announcement.
        """
        # Python aborts if a thread prints while the main thread ends.
        with self._print_lock:
            self._leave_event.set()
        grace = _SIGNAL_GRACE if status > 128 else _ERROR_GRACE
        self._broadcast_message(
            self._format_end_message(status, grace, f"has ended: {reason}")
            if reason
            else _LEFT_MESSAGE
        )
        # Process 0 ends last, and the others after its announcement. JAX prints long messages if it
        # misses one of them.
        if reason:
            self._release_event.wait(_ERROR_GRACE + 2 * _HEARTBEAT_SECONDS)

    def _format_end_message(
        self, status: int, grace: float, cause: str, process_id: int | None = None
    ) -> str:
        process_id = self._member.process_id if process_id is None else process_id
        return f"{_ENDED_PREFIX} {status} {process_id} {grace} {cause}"

    def _broadcast_message(self, message: str) -> None:
        text = " ".join(message.splitlines())[:_MAX_REASON]
        for process_id, connection in self._connections.items():
            if process_id not in self._disconnected:
                with contextlib.suppress(OSError):  # hung up, which is noticed when it is read
                    connection.sendall(f"{text}\n".encode())

    def _watch_connections(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process_id, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, process_id)
            last_beat = time.monotonic()
            while selector.get_map():
                for key, _ in selector.select(_HEARTBEAT_SECONDS):
                    if not self._receive_messages(key.data):
                        selector.unregister(key.fileobj)
                current_time = time.monotonic()
                if current_time - last_beat >= _HEARTBEAT_SECONDS:
                    self._broadcast_message(_ALIVE_MESSAGE)
                    # After a delay of this process itself, messages may wait to be read.
                    if current_time - last_beat < 2 * _HEARTBEAT_SECONDS:
                        self._report_silent_peers(current_time)
                    last_beat = current_time

    def _receive_messages(self, process_id: int) -> bool:
        """Reads from a process. Returns whether more may come."""
        try:
            data = self._connections[process_id].recv(4096)
        except TimeoutError:
            return True
        except OSError:
            data = b""
        self._last_heard[process_id] = time.monotonic()
        # The last item is the beginning of a message that is still incomplete.
        *messages, self._buffers[process_id] = (self._buffers[process_id] + data).split(b"\n")
        for message in messages:
            self._handle_message(process_id, message.decode(errors="replace"))
        if not data:
            self._disconnected.add(process_id)
        if not data and process_id not in self._departed:
            cause = "has ended without notice (killed, or out of memory)"
            self._departed.add(process_id)
            self._end_after_peer(process_id, 1, f"{cause}; {_RESUME_HINT}", 0.0)
        # Process 0 waits until the others are gone, and they wait only for its announcement.
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
            if int(ended_id) == process_id:  # process 0 also reports the end of others
                self._departed.add(process_id)
            self._end_after_peer(int(ended_id), int(status), cause, float(grace))

    def _end_after_peer(self, ended_id: int, status: int, cause: str, grace: float) -> None:
        """Ends this process after another, unless it ends by itself."""
        if self._leave_event.is_set() or self._is_ending:
            return
        self._is_ending = True  # further ends follow from the first one
        if self._member.process_id == 0:
            self._broadcast_message(self._format_end_message(status, grace, cause, ended_id))
        # In another thread, so that this one continues to send and read messages.
        notice = f"process {ended_id} of {self._member.process_count} {cause}"
        threading.Thread(
            target=self._end_this_process, args=(notice, status, grace), daemon=True
        ).start()

    def _end_this_process(self, notice: str, status: int, grace: float) -> None:
        if grace and self._leave_event.wait(_HEARTBEAT_SECONDS):  # all processes are ending
            return
        self._print_message(f"{notice}; this process ends too")
        if grace and self._leave_event.wait(grace):
            return
        if self._member.process_id == 0:
            self._broadcast_message(self._format_end_message(status, grace, "has ended too"))
            self._release_event.wait(2 * _HEARTBEAT_SECONDS)
        # The main thread may be blocked in a collective, which no exception interrupts.
        os._exit(status)

    def _report_silent_peers(self, current_time: float) -> None:
        if self._is_ending:
            return
        for process_id, last_heard in self._last_heard.items():
            if process_id not in self._departed and current_time - last_heard > _SILENT_SECONDS:
                self._last_heard[process_id] = current_time + 3600.0  # report it once only
                self._print_message(
                    f"process {process_id} of {self._member.process_count} has not been heard from"
                    f" for {current_time - last_heard:.0f} s: it is stopped, or its machine is gone"
                    " or very busy. JAX ends the others if its heartbeats are missing;"
                    f" {_RESUME_HINT}"
                )

    def _print_message(self, text: str) -> None:
        """Prints a line, unless this process is ending."""
        with self._print_lock:
            if not self._leave_event.is_set():
                print_line(text)


_peers: Peers | None = None
"""Peers of this process, or None if it has none. JAX also has a single client of the job."""


def watch_peers(member: JobMember, connections: Mapping[int, socket.socket]) -> None:
    """Watches the connections of a meeting from now on."""
    global _peers
    if connections:
        _peers = Peers(member, connections)


def has_peers() -> bool:
    """Returns whether other processes must learn how this one ends."""
    return _peers is not None


def wait_for_peer_failure() -> None:
    """Waits, so that the watching thread can end this process first.

    That thread knows which process has ended. The caller knows only that one has.
    """
    if _peers is not None:
        time.sleep(2 * _HEARTBEAT_SECONDS)


def leave_job(status: int, reason: str = "") -> None:
    """Tells the other processes, if there are any, that this one ends.

    If there are others and a reason, this process ends here.
    """
    if _peers is not None:
        _peers.announce_end(status, reason)
        # Without JAX's shutdown, which would wait for the others.
        if reason:
            os._exit(status)
