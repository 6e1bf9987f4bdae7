"""What training starts from: the policy of a checkpoint, or a supervised warm start on generated
documents, and a checkpoint's draft."""

import time
from pathlib import Path

import jax
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.config.from_checkpoint import read_draft
from jaxspec.data import arithmetic
from jaxspec.data.problems import load_sets, pad_prompts
from jaxspec.drafts.kinds import learned
from jaxspec.hf.pretrained import HfCheckpoint, make_adapter_merger, open_policy_checkpoint
from jaxspec.host.job import Job, on_this_process
from jaxspec.host.programs import placed
from jaxspec.inputs.streams import Stream, stream_rng
from jaxspec.models.decoder import Decoder
from jaxspec.preparation.draft_check import measured_agreement, report
from jaxspec.preparation.draft_data import answered
from jaxspec.processes.process_0 import build_in_process_0_only, run_in_process_0_first
from jaxspec.rl import optimizers
from jaxspec.rl.losses import negative_log_likelihood
from jaxspec.rl.train_batch import texts_to_learn
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
"""Training is kept so often, but only after so many times the seconds that keeping it takes."""
KEPT_ON_THE_WAY = "what is done is kept; the same command goes on from there"
"""What a signal during a training that is kept now and then means."""
PROBED = 16
"""Training prompts on which a draft that was loaded is compared with the policy."""


