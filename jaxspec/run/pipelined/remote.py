"""Sides of a pipelined run in processes of their own."""

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.host.comparison import SpeedComparison
from jaxspec.links import MeshLink
from jaxspec.processes import mailbox, roles
from jaxspec.processes.global_arrays import any_over_processes
from jaxspec.rl.optimizers import Diverged
from jaxspec.run.batches import NoBatch
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.pipelined.generation import GenerationSide, SentBatch
from jaxspec.run.pipelined.programs import PipelinedSchedule
from jaxspec.run.pipelined.queue import BatchPlan
from jaxspec.run.pipelined.transport import BATCHES, WEIGHTS, TreeTransport
from jaxspec.run.state import BatchRecord
from jaxspec.state import PyTree
from jaxspec.step import Sizes
from jaxspec.system.interrupt import Interrupt

NO_RESULT = 1
"""Exit status of a run that ends by `Diverged`."""
_START = "start"
"""Message with the batch and version at which generation starts."""
_LAST_EVALUATION = "last_evaluation"
"""Message with the metrics of the weights after the last update."""
_COMPARISON = "comparison"
"""Message with the comparison with plain decoding."""
_HAS_ENDED = "has_ended"
"""Message with 1 if the run has no batch left to make, else 0."""
_SIZES = "sizes"
"""Message with the sizes that the generator's side has chosen."""
_FAILURE = "failure"
"""Message with a batch that cannot be made, and why."""
_CLOSED = "closed"
"""Message that the learner needs no more batches."""
_STATUS = "status"
"""Message with the exit status of the learner."""
_SIGNAL = "signal"
"""Message with a signal that the generator's side got."""
_POLL_SECONDS = 0.5
"""Seconds between two looks for messages that may never come."""


Comparer = Callable[[PyTree, int], SpeedComparison]
"""Compares speculative with plain decoding, with published weights on the prompts of the last of so
many rollouts."""


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
        self._weights, self._batches = _open_transports(schedule)
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
        self._received: queue.SimpleQueue[SentBatch | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        batches = range(plan.first_batch, plan.steps)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=work, name="transport", daemon=True)
            for work in ((self._offer_weights,), (self._receive_batches, batches))
        ]
        for thread in self._threads:
            thread.start()

    def publish(self, version: int, packed: PyTree) -> None:
        """Offers weights to the generator."""
        self._offers.put((version, packed))

    def take_batch(self) -> SentBatch:
        """Returns the next batch. Waits for it, and raises errors of the transport."""
        received = self._received.get()
        if received is None:
            assert self._error is not None, "a thread ends the queue by an error alone"
            raise self._error
        return received

    def evaluate_last(self) -> dict[str, float]:
        """Waits for the evaluation of the weights after the last update."""
        content = mailbox.receive_message(_LAST_EVALUATION, lambda: self._error is not None)
        if content is None:
            assert self._error is not None, "only an error ends the wait"
            raise self._error
        return json.loads(content)

    def count_waiting(self) -> int:
        """Counts the batches that wait for the learner."""
        return self._received.qsize()

    def received_signal(self) -> int:
        """Returns a signal that the generator's side got. 0 if there was none."""
        content = mailbox.read_message(_SIGNAL)
        return int(content) if content else 0

    def close(self) -> None:
        """Tells the generator that no more batches are needed."""
        self._closed.set()
        self._offers.put(None)
        # A thread that is inside JAX while Python ends would abort the process.
        for thread in self._threads:
            thread.join()
        if roles.is_first_member():
            mailbox.post_message(_CLOSED, b"")

    # ---- called in threads

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs work of a thread, and keeps its error for the main thread."""
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001  # the main thread raises it
            self._error = error
            self._received.put(None)

    def _offer_weights(self) -> None:
        while (offer := self._offers.get()) is not None:
            version, packed = offer
            self._weights.offer(version, packed)
            # All processes have read the messages of versions whose batches are learned from.
            self._weights.forget(version - self._lag - 2)

    def _receive_batches(self, numbers: range) -> None:
        for number in numbers:
            received = self._batches.receive(
                number,
                lambda number=number: self._closed.is_set() or _read_failure(number) is not None,
            )
            if received is None:
                if failure := _read_failure(number):
                    raise failure
                return
            packed, message = received
            # First, so that the learner's devices never wait for a program whose input travels.
            packed = jax.block_until_ready(packed)
            rollout = jax.block_until_ready(self._schedule.unpack_batch(packed))
            record = BatchRecord(**message["record"])
            self._received.put(SentBatch(rollout, record, message["generated"]))


def _read_failure(batch: int) -> NoBatch | None:
    """Returns why a batch cannot be made. None if it may come."""
    content = mailbox.read_message(_FAILURE)
    failure = None if content is None else NoBatch(**json.loads(content))
    return failure if failure is not None and failure.batch <= batch else None


def receive_comparison() -> SpeedComparison:
    """Waits for the comparison with plain decoding, which the generator's side makes."""
    content = mailbox.receive_message(_COMPARISON)
    assert content is not None, "nothing ends the wait"
    return SpeedComparison(**json.loads(content))


