"""Preparation of a process before slow imports."""

import signal
import sys

from jaxspec.inputs.checked import ConfigError
from jaxspec.system.interrupt import exit_immediately, stop_signals
from jaxspec.system.version import refuse_namesake


def prepare_process() -> None:
    """Handles signals and checks the environment.

    From here on a signal ends the process with a one-line message. So does an environment variable
    that JAX cannot read, or another distribution installed over this package.
    """
    for signal_number in stop_signals():
        signal.signal(signal_number, exit_immediately)
    try:
        # Must come first: the namesake's modules would be imported instead of this package's.
        refuse_namesake()
        # JAX reads its environment variables on import.
        import jax  # noqa: F401
    except ConfigError as error:
        _exit_with_error(str(error))
    except ValueError as error:
        # JAX names the variable in its message. Any other ValueError is a bug.
        if "JAX" not in str(error):
            raise
        _exit_with_error(
            f"{error}; correct or unset the environment variable of that name (in capitals)"
        )


def _exit_with_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
