"""SIGTERM, SIGINT and SIGHUP, obeyed between two steps, or at once where there is nothing to
lose."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from jaxspec.system.terminal import say, to_nowhere

_GRACE_SECONDS = 5.0
_SHOW_CURSOR = b"\x1b[?25h"


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a program; nohup's, which is ignored from the start, stays so."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hangs_up else ()))


def end_at_once(number: int, frame: object = None) -> None:
    """Handles a signal while there is nothing to save, such as while a program is imported."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        # it was closed from the start; what is number 1 now may be any file
        if sys.__stdout__ is not None:
            os.write(
                sys.__stdout__.fileno(),
                b"stopped; nothing to save; the same command starts again\n",
            )
    os._exit(128 + number)


class Interrupt:
    """Watches for SIGTERM, SIGINT and SIGHUP while it is entered, even while the main thread is
    inside a long native call.

    A signal sets `requested`, and the program stops at its next good moment, to end with `status`;
    a second SIGINT ends the process at once. Within `nothing_unsaved` the first signal does. The
    status is 128 and the number of the signal, as a shell reports it: 143, 130 or 129. A thread
    reads the signals from the file that Python's own C handler writes to, because a Python handler
    would run only when the main thread returns to Python.

    Under `jax.distributed` the processes must stop at the same step: outside `nothing_unsaved` a
    signal is passed on to JAX's own preemption notice, and `agreed` is what tells. `announce`
    prints one line to the user; it is called from the watching thread. `farewell` is given the
    status and that line where the process ends at once.
    """

    def __init__(
        self,
        announce: Callable[[str], None] = say,
        farewell: Callable[[int, str], None] = lambda status, message: None,
    ) -> None:
        self._announce, self._farewell = announce, farewell
        self._requested = False
        self._first: signal.Signals | None = None
        self._interrupts = 0
        self._doing: str | None = None
        self._cleanups: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()
        self._signals = stop_signals()
        self._handlers = {number: signal.getsignal(number) for number in self._signals}
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in self._signals:
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

    @property
    def status(self) -> int:
        """The exit status of a program that has stopped as it was `requested`, the same in every
        process."""
        assert self._first is not None, "only a signal requests it"
        return 128 + self._first

    def agreed(self, step: int) -> bool:
        """Returns whether to stop at this step, the same answer in every process; all call it with
        the same, rising steps."""
        if not self._requested and _distributed():
            import numpy as np
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                # Only some may have got a signal; one that JAX's own handler took was SIGTERM.
                numbers = np.asarray(multihost_utils.process_allgather(np.int32(self._first or 0)))
                self._first = signal.Signals(int(numbers.max()) or signal.SIGTERM)
                self._requested = True
        return self._requested

    @contextlib.contextmanager
    def nothing_unsaved(
        self,
        doing: str,
        *cleanups: Callable[[], None],
        then: str = "nothing to save; the same command starts again",
    ) -> Iterator[None]:
        """Marks a region in which a signal ends the process at once, after the cleanups and a line
        that says so.

        `doing` and `then` complete "stopped while ...; ...". StepResult in the main thread; regions
        nest: the inner one names what is done, all clean up.
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
        """Points the signals at the watcher, again if somebody (such as jax.distributed) took them
        since."""
        for number in self._signals:
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
                if number in self._signals:
                    with self._lock:
                        self._obey(signal.Signals(number))

    def _obey(self, number: signal.Signals) -> None:
        self._interrupts += number == signal.SIGINT
        self._first = self._first or number
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._doing is not None:
            self._leave_unsaved()
        elif self._interrupts > 1:
            self._leave(
                128 + signal.SIGINT,
                "stopped at once; the same command goes on from the last checkpoint",
            )
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

    def _leave_terminal(self) -> None:
        """Sends what is still printed to nowhere if the terminal is gone: writing there would fail,
        and the work go unsaved."""
        to_nowhere(*(number for number in self._terminals if not os.isatty(number)))

    def _leave_unsaved(self) -> None:
        self._leave(self.status, f"stopped while {self._doing}")

    def _leave(self, status: int, message: str) -> None:
        # A cleanup or a full pipe may block; the process ends nevertheless.
        timer = threading.Timer(_GRACE_SECONDS, os._exit, (status,))
        timer.daemon = True
        timer.start()
        try:
            for cleanup in self._cleanups:
                # whatever fails there, the others clean up too, and the line is said
                with contextlib.suppress(Exception):
                    cleanup()
            if 1 in self._terminals:
                with contextlib.suppress(OSError):
                    os.write(1, _SHOW_CURSOR)  # a bar that is cut off has hidden it
            self._tell(message)
            self._farewell(status, message)
        finally:
            os._exit(status)

    def _tell(self, message: str) -> None:
        # The terminal may be gone; that is no reason to stop watching.
        with contextlib.suppress(OSError, ValueError):
            self._announce(message)
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # closed from the start
                    stream.flush()


def _wake(number: int, frame: object) -> None:
    """Does nothing: the C handler that Python installs for it has already written to the
    watcher."""


def _distributed() -> bool:
    # Imported late, so that a program can be watched over before it spends seconds on importing
    # JAX.
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def _disposition(number: int, put: bytes | None = None) -> bytes:
    """Returns the C library's `struct sigaction` of a signal, and replaces it; `signal.signal`
    knows Python's own handlers only."""
    found = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(number, put, found):
        raise OSError(ctypes.get_errno(), "sigaction")
    return found.raw


def _handler(disposition: bytes) -> bytes:
    # The first member; what follows holds padding that the C library leaves undefined.
    return disposition[: ctypes.sizeof(ctypes.c_void_p)]
