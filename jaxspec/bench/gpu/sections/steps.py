"""Sections 5 and 6: time of a GRPO step and of its learning.

Section 5 runs the step with and without speculation.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from jaxspec.bench.gpu.device import DeviceMemory, wait_for_arrays
from jaxspec.bench.gpu.run import GpuRun, Section
from jaxspec.bench.gpu.sections.grpo import PHASES, StepMode
from jaxspec.bench.gpu.sections.rounds import place_round_count
from jaxspec.bench.step import learning_flops
from jaxspec.host import fit
from jaxspec.metrics.mean import Metrics, metrics_to_host
from jaxspec.state import Rollout, TrainState

LEARN_CALLS = 3
"""Number of timed calls of learning."""
# Learning has three parts of equal cost: forward pass, gradients of inputs, and gradients of
# weights. Frozen weights skip the last one.
FROZEN_FLOPS_SHARE = 2 / 3
"""Fraction of learning's operations that remain if only adapters are trained."""


def read_packing(metrics: Metrics) -> float:
    """Returns the share of positions with text. NaN if nothing was learned."""
    return metrics_to_host(metrics).get("learner/packing", math.nan)


def _time_phase(seconds: dict[str, float], phase: str, function: Callable, *arguments: Any) -> Any:
    """Runs a phase to its end, and stores its time in `seconds`."""
    start_time = time.perf_counter()
    result = wait_for_arrays(function(*arguments))
    seconds[phase] = time.perf_counter() - start_time
    return result


class _PhaseStepper:
    """Runs steps of one mode phase by phase."""

    def __init__(self, run: GpuRun, mode: StepMode) -> None:
        """Waits for the programs, and makes the initial state."""
        self._run, self.mode, self.step = run, mode, mode.step
        self.programs = {
            phase: run.get_program(mode.program_name(phase)).program
            for phase in ("start", *PHASES, "logprobs")
        }
        self.state: TrainState = self.programs["start"](*mode.random_networks())
        self.gap: tuple[float, float] | None = None

    def __call__(self, call_index: int) -> tuple[dict[str, float], dict[str, float]]:
        """Runs one step. Returns the seconds of each phase, and figures of the rollout."""
        programs, seconds = self.programs, {}
        weights = _time_phase(seconds, "prepare", programs["prepare"], self.state)
        prompts = self.mode.make_prompts(call_index)
        decode_state = _time_phase(seconds, "prefill", programs["prefill"], weights, prompts)
        all_rounds = place_round_count(self._run, np.iinfo(np.int32).max)
        decode_state = _time_phase(
            seconds, "rounds", programs["rounds"], weights, decode_state, all_rounds
        )
        rollout = self.step.generator.collect(weights, decode_state)
        # The learner needs the memory of these arrays.
        del weights, decode_state
        rollout_figures = _describe_rollout(rollout)
        finished = self.mode.score_rollout(rollout, call_index)
        # Measured in the first step only. Until "learn", rollout and learner have the same policy.
        if self.gap is None:
            mean, largest = programs["logprobs"](self.state, finished)
            self.gap = float(mean), float(largest)
        self.state, metrics = _time_phase(seconds, "learn", programs["learn"], self.state, finished)
        return seconds, rollout_figures | {"packing": read_packing(metrics)}


def _describe_rollout(rollout: Rollout) -> dict[str, float]:
    tokens = float(np.sum(np.asarray(rollout.lengths) - np.asarray(rollout.prompt_lengths)))
    passes = float(np.sum(rollout.statistics.rounds))
    return {"tokens": tokens, "tokens_per_pass": tokens / passes}


def _time_step(run: GpuRun, mode: StepMode) -> dict[str, Any]:
    """Measures the seconds of a step by phase, the logprob gap, and memory."""
    with DeviceMemory(run.device) as device_memory:
        stepper = _PhaseStepper(run, mode)
        with run.programs.pause_compiling():
            # The first step also loads the programs' kernels.
            stepper(0)
            seconds, rollout_figures = stepper(1)
    assert stepper.gap is not None
    total_seconds = sum(seconds.values())
    generation_seconds = seconds["prefill"] + seconds["rounds"]
    predicted_memory = _predict_memory(stepper)
    return {
        "seconds": total_seconds,
        "phases_s": seconds,
        "generation_s": generation_seconds,
        "generation_share": generation_seconds / total_seconds,
        **rollout_figures,
        "logprob_gap_mean": stepper.gap[0],
        "logprob_gap_largest": stepper.gap[1],
        # A device without memory statistics has a peak of 0.
        "memory_peak": device_memory.peak or None,
        **predicted_memory,
    }


def _predict_memory(stepper: _PhaseStepper) -> dict[str, Any]:
    """Predicts memory from compiled programs and shapes, as runs and `check` do."""
    programs = stepper.programs
    # `list_memory_uses` expects the names of a run's programs.
    programs_by_name = {
        "train": programs["learn"],
        "prepare": programs["prepare"],
        "prefill": programs["prefill"],
        "slice": programs["rounds"],
    }
    memory_parts = fit.list_memory_uses(
        stepper.step, stepper.mode.options.step_prompts, programs_by_name
    )
    return {
        "memory_predicted": sum(entry.size for entry in memory_parts),
        "memory_owners": {entry.name: entry.size for entry in memory_parts},
    }


