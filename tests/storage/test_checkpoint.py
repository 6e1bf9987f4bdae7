"""Checkpoints come back bitwise on any mesh, refuse what does not fit, and survive kills and full
disks; the cache builds once."""

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
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.config.settings import ConfigError
from jaxspec.host.workdir import prepare_workdir
from jaxspec.rollout import draft_temperature
from jaxspec.state import GeneratorState, LearnerState, Trained, TrainState
from jaxspec.storage import cache
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.storage.trees import digests
from jaxspec.system.files import Damaged, SaveError


class _Network(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.embed = nnx.Param(jax.random.normal(key, (16, 8)))
        self.layers = nnx.Dict(norm=nnx.Param(jnp.arange(16.0).astype(jnp.bfloat16)))


def _state(seed: int = 0) -> TrainState:
    network = _Network(jax.random.key(seed))
    optimizer = optax.adamw(
        1e-3, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    ).init(network)  # pyright: ignore[reportArgumentType]
    policy = Trained(
        network=network, optimizer=optimizer, skipped=jnp.int32(3), skipped_in_row=jnp.int32(0)
    )
    learner = LearnerState(policy=policy, draft=None, online=jnp.bool_(True), version=jnp.int32(5))
    return TrainState(
        learner=learner,
        generator=GeneratorState(overlap_by_factor=draft_temperature.start(8, (0.0, 1.0))),
    )


def _place(tree: Any, devices: int) -> tuple[Any, Any]:
    """The tree on a mesh of so many devices, rows of matrices sharded, and its abstract twin."""
    mesh = jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    placed = jax.tree.map(
        lambda leaf: jax.device_put(
            leaf, NamedSharding(mesh, PartitionSpec("data") if leaf.ndim > 1 else PartitionSpec())
        ),
        tree,
    )
    return placed, jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), placed
    )


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
        assert (
            found.learner.policy.network.embed.sharding
            == abstract.learner.policy.network.embed.sharding
        )
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
    np.testing.assert_array_equal(
        np.asarray(found["x"])[:, 0], np.arange(1 << 20, dtype=np.float32)
    )
    checkpoints.close()


def test_arrays_without_elements_come_back(tmp_path: Path) -> None:
    placed, abstract = _place(
        {"accepted": jnp.zeros((8, 0), jnp.int32), "rounds": jnp.arange(8)}, 4
    )
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
    _, abstract = _place(
        {"a": jnp.zeros((4, 3)), "b": jnp.zeros(3, jnp.int32), "d": jnp.zeros(2)}, 1
    )
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
    with pytest.raises(
        ConfigError, match=r"checkpoint .*5 cannot be read .*put it back from a copy"
    ):
        again.restore(5, abstract)
    again.close()


def _cut(content: bytes, place: int) -> bytes:
    return content[:place]


def _flip(content: bytes, place: int) -> bytes:
    """Eight bytes from `place` on, each with another bit."""
    changed = bytes(byte ^ (1 << number) for number, byte in enumerate(content[place : place + 8]))
    return content[:place] + changed + content[place + 8 :]


def _whole_or_refused(folder: Path, abstract: Any, wanted: Any) -> bool:
    """Whether the checkpoint is refused as damaged; it is what was saved otherwise."""
    try:
        checkpoints = Checkpoints(folder, read_only=True)
        try:
            found, host = checkpoints.restore(5, abstract)
        finally:
            checkpoints.close()
    except Damaged as reason:
        return str(folder) in str(reason) and "\n" not in str(reason)
    _assert_same(found, wanted)
    assert host == {"batch": 2, "line": {"reward/mean": 0.5}}
    return False


