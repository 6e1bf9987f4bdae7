"""Measures a policy on sets of problems: `python -m jaxspec.evaluate --config eval_aime.py`."""

import sys

# a stop while the rest is imported, which takes seconds, has nothing to save
if __name__ == "__main__":
    from jaxspec.system.begin import begin

    begin()

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import optax
from rich import box
from rich.table import Table

from jaxspec.config.as_json import SPEED, flat, to_json
from jaxspec.config.cli import load_config
from jaxspec.config.from_checkpoint import from_home, resolved
from jaxspec.config.settings import (
    OF_THE_RUN,
    Config,
    DataConfig,
    KlConfig,
    OfflineConfig,
    ResolvedConfig,
    RewardConfig,
)
from jaxspec.data.census import take_census
from jaxspec.data.problems import load_sets, remarks
from jaxspec.data.scoring import scorer_of, try_scorers
from jaxspec.evaluation.estimates import Difference, Estimate
from jaxspec.evaluation.evaluator import Evaluator, Part, Record
from jaxspec.evaluation.program import with_own_program
from jaxspec.evaluation.records import Records, compare
from jaxspec.hf.pretrained import fingerprint
from jaxspec.host.job import Job, reported, started
from jaxspec.host.loaded_run import Run, check_weights, find_run, measured_factors, restored
from jaxspec.host.warm_start import load_draft, load_policy
from jaxspec.host.workdir import data_digests, held
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import listed, read_json
from jaxspec.processes.process_0 import refused_by_all
from jaxspec.rl.learner import Learner
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import TrainState
from jaxspec.system.files import write_whole
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.metrics import plain
from jaxspec.system.progress import Progress, Screen

COMMAND = "python -m jaxspec.evaluate"
ABOUT = """Answers every problem of named sets (eval.sets of a config, else its held-out problems)
some number of times, and tells avg@k, pass@k and cons@k with intervals of 95 % over the problems.
The policy is model.path, or a checkpoint of a training run: --checkpoint RUN, or
RUN/checkpoints/NUMBER, or RUN/best. With a checkpoint everything else is the run's, but the eval
settings of a config that is named beside it. Results come to workdir: evaluations.jsonl has a line
a problem with all responses, results.json the numbers. Stopped at any time, the same command goes
on.

--compare A B tells how much more B answers than A, problem by problem: each is the folder of a run
or of an evaluation, or FOLDER:STEP. Examples:
  python -m jaxspec.evaluate --config eval_aime.py:qwen3_8b --model.path FOLDER \
    --eval.sets.0.data.path AIME24 --eval.sets.1.data.path AIME25 --eval.sets.2.data.path MATH500
  python -m jaxspec.evaluate --checkpoint runs/rl_think-tiny --eval.samples 16
  python -m jaxspec.evaluate --compare runs/before runs/after"""
EVALUATION, RESULTS = "evaluation.json", "results.json"
_WEIGHTS = "model. lora.path sft. head. rollout.draft.path"
_USED = (
    "seed workdir data. mixture. reward. eval.samples eval.temperature eval.top_k eval.top_p"
    " eval.min_new_tokens eval.max_new_tokens eval.stop eval.sets. mesh. batch.prompts"
    " batch.group_size rollout."
)
"""Settings that an evaluation reads; of the weights too, where no checkpoint has them."""