def send_engine_sizes(sizes: Sizes) -> None:
    """Sends the sizes of generation, which its side has chosen, to the learner's side."""
    if roles.is_first_member():
        mailbox.post_message(_SIZES, json.dumps(sizes._asdict()).encode())


def receive_engine_sizes(sizes: Sizes) -> Sizes:
    """Waits for the sizes of generation, and returns them with the learner's own."""
    content = mailbox.receive_message(_SIZES)
    assert content is not None, "nothing ends the wait"
    return Sizes(**json.loads(content))._replace(tokens=sizes.tokens)


def announce_start(learner_mesh: Mesh, has_ended: bool) -> None:
    """Tells the generator's processes whether the run has any batch left to make.

    Does nothing in a job whose processes all work together.
    """
    if _is_split_learner(learner_mesh):
        mailbox.post_message(_HAS_ENDED, str(int(has_ended)).encode())


def receive_has_ended() -> bool:
    """Waits for the learner to restore the run. Returns whether no batch is left to make."""
    content = mailbox.receive_message(_HAS_ENDED)
    assert content is not None, "nothing ends the wait"
    return content == b"1"


def wait_for_status() -> int:
    """Waits until the learner's processes are done. Returns their exit status.

    Raises:
      Diverged: theirs is `NO_RESULT`.
    """
    while (content := mailbox.read_message(_STATUS)) is None:
        time.sleep(_POLL_SECONDS)
    # An error also ends this process without JAX's shutdown, which would look for the learner.
    if int(content) == NO_RESULT:
        raise Diverged("the run has ended without a result; the processes that learn say why")
    return int(content)


def post_status(learner_mesh: Mesh, status: int) -> None:
    """Tells the generator's processes the exit status of a run, once it is over.

    Does nothing in a job whose processes all work together.
    """
    if _is_split_learner(learner_mesh):
        mailbox.post_message(_CLOSED, b"")
        mailbox.post_message(_STATUS, str(status).encode())


def _is_split_learner(learner_mesh: Mesh) -> bool:
    """Returns whether this process is the learner's first, and the generator has others."""
    is_split = roles.member_count() < jax.process_count()
    return is_split and roles.owns_part(learner_mesh) and roles.is_first_member()


def run_generator(
    side: GenerationSide,
    schedule: PipelinedSchedule,
    evaluations: Evaluations,
    steps: int,
    interrupt: Interrupt,
    compare: Comparer | None,
) -> int:
    """Makes batches until the learner needs no more. Returns the exit status of the learner.

    `compare` compares decoding with published weights at the end of the run.
    """
    closing = _ClosingWatch(side, interrupt)
    with interrupt.exit_on_signal("waiting for the learner to start"):
        content = mailbox.receive_message(_START, closing.is_closed)
    interrupt.keep_signals()
    closing.forwards_signals = True
    if not any_over_processes(content is None):
        assert content is not None, "the learner has started"
        last = _make_batches(side, schedule, evaluations, steps, json.loads(content), closing)
        if last is not None and compare is not None:
            with interrupt.exit_on_signal("comparing with plain decoding"):
                result = compare(*last)
            if roles.is_first_member():
                mailbox.post_message(_COMPARISON, json.dumps(result._asdict()).encode())
    closing.join()
    return wait_for_status()


