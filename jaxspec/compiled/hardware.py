"""NVIDIA GPUs that are not there: what is public of them, and what XLA's compiler is told of one.

With the wheels of JAX's CUDA plugin, and no driver, programs are compiled for them, to be read: the
extra `check` brings those wheels.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

from jax.experimental import topologies

from jaxspec.inputs.checked import require

_CUDA_VERSION = "13.0.0"
"""Of the driver and the runtime: loops go into command buffers from 12.3 on."""
RESERVED_SHARE = 0.08
"""The share of a device's memory that is not this program's: CUDA's own, and what JAX leaves."""


class Card(NamedTuple):
    """A GPU in public figures; sizes in bytes, rates in bytes or operations a second."""

    kind: str
    """As JAX calls the device."""
    capability: tuple[int, int]
    cores: int
    """Multiprocessors."""
    memory: int
    bandwidth: int
    cache: int
    """Of the second level."""
    shared: int
    """Shared memory of a multiprocessor, of which a block may have all but 1,024."""
    peak: float
    """Operations in bfloat16, without sparsity."""
    domain: int
    """GPUs that NVLink joins; 1: there is none."""
    link: float
    """To one of these, one way; without NVLink, over PCIe."""
    nic: float
    """To all others, one way."""
    node: int = 8
    """GPUs of a machine, at most."""
    threads: int = 2048
    """Of a multiprocessor."""
    clock_ghz: float = 1.98
    units: int = 128
    """Float32 units of a multiprocessor."""

    def __str__(self) -> str:
        return self.kind

    @property
    def usable_memory(self) -> int:
        """Bytes that a program may take."""
        return int(self.memory * (1 - RESERVED_SHARE))

    def to_target_config(self) -> str:
        """The text of XLA's `GpuTargetConfigProto`."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_core_limit: {self.threads}
              core_count: {self.cores}
              fpus_per_core: {self.units}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              driver_version: "{_CUDA_VERSION}"
              runtime_version: "{_CUDA_VERSION}"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.kind}"
        """


_HOPPER = {"capability": (9, 0), "cores": 132, "shared": 233_472, "peak": 989e12}
_BLACKWELL = {"shared": 233_472, "link": 900e9}
_AMPERE = {
    "capability": (8, 0),
    "cores": 108,
    "cache": 41_943_040,
    "shared": 167_936,
    "peak": 312e12,
    "domain": 8,
    "link": 300e9,
    "nic": 25e9,
    "clock_ghz": 1.41,
    "units": 64,
}
_ADA = {"capability": (8, 9), "shared": 102_400, "domain": 1, "link": 32e9, "threads": 1536}
_HGX = {"domain": 8, "link": 450e9, "nic": 50e9}
HARDWARE: dict[str, Card] = {
    "a100-40": Card(
        kind="NVIDIA A100-SXM4-40GB", memory=42_331_013_120, bandwidth=1_555_200_000_000, **_AMPERE
    ),
    "a100-80": Card(
        kind="NVIDIA A100-SXM4-80GB", memory=85_100_068_864, bandwidth=2_039_040_000_000, **_AMPERE
    ),
    "l40s": Card(
        kind="NVIDIA L40S",
        cores=142,
        memory=47_663_000_000,
        bandwidth=864_000_000_000,
        cache=100_663_296,
        peak=362e12,
        nic=25e9,
        clock_ghz=2.52,
        **_ADA,
    ),
    "rtx4090": Card(
        kind="NVIDIA GeForce RTX 4090",
        cores=128,
        memory=25_393_692_672,
        bandwidth=1_008_096_000_000,
        cache=75_497_472,
        peak=165e12,
        nic=3e9,
        clock_ghz=2.52,
        **_ADA,
    ),
    "h100": Card(
        kind="NVIDIA H100 80GB HBM3",
        memory=84_942_979_072,
        bandwidth=3_352_320_000_000,
        cache=52_428_800,
        **_HOPPER,
        **_HGX,
    ),
    "h200": Card(
        kind="NVIDIA H200",
        memory=150_754_820_096,
        bandwidth=4_800_000_000_000,
        cache=62_914_560,
        **_HOPPER,
        **_HGX,
    ),
    "b200": Card(
        kind="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        memory=191_514_411_008,
        bandwidth=7_672_320_000_000,
        cache=132_644_864,
        peak=2250e12,
        domain=8,
        nic=50e9,
        clock_ghz=1.965,
        **_BLACKWELL,
    ),
    "gb200": Card(
        kind="NVIDIA GB200",
        node=4,
        capability=(10, 0),
        cores=152,
        memory=198_642_237_440,
        bandwidth=8_000_000_000_000,
        cache=132_644_864,
        peak=2500e12,
        domain=72,
        nic=50e9,
        clock_ghz=2.06,
        **_BLACKWELL,
    ),
    "gb300": Card(
        kind="NVIDIA GB300",
        node=4,
        capability=(10, 3),
        cores=152,
        memory=297_021_079_552,
        bandwidth=7_928_064_000_000,
        cache=135_528_448,
        peak=2500e12,
        domain=72,
        nic=100e9,
        clock_ghz=2.07,
        **_BLACKWELL,
    ),
}
"""By the name that `check --hardware` takes: makers' data sheets, and what their drivers say."""
LOCAL_DEVICES = "here"
"""The name for the devices that JAX finds."""


def find_card(name: str) -> Card:
    """The card of a name.

    Raises:
      ConfigError: there is none; all names are listed.
    """
    require(
        name in HARDWARE,
        f"--hardware {name} is not known; known are {', '.join([*HARDWARE, LOCAL_DEVICES])}",
    )
    return HARDWARE[name]


def default_hardware(device_count: int) -> str:
    """The hardware that so many devices are taken for where nothing is said: a machine of H200, or
    a part of GB200 racks."""
    return "h200" if device_count <= HARDWARE["h200"].node else "gb200"


def has_cuda_plugin() -> bool:
    """Whether the plugin's wheels are here."""
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))


@functools.cache
def topology_devices(card: Card, count: int) -> tuple[Any, ...]:
    """So many GPUs of one machine, which are not there."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=card.to_target_config(), topology=f"1x1x{count}"
    )
    return tuple(topology.devices)
