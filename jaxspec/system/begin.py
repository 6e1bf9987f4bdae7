"""What a program does before the imports that take seconds."""

import signal
import sys

from jaxspec.inputs.checked import ConfigError
from jaxspec.system.interrupt import exit_immediately, stop_signals
from jaxspec.system.version import refuse_namesake


def prepare_process() -> None:
    """From here on a signal ends the process with one line; so does an environment that JAX cannot
    read, or another package in this one."""
    for signal_number in stop_signals():
        signal.signal(signal_number, exit_immediately)
    try:
        refuse_namesake()  # its modules would be imported instead of ours
        import jax  # noqa: F401
    except ConfigError as error:
        _exit_with_error(str(error))
    except ValueError as error:
        if "JAX" not in str(error):
            raise
        _exit_with_error(
            f"{error}; set the environment variable of that name (in capitals) right, or unset it"
        )


def _exit_with_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
