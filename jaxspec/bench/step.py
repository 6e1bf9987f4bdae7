"""One GRPO step of a checkpoint: generate, score, learn, as one program; and the seconds of its
phases."""

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

from jaxspec import mesh as meshes
from jaxspec.bench.loaded import Loaded, check_logprob, load
from jaxspec.bench.measure import Timed, check_model, common, process_seconds, timed
from jaxspec.bench.roofline import remembered, work_of
from jaxspec.bench.workload import StepOptions
from jaxspec.config.cli import override
from jaxspec.config.settings import numbers_of
from jaxspec.host.round_cost import with_chooser
from jaxspec.host.runner import Runner, abstract, ahead, compare, put, staged_step, whole_step
from jaxspec.inputs.spec import ModelSpec
from jaxspec.state import EOS, LENGTH, Finished, Prompts, Rollout, TrainState
from jaxspec.step import Step
from jaxspec.system.progress import Screen
from jaxspec.system.trace import Profiler

ABOUT = """Answers prompts of random digits in groups, end tokens off, or problems of your own
(--data), rewards the share of digits in each answer, and updates all weights with AdamW, once a
step; with --draft also the draft. Seconds are those of whole steps as one program, after two to
warm up; steps that others on the machine disturbed do not count. The phases are those of the same
step compiled phase by phase; `logprob pass` is a forward pass over the rollout, which a step with
one update does not need for its old logprobs; with --beta, `train` has one for the reference
policy. With --draft the same step by plain decoding is measured as well. The last line of the
output is one JSON object."""
PHASES = ("data", "prepare", "generate", "score", "train")
"""Of a step, in their order."""


class Stepper:
    """Steps one after the other, each from the weights that the one before it left."""

    def __init__(
        self, loaded: Loaded, step: Step, runner: Runner, numbers: range = range(0)
    ) -> None:
        """Traces the calls of `numbers`."""
        self._count = loaded.job.config.batch.prompts
        self._loaded, self._runner = loaded, runner
        self.profiler = Profiler(
            numbers, Path("trace-step.json.gz"), tuple(runner.programs.values()), print
        )
        self._like = abstract(step, self._count)[1]
        self.finished = put(step.nothing_finished(loaded.options.batch), self._like)
        # Whoever steps gives its state away, and another one may still want these weights.
        network = loaded.network if step.generator.draft else None
        weights = jax.tree.map(lambda leaf: leaf.copy(), (loaded.policy, network))
        state = jax.jit(step.start, out_shardings=step.state_shardings(), donate_argnums=(0, 1))(
            *weights
        )
        self.state, self._step = with_chooser(step, state, self.prompts(0)), step
        self.seconds: list[dict[str, float]] = []
        """Of the phases, where the runner measures them, and of scoring."""
        self.read: list[np.ndarray] = []
        """Positions of each row that its learning reads, by call."""
        self.tokens: list[int] = []
        """New tokens, by call."""
        self.generated: list[dict[str, float]] = []
        """What each rollout was like."""
        self.learnt: dict[str, float] = {}
        """What the last learning was like."""

    def prompts(self, number: int) -> Prompts:
        """The prompts of a call."""
        return self._loaded.prompts(self._loaded.texts(self._count, number), number)

    def __call__(self, number: int) -> None:
        """Learns from the rollout of the call before, generates the next, and scores it."""
        began = time.perf_counter()
        prompts = self.prompts(number)
        data = {"time/data": time.perf_counter() - began}
        with self.profiler.call(number):
            result = self._runner(self.state, self.finished, prompts, lambda _: False)
        assert result.rollout is not None, "nobody asked to stop"
        began = time.perf_counter()
        rewards = put(self._rewards(result.rollout), self._like.rewards)
        lengths = np.asarray(result.rollout.lengths)
        ended = np.isin(np.asarray(result.rollout.status), (EOS, LENGTH))
        read = np.where(ended, lengths - 1, 0).astype(np.int32)
        plan = self._step.planned(read)
        like = self._like.valid, self._like.plan, self._like.learn
        valid, plan, learn = put((ended, plan, True), like)
        self.state = result.state
        self.finished = Finished(
            rollout=result.rollout, rewards=rewards, valid=valid, plan=plan, learn=learn
        )
        score = {"time/score": time.perf_counter() - began}
        phases = {
            name: seconds for name, seconds in result.learnt.items() if name.startswith("time/")
        }
        self.seconds.append(phases | result.seconds | score | data)
        self.generated.append(result.generated)
        self.learnt = result.learnt
        self.read.append(read)
        self.tokens.append(int(np.sum(lengths - np.asarray(result.rollout.prompt_lengths))))

    def _rewards(self, rollout: Rollout) -> np.ndarray:
        """The share of digits in each answer's text."""
        tokens, starts, ends = (
            np.asarray(leaf) for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths)
        )
        texts = [
            self._loaded.job.tokenizer.decode(row[start:end].tolist())
            for row, start, end in zip(tokens, starts, ends, strict=True)
        ]
        shares = [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in texts]
        return np.array(shares, np.float32)