def test_any_damage_is_found_or_does_no_harm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every file of a checkpoint: emptied, cut in half, one byte short, and eight bytes flipped at
    four places."""
    placed, abstract = _place(
        {
            "x": jax.random.normal(jax.random.key(0), (16, 8)),
            "n": jnp.int32(3),
            "live": jnp.array([True, False]),
        },
        4,
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, placed, {"batch": 2, "line": {"reward/mean": 0.5}})
    checkpoints.close()
    files = sorted(file for file in (tmp_path / "5").rglob("*") if file.is_file())
    found = {}
    for file in files:
        content = file.read_bytes()
        size = len(content)
        damaged = [_cut(content, place) for place in (0, size // 2, size - 1)]
        damaged += [
            _flip(content, place) for place in (0, size // 3, 2 * size // 3, max(0, size - 8))
        ]
        found[file.name] = found.get(file.name, 0)
        for bad in damaged:
            file.write_bytes(bad)
            found[file.name] += _whole_or_refused(tmp_path, abstract, placed)
        file.write_bytes(content)
    assert not _whole_or_refused(tmp_path, abstract, placed)
    assert found["metadata"] == 7, "all that the host saved is digested"
    data = max(files, key=lambda file: file.stat().st_size)
    assert found[data.name] == 7, "so are the arrays"
    assert "Traceback" not in capfd.readouterr().err


def test_every_flipped_element_changes_the_digest_which_is_the_same_on_every_mesh() -> None:
    """For a type of each width; by NumPy on the host, and compiled."""
    values = np.random.default_rng(0).uniform(1, 100, (4, 6, 5))
    for dtype in (np.float32, jnp.bfloat16, np.int8, bool, np.float16, np.int32):
        array = values.astype(dtype)
        (number,) = digests({"x": _place(array, 1)[0]}).values()
        for devices in (2, 4):
            assert digests({"x": _place(array, devices)[0]}) == {"x": number}
        seen = {number}
        for place in np.ndindex(array.shape):
            changed = array.copy()
            changed[place] = not changed[place] if dtype is bool else -changed[place]
            seen.add(digests({"x": _place(changed, 1)[0]})["x"])
        assert len(seen) == array.size + 1, dtype


def test_digests_are_compiled_where_arrays_are_not_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, _ = _place(_state(), 8)
    leaves = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(placed))}
    at_hand = digests(leaves)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert digests(leaves) == at_hand


def test_the_newest_whole_checkpoint_takes_the_place_of_damaged_ones(tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / "checkpoints"
    placed = {
        step: _place({"x": jax.random.normal(jax.random.key(step), (64, 32))}, 2)
        for step in (2, 4, 6)
    }
    checkpoints = Checkpoints(folder, keep=3)
    for step, (arrays, _) in placed.items():
        checkpoints.save(step, arrays, {"batch": step})
    checkpoints.close()
    for step in (4, 6):
        largest = max(
            (file for file in (folder / str(step)).rglob("*") if file.is_file()),
            key=lambda file: file.stat().st_size,
        )
        largest.write_bytes(_flip(largest.read_bytes(), 100))
    files = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    checkpoints = Checkpoints(folder, keep=3, say=told.append)
    restored = checkpoints.restore_newest(placed[2][1])
    assert restored is not None
    _assert_same(restored[0], placed[2][0])
    assert restored[1] == {"batch": 2}
    for step, line in zip((6, 4), told, strict=True):
        assert line.startswith(f"warning: checkpoint {folder / str(step)} ")
        assert (
            f"{tmp_path / 'damaged-checkpoints' / str(step)}, and checkpoint 2 takes its place"
            in line
        )
    aside = tmp_path / "damaged-checkpoints"
    kept = {
        str(file.relative_to(root)): file.read_bytes()
        for root in (folder, aside)
        for file in root.rglob("*")
        if file.is_file()
    }
    assert kept == files, "nothing is deleted"
    checkpoints.save(4, placed[4][0], {"batch": 4})
    checkpoints.wait()
    _assert_same(checkpoints.restore(4, placed[4][1])[0], placed[4][0])
    checkpoints.close()


def test_damaged_checkpoints_without_a_whole_one_stay_where_they_are(tmp_path: Path) -> None:
    placed, abstract = _place({"x": jnp.arange(64.0)}, 2)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore_newest(abstract) is None
    checkpoints.save(1, placed, {})
    checkpoints.wait()
    (tmp_path / "1" / "host" / "metadata").write_text("")
    with pytest.raises(
        ConfigError, match=r"checkpoint .*/1 cannot be read .*put it back from a copy"
    ):
        checkpoints.restore_newest(abstract)
    assert (tmp_path / "1").is_dir()
    checkpoints.close()


def _with_steps(folder: Path, *steps: int) -> tuple[Checkpoints, Any]:
    """Checkpoints of these steps, and what is restored from them."""
    placed, abstract = _place({"x": jnp.arange(64.0)}, 2)
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, placed, {})
    checkpoints.wait()
    return checkpoints, abstract


def test_a_checkpoint_without_digests_is_damaged(tmp_path: Path) -> None:
    checkpoints, abstract = _with_steps(tmp_path, 1)
    (tmp_path / "1" / "host" / "metadata").write_text('{"batch": 1}')
    with pytest.raises(Damaged, match=r"/1 is damaged \(what it says of the run differs"):
        checkpoints.restore(1, abstract)
    checkpoints.close()


def test_the_step_whose_metadata_is_damaged_is_named(tmp_path: Path) -> None:
    _with_steps(tmp_path, 1, 2)[0].close()
    for content in ("[]", "7", '{"metrics": [1]}'):
        (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text(content)
        with pytest.raises(
            Damaged, match=rf"^{tmp_path}/2/_CHECKPOINT_METADATA is damaged .*remove that file"
        ):
            Checkpoints(tmp_path)


def test_what_may_not_be_opened_is_no_damage(tmp_path: Path) -> None:
    """Orbax takes it for missing; a good checkpoint must not be set aside for that. A loop of links
    is refused to root as well."""
    checkpoints, abstract = _with_steps(tmp_path, 1, 2)
    for item in ("host", "arrays"):
        (tmp_path / "2" / item).rename(tmp_path / "elsewhere")
        (tmp_path / "2" / item).symlink_to(item)
        with pytest.raises(
            ConfigError,
            match=rf"/2 cannot be read \({tmp_path}/2/{item}: Too many levels.*\); see to that",
        ) as refused:
            checkpoints.restore_newest(abstract)
        assert not isinstance(refused.value, Damaged)
        (tmp_path / "2" / item).unlink()
        (tmp_path / "elsewhere").rename(tmp_path / "2" / item)
    checkpoints.close()


def test_what_the_system_refuses_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is out of file handles must not set a good checkpoint aside."""
    checkpoints, abstract = _with_steps(tmp_path, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "restore", fail)
    with pytest.raises(
        ConfigError, match=r"/1 cannot be read \(Too many open files\); see to that"
    ) as refused:
        checkpoints.restore_newest(abstract)
    assert not isinstance(refused.value, Damaged)
    checkpoints.close()


