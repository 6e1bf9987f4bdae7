"""Evaluates a policy on sets of problems: `python -m jaxspec.evaluate --config eval_aime.py`."""

import sys

# Runs before the slow imports, so that a signal ends them at once. Nothing needs saving yet.
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxspec.config.as_json import (
    SPEED_SETTINGS,
    flatten_settings,
    includes_setting,
    list_unread_sections,
    rename_settings,
    to_json,
)
from jaxspec.config.cli import load_config
from jaxspec.config.from_checkpoint import expand_home, resolve_config
from jaxspec.config.settings import (
    SHARED_SETTINGS,
    Config,
    DataConfig,
    KlConfig,
    OfflineConfig,
    ResolvedConfig,
    RewardConfig,
)
from jaxspec.data.census import take_census
from jaxspec.data.problems import describe_problems, load_sets
from jaxspec.data.scoring import make_scorers, try_scorers
from jaxspec.evaluation.evaluator import Evaluator, PolicyAnswerer, ProblemChunk, ProblemRecord
from jaxspec.evaluation.program import compile_evaluator
from jaxspec.evaluation.records import RecordFile, compare_evaluations
from jaxspec.evaluation.tables import build_comparison_table, build_results_table
from jaxspec.hf.pretrained import fingerprint_checkpoint
from jaxspec.host.job import Job, run_and_report_errors, run_config
from jaxspec.host.loaded_run import (
    SavedRun,
    check_draft_weights,
    find_run,
    resize_overlap,
    restore_merged_state,
)
from jaxspec.host.starts import data_digests
from jaxspec.host.workdir import lock_workdir
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import join_names, read_json
from jaxspec.metrics.files import to_json_value
from jaxspec.preparation.policy import load_draft, load_policy
from jaxspec.processes.process_0 import check_in_process_0
from jaxspec.rl.learner import Learner
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import TrainState
from jaxspec.step import Step
from jaxspec.system.files import write_text_atomic
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress, Screen
from jaxspec.system.terminal import LinePrinter
from jaxspec.tokens.tokenizer import Tokenizer

COMMAND = "python -m jaxspec.evaluate"
ABOUT = """Evaluates a policy on sets of problems: eval.sets of a config, or its held-out problems.

Every problem is answered eval.samples times. The result is avg@k, pass@k and cons@k, with 95 %
intervals over the problems. The policy is model.path, or a checkpoint of a training run:
--checkpoint RUN, RUN/checkpoints/NUMBER or RUN/best. With a checkpoint, all other settings are the
run's, except the eval settings of a config that is also named. Workdir gets evaluations.jsonl, with
a line per problem and all responses, and results.json. If it is stopped, the same command goes on.

--compare A B compares two evaluations problem by problem. Each is the folder of a run or of an
evaluation, or FOLDER:STEP. Examples:
  python -m jaxspec.evaluate --config eval_aime.py:qwen3_8b --model.path FOLDER \
    --eval.sets.0.data.path AIME24 --eval.sets.1.data.path AIME25 --eval.sets.2.data.path MATH500
  python -m jaxspec.evaluate --checkpoint runs/rl_think-tiny --eval.samples 16
  python -m jaxspec.evaluate --compare runs/before runs/after"""
EVALUATION_FILE, RESULTS_FILE = "evaluation.json", "results.json"
_WEIGHT_SETTINGS = "model. lora.path sft. head. rollout.draft.path"
_USED_SETTINGS = (
    "seed workdir data. mixture. reward. eval.samples eval.temperature eval.top_k eval.top_p"
    " eval.min_new_tokens eval.max_new_tokens eval.stop eval.sets. mesh. batch.prompts"
    " batch.group_size rollout."
)
"""Settings that an evaluation reads. Without a checkpoint it also reads `_WEIGHT_SETTINGS`."""


