"""Damage of a checkpoint is found or does no harm, and what the system refuses is no damage."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec.inputs.checked import ConfigError
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.storage.trees import digest_arrays
from jaxspec.system.files import DamagedFileError
from tests.storage.saved import a_state, assert_same, on_mesh, with_steps


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    placed, abstract = on_mesh({"x": jnp.arange(4.0)}, 1)
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
            found, host, _ = checkpoints.restore(5, abstract)
        finally:
            checkpoints.close()
    except DamagedFileError as reason:
        return str(folder) in str(reason) and "\n" not in str(reason)
    assert_same(found, wanted)
    assert host == {"batch": 2, "line": {"reward/mean": 0.5}}
    return False


def test_any_damage_is_found_or_does_no_harm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every file of a checkpoint: emptied, cut in half, one byte short, and eight bytes flipped at
    four places."""
    placed, abstract = on_mesh(
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
        (number,) = digest_arrays({"x": on_mesh(array, 1)[0]}).values()
        for devices in (2, 4):
            assert digest_arrays({"x": on_mesh(array, devices)[0]}) == {"x": number}
        seen = {number}
        for place in np.ndindex(array.shape):
            changed = array.copy()
            changed[place] = not changed[place] if dtype is bool else -changed[place]
            seen.add(digest_arrays({"x": on_mesh(changed, 1)[0]})["x"])
        assert len(seen) == array.size + 1, dtype


def test_digests_are_compiled_where_arrays_are_not_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, _ = on_mesh(a_state(), 8)
    leaves = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(placed))}
    at_hand = digest_arrays(leaves)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert digest_arrays(leaves) == at_hand


def test_the_newest_whole_checkpoint_takes_the_place_of_damaged_ones(tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / "checkpoints"
    placed = {
        step: on_mesh({"x": jax.random.normal(jax.random.key(step), (64, 32))}, 2)
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
    checkpoints = Checkpoints(folder, keep=3, log=told.append)
    restored = checkpoints.restore_latest(lambda _: placed[2][1])
    assert restored is not None
    assert_same(restored[0], placed[2][0])
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
    checkpoints.wait_until_saved()
    assert_same(checkpoints.restore(4, placed[4][1])[0], placed[4][0])
    checkpoints.close()


def test_damaged_checkpoints_without_a_whole_one_stay_where_they_are(tmp_path: Path) -> None:
    placed, abstract = on_mesh({"x": jnp.arange(64.0)}, 2)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore_latest(lambda _: abstract) is None
    checkpoints.save(1, placed, {})
    checkpoints.wait_until_saved()
    (tmp_path / "1" / "host" / "metadata").write_text("")
    with pytest.raises(
        ConfigError, match=r"checkpoint .*/1 cannot be read .*put it back from a copy"
    ):
        checkpoints.restore_latest(lambda _: abstract)
    assert (tmp_path / "1").is_dir()
    checkpoints.close()


def test_a_checkpoint_without_digests_is_damaged(tmp_path: Path) -> None:
    checkpoints, abstract = with_steps(tmp_path, 1)
    (tmp_path / "1" / "host" / "metadata").write_text('{"batch": 1}')
    with pytest.raises(DamagedFileError, match=r"/1 is damaged \(the state of the run differs"):
        checkpoints.restore(1, abstract)
    checkpoints.close()


def test_the_step_whose_metadata_is_damaged_is_named(tmp_path: Path) -> None:
    with_steps(tmp_path, 1, 2)[0].close()
    for content in ("[]", "7", '{"metrics": [1]}'):
        (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text(content)
        with pytest.raises(
            DamagedFileError,
            match=rf"^{tmp_path}/2/_CHECKPOINT_METADATA is damaged .*remove that file",
        ):
            Checkpoints(tmp_path)


def test_what_may_not_be_opened_is_no_damage(tmp_path: Path) -> None:
    """Orbax takes it for missing; a good checkpoint must not be set aside for that. A loop of links
    is refused to root as well."""
    checkpoints, abstract = with_steps(tmp_path, 1, 2)
    for item in ("host", "arrays"):
        (tmp_path / "2" / item).rename(tmp_path / "elsewhere")
        (tmp_path / "2" / item).symlink_to(item)
        with pytest.raises(
            ConfigError,
            match=rf"/2 cannot be read \({tmp_path}/2/{item}: Too many levels.*\); see to that",
        ) as refused:
            checkpoints.restore_latest(lambda _: abstract)
        assert not isinstance(refused.value, DamagedFileError)
        (tmp_path / "2" / item).unlink()
        (tmp_path / "elsewhere").rename(tmp_path / "2" / item)
    checkpoints.close()


def test_what_the_system_refuses_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is out of file handles must not set a good checkpoint aside."""
    checkpoints, abstract = with_steps(tmp_path, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "restore", fail)
    with pytest.raises(
        ConfigError, match=r"/1 cannot be read \(Too many open files\); see to that"
    ) as refused:
        checkpoints.restore_latest(lambda _: abstract)
    assert not isinstance(refused.value, DamagedFileError)
    checkpoints.close()