def test_a_part_is_read_alone(tmp_path: Path) -> None:
    state = _state()
    placed, _ = _place(state, 8)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, (placed, {"rewards": jnp.arange(4.0)}), {"batch": 1})
    checkpoints.wait()
    learner = state.learner
    part = state.replace(learner=learner.replace(policy=learner.policy.replace(optimizer=None)))
    _, abstract = _place((part, None), 4)
    found, host = checkpoints.restore(1, abstract, part=True)
    _assert_same(found, (part, None))
    assert host == {"batch": 1}
    with pytest.raises(ConfigError, match="is not part of this run"):
        checkpoints.restore(1, abstract)
    _, abstract = _place(({"policy": {"more": jnp.zeros(2)}}, None), 4)
    with pytest.raises(ConfigError, match=r"policy\.more is missing"):
        checkpoints.restore(1, abstract, part=True)
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
    with pytest.raises(
        SaveError,
        match=r"checkpoint 2 cannot be saved in .*: File too large; earlier checkpoints are intact",
    ):
        checkpoints.wait()
    assert "Traceback" not in capfd.readouterr().err
    assert checkpoints.latest() == 1
    _assert_same(checkpoints.restore(1, abstract)[0], small)
    checkpoints.close()
    with pytest.raises(SaveError, match=r"weights.npz cannot be written: File too large"):
        cache.save_tree(tmp_path / "weights.npz", large)
    with pytest.raises(
        ConfigError, match=r"workdir .* cannot be written to: File too large; free some space"
    ):
        prepare_workdir(tmp_path / "run")


