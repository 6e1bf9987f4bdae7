"""Bytes from one process of a job to another, through the store of JAX's coordinator."""

import itertools
from collections.abc import Collection, Mapping

import jax

_TIMEOUT_SECONDS = 3600
"""Seconds; a process that is dead or stopped ends the others long before."""
_call_ids = itertools.count()


def exchange_parcels(parcels: Mapping[int, bytes], senders: Collection[int]) -> dict[int, bytes]:
    """Sends a parcel to each of some other processes, and returns those that the senders have sent
    to this one. All processes call it, in the same order.

    Besides those whom it is between, only process 0 has room for a parcel, which is on its way.
    """
    call_id, process_id = next(_call_ids), jax.process_index()
    if not parcels and not senders:
        return {}
    # No public function leads to it, and a collective would bring everything to everybody.
    from jax._src.distributed import global_state

    store = global_state.client
    assert store is not None, "there are others only where JAX has joined them"
    for receiver, parcel in parcels.items():
        store.key_value_set_bytes(f"jaxspec/{call_id}/{process_id}/{receiver}", parcel)
    received: dict[int, bytes] = {}
    for sender in senders:
        key = f"jaxspec/{call_id}/{sender}/{process_id}"
        received[sender] = store.blocking_key_value_get_bytes(key, 1000 * _TIMEOUT_SECONDS)
        store.key_value_delete(key)
    return received
