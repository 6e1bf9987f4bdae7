"""The RL run, top to bottom: `python -m jaxspec.train --config rl_think.py`."""

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from jaxspec import metrics as measures
from jaxspec.batches import Batches, Scored
from jaxspec.checkpoint import Checkpoints, load_tree, prepare_workdir
from jaxspec.config import ConfigError, differing_keys, to_json
from jaxspec.data import load_problems
from jaxspec.interrupt import Interrupt
from jaxspec.metrics import MetricsWriter, Progress
from jaxspec.program import Job, run
from jaxspec.runner import Runner, abstract, compare, staged_step, whole_step
from jaxspec.state import Finished, PyTree, TrainState
from jaxspec.train_draft import cached_draft, load_policy, plain_step
from jaxspec.train_sft import cached_policy

PATIENCE = 3
"""Non-finite updates in a row that end the run."""
KEPT_SAMPLES = 4
"""Responses kept for reading at every evaluation."""


class Diverged(RuntimeError):
    """Too many updates in a row were not finite."""


@dataclasses.dataclass
class Position:
    """Where a run stands between two calls; with `TrainState`, all that the next call needs."""

    state: TrainState
    finished: Finished
    batch: int
    """The next batch to generate."""
    line: dict[str, Any] | None
    """Metrics so far of the batch in `finished`, which the next call completes; None when there is none."""


def main(job: Job, interrupt: Interrupt) -> int:
    """Trains, or resumes; returns the exit status."""
    config = job.config
    workdir = open_workdir(job)
    with interrupt.nothing_unsaved("starting"):
        problems, held_out = load_problems(config.data, job.tokenizer)
        if problems.left_out:
            job.say(f"{problems.left_out} problems left out (too long, repeated or without an answer); {len(problems)} to train on")
        batches = Batches(job, problems, held_out)
        checkpoints = Checkpoints(workdir / "checkpoints")
        position = resume(job, checkpoints, batches) or start(job, interrupt, batches)
        how = "phase by phase" if config.staged else "as one program"
        job.say(f"compiling the step {how} for {dict(job.mesh.shape)} devices")
        began = time.perf_counter()
        runner = (staged_step if config.staged else whole_step)(job.step, config.grpo.prompts)
        job.say(f"compiled in {time.perf_counter() - began:.1f} s; batch {position.batch} of {config.steps} is next")
    with contextlib.closing(checkpoints), MetricsWriter(workdir, jax.process_index()) as writer:
        writer.cut_back(position.batch if position.line is None else position.line["step"])
        with Progress("rl", config.steps, jax.process_index()) as progress:
            done = Loop(job, interrupt, batches, checkpoints, writer, progress, runner).go(position)
    if done:
        with interrupt.nothing_unsaved("comparing with plain decoding"):
            close(job, batches, position, workdir)
    else:
        job.say(f"stopped before batch {position.batch}; the same command goes on from there")
    return 0


def open_workdir(job: Job) -> Path:
    """Makes the run's folder and its config.json, or checks that they belong to this config.

    Raises:
      ConfigError: the folder cannot be written, or belongs to another config; the differing keys are named.
    """
    workdir = prepare_workdir(job.config.workdir)
    file = workdir / "config.json"
    if file.exists():
        differing = differing_keys(json.loads(file.read_text(encoding="utf-8")), job.config)
        if differing:
            raise ConfigError(
                f"{workdir} belongs to another config: {'; '.join(differing)}. Choose another --workdir, or set these keys back"
            )
    if jax.process_index() == 0:
        file.write_text(json.dumps(to_json(job.config), indent=2) + "\n", encoding="utf-8")
    return workdir


def start(job: Job, interrupt: Interrupt, batches: Batches) -> Position:
    """The position before the first batch: warm start and draft from the cache, trained now if absent; random weights where steps are 0."""
    config, step = job.config, job.step
    offline = config.offline.steps > 0 and step.draft is not None
    if jax.process_index() == 0:  # one process trains and fills the cache, the others then read it
        if config.sft.steps:
            cached_policy(job, interrupt)
        if offline:
            cached_draft(job, interrupt)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("starting weights")
    layout, shapes = step.state_shardings(), abstract(step, config.grpo.prompts)[0]
    policy = load_policy(job, interrupt)
    if offline and shapes.draft is not None:
        network = load_tree(cached_draft(job, interrupt), shapes.draft.network)
    else:
        network = jax.jit(lambda: _network(step.fresh()), out_shardings=_network(layout))()
    state = jax.jit(step.start, out_shardings=layout, donate_argnums=(0, 1))(policy, network)
    return Position(state=state, finished=batches.nothing_finished(), batch=0, line=None)


def _network(state: TrainState) -> PyTree:
    return None if state.draft is None else state.draft.network


def resume(job: Job, checkpoints: Checkpoints, batches: Batches) -> Position | None:
    """The position of the newest checkpoint, on this run's mesh; None when there is none."""
    newest = checkpoints.latest()
    if newest is None:
        return None
    state, finished, _ = abstract(job.step, job.config.grpo.prompts)
    (state, finished), host = checkpoints.restore(newest, (state, finished))
    job.say(f"resuming {job.config.workdir} at batch {host['batch']}")
    return Position(state=state, finished=finished, batch=host["batch"], line=host["line"])


