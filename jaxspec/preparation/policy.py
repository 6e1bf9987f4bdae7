"""Starting policy and loaded draft of a run.

The policy is read from a checkpoint, trained by a supervised warm start, or random.
"""

import time
from pathlib import Path

import jax
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.config.from_checkpoint import read_draft
from jaxspec.data import arithmetic
from jaxspec.data.problems import load_sets, pad_prompts
from jaxspec.drafts.kinds import get_learned
from jaxspec.hf.pretrained import HfCheckpoint, make_adapter_merger, open_policy_checkpoint
from jaxspec.host.job import Job, to_local_job
from jaxspec.host.programs import abstract_leaf
from jaxspec.inputs.streams import Stream, stream_rng
from jaxspec.models.decoder import Decoder
from jaxspec.preparation.draft_check import describe_check, measure_agreement
from jaxspec.preparation.draft_data import rows_from_sft
from jaxspec.processes.process_0 import build_in_process_0_only, run_in_process_0_first
from jaxspec.rl import optimizers
from jaxspec.rl.losses import negative_log_likelihood
from jaxspec.rl.train_batch import build_text_batch
from jaxspec.sampling import Processing
from jaxspec.state import LearnerState, PyTree
from jaxspec.storage.cache import (
    cache_folder,
    content_key,
    get_or_build,
    load_tree,
    read_sources,
    save_tree,
)
from jaxspec.system.files import DamagedFileError, explain_write_errors, remove_path
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress

WEIGHTS = "weights.npz"
KEEP_SECONDS, KEEP_COST = 10.0, 10.0
"""Minimum seconds between saves, and the same as a multiple of the last save's duration."""
RESUME_HINT = "progress is saved; the same command continues from there"
"""Consequence of a signal during a training that saves its progress, for messages."""
PROBE_PROMPTS = 16
"""Number of training prompts on which a loaded draft is compared with the policy."""


def train_policy(job: Job, progress: Progress, file: Path) -> Decoder:
    """Trains a fresh policy on generated documents.

    Runs `sft.steps` updates. Minimizes the negative log-likelihood of the tokens after each
    document's prompt. Data and initial weights depend only on the seed. The state is saved in
    `file` now and then. A later call resumes from there, and ends with bitwise equal weights.

    Raises:
      Diverged: Too many updates in a row were skipped.
    """
    config = job.config
    sft, mesh = config.sft, job.mesh
    rng = stream_rng(config.seed, Stream.DOCUMENTS)
    length = config.row_length
    token_count = meshes.round_to_tiles(
        mesh, sft.rows // meshes.row_shard_count(mesh) * (length - 1)
    )
    learner = job.step.learner.for_supervised_texts(
        negative_log_likelihood,
        micro_tokens=max(length - 1, min(token_count, job.step.learner.micro_tokens)),
        # Documents were not sampled, so the run's temperature and truncation do not apply.
        processing=Processing(),
        draft_objective=None,
        taps=(),
        policy_optimizer=optimizers.adamw(
            optimizers.cosine_schedule(sft.learning_rate, sft.steps),
            grad_clip=1.0,
            weight_decay=0.01,
        ),
    )

    def start_learner() -> LearnerState:
        return learner.init_state(job.step.init_policy(), None, online=False)

    shapes = jax.eval_shape(start_learner)
    layout, replicated = learner.train_layout(shapes), meshes.replicated_sharding(mesh)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    saved_state = load_partial(file, (jax.tree.map(abstract_leaf, shapes, layout), count), progress)
    state, steps_done = saved_state or (jax.jit(start_learner, out_shardings=layout)(), 0)
    steps_done = int(steps_done)
    if steps_done:
        progress.print_line(f"going on at step {steps_done} of {sft.steps}")
    update = jax.jit(learner.learn, donate_argnums=0, out_shardings=(layout, replicated))
    save_time, save_interval = time.monotonic(), KEEP_SECONDS
    for number in range(1, sft.steps + 1):
        texts = rows_from_sft(
            arithmetic.sample_sft_batch(config.data, sft, job.tokenizer, rng, sft.rows, length)
        )
        # Batches of finished updates are drawn anyway, to bring the random stream to its place.
        if number <= steps_done:
            continue
        state, metrics = update(state, build_text_batch(*texts, mesh, learner.micro_tokens))
        progress.update(number, loss=float(metrics["loss/policy"]))
        skipped = float(metrics["skipped_in_row/policy"])
        optimizers.require_progress(
            skipped, "policy", f"step {number} of the warm start", "Lower --sft.learning_rate."
        )
        # A training that is about to diverge should not be resumed.
        if time.monotonic() - save_time >= save_interval and not skipped:
            start_time = time.monotonic()
            save_tree(file, (state, np.int32(number)))
            save_time = time.monotonic()
            # On a slow disk saving becomes rarer, so that it takes a tenth of the time at most.
            save_interval = max(KEEP_SECONDS, KEEP_COST * (save_time - start_time))
    return state.policy.network


def load_partial(file: Path, abstract: PyTree, progress: Progress) -> PyTree:
    """Loads a file of `save_tree`. None if there is no file, or if it was damaged and removed."""
    if not file.exists():
        return None
    try:
        return load_tree(file, abstract)
    except DamagedFileError as reason:
        # Losing some progress is better than refusing to start.
        progress.print_line(f"warning: {reason.problem}; it is discarded and made anew")
        with explain_write_errors(
            f"{file} cannot be removed", "remove it, and run the same command again"
        ):
            remove_path(file)
        return None


