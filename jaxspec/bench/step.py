"""`bench step`: times of a GRPO step of one checkpoint."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from jaxspec.bench.loaded import LoadedCheckpoint, fixed_text_logprob, load_checkpoint
from jaxspec.bench.measure import (
    CallTimings,
    common_fields,
    process_age_seconds,
    require_model,
    time_calls,
)
from jaxspec.bench.roofline import decode_work, read_roofline
from jaxspec.bench.workload import StepOptions
from jaxspec.config.cli import override_settings
from jaxspec.config.settings import parse_range
from jaxspec.host.comparison import compare_decoding
from jaxspec.host.programs import abstract_arguments, compile_ahead, put_like, sync_weights
from jaxspec.host.round_cost import fill_length_chooser
from jaxspec.inputs.spec import ModelSpec
from jaxspec.processes.devices import describe_machine
from jaxspec.rl.draft_objective import UntrainedDraft
from jaxspec.run.schedules import StepSchedule, compile_fused_schedule, compile_staged_schedule
from jaxspec.state import EOS, LENGTH, Prompts, Rollout, ScoredRollout, TrainState
from jaxspec.step import Step
from jaxspec.system.progress import Screen
from jaxspec.system.trace import Profiler

ABOUT = """Measures a GRPO step. A step answers prompts in groups, rewards the share of digits in
each answer, and updates all weights with AdamW once, with --draft also those of the draft. Prompts
are random digits with end tokens off, or your own problems (--data). Seconds are those of whole
steps as one program. Two steps warm up, and steps that other processes disturbed do not count. The
phases are those of the same step compiled phase by phase. `logprob pass` is a forward pass over
the rollout, which a step with a single update does not need for its old logprobs. With --beta,
`train` includes one for the reference policy. With --draft the same step is measured with plain
decoding too. The last line of the output is one JSON object."""
PHASES = ("data", "prepare", "generate", "score", "train")
"""Phases of a step, in order."""


class Stepper:
    """A sequence of training steps with their measurements."""

    def __init__(
        self,
        loaded: LoadedCheckpoint,
        step: Step,
        runner: StepSchedule,
        profiled_calls: range = range(0),
    ) -> None:
        """Makes the initial state, and prepares a trace of the calls in `profiled_calls`."""
        self._prompt_count = loaded.job.config.batch.prompts
        self._loaded, self._runner = loaded, runner
        self.profiler = Profiler(
            profiled_calls, Path("trace-step.json.gz"), tuple(runner.programs.values()), print
        )
        self._template = abstract_arguments(step, self._prompt_count)[1]
        self.finished = put_like(step.empty_scored_rollout(loaded.options.batch), self._template)
        # A step donates its state, and the next stepper starts from the same weights.
        network = loaded.network if step.generator.draft_length else None
        weights = jax.tree.map(lambda leaf: leaf.copy(), (loaded.policy, network))
        state = jax.jit(
            step.init_state, out_shardings=step.state_shardings(), donate_argnums=(0, 1)
        )(*weights)
        self.state, self._step = fill_length_chooser(step, state, self.encode_prompts(0)), step
        self.phase_seconds: list[dict[str, float]] = []
        """Seconds of data and scoring, and of each phase that the runner times, by call."""
        self.read_lengths: list[np.ndarray] = []
        """Positions of each row that learning reads, by call."""
        self.new_tokens: list[int] = []
        """New tokens, by call."""
        self.rollout_metrics: list[dict[str, float]] = []
        """Metrics of each rollout."""
        self.learner_metrics: dict[str, float] = {}
        """Metrics of the last call's learning."""

    def encode_prompts(self, call_index: int) -> Prompts:
        """Encodes the prompts of a call."""
        return self._loaded.encode_prompts(
            self._loaded.prompt_texts(self._prompt_count, call_index), call_index
        )

    def __call__(self, call_index: int) -> None:
        """Learns from the previous rollout, then generates and scores the next."""
        start_time = time.perf_counter()
        prompts = self.encode_prompts(call_index)
        data_seconds = {"time/data": time.perf_counter() - start_time}
        with self.profiler.trace_call(call_index):
            result = self._runner(self.state, self.finished, prompts, lambda _: False)
        assert result.rollout is not None, "nobody asked to stop"
        start_time = time.perf_counter()
        rewards = put_like(self._score_digits(result.rollout), self._template.rewards)
        lengths = np.asarray(result.rollout.lengths)
        # As in a run, rows that failed are not learned from. The last token of a text is only a
        # label, so learning reads all positions but that one.
        is_complete = np.isin(np.asarray(result.rollout.status), (EOS, LENGTH))
        read_lengths = np.where(is_complete, lengths - 1, 0).astype(np.int32)
        plan = self._step.plan_batch(read_lengths)
        template = self._template.valid, self._template.plan, self._template.learn
        valid, plan, learn = put_like((is_complete, plan, True), template)
        self.state = result.state
        self.finished = ScoredRollout(
            rollout=result.rollout, rewards=rewards, valid=valid, plan=plan, learn=learn
        )
        score_seconds = {"time/score": time.perf_counter() - start_time}
        learner_seconds = {
            name: seconds
            for name, seconds in result.training_metrics.items()
            if name.startswith("time/")
        }
        self.phase_seconds.append(learner_seconds | result.seconds | score_seconds | data_seconds)
        self.rollout_metrics.append(result.rollout_metrics)
        self.learner_metrics = result.training_metrics
        self.read_lengths.append(read_lengths)
        self.new_tokens.append(int(np.sum(lengths - np.asarray(result.rollout.prompt_lengths))))

    def _score_digits(self, rollout: Rollout) -> np.ndarray:
        """Computes the share of digits in each answer's text."""
        tokens, prompt_lengths, lengths = (
            np.asarray(leaf) for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths)
        )
        texts = [
            self._loaded.job.tokenizer.decode(row[prompt_length:length].tolist())
            for row, prompt_length, length in zip(tokens, prompt_lengths, lengths, strict=True)
        ]
        shares = [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in texts]
        return np.array(shares, np.float32)