def main(argv: Sequence[str]) -> int:
    """Evaluates, or compares; returns the exit status."""
    options, words = parsed(argv)
    if options.compare:
        require(not words, f"--compare A B stands alone; leave {' '.join(words)} out")
        first, second = options.compare
        Screen().print(compared(first, second, compare(first, second)))
        return 0
    run = find_run(options.checkpoint) if options.checkpoint else None
    config = evaluated(words, run)

    def resolve(say: Callable[[str], Any]) -> ResolvedConfig:
        whole = with_weights(config, run) if run else resolved(config, say)
        require_draft(whole, run)
        return whole

    def body(job: Job, interrupt: Interrupt) -> int:
        with held(job, not_a_run) as folder:
            return evaluate(job, interrupt, folder, run)

    return started(resolve, body)


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options that are no settings, and the words that are left."""
    parser = argparse.ArgumentParser(prog=COMMAND, add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"))
    return parser.parse_known_args(argv)


def evaluated(words: Sequence[str], run: Run | None) -> Config:
    """The config of an evaluation: that of the command line's words, or a run's."""
    base = None
    if run is not None:
        names = {item.name for item in fields(Config)} - {"model", "head"}
        own: dict[str, Any] = {name: getattr(run.config, name) for name in names}
        own["workdir"] = f"{run.folder}-eval-{run.number}"
        base = Config(**own)
    used = _USED if run else f"{_USED} {_WEIGHTS}"
    config, _ = load_config(words, "evaluate", ABOUT, used=used, base=base)
    config = replace(measured_alone(config), kl=KlConfig())
    if run is None:  # what would only be trained is not there
        return replace(config, offline=OfflineConfig(steps=0))
    check_weights(run.config.rollout.draft, config.rollout.draft)
    return from_home(config)


def measured_alone(config: Config) -> Config:
    """The config without what is trained on, where sets of its own are measured: files and
    functions of a run may not be here. A warm start is still that of the task."""
    if not config.eval.sets:
        return config
    data = {name: getattr(config.data, name) for name in (*OF_THE_RUN["data"], "task", "digits")}
    style = "code" if config.data.task == "programs" else "hash"
    reward = {name: getattr(config.reward, name) for name in OF_THE_RUN["reward"]}
    reward |= {"verifier": "code", "run_code": True} if style == "code" else {}
    return replace(
        config,
        mixture=(),
        data=DataConfig(**data, answer_style=style),
        reward=RewardConfig(**reward),
    )


def require_draft(config: ResolvedConfig, run: Run | None) -> None:
    """Refuses a draft of which there are no weights."""
    draft = config.rollout.draft
    require(
        run is not None or not draft.learned or bool(draft.path),
        f"rollout.draft.kind {draft.kind} has weights, and no draft is trained here: set"
        " --rollout.draft.path FOLDER, or --rollout.draft.kind ngram or none",
    )


def with_weights(config: Config, run: Run) -> ResolvedConfig:
    """The config with what a run's checkpoints say of their sizes."""
    own = {name: getattr(run.config, name) for name in ("model", "head", "draft_model")}
    return ResolvedConfig(**vars(config) | own)


def evaluate(job: Job, interrupt: Interrupt, folder: Path, run: Run | None) -> int:
    """Asks what is not answered yet, and tells the results."""
    with interrupt.nothing_unsaved("starting"):
        scorers = scorer_of(job.config)
        sets = load_sets(job.config, job.tokenizer)
        for line in (*remarks(job.config, sets), *take_census(job.config, sets), *scorers.remarks):
            job.say(line)
        claim(job, folder, run)
        try_scorers(job.config, sets, scorers)
        job = replace(job, step=replace(job.step, learner=remembering_nothing(job.step.learner)))
        began = time.perf_counter()
        evaluator = with_own_program(job, sets, scorers, with_text=True)
        job.say(f"compiled in {time.perf_counter() - began:.1f} s")
    records = Records(folder, jax.process_index())
    records.cut_back(float("inf"))  # a line that a kill has torn
    known = records.read()
    left = evaluator.left(known)
    if left:
        with interrupt.nothing_unsaved("loading the weights"):
            given = evaluator.prepared(loaded(job, interrupt, run))
        done = len(evaluator.parts) - len(left)
        if done:
            job.say(f"{done} of {len(evaluator.parts)} calls are in {folder} already")
        new = ask(evaluator, given, left, records, interrupt)
        if new is None:
            job.say(f"stopped; {folder} has what is answered, and the same command goes on")
            return interrupt.status
        known += new
    found = evaluator.estimated(known)
    if jax.process_index() == 0:
        numbers = {
            name: {metric: each._asdict() for metric, each in part.items()}
            for name, part in found.items()
        }
        write_whole(folder / RESULTS, json.dumps(plain(numbers), indent=2) + "\n")
        Screen().print(table(found))
    job.say(f"results are in {folder}")
    unknown = [name for name, part in found.items() if not part["reward"].problems]
    if unknown:
        raise Diverged(f"nothing is known of any answer to {listed(unknown)}")
    return 0


def ask(
    evaluator: Evaluator,
    given: Any,
    left: Sequence[Part],
    records: Records,
    interrupt: Interrupt,
) -> list[Record] | None:
    """Asks what is left, and keeps what is answered; None when asked to stop."""
    looks, tokens, rounds, began = 0, 0, 0, time.perf_counter()
    found: list[Record] = []

    def stop() -> bool:
        nonlocal looks
        looks += 1
        return interrupt.agreed(looks)

    with Progress("evaluation", len(left), jax.process_index()) as progress:
        for number, part in enumerate(left, start=1):
            given, answered = evaluator.answer(given, part, stop)
            if answered is None:
                return None
            records.write(0, answered)
            found += answered
            tokens += sum(sum(record["tokens"]) for record in answered)
            rounds += sum(sum(record["rounds"]) for record in answered)
            seconds = time.perf_counter() - began
            passes = tokens / max(rounds, 1)
            progress.update(number, tokens_per_target_pass=passes, tokens_per_s=tokens / seconds)
    return found


