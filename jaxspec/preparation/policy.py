"""Starting policy and loaded draft of a run.

The policy is read from a checkpoint, trained by a supervised warm start, or random.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.config.from_checkpoint import read_draft
from jaxspec.config.settings import ResolvedConfig
from jaxspec.data import arithmetic
from jaxspec.data.problems import load_sets, pad_prompts
from jaxspec.drafts.kinds import get_learned
from jaxspec.hf.pretrained import HfCheckpoint, make_adapter_merger, open_policy_checkpoint
from jaxspec.host.job import to_local_step
from jaxspec.host.programs import abstract_leaf
from jaxspec.inputs.spec import ModelSpec
from jaxspec.inputs.streams import Stream, stream_rng
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.models.decoder import Decoder
from jaxspec.preparation.draft_check import describe_check, measure_agreement
from jaxspec.preparation.draft_data import rows_from_sft
from jaxspec.processes.process_0 import build_in_process_0_only, run_in_process_0_first
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import UntrainedDraft
from jaxspec.rl.learner import Learner
from jaxspec.rl.losses import negative_log_likelihood
from jaxspec.rl.objective import PolicyObjective
from jaxspec.rl.train_batch import build_text_batch
from jaxspec.rollout.generator import Generator
from jaxspec.sampling import Processing
from jaxspec.state import LearnerState, PyTree
from jaxspec.step import Step
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
from jaxspec.system.terminal import LinePrinter
from jaxspec.tokens.tokenizer import Tokenizer

WEIGHTS = "weights.npz"
KEEP_SECONDS, KEEP_COST = 10.0, 10.0
"""Minimum seconds between saves, and the same as a multiple of the last save's duration."""
RESUME_HINT = "progress is saved; the same command continues from there"
"""Consequence of a signal during a training that saves its progress, for messages."""
PROBE_PROMPTS = 16
"""Number of training prompts on which a loaded draft is compared with the policy."""


class SaveTimer:
    """Decides when a training saves its progress."""

    def __init__(self) -> None:
        self._save_time, self._interval = time.monotonic(), KEEP_SECONDS

    def is_due(self) -> bool:
        """Returns whether the last save is long enough ago."""
        return time.monotonic() - self._save_time >= self._interval

    def time_save(self, save: Callable[[], None]) -> None:
        """Saves, and sets the time of the next save."""
        start_time = time.monotonic()
        save()
        self._save_time = time.monotonic()
        # On a slow disk saving becomes rarer, so that it takes a tenth of the time at most.
        self._interval = max(KEEP_SECONDS, KEEP_COST * (self._save_time - start_time))


def train_policy(
    config: ResolvedConfig, step: Step, tokenizer: Tokenizer, progress: Progress, file: Path
) -> Decoder:
    """Trains a fresh policy on generated documents.

    Runs `sft.steps` updates. Minimizes the negative log-likelihood of the tokens after each
    document's prompt. Data and initial weights depend only on the seed. The state is saved in
    `file` now and then. A later call resumes from there, and ends with bitwise equal weights.

    Raises:
      Diverged: Too many updates in a row were skipped.
    """
    sft, length, learner = config.sft, config.row_length, _make_sft_learner(config, step.learner)
    rng = stream_rng(config.seed, Stream.DOCUMENTS)

    def start_learner() -> LearnerState:
        return learner.init_state(step.init_policy(), None, online=False)

    shapes = jax.eval_shape(start_learner)
    layout, replicated = learner.train_layout(shapes), meshes.replicated_sharding(learner.mesh)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    saved_state = load_partial(file, (jax.tree.map(abstract_leaf, shapes, layout), count), progress)
    state, steps_done = saved_state or (jax.jit(start_learner, out_shardings=layout)(), 0)
    steps_done = int(steps_done)
    if steps_done:
        progress.print_line(f"going on at step {steps_done} of {sft.steps}")
    update = jax.jit(learner.learn, donate_argnums=0, out_shardings=(layout, replicated))
    timer = SaveTimer()
    for number in range(1, sft.steps + 1):
        texts = rows_from_sft(
            arithmetic.sample_sft_batch(config.data, sft, tokenizer, rng, sft.rows, length)
        )
        # Batches of finished updates are drawn anyway, to bring the random stream to its place.
        if number <= steps_done:
            continue
        batch = build_text_batch(*texts, learner.mesh, learner.micro_tokens)
        state, metrics = update(state, batch)
        metrics = metrics_to_host(metrics)
        progress.update(number, loss=metrics.get("loss/policy", math.nan))
        skipped = metrics["skipped_in_row/policy"]
        optimizers.require_progress(
            skipped, "policy", f"step {number} of the warm start", "Lower --sft.learning_rate."
        )
        # A training that is about to diverge should not be resumed.
        if timer.is_due() and not skipped:
            timer.time_save(partial(save_tree, file, (state, np.int32(number))))
    return state.policy.network


