"""Checkpoints come back bitwise on any mesh, refuse what does not fit, and survive kills and full
disks."""

import json
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.host.workdir import prepare_workdir
from jaxspec.inputs.checked import ConfigError
from jaxspec.storage import cache
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.files import SaveError
from tests import fork_server
from tests.conftest import free_port
from tests.fork_server import Program
from tests.storage.saved import a_state, assert_same, on_mesh


def test_restores_bitwise_on_other_meshes(tmp_path: Path) -> None:
    state = a_state()
    placed, _ = on_mesh(state, 8)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest_step() is None
    checkpoints.save(7, placed, {"next_index": 112, "rewards": [0.1, 1.0]})
    checkpoints.close()
    for devices in (8, 4, 2, 1):
        again = Checkpoints(tmp_path / "checkpoints")
        assert again.latest_step() == 7
        _, abstract = on_mesh(a_state(seed=1), devices)
        found, host, _ = again.restore(7, abstract)
        assert_same(found, state)
        assert (
            found.learner.policy.network.embed.sharding
            == abstract.learner.policy.network.embed.sharding
        )
        assert host == {"next_index": 112, "rewards": [0.1, 1.0]}
        again.close()


def test_arrays_may_be_donated_at_once(tmp_path: Path) -> None:
    placed, abstract = on_mesh({"x": jnp.arange(1 << 20, dtype=jnp.float32)[:, None]}, 4)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, placed, {})
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: -leaf - 1, tree), donate_argnums=0)
    for _ in range(3):
        placed = overwrite(placed)
    jax.block_until_ready(placed)
    found, _, _ = checkpoints.restore(1, abstract)
    np.testing.assert_array_equal(
        np.asarray(found["x"])[:, 0], np.arange(1 << 20, dtype=np.float32)
    )
    checkpoints.close()


def test_arrays_without_elements_come_back(tmp_path: Path) -> None:
    placed, abstract = on_mesh(
        {"accepted": jnp.zeros((8, 0), jnp.int32), "rounds": jnp.arange(8)}, 4
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, placed, {})
    checkpoints.wait_until_saved()
    assert_same(checkpoints.restore(1, abstract)[0], placed)
    checkpoints.close()