def warm_start(job: Job, progress: Progress, file: Path) -> Decoder:
    """Trains a fresh policy for `sft.steps` updates; the data and the noise follow from the seed
    alone.

    It learns as in RL: what follows each document's prompt, by the negative log-likelihood of each
    token. Its state is kept in `file` now and then, from which a later call goes on, to the same
    weights in every bit.
    """
    config = job.config
    sft, mesh = config.sft, job.mesh
    rng = stream_rng(config.seed, Stream.DOCUMENTS)
    length = config.row_length
    there = meshes.whole_tiles(mesh, sft.rows // meshes.row_shards(mesh) * (length - 1))
    learner = job.step.learner.for_texts(
        negative_log_likelihood,
        tokens=max(length - 1, min(there, job.step.learner.tokens)),
        processing=Processing(),
        objective=None,
        taps=(),
        policy_optimizer=optimizers.adamw(
            optimizers.cosine(sft.learning_rate, sft.steps), grad_clip=1.0, weight_decay=0.01
        ),
    )

    def fresh() -> LearnerState:
        return learner.start(job.step.fresh_policy(), None, online=False)

    shapes = jax.eval_shape(fresh)
    layout, whole = learner.layout(shapes), meshes.replicated(mesh)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    kept = load_kept(file, (jax.tree.map(placed, shapes, layout), count), progress)
    state, done = kept or (jax.jit(fresh, out_shardings=layout)(), 0)
    done = int(done)
    if done:
        progress.print_line(f"going on at step {done} of {sft.steps}")
    update = jax.jit(learner.learn, donate_argnums=0, out_shardings=(layout, whole))
    last, pause = time.monotonic(), KEEP_SECONDS
    for number in range(1, sft.steps + 1):
        texts = answered(
            arithmetic.sample_sft_batch(config.data, sft, job.tokenizer, rng, sft.rows, length)
        )
        if number <= done:  # drawn to bring the stream to where it was
            continue
        state, metrics = update(state, texts_to_learn(*texts, mesh, learner.tokens))
        progress.update(number, loss=float(metrics["loss/policy"]))
        skipped = float(metrics["skipped_in_row/policy"])
        optimizers.require_progress(
            skipped, "policy", f"step {number} of the warm start", "Lower --sft.learning_rate."
        )
        if time.monotonic() - last >= pause and not skipped:
            began = time.monotonic()
            save_tree(file, (state, np.int32(number)))
            last = time.monotonic()
            pause = max(KEEP_SECONDS, KEEP_COST * (last - began))
    return state.policy.network


def load_kept(file: Path, abstract: PyTree, progress: Progress) -> PyTree:
    """What `save_tree` wrote to a file; None where there is no file, or a damaged one, which is
    discarded."""
    if not file.exists():
        return None
    try:
        return load_tree(file, abstract)
    except DamagedFileError as reason:
        progress.print_line(f"warning: {reason.problem}; it is discarded and made anew")
        with explain_write_errors(
            f"{file} cannot be removed", "remove it, and run the same command again"
        ):
            remove_path(file)
        return None


def policy_key(job: Job) -> str:
    """Names the warm start by all that shapes it."""
    config = job.config
    shape = (
        config.data.task,
        config.data.digits,
        config.sft.format,
        config.data.max_prompt_length,
        config.rollout.max_new_tokens,
    )
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


def cached_policy(job: Job, interrupt: Interrupt) -> Path:
    """The file of the warm start's weights, trained first if the cache does not hold it; in process
    0, which does it for all.

    Raises:
      ConfigError: the cache cannot be written, or is not shared with process 0.
    """
    config, key = job.config, policy_key(job)
    partial = cache_folder() / f"{key}.partial.npz"

    def build(folder: Path) -> None:
        job.say(f"no warm start in the cache: training the policy for {config.sft.steps} steps")
        began = time.perf_counter()
        with (
            Progress("warm start", config.sft.steps) as progress,
            interrupt.exit_on_signal("warm start", progress.stop, consequence=KEPT_ON_THE_WAY),
        ):
            try:
                policy = warm_start(on_this_process(job), progress, partial)
            except optimizers.Diverged:
                partial.unlink(missing_ok=True)
                raise
            save_tree(folder / WEIGHTS, policy)
        partial.unlink(missing_ok=True)
        job.say(f"the warm start took {time.perf_counter() - began:.0f} s")

    with interrupt.exit_on_signal("looking for the warm start"):
        return get_or_build(key, build_in_process_0_only(build), job.say) / WEIGHTS


def load_policy(job: Job, interrupt: Interrupt) -> Decoder:
    """The starting policy on the job's mesh: a checkpoint's, the warm start, or random weights
    where `sft.steps` is 0; adapters merged."""
    config, fresh = job.config, job.step.fresh_policy
    shapes = jax.eval_shape(fresh)
    # bad adapters are named before any long work
    merge = make_adapter_merger(config.lora.path, shapes) if config.lora.path else None
    layout = job.step.learner.layout(shapes)
    wanted = jax.tree.map(placed, shapes, layout)
    if config.model.path:
        policy = _read_policy(job, interrupt, wanted)
    elif config.sft.steps:
        policy = load_tree(run_in_process_0_first(lambda: cached_policy(job, interrupt)), wanted)
    else:
        policy = jax.jit(fresh, out_shardings=layout)()
    return merge(policy) if merge else policy


def _read_policy(job: Job, interrupt: Interrupt, shapes: Decoder) -> Decoder:
    """The policy of `model.path`, each process reading what its own devices hold."""
    began, model = time.perf_counter(), job.config.model
    with interrupt.exit_on_signal("reading the policy"):
        checkpoint = open_policy_checkpoint(model, shapes)
        policy = load_shown(checkpoint)
    job.say(
        f"read {model.path}: {checkpoint.bytes / 1e9:.3g} GB in {time.perf_counter() - began:.1f} s"
    )
    return policy


def load_shown(checkpoint: HfCheckpoint) -> Decoder:
    """Loads a checkpoint under a bar of megabytes."""
    shown = 0
    with Progress("policy (MB)", round(checkpoint.bytes / 1e6), jax.process_index()) as progress:

        def show(done: int) -> None:
            nonlocal shown
            if round(done / 1e6) > shown:
                shown = round(done / 1e6)
                progress.update(shown)

        return checkpoint.load(show)


def load_draft(job: Job, shapes: PyTree) -> PyTree:
    """The draft of `rollout.draft.path`, as it is; without one, None."""
    config, began = job.config, time.perf_counter()
    if not config.rollout.draft.path:
        return None
    network = read_draft(config, shapes)
    job.say(
        f"read {config.rollout.draft.path}: {config.rollout.draft.kind} draft in"
        f" {time.perf_counter() - began:.1f} s"
    )
    return network


def say_agreement(job: Job, policy: Decoder, network: PyTree) -> None:
    """Says whether a draft that was loaded agrees with the policy on a few training prompts, and if
    not, why."""
    problems = load_sets(job.config, job.tokenizer, require_answers=False).training[0]
    few = [problems[number] for number in range(min(PROBED, len(problems)))]
    longest = max(len(problem.ids) for problem in few)
    reading = measured_agreement(
        job.step.generator,
        learned(job.config.rollout.draft.kind),
        policy,
        network,
        *pad_prompts(few, longest, job.tokenizer.pad_id),
    )
    job.say(report(reading))
    if reading.warning:
        job.say(f"warning: {reading.warning}")
