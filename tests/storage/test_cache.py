"""Weights kept for the next run: built once, never shown by half, and made anew where their files
are not what was written."""

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.inputs.checked import ConfigError
from jaxspec.storage import cache
from jaxspec.system.files import DamagedFileError, SaveError, atomic_replace, hash_file
from tests.conftest import free_port
from tests.fork_server import Program

TREE = {
    "matrix": jnp.arange(48.0).reshape(6, 8),
    "half": jnp.arange(16.0).astype(jnp.bfloat16),
    "count": jnp.int32(3),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "flipped": lambda content: (
        content[:-9] + bytes(byte ^ 0x55 for byte in content[-9:-1]) + content[-1:]
    ),
    "something else": lambda content: b"[]",
}


def abstract(devices: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The tree's shapes, rows of the matrix on so many devices."""
    mesh = jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )

    def one(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        axes = jax.P("data") if leaf.ndim > 1 else jax.P()
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, axes)
        )

    return jax.tree.map(one, TREE)


def same(found: dict[str, jax.Array]) -> bool:
    return all(
        found[name].dtype == leaf.dtype
        and np.array_equal(np.asarray(found[name]), np.asarray(leaf))
        for name, leaf in TREE.items()
    )


def test_trees_keep_their_bits(tmp_path: Path) -> None:
    cache.save_tree(tmp_path / "weights.npz", TREE)
    for devices in (6, 1):
        assert same(cache.load_tree(tmp_path / "weights.npz", abstract(devices)))
    with pytest.raises(
        ConfigError,
        match=r"weights.npz was written by another config: count is not part of this run",
    ):
        cache.load_tree(
            tmp_path / "weights.npz",
            {name: leaf for name, leaf in abstract(1).items() if name != "count"},
        )


