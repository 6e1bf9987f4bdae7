"""One GRPO step of a checkpoint: generate, score, learn, as one program; and the seconds of its phases."""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.architecture import Count, Natural
from jaxspec.bench.generate import Loaded, check_logprob, digits, load
from jaxspec.bench.measure import Budget, check_model, common, process_seconds, timed
from jaxspec.bench.workload import GenerateOptions, Length, PromptLength
from jaxspec.checked import Checked, Range, require
from jaxspec.cli import override
from jaxspec.config import DraftKind, GroupSize, Seed, VerifyRule, numbers_of
from jaxspec.pace import with_pace
from jaxspec.profile import Profiler
from jaxspec.rl.train_batch import planned
from jaxspec.runner import Runner, abstract, put, staged_step, whole_step
from jaxspec.state import EOS, LENGTH, Finished, Rollout

ABOUT = """Answers prompts of random digits in groups, end tokens off, rewards the share of digits in each answer, and updates all weights
with AdamW, once a step; with --draft also the draft. Seconds are those of whole steps as one program, after two to warm up; steps that
others on the machine disturbed do not count. The phases are those of the same step compiled phase by phase. The last line of the output is
one JSON object."""


@dataclass(frozen=True, kw_only=True)
class StepOptions(Checked, prefix="--"):
    """What to measure."""

    model: str = ""
    """Folder of a Hugging Face checkpoint."""
    batch: Count = 32
    """Answers a step."""
    group: GroupSize = 8
    """Answers to each prompt (G)."""
    beta: Annotated[float, Range(least=0)] = 0.0
    """Weight of a KL term; 0 is what jaxspec's loss has."""
    prompt: PromptLength = 64
    """Prompt tokens a row."""
    new: Count = 128
    """New tokens a row."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, keys and values in generation."""
    draft: DraftKind = "none"
    """What proposes tokens."""
    draft_path: str = ""
    """Folder of a trained draft; empty: random weights."""
    draft_length: Length = 3
    """Tokens drafted a round (K); `auto`: each round chooses."""
    verify: VerifyRule = "block"
    """Lossless rule."""
    threads: Natural = 0
    """CPU cores to use; 0: all."""
    repeats: Count = 5
    """Timed steps wanted."""
    budget: Budget = 15.0
    """Seconds after which disturbed steps are no longer made up for."""
    seed: Seed = 0
    """Of prompts, sampling and random weights."""
    profile: str = ""
    """Steps to trace, as FIRST:END without the last; the trace for ui.perfetto.dev goes to ./trace-step.json.gz. Empty: none."""

    def check(self) -> None:
        whole = self.batch >= self.group and self.batch % self.group == 0
        require(whole, f"--batch is {self.batch}; it must be a multiple of --group {self.group}, so that every prompt has all its answers")
        require(self.beta == 0, f"--beta is {self.beta}; jaxspec's loss has no KL term, so only 0 can be measured")

    def workload(self) -> GenerateOptions:
        """The generation of such a step."""
        shared = ("model", "batch", "prompt", "new", "dtype", "draft", "draft_path", "draft_length", "verify", "threads")
        calls = {"repeats": self.repeats, "budget": self.budget, "seed": self.seed, "profile": self.profile}
        return GenerateOptions(**{name: getattr(self, name) for name in shared}, **calls)


