"""`bench load`: time and memory of loading a checkpoint."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.bench.measure import PeakMemory, package_versions, require_model
from jaxspec.config.cli import override_settings
from jaxspec.hf.pretrained import load_policy_config, open_policy_checkpoint
from jaxspec.host.programs import abstract_leaf
from jaxspec.inputs.checked import CheckedConfig, require, translate_settings
from jaxspec.inputs.spec import Count, ModelConfig, Natural
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import cast_floats
from jaxspec.preparation.policy import load_with_progress
from jaxspec.processes.devices import configure_cpu_devices, count_devices, describe_machine

ABOUT = """Loads the weights of a checkpoint directly into their final sharding, as training does.
Measures seconds and memory. On a CPU the devices use the host's memory, so the measured memory
includes the weights themselves. The last line of the output is one JSON object."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(CheckedConfig, prefix="--"):
    """Options of `bench load`."""

    model: str = ""
    """Folder of a Hugging Face checkpoint, or its id on the hub."""
    data: Natural = 0
    """Shards of the weights. 0 = all devices. On a CPU that many virtual devices are made."""
    tensor: Count = 1
    """Shards of heads, ffn and vocabulary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the loaded weights."""


def main(argv: Sequence[str]) -> int:
    """Loads a checkpoint onto the devices as training does.

    Prints the seconds, and the peak of the host's memory meanwhile. Returns the exit status.
    """
    options = override_settings(
        LoadOptions(), argv, "python -m jaxspec.bench load --model DIR", ABOUT
    )
    require_model(options.model, "load")
    require(
        Path("/proc/self/status").exists(),
        "/proc/self/status does not exist, and bench load reads its use of memory there; run it on"
        " Linux",
    )
    with translate_settings({"model.path": "--model"}):
        config = load_policy_config(ModelConfig(path=options.model, dtype=options.dtype))
    mesh = _make_mesh(options)
    # Shapes only: random weights would take the memory that is to be measured.
    shapes = jax.eval_shape(lambda: cast_floats(Decoder(config, jax.random.key(0)), options.dtype))
    layout = meshes.assign_shardings(mesh, shapes, meshes.TRAIN_RULES)
    checkpoint = open_policy_checkpoint(config, jax.tree.map(abstract_leaf, shapes, layout))
    with PeakMemory() as memory:
        start_time = time.perf_counter()
        policy = load_with_progress(checkpoint)
        seconds = time.perf_counter() - start_time
    record = {
        "bench": "load",
        "model": config.path,
        "dtype": options.dtype,
        "weight_bytes": checkpoint.bytes,
        "held_bytes": _count_bytes(policy),
        "peak_anonymous_bytes": memory.peak,
        "peak_over_weights": memory.peak / checkpoint.bytes,
        "seconds": seconds,
        "gb_per_s": checkpoint.bytes / 1e9 / seconds,
        "machine": describe_machine(mesh),
        "versions": package_versions(),
    }
    summary = (
        f"{checkpoint.bytes / 1e9:.3g} GB as {options.dtype} on {mesh.size} devices in"
        f" {seconds:.1f} s ({record['gb_per_s']:.2f} GB/s)"
    )
    print(
        f"{summary}; at most {memory.peak / 1e9:.3g} GB of anonymous memory,"
        f" {record['peak_over_weights']:.2f} x the weights"
    )
    print(json.dumps(record), flush=True)
    return 0


def _make_mesh(options: LoadOptions) -> Mesh:
    """Makes the mesh of the options.

    Raises:
      ConfigError: there are fewer devices, or --tensor does not divide their number.
    """
    # Must precede the first use of a device, which fixes their number. 0 means one per core.
    configure_cpu_devices(options.data * options.tensor)
    requested_devices, device_count = (options.data or 1) * options.tensor, count_devices()
    require(
        requested_devices <= device_count,
        f"--data {options.data} x --tensor {options.tensor} = {requested_devices} devices, but"
        f" there are {device_count}; lower one of them",
    )
    divides_evenly = options.data > 0 or device_count % options.tensor == 0
    require(
        divides_evenly,
        f"--tensor {options.tensor} does not divide {device_count} devices; give a number that"
        " does, or use fewer devices by --data",
    )
    return meshes.make_mesh(options.data or jax.device_count() // options.tensor, options.tensor)


def _count_bytes(policy: Decoder) -> int:
    """Counts the bytes of a policy on all devices."""
    # Shards are summed instead of leaves: each device holds a copy of a replicated leaf.
    return sum(
        shard.data.nbytes for leaf in jax.tree.leaves(policy) for shard in leaf.addressable_shards
    )