class Loop:
    """Calls, and what the host does between two of them."""

    def __init__(
        self,
        job: Job,
        interrupt: Interrupt,
        batches: Batches,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        progress: Progress,
        runner: Runner,
    ):
        self.job, self.interrupt, self.batches, self.checkpoints = job, interrupt, batches, checkpoints
        self.writer, self.progress, self.runner = writer, progress, runner
        self._looks = 0

    def go(self, position: Position) -> bool:
        """Runs from `position`, which it moves, to the end; False when asked to stop before."""
        config = self.job.config
        if position.batch >= config.steps and position.line is None:
            self.job.say(f"{config.workdir} has all {config.steps} batches already; raise --steps to go on, or choose another --workdir")
            return True
        while True:
            evaluation = self.evaluate(position) if position.batch % config.eval_every == 0 and position.batch < config.steps else {}
            if not self.call(position, evaluation):
                return False
            if position.line is None:
                break
            if self.stop():
                self.save(position)
                return False
            if position.batch % config.save_every == 0:
                self.save(position)
        self.save(position)
        return True

    def call(self, position: Position, evaluation: dict[str, float]) -> bool:
        """One call: learns what is pending and, unless all batches are done, generates and scores the next; False when interrupted."""
        batch, last = position.batch, position.batch >= self.job.config.steps
        began = time.perf_counter()
        prompts = self.batches.nothing(batch) if last else self.batches.train(batch)
        data_seconds = time.perf_counter() - began
        called = self.runner(position.state, position.finished, prompts, self.stop)
        position.state, line, position.line = called.state, position.line, None
        position.finished = self.batches.nothing_finished()
        if line is not None:
            line |= called.learnt
            if last:
                line |= self.evaluate(position)
            self.report(line)
        if called.rollout is None:
            self.save(position)
            return False
        if not last:
            began = time.perf_counter()
            scored = self.batches.score_training(batch, called.rollout)
            seconds = {"time/data": data_seconds, "time/reward": time.perf_counter() - began} | called.seconds
            seconds["time/step"] += data_seconds + seconds["time/reward"]
            position.finished, position.batch = scored.finished, batch + 1
            position.line = _line(batch, scored, seconds, called.generated) | evaluation
            if evaluation:
                self.writer.write_samples(batch, scored.samples[:KEPT_SAMPLES])
        return True

    def report(self, line: dict[str, Any]) -> None:
        """Writes a batch's complete line, shows it, and stops a run that has diverged."""
        self.writer.write(line)
        shown = {"reward": "reward/mean", "acceptance_length": "rollout/acceptance_length", "tokens_per_s": "rollout/tokens_per_s"}
        skipped = {name: line[f"skipped/{name}"] for name in ("policy", "draft") if line.get(f"skipped/{name}")}
        numbers = {name: line[key] for name, key in shown.items()}
        self.progress.update(line["step"] + 1, **numbers, **{f"skipped_{name}": count for name, count in skipped.items()})
        for name in ("policy", "draft"):
            if line.get(f"skipped_in_row/{name}", 0) >= PATIENCE:
                raise Diverged(
                    f"the {name}'s loss or gradient was not finite in {PATIENCE} updates in a row, the last after batch {line['step']}. "
                    f"Look at loss/{name}, grad_norm/{name} and rollout/logprob_gap_max in {self.job.config.workdir}/metrics.jsonl and at "
                    f"samples.jsonl beside it; a lower learning rate is the usual remedy. Earlier checkpoints are intact."
                )

    def evaluate(self, position: Position) -> dict[str, float]:
        """Exact match on the held-out problems, by the same program and with a key stream of its own."""
        rewards, weights = [], []
        for number in range(self.batches.evaluations):
            called = self.runner(position.state, self.batches.nothing_finished(), self.batches.evaluate(number), _never)
            position.state = called.state
            assert called.rollout is not None, "an evaluation is never interrupted"
            scored = self.batches.score_evaluation(number, called.rollout)
            rewards.append(scored.reward)
            weights.append(called.generated["status/eos"] + called.generated["status/length"])
        return {"eval/exact_match": float(np.average(rewards, weights=weights)) if sum(weights) else float("nan")}

    def save(self, position: Position) -> None:
        """Starts a checkpoint of everything the next call needs; named by the calls made, so that each is saved once."""
        calls = position.batch + (position.line is None and position.batch >= self.job.config.steps)
        host = {"batch": position.batch, "line": position.line}
        self.checkpoints.save(calls, (position.state, position.finished), host)

    def stop(self) -> bool:
        """Whether to stop now, the same in every process."""
        self._looks += 1
        return self.interrupt.agreed(self._looks)


def _never() -> bool:
    return False


def _line(batch: int, scored: Scored, seconds: dict[str, float], generated: dict[str, float]) -> dict[str, Any]:
    """What is known of a batch before it is learnt from."""
    generation = seconds.get("time/generate", seconds["time/step"])
    rate = {"rollout/tokens_per_s": generated["rollout/tokens"] / generation}
    return {"step": batch, **seconds, "reward/mean": scored.reward, **scored.outcomes, **generated, **rate}


def close(job: Job, batches: Batches, position: Position, workdir: Path) -> None:
    """Prints the closing table: what was learnt, and what speculation gave on the run's own last batch."""
    summary: dict[str, float] = {}
    if job.step.draft is not None:
        job.say("comparing with plain decoding of the last batch")
        made = compare(job.step, plain_step(job), position.state, batches.train(job.config.steps - 1))
        summary = {"rows": made.rows, "plain/passes": made.plain_passes, "spec/passes": made.spec_passes}
        summary |= {"plain/seconds": made.plain_seconds, "spec/seconds": made.spec_seconds}
    if jax.process_index() == 0:
        Console().print(measures.closing_table(measures.read(workdir), summary))


def _main() -> int:
    try:
        return run("train", "Post-trains a language model with GRPO and lossless speculative rollouts.", main)
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(_main())
