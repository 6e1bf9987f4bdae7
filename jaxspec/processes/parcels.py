"""Bytes from one process of a job to another, through the store of JAX's coordinator."""

import itertools
from collections.abc import Collection, Mapping

import jax

_LONGEST_WAIT = 3600
"""Seconds; a process that is dead or stopped ends the others long before."""
_calls = itertools.count()


def swapped(parcels: Mapping[int, bytes], senders: Collection[int]) -> dict[int, bytes]:
    """Sends a parcel to each of some other processes, and returns those that the senders have sent
    to this one. All processes call it, in the same order.

    Besides those whom it is between, only process 0 has room for a parcel, which is on its way.
    """
    call, me = next(_calls), jax.process_index()
    if not parcels and not senders:
        return {}
    # No public function leads to it, and a collective would bring everything to everybody.
    from jax._src.distributed import global_state

    store = global_state.client
    assert store is not None, "there are others only where JAX has joined them"
    for process, parcel in parcels.items():
        store.key_value_set_bytes(f"jaxspec/{call}/{me}/{process}", parcel)
    received: dict[int, bytes] = {}
    for sender in senders:
        key = f"jaxspec/{call}/{sender}/{me}"
        received[sender] = store.blocking_key_value_get_bytes(key, 1000 * _LONGEST_WAIT)
        store.key_value_delete(key)
    return received
