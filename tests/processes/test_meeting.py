"""Processes meet before they start JAX: who is missing, who was told something else, and what else
may be at the address."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec.inputs.checked import ConfigError
from jaxspec.processes import meeting as processes
from jaxspec.processes.meeting import meet_processes
from jaxspec.processes.places import JobMember
from tests.conftest import free_port


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> str:
    """A free address; who has not come is named soon."""
    monkeypatch.setattr(processes, "_REPORT_SECONDS", 0.3)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.05)
    return f"127.0.0.1:{free_port()}"


class Arrival(threading.Thread):
    """A process that comes to the meeting, as a thread, and how it ended."""

    def __init__(
        self,
        coordinator: str,
        count: int,
        process: int,
        seconds: float = 20.0,
        **identity: object,
    ) -> None:
        super().__init__(daemon=True)
        self.identity, self.lines = identity, dict[int, socket.socket]()
        self.place, self.seconds, self.refused = JobMember(coordinator, count, process), seconds, ""
        self.start()

    def run(self) -> None:
        try:
            self.lines = meet_processes(self.place, self.seconds, self.identity)
        except ConfigError as error:
            self.refused = str(error)

    def ended(self) -> str:
        self.join(20)
        assert not self.is_alive()
        return self.refused


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_wait_for_each_other_and_name_who_has_not_come(
    coordinator: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def hear(text: str) -> Callable[[], bool]:
        def heard() -> bool:
            nonlocal said
            said += capfd.readouterr().out
            return text in said

        return heard

    first = Arrival(coordinator, 3, 2)
    until(
        hear(
            f"process 2 of 3 has waited 0 s of 20 at {coordinator}: process 0 has not come"
            " (Connection refused)\n"
        )
    )
    second = Arrival(coordinator, 3, 0)
    until(hear(f"of 20 at {coordinator}: process 1 has not come\n"))
    until(hear("process 0 is there and waits for others, which it names\n"))
    host, _, port = coordinator.partition(":")
    # what probes of a port say
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"jaxspec one two {}\n", b"jaxspec 3 1 2\n", b""):
        with socket.create_connection((host, int(port))) as probe:
            probe.sendall(nonsense)
    time.sleep(0.2)
    assert first.is_alive()
    assert second.is_alive()
    third = Arrival(coordinator, 3, 1)
    assert [each.ended() for each in (first, second, third)] == ["", "", ""]
    with socket.create_server((host, int(port))):  # the port is free for JAX
        pass


def test_who_leaves_before_the_others_have_come_is_waited_for_again(coordinator: str) -> None:
    host, _, port = coordinator.partition(":")
    zero = Arrival(coordinator, 3, 0)
    until(lambda: _answers(host, int(port), b"jaxspec 3 1 {}\n"))
    two = Arrival(coordinator, 3, 2)
    time.sleep(0.3)
    assert zero.is_alive()
    assert two.is_alive()
    one = Arrival(coordinator, 3, 1)
    assert [each.ended() for each in (zero, one, two)] == ["", "", ""]


def _answers(host: str, port: int, hello: bytes) -> bool:
    try:
        with socket.create_connection((host, port)) as line:
            line.sendall(hello)
            return line.recv(13) == b"jaxspec wait\n"
    except OSError:
        return False


def test_the_time_is_up_in_all_at_once(coordinator: str) -> None:
    zero, two = Arrival(coordinator, 3, 0, seconds=0.6), Arrival(coordinator, 3, 2)
    told = (
        f"process 0 of 3 has waited 0.6 s at {coordinator}: process 1 has not come."
        " .*JAXSPEC_WAIT_SECONDS"
    )
    with pytest.raises(ConfigError, match=told):
        raise ConfigError(zero.ended())
    assert two.ended() == zero.refused


def test_processes_that_were_told_differently_are_refused(coordinator: str) -> None:
    zero = Arrival(coordinator, 3, 0, seconds=1.0)
    assert (
        Arrival(coordinator, 2, 1)
        .ended()
        .startswith("process 1 expects 2 processes, process 0 expects 3;")
    )
    good = Arrival(coordinator, 3, 1)
    time.sleep(0.3)
    assert (
        Arrival(coordinator, 3, 1).ended().startswith("two processes say that they are process 1")
    )
    assert "process 2 has not come" in zero.ended()
    assert good.ended() == zero.refused


@pytest.mark.parametrize("count", [1, 2])
def test_a_taken_port_is_named_at_once(coordinator: str, count: int) -> None:
    port = int(coordinator.partition(":")[2])
    with socket.create_server(("", port)):
        refused = Arrival(coordinator, count, 0).ended()
        assert refused.startswith(
            f"process 0 cannot listen at port {port} of this machine: Address already in use;"
            " choose a free port"
        )
        assert "(something else answers there)" in Arrival(coordinator, 2, 1, seconds=0.3).ended()


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"go\n", b"220 mail.example ESMTP\n", b"\xff" * 2000]
)
def test_what_another_service_says_is_not_taken_for_process_0(
    coordinator: str, said: bytes
) -> None:
    host, _, port = coordinator.partition(":")
    with socket.create_server((host, int(port))) as service:

        def serve() -> None:
            while True:
                try:
                    with service.accept()[0] as line:
                        line.sendall(said)
                except OSError:  # who called has hung up, or the test is over
                    if service.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        assert (
            "process 0 has not come (something else answers there)"
            in Arrival(coordinator, 2, 1, seconds=0.3).ended()
        )
        service.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("bind", "said"),
    [
        (
            "nowhere",
            (
                "the coordinator 'nowhere' is not HOST:PORT with a port from 1 to 65535; set"
                " JAX_COORDINATOR_BIND_ADDRESS to"
            ),
        ),
        (
            "nowhere.invalid:1234",
            (
                "process 0 cannot listen at JAX_COORDINATOR_BIND_ADDRESS nowhere.invalid:1234: Name"
                " or service not known;"
            ),
        ),
    ],
)
def test_a_bad_address_to_listen_at_is_named_as_such(
    coordinator: str, monkeypatch: pytest.MonkeyPatch, bind: str, said: str
) -> None:
    def unknown(*_: Any, **__: Any) -> socket.socket:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_server", unknown)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bind)
    assert Arrival(coordinator, 1, 0).ended().startswith(said)


def test_a_name_that_is_not_known_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: Any, **__: Any) -> socket.socket:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.05)
    refused = Arrival("nowhere.invalid:1234", 2, 1, seconds=0.3).ended()
    assert "the name nowhere.invalid is not known here (Name or service not known)" in refused
    assert (
        capfd.readouterr().out
        == "process 1 of 2 finds that the name nowhere.invalid is not known here (Name or service"
        " not known); trying again\n"
    )


def test_who_was_started_with_something_else_is_named_with_what(coordinator: str) -> None:
    """Process 0 names all of them, once all have come, the last first; nobody goes on."""
    mine = {"optimizer.learning_rate": 0.001, "steps": 3, "jaxspec": "1 (aa)"}
    other = mine | {"optimizer.learning_rate": 0.002}
    older = {name: value for name, value in mine.items() if name != "steps"} | {"jaxspec": "1 (bb)"}
    arrivals = [
        Arrival(coordinator, 5, process, 20.0, **identity)
        for process, identity in reversed([*enumerate([mine, other, mine, other, older])])
    ]
    told = {arrival.ended() for arrival in arrivals}
    assert told == {
        "processes 1, 3 were not started like process 0: optimizer.learning_rate is 0.001 in"
        " process 0 and 0.002 there. process 4 was not started like process 0: jaxspec is '1 (aa)'"
        " in process 0 and '1 (bb)' there; steps is 3 in process 0 and 'absent' there. Start all"
        " processes with the same command, code and environment"
    }


def test_who_comes_again_with_what_process_0_has_is_let_go(coordinator: str) -> None:
    host, _, port = coordinator.partition(":")
    zero = Arrival(coordinator, 3, 0, steps=3)
    until(lambda: _answers(host, int(port), b'jaxspec 3 1 {"steps": 4}\n'))
    one, two = (Arrival(coordinator, 3, process, steps=3) for process in (1, 2))
    assert [each.ended() for each in (zero, one, two)] == ["", "", ""]
    assert ({*zero.lines}, {*one.lines}, {*two.lines}) == ({1, 2}, {0}, {0})
    zero.lines[1].sendall(b"still there\n")
    assert one.lines[0].recv(20) == b"still there\n"
