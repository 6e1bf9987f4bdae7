"""Sides of a pipelined run in processes of their own."""

import dataclasses
import json
import queue
import threading

import jax

from jaxspec.links import MeshLink
from jaxspec.processes import mailbox, roles
from jaxspec.processes.global_arrays import gather_over_processes
from jaxspec.processes.mailbox import ArrayServer
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.pipelined.courier import BATCHES, WEIGHTS, Courier
from jaxspec.run.pipelined.generation import GenerationSide, SentBatch
from jaxspec.run.pipelined.programs import PipelinedSchedule
from jaxspec.run.pipelined.queue import BatchPlan
from jaxspec.run.state import BatchRecord
from jaxspec.state import PyTree
from jaxspec.system.interrupt import Interrupt

_START, _LAST, _CLOSED, _STOP = "start", "last_evaluation", "closed", "stop"
"""Names of messages: where generation starts, metrics of the last weights, exit status of a run
that needs no more batches, and a signal of the generator's side."""


class ProcessQueue:
    """Queue of a generator in other processes, as the learner's side sees it.

    Args:
      schedule: programs of the learner's side.
      plan: order of the batches.
      generated: rollouts generated before.
      evaluated: batches whose evaluation is recorded before.
    """

    def __init__(
        self, schedule: PipelinedSchedule, plan: BatchPlan, generated: int, evaluated: int
    ) -> None:
        self._weights, self._batches = _open_couriers(schedule)
        self._schedule, self._lag = schedule, schedule.lag
        start = {
            "first_batch": plan.first_batch,
            "first_version": plan.first_version,
            "generated": generated,
            "evaluated": evaluated,
        }
        if roles.is_first_member():
            mailbox.post_message(_START, json.dumps(start).encode())
        # Threads hide the transport behind the learner's work. Programs that they start have no
        # collectives, whose order among processes must be fixed.
        self._offers: queue.SimpleQueue[tuple[int, PyTree] | None] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[SentBatch | BaseException] = queue.SimpleQueue()
        batches = range(plan.first_batch, plan.steps)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, name="transport", daemon=True)
            for work in (self._offer_weights, lambda: self._receive_batches(batches))
        ]
        for thread in self._threads:
            thread.start()

    def publish(self, version: int, packed: PyTree) -> None:
        """Offers weights to the generator."""
        self._offers.put((version, packed))

    def take_batch(self) -> SentBatch:
        """Returns the next batch. Waits for it."""
        received = self._received.get()
        if isinstance(received, BaseException):
            raise received
        return received

    def _offer_weights(self) -> None:
        while (offer := self._offers.get()) is not None:
            version, packed = offer
            self._weights.offer(version, packed)
            # All processes have read the messages of versions whose batches are learned from.
            self._weights.forget(version - self._lag - 2)

    def _receive_batches(self, numbers: range) -> None:
        try:
            for number in numbers:
                received = self._batches.receive(number, self._closed.is_set)
                if received is None:
                    return
                packed, message = received
                rollout = jax.block_until_ready(self._schedule.unpack_batch(packed))
                record = BatchRecord(**message["record"])
                self._received.put(SentBatch(rollout, record, message["generated"]))
        except Exception as error:  # noqa: BLE001  # the main thread raises it
            self._received.put(error)

    def evaluate_last(self) -> dict[str, float]:
        """Waits for the evaluation of the weights after the last update."""
        content = None
        while content is None:
            content = mailbox.wait_for_message(_LAST)
        return json.loads(content)

    def received_signal(self) -> int:
        """Returns the signal that the generator's side got, or 0."""
        content = mailbox.read_message(_STOP)
        return int(content) if content else 0

    def close(self, status: int) -> None:
        """Tells the generator to end, with an exit status."""
        self._closed.set()
        self._offers.put(None)
        # A thread that is inside JAX while Python ends would abort the process.
        for thread in self._threads:
            thread.join()
        if roles.is_first_member():
            mailbox.post_message(_CLOSED, str(status).encode())


def run_generator(
    side: GenerationSide,
    schedule: PipelinedSchedule,
    evaluations: Evaluations,
    steps: int,
    interrupt: Interrupt,
) -> int:
    """Makes batches until the learner needs no more. Returns the exit status."""
    interrupt.watch_alone()
    weights, batches = _open_couriers(schedule)
    closing = _ClosingWatch(side, interrupt)
    content = None
    while content is None:
        content = mailbox.wait_for_message(_START)
    start = json.loads(content)
    evaluations.truncate_records_from(start["evaluated"])
    plan = BatchPlan(schedule.lag, start["first_batch"], start["first_version"], steps)
    progress = side.empty_progress(start["generated"])
    version, published = -1, None
    # After the last batch, the weights of the last update are evaluated.
    for batch in range(plan.first_batch, steps + 1):
        needed = steps if batch == steps else plan.version_of(batch)
        if needed != version:
            with side.account.charge("idle_generate"):
                received = weights.receive(needed, closing.is_closed)
            if closing.is_agreed(received is None):
                return closing.status
            assert received is not None, "it is not closed"
            version, (published, _) = needed, received
        if batch == steps:
            metrics = side.evaluate(published, steps - 1)
            if roles.is_first_member():
                mailbox.post_message(_LAST, json.dumps(metrics).encode())
            break
        sent = side.make_batch(batch, published, progress)
        if sent is None:
            return closing.status
        message = {"record": dataclasses.asdict(sent.record), "generated": sent.generated}
        batches.offer(batch, sent.rollout, message)
        # The learner has taken what was offered before the version that it has just published.
        batches.forget(batch - schedule.lag - 2)
    return closing.wait()


def _open_couriers(schedule: PipelinedSchedule) -> tuple[Courier, Courier]:
    server = ArrayServer()
    weight_link, batch_link = schedule.weight_link, schedule.batch_link
    assert isinstance(weight_link, MeshLink), "processes have meshes of their own"
    assert isinstance(batch_link, MeshLink), "processes have meshes of their own"
    return Courier(WEIGHTS, weight_link, server), Courier(BATCHES, batch_link, server)


class _ClosingWatch:
    """Watches in a thread whether the learner needs no more batches, and for signals here."""

    def __init__(self, side: GenerationSide, interrupt: Interrupt) -> None:
        self._side, self._interrupt = side, interrupt
        self._closed = threading.Event()
        self._status = 0
        threading.Thread(target=self._watch, name="closing", daemon=True).start()

    @property
    def status(self) -> int:
        """Exit status of the run, once it is closed."""
        return self.wait()

    def is_closed(self) -> bool:
        """Returns whether the learner needs no more batches."""
        return self._closed.is_set()

    def is_agreed(self, is_closed: bool) -> bool:
        """Returns whether any process of this side says that it is closed."""
        return bool(gather_over_processes(int(is_closed)).any())

    def wait(self) -> int:
        """Waits until it is closed. Returns the exit status."""
        self._closed.wait()
        return self._status

    def _watch(self) -> None:
        is_forwarded = False
        while True:
            content = mailbox.wait_for_message(_CLOSED)
            if content is not None:
                self._status = int(content)
                self._closed.set()
                self._side.abort()
                return
            if self._interrupt.received_signal and not is_forwarded:
                mailbox.post_message(_STOP, str(self._interrupt.received_signal).encode())
                is_forwarded = True
