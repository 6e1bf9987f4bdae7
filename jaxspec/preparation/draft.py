"""Offline training of the draft on the policy's own responses."""

import dataclasses
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxspec import mesh as meshes
from jaxspec.config.settings import DataConfig
from jaxspec.data.arithmetic import SftBatch
from jaxspec.data.files import data_digest
from jaxspec.drafts.kinds import learned
from jaxspec.hf.pretrained import fingerprint_checkpoint
from jaxspec.host.job import Job
from jaxspec.host.programs import abstract, placed
from jaxspec.models.decoder import Decoder
from jaxspec.preparation import draft_data
from jaxspec.preparation.draft_data import Rows, answered
from jaxspec.preparation.policy import (
    KEEP_COST,
    KEEP_SECONDS,
    KEPT_ON_THE_WAY,
    WEIGHTS,
    load_draft,
    load_kept,
    load_policy,
    policy_key,
    say_agreement,
)
from jaxspec.processes.process_0 import broadcast_flag, broadcast_number, require_shared_cache
from jaxspec.rl import optimizers
from jaxspec.rl.learner import Metrics
from jaxspec.rl.train_batch import States, TrainBatch, texts_to_learn
from jaxspec.state import LearnerState, PyTree, Trained
from jaxspec.storage.cache import (
    cache_folder,
    content_key,
    get_or_build_together,
    load_tree,
    read_sources,
    save_tree,
)
from jaxspec.storage.trees import gather_to_process_0
from jaxspec.system.files import explain_write_errors, hash_file, remove_path, write_text_atomic
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.tokens.tokenizer import TOKENIZER_FILES

ACCEPTANCE = "acceptance.json"
"""What the draft reached on held-out responses, beside its weights."""
DEPTHS = 8
"""Depths that are measured at least, so that another draft_length finds its own in the cache."""
CODE = (
    *("preparation/draft.py", "preparation/draft_data.py", "data/problem_source.py"),
    *("data/messages.py", "data/json_lines.py", "data/problem_file.py", "data/problems.py"),
    *("tokens/stop_strings.py", "tokens/turns.py", "tokens/chat_template.py"),
    "tokens/template_process.py",
    *("build.py", "step.py", "inputs/streams.py", "sampling.py"),
    *("hf/*.py", "drafts/*.py", "rollout/**/*.py", "rl/*.py", "kernels/*.py"),
)
"""The files that shape a draft, beside those that shape the policy."""


def collect(
    job: Job, policy: Decoder, numbers: list[int], folder: Path, progress: Progress
) -> dict[int, Rows]:
    """The policy's responses to batches of the training prompts, by plain decoding: in domain, the
    largest single lever on acceptance.

    Each batch is kept in `folder` as soon as it is there, and read from there if it is already.
    """
    respond = draft_data.responder(job, policy)
    rows, whole = job.config.offline.rows, meshes.replicated(job.mesh)
    size = job.config.row_length
    shapes: list[Any] = [
        jax.ShapeDtypeStruct(shape, np.int32, sharding=whole)
        for shape in ((rows, size), (rows,), (rows,))
    ]
    batches = {}
    for done, number in enumerate(numbers, start=1):
        file = folder / f"responses-{number}.npz"
        batch = _kept(file, SftBatch(*shapes), progress)
        if batch is None:
            batch = respond(number)
            _keep(file, batch)
        batches[number] = answered(jax.device_get(batch))
        progress.update(done * rows)
    return batches