def main(argv: Sequence[str]) -> int:
    """Evaluates, or compares two evaluations. Returns the exit status."""
    options, words = parse_options(argv)
    if options.compare:
        require(not words, f"--compare A B takes no other options; leave {' '.join(words)} out")
        first, second = options.compare
        differences = compare_evaluations(first, second)
        Screen().print(build_comparison_table(first, second, differences))
        return 0
    run = find_run(options.checkpoint) if options.checkpoint else None
    config = load_evaluation_config(words, run)

    def resolve(report: Callable[[str], Any]) -> ResolvedConfig:
        resolved = use_run_sizes(config, run) if run else resolve_config(config, report)
        require_draft_weights(resolved, run)
        return resolved

    def run_job(job: Job, interrupt: Interrupt) -> int:
        with lock_workdir(job.config, job.say, refuse_run_folder) as folder:
            return run_evaluation(job, interrupt, folder, run)

    return run_config(resolve, run_job)


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the program's own options. Also returns the remaining words."""
    parser = argparse.ArgumentParser(prog=COMMAND, add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"))
    return parser.parse_known_args(argv)


def load_evaluation_config(words: Sequence[str], run: SavedRun | None) -> Config:
    """Loads the config of an evaluation from the command line.

    With a run, `words` change the config of that run.
    """
    base = None
    if run is not None:
        # The sizes of a run's networks are no settings. `use_run_sizes` adds them later.
        names = {field.name for field in fields(Config)} - {"model", "head"}
        run_settings: dict[str, Any] = {name: getattr(run.config, name) for name in names}
        run_settings["workdir"] = f"{run.folder}-eval-{run.number}"
        base = Config(**run_settings)
    used_settings = _USED_SETTINGS if run else f"{_USED_SETTINGS} {_WEIGHT_SETTINGS}"
    config, _ = load_config(words, "evaluate", ABOUT, used_settings=used_settings, base=base)
    # A KL penalty would keep a reference policy in memory.
    config = replace(drop_training_sets(config), kl=KlConfig())
    if run is None:
        # An evaluation trains no draft. `require_draft_weights` refuses one without weights.
        return replace(config, offline=OfflineConfig(steps=0))
    check_draft_weights(run.config.rollout.draft, config.rollout.draft)
    return expand_home(config)


def drop_training_sets(config: Config) -> Config:
    """Removes the training data if `eval.sets` is set."""
    # Files and functions of a run may be missing on this machine.
    if not config.eval.sets:
        return config
    # The task and its digits stay, since they also define the warm start.
    data = {
        name: getattr(config.data, name) for name in (*SHARED_SETTINGS["data"], "task", "digits")
    }
    style = "code" if config.data.task == "programs" else "hash"
    reward = {name: getattr(config.reward, name) for name in SHARED_SETTINGS["reward"]}
    reward |= {"verifier": "code", "run_code": True} if style == "code" else {}
    return replace(
        config,
        mixture=(),
        data=DataConfig(**data, answer_style=style),
        reward=RewardConfig(**reward),
    )


def require_draft_weights(config: ResolvedConfig, run: SavedRun | None) -> None:
    """Raises `ConfigError` if a learned draft comes from neither a run nor a folder."""
    draft = config.rollout.draft
    require(
        run is not None or not draft.is_learned or bool(draft.path),
        f"rollout.draft.kind {draft.kind} needs weights, and no draft is trained here: set"
        " --rollout.draft.path FOLDER, or --rollout.draft.kind ngram or none",
    )


def use_run_sizes(config: Config, run: SavedRun) -> ResolvedConfig:
    """Adds a run's network sizes to a config."""
    run_sizes = {name: getattr(run.config, name) for name in ("model", "head", "draft_model")}
    return ResolvedConfig(**vars(config) | run_sizes)


def run_evaluation(job: Job, interrupt: Interrupt, folder: Path, run: SavedRun | None) -> int:
    """Answers the remaining problems, and reports the results. Returns the exit status.

    Raises:
      Diverged: no answer to a set has a reward.
    """
    with interrupt.exit_on_signal("starting"):
        scorers = make_scorers(job.config)
        sets = load_sets(job.config, job.tokenizer)
        for line in (
            *describe_problems(job.config, sets),
            *take_census(job.config, sets),
            *scorers.remarks,
        ):
            job.say(line)
        # After the data is read, since data that is refused should leave no trace in the folder.
        claim_folder(job.config, job.mesh, folder, run)
        try_scorers(job.config, sets, scorers)
        start_time = time.perf_counter()
        step = replace(job.step, learner=without_optimizers(job.step.learner))
        evaluator, program = compile_evaluator(
            job.config, step, job.tokenizer, sets, scorers, job.say, with_text=True
        )
        job.say(f"compiled in {time.perf_counter() - start_time:.1f} s")
    records = RecordFile(folder, jax.process_index())
    # A killed process may have left half a line. Complete lines stay.
    records.truncate_from(float("inf"))
    answered = records.load_records()
    remaining = evaluator.list_remaining_chunks(answered)
    if remaining:
        with interrupt.exit_on_signal("loading the weights"):
            answer_prompts = program.bind(
                load_weights(job.config, step, job.tokenizer, run, interrupt, job.say)
            )
        done_count = len(evaluator.chunks) - len(remaining)
        if done_count:
            job.say(f"{done_count} of {len(evaluator.chunks)} calls are already in {folder}")
        new_records = answer_problems(evaluator, answer_prompts, remaining, records, interrupt)
        if new_records is None:
            job.say(f"stopped; the answers so far are in {folder}, and the same command goes on")
            return interrupt.exit_status
        answered += new_records
    estimates = evaluator.estimate_sets(answered)
    if jax.process_index() == 0:
        numbers = {
            name: {metric: estimate.to_record() for metric, estimate in set_estimates.items()}
            for name, set_estimates in estimates.items()
        }
        write_text_atomic(
            folder / RESULTS_FILE, json.dumps(to_json_value(numbers), indent=2) + "\n"
        )
        Screen().print(build_results_table(estimates))
    job.say(f"results are in {folder}")
    unknown_sets = [
        name for name, set_estimates in estimates.items() if not set_estimates["reward"].problems
    ]
    if unknown_sets:
        raise Diverged(f"no answer to {join_names(unknown_sets)} has a reward")
    return 0


def answer_problems(
    evaluator: Evaluator,
    answer_prompts: PolicyAnswerer,
    chunks: Sequence[ProblemChunk],
    records: RecordFile,
    interrupt: Interrupt,
) -> list[ProblemRecord] | None:
    """Answers chunks of problems, and appends their records.

    Returns the new records, or None if it was interrupted.
    """
    poll_count, tokens, rounds, start_time = 0, 0, 0, time.perf_counter()
    new_records: list[ProblemRecord] = []

    def should_stop() -> bool:
        nonlocal poll_count
        poll_count += 1
        return interrupt.should_stop(poll_count)

    with Progress("evaluation", len(chunks), jax.process_index()) as progress:
        for number, chunk in enumerate(chunks, start=1):
            answers = evaluator.answer_chunk(answer_prompts, chunk, should_stop)
            if answers is None:
                return None
            # Written after each chunk, so that a stop loses one chunk at most.
            records.append_records(0, answers)
            new_records += answers
            tokens += sum(sum(record["tokens"]) for record in answers)
            rounds += sum(sum(record["rounds"]) for record in answers)
            seconds = time.perf_counter() - start_time
            passes = tokens / max(rounds, 1)
            progress.update(number, tokens_per_target_pass=passes, tokens_per_s=tokens / seconds)
    return new_records


def refuse_run_folder(folder: Path) -> None:
    """Raises `ConfigError` for a training run's folder."""
    # A run writes its own evaluations to a file of the same name.
    run_files = [name for name in ("config.json", "metrics.jsonl") if (folder / name).exists()]
    require(not run_files, f"{folder} is the folder of a training run; name another with --workdir")


def claim_folder(config: ResolvedConfig, mesh: Mesh, folder: Path, run: SavedRun | None) -> None:
    """Records in the folder which policy, data and settings are evaluated there.

    Raises:
      ConfigError: the folder has answers of another evaluation.
    """
    paths = config.model.path, config.lora.path, config.rollout.draft.path
    weights = {path: fingerprint_checkpoint(path) for path in paths if path}
    if run is not None:
        weights = {"checkpoint": str(run.checkpoints / str(run.number))}
    claim = {
        "config": to_json(config),
        "data": data_digests(config),
        "weights": weights,
        # Processes and mesh decide which process answers a problem, and in which call.
        "mesh": {"processes": jax.process_count(), **dict(mesh.shape)},
    }

    def compare_or_write() -> None:
        file = folder / EVALUATION_FILE
        # A folder without answers may be claimed again, with other settings.
        if not file.exists() or not RecordFile(folder, 0).load_records():
            write_text_atomic(file, json.dumps(claim, indent=2) + "\n")
            return
        saved = read_json(file)
        saved |= {"config": rename_settings(saved.get("config", {}))}
        saved_claim, current_claim = flatten_settings(saved), flatten_settings(claim)
        # Differences in these settings change no answer.
        names = "workdir", "reward.workers", *SPEED_SETTINGS, *list_unread_sections(config)
        ignored = [f"config.{name}" for name in names]
        differences = [
            f"{name}: {saved_claim.get(name, '(absent)')} -> {current_claim.get(name, '(absent)')}"
            for name in saved_claim | current_claim
            if not includes_setting(ignored, name)
            and saved_claim.get(name) != current_claim.get(name)
        ]
        require(
            not differences,
            f"{folder} has another evaluation: {'; '.join(differences)}. Choose another --workdir,"
            " or set these back",
        )

    # Only process 0 is sure to see the folder.
    check_in_process_0(compare_or_write)


def without_optimizers(learner: Learner) -> Learner:
    """Removes the optimizers from a learner."""
    # Nothing is learned, and moments would take memory.
    identity = optax.identity()
    return replace(learner, policy_optimizer=identity, draft_optimizer=identity)


def load_weights(
    config: ResolvedConfig,
    step: Step,
    tokenizer: Tokenizer,
    run: SavedRun | None,
    interrupt: Interrupt,
    say: LinePrinter,
) -> TrainState:
    """Loads policy and draft.

    They come from `run`. Without a run, the policy is the starting policy of the config, and the
    draft comes from `rollout.draft.path`.
    """
    factors = None
    if run is None:
        shapes = jax.eval_shape(step.init_draft)
        policy = load_policy(config, step, tokenizer, interrupt, say)
        network = load_draft(config, shapes, say)
    else:
        restored_state, generator = restore_merged_state(run, config, step)
        learner = restored_state.learner
        policy, network = learner.policy.network, learner.draft.network
        # The run chose its draft temperatures by these measurements.
        factors = resize_overlap(
            restored_state.generator.overlap_by_factor, step.generator, generator.settings.grid
        )
    layout = step.state_shardings()
    state = jax.jit(step.init_state, out_shardings=layout, donate_argnums=(0, 1))(policy, network)
    if factors is None:
        return state
    return state.replace(generator=state.generator.replace(overlap_by_factor=factors))


if __name__ == "__main__":
    sys.exit(run_and_report_errors(lambda: main(sys.argv[1:])))
