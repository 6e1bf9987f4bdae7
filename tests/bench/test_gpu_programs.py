"""Programs that are written to a folder: loaded in a fresh process they give the same tokens; what
is damaged or made for something else is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxspec.bench.gpu.cells import Cell, Cells
from jaxspec.bench.gpu.options import DEFAULTS
from jaxspec.bench.gpu.programs import (
    Programs,
    ProgramUnavailableError,
    Recipe,
    compile_recipe,
    device_options,
)
from jaxspec.bench.gpu.run import GpuPlan
from jaxspec.bench.gpu.starting import program_target
from jaxspec.check import disable_cache
from jaxspec.compiled.serialized import (
    MANIFEST,
    ProgramFolder,
    ProgramTarget,
    UnusableProgramError,
    compiler_versions,
)
from jaxspec.mesh import DATA, device_kind_in_scope, make_mesh, use_plain_kernels
from tests.runs import ROOT

OPTIONS = DEFAULTS["tiny"]
CELL = Cell(4, 3, 16, OPTIONS.draft_vocab)
NUMBERS = np.array([1, 2, 3], np.float32)
HERE = ProgramTarget(compiler_versions(), "cpu", "abc", {"rows": 4})

IN_A_FRESH_PROCESS = """
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxspec.bench.gpu.cells import Cells
from jaxspec.compiled.serialized import ProgramFolder
from jaxspec.mesh import make_mesh
from tests.bench.test_gpu_programs import CELL, HERE, OPTIONS, answers

