"""`bench roofline`: bandwidth and peak operations per second of this machine."""

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from jaxspec import mesh as meshes
from jaxspec.bench.measure import package_versions
from jaxspec.config.cli import override_settings
from jaxspec.inputs.checked import CheckedConfig, first_line
from jaxspec.inputs.spec import ModelSpec
from jaxspec.processes.devices import (
    configure_cpu_devices,
    core_count,
    count_devices,
    describe_machine,
)
from jaxspec.storage.cache import cache_folder
from jaxspec.system.files import write_text_atomic
from jaxspec.system.progress import Screen
from jaxspec.system.terminal import print_line

ABOUT = """Measures the limits of generation on this machine. These are bytes read per second, by
size of an array that is read repeatedly (caches are faster than memory), and floating-point
operations per second of large matrix products. The result is saved for the other benchmarks. The
last line of the output is one JSON object."""
SIZES_MIB = (1, 3, 16, 96, 512)
"""Sizes of the arrays that are read repeatedly."""


class Roofline(NamedTuple):
    """Peak rates of a machine."""

    bytes_per_s: dict[int, float]
    """Bytes read per second, by MiB of an array that is read repeatedly."""
    flops_per_s: float

    def bandwidth_at(self, size: int) -> float:
        """Returns the bandwidth at the measured size nearest to `size` bytes."""
        return self.bytes_per_s[min(self.bytes_per_s, key=lambda mib: abs(mib - size / 2**20))]

    def min_seconds(self, work: "DecodeWork") -> float:
        """Returns the minimum seconds of a decode step."""
        # The same weights are read in each step, so their size tells which cache can hold them.
        return max(
            work.read_bytes / self.bandwidth_at(work.weight_bytes), work.flops / self.flops_per_s
        )


class DecodeWork(NamedTuple):
    """Minimum work of a plain decode step."""

    weight_bytes: int
    """Bytes of weights that a step reads."""
    read_bytes: float
    """Bytes that a step reads, keys and values included."""
    flops: float


def decode_work(model: ModelSpec, rows: int, length: float, itemsize: int) -> DecodeWork:
    """Computes the work of a plain decode step of `rows` rows.

    Each row has `length` tokens already. A number takes `itemsize` bytes.
    """
    family, query_size = model.family, model.heads * model.head_size
    kv_size = model.kv_heads * model.head_size
    ffn_weights = 3 * model.embed * model.ffn
    routed_experts = family.experts_per_token if family.experts else 1
    # An upper bound, since rows may share experts. A step reads each touched expert once, but
    # computes those of every token.
    touched_experts = min(family.experts, rows * routed_experts) if family.experts else 1
    attention_weights = 2 * model.embed * (query_size + kv_size)
    read_weights = (
        model.layers * (attention_weights + touched_experts * ffn_weights)
        + model.vocab * model.embed
    )
    used_weights = (
        model.layers * (attention_weights + routed_experts * ffn_weights)
        + model.vocab * model.embed
    )
    cached_values = rows * model.layers * 2 * kv_size * (length + 1)
    # Each row reads only one vector of the embedding. Each weight takes a multiplication and an
    # addition per row.
    return DecodeWork(
        itemsize * read_weights,
        itemsize * (read_weights + cached_values + rows * model.embed),
        2 * rows * used_weights + 4 * rows * model.layers * query_size * length,
    )


def _fastest_seconds(function: Callable[[], Any], seconds: float = 0.4) -> float:
    """Returns the seconds of the fastest of several calls."""
    # Disturbances only slow a call down. The first call compiles and is not counted.
    function()
    timings, deadline = [], time.perf_counter() + seconds
    while len(timings) < 3 or time.perf_counter() < deadline:
        start_time = time.perf_counter()
        function()
        timings.append(time.perf_counter() - start_time)
    return min(timings)


