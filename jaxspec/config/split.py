"""Split of a job's devices between learning and generation."""

from dataclasses import replace
from typing import NamedTuple

from jaxspec.config.check import MeshShape, check_config
from jaxspec.config.settings import MeshConfig, ResolvedConfig
from jaxspec.inputs.checked import require, translate_settings

_GENERATION_NAMES = {f"mesh.{axis}": f"generation.{axis}" for axis in ("data", "expert", "tensor")}


class MeshShapes(NamedTuple):
    """Shapes of the two sides' meshes."""

    learner: MeshShape
    generator: MeshShape
    generator_devices: int
    """Devices of the generator alone. 0 if both sides have the same devices."""


def check_meshes(config: ResolvedConfig, devices: int, processes: int = 1) -> MeshShapes:
    """Checks combinations of settings, and resolves the meshes of both sides.

    `devices` counts those of all processes.

    Raises:
      ConfigError: Numbers do not fit together. The message names them, and some that do.
    """
    count = config.generation.devices
    if config.schedule.kind == "pipelined":
        _check_pipelined(config, processes)
    if not count:
        shape = check_config(config, devices, processes)
        return MeshShapes(shape, shape, 0)
    require(
        count < devices,
        f"generation.devices {count} leave no device to learn on, of {devices} devices in all; give"
        f" at most {devices - 1}, or 0 to take turns on all devices",
    )
    # A process runs the programs of one side.
    devices_per_process = devices // processes
    require(
        processes == 1 or count % devices_per_process == 0,
        f"generation.devices {count} with {processes} processes of {devices_per_process} devices"
        f" each: a process"
        f" would have devices of both sides; give a multiple of {devices_per_process}",
    )
    generating_processes = count // devices_per_process if processes > 1 else 1
    learner = check_config(config, devices - count, max(1, processes - generating_processes))
    return MeshShapes(learner, check_generator(config, count, generating_processes), count)


def check_generator(config: ResolvedConfig, devices: int, processes: int = 1) -> MeshShape:
    """Checks settings against the devices that generate, and resolves their mesh.

    Raises:
      ConfigError: Numbers do not fit together. The message names them, and some that do.
    """
    generation = config.generation
    if not generation.devices:
        return check_config(config, devices, processes)
    mesh = MeshConfig(
        data=generation.data, expert=generation.expert, tensor=generation.tensor, shard_above=0
    )
    # Only generation runs there, so the rows of other batches need not divide.
    generation_config = replace(
        config,
        mesh=mesh,
        sft=replace(config.sft, rows=config.batch.prompts),
        offline=replace(config.offline, rows=config.batch.prompts),
    )
    with translate_settings(_GENERATION_NAMES):
        return check_config(generation_config, devices, processes)


def _check_pipelined(config: ResolvedConfig, processes: int) -> None:
    """Checks settings that a pipelined schedule does not support."""
    require(
        processes == 1 or config.generation.devices > 0,
        f"schedule.kind pipelined with generation.devices 0: both sides would take turns in"
        f" {processes} processes; give the number of devices that generate, or choose fused",
    )
    require(
        processes == 1 or config.rollout.draft.draft_length != "auto",
        "rollout.draft.draft_length auto with schedule.kind pipelined in several processes: the"
        " learner would need the costs of rounds that others measure; give a number",
    )
    require(
        not config.eval.keep_best,
        f"eval.keep_best {config.eval.keep_best} with schedule.kind pipelined: when weights are"
        " evaluated, the learner has newer ones already; leave it out, and see --save_every",
    )
    require(
        config.rollout.past_answers == 0,
        "earlier answers are looked up (rollout.draft.kind history or rollout.lookup.beside"
        " history), and schedule.kind pipelined does not save them with the batches in flight;"
        " choose another look-up, or schedule.kind fused",
    )
    sampling, lag = config.dynamic_sampling, config.schedule.active_lag
    require(
        not (sampling.max_batches and sampling.surplus == "carry"),
        f"dynamic_sampling.surplus carry with schedule.kind pipelined: carried groups would lag"
        f" {lag + 1} updates behind, and not {lag}; set --dynamic_sampling.surplus drop",
    )
