"""How a CPU is split into devices, and how a job finds those that JAX has."""

import json
import os
import sys

import jax
import pytest

from jaxspec.inputs.checked import ConfigError
from jaxspec.processes.devices import configure_cpu_devices, count_devices
from tests import fork_server


def devices_with(**environment: str) -> tuple[int, str | None]:
    """Devices and NPROC after `configure_cpu_devices(3)` in a process of its own."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "NPROC")
    }
    program = "import json, os, jax; from jaxspec.processes.devices import configure_cpu_devices; "
    program += (
        "configure_cpu_devices(3); print(json.dumps([jax.device_count(), os.environ.get('NPROC')]))"
    )
    found = fork_server.run(
        [sys.executable, "-c", program],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    count, threads = json.loads(found.stdout)
    return count, threads


def test_cpu_devices_follow_the_mesh_unless_the_environment_says_otherwise() -> None:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    assert devices_with() == (3, str(max(1, cores // 3)))
    assert devices_with(JAXSPEC_LOCAL_DEVICES="2", XLA_FLAGS=" ") == (2, str(max(1, cores // 2)))
    assert devices_with(XLA_FLAGS="--xla_force_host_platform_device_count=5") == (5, None)
    assert devices_with(JAX_NUM_CPU_DEVICES="4") == (4, None)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "JAXSPEC_LOCAL_DEVICES",
            "abc",
            "JAXSPEC_LOCAL_DEVICES is 'abc'; give a whole number, 1 or more",
        ),
        ("JAXSPEC_LOCAL_DEVICES", "0", "JAXSPEC_LOCAL_DEVICES is '0'"),
        ("JAXSPEC_LOCAL_DEVICES", "-2", "JAXSPEC_LOCAL_DEVICES is '-2'"),
        ("NPROC", "many", "NPROC is 'many'"),
        ("NPROC", "0", "NPROC is '0'"),
        ("JAX_NUM_CPU_DEVICES", "0", "JAX_NUM_CPU_DEVICES is '0'"),
        ("XLA_FLAGS", "garbage", "XLA_FLAGS starts with .'garbage'.: neither a flag .* nor a file"),
        (
            "XLA_FLAGS",
            "--xla_force_host_platform_device_count=abc",
            "device_count=abc; give a whole number",
        ),
        (
            "XLA_FLAGS",
            "--xla_force_host_platform_device_count=0",
            "device_count=0; give a whole number",
        ),
        *(
            (name, "1000000", f"{name} is '1000000'.*at most 512")
            for name in ("JAX_NUM_CPU_DEVICES", "JAXSPEC_LOCAL_DEVICES")
        ),
        (
            "XLA_FLAGS",
            "--xla_force_host_platform_device_count=1000000",
            "device_count=1000000; give a whole number.*at most 512",
        ),
    ],
)
def test_numbers_of_devices_that_make_no_sense_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    for other in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "NPROC", "JAXSPEC_LOCAL_DEVICES"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the tests' own devices stay
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=said):
        configure_cpu_devices(2)


@pytest.mark.parametrize(
    "error",
    [AssertionError(), RuntimeError("Unable to initialize backend 'cuda': none\nand a page more")],
)
def test_a_device_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What JAX raises for JAX_PLATFORMS=cuda without and with the plug-in."""

    def missing() -> int:
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "device_count", missing)
    with pytest.raises(
        ConfigError,
        match=(
            r"^JAX_PLATFORMS is 'cuda', and there is no such device here.*; unset"
            r" JAX_PLATFORMS[^\n]*$"
        ),
    ):
        count_devices()
