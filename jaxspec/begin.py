"""What a program does before the imports that take seconds."""

import signal
import sys

from jaxspec.interrupt import end_at_once, stop_signals


def begin() -> None:
    """From here on a signal ends the process with one line; so does an environment that JAX cannot read."""
    for number in stop_signals():
        signal.signal(number, end_at_once)
    try:
        import jax  # noqa: F401
    except ValueError as error:
        if "JAX" not in str(error):
            raise
        remedy = "set the environment variable of that name (in capitals) right, or unset it"
        print(f"error: {error}; {remedy}", file=sys.stderr, flush=True)
        sys.exit(2)
