"""What a process sends to others is what they get, and nothing is left on its way."""

from tests.conftest import free_port
from tests.runs import run_members

SCRIPT = """
import sys
import jax
from jax.experimental import multihost_utils
me, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", 3, me, initialization_timeout=60)
from jax._src.distributed import global_state
from jaxspec.processes.parcels import exchange_parcels

large = 5_000_000  # more than a message of gRPC holds where nobody allows it more
assert exchange_parcels({}, ()) == {}
if me == 0:
    assert exchange_parcels({1: b"a" * large}, {1, 2}) == {1: b"b", 2: b"c"}
if me == 1:
    assert exchange_parcels({0: b"b"}, {0}) == {0: b"a" * large}
if me == 2:
    assert exchange_parcels({0: b"c"}, ()) == {}
# The next call has parcels of its own.
sent, senders = {(me + 1) % 3: f"from {me}".encode()}, {(me + 2) % 3}
assert exchange_parcels(sent, senders) == {(me + 2) % 3: f"from {(me + 2) % 3}".encode()}
multihost_utils.sync_global_devices("all have theirs")
assert not global_state.client.key_value_dir_get_bytes("jaxspec/")
"""


def test_parcels_reach_whom_they_are_for() -> None:
    run_members(SCRIPT, 3, free_port())
