"""Trains a draft on answers of the policy or on a text, before the run."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxspec import mesh as meshes
from jaxspec.data.arithmetic import SftBatch
from jaxspec.drafts.kinds import get_learned
from jaxspec.host.job import Job
from jaxspec.host.programs import abstract_leaf
from jaxspec.models.decoder import Decoder
from jaxspec.preparation import draft_data
from jaxspec.preparation.draft_data import TextRows, rows_from_sft
from jaxspec.preparation.policy import (
    KEEP_COST,
    KEEP_SECONDS,
    load_partial,
)
from jaxspec.processes.process_0 import broadcast_flag, broadcast_number, require_shared_cache
from jaxspec.rl import optimizers
from jaxspec.rl.optimizers import Metrics
from jaxspec.rl.train_batch import PolicyStates, TrainBatch, build_text_batch
from jaxspec.state import LearnerState, NetworkState, PyTree
from jaxspec.storage.cache import (
    load_tree,
    save_tree,
)
from jaxspec.storage.trees import gather_to_process_0
from jaxspec.system.progress import Progress

MIN_DEPTHS = 8
"""Depths that are measured at least, so that another draft_length finds its own in the cache."""


def collect_responses(
    job: Job, policy: Decoder, numbers: list[int], folder: Path, progress: Progress
) -> dict[int, TextRows]:
    """The policy's responses to batches of the training prompts, by plain decoding: in domain, the
    largest single lever on acceptance.

    Each batch is kept in `folder` as soon as it is there, and read from there if it is already.
    """
    respond = draft_data.make_responder(job, policy)
    rows, replicated = job.config.offline.rows, meshes.replicated_sharding(job.mesh)
    size = job.config.row_length
    shapes: list[Any] = [
        jax.ShapeDtypeStruct(shape, np.int32, sharding=replicated)
        for shape in ((rows, size), (rows,), (rows,))
    ]
    batches = {}
    for batch_count, number in enumerate(numbers, start=1):
        file = folder / f"responses-{number}.npz"
        batch = _load_partial_together(file, SftBatch(*shapes), progress)
        if batch is None:
            batch = respond(number)
            save_in_process_0(file, batch)
        batches[number] = rows_from_sft(jax.device_get(batch))
        progress.update(batch_count * rows)
    return batches


def train_draft(
    job: Job,
    policy: Decoder,
    rows: TextRows,
    folder: Path,
    progress: Progress,
    loaded_draft: PyTree = None,
    states: PolicyStates | None = None,
) -> PyTree:
    """Trains a fresh draft, or one that was `loaded_draft`, for `offline.steps` updates on batches
    of `rows`; returns its weights. Without its `states` at the rows the policy is run.

    Weights, optimizer and step are kept in `folder` now and then; training goes on from there, to
    the same weights in every bit.
    """
    config, file, mesh = job.config, folder / "learner.npz", job.mesh
    offline, draft, sharding = (
        config.offline,
        config.rollout.draft,
        meshes.replicated_sharding(mesh),
    )
    optimizer = optimizers.adamw(
        optimizers.cosine_schedule(config.learning_rates.offline, offline.steps),
        config.draft_training.grad_clip,
    )
    # The policy is only read.
    learner = job.step.learner.for_supervised_texts(
        None, draft_optimizer=optimizer, micro_tokens=micro_tokens(job)
    )

    def start_draft() -> tuple[NetworkState, Array]:
        return optimizers.init_state(job.step.init_draft(), optimizer), jnp.zeros((), jnp.int32)

    def update(
        trained: NetworkState, policy: Decoder, batch: TrainBatch
    ) -> tuple[NetworkState, Metrics]:
        frozen_policy = optimizers.init_state(policy, optax.identity())
        state = LearnerState(
            policy=frozen_policy,
            draft=trained,
            online=jnp.ones((), bool),
            version=jnp.zeros((), jnp.int32),
            recompute=jnp.ones((), bool),
        )
        state, metrics = learner.learn(state, batch)
        assert state.draft is not None, "it was given"
        return state.draft, metrics

    shapes = jax.eval_shape(start_draft)
    layout = learner.train_layout(shapes[0]), sharding
    saved = _load_partial_together(file, jax.tree.map(abstract_leaf, shapes, layout), progress)
    if saved is not None:
        trained, start_step = saved
        # All must leave the loop below together.
        require_shared_cache(broadcast_number(int(start_step)) == int(start_step), file)
        progress.print_line(f"going on at step {int(start_step)} of {offline.steps}")
    else:
        trained, start_step = jax.jit(start_draft, out_shardings=layout)()
        if loaded_draft is not None:
            trained = trained.replace(network=loaded_draft)
        elif draft.draft_vocab:
            ids = draft_data.select_vocabulary(
                rows, draft.draft_vocab, config.model.vocab, job.tokenizer.stop_ids
            )
            with_vocabulary = get_learned(draft.kind).with_vocabulary
            assert with_vocabulary is not None, "only such kinds are given a vocabulary"
            trained = trained.replace(network=with_vocabulary(trained.network, ids))
    compiled_update = jax.jit(update, donate_argnums=0, out_shardings=(layout[0], sharding))
    save_time, save_interval = time.monotonic(), KEEP_SECONDS
    for step in range(int(start_step), offline.steps):
        batch, cached = draft_data.select_batch((rows, states), step, offline.rows, config.seed)
        texts = build_text_batch(batch.tokens, batch.mask, mesh, learner.micro_tokens, cached)
        trained, metrics = compiled_update(trained, policy, texts)
        if broadcast_flag(time.monotonic() - save_time >= save_interval):
            start_time = time.monotonic()
            save_in_process_0(file, (trained, np.int32(step + 1)))
            save_time = time.monotonic()
            save_interval = max(KEEP_SECONDS, KEEP_COST * (save_time - start_time))
        progress.update(
            step + 1,
            loss=float(metrics["loss/draft"]),
            expected_acceptance_length=acceptance_length(metrics),
        )
        skipped = float(metrics["skipped_in_row/draft"])
        remedy = "Lower --offline.learning_rate; what was kept of this draft is useless."
        optimizers.require_progress(
            skipped, "draft", f"step {step + 1} of its offline training", remedy
        )
    return trained.network


def _load_partial_together(file: Path, abstract: PyTree, progress: Progress) -> PyTree:
    """What `save_in_process_0` wrote, with the layout of `abstract`; None where there is no such
    file, or a damaged one, which is discarded. Process 0 answers for all."""
    saved_tree = load_partial(file, abstract, progress) if jax.process_index() == 0 else None
    if not broadcast_flag(saved_tree is not None):
        return None
    return load_tree(file, abstract) if saved_tree is None else saved_tree


def save_in_process_0(file: Path, tree: PyTree) -> None:
    """Writes a tree to a file, in process 0; all processes call it."""
    tree = gather_to_process_0(tree)
    if jax.process_index() == 0:
        save_tree(file, tree)


def micro_tokens(job: Job) -> int:
    """Positions of a micro-batch of `offline.rows`: as in the run, but no more than there are."""
    learner, length = job.step.learner, job.step.generator.row_length - 1
    token_count = job.config.offline.rows // meshes.row_shard_count(job.mesh) * length
    return max(length, min(meshes.round_to_tiles(job.mesh, token_count), learner.micro_tokens))


def acceptance_length(metrics: Metrics) -> float:
    """Tokens a round would keep if each depth were accepted with its mean overlap: 1 + a1 + a1 a2 +
    ..."""
    depths = sum(name.startswith("draft/expected_acceptance_") for name in metrics)
    return acceptance_lengths(
        [float(metrics[f"draft/expected_acceptance_{depth}"]) for depth in range(1, depths + 1)]
    )[-1]


def acceptance_lengths(acceptance: list[float]) -> list[float]:
    """Tokens that rounds of 1, 2, ... drafts would keep if each depth were accepted with its mean
    overlap."""
    return (1 + np.cumsum(np.cumprod(acceptance))).tolist()


def measure_acceptance(
    job: Job, policy: Decoder, network: PyTree, held_out: list[TextRows]
) -> list[float]:
    """Expected acceptance sum_v min(target, draft) by depth, over the tokens to predict of
    `held_out`; a small model has one depth."""
    training = job.config.draft_training
    depths = max(MIN_DEPTHS, training.ttt_steps, job.config.rollout.draft.max_draft_length)

    objective = job.step.learner.draft_objective
    assert objective is not None, "only a draft with weights is measured"
    objective = objective._replace(steps=depths)
    learner = job.step.learner.for_supervised_texts(
        None, draft_objective=objective, micro_tokens=micro_tokens(job)
    )
    compare = jax.jit(learner.compare_draft, out_shardings=meshes.replicated_sharding(job.mesh))
    texts = (build_text_batch(*batch, job.mesh, learner.micro_tokens) for batch in held_out)
    results = [jax.device_get(compare(policy, network, batch)) for batch in texts]
    sums, counts = (
        np.sum(totals, axis=0)
        for totals in zip(*((sums.acceptance, counts) for sums, counts in results), strict=True)
    )
    return (sums / np.maximum(counts, 1)).tolist()