def train(
    job: Job,
    policy: Decoder,
    rows: Rows,
    folder: Path,
    progress: Progress,
    loaded: PyTree = None,
    states: States | None = None,
) -> PyTree:
    """Trains a fresh draft, or one that was `loaded`, for `offline.steps` updates on batches of
    `rows`; returns its weights. Without its `states` at the rows the policy is run.

    Weights, optimizer and step are kept in `folder` now and then; training goes on from there, to
    the same weights in every bit.
    """
    config, file, mesh = job.config, folder / "learner.npz", job.mesh
    offline, draft, whole = config.offline, config.rollout.draft, meshes.replicated(mesh)
    optimizer = optimizers.adamw(
        optimizers.cosine(config.learning_rates.offline, offline.steps),
        config.draft_training.grad_clip,
    )
    # The policy is only read.
    learner = job.step.learner.for_texts(None, draft_optimizer=optimizer, tokens=_micro(job))

    def fresh() -> tuple[Trained, Array]:
        return optimizers.start(job.step.fresh_draft(), optimizer), jnp.zeros((), jnp.int32)

    def update(trained: Trained, policy: Decoder, batch: TrainBatch) -> tuple[Trained, Metrics]:
        reading = optimizers.start(policy, optax.identity())
        state = LearnerState(
            policy=reading,
            draft=trained,
            online=jnp.ones((), bool),
            version=jnp.zeros((), jnp.int32),
            recompute=jnp.ones((), bool),
        )
        state, metrics = learner.learn(state, batch)
        assert state.draft is not None, "it was given"
        return state.draft, metrics

    shapes = jax.eval_shape(fresh)
    layout = learner.layout(shapes[0]), whole
    kept = _kept(file, jax.tree.map(placed, shapes, layout), progress)
    if kept is not None:
        trained, done = kept
        # All must leave the loop below together.
        require_shared_cache(broadcast_number(int(done)) == int(done), file)
        progress.print_line(f"going on at step {int(done)} of {offline.steps}")
    else:
        trained, done = jax.jit(fresh, out_shardings=layout)()
        if loaded is not None:
            trained = trained.replace(network=loaded)
        elif draft.draft_vocab:
            ids = draft_data.vocabulary(
                rows, draft.draft_vocab, config.model.vocab, job.tokenizer.stop_ids
            )
            choose = learned(draft.kind).with_vocabulary
            assert choose is not None, "only such kinds are given a vocabulary"
            trained = trained.replace(network=choose(trained.network, ids))
    call = jax.jit(update, donate_argnums=0, out_shardings=(layout[0], whole))
    last, pause = time.monotonic(), KEEP_SECONDS
    for number in range(int(done), offline.steps):
        batch, known = draft_data.batch_of((rows, states), number, offline.rows, config.seed)
        texts = texts_to_learn(batch.tokens, batch.mask, mesh, learner.tokens, known)
        trained, metrics = call(trained, policy, texts)
        if broadcast_flag(time.monotonic() - last >= pause):
            began = time.monotonic()
            _keep(file, (trained, np.int32(number + 1)))
            last = time.monotonic()
            pause = max(KEEP_SECONDS, KEEP_COST * (last - began))
        progress.update(
            number + 1,
            loss=float(metrics["loss/draft"]),
            expected_acceptance_length=expected_length(metrics),
        )
        skipped = float(metrics["skipped_in_row/draft"])
        look = "Lower --offline.learning_rate; what was kept of this draft is useless."
        optimizers.require_progress(
            skipped, "draft", f"step {number + 1} of its offline training", look
        )
    return trained.network


def _kept(file: Path, abstract: PyTree, progress: Progress) -> PyTree:
    """What `_keep` wrote, with the layout of `abstract`; None where there is no such file, or a
    damaged one, which is discarded. Process 0 answers for all."""
    kept = load_kept(file, abstract, progress) if jax.process_index() == 0 else None
    if not broadcast_flag(kept is not None):
        return None
    return load_tree(file, abstract) if kept is None else kept


def _keep(file: Path, tree: PyTree) -> None:
    """Writes a tree to a file, in process 0; all processes call it."""
    tree = gather_to_process_0(tree)
    if jax.process_index() == 0:
        save_tree(file, tree)


def _micro(job: Job) -> int:
    """Positions of a micro-batch of `offline.rows`: as in the run, but no more than there are."""
    learner, length = job.step.learner, job.step.generator.row_length - 1
    there = job.config.offline.rows // meshes.row_shards(job.mesh) * length
    return max(length, min(meshes.whole_tiles(job.mesh, there), learner.tokens))


