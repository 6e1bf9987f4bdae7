"""Specifications of NVIDIA GPUs to compile for.

Compiling needs no GPU and no driver, but the wheels of JAX's CUDA plugin, which the extra `check`
installs.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

from jax.experimental import topologies

from jaxspec.inputs.checked import require

# XLA puts loops into command buffers only from CUDA 12.3 on.
_CUDA_VERSION = "13.0.0"
"""Version of the driver and of the runtime."""
# Runs let JAX allocate 92 % of the memory by default (`jaxspec/host/job.py`).
RESERVED_SHARE = 0.08
"""Fraction of a device's memory that programs cannot use."""


class Card(NamedTuple):
    """Public specification of a GPU.

    Sizes are in bytes, rates in bytes or operations per second.
    """

    kind: str
    """JAX's `device_kind`."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    cores: int
    """Number of multiprocessors."""
    memory: int
    bandwidth: int
    """Bandwidth of device memory."""
    cache: int
    """Size of the L2 cache."""
    shared: int
    """Shared memory of a multiprocessor."""
    peak: float
    """Peak rate of dense bfloat16 products."""
    domain: int
    """GPUs of an NVLink domain. 1 means no NVLink."""
    link: float
    """Bandwidth to a GPU of the domain, one way. PCIe if there is no NVLink."""
    nic: float
    """Bandwidth to GPUs outside the domain, one way."""
    node: int = 8
    """Maximum number of GPUs in a machine."""
    threads: int = 2048
    """Threads of a multiprocessor."""
    clock_ghz: float = 1.98
    units: int = 128
    """Float32 units of a multiprocessor."""

    def __str__(self) -> str:
        return self.kind

    @property
    def usable_memory(self) -> int:
        """Bytes that programs can use."""
        return int(self.memory * (1 - RESERVED_SHARE))

    def to_target_config(self) -> str:
        """Returns the text of XLA's `GpuTargetConfigProto`."""
        # CUDA reserves 1,024 bytes of shared memory per block.
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


# Figures that several cards have in common.
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
# Figures come from the makers' data sheets, and from what their drivers report.
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
"""Cards by their name for `check --hardware`."""
LOCAL_DEVICES = "here"
"""Name that stands for the devices that JAX finds."""


def find_card(name: str) -> Card:
    """Finds a card by its `--hardware` name.

    Raises:
      ConfigError: the name is unknown. The message lists all names.
    """
    require(
        name in HARDWARE,
        f"--hardware {name} is unknown; use one of {', '.join([*HARDWARE, LOCAL_DEVICES])}",
    )
    return HARDWARE[name]


def default_hardware(device_count: int) -> str:
    """Returns the default hardware for a device count.

    This is one machine of H200 if it has enough devices, else racks of GB200.
    """
    return "h200" if device_count <= HARDWARE["h200"].node else "gb200"


def has_cuda_plugin() -> bool:
    """Returns whether JAX's CUDA plugin is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))


@functools.cache
def topology_devices(card: Card, count: int) -> tuple[Any, ...]:
    """Returns devices of absent GPUs, to compile for."""
    # The topology is written as partitions x hosts of a partition x GPUs of a host.
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=card.to_target_config(), topology=f"1x1x{count}"
    )
    return tuple(topology.devices)