folder = ProgramFolder.open_existing(Path(sys.argv[1]), HERE)
begin, advance = (folder.load_program(name, jax.devices()[:1]) for name in ("prefill", "rounds"))
print(json.dumps(answers(Cells(OPTIONS, make_mesh(1, 1, 1)), begin, advance)))
"""


def answers(cells: Cells, begin: Any, advance: Any) -> list[list[int]]:
    """Tokens of two calls of rounds; what is given away must be gone."""
    ready, prompts = cells.rollout_weights(CELL), cells.make_prompts(CELL)
    running = begin(ready, prompts)
    for count in (2, 1000):
        before = running
        running = advance(ready, running, jax.numpy.int32(count))
        assert before.rollout.tokens.is_deleted(), "its memory is the result's"
    assert (np.asarray(running.rollout.lengths) == OPTIONS.prompt + CELL.new_tokens).all()
    return np.asarray(running.rollout.tokens).tolist()


def test_a_copy_that_does_not_know_its_version_takes_its_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = make_mesh(1, 1, 1)
    plan = GpuPlan(OPTIONS, mesh, Cells(OPTIONS, mesh))
    made = program_target(plan)
    monkeypatch.setattr("jaxspec.host.job.package_version", lambda: "unknown")
    assert not made.list_differences(program_target(plan))


@pytest.mark.slow
def test_loaded_in_a_fresh_process_a_generators_programs_give_the_same_tokens(
    tmp_path: Path,
) -> None:
    mesh = make_mesh(1, 1, 1)
    cells, folder = Cells(OPTIONS, mesh), ProgramFolder.open_writable(tmp_path, HERE)
    made = {}
    for name, recipe in zip(("prefill", "rounds"), cells.list_recipes(CELL), strict=True):
        with disable_cache():
            made[name] = compile_recipe(recipe, mesh, device_options(mesh))
        folder.save_program(name, made[name], 1.0)
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == answers(cells, **renamed(made))


def renamed(made: dict[str, Any]) -> dict[str, Any]:
    return {"begin": made["prefill"], "advance": made["rounds"]}


def small(name: str = "a sum", function: Any = lambda x: x + 1) -> Recipe:
    shape = jax.ShapeDtypeStruct((3,), "float32")
    return Recipe(name, function, lambda: (shape,))


@pytest.fixture
def folder(tmp_path: Path) -> ProgramFolder:
    """With one small program."""
    mesh, made = make_mesh(1, 1, 1), ProgramFolder.open_writable(tmp_path, HERE)
    with disable_cache():
        made.save_program("a sum", compile_recipe(small(), mesh, {}), 0.5)
    return made


def test_programs_for_something_else_are_named_with_what_is_here(folder: ProgramFolder) -> None:
    assert len(ProgramFolder.open_existing(folder.folder, HERE)) == 1
    for change, words in (
        ({"card": "NVIDIA H100"}, "made for a cpu (here: NVIDIA H100)"),
        ({"versions": {"jax": "0.9"}}, "(here: 0.9)"),
        ({"code": "def"}, "the code abc (here: def)"),
        ({"sizes": {"rows": 8}}, "--rows 4 (here: 8)"),
    ):
        with pytest.raises(UnusableProgramError) as refused:
            ProgramFolder.open_existing(folder.folder, HERE._replace(**change))
        assert words in str(refused.value)
        assert str(folder.folder) in str(refused.value)
    begun = ProgramFolder.open_writable(folder.folder, HERE._replace(card="NVIDIA H100"))
    assert len(begun) == 0, "programs for another card are made anew"


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 1}', '{"format": 7}', '{"format": 1, "programs": 3}']
)
def test_a_damaged_manifest_is_named(folder: ProgramFolder, content: str) -> None:
    file = folder.folder / MANIFEST
    file.write_text(content)
    with pytest.raises(UnusableProgramError, match="compiled here instead") as refused:
        ProgramFolder.open_existing(folder.folder, HERE)
    assert str(file) in str(refused.value)


def test_a_manifest_leads_to_no_file_elsewhere(folder: ProgramFolder) -> None:
    file = folder.folder / MANIFEST
    content = json.loads(file.read_text())
    content["programs"]["a sum"]["file"] = "../elsewhere.program"
    file.write_text(json.dumps(content))
    with pytest.raises(UnusableProgramError, match="elsewhere"):
        ProgramFolder.open_existing(folder.folder, HERE)


def test_a_damaged_program_is_named_and_compiled(folder: ProgramFolder) -> None:
    (file,) = folder.folder.glob("*.program")
    whole, said = file.read_bytes(), []
    assert folder.is_intact("a sum")
    for content, words in (
        (whole[:50], "is damaged (50 bytes"),
        (whole[:-1] + b"x", "is damaged"),
        (None, "cannot be read"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        assert not folder.is_intact("a sum")
        programs = Programs(make_mesh(1, 1, 1), folder, 1, said.append)
        programs.queue_recipes([small()])
        made = programs.get_program("a sum", 60.0)
        assert not made.is_loaded
        np.testing.assert_array_equal(made.program(NUMBERS), [2, 3, 4])
        warning = next(line for line in reversed(said) if line.startswith("warning"))
        assert str(file) in warning
        assert words in warning
        programs.close()
    file.write_bytes(whole)
    programs = Programs(make_mesh(1, 1, 1), folder, 1, said.append)
    programs.queue_recipes([small(), small("another")])
    assert programs.get_program("a sum", 60.0).is_loaded
    assert not programs.get_program("another", 60.0).is_loaded
    assert any("has no program another" in line for line in said)


def test_a_program_that_is_not_there_in_time_is_named() -> None:
    programs = Programs(make_mesh(1, 1, 1), None, 1, lambda line: None)
    with programs.pause_compiling():
        programs.queue_recipes([small()])
        with pytest.raises(ProgramUnavailableError, match="a sum: not compiled in time"):
            programs.get_program("a sum", 0.1)
    assert programs.get_program("a sum", 60.0).seconds > 0

    def broken(x: Any) -> Any:
        raise ValueError("no such kernel\nand pages more")

    programs.queue_recipes([small("broken", broken)])
    with pytest.raises(
        ProgramUnavailableError, match=r"broken cannot be compiled \(ValueError: no such kernel\)"
    ):
        programs.get_program("broken", 60.0)
    programs.close()


def test_where_a_kernel_does_not_compile_its_plain_twin_is_taken_loudly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for a card, since a CPU has no kernels."""
    said: list[str] = []
    programs = Programs(make_mesh(1, 1, 1), None, 1, said.append)
    monkeypatch.setattr("jaxspec.mesh.has_accelerators", lambda mesh: True)
    plain: list[bool] = []

    def kernel(x: Any) -> Any:
        if not plain:
            plain.append(True)
            raise NotImplementedError("no tile of this shape")
        return x * 2

    programs.queue_recipes([small("a kernel", kernel)])
    made = programs.get_program("a kernel", 60.0)
    assert made.without_kernels
    np.testing.assert_array_equal(made.program(NUMBERS), [2, 4, 6])
    assert "NotImplementedError: no tile of this shape" in said[0]
    assert "WITHOUT GPU KERNELS" in said[0]
    programs.close()


def test_plain_twins_are_traced_as_if_there_were_no_gpu() -> None:
    kind = "NVIDIA H100 80GB HBM3"
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), (DATA,), (AxisType.Auto,), abstract_device=device)
    seen = []

    def shard(x: Any) -> Any:
        seen.append(device_kind_in_scope())
        with use_plain_kernels():
            seen.append(device_kind_in_scope())
        return x

    run = jax.shard_map(shard, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.eval_shape(run, jax.ShapeDtypeStruct((2,), "float32"))
    assert seen == [kind, ""]
