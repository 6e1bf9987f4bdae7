"""How the processes of a job meet before JAX joins them, and find that they were started alike."""

import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import shown
from jaxspec.processes.environment import given, whole_number
from jaxspec.processes.places import NAMES, Place
from jaxspec.system.terminal import say

WAIT = "JAXSPEC_WAIT_SECONDS"
"""Names the variable that says how long a process waits for the others; 300 s without it."""
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
"""Names the variable that says where JAX listens, if not at the coordinator's port of all
addresses."""
_PATIENCE = 30.0
"""After so many seconds, and after as many again, who has not come is named."""
_TURN = 0.5
_HELLO_SECONDS = 2.0
_WAIT, _GO, _NO = "jaxspec wait", "jaxspec go", "jaxspec no: "
"""What process 0 tells those who have called, at once and in the end; with the last, why. Anything
else comes from somebody else."""
_SILENT = "process 0 has not come (something else answers there)"
_LONGEST_HELLO = 2**20
"""Bytes of what a process says of itself."""
_SHOWN_DIFFERENCES = 5


class _Patience:
    """Says whom a process waits for, now and then, until the time is up."""

    def __init__(self, place: Place, seconds: float) -> None:
        self._place, self._seconds = place, seconds
        self._began = time.monotonic()
        self._next = _PATIENCE

    def look(self, absent: str) -> None:
        """Names who is absent when it is time to.

        Raises:
          ConfigError: the time is up.
        """
        waited = time.monotonic() - self._began
        if waited >= self._seconds:
            raise ConfigError(
                f"{self._place} has waited {self._seconds:g} s at {self._place.coordinator}:"
                f" {absent}. Start all of them within that time, with the same coordinator, or set"
                f" {WAIT} higher"
            )
        if waited >= self._next:
            self._next += _PATIENCE
            self.say(
                f"has waited {waited:.0f} s of {self._seconds:g} at {self._place.coordinator}:"
                f" {absent}"
            )

    def say(self, message: str) -> None:
        say(f"{self._place} {message}")


def meet(place: Place, seconds: float, identity: Mapping[str, Any]) -> dict[int, socket.socket]:
    """Returns once all processes of the job are there, at about the same moment in each, with the
    lines that they go on holding: process 0 with all others, they with it.

    JAX waits without a word, and ends the process with a stack trace of C++ when its time is up. So
    the processes meet before, at the same address: process 0 listens, the others say who they are
    and what they were started with, and hold the line, and process 0 lets all of them go at once,
    whereupon JAX takes the port.

    Raises:
      ConfigError: the coordinator is no host:port, its port is taken, two processes have the same
        id, or were told of different numbers of processes, the time is up, or what some call
        `identity` is not what process 0 does.
    """
    host, port = _address(place.coordinator, NAMES[0])
    patience = _Patience(place, seconds)
    known = json.dumps(dict(identity))
    if place.process:
        return {0: _call(host, port, place, patience, known)}
    # a taken port is said in our words, also to a lone process
    with _listen(place, port) as listener:
        return _gather(listener, place, patience, json.loads(known))


def _address(text: str, name: str) -> tuple[str, int]:
    """Host and port of an address, which the variable `name` says.

    Raises:
      ConfigError: it is none.
    """
    host, _, digits = text.rpartition(":")
    port = whole_number(digits) or 0
    what, remedy = f"the coordinator {shown(text)}", f"set {name} to such as 10.0.0.1:1234"
    require(
        bool(host) and 1 <= port <= 65535,
        f"{what} is not HOST:PORT with a port from 1 to 65535; {remedy}",
    )
    try:
        host.encode("idna")  # as it is done for the look-up
    except UnicodeError as error:
        raise ConfigError(f"{what} has no valid name of a host ({error}); {remedy}") from error
    return host.strip("[]"), port


def _listen(place: Place, port: int) -> socket.socket:
    bind, where = given(_BIND), f"port {port} of this machine"
    remedy = (
        f"choose a free port for the coordinator {place.coordinator}, the same for all processes"
    )
    try:
        if bind:
            where = f"{_BIND} {bind}"
            remedy = "set it to an address of this machine with a free port, or unset it"
            host, port = _address(bind, _BIND)
            return socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        # The words of others go on about the address.
        reason = (
            os.strerror(error.errno)
            if error.errno and not isinstance(error, socket.gaierror)
            else error.strerror or error
        )
        raise ConfigError(f"process 0 cannot listen at {where}: {reason}; {remedy}") from error


def _gather(
    listener: socket.socket, place: Place, patience: _Patience, known: dict[str, Any]
) -> dict[int, socket.socket]:
    """Process 0: waits for the calls of all others, then lets them go, if all were started like
    it."""
    callers: dict[int, socket.socket] = {}
    differing: dict[int, str] = {}
    listener.settimeout(_TURN)
    _allow_files(place.processes)
    try:
        while True:
            callers = {process: line for process, line in callers.items() if _holds(line)}
            absent = [process for process in range(1, place.processes) if process not in callers]
            if not absent:
                require(not differing, _differences(differing))
                _answer(callers.values(), _GO)
                return callers
            patience.look(
                f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))}"
                f" {'have' if len(absent) > 1 else 'has'} not come"
            )
            with contextlib.suppress(OSError):  # nobody calls, or hangs up at once
                called = _admit(listener.accept()[0], callers, place)
                if called is not None:
                    process, theirs = called
                    differing.pop(process, None)  # it may have called before
                    if theirs != known:
                        differing[process] = _difference(known, theirs)
    except ConfigError as error:
        _dismiss(callers.values(), f"{_NO}{error}")
        raise


