"""Queues of a pipelined run, with sides that only count."""

import random
import threading
import time
from typing import Any

import pytest

from jaxspec.run.pipelined import account as accounts
from jaxspec.run.pipelined.account import Account
from jaxspec.run.pipelined.generation import SentBatch
from jaxspec.run.pipelined.queue import BatchPlan, BatchQueue, ThreadQueue, TurnQueue
from jaxspec.run.state import BatchRecord, GenerationProgress

STEPS = 9


class Side:
    """Makes batches of their number and the version that was published, after a random stall."""

    def __init__(self, stall: float = 0.0, failing: int = STEPS) -> None:
        self.account, self._abort = Account(), threading.Event()
        self._random, self._stall, self._failing = random.Random(0), stall, failing
        self.threads: set[int] = set()

    def make_batch(self, batch: int, published: int, progress: GenerationProgress) -> Any:
        self.threads.add(threading.get_ident())
        if batch == self._failing:
            raise OSError("the scorer is gone")
        if self._abort.wait(self._random.random() * self._stall):
            return None
        progress.generated += 1
        return SentBatch(published, BatchRecord(batch, {}, []), progress.generated)

    def evaluate(self, published: int, batch: int) -> dict[str, float]:
        return {"version": float(published), "batch": float(batch)}

    def abort(self) -> None:
        self._abort.set()


def numbers(sent: SentBatch) -> tuple[int, int, int]:
    return sent.record.batch, sent.rollout, sent.generated


def queue_of(kind: type, side: Any, lag: int, first_batch: int = 0, version: int = 0) -> BatchQueue:
    plan = BatchPlan(lag, first_batch, version, STEPS)
    sent = () if kind is TurnQueue else (lambda weights: weights, lambda batch: batch)
    return kind(side, plan, GenerationProgress(first_batch), *sent)


@pytest.mark.parametrize("kind", [TurnQueue, ThreadQueue])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("slow_side", ["learner", "generator", "neither"])
def test_batches_come_in_order_each_from_the_version_of_its_lag(
    kind: type, lag: int, slow_side: str
) -> None:
    stall = 0.02
    side = Side(stall if slow_side == "generator" else 0)
    queue = queue_of(kind, side, lag)
    queue.publish(0, 0)
    batches: list[Any] = []
    for version in range(1, STEPS + 1):
        batches.append(numbers(queue.take_batch()))
        if slow_side == "learner":
            time.sleep(random.Random(version).random() * stall)
        queue.publish(version, version)
    assert batches == [(n, max(0, n - lag), n + 1) for n in range(STEPS)]
    assert queue.evaluate_last() == {"version": STEPS, "batch": STEPS - 1}
    queue.close()
    assert (side.threads == {threading.get_ident()}) == (kind is TurnQueue)


@pytest.mark.parametrize("kind", [TurnQueue, ThreadQueue])
def test_a_resumed_run_goes_on_with_the_version_that_was_saved(kind: type) -> None:
    """At version 4 with lag 2, batches 4 and 5 are saved, and 6 is made by version 4."""
    queue = queue_of(kind, Side(), 2, first_batch=6, version=4)
    queue.publish(4, 4)
    assert numbers(queue.take_batch()) == (6, 4, 7)
    queue.publish(5, 5)
    assert numbers(queue.take_batch()) == (7, 5, 8)
    queue.close()


def test_finished_batches_come_before_the_error_of_a_later_one() -> None:
    queue = queue_of(ThreadQueue, Side(failing=2), 3)
    queue.publish(0, 0)
    time.sleep(0.05)
    assert [queue.take_batch().record.batch for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the scorer is gone"):
        queue.take_batch()
    queue.close()


@pytest.mark.parametrize("published", [True, False])
def test_closing_ends_the_thread_in_a_batch_and_between_two(published: bool) -> None:
    side = Side(stall=1000)
    queue = queue_of(ThreadQueue, side, 1)
    if published:
        queue.publish(0, 0)
    before = time.monotonic()
    queue.close()
    assert time.monotonic() - before < 10
    assert "generator" not in {thread.name for thread in threading.enumerate()}


def test_an_account_charges_every_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0])
    monkeypatch.setattr(accounts.time, "perf_counter", lambda: next(clock))
    account = Account()
    with account.charge("train"), account.charge("swap"):
        pass
    assert account.take_seconds() == {"other": 6.0, "train": 6.0, "swap": 3.0}
    assert account.take_seconds() == {"other": 6.0}