@pytest.mark.slow
def test_a_full_disk_is_one_line_of_output(tmp_path: Path) -> None:
    """Of sixty writes that fail at once, in threads that outlive the save, one is told."""
    script = """
        import contextlib, resource, sys
        from pathlib import Path
        import jax
        from jaxspec.storage.checkpoint import Checkpoints
        from jaxspec.host.job import reported
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        def work():
            array = jax.random.normal(jax.random.key(0), (30_000,))
            arrays = {f"x{number}": array + 0 for number in range(60)}
            with contextlib.closing(Checkpoints(Path(sys.argv[1]))) as checkpoints:
                checkpoints.save(1, arrays, {})
            return 0
        sys.exit(reported(work))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ended = subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    (line,) = (ended.stdout + ended.stderr).splitlines()
    assert line.startswith(
        f"error: checkpoint 1 cannot be saved in {tmp_path}: File too large; earlier checkpoints"
        " are intact"
    )


@pytest.mark.slow
def test_two_processes_save_and_one_restores(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        from jax.experimental import multihost_utils
        from jaxspec.storage import cache
        from jaxspec.storage import checkpoint
        from jaxspec.host import workdir
        from jaxspec.config.settings import ConfigError

        def refusal(work):
            try:
                work()
            except ConfigError as reason:
                return str(reason)

        jax.config.update("jax_num_cpu_devices", 4)
        port, process = sys.argv[1], int(sys.argv[2])
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        tree = {"x": jnp.arange(16.0), "n": jnp.int32(3)}
        tree = jax.jit(lambda: tree, out_shardings={"x": rows, "n": everywhere})()

        def shape(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

        abstract = jax.tree.map(shape, tree)
        checkpoints = checkpoint.Checkpoints(Path(sys.argv[3]) / "checkpoints")
        checkpoints.save(4, tree, {"next_index": 9})
        checkpoints.wait()
        found, host = checkpoints.restore(4, abstract)
        assert host == {"next_index": 9}
        pairs = zip(found["x"].addressable_shards, tree["x"].addressable_shards)
        assert all((a.data == b.data).all() for a, b in pairs)
        # A damaged checkpoint that process 0 alone tries to move away, and cannot: both end; once
        # it can, both go on from the one before.
        checkpoints.save(5, tree, {})
        checkpoints.wait()
        inway = Path(sys.argv[3]) / "damaged-checkpoints"
        if jax.process_index() == 0:
            (Path(sys.argv[3]) / "checkpoints" / "5" / "host" / "metadata").write_text("")
            inway.write_text("")
        multihost_utils.sync_global_devices("5 is damaged")
        assert "cannot be moved" in refusal(lambda: checkpoints.restore_newest(abstract))
        if jax.process_index() == 0:
            inway.unlink()
        assert checkpoints.restore_newest(abstract)[1] == host
        assert checkpoints.latest() == 4
        # What process 0 finds in the way, both are told.
        mine = Path(sys.argv[3]) / ("" if jax.process_index() == 0 else "elsewhere")
        said = refusal(lambda: workdir.require_no_checkpoints(mine))
        assert "checkpoints has 4, which cannot be read" in said
        checkpoints.close()

        def build(folder):
            cache.save_tree(folder / "weights.npz", {"w": jnp.arange(8.0)})

        wanted = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows)}
        loaded = cache.load_tree(cache.cached("key", build) / "weights.npz", wanted)
        assert float(jax.jit(jnp.sum, out_shardings=everywhere)(loaded["w"])) == 28
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {
        **os.environ,
        "JAXSPEC_CACHE": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
    }
    command = [sys.executable, "-c", textwrap.dedent(script), port]
    runs = [
        subprocess.Popen(
            [*command, str(index), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
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