def not_a_run(job: Job, folder: Path) -> None:
    """Refuses the folder of a training run."""
    found = [name for name in ("config.json", "metrics.jsonl") if (folder / name).exists()]
    require(not found, f"{folder} is the folder of a training run; name another with --workdir")


def claim(job: Job, folder: Path, run: Run | None) -> None:
    """Notes what is evaluated in the folder, or refuses one that has answers to something else."""
    config = to_json(job.config)
    paths = job.config.model.path, job.config.lora.path, job.config.rollout.draft.path
    weights = {path: fingerprint(path) for path in paths if path}
    if run is not None:
        weights = {"checkpoint": str(run.checkpoints / str(run.number))}
    # which process asks what, and together with what, follows from both
    mesh = {"processes": jax.process_count(), **dict(job.mesh.shape)}
    mine = {"config": config, "data": data_digests(job.config), "weights": weights, "mesh": mesh}

    def look() -> None:
        file = folder / EVALUATION
        if not file.exists() or not Records(folder, 0).read():  # nothing was answered yet
            write_whole(file, json.dumps(mine, indent=2) + "\n")
            return
        before, now = flat(read_json(file)), flat(mine)
        free = [f"config.{name}" for name in ("workdir", "reward.workers", *SPEED)]
        other = [
            f"{name}: {before.get(name, '(absent)')} -> {now.get(name, '(absent)')}"
            for name in before | now
            if name not in free and before.get(name) != now.get(name)
        ]
        require(
            not other,
            f"{folder} has another evaluation: {'; '.join(other)}. Choose another --workdir, or set"
            " these back",
        )

    refused_by_all(look)


def remembering_nothing(learner: Learner) -> Learner:
    """A learner that keeps nothing for updates: none will come."""
    nothing = optax.identity()
    return replace(learner, policy_optimizer=nothing, draft_optimizer=nothing)


def loaded(job: Job, interrupt: Interrupt, run: Run | None) -> TrainState:
    """Policy and draft of the checkpoints that the config names, or of a run's."""
    step, factors = job.step, None
    if run is None:
        shapes = jax.eval_shape(step.fresh_draft)
        policy, network = load_policy(job, interrupt), load_draft(job, shapes)
    else:
        bare, generator = restored(run, job)
        policy, draft = bare.learner.policy.network, bare.learner.draft
        network = draft.network if draft else None
        factors = measured_factors(
            bare.generator.overlap_by_factor, step.generator, generator.settings.grid
        )
    layout = step.state_shardings()
    state = jax.jit(step.start, out_shardings=layout, donate_argnums=(0, 1))(policy, network)
    if factors is None:
        return state
    return state.replace(generator=state.generator.replace(overlap_by_factor=factors))


def table(found: Mapping[str, Mapping[str, Estimate]]) -> Table:
    """What an evaluation has found, for rich to print."""
    shown = Table(box=box.SIMPLE)
    for title in ("set", "metric", "value", "95 %", "problems"):
        shown.add_column(title, justify="left" if title in ("set", "metric") else "right")
    for name, part in found.items():
        for metric, each in part.items():
            known = math.isfinite(each.low)  # one problem says nothing of others
            interval = f"{each.low:.3f} - {each.high:.3f}" if known else ""
            shown.add_row(name, metric, f"{each.value:.3f}", interval, str(each.problems))
    return shown


def compared(first: str, second: str, found: Mapping[str, Difference]) -> Table:
    """How two evaluations differ, for rich to print."""
    shown = Table(box=box.SIMPLE, title=f"{first} -> {second}", title_justify="left")
    for title in ("set", "first", "second", "change", "95 %", "problems"):
        left = title in ("set", "problems")
        shown.add_column(title, justify="left" if left else "right", no_wrap=True)
    for name, each in found.items():
        change = each.estimate
        shown.add_row(
            name,
            f"{each.first:.3f}",
            f"{each.second:.3f}",
            f"{change.value:+.3f}",
            f"{change.low:+.2f} to {change.high:+.2f}",
            f"+{each.better} -{each.worse} of {change.problems}",
        )
    return shown


if __name__ == "__main__":
    sys.exit(reported(lambda: main(sys.argv[1:])))