def _allow_files(processes: int) -> None:
    """Lets this process have a line with each of the others, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * processes + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _difference(known: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """In what another process was started otherwise than process 0."""
    found = [
        f"{name} is {shown(known.get(name, 'absent'))} in process 0 and"
        f" {shown(theirs.get(name, 'absent'))} there"
        for name in sorted(known.keys() | theirs.keys())
        if known.get(name) != theirs.get(name)
    ]
    more = len(found) - _SHOWN_DIFFERENCES
    return "; ".join(found[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _differences(differing: Mapping[int, str]) -> str:
    """All differences, each with the processes that have it, in whatever order they came."""
    told = []
    for what in dict.fromkeys(differing[process] for process in sorted(differing)):
        some = sorted(process for process, theirs in differing.items() if theirs == what)
        listed = ", ".join(map(str, some[:_SHOWN_DIFFERENCES]))
        more = len(some) - _SHOWN_DIFFERENCES
        listed += f" and {more} more" if more > 0 else ""
        several = len(some) > 1
        were = "es {} were" if several else " {} was"
        told.append(f"process{were.format(listed)} not started like process 0: {what}")
    remedy = "Start all processes with the same command, code and environment"
    return f"{'. '.join(told)}. {remedy}"


def _admit(
    line: socket.socket, callers: dict[int, socket.socket], place: Place
) -> tuple[int, dict[str, Any]] | None:
    """Takes a call and returns who called, and what it was started with; None where it comes from
    somewhere else than this job."""
    line.settimeout(_HELLO_SECONDS)
    try:
        name, *said, known = _read(line)[0].split(" ", 3)
        numbers, identity = list(map(whole_number, said)), json.loads(known)
    except (OSError, ValueError):  # a probe, which says nothing or something else
        name, numbers, identity = "", list[int | None](), {}
    ours = name == "jaxspec" and len(numbers) == 2 and isinstance(identity, dict)
    processes, process = numbers if ours else (None, None)
    if processes is None or process is None:
        return line.close()
    wrong = ""
    if processes != place.processes:
        wrong = (
            f"process {process} was told of {processes} processes, process 0 of {place.processes};"
            f" set the same {NAMES[1]} for all"
        )
    elif process in callers and _holds(callers[process]):
        wrong = f"two processes say that they are process {process}; give each its own {NAMES[2]}"
    if wrong:
        say(wrong)
        return _dismiss([line], f"{_NO}{wrong}")
    line.sendall(f"{_WAIT}\n".encode())
    line.settimeout(0)
    callers[process] = line
    return process, identity


def _answer(lines: Iterable[socket.socket], text: str) -> None:
    for line in lines:
        with contextlib.suppress(OSError):  # who has hung up will be missed
            line.sendall(f"{text}\n".encode())


def _dismiss(lines: Iterable[socket.socket], text: str) -> None:
    lines = list(lines)
    _answer(lines, text)
    for line in lines:
        line.close()


def _holds(line: socket.socket) -> bool:
    """Whether the other end is still there."""
    try:
        return bool(line.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _call(host: str, port: int, place: Place, patience: _Patience, known: str) -> socket.socket:
    """Any other process: tells process 0 who it is, again and again until it answers, and waits for
    its word; returns the line."""
    hello = f"jaxspec {place.processes} {place.process} {known}\n"
    unknown = False
    while True:
        try:
            with contextlib.ExitStack() as unless_let_go:
                line = socket.create_connection((host, port), timeout=_HELLO_SECONDS)
                unless_let_go.enter_context(line)
                line.sendall(hello.encode())
                said = _hold(line, patience)
                if said == _GO:
                    unless_let_go.pop_all()
                    return line
        except socket.gaierror as error:
            absent = f"the name {host} is not known here ({error.strerror})"
            # a container's name may come with the container, but a mistake should show at once
            if not unknown:
                patience.say(f"finds that {absent}; trying again")
            unknown = True
        except OSError as error:
            absent = f"process 0 has not come ({error.strerror or error})"
        else:
            require(not said.startswith(_NO), said.removeprefix(_NO))
            absent = _SILENT
        patience.look(absent)
        time.sleep(_TURN)


def _hold(line: socket.socket, patience: _Patience) -> str:
    """What is said at the other end, other than to wait; empty when the line breaks."""
    line.settimeout(_TURN)
    absent = _SILENT
    while True:
        try:
            # after its last word here process 0 goes on talking, as a peer
            for said in _read(line):
                if said != _WAIT:
                    return said
            absent = "process 0 is there and waits for others, which it names"
        except TimeoutError:
            pass
        except ConnectionError:
            return ""
        patience.look(absent)


def _read(line: socket.socket) -> list[str]:
    """The lines of text that have come; an empty one where none comes."""
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > _LONGEST_HELLO:
            return [""]
        part = line.recv(2**16)
        if not part:
            return [""]
        data += part
    return [text.strip() for text in data.decode(errors="replace").splitlines()]
