"""How the processes of a job are told of each other, and how they meet before JAX joins them."""

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

import jax

from jaxspec.config import ConfigError, require

WAIT = "JAXSPEC_WAIT_SECONDS"
"""Names the variable that says how long a process waits for the others; 300 s without it."""
NAMES = ("JAXSPEC_COORDINATOR", "JAXSPEC_PROCESSES", "JAXSPEC_PROCESS_ID")
_PATIENCE = 30.0
"""After so many seconds, and after as many again, who has not come is named."""
_TURN = 0.5
_HELLO_SECONDS = 2.0
_WAIT, _GO = "wait", "go"
"""What process 0 tells those who have called, at once and in the end."""
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

    Explicit: JAXSPEC_COORDINATOR (host:port), JAXSPEC_PROCESSES, JAXSPEC_PROCESS_ID. Otherwise SLURM, Open MPI or Kubernetes
    as `jax.distributed` detects them, when the environment says that the job has more than one process.

    Raises:
      ConfigError: the variables cannot be read or are not all there, the port is taken, or a process has not come in time.
    """
    seconds = environment_number(WAIT, at_least=1) or 300
    if any(os.environ.get(name) for name in NAMES):
        place = _told()
    elif _in_a_job():
        place = _detected(seconds)
    else:
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
        raise ConfigError(f"JAX cannot join the processes of this job: {first_line(error)}. {_REMEDY}") from error


_REMEDY = f"Set {', '.join(NAMES)} for each process, or none of them and no scheduler's variables for a single one"


def environment_number(name: str, at_least: int) -> int | None:
    """The whole number that an environment variable holds; None where it is unset or empty.

    Raises:
      ConfigError: it holds something else.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    good = text.isascii() and text.isdigit() and int(text) >= at_least
    require(good, f"{name} is {text!r}; give a whole number, {at_least} or more, or unset it")
    return int(text)


def first_line(error: Exception) -> str:
    """What an error says, without the pages that some libraries add."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _told() -> Place:
    missing = [name for name in NAMES if not os.environ.get(name)]
    given = [name for name in NAMES if name not in missing]
    require(not missing, f"{', '.join(given)} set but not {', '.join(sorted(missing))}: set all three, or none for a single process")
    coordinator, processes, process = os.environ[NAMES[0]].strip(), environment_number(NAMES[1], 1), environment_number(NAMES[2], 0)
    assert processes is not None, "it is set"
    assert process is not None, "it is set"
    require(process < processes, f"{NAMES[2]} is {process}, but {NAMES[1]} is {processes}: ids go from 0 to {processes - 1}")
    return Place(coordinator, processes, process)


def _in_a_job() -> bool:
    tasks = environment_number("SLURM_NTASKS", 1) or environment_number("OMPI_COMM_WORLD_SIZE", 1) or 1
    by_srun = "SLURM_STEP_ID" in os.environ or "SLURM_NTASKS" not in os.environ
    return by_srun and (tasks > 1 or environment_number("JOB_COMPLETION_INDEX", 0) is not None)


def _detected(seconds: int) -> Place | None:
    """Where JAX's own detection of schedulers puts this process; None where that cannot be asked, which leaves the waiting to JAX."""
    try:
        from jax._src.clusters import ClusterEnv

        coordinator, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, seconds)
    except (ImportError, AttributeError, TypeError):  # these names are JAX's own affair, and may go
        return None
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise ConfigError(f"the scheduler's variables cannot be read: {type(error).__name__}: {first_line(error)}. {_REMEDY}") from error
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
                f"{me} has waited {self._seconds:g} s at {self._place.coordinator}: {absent}. Start all of them within that time, "
                f"with the same coordinator, or set {WAIT} higher"
            )
        if waited >= self._next:
            self._next += _PATIENCE
            self.say(f"has waited {waited:.0f} s of {self._seconds:g} at {self._place.coordinator}: {absent}")

    def say(self, message: str) -> None:
        print(f"process {self._place.process} of {self._place.processes} {message}", flush=True)


def meet(place: Place, seconds: float) -> None:
    """Returns once all processes of the job are there, at about the same moment in each.

    JAX waits without a word, and ends the process with a stack trace of C++ when its time is up. So the processes meet before, at the same
    address: process 0 listens, the others say who they are and hold the line, and process 0 lets all of them go at once, whereupon JAX
    takes the port.

    Raises:
      ConfigError: the coordinator is no host:port, its port is taken, two processes have the same id, or were told of different numbers of
        processes, or the time is up.
    """
    host, port = _address(place.coordinator)
    patience = _Patience(place, seconds)
    if place.process:
        _call(host, port, place, patience)
    elif place.processes > 1:
        with _listen(place, port) as listener:
            _gather(listener, place, patience)
    else:
        _listen(place, port).close()  # a taken port is said in our words


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    good = bool(host) and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535
    require(good, f"the coordinator {coordinator!r} is not HOST:PORT with a port from 1 to 65535; set {NAMES[0]} to such as 10.0.0.1:1234")
    return host.strip("[]"), int(port)


def _listen(place: Place, port: int) -> socket.socket:
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")  # where JAX will listen
    try:
        if bind:
            host, port = _address(bind)
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        reason = f"process 0 cannot listen at port {port} of this machine: {os.strerror(error.errno) if error.errno else error}"
        raise ConfigError(f"{reason}; choose a free port for the coordinator {place.coordinator}, the same for all processes") from error


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
                f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))} {'have' if len(absent) > 1 else 'has'} not come"
            )
            with contextlib.suppress(OSError):  # nobody calls, or hangs up at once
                _admit(listener.accept()[0], callers, place)
    except ConfigError as error:
        _answer(callers.values(), str(error))
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
        wrong = f"process {process} was told of {processes} processes, process 0 of {place.processes}; set the same {NAMES[1]} for all"
    elif process in callers and _holds(callers[process]):
        wrong = f"two processes say that they are process {process}; give each its own {NAMES[2]}"
    if wrong:
        print(wrong, flush=True)
        return _answer([line], wrong)
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
    """Any other process: tells process 0 who it is, again and again until it answers, and waits for its word."""
    hello = f"jaxspec {place.processes} {place.process}\n"
    unknown = False
    while True:
        try:
            with socket.create_connection((host, port), timeout=_HELLO_SECONDS) as line:
                line.sendall(hello.encode())
                said = _hold(line, patience)
        except socket.gaierror as error:
            absent = f"the name {host} is not known here ({error.strerror})"
            if not unknown:  # a container's name may come with the container, but a mistake should show at once
                patience.say(f"finds that {absent}; trying again")
            unknown = True
        except OSError as error:
            absent = f"process 0 has not come ({error.strerror or error})"
        else:
            if said == _GO:
                return
            require(not said, said)
            absent = _SILENT
        patience.look(absent)
        time.sleep(_TURN)


def _hold(line: socket.socket, patience: _Patience) -> str:
    """What process 0 says when it has seen all, or why it cannot; empty when the line breaks."""
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