def _threaded_read_rate(mib: int, threads: int) -> float:
    # NumPy releases the GIL in reductions, so the threads read at the same time.
    chunks = [np.ones(mib * 2**18 // threads, np.float32) for _ in range(threads)]
    # Small arrays are read several times, because starting the threads takes time too.
    repeats = max(1, 64 // mib)

    def read_chunk(chunk: np.ndarray) -> None:
        for _ in range(repeats):
            np.max(chunk)

    with ThreadPoolExecutor(threads) as pool:
        return mib * 2**20 * repeats / _fastest_seconds(lambda: list(pool.map(read_chunk, chunks)))


def read_rate(mib: int) -> float:
    """Measures bytes per second of reading an array of `mib` MiB on a device."""
    array = jnp.ones((mib * 2**18,), jnp.float32)
    sum_array = jax.jit(jnp.sum)
    return mib * 2**20 / _fastest_seconds(lambda: sum_array(array).block_until_ready())


def copy_rate(mib: int) -> float:
    """Measures bytes per second of copying an array of `mib` MiB on a device.

    Reads and writes both count.
    """
    array = jnp.ones((mib * 2**18,), jnp.float32)
    # A compiled identity would return its argument without a copy.
    copy_array = jax.jit(lambda array: array + 1)
    return 2 * mib * 2**20 / _fastest_seconds(lambda: copy_array(array).block_until_ready())


def product_rate(dtype: Any) -> float:
    """Measures floating-point operations per second of large products."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / _fastest_seconds(lambda: product(matrix, matrix).block_until_ready())


def _roofline_file(dtype: str) -> Path:
    machine = describe_machine(meshes.make_mesh(1, 1))
    name = re.sub(r"\W+", "-", f"{machine['cpu']} {machine['cores']} {machine['device']} {dtype}")
    return cache_folder() / "roofline" / f"{name}.json"


def read_roofline(dtype: str) -> Roofline | None:
    """Reads the saved roofline of this machine and `dtype`.

    Returns None if there is none, or if the file is damaged, after a warning.
    """
    file = _roofline_file(dtype)
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Roofline(
            {int(mib): float(rate) for mib, rate in content["bytes_per_s"].items()},
            float(content["flops_per_s"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        print_line(
            f"warning: {file} is damaged ({first_line(reason)}) and is not used; to replace it, run"
            " python -m jaxspec.bench roofline"
        )
        return None


@dataclass(frozen=True, kw_only=True)
class RooflineOptions(CheckedConfig, prefix="--"):
    """Options of `bench roofline`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the products."""


def main(argv: Sequence[str]) -> int:
    """Measures for some seconds, and saves the results. Returns the exit status.

    The file keeps the maximum of each rate over all runs of the benchmark.
    """
    options = override_settings(RooflineOptions(), argv, "python -m jaxspec.bench roofline", ABOUT)
    configure_cpu_devices(1)
    count_devices()  # raises ConfigError if there is no device
    # A single core cannot use all of a CPU's bandwidth, so one thread per core reads.
    on_cpu = jax.default_backend() == "cpu"
    read_rates = {
        mib: _threaded_read_rate(mib, core_count()) if on_cpu else read_rate(mib)
        for mib in SIZES_MIB
    }
    current = Roofline(read_rates, product_rate(jnp.dtype(options.dtype)))
    previous = read_roofline(options.dtype) or current
    # Other load can only lower a rate, so the maximum is nearest to the machine's limit.
    best_rates = {
        mib: max(rate, previous.bytes_per_s.get(mib, 0))
        for mib, rate in current.bytes_per_s.items()
    }
    best = Roofline(best_rates, max(current.flops_per_s, previous.flops_per_s))
    file = _roofline_file(options.dtype)
    write_text_atomic(file, json.dumps(best._asdict()))
    table = Table(
        box=box.SIMPLE,
        title="what is read again and again",
        title_justify="left",
        padding=0,
        show_edge=False,
    )
    for title in ("MiB", "GB/s now", "GB/s at best"):
        table.add_column(title, justify="right")
    for mib, rate in current.bytes_per_s.items():
        table.add_row(str(mib), f"{rate / 1e9:.1f}", f"{best.bytes_per_s[mib] / 1e9:.1f}")
    Screen().print(table)
    print(
        f"{options.dtype} products: {current.flops_per_s / 1e9:.0f} GFLOP/s now,"
        f" {best.flops_per_s / 1e9:.0f} at best; kept in {file}"
    )
    context = {
        "machine": describe_machine(meshes.make_mesh(1, 1)),
        "versions": package_versions(),
        "dtype": options.dtype,
    }
    print(
        json.dumps(
            {"bench": "roofline", "now": current._asdict(), "best": best._asdict()} | context
        ),
        flush=True,
    )
    return 0
