"""Queue of batches between the two sides, at a fixed lag."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax

from jaxspec.run.pipelined.account import Account
from jaxspec.run.pipelined.generation import SentBatch
from jaxspec.run.state import GenerationProgress
from jaxspec.state import PyTree


class BatchPlan:
    """Order of a run's batches, and the version of weights that makes each.

    Batch n is made by version max(0, n - lag), whatever the clock does.

    Args:
      lag: updates by which versions are behind.
      first_batch: batch that is made first.
      first_version: version of the weights at the start.
      steps: batches of the run.
    """

    def __init__(self, lag: int, first_batch: int, first_version: int, steps: int) -> None:
        self._lag, self.steps = lag, steps
        self.first_batch, self.first_version = first_batch, first_version
        # A resumed run may have more batches than `steps` is now.
        self.last_version = max(steps, first_batch)

    def find_version(self, batch: int) -> int:
        """Returns the version that makes a batch."""
        # A checkpoint holds the batches of earlier versions.
        return max(batch - self._lag, self.first_version)

    def find_last_batch(self, version: int) -> int:
        """Returns the last batch that a version makes."""
        return min(version + self._lag, self.steps - 1)

    def is_used(self, version: int) -> bool:
        """Returns whether a version makes a batch, or is evaluated last."""
        makes_batch = version + self._lag < self.steps or version == self.first_version
        return makes_batch or version == self.last_version


@runtime_checkable
class BatchProducer(Protocol):
    """Generator's side, as a queue sees it (`generation.GenerationSide`)."""

    account: Account

    def make_batch(
        self, batch: int, published: PyTree, progress: GenerationProgress
    ) -> SentBatch | None:
        """Makes a batch with published weights. Returns None if it was asked to stop."""
        ...

    def evaluate(self, published: PyTree, batch: int) -> dict[str, float]:
        """Evaluates published weights."""
        ...

    def abort(self) -> None:
        """Asks to stop at the next slice."""
        ...


@runtime_checkable
class BatchQueue(Protocol):
    """Batches in order, made from the weights that are published."""

    def publish(self, version: int, packed: PyTree) -> None:
        """Gives packed weights to the generator."""
        ...

    def take_batch(self) -> SentBatch:
        """Returns the next batch, on the learner's mesh. Waits for it."""
        ...

    def evaluate_last(self) -> dict[str, float]:
        """Evaluates the weights after the last update."""
        ...

    def count_waiting(self) -> int:
        """Counts the batches that wait for the learner."""
        ...

    def received_signal(self) -> int:
        """Returns a signal that the generator's side got. 0 if there was none."""
        ...

    def close(self) -> None:
        """Stops generation."""
        ...


class TurnQueue:
    """Queue of two sides that take turns on the same devices."""

    def __init__(self, side: BatchProducer, plan: BatchPlan, progress: GenerationProgress) -> None:
        self._side, self._plan, self._progress = side, plan, progress
        self._next_batch = plan.first_batch
        self._batches: collections.deque[SentBatch] = collections.deque()
        self._published: tuple[int, PyTree] | None = None
        self._idle = contextlib.ExitStack()

    def publish(self, version: int, packed: PyTree) -> None:
        """Keeps the weights for the next batches."""
        # All batches of a version are made before the next one replaces it.
        self._make_batches()
        self._published = version, packed

    def take_batch(self) -> SentBatch:
        """Makes all batches that can be made, and returns the oldest."""
        self._make_batches()
        return self._batches.popleft()

    def _make_batches(self) -> None:
        if self._published is None:
            return
        version, published = self._published
        self._idle.close()
        while self._next_batch <= self._plan.find_last_batch(version):
            batch = self._side.make_batch(self._next_batch, published, self._progress)
            assert batch is not None, "nothing aborts the side during a turn"
            self._batches.append(batch)
            self._next_batch += 1
        # Between two turns, the other side works.
        self._idle.enter_context(self._side.account.charge("idle_generate"))

    def evaluate_last(self) -> dict[str, float]:
        """Evaluates the weights after the last update."""
        assert self._published is not None, "weights are published first"
        return self._side.evaluate(self._published[1], self._plan.last_version - 1)

    def count_waiting(self) -> int:
        """Counts the batches that wait for the learner."""
        return len(self._batches)

    def received_signal(self) -> int:
        """Returns 0, since this process watches for signals itself."""
        return 0

    def close(self) -> None:
        """Does nothing, since no batch is in flight between two turns."""


class ThreadQueue:
    """Queue of a generator that runs in a thread of its own.

    Args:
      side: the generator.
      plan: order of the batches.
      progress: progress of generation.
      send_weights: moves packed weights to the generator's mesh.
      send_batch: moves a packed rollout to the learner's mesh, and unpacks it.
    """

    def __init__(
        self,
        side: BatchProducer,
        plan: BatchPlan,
        progress: GenerationProgress,
        send_weights: Callable[[PyTree], PyTree],
        send_batch: Callable[[PyTree], PyTree],
    ) -> None:
        self._side, self._plan, self._progress = side, plan, progress
        self._send_weights, self._send_batch = send_weights, send_batch
        self._changed = threading.Condition()
        self._published: dict[int, PyTree] = {}
        self._batches: collections.deque[SentBatch] = collections.deque()
        self._is_closed = False
        self._error: BaseException | None = None
        # A daemon, so that it does not keep Python from ending.
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    # ---- called by the learner's thread

    def publish(self, version: int, packed: PyTree) -> None:
        """Gives packed weights to the generator."""
        published = self._send_weights(packed)
        with self._changed:
            self._published[version] = published
            self._changed.notify_all()

    def take_batch(self) -> SentBatch:
        """Returns the next batch. Waits for it, and raises errors of the generator."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._error)
            # Finished batches come before the error of a later one.
            if not self._batches:
                assert self._error is not None, "it waits for one of the two"
                raise self._error
            return self._batches.popleft()

    def evaluate_last(self) -> dict[str, float]:
        """Evaluates the weights after the last update."""
        # The thread has ended, since it has made all batches.
        self._thread.join()
        published = self._published[self._plan.last_version]
        return self._side.evaluate(published, self._plan.last_version - 1)

    def count_waiting(self) -> int:
        """Counts the batches that wait for the learner."""
        return len(self._batches)

    def received_signal(self) -> int:
        """Returns 0, since this process watches for signals itself."""
        return 0

    def close(self) -> None:
        """Stops generation at the next slice, and waits for the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._side.abort()
        self._thread.join()

    # ---- the generator's thread

    def _run(self) -> None:
        try:
            for batch in range(self._plan.first_batch, self._plan.steps):
                published = self._wait_for_version(self._plan.find_version(batch))
                if published is None:
                    return
                sent = self._side.make_batch(batch, published, self._progress)
                if sent is None:
                    return
                sent = dataclasses.replace(sent, rollout=self._send_batch(sent.rollout))
                with self._changed:
                    self._batches.append(sent)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  # the learner's thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_for_version(self, version: int) -> PyTree | None:
        """Returns the weights of a version once they are published. None if closed before."""
        with self._side.account.charge("idle_generate"):
            with self._changed:
                self._changed.wait_for(lambda: version in self._published or self._is_closed)
                if self._is_closed:
                    return None
                # Earlier versions make no more batches.
                for earlier in [number for number in self._published if number < version]:
                    del self._published[earlier]
                published = self._published[version]
            return jax.block_until_ready(published)