def time_phases(
    loaded: LoadedCheckpoint, step: Step, repeats: int
) -> tuple[Stepper, StepSchedule, dict[str, float]]:
    """Times the phases of steps.

    Returns the stepper, the compiled phases, and the median seconds of each phase. Two steps warm
    up and do not count.
    """
    runner = compile_staged_schedule(step, loaded.job.config.batch.prompts)
    stepper = Stepper(loaded, step, runner)
    for call_index in range(2 + repeats):
        stepper(call_index)

    def median_seconds(name: str) -> float:
        return float(np.median([seconds[f"time/{name}"] for seconds in stepper.phase_seconds[2:]]))

    return stepper, runner, {name: median_seconds(name) for name in PHASES}


def mean_acceptance_length(stepper: Stepper) -> float:
    """Returns the mean number of tokens kept in rounds with a draft."""
    # The first two rollouts warm up.
    return float(
        np.mean([metrics["rollout/acceptance_length"] for metrics in stepper.rollout_metrics[2:]])
    )


def generation_share(phases: dict[str, float]) -> float:
    """Returns generation's share of the seconds of all phases."""
    return phases["generate"] / sum(phases.values())


def time_logprob_pass(stepper: Stepper, step: Step, repeats: int) -> float:
    """Times a forward pass over the last rollout.

    Other trainers make this pass for the old logprobs, and jaxspec does not. Returns the median
    seconds.
    """

    def forward(state: TrainState, finished: ScoredRollout) -> Any:
        return step.learner.evaluate_policy(
            state.learner.policy.network, step.build_batch(finished)
        )

    program, _ = compile_ahead(forward, stepper.state, stepper.finished)
    pass_seconds = []
    for _ in range(repeats + 1):
        start_time = time.perf_counter()
        jax.block_until_ready(program(stepper.state, stepper.finished))
        pass_seconds.append(time.perf_counter() - start_time)
    # The first pass warms up.
    return float(np.median(pass_seconds[1:]))