def expected_length(metrics: Metrics) -> float:
    """Tokens a round would keep if each depth were accepted with its mean overlap: 1 + a1 + a1 a2 +
    ..."""
    depths = sum(name.startswith("draft/expected_acceptance_") for name in metrics)
    return tokens_kept(
        [float(metrics[f"draft/expected_acceptance_{depth}"]) for depth in range(1, depths + 1)]
    )[-1]


def tokens_kept(acceptance: list[float]) -> list[float]:
    """Tokens that rounds of 1, 2, ... drafts would keep if each depth were accepted with its mean
    overlap."""
    return (1 + np.cumsum(np.cumprod(acceptance))).tolist()


def measure(job: Job, policy: Decoder, network: PyTree, held_out: list[Rows]) -> list[float]:
    """Expected acceptance sum_v min(target, draft) by depth, over the tokens to predict of
    `held_out`; a small model has one depth."""
    training = job.config.draft_training
    depths = max(DEPTHS, training.ttt_steps, job.config.rollout.draft.max_draft_length)

    objective = job.step.learner.objective
    assert objective is not None, "only a draft with weights is measured"
    objective = objective._replace(steps=depths)
    learner = job.step.learner.for_texts(None, objective=objective, tokens=_micro(job))
    compare = jax.jit(learner.compare, out_shardings=meshes.replicated(job.mesh))
    texts = (texts_to_learn(*batch, job.mesh, learner.tokens) for batch in held_out)
    found = [jax.device_get(compare(policy, network, batch)) for batch in texts]
    sums, counts = (
        np.sum(part, axis=0)
        for part in zip(*((sums.acceptance, counts) for sums, counts in found), strict=True)
    )
    return (sums / np.maximum(counts, 1)).tolist()


def build(job: Job, interrupt: Interrupt, text: Rows | None, partial: Path, folder: Path) -> None:
    """Fills `folder` with a trained draft and what it has reached; what takes long is kept in
    `partial` on the way. All processes take part, and process 0 writes."""
    offline, draft = job.config.offline, job.config.rollout.draft
    began, then = time.perf_counter(), KEPT_ON_THE_WAY
    me = jax.process_index()
    if me == 0:
        with explain_write_errors(
            f"{partial} cannot be made", "free some space or name another folder with JAXSPEC_CACHE"
        ):
            if not partial.is_dir():
                remove_path(partial)
            partial.mkdir(exist_ok=True)
    shapes = abstract(job.step, job.config.batch.prompts)[0].learner.draft
    assert shapes is not None, "build is only called for a draft with weights"
    loaded = load_draft(job, shapes.network)
    policy = load_policy(job, interrupt)
    if loaded is not None:
        say_agreement(job, policy, loaded)
    ours, held_out = draft_data.split(offline)
    numbers = [*(() if text else ours), *held_out]
    with (
        Progress("sampling", len(numbers) * offline.rows, me) as progress,
        interrupt.exit_on_signal("sampling", progress.stop, consequence=then),
    ):
        batches = collect(job, policy, numbers, partial, progress)
    rows = text or draft_data.in_use([batches[number] for number in ours])
    measured = draft_data.in_use([batches[n] for n in held_out])
    used = len(measured.tokens) + (0 if text else len(rows.tokens))
    asked = len(numbers) * offline.rows
    if used < asked:
        job.say(
            f"{asked - used} of {asked} responses failed (logits that are not finite) and are"
            " left out"
        )
    states = None
    if draft_data.states_fit(job, rows):
        with (
            Progress("reading", len(rows.tokens), me) as progress,
            interrupt.exit_on_signal("reading the responses", progress.stop, consequence=then),
        ):
            states = draft_data.read_states(job, policy, rows, _micro(job), progress)
    with (
        Progress("draft", offline.steps, me) as progress,
        interrupt.exit_on_signal("training the draft", progress.stop, consequence=then),
    ):
        network = train(job, policy, rows, partial, progress, loaded, states)
    outcome: dict[str, Any] = {
        "kind": draft.kind,
        "responses": len(measured.tokens),
        "vocabulary": None,
        "coverage": None,
    }
    if draft.draft_vocab:
        ids = gather_to_process_0(learned(draft.kind).unroll.vocabulary(network))
        if me == 0:
            outcome |= {"vocabulary": len(ids), "coverage": draft_data.coverage(measured, ids)}
    with interrupt.exit_on_signal("measuring the draft", consequence=then):
        outcome["acceptance"] = measure(
            job, policy, network, draft_data.in_batches(measured, offline.rows)
        )
        _keep(folder / WEIGHTS, network)
        if me == 0:
            write_text_atomic(folder / ACCEPTANCE, json.dumps(outcome) + "\n")
    by_length = tokens_kept(outcome["acceptance"][: draft.max_draft_length])
    would = (
        f"rounds of {len(by_length)} draft{'s' * (len(by_length) > 1)} would keep"
        f" {by_length[-1]:.2f} tokens on held-out responses"
    )
    job.say(f"the draft took {time.perf_counter() - began:.0f} s; {would}")


