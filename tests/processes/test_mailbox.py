"""Messages and arrays between processes, and sums among some of them."""

from tests.conftest import free_port
from tests.runs import run_members

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
me, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 3, me, initialization_timeout=60)
from jaxspec.mesh import make_mesh
from jaxspec.processes import mailbox, roles
from jaxspec.processes.global_arrays import gather_over_processes, sum_over_processes
from jaxspec.processes.process_0 import broadcast_number

# Before the sides part, all take part.
assert gather_over_processes(me).tolist() == [0, 1, 2]
devices = jax.devices()
first, second = make_mesh(4, devices=devices[:4]), make_mesh(2, devices=devices[4:])
assert roles.join_side(first, second) == (me < 2)
assert roles.list_members() == ((0, 1) if me < 2 else (2,))
# The sides make different numbers of calls.
if me < 2:
    assert gather_over_processes(me + 5).tolist() == [5, 6]
    assert broadcast_number(me + 7) == 7
    assert sum_over_processes(np.ones(3, np.uint8)).tolist() == [2, 2, 2]
else:
    assert broadcast_number(me) == 2
    assert roles.is_first_member()

server = mailbox.ArrayServer()
if me == 0:
    assert mailbox.read_message("news") is None
    # Offers of equal shape keep their order. They do not wait for their receiver, which pulls only
    # after the message that follows them.
    pieces = [
        jax.device_put(jnp.full((1, 4), float(i)), jax.local_devices()[i % 2]) for i in range(8)
    ]
    server.offer_arrays(77, pieces)
    mailbox.post_message("news", b"77")
    assert mailbox.receive_message("never", lambda: True) is None
    mailbox.post_message("news", b"77")  # a second post takes its place
if me == 2:
    content = mailbox.receive_message("news")
    layouts = [(jax.ShapeDtypeStruct((1, 4), jnp.float32), jax.local_devices()[1])] * 8
    pulled = server.pull_arrays(0, int(content), layouts)
    assert [float(piece[0, 0]) for piece in pulled] == list(range(8))
    assert {device for piece in pulled for device in piece.devices()} == {jax.local_devices()[1]}
    mailbox.remove_message("news")
    assert mailbox.read_message("news") is None
    mailbox.post_message("end", b"")
assert mailbox.receive_message("end") == b""
"""


def test_messages_and_arrays_arrive_and_sides_sum_by_themselves() -> None:
    run_members(SCRIPT, 3, free_port())
