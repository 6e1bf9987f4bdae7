"""Checkpoints come back bitwise on any mesh, refuse what does not fit, and survive kills and full disks; the cache builds once."""

import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec import cache, checkpoint
from jaxspec.checkpoint import Checkpoints, SaveError
from jaxspec.config import ConfigError
from jaxspec.rollout import draft_temperature
from jaxspec.state import Learner, TrainState


class _Network(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.embed = nnx.Param(jax.random.normal(key, (16, 8)))
        self.layers = nnx.Dict(norm=nnx.Param(jnp.arange(16.0).astype(jnp.bfloat16)))


def _state(seed: int = 0) -> TrainState:
    network = _Network(jax.random.key(seed))
    optimizer = optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)).init(network)  # pyright: ignore[reportArgumentType]
    learner = Learner(network=network, optimizer=optimizer, skipped=jnp.int32(3), skipped_in_row=jnp.int32(0))
    return TrainState(policy=learner, draft=None, overlap_by_factor=draft_temperature.start(8, (0.0, 1.0)), draft_online=jnp.bool_(True))


def _place(tree: Any, devices: int) -> tuple[Any, Any]:
    """The tree on a mesh of so many devices, rows of matrices sharded, and its abstract twin."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    placed = jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("data") if leaf.ndim > 1 else PartitionSpec())), tree
    )
    return placed, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), placed)


def _assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_restores_bitwise_on_other_meshes(tmp_path: Path) -> None:
    state = _state()
    placed, _ = _place(state, 8)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    checkpoints.save(7, placed, {"next_index": 112, "rewards": [0.1, 1.0]})
    checkpoints.close()
    for devices in (8, 4, 1):
        again = Checkpoints(tmp_path / "checkpoints")
        assert again.latest() == 7
        _, abstract = _place(_state(seed=1), devices)
        found, host = again.restore(7, abstract)
        _assert_same(found, state)
        assert found.policy.network.embed.sharding == abstract.policy.network.embed.sharding
        assert host == {"next_index": 112, "rewards": [0.1, 1.0]}
        again.close()


def test_arrays_may_be_donated_at_once(tmp_path: Path) -> None:
    placed, abstract = _place({"x": jnp.arange(1 << 20, dtype=jnp.float32)[:, None]}, 4)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, placed, {})
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf - 1, tree), donate_argnums=0)
    for _ in range(3):
        placed = overwrite(placed)
    jax.block_until_ready(placed)
    found, _ = checkpoints.restore(1, abstract)
    np.testing.assert_array_equal(np.asarray(found["x"])[:, 0], np.arange(1 << 20, dtype=np.float32))
    checkpoints.close()


def test_arrays_without_elements_come_back(tmp_path: Path) -> None:
    placed, abstract = _place({"accepted": jnp.zeros((8, 0), jnp.int32), "rounds": jnp.arange(8)}, 4)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, placed, {})
    checkpoints.wait()
    _assert_same(checkpoints.restore(1, abstract)[0], placed)
    checkpoints.close()


def test_keeps_the_newest_and_sweeps_halves(tmp_path: Path) -> None:
    placed, _ = _place({"x": jnp.arange(4.0)}, 1)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        checkpoints.save(step, placed, {})
    checkpoints.close()
    half = tmp_path / "4.orbax-checkpoint-tmp" / "arrays"
    half.mkdir(parents=True)
    (half / "manifest").write_bytes(b"half")
    again = Checkpoints(tmp_path)
    assert again.latest() == 3
    again.save(4, placed, {})
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_refuses_another_structure(tmp_path: Path) -> None:
    placed, _ = _place({"a": jnp.zeros((4, 2)), "b": jnp.zeros(3), "c": jnp.zeros(2)}, 1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, placed, {})
    checkpoints.wait()
    _, abstract = _place({"a": jnp.zeros((4, 3)), "b": jnp.zeros(3, jnp.int32), "d": jnp.zeros(2)}, 1)
    with pytest.raises(ConfigError) as refused:
        checkpoints.restore(5, abstract)
    message = str(refused.value)
    for part in (
        str(tmp_path / "5"),
        "a is float32[4, 2], this run needs float32[4, 3]",
        "b is float32[3]",
        "d is missing",
        "c is not part",
        "--workdir",
    ):
        assert part in message
    checkpoints.close()


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    placed, abstract = _place({"x": jnp.arange(4.0)}, 1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, placed, {})
    checkpoints.close()
    for file in (tmp_path / "5" / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    again = Checkpoints(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint .*5 cannot be read .*delete that folder"):
        again.restore(5, abstract)
    again.close()


def test_a_part_is_read_alone(tmp_path: Path) -> None:
    state = _state()
    placed, _ = _place(state, 8)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, (placed, {"rewards": jnp.arange(4.0)}), {"batch": 1})
    checkpoints.wait()
    part = state.replace(policy=state.policy.replace(optimizer=None))
    _, abstract = _place((part, None), 4)
    found, host = checkpoints.restore(1, abstract, whole=False)
    _assert_same(found, (part, None))
    assert host == {"batch": 1}
    with pytest.raises(ConfigError, match="is not part of this run"):
        checkpoints.restore(1, abstract)
    _, abstract = _place(({"policy": {"more": jnp.zeros(2)}}, None), 4)
    with pytest.raises(ConfigError, match=r"policy\.more is missing"):
        checkpoints.restore(1, abstract, whole=False)
    checkpoints.close()


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may grow beyond 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_failed_save_is_told_once_and_earlier_ones_stay(
    tmp_path: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    small, abstract = _place({"x": jnp.arange(1000.0)}, 1)
    large, _ = _place({"x": jax.random.normal(jax.random.key(0), (1_000_000,))}, 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, small, {})
    checkpoints.wait()
    request.getfixturevalue("full_disk")
    checkpoints.save(2, large, {})
    with pytest.raises(SaveError, match=r"checkpoint 2 cannot be saved in .*: File too large; earlier checkpoints are intact"):
        checkpoints.wait()
    assert "Traceback" not in capfd.readouterr().err
    assert checkpoints.latest() == 1
    _assert_same(checkpoints.restore(1, abstract)[0], small)
    checkpoints.close()
    with pytest.raises(SaveError, match=r"weights.npz cannot be written: File too large"):
        cache.save_tree(tmp_path / "weights.npz", large)
    with pytest.raises(ConfigError, match=r"workdir .* cannot be written to: File too large; free some space"):
        workdir.prepare_workdir(tmp_path / "run")


def test_prepare_workdir(tmp_path: Path) -> None:
    folder = workdir.prepare_workdir(tmp_path / "runs" / "a")
    assert folder.is_absolute()
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"workdir .*file/run cannot be written to: Not a directory; .*--workdir"):
        workdir.prepare_workdir(tmp_path / "file" / "run")


def test_trees_keep_their_bits(tmp_path: Path) -> None:
    state = _state()
    cache.save_tree(tmp_path / "weights.npz", _place(state, 4)[0])
    for devices in (8, 1):
        _, abstract = _place(_state(seed=1), devices)
        _assert_same(cache.load_tree(tmp_path / "weights.npz", abstract), state)
    with pytest.raises(ConfigError, match=r"weights.npz was written by another config: policy\S* is not part of this run"):
        cache.load_tree(tmp_path / "weights.npz", _place(state.replace(policy=None), 1)[1])


def test_content_key_depends_on_values_alone() -> None:
    key = cache.content_key({"b": 1, "a": [1.5, "x"]}, 3)
    assert key == cache.content_key({"a": (1.5, "x"), "b": 1}, 3)
    assert key != cache.content_key({"a": (1.5, "x"), "b": 2}, 3)
    assert len(key) == 16
    assert set(key) <= set("0123456789abcdef")


def test_cache_never_shows_a_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))

    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise RuntimeError("killed")

    def succeed(folder: Path) -> None:
        (folder / "weights").write_text("whole")

    with pytest.raises(RuntimeError, match="killed"):
        cache.cached("key", fail)
    half = tmp_path / "cache" / "key.building"
    half.mkdir()
    (half / "left over").write_text("by a kill")
    folder = cache.cached("key", succeed)
    assert folder == tmp_path / "cache" / "key"
    assert [path.name for path in folder.iterdir()] == ["weights"]
    assert cache.cached("key", fail) == folder
    monkeypatch.setenv("JAXSPEC_CACHE", str(folder / "weights" / "cache"))
    with pytest.raises(ConfigError, match=r"cannot be written to: Not a directory; name another folder with JAXSPEC_CACHE"):
        cache.cached("key", fail)


def test_cache_builds_once_for_two_runs(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        from pathlib import Path
        from jaxspec import cache, checkpoint
        def build(folder):
            print("building", flush=True)
            if sys.argv[1] == "dies":
                os.kill(os.getpid(), 9)
            time.sleep(1.0)
            (folder / "pid").write_text(str(os.getpid()))
        sys.stdin.readline()
        print((cache.cached("key", build) / "pid").read_text())
    """
    environment = {**os.environ, "JAXSPEC_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    runs = [
        subprocess.Popen([*command, word], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for word in ("dies", "builds", "waits")
    ]
    assert runs[0].communicate("go\n", timeout=60)[0] == "building\n"
    for run in runs[1:]:
        assert run.stdin
        run.stdin.write("go\n")
        run.stdin.flush()
    told = sorted((run.communicate(timeout=60)[0].splitlines() for run in runs[1:]), key=len)
    assert told[0][0] != told[1][0]
    assert sum(lines.count("building") for lines in told) == 1
    assert sum("waiting for it" in line for lines in told for line in lines) == 1
    assert told[0][-1] == told[1][-1]


@pytest.mark.slow
def test_two_processes_save_and_one_restores(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        from jaxspec import cache, checkpoint
        jax.config.update("jax_num_cpu_devices", 4)
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]), initialization_timeout=60)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        tree = jax.jit(lambda: {"x": jnp.arange(16.0), "n": jnp.int32(3)}, out_shardings={"x": rows, "n": everywhere})()
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
        checkpoints = checkpoint.Checkpoints(Path(sys.argv[3]) / "checkpoints")
        checkpoints.save(4, tree, {"next_index": 9})
        checkpoints.wait()
        found, host = checkpoints.restore(4, abstract)
        assert host == {"next_index": 9}
        assert all((a.data == b.data).all() for a, b in zip(found["x"].addressable_shards, tree["x"].addressable_shards))
        checkpoints.close()
        folder = cache.cached("key", lambda folder: cache.save_tree(folder / "weights.npz", {"w": jnp.arange(8.0)}))
        loaded = cache.load_tree(folder / "weights.npz", {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows)})
        assert float(jax.jit(jnp.sum, out_shardings=everywhere)(loaded["w"])) == 28
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "JAXSPEC_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", textwrap.dedent(script), port]
    runs = [
        subprocess.Popen([*command, str(index), str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True) for index in range(2)
    ]
    for run in runs:
        _, told = run.communicate(timeout=120)
        assert run.returncode == 0, told
    _, abstract = _place({"x": jnp.zeros(16), "n": jnp.int32(0)}, 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    found, host = checkpoints.restore(4, abstract)
    np.testing.assert_array_equal(np.asarray(found["x"]), np.arange(16.0))
    assert int(found["n"]) == 3
    assert json.dumps(host) == '{"next_index": 9}'
    checkpoints.close()