def learning_flops(model: ModelSpec, read_lengths: np.ndarray) -> float:
    """Computes the operations of learning.

    These are floating-point operations of a forward and a backward pass over rows of
    `read_lengths` positions. Output head and causal attention are included.
    """
    # A length of 0 leaves out attention to other positions, which is added below.
    token_flops = decode_work(model, 1, 0.0, 4).flops
    # Under the causal mask a position attends to half of the others on average.
    attention_flops = 4 * model.layers * model.heads * model.head_size * (read_lengths - 1) / 2
    # A backward pass has twice the operations of a forward pass.
    return float(np.sum(3 * read_lengths * (token_flops + attention_flops)))


def _mean_learning_flops(model: ModelSpec, stepper: Stepper) -> float:
    """Returns the mean operations of learning, over the timed calls."""
    # Call i learns from the rollout of call i - 1, and calls 2 and later are timed.
    step_flops = [
        learning_flops(model, read_lengths) for read_lengths in stepper.read_lengths[1:-1]
    ]
    return float(np.mean(step_flops))


def measure_speculation(
    loaded: LoadedCheckpoint,
    options: StepOptions,
    stepper: Stepper,
    timings: CallTimings,
    logprob_seconds: float,
) -> dict[str, float]:
    """Measures the step with plain decoding, and the speed-ups of speculation.

    These are the speed-ups of generation, of the step, and of a step with a logprob pass. The round
    cost is given twice: by the seconds of rounds, and by acceptance length over speed-up.
    """
    step = loaded.job.step
    plain_step = dataclasses.replace(
        step, generator=step.generator.without_draft(), init_draft=lambda: None
    )
    learner = dataclasses.replace(step.learner, draft_objective=UntrainedDraft(), taps=())
    plain_step = dataclasses.replace(plain_step, learner=learner)
    plain_stepper = Stepper(
        loaded, plain_step, compile_fused_schedule(plain_step, loaded.job.config.batch.prompts)
    )
    plain_timings = time_calls(plain_stepper, options.repeats, options.budget)
    # Prompts that no step has used, so that the draft has not learned their answers.
    comparison = compare_decoding(
        step,
        sync_weights(step, stepper.state),
        stepper.encode_prompts(len(stepper.phase_seconds)),
    )
    generation_speedup = comparison.plain_seconds / comparison.spec_seconds
    return {
        "plain_step_s": plain_timings.seconds,
        "plain_generation_share": generation_share(
            time_phases(loaded, plain_step, options.repeats)[2]
        ),
        "speedup_generation": generation_speedup,
        "speedup_step": plain_timings.seconds / timings.seconds,
        "speedup_step_with_logprob": (plain_timings.seconds + logprob_seconds)
        / (timings.seconds + logprob_seconds),
        "round_cost": comparison.round_cost,
        "round_cost_of_the_paper": mean_acceptance_length(stepper) / generation_speedup,
    }