def _make_sft_learner(config: ResolvedConfig, learner: Learner) -> Learner:
    """Returns a learner for the documents of the warm start."""
    sft, length = config.sft, config.row_length
    shard_rows = sft.rows // meshes.row_shard_count(learner.mesh)
    token_count = meshes.round_to_tiles(learner.mesh, shard_rows * (length - 1))
    rate = optimizers.cosine_schedule(sft.learning_rate, sft.steps)
    return learner.for_supervised_texts(
        PolicyObjective(negative_log_likelihood),
        micro_tokens=max(length - 1, min(token_count, learner.micro_tokens)),
        # Documents were not sampled, so the run's temperature and truncation do not apply.
        processing=Processing(),
        draft_objective=UntrainedDraft(),
        taps=(),
        policy_optimizer=optimizers.adamw(rate, grad_clip=1.0, weight_decay=0.01),
        learning_rate=rate,
    )


def load_partial(file: Path, abstract: PyTree, progress: Progress) -> PyTree:
    """Loads a file of `save_tree`.

    Returns None if there is no file. Also removes a damaged file and returns None.
    """
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


def policy_key(config: ResolvedConfig) -> str:
    """Returns the cache key of the warm start."""
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


def get_or_train_policy(
    config: ResolvedConfig, step: Step, tokenizer: Tokenizer, interrupt: Interrupt, say: LinePrinter
) -> Path:
    """Returns the weights' file, training the policy if needed.

    A warm start in the cache is not trained again. Only process 0 trains. Call it there first, then
    in the other processes.

    Raises:
      ConfigError: The cache cannot be written, or is not shared with process 0.
      Diverged: Training diverged. Nothing is cached.
    """
    key = policy_key(config)
    partial_file = cache_folder() / f"{key}.partial.npz"

    def build(folder: Path) -> None:
        say(f"no warm start in the cache: training the policy for {config.sft.steps} steps")
        start_time = time.perf_counter()
        with (
            Progress("warm start", config.sft.steps) as progress,
            interrupt.exit_on_signal("warm start", progress.stop, consequence=RESUME_HINT),
        ):
            local_step = to_local_step(config, step, tokenizer)
            try:
                policy = train_policy(config, local_step, tokenizer, progress, partial_file)
            except optimizers.Diverged:
                # A retry with the same settings should not resume close to the divergence.
                partial_file.unlink(missing_ok=True)
                raise
            save_tree(folder / WEIGHTS, policy)
        # Removed last: until the weights are written, an interrupted training can resume.
        partial_file.unlink(missing_ok=True)
        say(f"the warm start took {time.perf_counter() - start_time:.0f} s")

    with interrupt.exit_on_signal("looking for the warm start"):
        return get_or_build(key, build_in_process_0_only(build), say) / WEIGHTS


def load_policy(
    config: ResolvedConfig, step: Step, tokenizer: Tokenizer, interrupt: Interrupt, say: LinePrinter
) -> Decoder:
    """Loads the starting policy onto the learner's mesh.

    It comes from `model.path`, else from the warm start. Without either it has random weights.
    Adapters of `lora.path` are merged into it.
    """
    shapes = jax.eval_shape(step.init_policy)
    # Errors in the adapters are reported before any long work.
    merge = make_adapter_merger(config.lora.path, shapes) if config.lora.path else None
    layout = step.learner.train_layout(shapes)
    abstract_policy = jax.tree.map(abstract_leaf, shapes, layout)
    if config.model.path:
        policy = _read_policy(config.model, abstract_policy, interrupt, say)
    elif config.sft.steps:
        train = partial(get_or_train_policy, config, step, tokenizer, interrupt, say)
        policy = load_tree(run_in_process_0_first(train), abstract_policy)
    else:
        policy = jax.jit(step.init_policy, out_shardings=layout)()
    return merge(policy) if merge else policy


def _read_policy(
    model: ModelSpec, shapes: Decoder, interrupt: Interrupt, say: LinePrinter
) -> Decoder:
    """Reads the policy of `model.path`. Each process reads only the shards of its own devices."""
    start_time = time.perf_counter()
    with interrupt.exit_on_signal("reading the policy"):
        checkpoint = open_policy_checkpoint(model, shapes)
        policy = load_with_progress(checkpoint)
    say(
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


def load_draft(config: ResolvedConfig, shapes: PyTree, say: LinePrinter) -> PyTree:
    """Reads the draft of `rollout.draft.path`. Returns None without a path."""
    start_time = time.perf_counter()
    if not config.rollout.draft.path:
        return None
    network = read_draft(config, shapes)
    say(
        f"read {config.rollout.draft.path}: {config.rollout.draft.kind} draft in"
        f" {time.perf_counter() - start_time:.1f} s"
    )
    return network


def report_agreement(
    config: ResolvedConfig,
    generator: Generator,
    tokenizer: Tokenizer,
    policy: Decoder,
    network: PyTree,
    say: LinePrinter,
) -> None:
    """Prints how well a loaded draft matches the policy.

    Adds a warning if the agreement is poor.
    """
    # A few prompts suffice to tell a miswired draft, and need no sampling.
    problems = load_sets(config, tokenizer, require_answers=False).training[0]
    probe_problems = [problems[number] for number in range(min(PROBE_PROMPTS, len(problems)))]
    max_length = max(len(problem.ids) for problem in probe_problems)
    check = measure_agreement(
        generator,
        get_learned(config.rollout.draft.kind),
        policy,
        network,
        *pad_prompts(probe_problems, max_length, tokenizer.pad_id),
    )
    say(describe_check(check))
    if check.warning:
        say(f"warning: {check.warning}")
