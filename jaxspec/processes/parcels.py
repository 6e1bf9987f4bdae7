"""Sends bytes between processes, through the store of JAX's coordinator."""

import itertools
from collections.abc import Collection, Mapping

import jax

# Long enough never to matter: a dead or stopped process ends the others long before.
_TIMEOUT_SECONDS = 3600
"""Seconds that a receiver waits for a parcel."""
_call_ids = itertools.count()


def exchange_parcels(parcels: Mapping[int, bytes], senders: Collection[int]) -> dict[int, bytes]:
    """Sends parcels to other processes, and receives those for this one.

    All processes call it, in the same order. Besides sender and receiver, only process 0 holds a
    parcel, until it is received.

    Args:
      parcels: bytes by receiving process.
      senders: processes that send a parcel to this one.

    Returns:
      The received bytes by sender.
    """
    # Counted even without parcels, so that the ids of a call agree in all processes.
    call_id, process_id = next(_call_ids), jax.process_index()
    if not parcels and not senders:
        return {}
    # JAX has no public access to the store. A collective would send everything to all processes.
    from jax._src.distributed import global_state

    store = global_state.client
    assert store is not None, "JAX has joined the processes"
    for receiver, parcel in parcels.items():
        store.key_value_set_bytes(f"jaxspec/{call_id}/{process_id}/{receiver}", parcel)
    received: dict[int, bytes] = {}
    for sender in senders:
        key = f"jaxspec/{call_id}/{sender}/{process_id}"
        received[sender] = store.blocking_key_value_get_bytes(key, 1000 * _TIMEOUT_SECONDS)
        # Otherwise process 0 would hold all parcels until the job ends.
        store.key_value_delete(key)
    return received