class Stepper:
    """Steps one after the other, each from the weights that the one before it left."""

    def __init__(self, loaded: Loaded, runner: Runner, numbers: range = range(0)) -> None:
        """Traces the calls of `numbers`."""
        step, options, prompts = loaded.job.step, loaded.options, loaded.job.config.grpo.prompts
        self._loaded, self._runner = loaded, runner
        self.profiler = Profiler(numbers, Path("trace-step.json.gz"), runner.programs, print)
        self._texts = digits(prompts, options.prompt, options.seed)
        self._like = abstract(step, prompts)[1]
        self._finished = put(step.nothing_finished(options.batch), self._like)
        # Whoever steps gives its state away, and another one may still want these weights.
        weights = jax.tree.map(lambda leaf: leaf.copy(), (loaded.policy, loaded.network))
        state = jax.jit(step.start, out_shardings=step.state_shardings(), donate_argnums=(0, 1))(*weights)
        self._state, self._learner = with_pace(step, state, loaded.prompts(self._texts, 0)), step.learner
        self.seconds: list[dict[str, float]] = []
        """Of the phases, where the runner measures them, and of scoring."""
        self.generated: dict[str, float] = {}
        """What the last rollout was like."""

    def __call__(self, number: int) -> None:
        """Learns from the rollout of the call before, generates the next, and scores it."""
        with self.profiler.call(number):
            called = self._runner(self._state, self._finished, self._loaded.prompts(self._texts, number), lambda: False)
        assert called.rollout is not None, "nobody asked to stop"
        began = time.perf_counter()
        rewards = put(self._rewards(called.rollout), self._like.rewards)
        ended = np.isin(np.asarray(called.rollout.status), (EOS, LENGTH))
        read = np.where(ended, np.asarray(called.rollout.lengths) - 1, 0).astype(np.int32)
        plan = planned(read, self._learner.mesh.shape[meshes.DATA], self._learner.tokens)
        valid, plan, learn = put((ended, plan, True), (self._like.valid, self._like.plan, self._like.learn))
        self._state = called.state
        self._finished = Finished(rollout=called.rollout, rewards=rewards, valid=valid, plan=plan, learn=learn)
        score = {"time/score": time.perf_counter() - began}
        phases = {name: seconds for name, seconds in called.learnt.items() if name.startswith("time/")}
        self.seconds.append(phases | called.seconds | score)
        self.generated = called.generated

    def _rewards(self, rollout: Rollout) -> np.ndarray:
        """The share of digits in each answer's text."""
        tokens, starts, ends = (np.asarray(leaf) for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths))
        texts = [self._loaded.job.tokenizer.decode(row[start:end].tolist()) for row, start, end in zip(tokens, starts, ends, strict=True)]
        return np.array([sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in texts], np.float32)


def phases_of(stepper: Stepper) -> dict[str, float]:
    """Median seconds of each phase over the steps after the two that warm up."""
    seconds = stepper.seconds[2:]

    def median(*names: str) -> float:
        return float(np.median([sum(each[f"time/{name}"] for name in names) for each in seconds]))

    return {"generate": median("prepare", "generate"), "score": median("score"), "ref": 0.0, "train": median("train")}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark."""
    options = override(StepOptions(), argv, "python -m jaxspec.bench step --model DIR", ABOUT)
    check_model(options.model, "step")
    seconds = {"import": process_seconds()}
    began = time.perf_counter()
    loaded = load(options.workload(), options.group)
    step, prompts = loaded.job.step, loaded.job.config.grpo.prompts
    agreed = check_logprob(loaded)
    seconds["load"] = time.perf_counter() - began
    began = time.perf_counter()
    whole = Stepper(loaded, whole_step(step, prompts), numbers_of("--profile", options.profile))
    compile_seconds = time.perf_counter() - began
    with contextlib.closing(whole.profiler):
        taken = timed(whole, options.repeats, options.budget)
    staged = Stepper(loaded, staged_step(step, prompts))
    for number in range(2 + options.repeats):
        staged(number)
    line = {
        **common("grpo_step", options, taken, options.batch * options.new),
        "group": options.group,
        "beta": options.beta,
        "phases_s": {**seconds, "first_call": compile_seconds + taken.first, **phases_of(staged)},
        "compile_s": compile_seconds,
        "check_logprob": agreed,
        "acceptance_length": whole.generated["rollout/acceptance_length"],
        "machine": meshes.machine(loaded.job.mesh),
    }
    print(json.dumps(line))
    return 0
