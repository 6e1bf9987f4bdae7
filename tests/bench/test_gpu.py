"""`bench gpu`: its options, what it refuses, and the whole command at sizes for a CPU."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.bench.__main__ import main
from jaxspec.bench.gpu import command, device
from jaxspec.bench.gpu.cells import Cell, Cells
from jaxspec.bench.gpu.options import DEFAULTS
from jaxspec.bench.gpu.results import Results
from jaxspec.bench.gpu.run import GpuPlan
from jaxspec.bench.gpu.sections import alone, profile
from jaxspec.bench.gpu.sections.greedy import compare_tokens
from jaxspec.bench.gpu.sections.rounds import headline_cells, variant_cells
from jaxspec.config.presets import QWEN3_8B, spec_without_checkpoint
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import make_mesh
from tests.runs import ROOT

TINY = DEFAULTS["tiny"]
CHANCE = 0.868
"""Of each draft, where three of them keep 3.3 tokens: the root of 1 + c + c^2 + c^3 = 3.3."""


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX runs already, with as many devices as it has."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")


def printed_error(argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Of a command that is refused."""
    assert main(argv.split()) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    return captured.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("gpu", ["no GPU", "--size tiny", "--prepare FOLDER"]),
        ("gpu --size tiny --sections 2,9", ["--sections is '2,9'", "0 to 7"]),
        ("gpu --size tiny --prepare x", ["--prepare FOLDER", "--hardware NAME"]),
        ("gpu --size tiny --hardware h100", ["--prepare FOLDER"]),
        ("gpu --size tiny --prepare x --hardware h1000", ["--hardware h1000", "h100, h200"]),
        ("gpu --size tiny --prepare x --programs y --hardware h100", ["--prepare", "--programs"]),
        ("gpu --size tiny --programs nowhere", ["--programs nowhere", "no folder"]),
        ("gpu --size tiny --new 4", ["--new 4", "at least 16"]),
        ("gpu --size tiny --acceptance 5", ["--acceptance is 5", "at most 4"]),
        ("gpu --size tiny --draft_vocab 1000", ["--draft_vocab 1000", "--vocab 512", "at most"]),
        ("gpu --size tiny --rows 100000000", ["--rows", "100000000"]),
    ],
)
def test_bad_options_are_refused(
    argv: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = printed_error(f"{argv} --out {tmp_path / 'out.json'}", capsys)
    assert [word for word in words if word not in error] == []


def test_a_file_of_something_else_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    for content in ("{", '{"format": 1}', '{"format": 2, "runs": []}', "[]"):
        file.write_text(content)
        error = printed_error(f"gpu --size tiny --sections 0 --out {file}", capsys)
        assert str(file) in error
        assert file.read_text() == content


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out.json"
    error = printed_error(f"gpu --size tiny --sections 0 --out {out}", capsys)
    assert f"{out} cannot be written" in error


def installed(**versions: str) -> Any:
    """Stands for the packages that are installed."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    return version


def test_a_driver_must_be_as_new_as_the_plugin_needs(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert device.require_driver(file, installed()) == ""
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    assert device.require_driver(file, installed()) == "550.54.15"
    assert device.require_driver(file, installed(jax_cuda12_plugin="0.10.2")) == "550.54.15"
    with pytest.raises(ConfigError, match=r"550\.54\.15.*jax-cuda13-plugin 0\.11\.2.*580"):
        device.require_driver(file, installed(jax_cuda13_plugin="0.11.2"))


def test_a_card_older_than_ampere_is_refused() -> None:
    def card(kind: str, capability: str) -> Any:
        return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)

    device.require_card(card("NVIDIA A100-SXM4-40GB", "8.0"), "8b")
    device.require_card(card("NVIDIA GB200", "10.0"), "8b")
    with pytest.raises(ConfigError, match=r"Tesla V100.*capability 7\.0.*8\.0"):
        device.require_card(card("Tesla V100-SXM2-16GB", "7.0"), "8b")
    cpu = SimpleNamespace(platform="cpu")
    device.require_card(cpu, "tiny")
    with pytest.raises(ConfigError, match=r"driver 580\.1 is loaded.*cuda13"):
        device.require_card(cpu, "8b", "580.1")


def test_sections_are_kept_by_what_they_were_measured_with(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    first = Results(file, {"card": "a", "sizes": {"rows": (1, 2)}})
    first.add_section(2, {"rows": [1]}, complete=True)
    first.add_section(3, {"rows": []}, complete=False)
    same = Results(file, {"card": "a", "sizes": {"rows": (1, 2)}})
    assert same.has_section(2)
    assert not same.has_section(3), "what was cut short is measured again"
    assert same.get_section(2)["rows"] == [1]
    other = Results(file, {"card": "b", "sizes": {"rows": (1, 2)}})
    assert not other.has_section(2)
    other.add_section(2, {"rows": [2]}, complete=True)
    assert Results(file, {"card": "a", "sizes": {"rows": (1, 2)}}).get_section(2)["rows"] == [1]


def test_the_tables_have_the_cells_that_were_asked_for() -> None:
    options = DEFAULTS["8b"]
    cells = headline_cells(options)
    assert [cell.rows for cell in cells] == [1, 1, 8, 8, 32, 32, 64, 64, 128, 128]
    assert {cell.draft_length for cell in cells} == {0, 3}
    variants = variant_cells(options)
    assert {(cell.rows, cell.draft_length) for cell in variants[:6]} == {
        (rows, length) for rows in (8, 64) for length in (1, 5, 7)
    }
    assert [(cell.rows, cell.draft_vocab) for cell in variants if not cell.draft_vocab] == [(64, 0)]
    assert [cell.rows for cell in variants if cell.command_buffers] == [1, 64]
    names = [name for cell in (*cells, *variants) for name in (cell.prefill_name, cell.rounds_name)]
    assert len(set(names)) == len(names) - 2, "command buffers share the prefill"


def test_8b_has_the_sizes_of_qwen3() -> None:
    wanted = dataclasses.replace(QWEN3_8B, dtype="bfloat16")
    assert DEFAULTS["8b"].policy == spec_without_checkpoint(wanted)
    assert DEFAULTS["8b"].step_policy == DEFAULTS["8b"].policy
    wide = dataclasses.replace(DEFAULTS["8b"], step_model="1.7b")
    assert (wide.step_policy.embed, wide.lora_rank) == (2048, 0)


@pytest.mark.parametrize("vocab", [0, TINY.draft_vocab])
def test_random_weights_keep_the_variance_of_what_goes_through(vocab: int) -> None:
    """Numbers of each weight have the deviation that a product over its inputs needs."""
    cells = Cells(TINY, make_mesh(1, 1, 1))
    ready = cells.rollout_weights(Cell(2, 3, 32, vocab))
    expected = {"qkv": 64, "output": 64, "gate_up": 64, "down": 128, "embedding": 64, "head": 64}
    target = ready.target
    for name in ("embedding", "head"):
        assert np.std(getattr(target, name)[...]) == pytest.approx(64**-0.5, rel=0.05)
    layer = target.layers[1]
    for name in ("qkv", "output", "gate_up", "down"):
        weight = np.asarray(getattr(layer, name)[...])
        assert weight.std() == pytest.approx(expected[name] ** -0.5, rel=0.1), name
    assert (np.asarray(layer.ffn_norm[...]) == 1).all()
    again = cells.rollout_weights(Cell(2, 0, 32, vocab))
    assert again.target.embedding[...] is target.embedding[...], "the policy is made once"
    assert again.drafter.network is None


def test_kernels_are_added_up_but_for_what_contains_them() -> None:
    def plane(name: str, *events: tuple[str, int, int, bool]) -> Any:
        made = [
            SimpleNamespace(
                name=event,
                start_ns=start,
                end_ns=end,
                stats=[("hlo_op", event)] if is_operation else [],
            )
            for event, start, end, is_operation in events
        ]
        return SimpleNamespace(name=name, lines=[SimpleNamespace(events=made)])

    gpu = plane(
        "/device:GPU:0",
        ("fusion.1", 0, 10_000, True),
        ("fusion.23", 10_000, 40_000, True),
        ("while.3", 0, 90_000, True),
        ("copy", 40_000, 45_000, True),
        ("memcpy", 0, 1, False),
    )
    host = plane("/host:CPU", ("fusion.1", 0, 7_000_000, True))
    found = profile.sum_kernels(SimpleNamespace(planes=[host, gpu]))
    assert [(kernel.name, kernel.calls) for kernel in found] == [("fusion", 2), ("copy", 1)]
    assert found[0].seconds == pytest.approx(40e-6)
    (alone_here,) = profile.sum_kernels(SimpleNamespace(planes=[host]))
    assert alone_here.seconds == pytest.approx(7e-3)


def test_a_difference_says_how_many_rows_and_where() -> None:
    ours = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    theirs = np.array([[1, 2, 3], [4, 5, 0], [7, 0, 9]])
    assert compare_tokens(ours, ours)["equal"]
    assert compare_tokens(ours, theirs) == {
        "equal": False,
        "equal_rows": 1,
        "rows": 3,
        "first_difference": 1,
    }


def test_a_crash_in_the_other_process_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh(1, 1, 1)
    plan = GpuPlan(TINY, mesh, Cells(TINY, mesh))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    found = alone.execute_in_process(plan, "drafts", 10.0)
    assert found["crashed"] == "exit status 1 after 0 of 2 executions"


def bench(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with one device."""
    unset = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-m", "jaxspec.bench", "gpu", "--size", "tiny", *words],
        env=variables | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.sweep
def test_the_whole_command_runs_on_a_cpu_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    """All programs from a folder but one, whose file is damaged, and one whose file is gone."""
    made = bench("--prepare", "programs", "--hardware", "here", folder=tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    again = bench("--prepare", "programs", "--hardware", "here", folder=tmp_path)
    assert "30 of 30 programs are in programs already" in again.stdout
    damaged = tmp_path / "programs" / "rounds-of-1-rows-plain-answers-of-32.program"
    absent = tmp_path / "programs" / "prefill-of-1-rows-plain-answers-of-32.program"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    absent.unlink()
    ran = bench("--programs", "programs", folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for file, words in ((damaged, "is damaged"), (absent, "cannot be read")):
        (line,) = [line for line in ran.stdout.splitlines() if file.name in line]
        assert words in line
        assert "compiled here instead" in line
    compiled = [line for line in ran.stdout.splitlines() if line.startswith("compiled ")]
    assert len(compiled) == 2
    sections = json.loads(ran.stdout.splitlines()[-1])["sections"]
    assert sections.keys() == set("01234567")
    assert all(section["complete"] for section in sections.values())
    assert_sections(sections)
    later = bench(folder=tmp_path)
    assert later.stdout.count("is in gpu.json already") == 8
    assert json.loads(later.stdout.splitlines()[-1])["sections"] == sections
    # with other sizes none of its programs is for these
    other = bench("--programs", "programs", "--sections", "0", "--ffn", "96", folder=tmp_path)
    assert "were made for --ffn 128 (here: 96)" in other.stdout
    late = bench("--sections", "2", "--again", "--budget", "1", folder=tmp_path)
    assert "section 2 is left out" in late.stdout
    assert late.returncode == 0


def assert_sections(sections: dict[str, Any]) -> None:
    """What the numbers of each section must be, wherever they are measured."""
    right = sections["1"]
    made = right["greedy"]["drafts"]
    assert made["a program and the same one, written and loaded"]["equal"]
    assert made["a program of the folder and a compiled one"]["equal"]
    assert right["drafts and plain decoding"]["equal"]
    assert right["stacked and unrolled layers"]["equal"]
    assert right["alone"]["executions_equal"]
    assert right["alone"]["loaded"]
    assert right["alone"]["beside_drafts"]["equal"]
    rows = {(row["live"], row["K"]): row for row in sections["2"]["rows"]}
    assert rows.keys() == {(1, 0), (1, 3), (4, 0), (4, 3)}
    assert rows[4, 0]["tokens_per_pass"] == rows[4, 0]["round_cost"] == 1
    assert 2.3 < rows[4, 3]["tokens_per_pass"] <= 4
    assert not any("warning" in row for row in rows.values())
    cost = rows[4, 3]["round_s"] / rows[4, 0]["round_s"]
    assert rows[4, 3]["round_cost"] == pytest.approx(cost)
    gain = rows[4, 3]["tokens_per_pass"] / cost
    assert rows[4, 3]["speedup"] == pytest.approx(gain)
    others = sections["3"]["rows"]
    assert others[0]["tokens_per_pass"] == pytest.approx(1 + CHANCE, abs=0.25)
    assert [row["not_applicable"] for row in others if row["graphs"]]
    answers = sections["4"]["rows"]
    assert [row["tokens"] for row in answers] == [4 * 32, 4 * 32]
    steps = sections["5"]
    assert steps["plain"]["tokens"] == steps["speculative"]["tokens"] == 8 * 24
    for name in ("plain", "speculative"):
        assert 0 <= steps[name]["logprob_gap_mean"] <= steps[name]["logprob_gap_largest"] < 1e-3
        assert steps[name]["memory_predicted"] > 0
    assert sections["6"]["positions"] == 8 * (16 + 24 - 1)
    assert sections["6"]["packing"] == 1
    assert sections["7"]["4 rows, plain, answers of 32"]["calls"] > 0


def test_the_sections_are_told_with_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["gpu", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for words in ("--prepare FOLDER --hardware h100", "--size tiny", "--budget", "7 kernels of"):
        assert words in told, words
    assert command.SECTIONS.keys() == set(range(8))
    assert jax.devices()[0].platform == "cpu"


def test_a_section_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(run: Any) -> dict[str, Any]:
        raise ZeroDivisionError("no kernel ran")

    def fine(run: Any) -> dict[str, Any]:
        return {"rows": []}

    for number, measure in ((2, broken), (3, fine)):
        section = command.SECTIONS[number]._replace(recipes=lambda plan: [], measure=measure)
        monkeypatch.setitem(command.SECTIONS, number, section)
    file = tmp_path / "out.json"
    assert main(["gpu", "--size", "tiny", "--sections", "2,3", "--out", str(file)]) == 1
    captured = capsys.readouterr()
    assert "section 2 FAILED: ZeroDivisionError: no kernel ran" in captured.out
    assert "missing or incomplete: section 2" in captured.out
    (run,) = json.loads(file.read_text())["runs"]
    assert [run["sections"][number]["complete"] for number in "23"] == [False, True]
