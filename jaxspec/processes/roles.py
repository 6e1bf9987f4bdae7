"""Processes that work together: all of a job, or those of one side of a pipelined run.

Sums, broadcasts and waits take place among them alone.
"""

from collections.abc import Collection

import jax
from jax.sharding import Mesh

_members: tuple[int, ...] = ()
"""Members that were set. Empty: all processes. JAX has a single job in a process, too."""


def set_members(members: Collection[int]) -> None:
    """Makes some processes, of which this is one, work together from now on."""
    global _members
    assert jax.process_index() in members, "a process works with others of its own side"
    _members = tuple(sorted(members))


def list_members() -> tuple[int, ...]:
    """Lists the processes that work together with this one, itself included."""
    return _members or tuple(range(jax.process_count()))


def member_count() -> int:
    """Returns the number of processes that work together."""
    return len(_members) or jax.process_count()


def is_first_member() -> bool:
    """Returns whether this is the first of these processes."""
    return jax.process_index() == list_members()[0]


def find_owners(mesh: Mesh) -> set[int]:
    """Returns the processes that have devices of a mesh."""
    return {device.process_index for device in mesh.devices.flat}


def owns_part(mesh: Mesh) -> bool:
    """Returns whether this process has devices of a mesh."""
    return jax.process_index() in find_owners(mesh)


def join_side(first: Mesh, second: Mesh) -> bool:
    """Makes this process work with those of the first mesh, or else of the second.

    Returns whether it is one of the first. Changes nothing if a process has devices of both.
    """
    owners = [find_owners(mesh) for mesh in (first, second)]
    if owners[0] & owners[1]:
        return True
    is_first = jax.process_index() in owners[0]
    set_members(owners[0] if is_first else owners[1])
    return is_first