def test_keeps_the_newest_and_sweeps_halves(tmp_path: Path) -> None:
    placed, _ = on_mesh({"x": jnp.arange(4.0)}, 1)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        checkpoints.save(step, placed, {})
    checkpoints.close()
    half = tmp_path / "4.orbax-checkpoint-tmp" / "arrays"
    half.mkdir(parents=True)
    (half / "manifest").write_bytes(b"half")
    again = Checkpoints(tmp_path)
    assert again.latest_step() == 3
    again.save(4, placed, {})
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_refuses_another_structure(tmp_path: Path) -> None:
    placed, _ = on_mesh({"a": jnp.zeros((4, 2)), "b": jnp.zeros(3), "c": jnp.zeros(2)}, 1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, placed, {})
    checkpoints.wait_until_saved()
    _, abstract = on_mesh(
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


def test_a_part_is_read_alone(tmp_path: Path) -> None:
    state = a_state()
    placed, _ = on_mesh(state, 8)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, (placed, {"rewards": jnp.arange(4.0)}), {"batch": 1})
    checkpoints.wait_until_saved()
    learner = state.learner
    part = state.replace(learner=learner.replace(policy=learner.policy.replace(optimizer=None)))
    _, abstract = on_mesh((part, None), 4)
    found, host, _ = checkpoints.restore(1, abstract, partial=True)
    assert_same(found, (part, None))
    assert host == {"batch": 1}
    with pytest.raises(ConfigError, match="is not part of this run"):
        checkpoints.restore(1, abstract)
    _, abstract = on_mesh(({"policy": {"more": jnp.zeros(2)}}, None), 4)
    with pytest.raises(ConfigError, match=r"policy\.more is missing"):
        checkpoints.restore(1, abstract, partial=True)
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
    small, abstract = on_mesh({"x": jnp.arange(1000.0)}, 1)
    large, _ = on_mesh({"x": jax.random.normal(jax.random.key(0), (1_000_000,))}, 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, small, {})
    checkpoints.wait_until_saved()
    request.getfixturevalue("full_disk")
    checkpoints.save(2, large, {})
    with pytest.raises(
        SaveError,
        match=r"checkpoint 2 cannot be saved in .*: File too large; earlier checkpoints are intact",
    ):
        checkpoints.wait_until_saved()
    assert "Traceback" not in capfd.readouterr().err
    assert checkpoints.latest_step() == 1
    assert_same(checkpoints.restore(1, abstract)[0], small)
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
        from jaxspec.host.job import run_and_report_errors
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        def work():
            array = jax.random.normal(jax.random.key(0), (30_000,))
            arrays = {f"x{number}": array + 0 for number in range(60)}
            with contextlib.closing(Checkpoints(Path(sys.argv[1]))) as checkpoints:
                checkpoints.save(1, arrays, {})
            return 0
        sys.exit(run_and_report_errors(work))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ended = fork_server.run(
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
def test_two_processes_save_and_one_restores_and_the_other_way_round(tmp_path: Path) -> None:
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
        # What one process on one device has saved.
        alone = checkpoint.Checkpoints(Path(sys.argv[3]) / "alone", read_only=True)
        found, host, own = alone.restore(7, abstract)
        assert host == {"by": "one"}
        assert own == ([] if jax.process_index() else [{"mine": "all"}])
        for shard in found["x"].addressable_shards:
            assert (shard.data == 2 * jnp.arange(16.0)[shard.index]).all()
        alone.close()
        checkpoints = checkpoint.Checkpoints(Path(sys.argv[3]) / "checkpoints")
        checkpoints.save(4, tree, {"next_index": 9}, {"mine": f"of {process}"})
        checkpoints.wait_until_saved()
        found, host, own = checkpoints.restore(4, abstract)
        assert host == {"next_index": 9}
        assert own == [{"mine": f"of {process}"}]
        pairs = zip(found["x"].addressable_shards, tree["x"].addressable_shards)
        assert all((a.data == b.data).all() for a, b in pairs)
        # A damaged checkpoint that process 0 alone tries to move away, and cannot: both end; once
        # it can, both go on from the one before.
        checkpoints.save(5, tree, {})
        checkpoints.wait_until_saved()
        inway = Path(sys.argv[3]) / "damaged-checkpoints"
        if jax.process_index() == 0:
            (Path(sys.argv[3]) / "checkpoints" / "5" / "host" / "metadata").write_text("")
            inway.write_text("")
        multihost_utils.sync_global_devices("5 is damaged")
        assert "cannot be moved" in refusal(lambda: checkpoints.restore_latest(lambda _: abstract))
        if jax.process_index() == 0:
            inway.unlink()
        assert checkpoints.restore_latest(lambda _: abstract)[1] == host
        assert checkpoints.latest_step() == 4
        host_4 = host
        # Damage that only process 1 sees: both leave that checkpoint alone.
        checkpoints.save(6, tree, {})
        checkpoints.wait_until_saved()
        if jax.process_index() == 1:
            whole = checkpoints._load_states

            def damaged(step, part):
                if step == 6:
                    raise checkpoint.DamagedFileError("checkpoint 6 is damaged", "put it back")
                return whole(step, part)

            checkpoints._load_states = damaged
        assert checkpoints.restore_latest(lambda _: abstract)[1] == host_4
        assert checkpoints.latest_step() == 4
        # A file of process 1 that is damaged, and one that is gone: process 0, too, leaves them.
        for step in (7, 8):
            checkpoints.save(step, tree, {}, {"mine": "new"})
            checkpoints.wait_until_saved()
            file = Path(sys.argv[3]) / "checkpoints" / str(step) / "own" / "1"
            if jax.process_index() == 0 and step == 7:
                file.write_text(file.read_text().replace("new", "old"))
            if jax.process_index() == 0 and step == 8:
                file.unlink()
            multihost_utils.sync_global_devices(f"{step} is damaged")
            assert checkpoints.restore_latest(lambda _: abstract)[2] == [{"mine": f"of {process}"}]
        # What process 0 finds in the way, both are told.
        mine = Path(sys.argv[3]) / ("" if jax.process_index() == 0 else "elsewhere")
        said = refusal(lambda: workdir.require_no_checkpoints(mine))
        assert "checkpoints has 4, which cannot be read" in said
        checkpoints.close()

        def build(folder):
            cache.save_tree(folder / "weights.npz", {"w": jnp.arange(8.0)})

        wanted = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows)}
        loaded = cache.load_tree(cache.get_or_build("key", build) / "weights.npz", wanted)
        assert float(jax.jit(jnp.sum, out_shardings=everywhere)(loaded["w"])) == 28
    """
    tree, _ = on_mesh({"x": 2 * jnp.arange(16.0), "n": jnp.int32(5)}, 1)
    alone = Checkpoints(tmp_path / "alone")
    alone.save(7, tree, {"by": "one"}, {"mine": "all"})
    alone.close()
    port = str(free_port())
    environment = {
        **os.environ,
        "JAXSPEC_CACHE": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
    }
    command = [sys.executable, "-c", textwrap.dedent(script), port]
    runs = [
        Program(
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
    _, abstract = on_mesh({"x": jnp.zeros(16), "n": jnp.int32(0)}, 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    found, host, own = checkpoints.restore(4, abstract)
    np.testing.assert_array_equal(np.asarray(found["x"]), np.arange(16.0))
    assert int(found["n"]) == 3
    assert json.dumps(host) == '{"next_index": 9}'
    assert own == [{"mine": "of 0"}, {"mine": "of 1"}]
    checkpoints.close()