def measure_step(
    loaded: LoadedCheckpoint,
    options: StepOptions,
    startup_seconds: dict[str, float],
    fixed_logprob: float,
) -> dict[str, Any]:
    """Measures whole steps, their phases and speculation, and returns the record.

    `startup_seconds` and `fixed_logprob` are added to it.
    """
    step, config = loaded.job.step, loaded.job.config
    start_time = time.perf_counter()
    # Runs compile a step as one program by default, so whole steps are timed in that form.
    schedule = compile_fused_schedule(step, config.batch.prompts)
    stepper = Stepper(loaded, step, schedule, parse_range("--profile", options.profile))
    compile_seconds = time.perf_counter() - start_time
    with contextlib.closing(stepper.profiler):
        timings = time_calls(stepper, options.repeats, options.budget)
    phased_stepper, runner, phase_seconds = time_phases(loaded, step, options.repeats)
    logprob_seconds = time_logprob_pass(phased_stepper, step, options.repeats)
    speculation = (
        measure_speculation(loaded, options, stepper, timings, logprob_seconds)
        if options.draft != "none"
        else {}
    )
    mean_flops = _mean_learning_flops(config.model, phased_stepper)
    roofline = read_roofline(options.dtype)
    # Operations are counted for the policy only, but the seconds of `train` include a draft's.
    flops_per_second = None if step.generator.draft_length else mean_flops / phase_seconds["train"]
    memory = runner.programs["train"].memory_analysis()
    return {
        **common_fields("grpo_step", options, timings, round(np.mean(stepper.new_tokens[2:]))),
        "group": options.group,
        "algorithm": options.algorithm,
        "beta": config.kl.beta,
        "phases_s": {
            **startup_seconds,
            "first_call": compile_seconds + timings.first_seconds,
            **phase_seconds,
            # The reference policy takes such a pass too, as a part of learning.
            "ref": logprob_seconds if config.kl.beta else 0.0,
        },
        "logprob_pass_s": logprob_seconds,
        "generation_share": generation_share(phase_seconds),
        "packing": phased_stepper.learner_metrics.get("learner/packing"),
        "micro_batch": step.learner.micro_tokens,
        "learning_flops_per_s": flops_per_second,
        "learning_roofline_share": flops_per_second / roofline.flops_per_s
        if flops_per_second and roofline
        else None,
        "learning_temporary_bytes": memory.temp_size_in_bytes if memory else None,
        **speculation,
        "compile_s": compile_seconds,
        "check_logprob": fixed_logprob,
        "acceptance_length": mean_acceptance_length(stepper),
        "machine": describe_machine(loaded.job.mesh),
    }


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark. Returns the exit status."""
    options = override_settings(
        StepOptions(), argv, "python -m jaxspec.bench step --model DIR", ABOUT
    )
    require_model(options.model, "step")
    startup_seconds = {"import": process_age_seconds()}
    start_time = time.perf_counter()
    loaded = load_checkpoint(options.generate_options(), options.group, options.adapt_config)
    fixed_logprob = fixed_text_logprob(loaded)
    startup_seconds["load"] = time.perf_counter() - start_time
    record = measure_step(loaded, options, startup_seconds, fixed_logprob)
    Screen().print(_step_table(record))
    print(json.dumps(record))
    return 0


def _step_table(record: dict[str, Any]) -> Table:
    """Builds the table of a step."""
    table = Table(
        box=box.SIMPLE,
        show_header=False,
        title=f"one step of {record['model']}",
        title_justify="left",
        padding=0,
        show_edge=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    phases = record["phases_s"]
    table.add_row(
        "step", f"{record['wall_s']:.3f} s as one program{' (noisy)' if record['noisy'] else ''}"
    )
    table.add_row("phases", ", ".join(f"{name} {phases[name]:.3f}" for name in PHASES))
    table.add_row("generation", f"{record['generation_share']:.0%} of the phases")
    rate, share = record["learning_flops_per_s"], record["learning_roofline_share"]
    share_text = (
        f", {share:.0%} of what this machine's products reach"
        if share
        else " (run bench roofline for its share)"
    )
    rate_text = f"{rate / 1e9:,.0f} GFLOP/s{share_text}; " if rate else ""
    packing_text = (
        f"{record['packing']:.0%} of its positions are text, micro-batches of"
        f" {record['micro_batch']}"
    )
    table.add_row("learning", f"{rate_text}{packing_text}")
    pass_text = "made for the reference policy" if record["beta"] else "not made"
    table.add_row("logprob pass", f"{record['logprob_pass_s']:.3f} s, {pass_text}")
    if "plain_step_s" in record:
        gain_text = (
            f"generation {record['speedup_generation']:.2f}, step {record['speedup_step']:.2f}"
        )
        table.add_row(
            "speculation",
            f"{gain_text}, with a logprob pass {record['speedup_step_with_logprob']:.2f} times as"
            " fast",
        )
        table.add_row(
            "plain",
            f"step {record['plain_step_s']:.3f} s, of which generation takes"
            f" {record['plain_generation_share']:.0%}",
        )
        cost_text = (
            f"{record['round_cost']:.2f} (a round's seconds over a plain step's),"
            f" {record['round_cost_of_the_paper']:.2f} (acceptance length"
        )
        table.add_row(
            "round cost",
            f"{cost_text} {record['acceptance_length']:.2f} over generation's speed-up)",
        )
    return table