def measure_steps(run: GpuRun) -> dict[str, Any]:
    """Times GRPO steps with and without speculation, and prints their table."""
    # The weights of earlier sections would take memory from the step.
    run.cells.drop_weights()
    results: dict[str, Any] = {}
    for speculative in (False, True):
        mode = StepMode(run.plan, speculative)
        name = "speculative" if speculative else "plain"
        results[name] = run.attempt_part(f"a {name} step", lambda mode=mode: _time_step(run, mode))
    plain, fast = results["plain"], results["speculative"]
    if "seconds" in plain and "seconds" in fast:
        results["speedup_step"] = plain["seconds"] / fast["seconds"]
        results["speedup_generation"] = plain["generation_s"] / fast["generation_s"]
    run.screen.print(_steps_table(run, results))
    return results


def _steps_table(run: GpuRun, results: dict[str, Any]) -> Table:
    options = run.options
    model_size = "1.7b" if options.step_model == "1.7b" else options.size
    weights_text = "LoRA 16" if options.lora_rank else "all weights"
    title = (
        f"a GRPO step of {model_size} ({weights_text}), {options.step_prompts} x {options.group}"
        f" answers of {options.step_new} tokens"
    )
    table = Table(box=box.SIMPLE, title=title, title_justify="left", padding=0, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("step", *PHASES, "share", "tokens\na pass", "gap\nmean", "gap\nmax"):
        table.add_column(heading, justify="right")
    for name in ("plain", "speculative"):
        row = results[name]
        if "seconds" in row:
            seconds = (f"{row['phases_s'][phase]:.3f}" for phase in PHASES)
            gaps = row["logprob_gap_mean"], row["logprob_gap_largest"]
            share, tokens_per_pass = (
                f"{row['generation_share']:.0%}",
                f"{row['tokens_per_pass']:.2f}",
            )
            table.add_row(
                name,
                f"{row['seconds']:.3f} s",
                *seconds,
                share,
                tokens_per_pass,
                *(f"{gap:.4f}" for gap in gaps),
            )
    if "speedup_step" in results:
        gains = (
            f"generation {results['speedup_generation']:.2f}, step {results['speedup_step']:.2f}"
        )
        table.caption = f"speculation: {gains} times as fast"
        table.caption_justify = "left"
    return table


# ---- learning


def _time_learning(run: GpuRun) -> dict[str, Any]:
    """Measures seconds and memory of learning from rows of full length."""
    mode = StepMode(run.plan, speculative=False)
    start_program, learn_program = (
        run.get_program(mode.program_name(phase)).program for phase in ("start", "learn")
    )
    with DeviceMemory(run.device) as device_memory, run.programs.pause_compiling():
        state = start_program(*mode.random_networks())
        finished = mode.score_rollout(mode.full_rollout(), 0)
        seconds: list[dict[str, float]] = [{} for _ in range(LEARN_CALLS)]
        packing = 0.0
        for phase_seconds in seconds:
            state, metrics = _time_phase(phase_seconds, "learn", learn_program, state, finished)
            packing = read_packing(metrics)
    options, read_lengths = run.options, mode.read_lengths(finished.rollout)
    # The first call also loads kernels, and disturbances only slow a call down.
    best_seconds = min(phase_seconds["learn"] for phase_seconds in seconds)
    flops = learning_flops(options.step_policy, read_lengths) * (
        FROZEN_FLOPS_SHARE if options.lora_rank else 1
    )
    # Outputs that alias donated arguments take no memory of their own.
    program_memory = learn_program.memory_analysis()
    argument_bytes = (
        program_memory.argument_size_in_bytes
        + program_memory.output_size_in_bytes
        - program_memory.alias_size_in_bytes
    )
    return {
        "seconds_all": [phase_seconds["learn"] for phase_seconds in seconds],
        "learn_s": best_seconds,
        "positions": int(read_lengths.sum()),
        "positions_per_s": float(read_lengths.sum()) / best_seconds,
        "micro_batch": mode.step.learner.micro_tokens,
        "packing": packing,
        "flops_per_s": flops / best_seconds,
        "flops_share": flops / best_seconds / run.peak_flops if run.peak_flops else None,
        "memory_peak": device_memory.peak or None,
        "memory_predicted": argument_bytes + program_memory.temp_size_in_bytes,
    }


def measure_learning(run: GpuRun) -> dict[str, Any]:
    """Times learning from full rows, and prints its speed and memory."""
    run.cells.drop_weights()
    result = run.attempt_part("learning", lambda: _time_learning(run))
    if "learn_s" not in result:
        return result
    share = f", {result['flops_share']:.0%} of the measured peak" if result["flops_share"] else ""
    run.print_line(
        f"learning: {result['positions_per_s']:,.0f} positions/s ({result['positions']:,} in"
        f" {result['learn_s']:.3f} s, micro-batches of {result['micro_batch']:,});"
        f" {result['flops_per_s'] / 1e12:.3g} TFLOP/s{share}"
    )
    steps = run.results.get_section(5).get("plain", {})
    for name, row in (("a plain step", steps), ("learning alone", result)):
        if "memory_predicted" in row:
            run.print_line(f"memory of {name}: {_memory_text(row)}")
    return result


def _memory_text(row: dict[str, Any]) -> str:
    predicted, peak = row["memory_predicted"], row["memory_peak"]
    if not peak:
        return f"predicted {_format_mib(predicted)}; this device does not report memory in use"
    return (
        f"at most {_format_mib(peak)} in use, predicted {_format_mib(predicted)}"
        f" ({peak / predicted - 1:+.0%})"
    )


def _format_mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


STEPS_SECTION = Section(
    lambda plan: [
        recipe
        for speculative in (False, True)
        for recipe in StepMode(plan, speculative).list_recipes()
    ],
    measure_steps,
)
# Learning is timed with only two of the plain step's programs.
LEARNING_SECTION = Section(
    lambda plan: [
        recipe
        for recipe in StepMode(plan, speculative=False).list_recipes()
        if recipe.name.startswith(("start", "learn"))
    ],
    measure_learning,
)
