"""Handling of SIGTERM, SIGINT and SIGHUP.

Signals stop a program between two steps, or immediately if there is nothing to save.
"""

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
"""Seconds that cleanups may take before the process ends."""
_SHOW_CURSOR = b"\x1b[?25h"


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that stop a program."""
    # Under nohup SIGHUP is ignored from the start, and must stay so.
    handles_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if handles_hangup else ()))


def exit_immediately(number: int, frame: object = None) -> None:
    """Handles a signal by ending the process, while nothing is unsaved."""
    with contextlib.suppress(OSError):  # The terminal may be gone.
        # If standard output was closed from the start, descriptor 1 may be any file.
        if sys.__stdout__ is not None:
            os.write(
                sys.__stdout__.fileno(),
                b"stopped; nothing to save; the same command starts again\n",
            )
    # There is nothing to clean up, and an import could swallow an exception.
    os._exit(128 + number)


class Interrupt:
    """Watches for SIGTERM, SIGINT and SIGHUP within its context.

    A signal sets `stop_requested`. The program then stops at the end of its step, with
    `exit_status`: 128 plus the number of the signal, as in a shell. A second SIGINT ends the
    process immediately. Within `exit_on_signal` the first signal does.

    Under `jax.distributed` all processes must stop at the same step. Outside `exit_on_signal`, a
    signal is forwarded to JAX's preemption notice, and `should_stop` returns the common decision.

    Args:
      announce: prints a line to the user. Called from the watcher thread.
      on_exit: called with the status and the line if the process ends immediately.
    """

    def __init__(
        self,
        announce: Callable[[str], None] = print_line,
        on_exit: Callable[[int, str], None] = lambda status, message: None,
    ) -> None:
        self._announce, self._on_exit = announce, on_exit
        self._stop_requested = False
        self._keeps_signals = False
        self._first_signal: signal.Signals | None = None
        self._sigint_count = 0
        self._activity: str | None = None
        """Description of the innermost `exit_on_signal` region."""
        self._cleanups: tuple[Callable[[], None], ...] = ()
        # Both the watcher thread and the main thread use the fields above.
        self._lock = threading.Lock()
        self._signals = stop_signals()
        self._original_handlers = {number: signal.getsignal(number) for number in self._signals}
        # Noted now, since a descriptor whose terminal is gone is no terminal any more.
        self._terminal_descriptors = [number for number in (1, 2) if os.isatty(number)]
        self._original_actions: dict[int, bytes] = {}
        """C-level actions that were replaced, by signal."""
        self._handler_pointers: dict[int, bytes] = {}
        """Addresses of Python's C handler, by signal."""

    def __enter__(self) -> "Interrupt":
        # Python's C handler writes each signal's number to this pipe at once. A Python handler runs
        # only when the main thread returns from native code, which may take minutes.
        self._pipe_reader, self._pipe_writer = os.pipe()
        # Required by `set_wakeup_fd`: the handler must never block.
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
            # First Python's own table, then the C action, which `signal.signal` overwrites.
            signal.signal(number, self._original_handlers[number] or signal.SIG_DFL)
            _swap_action(number, self._original_actions[number])
        signal.set_wakeup_fd(self._original_wakeup)
        # No signal has number 0: it ends the watcher.
        os.write(self._pipe_writer, b"\0")
        self._watcher.join()
        os.close(self._pipe_reader)
        os.close(self._pipe_writer)

    @property
    def stop_requested(self) -> bool:
        """Whether to stop.

        Under `jax.distributed`, `should_stop` sets it, or `request_stop` after `keep_signals`.
        """
        return self._stop_requested

    @property
    def received_signal(self) -> int:
        """Number of the first signal that this process got. 0 if there was none."""
        return self._first_signal or 0

    def keep_signals(self) -> None:
        """Keeps signals in this process from now on, also under `jax.distributed`.

        The program itself agrees with other processes, and calls `request_stop` in each.
        """
        self._keeps_signals = True

    def request_stop(self, number: int) -> None:
        """Requests a stop as if this process had got a signal."""
        # The same in all processes, so that all have the same exit status.
        self._first_signal = signal.Signals(number)
        self._stop_requested = True

    @property
    def exit_status(self) -> int:
        """Exit status after a stop. Equal in all processes."""
        assert self._first_signal is not None, "only a signal requests it"
        return 128 + self._first_signal

    def should_stop(self, step: int) -> bool:
        """Returns whether to stop at this step.

        The answer is the same in every process. All must call it with the same, increasing steps.
        """
        if not self._stop_requested and _is_distributed() and not self._keeps_signals:
            # Imported here, since programs enter an Interrupt before they import JAX.
            import numpy as np
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                # Some processes may have no signal. If only JAX's handler has one, it was SIGTERM.
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
        """Makes a signal end the process immediately.

        This holds within the context. All cleanups run before the end, and a line is printed.
        Contexts may be nested: the line names the innermost one, and the cleanups of all run. Must
        be called in the main thread.

        Args:
          activity: completes "stopped while ...".
          *cleanups: functions to call before the process ends.
          consequence: second half of the printed line, after a semicolon.
        """
        # Libraries such as jax.distributed may have taken the signals since.
        self._install_handlers()
        with self._lock:
            outer_region = self._activity, self._cleanups
            self._activity, self._cleanups = f"{activity}; {consequence}", cleanups + self._cleanups
            # The signal came before the region, and nothing in the region would look for it.
            if self._stop_requested:
                self._exit_without_saving()
        try:
            yield
        finally:
            with self._lock:
                self._activity, self._cleanups = outer_region

    def _install_handlers(self) -> None:
        """Directs the signals to the watcher."""
        for number in self._signals:
            current = _swap_action(number)
            if _handler_pointer(current) != self._handler_pointers.get(number):
                self._original_actions[number] = current
                # Any Python handler makes Python install its C handler, which feeds the pipe.
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
        # Before anything is printed, since the terminal is usually gone.
        if number == signal.SIGHUP:
            self._detach_terminals()
        if self._activity is not None:
            self._exit_without_saving()
        # Only a second Ctrl-C gives up unsaved work. A launcher may repeat SIGTERM.
        elif self._sigint_count > 1:
            self._exit_process(
                128 + signal.SIGINT,
                "stopped at once; the same command goes on from the last checkpoint",
            )
        else:
            if _is_distributed() and not self._keeps_signals:
                self._forward_sigterm()
            else:
                self._stop_requested = True
            self._print_message(
                f"{number.name}: stopping after this step (a second Ctrl-C stops at once)"
            )

    def _forward_sigterm(self) -> None:
        """Sends SIGTERM to the handler of jax.distributed."""
        # JAX's preemption notice listens to SIGTERM only, whichever signal came.
        if _handler_pointer(_swap_action(signal.SIGTERM)) == self._handler_pointers[signal.SIGTERM]:
            _swap_action(signal.SIGTERM, self._original_actions[signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)

    def _detach_terminals(self) -> None:
        """Discards further output to terminals that are gone."""
        # Writing there would raise an error, and the run would end without saving.
        redirect_to_null(
            *(number for number in self._terminal_descriptors if not os.isatty(number))
        )

    def _exit_without_saving(self) -> None:
        self._exit_process(self.exit_status, f"stopped while {self._activity}")

    def _exit_process(self, status: int, message: str) -> None:
        # A cleanup or a full pipe may block. The process must end nevertheless.
        timer = threading.Timer(_GRACE_SECONDS, os._exit, (status,))
        timer.daemon = True
        timer.start()
        try:
            for cleanup in self._cleanups:
                # If one fails, the others must still run, and the line must still be printed.
                with contextlib.suppress(Exception):
                    cleanup()
            if 1 in self._terminal_descriptors:
                with contextlib.suppress(OSError):
                    os.write(1, _SHOW_CURSOR)  # A progress bar hides the cursor.
            self._print_message(message)
            self._on_exit(status, message)
        finally:
            os._exit(status)

    def _print_message(self, message: str) -> None:
        # The terminal may be gone, but the watcher must go on.
        with contextlib.suppress(OSError, ValueError):
            self._announce(message)
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # None if it was closed from the start.
                    stream.flush()


def _ignore_signal(number: int, frame: object) -> None:
    """Does nothing. Python's C handler has informed the watcher."""


def _is_distributed() -> bool:
    # Importing JAX takes seconds. If nothing has imported it yet, it is not distributed.
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def _swap_action(number: int, replacement: bytes | None = None) -> bytes:
    """Returns a signal's `struct sigaction`, and optionally replaces it."""
    # `signal.signal` cannot restore handlers of C code, such as JAX's. 512 bytes are more than the
    # struct has.
    previous = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(number, replacement, previous):
        raise OSError(ctypes.get_errno(), "sigaction")
    return previous.raw


def _handler_pointer(action: bytes) -> bytes:
    # The handler is the first member. The rest has undefined padding and cannot be compared.
    return action[: ctypes.sizeof(ctypes.c_void_p)]
