"""How the processes of a job are told of each other, and how they meet before JAX joins them."""

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

import jax

from jaxspec.inputs.checked import INT32, ConfigError, require
from jaxspec.inputs.json_keys import shown
from jaxspec.system.terminal import say

WAIT = "JAXSPEC_WAIT_SECONDS"
"""Names the variable that says how long a process waits for the others; 300 s without it."""
NAMES = ("JAXSPEC_COORDINATOR", "JAXSPEC_PROCESSES", "JAXSPEC_PROCESS_ID")
_OTHERS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""What other programs on JAX are told by; each process would take itself for a lone one."""
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
_DEAD_SECONDS = 60
"""A process that has not been heard of for so long is taken for dead by the others."""


class Place(NamedTuple):
    """A process among those of its job."""

    coordinator: str
    processes: int
    process: int


def initialize_processes() -> None:
    """Joins the other processes of the job, if there are any.

    Explicit: JAXSPEC_COORDINATOR (host:port), JAXSPEC_PROCESSES, JAXSPEC_PROCESS_ID. Otherwise
    SLURM, Open MPI or Kubernetes as `jax.distributed` detects them, when the environment says that
    the job has more than one process.

    Raises:
      ConfigError: the variables cannot be read or are not all there, the port is taken, or a
        process has not come in time.
    """
    seconds = environment_number(WAIT, at_least=1) or 300
    if any(map(_given, NAMES)):
        place = _told()
    elif _in_a_job():
        place = _detected(seconds)
    else:
        others = (
            [name for name in _OTHERS if _given(name)] if _given("JAX_NUM_PROCESSES") != "1" else []
        )
        require(
            not others,
            f"{', '.join(others)} set, which jaxspec does not read, so that each process would"
            f" train alone. {_REMEDY}",
        )
        return
    coordinator, processes, process = place or (None, None, None)
    if place is not None:
        meet(place, float(seconds))
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=max(seconds, _DEAD_SECONDS),
            heartbeat_timeout_seconds=_DEAD_SECONDS,
            shutdown_timeout_seconds=_DEAD_SECONDS,
        )
    except (RuntimeError, ValueError, LookupError) as error:
        raise ConfigError(
            f"JAX cannot join the processes of this job: {first_line(error)}. {_REMEDY}"
        ) from error


_REMEDY = (
    f"Set {', '.join(NAMES)} for each process, or none of them and no scheduler's variables for a"
    " single one"
)


def _given(name: str) -> str:
    """What an environment variable holds; empty where it is unset or only blanks."""
    return os.environ.get(name, "").strip()


def environment_number(name: str, at_least: int, most: int = INT32) -> int | None:
    """The whole number that an environment variable holds; None where it is unset or empty.

    Raises:
      ConfigError: it holds something else.
    """
    text = _given(name)
    if not text:
        return None
    number = whole_number(text)
    good = number is not None and at_least <= number <= most
    require(
        good,
        f"{name} is {shown(text)}; give a whole number, {at_least} or more and at most {most}, or"
        " unset it",
    )
    return number


def whole_number(text: str) -> int | None:
    """The number that digits write; None for another text, and for a number far too large."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(INT32)) else None


