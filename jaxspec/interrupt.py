"""SIGTERM and SIGINT, obeyed between two steps, or at once where there is nothing to lose."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_GRACE_SECONDS = 5.0


class Interrupt:
    """Watches for SIGTERM and SIGINT while it is entered, even while the main thread is inside a long native call.

    A signal sets `requested`, and the program stops at its next good moment; a second SIGINT ends the process at once with status 130.
    Within `nothing_unsaved` the first signal ends the process at once with status 0. A thread reads the signals from the file that
    Python's own C handler writes to, because a Python handler would run only when the main thread returns to Python.

    Under `jax.distributed` the processes must stop at the same step: outside `nothing_unsaved` a signal is passed on to JAX's own
    preemption notice, and `agreed` is what tells. `announce` prints one line to the user; it is called from the watching thread.
    """

    def __init__(self, announce: Callable[[str], None] = print) -> None:
        self._announce = announce
        self._requested = False
        self._interrupts = 0
        self._doing: str | None = None
        self._cleanups: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._before: dict[int, bytes] = {}
        self._ours: dict[int, bytes] = {}

    def __enter__(self) -> "Interrupt":
        self._inbox, self._outbox = os.pipe()
        os.set_blocking(self._outbox, False)
        self._wakeup = signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
        self._take()
        self._watcher = threading.Thread(target=self._watch, name="interrupt", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._handlers[number] or signal.SIG_DFL)
            _disposition(number, self._before[number])
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._outbox, b"\0")
        self._watcher.join()
        os.close(self._inbox)
        os.close(self._outbox)

    @property
    def requested(self) -> bool:
        """Whether to stop; under `jax.distributed` only after `agreed` said so."""
        return self._requested

    def agreed(self, step: int) -> bool:
        """Returns whether to stop at this step, the same answer in every process; all call it with the same, rising steps."""
        if _distributed():
            from jax.experimental import multihost_utils

            self._requested |= multihost_utils.reached_preemption_sync_point(step)
        return self._requested

    @contextlib.contextmanager
    def nothing_unsaved(
        self, doing: str, *cleanups: Callable[[], None], then: str = "nothing to save; the same command starts again"
    ) -> Iterator[None]:
        """Marks a region in which a signal ends the process at once, with status 0, after the cleanups and a line that says so.

        `doing` and `then` complete "stopped while ...; ...". Called in the main thread; regions nest: the inner one names what is done,
        all clean up.
        """
        self._take()
        with self._lock:
            outer = self._doing, self._cleanups
            self._doing, self._cleanups = f"{doing}; {then}", cleanups + self._cleanups
            if self._requested:
                self._leave_unsaved()
        try:
            yield
        finally:
            with self._lock:
                self._doing, self._cleanups = outer

    def _take(self) -> None:
        """Points both signals at the watcher, again if somebody (such as jax.distributed) took them since."""
        for number in _SIGNALS:
            current = _disposition(number)
            if _handler(current) != self._ours.get(number):
                self._before[number] = current
                signal.signal(number, _wake)
                self._ours[number] = _handler(_disposition(number))

    def _watch(self) -> None:
        while True:
            for number in os.read(self._inbox, 64):
                if number == 0:
                    return
                if number in _SIGNALS:
                    with self._lock:
                        self._obey(signal.Signals(number))

    def _obey(self, number: signal.Signals) -> None:
        self._interrupts += number == signal.SIGINT
        if self._doing is not None:
            self._leave_unsaved()
        elif self._interrupts > 1:
            self._leave(130, "stopped at once; the same command goes on from the last checkpoint")
        else:
            if _distributed():
                self._pass_on()
            else:
                self._requested = True
            self._tell(f"{number.name}: stopping after this step (a second Ctrl-C stops at once)")

    def _pass_on(self) -> None:
        """Gives SIGTERM back to the handler of jax.distributed, and raises it."""
        if _handler(_disposition(signal.SIGTERM)) == self._ours[signal.SIGTERM]:
            _disposition(signal.SIGTERM, self._before[signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)

    def _leave_unsaved(self) -> None:
        self._leave(0, f"stopped while {self._doing}")

    def _leave(self, status: int, message: str) -> None:
        # A cleanup or a full pipe may block; the process ends nevertheless.
        timer = threading.Timer(_GRACE_SECONDS, os._exit, (status,))
        timer.daemon = True
        timer.start()
        try:
            for cleanup in self._cleanups:
                cleanup()
            self._tell(message)
        finally:
            os._exit(status)

    def _tell(self, message: str) -> None:
        # The terminal may be gone; that is no reason to stop watching.
        with contextlib.suppress(OSError, ValueError):
            self._announce(message)
            sys.stdout.flush()
            sys.stderr.flush()


def _wake(number: int, frame: object) -> None:
    """Does nothing: the C handler that Python installs for it has already written to the watcher."""


def _distributed() -> bool:
    # Imported late, so that a program can be watched over before it spends seconds on importing JAX.
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def _disposition(number: int, put: bytes | None = None) -> bytes:
    """Returns the C library's `struct sigaction` of a signal, and replaces it; `signal.signal` knows Python's own handlers only."""
    found = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(number, put, found):
        raise OSError(ctypes.get_errno(), "sigaction")
    return found.raw


def _handler(disposition: bytes) -> bytes:
    # The first member; what follows holds padding that the C library leaves undefined.
    return disposition[: ctypes.sizeof(ctypes.c_void_p)]