def policy_key(job: Job) -> str:
    """Returns the cache key of the warm start."""
    config = job.config
    shape = (
        config.data.task,
        config.data.digits,
        config.sft.format,
        config.data.max_prompt_length,
        config.rollout.max_new_tokens,
    )
    # A change of code may change the weights, so sources are part of the key.
    code = read_sources(
        "data/arithmetic.py",
        "data/programs.py",
        *("tokens/tokenizer.py", "tokens/special_tokens.py"),
        "preparation/policy.py",
        "inputs/streams.py",
        "models/*.py",
        "kernels/*.py",
        "rl/*.py",
    )
    return content_key("policy", config.seed, config.model, config.sft, shape, code)


def get_or_train_policy(job: Job, interrupt: Interrupt) -> Path:
    """Returns the weights' file, training the policy if needed.

    A warm start in the cache is not trained again. Only process 0 trains. Call it there first, then
    in the other processes.

    Raises:
      ConfigError: The cache cannot be written, or is not shared with process 0.
      Diverged: Training diverged. Nothing is cached.
    """
    config, key = job.config, policy_key(job)
    partial = cache_folder() / f"{key}.partial.npz"

    def build(folder: Path) -> None:
        job.say(f"no warm start in the cache: training the policy for {config.sft.steps} steps")
        start_time = time.perf_counter()
        with (
            Progress("warm start", config.sft.steps) as progress,
            interrupt.exit_on_signal("warm start", progress.stop, consequence=RESUME_HINT),
        ):
            try:
                policy = train_policy(to_local_job(job), progress, partial)
            except optimizers.Diverged:
                # A retry with the same settings should not resume close to the divergence.
                partial.unlink(missing_ok=True)
                raise
            save_tree(folder / WEIGHTS, policy)
        # Removed last: until the weights are written, an interrupted training can resume.
        partial.unlink(missing_ok=True)
        job.say(f"the warm start took {time.perf_counter() - start_time:.0f} s")

    with interrupt.exit_on_signal("looking for the warm start"):
        return get_or_build(key, build_in_process_0_only(build), job.say) / WEIGHTS


def load_policy(job: Job, interrupt: Interrupt) -> Decoder:
    """Loads the starting policy onto the job's mesh.

    It comes from `model.path`, else from the warm start. Without either it has random weights.
    Adapters are merged into it.
    """
    config, fresh_policy = job.config, job.step.init_policy
    shapes = jax.eval_shape(fresh_policy)
    # Errors in the adapters are reported before any long work.
    merge = make_adapter_merger(config.lora.path, shapes) if config.lora.path else None
    layout = job.step.learner.train_layout(shapes)
    abstract_policy = jax.tree.map(abstract_leaf, shapes, layout)
    if config.model.path:
        policy = _read_policy(job, interrupt, abstract_policy)
    elif config.sft.steps:
        policy = load_tree(
            run_in_process_0_first(lambda: get_or_train_policy(job, interrupt)), abstract_policy
        )
    else:
        policy = jax.jit(fresh_policy, out_shardings=layout)()
    return merge(policy) if merge else policy


def _read_policy(job: Job, interrupt: Interrupt, shapes: Decoder) -> Decoder:
    """Reads the policy of `model.path`. Each process reads only the shards of its own devices."""
    start_time, model = time.perf_counter(), job.config.model
    with interrupt.exit_on_signal("reading the policy"):
        checkpoint = open_policy_checkpoint(model, shapes)
        policy = load_with_progress(checkpoint)
    job.say(
        f"read {model.path}: {checkpoint.bytes / 1e9:.3g} GB in"
        f" {time.perf_counter() - start_time:.1f} s"
    )
    return policy


def load_with_progress(checkpoint: HfCheckpoint) -> Decoder:
    """Loads a checkpoint under a progress bar."""
    shown_megabytes = 0
    with Progress("policy (MB)", round(checkpoint.bytes / 1e6), jax.process_index()) as progress:

        def update_bar(loaded_bytes: int) -> None:
            nonlocal shown_megabytes
            # Small tensors would update the bar thousands of times.
            if round(loaded_bytes / 1e6) > shown_megabytes:
                shown_megabytes = round(loaded_bytes / 1e6)
                progress.update(shown_megabytes)

        return checkpoint.load(update_bar)


def load_draft(job: Job, shapes: PyTree) -> PyTree:
    """Reads the draft of `rollout.draft.path`. None without a path."""
    config, start_time = job.config, time.perf_counter()
    if not config.rollout.draft.path:
        return None
    network = read_draft(config, shapes)
    job.say(
        f"read {config.rollout.draft.path}: {config.rollout.draft.kind} draft in"
        f" {time.perf_counter() - start_time:.1f} s"
    )
    return network


def report_agreement(job: Job, policy: Decoder, network: PyTree) -> None:
    """Prints how well a loaded draft matches the policy.

    Adds a warning if the agreement is poor.
    """
    # A few prompts suffice to tell a miswired draft, and need no sampling.
    problems = load_sets(job.config, job.tokenizer, require_answers=False).training[0]
    probe_problems = [problems[number] for number in range(min(PROBE_PROMPTS, len(problems)))]
    max_length = max(len(problem.ids) for problem in probe_problems)
    check = measure_agreement(
        job.step.generator,
        get_learned(job.config.rollout.draft.kind),
        policy,
        network,
        *pad_prompts(probe_problems, max_length, job.tokenizer.pad_id),
    )
    job.say(describe_check(check))
    if check.warning:
        job.say(f"warning: {check.warning}")
