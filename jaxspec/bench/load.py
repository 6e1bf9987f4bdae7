"""`bench load`: reading a checkpoint onto the devices as training does."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from jaxspec import mesh as meshes
from jaxspec.bench.measure import PeakMemory, check_model, versions
from jaxspec.config.cli import override
from jaxspec.hf.pretrained import policy_checkpoint, policy_config
from jaxspec.host.runner import placed
from jaxspec.host.warm_start import load_shown
from jaxspec.inputs.checked import Checked, called, require
from jaxspec.inputs.spec import Count, ModelConfig, Natural
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import LOGICAL_AXES, cast

ABOUT = """Reads the weights of a checkpoint straight to their final sharding, as training does, and
measures seconds and memory. On a CPU the devices' memory is the host's, so that the weights
themselves are part of what is measured. The last line of the output is one JSON object."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Checked, prefix="--"):
    """What `bench load` reads, and onto what."""

    model: str = ""
    """Folder of a Hugging Face checkpoint, or its id on the hub."""
    data: Natural = 0
    """Shards of the weights; 0: all devices. On a CPU, so many virtual devices are made."""
    tensor: Count = 1
    """Shards of heads, ffn and vocabulary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the weights are held."""


def load(argv: Sequence[str]) -> int:
    """Reads a checkpoint onto the devices as training does: seconds, and the most memory that the
    host needed on the way."""
    options = override(LoadOptions(), argv, "python -m jaxspec.bench load --model DIR", ABOUT)
    check_model(options.model, "load")
    require(
        Path("/proc/self/status").exists(),
        "bench load reads the memory it takes from /proc, which this system lacks",
    )
    with called({"model.path": "--model"}):
        config = policy_config(ModelConfig(path=options.model, dtype=options.dtype))
    meshes.prepare_devices(options.data * options.tensor)
    wanted, there = (options.data or 1) * options.tensor, meshes.count_devices()
    require(
        wanted <= there,
        f"--data {options.data} x --tensor {options.tensor} = {wanted} devices, but there are"
        f" {there}",
    )
    whole = options.data > 0 or there % options.tensor == 0
    require(
        whole,
        f"--tensor {options.tensor} does not divide {there} devices; give one that does, or --data"
        " to use fewer",
    )
    mesh = meshes.make_mesh(options.data or jax.device_count() // options.tensor, options.tensor)
    shapes = jax.eval_shape(lambda: cast(Decoder(config, jax.random.key(0)), options.dtype))
    layout = meshes.shardings(mesh, shapes, LOGICAL_AXES, meshes.TRAIN_RULES)
    checkpoint = policy_checkpoint(config, jax.tree.map(placed, shapes, layout))
    with PeakMemory() as memory:
        began = time.perf_counter()
        policy = load_shown(checkpoint)
        seconds = time.perf_counter() - began
    held = sum(
        shard.data.nbytes for leaf in jax.tree.leaves(policy) for shard in leaf.addressable_shards
    )
    line = {
        "bench": "load",
        "model": config.path,
        "dtype": options.dtype,
        "weight_bytes": checkpoint.bytes,
        "held_bytes": held,
        "peak_anonymous_bytes": memory.peak,
        "peak_over_weights": memory.peak / checkpoint.bytes,
        "seconds": seconds,
        "gb_per_s": checkpoint.bytes / 1e9 / seconds,
        "machine": meshes.machine(mesh),
        "versions": versions(),
    }
    words = (
        f"{checkpoint.bytes / 1e9:.3g} GB as {options.dtype} on {mesh.size} devices in"
        f" {seconds:.1f} s ({line['gb_per_s']:.2f} GB/s)"
    )
    print(
        f"{words}; at most {memory.peak / 1e9:.3g} GB of anonymous memory,"
        f" {line['peak_over_weights']:.2f} x the weights"
    )
    print(json.dumps(line), flush=True)
    return 0