def first_line(error: Exception) -> str:
    """What an error says, without the pages that some libraries add."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _told() -> Place:
    missing = [name for name in NAMES if not _given(name)]
    given = [name for name in NAMES if name not in missing]
    require(
        not missing,
        f"{', '.join(given)} set but not {', '.join(sorted(missing))}: set all three, or none for a"
        " single process",
    )
    coordinator = _given(NAMES[0])
    processes = environment_number(NAMES[1], 1)
    process = environment_number(NAMES[2], 0)
    assert processes is not None, "it is set"
    assert process is not None, "it is set"
    require(
        process < processes,
        f"{NAMES[2]} is {process}, but {NAMES[1]} is {processes}: ids go from 0 to {processes - 1}",
    )
    return Place(coordinator, processes, process)


def _in_a_job() -> bool:
    tasks = (
        environment_number("SLURM_NTASKS", 1) or environment_number("OMPI_COMM_WORLD_SIZE", 1) or 1
    )
    by_srun = "SLURM_STEP_ID" in os.environ or "SLURM_NTASKS" not in os.environ
    return by_srun and (tasks > 1 or environment_number("JOB_COMPLETION_INDEX", 0) is not None)


def _detected(seconds: int) -> Place | None:
    """Where JAX's own detection of schedulers puts this process; None where that cannot be asked,
    which leaves the waiting to JAX."""
    try:
        from jax._src.clusters import ClusterEnv

        coordinator, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, seconds
        )
    except (ImportError, AttributeError, TypeError):  # these names are JAX's own affair, and may go
        return None
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise ConfigError(
            f"the scheduler's variables cannot be read: {type(error).__name__}:"
            f" {first_line(error)}. {_REMEDY}"
        ) from error
    if coordinator is None or processes is None or process is None:
        return None
    return Place(coordinator, processes, process)


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
        me = f"process {self._place.process} of {self._place.processes}"
        if waited >= self._seconds:
            raise ConfigError(
                f"{me} has waited {self._seconds:g} s at {self._place.coordinator}: {absent}. Start"
                f" all of them within that time, with the same coordinator, or set {WAIT} higher"
            )
        if waited >= self._next:
            self._next += _PATIENCE
            self.say(
                f"has waited {waited:.0f} s of {self._seconds:g} at {self._place.coordinator}:"
                f" {absent}"
            )

    def say(self, message: str) -> None:
        say(f"process {self._place.process} of {self._place.processes} {message}")


def meet(place: Place, seconds: float) -> None:
    """Returns once all processes of the job are there, at about the same moment in each.

    JAX waits without a word, and ends the process with a stack trace of C++ when its time is up. So
    the processes meet before, at the same address: process 0 listens, the others say who they are
    and hold the line, and process 0 lets all of them go at once, whereupon JAX takes the port.

    Raises:
      ConfigError: the coordinator is no host:port, its port is taken, two processes have the same
        id, or were told of different numbers of processes, or the time is up.
    """
    host, port = _address(place.coordinator, NAMES[0])
    patience = _Patience(place, seconds)
    if place.process:
        _call(host, port, place, patience)
    elif place.processes > 1:
        with _listen(place, port) as listener:
            _gather(listener, place, patience)
    else:
        _listen(place, port).close()  # a taken port is said in our words


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
    bind, where = _given(_BIND), f"port {port} of this machine"
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


def _gather(listener: socket.socket, place: Place, patience: _Patience) -> None:
    """Process 0: waits for the calls of all others, then lets them go."""
    callers: dict[int, socket.socket] = {}
    listener.settimeout(_TURN)
    try:
        while True:
            callers = {process: line for process, line in callers.items() if _holds(line)}
            absent = [process for process in range(1, place.processes) if process not in callers]
            if not absent:
                return _answer(callers.values(), _GO)
            patience.look(
                f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))}"
                f" {'have' if len(absent) > 1 else 'has'} not come"
            )
            with contextlib.suppress(OSError):  # nobody calls, or hangs up at once
                _admit(listener.accept()[0], callers, place)
    except ConfigError as error:
        _answer(callers.values(), f"{_NO}{error}")
        raise


def _admit(line: socket.socket, callers: dict[int, socket.socket], place: Place) -> None:
    """Takes a call, unless it comes from somewhere else than this job."""
    line.settimeout(_HELLO_SECONDS)
    try:
        name, *numbers = _read(line).split() or [""]
    except OSError:  # a probe that says nothing
        name, numbers = "", []
    if name != "jaxspec" or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return line.close()
    processes, process = map(int, numbers)
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
        return _answer([line], f"{_NO}{wrong}")
    line.sendall(f"{_WAIT}\n".encode())
    line.settimeout(0)
    callers[process] = line
    return None


def _answer(lines: Iterable[socket.socket], text: str) -> None:
    for line in lines:
        with contextlib.suppress(OSError), line:  # who has hung up will be missed by JAX
            line.sendall(f"{text}\n".encode())


def _holds(line: socket.socket) -> bool:
    """Whether the other end is still there."""
    try:
        return bool(line.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _call(host: str, port: int, place: Place, patience: _Patience) -> None:
    """Any other process: tells process 0 who it is, again and again until it answers, and waits for
    its word."""
    hello = f"jaxspec {place.processes} {place.process}\n"
    unknown = False
    while True:
        try:
            with socket.create_connection((host, port), timeout=_HELLO_SECONDS) as line:
                line.sendall(hello.encode())
                said = _hold(line, patience)
        except socket.gaierror as error:
            absent = f"the name {host} is not known here ({error.strerror})"
            # a container's name may come with the container, but a mistake should show at once
            if not unknown:
                patience.say(f"finds that {absent}; trying again")
            unknown = True
        except OSError as error:
            absent = f"process 0 has not come ({error.strerror or error})"
        else:
            if said == _GO:
                return
            require(not said.startswith(_NO), said.removeprefix(_NO))
            absent = _SILENT
        patience.look(absent)
        time.sleep(_TURN)


def _hold(line: socket.socket, patience: _Patience) -> str:
    """What is said at the other end, other than to wait; empty when the line breaks."""
    line.settimeout(_TURN)
    absent = _SILENT
    while True:
        with contextlib.suppress(TimeoutError):
            said = _read(line)
            if said != _WAIT:
                return said
            absent = "process 0 is there and waits for others, which it names"
        patience.look(absent)


def _read(line: socket.socket) -> str:
    """The last of the lines of text that have come; empty where none comes."""
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > 1000:
            return ""
        part = line.recv(1000)
        if not part:
            return ""
        data += part
    return data.decode(errors="replace").splitlines()[-1].strip()