def cached_draft(job: Job, interrupt: Interrupt, text: Rows | None) -> Path:
    """The file of the draft's weights, trained first if the cache does not hold it, by all
    processes together.

    `text` is what `draft_data.training_text` read for this job.

    Raises:
      ConfigError: the cache cannot be written, or it is not shared with process 0.
      Diverged: the training went wrong; nothing is cached.
    """
    offline, kind = job.config.offline, job.config.rollout.draft.kind
    key = _key(job, text)
    partial = cache_folder() / f"{key}.partial"
    source = (
        f"{len(text.tokens)} rows of {offline.text}" if text else f"{offline.samples} responses"
    )

    def forget() -> None:
        if jax.process_index() == 0:
            shutil.rmtree(partial, ignore_errors=True)

    def build_here(folder: Path) -> None:
        job.say(f"no draft in the cache: {offline.steps} steps of {kind} on {source}")
        try:
            build(job, interrupt, text, partial, folder)
        except optimizers.Diverged:
            forget()
            raise

    with interrupt.exit_on_signal("looking for the draft"):
        folder = get_or_build_together(key, build_here, job.say)
        forget()
    return folder / WEIGHTS


def _key(job: Job, text: Rows | None) -> str:
    """Names the draft by all that shapes it: policy, prompts, how responses are sampled, text,
    network, training, code."""
    config = job.config
    folder = config.data.tokenizer
    tokenizer = _digest([Path(folder) / name for name in TOKENIZER_FILES] if folder else [])
    data = [(each.weight, _as_read(each.data, tokenizer)) for each in config.training_sets]
    offline = dataclasses.replace(
        config.offline,
        learning_rate=config.learning_rates.offline,
        text=hashlib.sha256(b"".join(part.tobytes() for part in text)).hexdigest() if text else "",
    )
    draft, training = config.rollout.draft, config.draft_training
    processing = job.step.learner.processing
    network = (
        draft.kind,
        draft.draft_vocab,
        draft.ffn,
        draft.layers,
        draft.embedding_first,
        config.head,
        config.draft_model,
    )
    objective = training.loss, training.ttt_steps, training.decay, training.grad_clip
    code = read_sources(*CODE)
    rollout = config.rollout
    sampling = config.seed, rollout.max_new_tokens, rollout.stop, config.today, processing
    paths = config.model.path, config.lora.path, draft.path
    weights = [fingerprint_checkpoint(path) for path in paths if path]
    return content_key(
        "draft",
        policy_key(job),
        weights,
        sampling,
        data,
        offline,
        network,
        objective,
        code,
    )


def _as_read(data: DataConfig, tokenizer: str) -> DataConfig:
    """Where prompts come from, by the content of its files."""
    content = data_digest(data.path, "data.path") if data.path else ""
    return dataclasses.replace(data, path=content, tokenizer=tokenizer)


def _digest(files: list[Path]) -> str:
    """The content of those files that there are, as far as a cache key goes."""
    return " ".join(map(hash_file, files))