def in_phases(loaded: Loaded, step: Step, repeats: int) -> tuple[Stepper, Runner, dict[str, float]]:
    """Steps phase by phase, and the median seconds of each phase after the two steps that warm
    up."""
    runner = staged_step(step, loaded.job.config.batch.prompts)
    stepper = Stepper(loaded, step, runner)
    for number in range(2 + repeats):
        stepper(number)

    def median(name: str) -> float:
        return float(np.median([each[f"time/{name}"] for each in stepper.seconds[2:]]))

    return stepper, runner, {name: median(name) for name in PHASES}


def acceptance_length(stepper: Stepper) -> float:
    """Mean tokens kept a round that had a draft, over the rollouts after the two that warm up."""
    return float(np.mean([each["rollout/acceptance_length"] for each in stepper.generated[2:]]))


def share_of_generation(phases: dict[str, float]) -> float:
    """Of the seconds of all phases."""
    return phases["generate"] / sum(phases.values())


def logprob_seconds(stepper: Stepper, step: Step, repeats: int) -> float:
    """Median seconds of a forward pass over the last rollout, which others make to have the old
    logprobs and jaxspec does not."""

    def forward(state: TrainState, finished: Finished) -> Any:
        return step.learner.evaluate(state.learner.policy.network, step.batch_of(finished))

    program, _ = ahead(forward, stepper.state, stepper.finished)
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(program(stepper.state, stepper.finished))
        taken.append(time.perf_counter() - began)
    return float(np.median(taken[1:]))


def learning_work(model: ModelSpec, read: np.ndarray) -> float:
    """Floating-point operations of a forward and a backward pass over rows of so many positions,
    head and causal attention included."""
    one = work_of(model, 1, 0.0, 4).flops  # a position that attends to itself alone
    attention = 4 * model.layers * model.heads * model.head_size * (read - 1) / 2
    return float(np.sum(3 * read * (one + attention)))


