"""Messages for errors that a program expects."""

import re
import traceback
from pathlib import Path

import jax

from jaxspec.inputs.checked import first_line

_PACKAGE = Path(__file__).parent.parent
_CONNECTION_LOST = re.compile(
    "gloo|nccl|connection (closed|reset|refused)|barrier|heartbeat", re.IGNORECASE
)
"""Pattern of JAX's errors when the connection to another process is lost."""
_MAX_NAME_LENGTH = 200
"""Length limit in characters of a file name in a message."""


def describe_expected_error(error: Exception) -> str:
    """Returns the message for an expected error.

    Returns an empty string for an unexpected one, whose traceback must be printed.
    """
    if isinstance(error, OSError):
        name = str(error.filename or "")
        name = (
            name
            if len(name) <= _MAX_NAME_LENGTH
            else f"{name[: _MAX_NAME_LENGTH // 2]}...{name[-_MAX_NAME_LENGTH // 2 :]}"
        )
        return (
            f"{name}: {error.strerror}; see to that and run the same command again" if name else ""
        )
    if isinstance(error, MemoryError):
        # The last line in this package tells which array was too large.
        package_frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).is_relative_to(_PACKAGE)
        ]
        location = "".join(
            f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
            for frame in package_frames[-1:]
        )
        details = "; ".join(filter(None, (str(error), location)))
        return (
            f"this machine has too little memory ({details}); lower the setting that asks for it,"
            " or use a larger machine"
        )
    if isinstance(error, jax.errors.JaxRuntimeError):
        # JAX has no error type for a lost connection, only messages of the transport.
        connection_lost = jax.distributed.is_initialized() and _CONNECTION_LOST.search(str(error))
        peer_message = (
            "another process of the job has ended, and its own last lines say why"
            f" ({first_line(error)})"
        )
        return (
            f"{peer_message}; the same command goes on from the last checkpoint"
            if connection_lost
            else ""
        )
    return str(error)
