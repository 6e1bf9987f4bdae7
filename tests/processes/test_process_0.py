"""What process 0 does for all processes of a job."""

import jax
import pytest

from jaxspec.processes import process_0
from jaxspec.processes.process_0 import run_in_process_0_first


@pytest.mark.parametrize("result", [None, 0, "path"])
def test_work_runs_once_whatever_it_returns(result: object) -> None:
    calls = []

    def work() -> object:
        calls.append(1)
        return result

    assert run_in_process_0_first(work) == result
    assert calls == [1]


@pytest.mark.parametrize(("process", "events"), [(0, ["work", "meet"]), (1, ["meet", "work"])])
def test_process_0_works_before_the_others(
    process: int, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(process_0, "wait_for_all", lambda: done.append("meet"))
    run_in_process_0_first(lambda: done.append("work"))
    assert done == events
