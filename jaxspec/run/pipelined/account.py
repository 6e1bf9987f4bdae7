"""Account of a thread's seconds."""

import contextlib
import time
from collections.abc import Iterator


class Account:
    """Charges every second of a thread to one purpose."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._purpose, self._start_time = "other", time.perf_counter()

    @contextlib.contextmanager
    def charge(self, purpose: str) -> Iterator[None]:
        """Charges the seconds inside the context to a purpose, and others to the outer one."""
        outer_purpose = self._switch(purpose)
        try:
            yield
        finally:
            self._switch(outer_purpose)

    def take_seconds(self) -> dict[str, float]:
        """Returns the seconds by purpose since the last call. Their sum is the elapsed time."""
        self._switch(self._purpose)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _switch(self, purpose: str) -> str:
        current_time = time.perf_counter()
        elapsed = current_time - self._start_time
        self._seconds[self._purpose] = self._seconds.get(self._purpose, 0.0) + elapsed
        outer_purpose, self._purpose, self._start_time = self._purpose, purpose, current_time
        return outer_purpose
