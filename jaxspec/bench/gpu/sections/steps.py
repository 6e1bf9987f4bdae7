"""Sections 5 and 6: seconds of a GRPO step with and without speculation, and of its learning."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from jaxspec.bench.gpu.device import DeviceMemory, wait_for
from jaxspec.bench.gpu.run import GpuRun, Section
from jaxspec.bench.gpu.sections.grpo import PHASES, Mode
from jaxspec.bench.gpu.sections.rounds import rounds
from jaxspec.bench.step import learning_work
from jaxspec.host import memory
from jaxspec.state import Rollout, TrainState

LEARNINGS = 3
FROZEN = 2 / 3
"""Share of learning's operations where weights have adapters: none for gradients of weights."""


def _timed(seconds: dict[str, float], phase: str, function: Callable, *arguments: Any) -> Any:
    """Runs a phase to its end against the clock."""
    began = time.perf_counter()
    found = wait_for(function(*arguments))
    seconds[phase] = time.perf_counter() - began
    return found


class _Stepper:
    """Steps of one mode, phase by phase."""

    def __init__(self, run: GpuRun, mode: Mode) -> None:
        """Waits for its programs, and makes the state."""
        self._run, self.mode, self.step = run, mode, mode.step
        self.programs = {
            phase: run.get(mode.name(phase)).program for phase in ("start", *PHASES, "logprobs")
        }
        self.state: TrainState = self.programs["start"](*mode.weights())
        self.gap: tuple[float, float] | None = None

    def __call__(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Generates and learns; returns the phases' seconds, and what the rollout was like."""
        programs, seconds = self.programs, {}
        ready = _timed(seconds, "prepare", programs["prepare"], self.state)
        prompts = self.mode.prompts(number)
        running = _timed(seconds, "prefill", programs["prefill"], ready, prompts)
        to_the_end = rounds(self._run, np.iinfo(np.int32).max)
        running = _timed(seconds, "rounds", programs["rounds"], ready, running, to_the_end)
        rollout = self.step.generator.collect(ready, running)
        # the learner needs their room
        del ready, running
        about = _described(rollout)
        finished = self.mode.finished(rollout, number)
        if self.gap is None:
            mean, largest = programs["logprobs"](self.state, finished)
            self.gap = float(mean), float(largest)
        self.state, metrics = _timed(seconds, "learn", programs["learn"], self.state, finished)
        return seconds, about | {"packing": float(metrics["learner/packing"])}


def _described(rollout: Rollout) -> dict[str, float]:
    tokens = float(np.sum(np.asarray(rollout.lengths) - np.asarray(rollout.prompt_lengths)))
    passes = float(np.sum(rollout.statistics.rounds))
    return {"tokens": tokens, "tokens_per_pass": tokens / passes}


def _measured_step(run: GpuRun, mode: Mode) -> dict[str, Any]:
    """Seconds of a step by phase, the gap between rollout and learner, and memory."""
    with DeviceMemory(run.device) as taken:
        stepper = _Stepper(run, mode)
        with run.programs.quiet():
            # the first step loads the programs' kernels
            stepper(0)
            seconds, about = stepper(1)
    assert stepper.gap is not None
    total = sum(seconds.values())
    generation = seconds["prefill"] + seconds["rounds"]
    predicted = _predicted(stepper)
    return {
        "seconds": total,
        "phases_s": seconds,
        "generation_s": generation,
        "generation_share": generation / total,
        **about,
        "logprob_gap_mean": stepper.gap[0],
        "logprob_gap_largest": stepper.gap[1],
        "memory_peak": taken.peak or None,
        **predicted,
    }


def _predicted(stepper: _Stepper) -> dict[str, Any]:
    """Memory as the compiled programs and shapes say it, as a run's start and `check` do."""
    programs = stepper.programs
    named = {
        "train": programs["learn"],
        "prepare": programs["prepare"],
        "prefill": programs["prefill"],
        "slice": programs["rounds"],
    }
    owners = memory.parts(stepper.step, stepper.mode.options.step_prompts, named)
    return {
        "memory_predicted": sum(part.size for part in owners),
        "memory_owners": {part.name: part.size for part in owners},
    }


def measure_steps(run: GpuRun) -> dict[str, Any]:
    """Section 5."""
    run.cells.drop_weights()
    found: dict[str, Any] = {}
    for speculative in (False, True):
        mode = Mode(run.plan, speculative)
        name = "speculative" if speculative else "plain"
        found[name] = run.attempt(f"a {name} step", lambda mode=mode: _measured_step(run, mode))
    plain, fast = found["plain"], found["speculative"]
    if "seconds" in plain and "seconds" in fast:
        found["speedup_step"] = plain["seconds"] / fast["seconds"]
        found["speedup_generation"] = plain["generation_s"] / fast["generation_s"]
    run.screen.print(_steps_table(run, found))
    return found


def _steps_table(run: GpuRun, found: dict[str, Any]) -> Table:
    options = run.options
    size = "1.7b" if options.step_model == "1.7b" else options.size
    what = "LoRA 16" if options.lora_rank else "all weights"
    title = (
        f"a GRPO step of {size} ({what}), {options.step_prompts} x {options.group} answers of"
        f" {options.step_new} tokens"
    )
    table = Table(box=box.SIMPLE, title=title, title_justify="left", padding=0, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("step", *PHASES, "share", "tokens\na pass", "gap\nmean", "gap\nmax"):
        table.add_column(heading, justify="right")
    for name in ("plain", "speculative"):
        row = found[name]
        if "seconds" in row:
            seconds = (f"{row['phases_s'][phase]:.3f}" for phase in PHASES)
            gaps = row["logprob_gap_mean"], row["logprob_gap_largest"]
            share, kept = f"{row['generation_share']:.0%}", f"{row['tokens_per_pass']:.2f}"
            table.add_row(
                name,
                f"{row['seconds']:.3f} s",
                *seconds,
                share,
                kept,
                *(f"{gap:.4f}" for gap in gaps),
            )
    if "speedup_step" in found:
        gains = f"generation {found['speedup_generation']:.2f}, step {found['speedup_step']:.2f}"
        table.caption = f"speculation: {gains} times as fast"
        table.caption_justify = "left"
    return table


# ---- learning


def _measured_learning(run: GpuRun) -> dict[str, Any]:
    """Seconds of learning from rows of full length, and memory while it runs."""
    mode = Mode(run.plan, speculative=False)
    start, learn = (run.get(mode.name(phase)).program for phase in ("start", "learn"))
    with DeviceMemory(run.device) as taken, run.programs.quiet():
        state = start(*mode.weights())
        finished = mode.finished(mode.any_rollout(), 0)
        seconds: list[dict[str, float]] = [{} for _ in range(LEARNINGS)]
        packing = 0.0
        for each in seconds:
            state, metrics = _timed(each, "learn", learn, state, finished)
            packing = float(metrics["learner/packing"])
    options, read = run.options, mode.read(finished.rollout)
    best = min(each["learn"] for each in seconds)
    work = learning_work(options.trained_policy, read) * (FROZEN if options.lora_rank else 1)
    told = learn.memory_analysis()
    inputs = told.argument_size_in_bytes + told.output_size_in_bytes - told.alias_size_in_bytes
    return {
        "seconds_all": [each["learn"] for each in seconds],
        "learn_s": best,
        "positions": int(read.sum()),
        "positions_per_s": float(read.sum()) / best,
        "micro_batch": mode.step.learner.tokens,
        "packing": packing,
        "flops_per_s": work / best,
        "flops_share": work / best / run.flops if run.flops else None,
        "memory_peak": taken.peak or None,
        "memory_predicted": inputs + told.temp_size_in_bytes,
    }


def measure_learning(run: GpuRun) -> dict[str, Any]:
    """Section 6."""
    run.cells.drop_weights()
    found = run.attempt("learning", lambda: _measured_learning(run))
    if "learn_s" not in found:
        return found
    share = f", {found['flops_share']:.0%} of the measured peak" if found["flops_share"] else ""
    run.say(
        f"learning: {found['positions_per_s']:,.0f} positions/s ({found['positions']:,} in"
        f" {found['learn_s']:.3f} s, micro-batches of {found['micro_batch']:,});"
        f" {found['flops_per_s'] / 1e12:.3g} TFLOP/s{share}"
    )
    steps = run.results.get(5).get("plain", {})
    for name, row in (("a plain step", steps), ("learning alone", found)):
        if "memory_predicted" in row:
            run.say(f"memory of {name}: {_memory_words(row)}")
    return found


def _memory_words(row: dict[str, Any]) -> str:
    predicted, peak = row["memory_predicted"], row["memory_peak"]
    if not peak:
        return f"predicted {_mib(predicted)}; this device does not say what is in use"
    return f"at most {_mib(peak)} in use, predicted {_mib(predicted)} ({peak / predicted - 1:+.0%})"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


STEPS_SECTION = Section(
    lambda plan: [
        recipe for speculative in (False, True) for recipe in Mode(plan, speculative).recipes()
    ],
    measure_steps,
)
LEARNING = Section(
    lambda plan: [
        recipe
        for recipe in Mode(plan, speculative=False).recipes()
        if recipe.name.startswith(("start", "learn"))
    ],
    measure_learning,
)
