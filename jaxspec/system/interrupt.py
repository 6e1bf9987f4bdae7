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

from jaxspec.system.terminal import print_line, redirect_to_null

_GRACE_SECONDS = 5.0
_SHOW_CURSOR = b"\x1b[?25h"


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a program; nohup's, which is ignored from the start, stays so."""
    handles_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if handles_hangup else ()))


def exit_immediately(number: int, frame: object = None) -> None:
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

    A signal sets `stop_requested`, and the program stops at its next good moment, to end with
    `exit_status`; a second SIGINT ends the process at once. Within `exit_on_signal` the first
    signal does. The status is 128 and the number of the signal, as a shell reports it: 143, 130 or
    129. A thread reads the signals from the file that Python's own C handler writes to, because a
    Python handler would run only when the main thread returns to Python.

    Under `jax.distributed` the processes must stop at the same step: outside `exit_on_signal` a
    signal is passed on to JAX's own preemption notice, and `should_stop` is what tells. `announce`
    prints one line to the user; it is called from the watching thread. `on_exit` is given the
    status and that line where the process ends at once.
    """

    def __init__(
        self,
        announce: Callable[[str], None] = print_line,
        on_exit: Callable[[int, str], None] = lambda status, message: None,
    ) -> None:
        self._announce, self._on_exit = announce, on_exit
        self._stop_requested = False
        self._first_signal: signal.Signals | None = None
        self._sigint_count = 0
        self._activity: str | None = None
        self._cleanups: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()
        self._signals = stop_signals()
        self._original_handlers = {number: signal.getsignal(number) for number in self._signals}
        self._terminal_descriptors = [number for number in (1, 2) if os.isatty(number)]
        self._original_actions: dict[int, bytes] = {}
        self._handler_pointers: dict[int, bytes] = {}

    def __enter__(self) -> "Interrupt":
        self._pipe_reader, self._pipe_writer = os.pipe()
        os.set_blocking(self._pipe_writer, False)
        self._original_wakeup = signal.set_wakeup_fd(self._pipe_writer, warn_on_full_buffer=False)
        self._install_handlers()
        self._watcher = threading.Thread(target=self._watch_signals, name="interrupt", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number in self._signals:
            signal.signal(number, self._original_handlers[number] or signal.SIG_DFL)
            _swap_action(number, self._original_actions[number])
        signal.set_wakeup_fd(self._original_wakeup)
        os.write(self._pipe_writer, b"\0")
        self._watcher.join()
        os.close(self._pipe_reader)
        os.close(self._pipe_writer)

    @property
    def stop_requested(self) -> bool:
        """Whether to stop; under `jax.distributed` only after `should_stop` said so."""
        return self._stop_requested

    @property
    def exit_status(self) -> int:
        """The exit status of a program that has stopped as was requested, the same in every
        process."""
        assert self._first_signal is not None, "only a signal requests it"
        return 128 + self._first_signal

    def should_stop(self, step: int) -> bool:
        """Returns whether to stop at this step, the same answer in every process; all call it with
        the same, rising steps."""
        if not self._stop_requested and _is_distributed():
            import numpy as np
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                # Only some may have got a signal; one that JAX's own handler took was SIGTERM.
                numbers = np.asarray(
                    multihost_utils.process_allgather(np.int32(self._first_signal or 0))
                )
                self._first_signal = signal.Signals(int(numbers.max()) or signal.SIGTERM)
                self._stop_requested = True
        return self._stop_requested

    @contextlib.contextmanager
    def exit_on_signal(
        self,
        activity: str,
        *cleanups: Callable[[], None],
        consequence: str = "nothing to save; the same command starts again",
    ) -> Iterator[None]:
        """Marks a region in which a signal ends the process at once, after the cleanups and a line
        that says so.

        `activity` and `consequence` complete "stopped while ...; ...". Called in the main thread;
        regions nest: the inner one names what is done, all clean up.
        """
        self._install_handlers()
        with self._lock:
            outer_region = self._activity, self._cleanups
            self._activity, self._cleanups = f"{activity}; {consequence}", cleanups + self._cleanups
            if self._stop_requested:
                self._exit_unsaved()
        try:
            yield
        finally:
            with self._lock:
                self._activity, self._cleanups = outer_region

    def _install_handlers(self) -> None:
        """Points the signals at the watcher, again if somebody (such as jax.distributed) took them
        since."""
        for number in self._signals:
            current = _swap_action(number)
            if _handler_pointer(current) != self._handler_pointers.get(number):
                self._original_actions[number] = current
                signal.signal(number, _ignore_signal)
                self._handler_pointers[number] = _handler_pointer(_swap_action(number))

    def _watch_signals(self) -> None:
        while True:
            for number in os.read(self._pipe_reader, 64):
                if number == 0:
                    return
                if number in self._signals:
                    with self._lock:
                        self._handle_signal(signal.Signals(number))

    def _handle_signal(self, number: signal.Signals) -> None:
        self._sigint_count += number == signal.SIGINT
        self._first_signal = self._first_signal or number
        if number == signal.SIGHUP:
            self._detach_terminals()
        if self._activity is not None:
            self._exit_unsaved()
        elif self._sigint_count > 1:
            self._exit_process(
                128 + signal.SIGINT,
                "stopped at once; the same command goes on from the last checkpoint",
            )
        else:
            if _is_distributed():
                self._forward_sigterm()
            else:
                self._stop_requested = True
            self._print_message(
                f"{number.name}: stopping after this step (a second Ctrl-C stops at once)"
            )

    def _forward_sigterm(self) -> None:
        """Gives SIGTERM back to the handler of jax.distributed, and raises it."""
        if _handler_pointer(_swap_action(signal.SIGTERM)) == self._handler_pointers[signal.SIGTERM]:
            _swap_action(signal.SIGTERM, self._original_actions[signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)

    def _detach_terminals(self) -> None:
        """Sends what is still printed to nowhere if the terminal is gone: writing there would fail,
        and the work go unsaved."""
        redirect_to_null(
            *(number for number in self._terminal_descriptors if not os.isatty(number))
        )

    def _exit_unsaved(self) -> None:
        self._exit_process(self.exit_status, f"stopped while {self._activity}")

    def _exit_process(self, status: int, message: str) -> None:
        # A cleanup or a full pipe may block; the process ends nevertheless.
        timer = threading.Timer(_GRACE_SECONDS, os._exit, (status,))
        timer.daemon = True
        timer.start()
        try:
            for cleanup in self._cleanups:
                # whatever fails there, the others clean up too, and the line is said
                with contextlib.suppress(Exception):
                    cleanup()
            if 1 in self._terminal_descriptors:
                with contextlib.suppress(OSError):
                    os.write(1, _SHOW_CURSOR)  # a bar that is cut off has hidden it
            self._print_message(message)
            self._on_exit(status, message)
        finally:
            os._exit(status)

    def _print_message(self, message: str) -> None:
        # The terminal may be gone; that is no reason to stop watching.
        with contextlib.suppress(OSError, ValueError):
            self._announce(message)
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # closed from the start
                    stream.flush()


def _ignore_signal(number: int, frame: object) -> None:
    """Does nothing: the C handler that Python installs for it has already written to the
    watcher."""


def _is_distributed() -> bool:
    # Imported late, so that a program can be watched over before it spends seconds on importing
    # JAX.
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def _swap_action(number: int, replacement: bytes | None = None) -> bytes:
    """Returns the C library's `struct sigaction` of a signal, and replaces it; `signal.signal`
    knows Python's own handlers only."""
    previous = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(number, replacement, previous):
        raise OSError(ctypes.get_errno(), "sigaction")
    return previous.raw


def _handler_pointer(action: bytes) -> bytes:
    # The first member; what follows holds padding that the C library leaves undefined.
    return action[: ctypes.sizeof(ctypes.c_void_p)]
