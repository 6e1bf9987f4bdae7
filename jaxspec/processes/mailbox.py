"""Messages and arrays from process to process, without a collective.

Messages go through the store of JAX's coordinator. Arrays go directly: the sender offers them, and
the receiver pulls them into its own devices. So a sender never waits for a receiver, and a receiver
waits only for a sender that has not offered yet.
"""

import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxspec.inputs.checked import ConfigError, first_line

_PREFIX = "jaxspec/mail"
_POLL_MILLISECONDS = 500
"""Milliseconds between two checks whether a wait is over."""
_CONNECTIONS = 4
"""Parallel connections over which arrays travel."""


def _open_store() -> Any:
    # JAX has no public access to the store.
    from jax._src.distributed import global_state

    assert global_state.client is not None, "JAX has joined the processes"
    return global_state.client


def post_message(name: str, content: bytes) -> None:
    """Posts a message, which every process can read until it is removed.

    Replaces an earlier message of that name.
    """
    _open_store().key_value_set_bytes(f"{_PREFIX}/{name}", content, allow_overwrite=True)


def read_message(name: str) -> bytes | None:
    """Returns a message, or None if it is not there."""
    try:
        return _open_store().key_value_try_get_bytes(f"{_PREFIX}/{name}")
    except jax.errors.JaxRuntimeError as error:
        # JAX has no error type for this, only the status code in the text.
        if "NOT_FOUND" not in str(error):
            raise
        return None


def remove_message(name: str) -> None:
    """Removes a message, if it is there."""
    _open_store().key_value_delete(f"{_PREFIX}/{name}")


def receive_message(name: str, is_closed: Callable[[], bool] = lambda: False) -> bytes | None:
    """Waits for a message. Returns None once `is_closed` returns true.

    The message should come soon: the coordinator keeps a note of every wait until it does.
    """
    while not is_closed():
        try:
            return _open_store().blocking_key_value_get_bytes(
                f"{_PREFIX}/{name}", _POLL_MILLISECONDS
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return None


class ArrayServer:
    """Server from which other processes pull arrays of this one, and the connections to theirs.

    Raises:
      ConfigError: the devices cannot move arrays between processes.
    """

    def __init__(self) -> None:
        host = _find_own_address()
        client = jax.local_devices()[0].client
        try:
            from jax.experimental import transfer

            self._server = transfer.start_transfer_server(
                client, f"{host}:0", [f"{host}:0"] * _CONNECTIONS
            )
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"JAX cannot move arrays between processes on {jax.local_devices()[0].device_kind}"
                f" ({first_line(error)}); start a single process that has the devices of both"
                " sides, or choose --schedule.kind fused"
            ) from error
        self._connections: dict[int, Any] = {}
        post_message(f"server/{jax.process_index()}", self._server.address().encode())

    def offer_arrays(self, number: int, arrays: Sequence[jax.Array]) -> None:
        """Offers arrays, each on one device, to the process that pulls this number.

        Returns at once, and keeps the arrays until they are pulled.
        """
        self._server.await_pull(number, list(arrays))

    def pull_arrays(
        self, sender: int, number: int, layouts: Sequence[tuple[Any, Any]]
    ) -> list[jax.Array]:
        """Pulls the arrays that a process offers. Returns before they have arrived.

        Args:
          sender: number of the process.
          number: number under which it offers them.
          layouts: shape and dtype of each array, and the device that receives it.
        """
        if sender not in self._connections:
            address = receive_message(f"server/{sender}")
            assert address is not None, "nothing closes it"
            self._connections[sender] = self._server.connect(address.decode())
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))
            for leaf, device in layouts
        ]
        return self._connections[sender].pull(number, shapes)


@functools.cache
def open_server() -> ArrayServer:
    """Opens the server of this process. Returns the same one in later calls."""
    return ArrayServer()


def _find_own_address() -> str:
    """Returns the address of this machine in the network of the coordinator."""
    from jax._src.distributed import global_state

    host, _, port = (global_state.coordinator_address or "").rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    # Connecting a datagram socket sends nothing, and chooses the network.
    with socket.socket(family, kind) as datagrams:
        datagrams.connect(address)
        own_host = datagrams.getsockname()[0]
    return f"[{own_host}]" if family == socket.AF_INET6 else own_host