def test_a_tree_with_any_flipped_byte_is_the_same_or_refused(tmp_path: Path) -> None:
    """Every third place of the file, by three bits: some bytes, such as a time, say nothing about
    the arrays."""
    file, wanted = tmp_path / "weights.npz", abstract(1)
    cache.save_tree(file, TREE)
    content, refused = file.read_bytes(), 0
    for place in range(0, len(content), 3):
        file.write_bytes(
            content[:place]
            + bytes([content[place] ^ (1, 8, 0x81)[place // 3 % 3]])
            + content[place + 1 :]
        )
        try:
            assert same(cache.load_tree(file, wanted)), place
        except DamagedFileError as reason:
            refused += str(file) in str(reason)
    assert refused > len(content) // 6
    for damage in DAMAGES.values():
        file.write_bytes(damage(content))
        with pytest.raises(
            DamagedFileError, match=r"weights\.npz cannot be read \(.*\); remove it"
        ):
            cache.load_tree(file, wanted)


@pytest.mark.parametrize("name", ["weights.npz", "acceptance.json", "sha256.json"])
@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
def test_a_damaged_entry_is_made_anew_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    built: list[Path] = []
    told: list[str] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "weights.npz").write_bytes(bytes(range(100)))
        (folder / "acceptance.json").write_text('{"acceptance": [0.5, 0.25]}')

    folder = cache.get_or_build("key", build, told.append)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert cache.get_or_build("key", build, told.append) == folder
    assert (len(built), told) == (1, [])
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(DAMAGES[damage](before[name]))
    assert cache.get_or_build("key", build, told.append) == folder
    assert len(built) == 2
    assert [str(folder) in line and name in line and "made anew" in line for line in told] == [True]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("kind", ["a file", "a dangling link", "a link to a damaged folder"])
def test_what_stands_where_an_entry_belongs_is_found_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    entry, elsewhere = tmp_path / "cache" / "key", tmp_path / "elsewhere"
    entry.parent.mkdir()
    if kind == "a link to a damaged folder":
        elsewhere.mkdir()
    entry.write_text("no folder") if kind == "a file" else entry.symlink_to(elsewhere)
    entry.with_suffix(".building").write_text("no folder either")
    told: list[str] = []
    folder = cache.get_or_build(
        "key",
        lambda folder: (told.append("built"), (folder / "weights").write_text("whole"))[0],
        told.append,
    )
    assert (folder / "weights").read_text() == "whole"
    assert len(told) == 2
    assert str(entry) in told[0]
    assert told[0].startswith("warning: ")
    assert told[1] == "built"
    assert elsewhere.exists() == (kind == "a link to a damaged folder")


@pytest.mark.parametrize("name", ["weights", "sha256.json"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_an_entry_that_cannot_be_read_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """A right that is missing, or too many open files, says nothing about what was written."""
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    folder = cache.get_or_build("key", lambda folder: cache.save_tree(folder / "weights", TREE))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    plain = Path.open

    def refused(file: Path, *arguments: Any, **options: Any) -> Any:
        if file.name == name:
            raise OSError(number, os.strerror(number))
        return plain(file, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refused)
        with pytest.raises(
            ConfigError, match=f"{name} cannot be read: {os.strerror(number)}; see to that"
        ):
            cache.get_or_build("key", lambda folder: None)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    with monkeypatch.context() as patched:
        patched.setattr(np, "load", lambda *_, **__: refused(folder / name))
        with pytest.raises(
            ConfigError, match=f"weights cannot be read: {os.strerror(number)}"
        ) as refusal:
            cache.load_tree(folder / "weights", abstract(1))
    assert not isinstance(refusal.value, DamagedFileError)


def test_what_is_no_regular_file_has_no_digest(tmp_path: Path) -> None:
    """A pipe would be waited for, and a device read for ever."""
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"^{file} is not a regular file"):
            hash_file(file)
    assert hash_file(tmp_path / "absent") == hash_file(tmp_path) == "-"


def test_a_replaced_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "made" / "file"
    for shared in (False, True):
        with atomic_replace(file, shared=shared) as fresh:
            fresh.write_text("whole")
        refused = pytest.raises(
            SaveError, match=r"file cannot be written: No space left on device; free some space"
        )
        with refused, atomic_replace(file, shared=shared) as fresh:
            fresh.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert [(each.name, each.read_text()) for each in file.parent.iterdir()] == [
            ("file", "whole")
        ]


def test_a_home_that_nobody_has_is_named_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", "~nosuch/x")
    with pytest.raises(
        ConfigError,
        match=(
            r"^JAXSPEC_CACHE is '~nosuch/x', and no home directory of ~nosuch is known here; give"
            r" the full path"
        ),
    ):
        cache.cache_folder()
    monkeypatch.setenv("JAXSPEC_CACHE", "x" * 300)
    with pytest.raises(
        ConfigError,
        match=r"cannot be written to: File name too long; name another folder with JAXSPEC_CACHE",
    ):
        cache.get_or_build("key", lambda folder: None)
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("JAXSPEC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_folder() == Path("/somewhere/.cache/jaxspec")


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
        cache.get_or_build("key", fail)
    half = tmp_path / "cache" / "key.building"
    half.mkdir()
    (half / "left over").write_text("by a kill")
    folder = cache.get_or_build("key", succeed)
    assert folder == tmp_path / "cache" / "key"
    assert sorted(path.name for path in folder.iterdir()) == [cache.DIGESTS_FILE, "weights"]
    assert cache.get_or_build("key", fail) == folder
    monkeypatch.setenv("JAXSPEC_CACHE", str(folder / "weights" / "cache"))
    with pytest.raises(
        ConfigError,
        match=r"cannot be written to: Not a directory; name another folder with JAXSPEC_CACHE",
    ):
        cache.get_or_build("key", fail)


def test_cache_builds_once_for_two_runs(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        from pathlib import Path
        from jaxspec.storage import cache
        def build(folder):
            print("building", flush=True)
            if sys.argv[1] == "dies":
                os.kill(os.getpid(), 9)
            time.sleep(1.0)
            (folder / "pid").write_text(str(os.getpid()))
        sys.stdin.readline()
        print((cache.get_or_build("key", build) / "pid").read_text())
    """
    environment = {**os.environ, "JAXSPEC_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    runs = [
        Program(
            [*command, word],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
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


TOGETHER = """
    import os, sys
    import jax
    from jax.experimental import multihost_utils
    from jaxspec.inputs.checked import ConfigError
    from jaxspec.storage import cache
    me = int(sys.argv[1])
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, me, initialization_timeout=60)
    def build(folder):
        print("building", flush=True)
        made = int(multihost_utils.process_allgather(jax.numpy.int32(me + 1)).sum())
        if me == 0:
            (folder / "sum").write_text(str(made))
    try:
        for _ in range(2):  # the second finds what the first has built
            folder = cache.get_or_build_together("key", build, print)
            print((folder / "sum").read_text(), flush=True)
    except ConfigError as reason:
        print(reason, flush=True)
        os._exit(2)
"""


def together(*caches: Path) -> list[Program]:
    """Two processes that build together, each with its own idea of where the cache is."""
    port = str(free_port())
    return [
        Program(
            [sys.executable, "-c", textwrap.dedent(TOGETHER), str(me), port],
            env={**os.environ, "JAXSPEC_CACHE": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for me, folder in enumerate(caches)
    ]


def test_processes_build_together_what_process_0_puts_there(tmp_path: Path) -> None:
    for run in together(tmp_path, tmp_path):
        said = run.communicate(timeout=60)[0].splitlines()
        assert [line for line in said if "Gloo" not in line] == ["building", "3", "3"]
        assert run.returncode == 0


def test_a_process_that_has_another_cache_says_so_before_it_builds(tmp_path: Path) -> None:
    first, second = together(tmp_path / "one", tmp_path / "other")
    said = second.communicate(timeout=60)[0]
    first.kill()
    first.communicate()
    assert second.returncode == 2
    assert "building" not in said
    told = f"{tmp_path / 'other'} does not hold the files that process 0 wrote there; set"
    assert told in said
