"""Offline training of a draft, before the run."""

import time
from collections.abc import Callable
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
"""Minimum number of depths to measure. Runs with other draft lengths then reuse the cache."""


def collect_responses(
    job: Job, policy: Decoder, numbers: list[int], folder: Path, progress: Progress
) -> dict[int, TextRows]:
    """Samples the policy's responses to training prompts.

    Decoding is plain. Each batch is saved in `folder` at once. Batches that are already there are
    read.
    """
    # Training on responses in the run's own domain raises acceptance more than any setting.
    respond: Callable[[int], SftBatch] | None = None
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
            # Compiled only if a batch is missing.
            respond = respond or draft_data.make_responder(job, policy)
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
    """Trains a draft and returns its weights.

    Runs `offline.steps` updates, from the weights of `loaded_draft` or from random ones. If
    `states` has the policy's states at `rows`, the policy itself is not run. Progress is saved in
    `folder` now and then. A later call resumes from there, and ends with bitwise equal weights.

    Raises:
      Diverged: Too many updates in a row were skipped.
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
    # Without a loss the learner only runs the policy, and trains nothing but the draft.
    learner = job.step.learner.for_supervised_texts(
        None, draft_optimizer=optimizer, micro_tokens=micro_tokens(job)
    )

    def start_draft() -> tuple[NetworkState, Array]:
        return optimizers.init_state(job.step.init_draft(), optimizer), jnp.zeros((), jnp.int32)

    def update(
        trained: NetworkState, policy: Decoder, batch: TrainBatch
    ) -> tuple[NetworkState, Metrics]:
        # The state needs an optimizer for the policy too, though only the draft learns here.
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
        # Updates have collectives, so all processes must start at the same step.
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
        # Clocks differ, and saving is a collective: process 0 decides.
        if broadcast_flag(time.monotonic() - save_time >= save_interval):
            start_time = time.monotonic()
            save_in_process_0(file, (trained, np.int32(step + 1)))
            save_time = time.monotonic()
            # On a slow disk saving becomes rarer, so that it takes a tenth of the time at most.
            save_interval = max(KEEP_SECONDS, KEEP_COST * (save_time - start_time))
        progress.update(
            step + 1,
            loss=float(metrics["loss/draft"]),
            expected_acceptance_length=acceptance_length(metrics),
        )
        skipped = float(metrics["skipped_in_row/draft"])
        remedy = "Lower --offline.learning_rate. Intermediate results of this draft are discarded."
        optimizers.require_progress(
            skipped, "draft", f"step {step + 1} of its offline training", remedy
        )
    return trained.network


def _load_partial_together(file: Path, abstract: PyTree, progress: Progress) -> PyTree:
    """Loads a partial file in all processes.

    Arrays get the layout of `abstract`. Returns None if process 0 finds no valid file. A damaged
    file is removed.
    """
    # Process 0 goes first, as it may remove the file.
    saved_tree = load_partial(file, abstract, progress) if jax.process_index() == 0 else None
    if not broadcast_flag(saved_tree is not None):
        return None
    return load_tree(file, abstract) if saved_tree is None else saved_tree


def save_in_process_0(file: Path, tree: PyTree) -> None:
    """Writes a tree to a file in process 0. All processes must call it."""
    tree = gather_to_process_0(tree)
    if jax.process_index() == 0:
        save_tree(file, tree)


def micro_tokens(job: Job) -> int:
    """Returns the tokens per micro-batch for offline training.

    As many as in the run, but no more than a batch of `offline.rows` has on a data shard.
    """
    learner, length = job.step.learner, job.step.generator.row_length - 1
    token_count = job.config.offline.rows // meshes.row_shard_count(job.mesh) * length
    return max(length, min(meshes.round_to_tiles(job.mesh, token_count), learner.micro_tokens))


def acceptance_length(metrics: Metrics) -> float:
    """Computes the expected acceptance length from metrics."""
    depths = sum(name.startswith("draft/expected_acceptance_") for name in metrics)
    return acceptance_lengths(
        [float(metrics[f"draft/expected_acceptance_{depth}"]) for depth in range(1, depths + 1)]
    )[-1]


def acceptance_lengths(acceptance: list[float]) -> list[float]:
    """Computes the expected acceptance length by draft length.

    Drafts of lengths 1, 2, 3, ... keep 1 + a1, 1 + a1 + a1 a2, ... tokens, where depth k is
    accepted with probability ak = `acceptance[k - 1]`.
    """
    return (1 + np.cumsum(np.cumprod(acceptance))).tolist()


def measure_acceptance(
    job: Job, policy: Decoder, network: PyTree, held_out: list[TextRows]
) -> list[float]:
    """Measures the expected acceptance by depth.

    Returns the mean of sum_v min(target, draft) over the tokens to predict of `held_out`. A draft
    that is a small model has one depth.
    """
    training = job.config.draft_training
    # A draft unrolled for longer in training is measured to the same depth.
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
