"""Sections 2 to 4: rounds compared with plain steps, and whole answers.

Drafts are kept at a prescribed acceptance.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.gpu.cells import Cell
from jaxspec.bench.gpu.device import wait_for_arrays
from jaxspec.bench.gpu.options import TIMED_SLICES, GpuOptions
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.run import NOT_APPLICABLE, GpuPlan, GpuRun, Section
from jaxspec.bench.measure import build_rounds_table
from jaxspec.bench.roofline import decode_work
from jaxspec.mesh import replicated_sharding
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.state import FAILED, RUNNING, RolloutWeights

MAX_SLICE_ROUNDS = 32
"""Maximum number of rounds in a timed slice."""


def headline_cells(options: GpuOptions) -> list[Cell]:
    """Lists the cells of section 2: plain steps and rounds at each number of rows."""
    # Plain steps come first, so that rounds of as many rows can be compared with them.
    return [
        Cell(rows, length, options.new, options.draft_vocab)
        for rows in options.rows
        for length in (0, options.draft_length)
    ]


def variant_cells(options: GpuOptions) -> list[Cell]:
    """Lists the cells of section 3.

    They have other draft lengths, the full draft vocabulary, or command buffers.
    """
    length, new_tokens, vocab = options.draft_length, options.new, options.draft_vocab
    last_rows = options.few[-1]
    cells = [
        Cell(rows, other_length, new_tokens, vocab)
        for rows in options.few
        for other_length in options.other_lengths
    ]
    # With --draft_vocab 0 all cells have the full vocabulary already.
    if vocab:
        cells.append(Cell(last_rows, length, new_tokens, 0))
    # Both numbers of rows may be the same, and a cell is listed once.
    buffer_rows = dict.fromkeys((options.rows[0], last_rows))
    return cells + [
        Cell(rows, length, new_tokens, vocab, command_buffers=True) for rows in buffer_rows
    ]


def answer_cells(options: GpuOptions) -> list[Cell]:
    """Lists the cells of section 4: whole answers, plain and with drafts."""
    lengths = 0, options.draft_length
    return [
        Cell(options.few[-1], length, options.answer, options.draft_vocab) for length in lengths
    ]


def can_run(plan: GpuPlan, cell: Cell) -> bool:
    """Returns whether the device supports a cell. Command buffers need a GPU."""
    return plan.targets_gpu or not cell.command_buffers


def cell_recipes(plan: GpuPlan, cells: Sequence[Cell]) -> list[Recipe]:
    """Lists the programs of cells without duplicates."""
    recipes = [
        recipe for cell in cells if can_run(plan, cell) for recipe in plan.cells.list_recipes(cell)
    ]
    return list({recipe.name: recipe for recipe in recipes}.values())


# ---- timing


def place_round_count(run: GpuRun, count: int) -> jax.Array:
    """Places a number of rounds on the device."""
    return jax.device_put(jnp.int32(count), replicated_sharding(run.plan.mesh))


def time_rounds(run: GpuRun, cell: Cell) -> dict[str, Any]:
    """Times slices of rounds while all rows are running."""
    prefill, advance = run.get_program(cell.prefill_name), run.get_program(cell.rounds_name)
    weights, prompts = run.cells.rollout_weights(cell), run.cells.make_prompts(cell)
    # Even if every round keeps all its drafts, a row runs for this many rounds.
    min_rounds = cell.new_tokens // (cell.draft_length + 1)
    warmup_rounds = max(1, min_rounds // 8)
    slice_rounds = max(1, min(MAX_SLICE_ROUNDS, (min_rounds - warmup_rounds) // TIMED_SLICES))
    round_seconds, tokens_per_round = [], []
    with run.programs.pause_compiling():
        # The first call of a program also loads its kernels.
        wait_for_arrays(prefill.program(weights, prompts))
        start_time = time.perf_counter()
        decode_state = wait_for_arrays(prefill.program(weights, prompts))
        prefill_seconds = time.perf_counter() - start_time
        decode_state = wait_for_arrays(
            advance.program(weights, decode_state, place_round_count(run, warmup_rounds))
        )
        previous_lengths = first_lengths = _row_lengths(decode_state)
        for _ in range(TIMED_SLICES):
            # Placed before the clock starts, so that no copy to the device is measured.
            count_array = place_round_count(run, slice_rounds)
            start_time = time.perf_counter()
            decode_state = wait_for_arrays(advance.program(weights, decode_state, count_array))
            round_seconds.append((time.perf_counter() - start_time) / slice_rounds)
            lengths = _row_lengths(decode_state)
            tokens_per_round.append(float(np.mean(lengths - previous_lengths)) / slice_rounds)
            previous_lengths = lengths
    # The median of the seconds ignores a disturbed slice.
    row = _describe_rounds(
        run, cell, weights, float(np.median(round_seconds)), float(np.mean(tokens_per_round))
    )
    # Caches grow during the slices. Bytes are counted at their mean length.
    mean_length = float(np.mean((first_lengths + previous_lengths) / 2))
    read_bytes = _round_bytes(run, cell, weights, mean_length)
    share = read_bytes / row["round_s"] / run.peak_bandwidth if run.peak_bandwidth else None
    status = np.asarray(decode_state.rollout.status)
    return {
        **row,
        "round_s_all": round_seconds,
        "prefill_s": prefill_seconds,
        "prefill_tokens_per_s": cell.rows * run.options.prompt / prefill_seconds,
        "bytes": read_bytes,
        "bandwidth_share": share,
        "loaded": advance.is_loaded,
        "without_kernels": advance.without_kernels,
        **_status_warning(status, RUNNING),
    }


def _row_lengths(decode_state: DecodeState) -> np.ndarray:
    return np.asarray(decode_state.rollout.lengths)


def _status_warning(status: np.ndarray, expected: int) -> dict[str, Any]:
    """Returns a `warning` about rows whose status is not `expected`, or nothing."""
    failures, unexpected = np.sum(status == FAILED), np.sum(status != expected)
    if not unexpected:
        return {}
    return {
        "warning": f"{unexpected} of {len(status)} rows ended unexpectedly, {failures} of them with"
        " numbers that are not finite"
    }


def _describe_rounds(
    run: GpuRun, cell: Cell, weights: RolloutWeights, seconds: float, tokens_per_round: float
) -> dict[str, Any]:
    notes = ["full vocabulary"] * bool(
        cell.draft_length and not cell.draft_vocab and run.options.draft_vocab
    )
    notes += ["command buffers"] * cell.command_buffers
    return {
        "live": cell.rows,
        "K": cell.draft_length,
        "note": ", ".join(notes),
        "round_s": seconds,
        "tokens_per_pass": tokens_per_round,
        "tokens_per_s": cell.rows * tokens_per_round / seconds,
    }


def _round_bytes(run: GpuRun, cell: Cell, weights: RolloutWeights, mean_length: float) -> float:
    """Returns the bytes that a round must read.

    These are the policy's weights and caches once, and the draft's weights once per draft token.
    """
    itemsize = jnp.dtype(run.options.dtype).itemsize
    policy_bytes = decode_work(run.options.policy, cell.rows, mean_length, itemsize).read_bytes
    leaves = jax.tree.leaves(weights.drafter.network)
    # The integers that map the draft's vocabulary are no weights.
    draft_bytes = sum(leaf.nbytes for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
    return policy_bytes + cell.draft_length * draft_bytes


def compare_with_plain(row: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    """Adds round cost and speed-up relative to plain steps of as many rows.

    Returns the row unchanged if it or the plain row was not measured.
    """
    if "round_s" not in row or plain is None or "round_s" not in plain:
        return row
    return row | {
        "round_cost": row["round_s"] / plain["round_s"],
        "speedup": row["tokens_per_s"] / plain["tokens_per_s"],
    }


def _time_cells(run: GpuRun, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Times cells one by one, and compares each with plain steps of as many rows."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        if not can_run(run.plan, cell):
            rows.append(_cell_keys(cell) | {"not_applicable": NOT_APPLICABLE})
            run.print_line(f"{cell.rounds_name}: {NOT_APPLICABLE}")
            continue
        timing = run.attempt_part(cell.rounds_name, lambda cell=cell: time_rounds(run, cell))
        # Section 3 has no plain steps. It uses those of section 2, if the file has them.
        earlier_rows = [*rows, *run.results.get_section(2).get("rows", [])]
        plain_rows = [row for row in earlier_rows if row["live"] == cell.rows and not row["K"]]
        row = _cell_keys(cell) | timing
        rows.append(
            compare_with_plain(
                row, plain_rows[0] if plain_rows else row if not cell.draft_length else None
            )
        )
        if "warning" in row:
            run.print_line(f"warning: {cell.rounds_name}: {row['warning']}")
    return rows


def _cell_keys(cell: Cell) -> dict[str, Any]:
    return {
        "live": cell.rows,
        "K": cell.draft_length,
        "vocab": cell.draft_vocab,
        "graphs": cell.command_buffers,
    }


def _print_table(run: GpuRun, title: str, rows: Sequence[dict[str, Any]]) -> None:
    run.screen.print(build_rounds_table([row for row in rows if "round_s" in row], title))


def measure_headline(run: GpuRun) -> dict[str, Any]:
    """Times `headline_cells` and prints their table."""
    rows = _time_cells(run, headline_cells(run.options))
    _print_table(run, f"rounds at {run.options.acceptance:g} tokens kept of 3 drafts", rows)
    return {"rows": rows}


def measure_variants(run: GpuRun) -> dict[str, Any]:
    """Times `variant_cells` and prints their table."""
    rows = _time_cells(run, variant_cells(run.options))
    _print_table(run, "other draft lengths, vocabularies, command buffers", rows)
    return {"rows": rows}


# ---- whole answers


def time_answers(run: GpuRun, cell: Cell) -> dict[str, Any]:
    """Times answers to all prompts from prefill to the last token."""
    prefill, advance = run.get_program(cell.prefill_name), run.get_program(cell.rounds_name)
    weights, prompts = run.cells.rollout_weights(cell), run.cells.make_prompts(cell)
    with run.programs.pause_compiling():
        # The first call of a program also loads its kernels.
        wait_for_arrays(
            advance.program(weights, prefill.program(weights, prompts), place_round_count(run, 1))
        )
        start_time = time.perf_counter()
        decode_state = wait_for_arrays(prefill.program(weights, prompts))
        prefill_end = time.perf_counter()
        # No limit of rounds: the loop ends when every row has its tokens.
        all_rounds = place_round_count(run, np.iinfo(np.int32).max)
        decode_state = wait_for_arrays(advance.program(weights, decode_state, all_rounds))
        end_time = time.perf_counter()
    tokens = int(
        np.sum(_row_lengths(decode_state) - np.asarray(decode_state.rollout.prompt_lengths))
    )
    passes = int(np.sum(decode_state.rollout.statistics.rounds))
    round_count = int(np.max(decode_state.round))
    return {
        "prefill_s": prefill_end - start_time,
        "round_s": (end_time - prefill_end) / round_count,
        "seconds": end_time - start_time,
        "tokens": tokens,
        "tokens_per_pass": tokens / passes,
        "tokens_per_s": tokens / (end_time - start_time),
    }


def measure_answers(run: GpuRun) -> dict[str, Any]:
    """Times `answer_cells` and prints their table."""
    rows: list[dict[str, Any]] = []
    for cell in answer_cells(run.options):
        name = f"answers of {cell.label}"
        row = _cell_keys(cell) | run.attempt_part(name, lambda cell=cell: time_answers(run, cell))
        # The first cell is plain.
        rows.append(compare_with_plain(row, rows[0] if rows else row))
    options = run.options
    title = f"{options.few[-1]} answers of {options.answer} tokens, prefill included in tokens/s"
    _print_table(run, title, rows)
    return {"rows": rows}


HEADLINE_SECTION = Section(
    lambda plan: cell_recipes(plan, headline_cells(plan.options)), measure_headline
)
VARIANTS_SECTION = Section(
    lambda plan: cell_recipes(plan, variant_cells(plan.options)), measure_variants
)
ANSWERS_SECTION = Section(
    lambda plan: cell_recipes(plan, answer_cells(plan.options)), measure_answers
)
