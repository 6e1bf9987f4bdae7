"""Orbax's manager of checkpoints, among the processes that work together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.processes import roles
from jaxspec.processes.process_0 import wait_for_all


def open_manager(
    folder: Path, handlers: Mapping[str, Any], keep: int, read_only: bool
) -> ocp.CheckpointManager:
    """Opens the manager of the newest `keep` checkpoints in a folder.

    All processes that work together call it. `handlers` are those of the items of a checkpoint.
    """
    # Orbax does not create the folder if only some processes of the job take part.
    if roles.is_first_member() and not read_only:
        folder.mkdir(parents=True, exist_ok=True)
    wait_for_all()
    members = ocp.options.MultiprocessingOptions()
    if roles.member_count() < jax.process_count():
        members = ocp.options.MultiprocessingOptions(
            active_processes={*roles.list_members()}, barrier_sync_key_prefix="learner"
        )
    return ocp.CheckpointManager(
        folder,
        item_handlers=dict(handlers),
        options=ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            # A killed save leaves a temporary folder. A reader must not remove it, since a live run
            # may be writing it.
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=False,
            multiprocessing_options=members,
        ),
    )


def convert_for_saving(leaves: Mapping[str, jax.Array]) -> Mapping[str, Any]:
    """Converts arrays that Orbax would refuse to host values."""
    # It refuses arrays of a single process in a job of several.
    is_single_member = roles.member_count() == 1 < jax.process_count()
    return jax.device_get(leaves) if is_single_member else leaves