def _make_batches(
    side: GenerationSide,
    schedule: PipelinedSchedule,
    evaluations: Evaluations,
    steps: int,
    start: Mapping[str, int],
    closing: "_ClosingWatch",
) -> tuple[PyTree, int] | None:
    """Makes batches until there are no more, or the learner needs none.

    After the last one, returns the published weights and the number of rollouts.
    """
    weights, batches = _open_transports(schedule)
    evaluations.truncate_records_from(start["evaluated"])
    plan = BatchPlan(schedule.lag, start["first_batch"], start["first_version"], steps)
    progress = side.make_progress(start["generated"])
    version, published = -1, None
    numbers = range(plan.first_batch, steps)
    # After the last batch, the weights of the last update are evaluated.
    for batch in (*numbers, plan.last_version):
        is_over = batch == plan.last_version
        needed = plan.last_version if is_over else plan.find_version(batch)
        if needed != version:
            with side.account.charge("idle_generate"):
                received = jax.block_until_ready(weights.receive(needed, closing.is_closed))
            if any_over_processes(received is None):
                return None
            assert received is not None, "it is not closed"
            version, (published, _) = needed, received
        if is_over:
            metrics = side.evaluate(published, plan.last_version - 1)
            if roles.is_first_member():
                mailbox.post_message(_LAST_EVALUATION, json.dumps(metrics).encode())
            break
        try:
            sent = side.make_batch(batch, published, progress)
        except Diverged as error:
            # The learner's side ends the run, with words.
            _post_failure(batch, error)
            return None
        if sent is None:
            return None
        message = {"record": dataclasses.asdict(sent.record), "generated": sent.generated}
        batches.offer(batch, sent.rollout, message)
        # The learner has taken what was offered before the version that it has just published.
        batches.forget(batch - schedule.lag - 2)
    return published, progress.generated


def _post_failure(batch: int, error: Diverged) -> None:
    """Tells the learner's side that a batch cannot be made."""
    if roles.is_first_member():
        samples = error.samples if isinstance(error, NoBatch) else []
        failure = {"message": str(error), "batch": batch, "samples": samples}
        mailbox.post_message(_FAILURE, json.dumps(failure).encode())


def _open_transports(schedule: PipelinedSchedule) -> tuple[TreeTransport, TreeTransport]:
    server = mailbox.open_server()
    weight_link, batch_link = schedule.weight_link, schedule.batch_link
    assert isinstance(weight_link, MeshLink), "processes have meshes of their own"
    assert isinstance(batch_link, MeshLink), "processes have meshes of their own"
    return TreeTransport(WEIGHTS, weight_link, server), TreeTransport(BATCHES, batch_link, server)


class _ClosingWatch:
    """Watches in a thread whether the learner needs no more batches, and for signals here."""

    def __init__(self, side: GenerationSide, interrupt: Interrupt) -> None:
        self.forwards_signals = False
        """Whether signals of this process are sent to the learner."""
        self._side, self._interrupt = side, interrupt
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="closing", daemon=True)
        self._thread.start()

    def is_closed(self) -> bool:
        """Returns whether the learner needs no more batches."""
        return self._closed.is_set()

    def join(self) -> None:
        """Waits until the learner needs no more batches."""
        # A thread that is inside JAX while Python ends would abort the process.
        self._thread.join()

    def _watch(self) -> None:
        # Nothing waits for these messages, since most runs have none for hours.
        is_forwarded = False
        while mailbox.read_message(_CLOSED) is None:
            number = self._interrupt.received_signal
            if number and self.forwards_signals and not is_forwarded:
                mailbox.post_message(_SIGNAL, str(number).encode())
                is_forwarded = True
            time.sleep(_POLL_SECONDS)
        self._closed.set()
        self._side.abort()
