"""What a program that a policy writes can see, reach and take: itself and its share, and nothing of
it is left."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec.rewards import code
from jaxspec.rewards.pool import RewardPool
from jaxspec.rewards.worker import check_program
from tests.rewards.test_code import DEADLINE, RIGHT, TESTS, passes
from tests.rewards.test_pool import alive, children

needs_sandbox = pytest.mark.skipif(not code.find_sandbox(), reason="no sandbox works here")


@pytest.fixture(scope="module")
def patient() -> Iterator[RewardPool]:
    """For verdicts that take seconds on a busy machine."""
    with RewardPool(1, 5 * DEADLINE) as made:
        made([])
        yield made


def judged_here(folder: Path, program: str, sandbox: str, tests: str = TESTS) -> tuple[bool, int]:
    """Verdict on a program without a pool, and processes that it leaves."""
    script = (
        "import sys; from jaxspec.rewards.code import passes_tests\n"
        "from jaxspec.rewards.descendants import adopt_orphans, list_children\nadopt_orphans()\n"
        "print(passes_tests(*sys.argv[1:3], 20.0, *sys.argv[3:5]), len(list_children()))"
    )
    words = [sys.executable, "-c", script, tests, program, str(folder / "own"), sandbox]
    verdict, left = subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()
    return verdict == "True", int(left)


FORKS = (
    "import os, time\nfor i in range(20):\n    if os.fork() == 0:\n        os.setsid()\n"
    f"        time.sleep(100)\n{RIGHT}"
)


def test_processes_that_it_starts_do_not_outlive_it_without_a_sandbox(tmp_path: Path) -> None:
    assert judged_here(tmp_path, FORKS, "") == (True, 0)


@needs_sandbox
def test_processes_that_it_starts_do_not_outlive_it() -> None:
    """Although they want a session of their own."""
    program = FORKS
    with RewardPool(1, DEADLINE) as own:
        assert passes(own, program) is True
        assert len(below := children(own._process.pid)) == 1, "the worker"
        assert passes(own, f"{program}\ntime.sleep(100)") == {"timeout": True}
        assert passes(own, RIGHT) is True
        assert len(children(own._process.pid)) == 1
    assert not any(map(alive, below))


@needs_sandbox
def test_a_program_sees_no_network(patient: RewardPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\n{RIGHT}"
        assert passes(patient, program) is False


@pytest.mark.slow
def test_folders_go_away_however_a_program_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    deep = f"import os\nfor _ in range(1200):\n    os.mkdir('d'); os.chdir('d')\n{RIGHT}"
    with RewardPool(2, 3 * DEADLINE) as own:
        assert passes(own, deep) is True
        assert passes(own, "open('big', 'w').write('0' * 10**5)\nwhile True: pass") is not True
        assert passes(own, RIGHT) is True
        assert list(tmp_path.glob("jaxspec-*/*")) == []
    assert list(tmp_path.iterdir()) == []


SEES = """
import glob, os
def f(x):
    processes = [name for name in os.listdir('/proc') if name.isdigit()]
    files = glob.glob('/home/*') + glob.glob('/work*') + glob.glob('/var/*') + glob.glob('/tmp/*')
    return len(processes) <= 1, os.getuid() != 0, files, os.path.exists(TESTS)
"""


@needs_sandbox
def test_a_program_sees_itself_alone_and_is_nobody(patient: RewardPool) -> None:
    program = SEES.replace("TESTS", repr(__file__))
    assert passes(patient, program, "assert f(1) == (True, True, [], False)") is True


WRITES = """
def f(x):
    written = []
    for path in ('/', '/usr/', '/dev/shm/', PREFIX, '/tmp/'):
        try:
            open(path + 'jaxspec-test', 'w').close()
            written.append(path)
        except OSError:
            pass
    return written
"""


@needs_sandbox
def test_a_program_writes_to_its_own_files_alone(patient: RewardPool) -> None:
    program = WRITES.replace("PREFIX", repr(f"{sys.base_prefix}/"))
    tests = "assert f(1) == ['/dev/shm/', '/tmp/']"
    assert passes(patient, program, tests) is True
    assert not Path("/dev/shm/jaxspec-test").exists()
    assert not Path("/tmp/jaxspec-test").exists()


@needs_sandbox
def test_the_limit_of_processes_binds(patient: RewardPool) -> None:
    program = """
import os, time
def f(x):
    for number in range(200):
        try:
            if os.fork() == 0:
                time.sleep(100)
        except OSError:
            return number
"""
    assert passes(patient, program, "assert 10 < f(1) < 64") is True


@pytest.mark.parametrize("sandbox", ["", pytest.param("namespaces", marks=needs_sandbox)])
def test_the_limit_of_memory_is_that_of_all_processes(tmp_path: Path, sandbox: str) -> None:
    """Each of them stays below its own."""
    program = """
import os, time
def f(x):
    for number in range(x):
        if os.fork() == 0:
            kept = b'x' * (300 * 2**20)
            time.sleep(100)
    time.sleep(0.2 if x == 1 else 60)
    return x
"""
    assert judged_here(tmp_path, program, sandbox, "assert f(8) == 8") == (False, 0)
    assert judged_here(tmp_path, program, sandbox, "assert f(1) == 1") == (True, 0)


@needs_sandbox
def test_shared_memory_that_nobody_is_attached_to_has_no_room(patient: RewardPool) -> None:
    program = """
import ctypes
def f(x):
    return ctypes.CDLL(None).shmget(0, 2**20, 0o1600) + 3
"""
    assert passes(patient, program, "assert f(1) == 2") is True


def test_what_ends_before_the_program_begins_says_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_build_command", lambda *_: ["/bin/false"])
    answer = check_program(TESTS, RIGHT, "", seconds=2.0, folder=str(tmp_path / "own"))
    assert isinstance(answer, dict)
    assert "the program's process ended before it ran the program" in answer["error"]
