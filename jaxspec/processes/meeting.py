"""Meeting of a job's processes, before JAX joins them.

They wait for each other, and check that all were started alike. Process 0 listens at the address of
the coordinator. Each other process connects, and sends its number and the values that it was
started with. Process 0 then releases all of them at once, and JAX takes the port.
"""

import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import format_value
from jaxspec.processes.environment import environment_text, parse_whole_number
from jaxspec.processes.places import VARIABLES, JobMember
from jaxspec.system.terminal import print_line

WAIT_VARIABLE = "JAXSPEC_WAIT_SECONDS"
"""Variable with the seconds that a process waits for the others. The default is 300."""
_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""Variable with the address at which JAX listens.

The default is the coordinator's port at all addresses.
"""
_REPORT_SECONDS = 30.0
"""Seconds between two reports of missing processes."""
_POLL_SECONDS = 0.5
"""Seconds between two checks of the deadline."""
_HELLO_TIMEOUT = 2.0
"""Seconds to connect, and to send the first message."""
_REPLY_WAIT, _REPLY_GO, _REPLY_REFUSED = "jaxspec wait", "jaxspec go", "jaxspec no: "
"""Replies of process 0: the first one, and the two final ones.

The reason of a refusal follows. Any other reply comes from another program.
"""
_NO_REPLY = "process 0 has not come (something else answers there)"
_MAX_HELLO_BYTES = 2**20
"""Maximum length of a message in bytes."""
_MAX_DIFFERENCES = 5
"""Maximum number of differences, or of processes, in an error message."""


class _WaitReporter:
    """Reports missing processes until a deadline."""

    def __init__(self, member: JobMember, timeout: float) -> None:
        self._member, self._timeout = member, timeout
        self._start_time = time.monotonic()
        self._next_report = _REPORT_SECONDS

    def check_deadline(self, absence: str) -> None:
        """Prints `absence` if a report is due.

        Raises:
          ConfigError: the deadline has passed.
        """
        elapsed = time.monotonic() - self._start_time
        if elapsed >= self._timeout:
            raise ConfigError(
                f"{self._member} has waited {self._timeout:g} s at {self._member.coordinator}:"
                f" {absence}. Start all of them within that time, with the same coordinator, or set"
                f" {WAIT_VARIABLE} higher"
            )
        if elapsed >= self._next_report:
            self._next_report += _REPORT_SECONDS
            self.report(
                f"has waited {elapsed:.0f} s of {self._timeout:g} at {self._member.coordinator}:"
                f" {absence}"
            )

    def report(self, message: str) -> None:
        print_line(f"{self._member} {message}")


def meet_processes(
    member: JobMember, timeout: float, job_values: Mapping[str, Any]
) -> dict[int, socket.socket]:
    """Waits for all processes of the job.

    Returns at about the same time in each.

    Args:
      member: this process.
      timeout: seconds to wait.
      job_values: values by name that must equal those of process 0.

    Returns:
      Open connections by process: of process 0 with all others, and of those with process 0.

    Raises:
      ConfigError: the coordinator is not host:port, its port is taken, or the time is up. Also if
        two processes have the same id, or the number of processes or `job_values` differs.
    """
    # JAX alone would wait without output, and end the process with a stack trace of C++.
    host, port = _parse_address(member.coordinator, VARIABLES[0])
    reporter = _WaitReporter(member, timeout)
    values_json = json.dumps(dict(job_values))
    if member.process_id:
        return {0: _call_process_0(host, port, member, reporter, values_json)}
    # Listens even if there is only one process, so that a taken port is explained.
    with _open_listener(member, port) as listener:
        return _gather_processes(listener, member, reporter, json.loads(values_json))


def _parse_address(text: str, variable: str) -> tuple[str, int]:
    """Splits an address, which is the value of `variable`, into host and port.

    Raises:
      ConfigError: the address is malformed.
    """
    host, _, digits = text.rpartition(":")
    port = parse_whole_number(digits) or 0
    subject, remedy = (
        f"the coordinator {format_value(text)}",
        f"set {variable} to such as 10.0.0.1:1234",
    )
    require(
        bool(host) and 1 <= port <= 65535,
        f"{subject} is not HOST:PORT with a port from 1 to 65535; {remedy}",
    )
    try:
        host.encode("idna")  # as the look-up does, whose UnicodeError would not be handled
    except UnicodeError as error:
        raise ConfigError(f"{subject} has no valid name of a host ({error}); {remedy}") from error
    # Brackets enclose an IPv6 address.
    return host.strip("[]"), port


def _open_listener(member: JobMember, port: int) -> socket.socket:
    bind_address, location = environment_text(_BIND_VARIABLE), f"port {port} of this machine"
    remedy = (
        f"choose a free port for the coordinator {member.coordinator}, the same for all processes"
    )
    try:
        if bind_address:
            location = f"{_BIND_VARIABLE} {bind_address}"
            remedy = "set it to an address of this machine with a free port, or unset it"
            host, port = _parse_address(bind_address, _BIND_VARIABLE)
            return socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        # All addresses, of IPv6 and IPv4.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        # Except for `gaierror`, the text of an error repeats the address.
        reason = (
            os.strerror(error.errno)
            if error.errno and not isinstance(error, socket.gaierror)
            else error.strerror or error
        )
        raise ConfigError(f"process 0 cannot listen at {location}: {reason}; {remedy}") from error


def _gather_processes(
    listener: socket.socket, member: JobMember, reporter: _WaitReporter, job_values: dict[str, Any]
) -> dict[int, socket.socket]:
    """Waits in process 0 for all others, then releases them.

    Raises:
      ConfigError: the time is up, or a process was started differently. All others get the message.
    """
    connections: dict[int, socket.socket] = {}
    mismatches: dict[int, str] = {}
    listener.settimeout(_POLL_SECONDS)
    _extend_file_limit(member.process_count)
    try:
        while True:
            # A process that has hung up, perhaps because it was killed, may be started again.
            connections = {
                process_id: connection
                for process_id, connection in connections.items()
                if _is_connected(connection)
            }
            missing_ids = [
                process_id
                for process_id in range(1, member.process_count)
                if process_id not in connections
            ]
            # Checked only now, so that the error names all processes that differ.
            if not missing_ids:
                require(not mismatches, _summarize_mismatches(mismatches))
                _send_reply(connections.values(), _REPLY_GO)
                return connections
            reporter.check_deadline(
                f"process{'es' * (len(missing_ids) > 1)} {', '.join(map(str, missing_ids))}"
                f" {'have' if len(missing_ids) > 1 else 'has'} not come"
            )
            with contextlib.suppress(OSError):  # nobody has called, or the caller hung up
                caller = _admit_caller(listener.accept()[0], connections, member)
                if caller is not None:
                    process_id, caller_values = caller
                    mismatches.pop(process_id, None)  # from an earlier call
                    if caller_values != job_values:
                        mismatches[process_id] = _describe_mismatch(job_values, caller_values)
    except ConfigError as error:
        _close_with_reply(connections.values(), f"{_REPLY_REFUSED}{error}")
        raise


def _extend_file_limit(process_count: int) -> None:
    """Raises the limit of open files, as far as allowed."""
    # Process 0 has a connection with each process.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * process_count + 1024
    if soft != resource.RLIM_INFINITY and soft < needed:
        new_limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, new_limit), hard))


def _describe_mismatch(job_values: Mapping[str, Any], other_values: Mapping[str, Any]) -> str:
    """Describes the differences between another process and process 0."""
    differences = [
        f"{name} is {format_value(job_values.get(name, 'absent'))} in process 0 and"
        f" {format_value(other_values.get(name, 'absent'))} there"
        for name in sorted(job_values.keys() | other_values.keys())
        if job_values.get(name) != other_values.get(name)
    ]
    hidden_count = len(differences) - _MAX_DIFFERENCES
    return "; ".join(differences[:_MAX_DIFFERENCES]) + (
        f"; and {hidden_count} more" if hidden_count > 0 else ""
    )


def _summarize_mismatches(mismatches: Mapping[int, str]) -> str:
    """Describes all differences, with the processes of each."""
    sentences = []
    for mismatch in dict.fromkeys(mismatches[process_id] for process_id in sorted(mismatches)):
        process_ids = sorted(
            process_id for process_id, other in mismatches.items() if other == mismatch
        )
        process_list = ", ".join(map(str, process_ids[:_MAX_DIFFERENCES]))
        hidden_count = len(process_ids) - _MAX_DIFFERENCES
        process_list += f" and {hidden_count} more" if hidden_count > 0 else ""
        is_plural = len(process_ids) > 1
        clause = "es {} were" if is_plural else " {} was"
        sentences.append(
            f"process{clause.format(process_list)} not started like process 0: {mismatch}"
        )
    remedy = "Start all processes with the same command, code and environment"
    return f"{'. '.join(sentences)}. {remedy}"


def _admit_caller(
    connection: socket.socket, connections: dict[int, socket.socket], member: JobMember
) -> tuple[int, dict[str, Any]] | None:
    """Accepts a call of another process.

    Returns its number and its values, or None if the caller is refused or not of this job.
    """
    connection.settimeout(_HELLO_TIMEOUT)
    try:
        protocol, *number_texts, values_json = _read_lines(connection)[0].split(" ", 3)
        numbers, job_values = list(map(parse_whole_number, number_texts)), json.loads(values_json)
    except (OSError, ValueError):  # such as a probe of the port, which sends nothing or other text
        protocol, numbers, job_values = "", list[int | None](), {}
    is_valid = protocol == "jaxspec" and len(numbers) == 2 and isinstance(job_values, dict)
    process_count, process_id = numbers if is_valid else (None, None)
    if process_count is None or process_id is None:
        return connection.close()
    refusal = ""
    if process_count != member.process_count:
        refusal = (
            f"process {process_id} expects {process_count} processes, process 0 expects"
            f" {member.process_count}; set the same {VARIABLES[1]} for all"
        )
    elif process_id in connections and _is_connected(connections[process_id]):
        refusal = (
            f"two processes say that they are process {process_id}; give each its own"
            f" {VARIABLES[2]}"
        )
    if refusal:
        print_line(refusal)
        return _close_with_reply([connection], f"{_REPLY_REFUSED}{refusal}")
    connection.sendall(f"{_REPLY_WAIT}\n".encode())
    # `_is_connected` must not block.
    connection.settimeout(0)
    connections[process_id] = connection
    return process_id, job_values


def _send_reply(connections: Iterable[socket.socket], text: str) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # hung up, which is noticed when it is read
            connection.sendall(f"{text}\n".encode())


def _close_with_reply(connections: Iterable[socket.socket], text: str) -> None:
    connections = list(connections)
    _send_reply(connections, text)
    for connection in connections:
        connection.close()


def _is_connected(connection: socket.socket) -> bool:
    """Returns whether the other end is still connected."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _call_process_0(
    host: str, port: int, member: JobMember, reporter: _WaitReporter, values_json: str
) -> socket.socket:
    """Calls process 0 until it answers, and waits to be released. Returns the connection."""
    hello = f"jaxspec {member.process_count} {member.process_id} {values_json}\n"
    is_host_unknown = False
    while True:
        try:
            with contextlib.ExitStack() as cleanup:
                connection = socket.create_connection((host, port), timeout=_HELLO_TIMEOUT)
                cleanup.enter_context(connection)
                connection.sendall(hello.encode())
                reply = _await_reply(connection, reporter)
                # Otherwise the connection is closed, and the next attempt opens another.
                if reply == _REPLY_GO:
                    cleanup.pop_all()
                    return connection
        except socket.gaierror as error:
            absence = f"the name {host} is not known here ({error.strerror})"
            # A container's name may become known only when it starts, so the call is repeated. A
            # wrong name should be reported at once, not after the first interval.
            if not is_host_unknown:
                reporter.report(f"finds that {absence}; trying again")
            is_host_unknown = True
        except OSError as error:
            absence = f"process 0 has not come ({error.strerror or error})"
        else:
            require(not reply.startswith(_REPLY_REFUSED), reply.removeprefix(_REPLY_REFUSED))
            absence = _NO_REPLY
        reporter.check_deadline(absence)
        time.sleep(_POLL_SECONDS)


def _await_reply(connection: socket.socket, reporter: _WaitReporter) -> str:
    """Waits for a final reply. Returns an empty text if the connection breaks."""
    connection.settimeout(_POLL_SECONDS)
    absence = _NO_REPLY
    while True:
        try:
            # Messages of `peers` may already follow the final reply.
            for reply in _read_lines(connection):
                if reply != _REPLY_WAIT:
                    return reply
            absence = "process 0 is there and waits for others, which it names"
        except TimeoutError:
            pass
        except ConnectionError:
            return ""
        reporter.check_deadline(absence)


def _read_lines(connection: socket.socket) -> list[str]:
    """Receives lines of text. Returns one empty line if none is complete."""
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > _MAX_HELLO_BYTES:
            return [""]
        chunk = connection.recv(2**16)
        if not chunk:
            return [""]
        data += chunk
    return [text.strip() for text in data.decode(errors="replace").splitlines()]