def speculation(
    loaded: Loaded, options: StepOptions, whole: Stepper, taken: Timed, logprob: float
) -> dict[str, float]:
    """The same step by plain decoding, and what speculation is worth: of generation, of the step,
    and of a step with a logprob pass; and what its rounds cost, both ways."""
    step = loaded.job.step
    alone = dataclasses.replace(step, generator=step.generator.plain(), fresh_draft=lambda: None)
    learner = dataclasses.replace(step.learner, objective=None, taps=())
    alone = dataclasses.replace(alone, learner=learner)
    stepper = Stepper(loaded, alone, whole_step(alone, loaded.job.config.batch.prompts))
    plain = timed(stepper, options.repeats, options.budget)
    # which the draft has learnt nothing of
    made = compare(step, whole.state, whole.prompts(len(whole.seconds)))
    generation = made.plain_seconds / made.spec_seconds
    return {
        "plain_step_s": plain.seconds,
        "plain_generation_share": share_of_generation(in_phases(loaded, alone, options.repeats)[2]),
        "speedup_generation": generation,
        "speedup_step": plain.seconds / taken.seconds,
        "speedup_step_with_logprob": (plain.seconds + logprob) / (taken.seconds + logprob),
        "round_cost": made.round_cost,
        "round_cost_of_the_paper": acceptance_length(whole) / generation,
    }


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark."""
    options = override(StepOptions(), argv, "python -m jaxspec.bench step --model DIR", ABOUT)
    check_model(options.model, "step")
    seconds = {"import": process_seconds()}
    began = time.perf_counter()
    loaded = load(options.workload(), options.group, options.learning)
    step, prompts = loaded.job.step, loaded.job.config.batch.prompts
    agreed = check_logprob(loaded)
    seconds["load"] = time.perf_counter() - began
    began = time.perf_counter()
    whole = Stepper(
        loaded, step, whole_step(step, prompts), numbers_of("--profile", options.profile)
    )
    compile_seconds = time.perf_counter() - began
    with contextlib.closing(whole.profiler):
        taken = timed(whole, options.repeats, options.budget)
    staged, runner, phases = in_phases(loaded, step, options.repeats)
    logprob = logprob_seconds(staged, step, options.repeats)
    told = speculation(loaded, options, whole, taken, logprob) if options.draft != "none" else {}
    works = [learning_work(loaded.job.config.model, read) for read in staged.read[1:-1]]
    work, best = np.mean(works), remembered(options.dtype)
    # the work is the policy's; the seconds are a draft's too
    rate = None if step.learner.objective else work / phases["train"]
    memory = runner.programs["train"].memory_analysis()
    beta = loaded.job.config.kl.beta
    # the reference is read by such a pass, which is part of learning
    ref = logprob if beta else 0.0
    line = {
        **common("grpo_step", options, taken, round(np.mean(whole.tokens[2:]))),
        "group": options.group,
        "algorithm": options.algorithm,
        "beta": beta,
        "phases_s": {**seconds, "first_call": compile_seconds + taken.first, **phases, "ref": ref},
        "logprob_pass_s": logprob,
        "generation_share": share_of_generation(phases),
        "packing": staged.learnt["learner/packing"],
        "micro_batch": step.learner.tokens,
        "learning_flops_per_s": rate,
        "learning_roofline_share": rate / best.flops_per_s if rate and best else None,
        "learning_temporary_bytes": memory.temp_size_in_bytes if memory else None,
        **told,
        "compile_s": compile_seconds,
        "check_logprob": agreed,
        "acceptance_length": acceptance_length(whole),
        "machine": meshes.machine(loaded.job.mesh),
    }
    Screen().print(_table(line))
    print(json.dumps(line))
    return 0


def _table(line: dict[str, Any]) -> Table:
    """What a step takes, for rich to print."""
    table = Table(
        box=box.SIMPLE,
        show_header=False,
        title=f"one step of {line['model']}",
        title_justify="left",
        padding=0,
        show_edge=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    phases = line["phases_s"]
    table.add_row(
        "step", f"{line['wall_s']:.3f} s as one program{' (noisy)' if line['noisy'] else ''}"
    )
    table.add_row("phases", ", ".join(f"{name} {phases[name]:.3f}" for name in PHASES))
    table.add_row("generation", f"{line['generation_share']:.0%} of the phases")
    rate, share = line["learning_flops_per_s"], line["learning_roofline_share"]
    of_best = (
        f", {share:.0%} of what this machine's products reach"
        if share
        else " (run bench roofline for its share)"
    )
    outcome = f"{rate / 1e9:,.0f} GFLOP/s{of_best}; " if rate else ""
    packing = (
        f"{line['packing']:.0%} of its positions are text, micro-batches of {line['micro_batch']}"
    )
    table.add_row("learning", f"{outcome}{packing}")
    made = "made for the reference policy" if line["beta"] else "not made"
    table.add_row("logprob pass", f"{line['logprob_pass_s']:.3f} s, {made}")
    if "plain_step_s" in line:
        gains = f"generation {line['speedup_generation']:.2f}, step {line['speedup_step']:.2f}"
        table.add_row(
            "speculation",
            f"{gains}, with a logprob pass {line['speedup_step_with_logprob']:.2f} times as fast",
        )
        table.add_row(
            "plain",
            f"step {line['plain_step_s']:.3f} s, of which generation takes"
            f" {line['plain_generation_share']:.0%}",
        )
        cost = (
            f"{line['round_cost']:.2f} (a round's seconds over a plain step's),"
            f" {line['round_cost_of_the_paper']:.2f} (acceptance length"
        )
        table.add_row(
            "round cost", f"{cost} {line['acceptance_length']:.2f} over generation's speed-up)"
        )
    return table
