"""Sections 2 to 4: rounds beside plain steps, and whole answers, at a prescribed acceptance."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.gpu.cells import Cell
from jaxspec.bench.gpu.device import wait_for
from jaxspec.bench.gpu.options import REPEATS, GpuOptions
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.run import NOT_HERE, GpuRun, Plan, Section
from jaxspec.bench.measure import draw_rounds
from jaxspec.bench.roofline import work_of
from jaxspec.mesh import replicated
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.state import FAILED, RUNNING, Ready

MOST_ROUNDS = 32
"""Of a slice."""


def headline_cells(options: GpuOptions) -> list[Cell]:
    """Plain steps and rounds at each number of rows."""
    return [
        Cell(rows, length, options.new, options.draft_vocab)
        for rows in options.rows
        for length in (0, options.draft_length)
    ]


def variant_cells(options: GpuOptions) -> list[Cell]:
    """Other draft lengths, the full draft vocabulary, and command buffers."""
    length, new, vocab = options.draft_length, options.new, options.draft_vocab
    most = options.few[-1]
    found = [
        Cell(rows, other, new, vocab) for rows in options.few for other in options.other_lengths
    ]
    if vocab:
        found.append(Cell(most, length, new, 0))
    graphs = dict.fromkeys((options.rows[0], most))
    return found + [Cell(rows, length, new, vocab, graphs=True) for rows in graphs]


def answer_cells(options: GpuOptions) -> list[Cell]:
    """Whole answers, plain and with drafts."""
    lengths = 0, options.draft_length
    return [Cell(options.few[-1], each, options.answer, options.draft_vocab) for each in lengths]


def can_run(plan: Plan, cell: Cell) -> bool:
    """Whether the device has what a cell asks for."""
    return plan.on_gpu or not cell.graphs


def recipes_of(plan: Plan, cells: Sequence[Cell]) -> list[Recipe]:
    """The programs of cells, those that several share once."""
    listed = [
        recipe for cell in cells if can_run(plan, cell) for recipe in plan.cells.recipes(cell)
    ]
    return list({recipe.name: recipe for recipe in listed}.values())


# ---- timing


def rounds(run: GpuRun, count: int) -> jax.Array:
    """A number of rounds, as their program takes it."""
    return jax.device_put(jnp.int32(count), replicated(run.plan.mesh))


def time_rounds(run: GpuRun, cell: Cell) -> dict[str, Any]:
    """Times slices of rounds of all rows, none of which ends meanwhile."""
    prefill, advance = run.get(cell.prefill_name), run.get(cell.rounds_name)
    ready, prompts = run.cells.ready(cell), run.cells.prompts(cell)
    certain = cell.new // (cell.length + 1)
    warm = max(1, certain // 8)
    count = max(1, min(MOST_ROUNDS, (certain - warm) // REPEATS))
    seconds, kept = [], []
    with run.programs.quiet():
        wait_for(prefill.program(ready, prompts))  # its kernels are loaded then
        began = time.perf_counter()
        running = wait_for(prefill.program(ready, prompts))
        prefill_seconds = time.perf_counter() - began
        running = wait_for(advance.program(ready, running, rounds(run, warm)))
        before = first = _lengths(running)
        for _ in range(REPEATS):
            slice_rounds = rounds(run, count)
            began = time.perf_counter()
            running = wait_for(advance.program(ready, running, slice_rounds))
            seconds.append((time.perf_counter() - began) / count)
            after = _lengths(running)
            kept.append(float(np.mean(after - before)) / count)
            before = after
    found = _described(run, cell, ready, float(np.median(seconds)), float(np.mean(kept)))
    depth = float(np.mean((first + before) / 2))
    work = _bytes_of_round(run, cell, ready, depth)
    share = work / found["round_s"] / run.bandwidth if run.bandwidth else None
    status = np.asarray(running.rollout.status)
    return {
        **found,
        "round_s_all": seconds,
        "prefill_s": prefill_seconds,
        "prefill_tokens_per_s": cell.rows * run.options.prompt / prefill_seconds,
        "bytes": work,
        "bandwidth_share": share,
        "loaded": advance.loaded,
        "without_kernels": advance.plain,
        **_trouble(status, RUNNING),
    }


def _lengths(running: DecodeState) -> np.ndarray:
    return np.asarray(running.rollout.lengths)


def _trouble(status: np.ndarray, expected: int) -> dict[str, Any]:
    """Rows that are not as expected, if there are any."""
    failed, other = np.sum(status == FAILED), np.sum(status != expected)
    if not other:
        return {}
    return {"warning": f"{other} of {len(status)} rows ended otherwise, {failed} not finite"}


def _described(
    run: GpuRun, cell: Cell, ready: Ready, seconds: float, kept: float
) -> dict[str, Any]:
    notes = ["full vocabulary"] * bool(cell.length and not cell.vocab and run.options.draft_vocab)
    notes += ["command buffers"] * cell.graphs
    return {
        "live": cell.rows,
        "K": cell.length,
        "note": ", ".join(notes),
        "round_s": seconds,
        "tokens_per_pass": kept,
        "tokens_per_s": cell.rows * kept / seconds,
    }


def _bytes_of_round(run: GpuRun, cell: Cell, ready: Ready, depth: float) -> float:
    """Bytes that a round must read: the policy's weights and caches once, the draft's weights once
    for each draft."""
    width = jnp.dtype(run.options.dtype).itemsize
    policy = work_of(run.options.policy, cell.rows, depth, width).bytes
    leaves = jax.tree.leaves(ready.drafter.network)
    draft = sum(leaf.nbytes for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
    return policy + cell.length * draft


def beside_plain(row: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    """A row of the table with its cost and gain over the plain steps of as many rows."""
    if "round_s" not in row or plain is None or "round_s" not in plain:
        return row
    return row | {
        "round_cost": row["round_s"] / plain["round_s"],
        "speedup": row["tokens_per_s"] / plain["tokens_per_s"],
    }


def _rows(run: GpuRun, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Times cells one by one, each beside the plain steps of section 2."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        if not can_run(run.plan, cell):
            rows.append(_about(cell) | {"not_applicable": NOT_HERE})
            run.say(f"{cell.rounds_name}: {NOT_HERE}")
            continue
        measured = run.attempt(cell.rounds_name, lambda cell=cell: time_rounds(run, cell))
        known = [*rows, *run.results.get(2).get("rows", [])]
        plain = [row for row in known if row["live"] == cell.rows and not row["K"]]
        row = _about(cell) | measured
        rows.append(beside_plain(row, plain[0] if plain else row if not cell.length else None))
        if "warning" in row:
            run.say(f"warning: {cell.rounds_name}: {row['warning']}")
    return rows


def _about(cell: Cell) -> dict[str, Any]:
    return {"live": cell.rows, "K": cell.length, "vocab": cell.vocab, "graphs": cell.graphs}


def _print(run: GpuRun, title: str, rows: Sequence[dict[str, Any]]) -> None:
    run.screen.print(draw_rounds([row for row in rows if "round_s" in row], title))


def measure_headline(run: GpuRun) -> dict[str, Any]:
    """Section 2."""
    rows = _rows(run, headline_cells(run.options))
    _print(run, f"rounds at {run.options.acceptance:g} tokens kept of 3 drafts", rows)
    return {"rows": rows}


def measure_variants(run: GpuRun) -> dict[str, Any]:
    """Section 3."""
    rows = _rows(run, variant_cells(run.options))
    _print(run, "other draft lengths, vocabularies, command buffers", rows)
    return {"rows": rows}


# ---- whole answers


def time_answers(run: GpuRun, cell: Cell) -> dict[str, Any]:
    """Answers all prompts to the end, prefill included."""
    prefill, advance = run.get(cell.prefill_name), run.get(cell.rounds_name)
    ready, prompts = run.cells.ready(cell), run.cells.prompts(cell)
    with run.programs.quiet():
        # kernels are loaded with the first call
        wait_for(advance.program(ready, prefill.program(ready, prompts), rounds(run, 1)))
        began = time.perf_counter()
        running = wait_for(prefill.program(ready, prompts))
        middle = time.perf_counter()
        to_the_end = rounds(run, np.iinfo(np.int32).max)
        running = wait_for(advance.program(ready, running, to_the_end))
        end = time.perf_counter()
    tokens = int(np.sum(_lengths(running) - np.asarray(running.rollout.prompt_lengths)))
    passes = int(np.sum(running.rollout.statistics.rounds))
    made = int(np.max(running.round))
    return {
        "prefill_s": middle - began,
        "round_s": (end - middle) / made,
        "seconds": end - began,
        "tokens": tokens,
        "tokens_per_pass": tokens / passes,
        "tokens_per_s": tokens / (end - began),
    }


def measure_answers(run: GpuRun) -> dict[str, Any]:
    """Section 4."""
    rows: list[dict[str, Any]] = []
    for cell in answer_cells(run.options):
        name = f"answers of {cell.words}"
        row = _about(cell) | run.attempt(name, lambda cell=cell: time_answers(run, cell))
        rows.append(beside_plain(row, rows[0] if rows else row))
    options = run.options
    title = f"{options.few[-1]} answers of {options.answer} tokens, prefill included in tokens/s"
    _print(run, title, rows)
    return {"rows": rows}


HEADLINE = Section(lambda plan: recipes_of(plan, headline_cells(plan.options)), measure_headline)
VARIANTS = Section(lambda plan: recipes_of(plan, variant_cells(plan.options)), measure_variants)
ANSWERS = Section(lambda plan: recipes_of(plan, answer_cells(plan.options)), measure_answers)
