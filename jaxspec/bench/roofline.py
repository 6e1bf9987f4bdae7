"""`bench roofline`: what this machine can do at best, and how far that is used."""

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
from jaxspec.bench.measure import versions
from jaxspec.config.cli import override
from jaxspec.inputs.checked import Checked, first_line
from jaxspec.inputs.spec import ModelSpec
from jaxspec.storage.cache import cache_folder
from jaxspec.system.files import write_whole
from jaxspec.system.progress import Screen
from jaxspec.system.terminal import say

ABOUT = """Measures what bounds generation on this machine: bytes read a second, by the size of what
is read again and again (caches are faster than memory), and floating-point operations a second of
large products. The result is kept for the other benchmarks. The last line of the output is one JSON
object."""
SIZES_MIB = (1, 3, 16, 96, 512)
"""What is read again and again."""


class Roofline(NamedTuple):
    """What a machine can do."""

    bytes_per_s: dict[int, float]
    """By MiB that are read again and again."""
    flops_per_s: float

    def bandwidth(self, size: int) -> float:
        """Bytes a second where `size` bytes are read again and again: of the nearest size that was
        measured."""
        return self.bytes_per_s[min(self.bytes_per_s, key=lambda mib: abs(mib - size / 2**20))]

    def floor(self, work: "Work") -> float:
        """Seconds that a step takes at least."""
        return max(work.bytes / self.bandwidth(work.weights), work.flops / self.flops_per_s)


class Work(NamedTuple):
    """What one plain decode step of some rows must do."""

    weights: int
    """Bytes that every step reads."""
    bytes: float
    """Bytes that every step reads, keys and values included."""
    flops: float


def work_of(model: ModelSpec, rows: int, length: float, width: int) -> Work:
    """A step of `rows` with `length` tokens before them, where a number takes `width` bytes."""
    family, heads = model.family, model.heads * model.head_size
    kv = model.kv_heads * model.head_size
    ffn = 3 * model.embed * model.ffn
    routed = family.experts_per_token if family.experts else 1
    touched = min(family.experts, rows * routed) if family.experts else 1
    attention = 2 * model.embed * (heads + kv)
    read = model.layers * (attention + touched * ffn) + model.vocab * model.embed
    used = model.layers * (attention + routed * ffn) + model.vocab * model.embed
    cached = rows * model.layers * 2 * kv * (length + 1)
    return Work(
        width * read,
        width * (read + cached + rows * model.embed),
        2 * rows * used + 4 * rows * model.layers * heads * length,
    )


def _best(function: Callable[[], Any], seconds: float = 0.4) -> float:
    """Seconds of the fastest of several calls: whatever disturbs one only slows it down."""
    function()
    found, end = [], time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def _read_by_threads(mib: int, threads: int) -> float:
    parts = [np.ones(mib * 2**18 // threads, np.float32) for _ in range(threads)]
    times = max(1, 64 // mib)

    def read(part: np.ndarray) -> None:
        for _ in range(times):
            np.max(part)

    with ThreadPoolExecutor(threads) as pool:
        return mib * 2**20 * times / _best(lambda: list(pool.map(read, parts)))


def read_rate(mib: int) -> float:
    """Bytes a second that a device reads, of so many MiB."""
    part = jnp.ones((mib * 2**18,), jnp.float32)
    total = jax.jit(jnp.sum)
    return mib * 2**20 / _best(lambda: total(part).block_until_ready())


def copy_rate(mib: int) -> float:
    """Bytes a second that a device reads and writes, copying so many MiB."""
    part = jnp.ones((mib * 2**18,), jnp.float32)
    copied = jax.jit(lambda part: part + 1)
    return 2 * mib * 2**20 / _best(lambda: copied(part).block_until_ready())


def product_rate(dtype: Any) -> float:
    """Floating-point operations a second of large products."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    left = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / _best(lambda: product(left, left).block_until_ready())


def _file(dtype: str) -> Path:
    about = meshes.machine(meshes.make_mesh(1, 1))
    name = re.sub(r"\W+", "-", f"{about['cpu']} {about['cores']} {about['device']} {dtype}")
    return cache_folder() / "roofline" / f"{name}.json"


def remembered(dtype: str) -> Roofline | None:
    """What this machine has shown before; None where nothing is kept of it, or, with a word, where
    that is damaged."""
    file = _file(dtype)
    if not file.exists():
        return None
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return Roofline(
            {int(mib): float(rate) for mib, rate in kept["bytes_per_s"].items()},
            float(kept["flops_per_s"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        say(
            f"warning: {file} is damaged ({first_line(reason)}) and is not used; `python -m"
            " jaxspec.bench roofline` makes it anew"
        )
        return None


@dataclass(frozen=True, kw_only=True)
class RooflineOptions(Checked, prefix="--"):
    """What `bench roofline` measures with."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the products."""


def main(argv: Sequence[str]) -> int:
    """Measures for some seconds, and keeps the best that was ever seen of each number."""
    options = override(RooflineOptions(), argv, "python -m jaxspec.bench roofline", ABOUT)
    meshes.prepare_devices(1)
    meshes.count_devices()  # says it where there is none
    cpu = jax.default_backend() == "cpu"
    read = {
        mib: _read_by_threads(mib, meshes.cores()) if cpu else read_rate(mib) for mib in SIZES_MIB
    }
    found = Roofline(read, product_rate(jnp.dtype(options.dtype)))
    before = remembered(options.dtype) or found
    rates = {
        mib: max(rate, before.bytes_per_s.get(mib, 0)) for mib, rate in found.bytes_per_s.items()
    }
    best = Roofline(rates, max(found.flops_per_s, before.flops_per_s))
    file = _file(options.dtype)
    write_whole(file, json.dumps(best._asdict()))
    table = Table(
        box=box.SIMPLE,
        title="what is read again and again",
        title_justify="left",
        padding=0,
        show_edge=False,
    )
    for title in ("MiB", "GB/s now", "GB/s at best"):
        table.add_column(title, justify="right")
    for mib, rate in found.bytes_per_s.items():
        table.add_row(str(mib), f"{rate / 1e9:.1f}", f"{best.bytes_per_s[mib] / 1e9:.1f}")
    Screen().print(table)
    print(
        f"{options.dtype} products: {found.flops_per_s / 1e9:.0f} GFLOP/s now,"
        f" {best.flops_per_s / 1e9:.0f} at best; kept in {file}"
    )
    about = {
        "machine": meshes.machine(meshes.make_mesh(1, 1)),
        "versions": versions(),
        "dtype": options.dtype,
    }
    print(
        json.dumps({"bench": "roofline", "now": found._asdict(), "best": best._asdict()} | about),
        flush=True,
    )
    return 0
