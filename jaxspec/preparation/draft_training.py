"""Offline training of a draft, before the run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxspec import mesh as meshes
from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.arithmetic import SftBatch
from jaxspec.drafts.kinds import get_learned
from jaxspec.host.programs import abstract_leaf
from jaxspec.metrics.batch import read_depths
from jaxspec.metrics.mean import Metrics, metrics_to_host
from jaxspec.models.decoder import Decoder
from jaxspec.preparation import draft_data
from jaxspec.preparation.draft_data import Responder, TextRows, rows_from_sft
from jaxspec.preparation.policy import SaveTimer, load_partial
from jaxspec.processes.process_0 import broadcast_flag, broadcast_number, require_shared_cache
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import DraftObjective
from jaxspec.rl.learner import Learner
from jaxspec.rl.objective import FrozenPolicy
from jaxspec.rl.train_batch import NO_STATES, NoStates, PolicyStates, TrainBatch, build_text_batch
from jaxspec.state import LearnerState, NetworkState, PyTree
from jaxspec.step import Step
from jaxspec.storage.cache import load_tree, save_tree
from jaxspec.storage.trees import gather_to_process_0
from jaxspec.system.progress import Progress

MIN_DEPTHS = 8
"""Minimum number of depths to measure. Runs with other draft lengths then reuse the cache."""


class DraftTexts(NamedTuple):
    """Texts to train a draft on."""

    rows: TextRows
    states: PolicyStates | NoStates = NO_STATES
    """States of the policy at the rows, if they are stored."""


def collect_responses(
    open_responder: Callable[[], Responder],
    abstract_batch: SftBatch,
    numbers: list[int],
    folder: Path,
    progress: Progress,
) -> dict[int, TextRows]:
    """Samples batches of responses, by number.

    Each batch is saved in `folder` as soon as it is sampled. Batches that are already there are
    read. A batch has the shapes of `abstract_batch`.
    """
    # Training on responses in the run's own domain raises acceptance more than any setting.
    respond: Responder | None = None
    batches = {}
    for batch_count, number in enumerate(numbers, start=1):
        file = folder / f"responses-{number}.npz"
        batch = _load_partial_together(file, abstract_batch, progress)
        if batch is None:
            # Compiled only if a batch is missing.
            respond = respond or open_responder()
            batch = respond(number)
            save_in_process_0(file, batch)
        batches[number] = rows_from_sft(jax.device_get(batch))
        progress.update(batch_count * len(abstract_batch.tokens))
    return batches


def make_offline_learner(config: ResolvedConfig, learner: Learner) -> Learner:
    """Returns a learner for offline training.

    Micro-batches have as many tokens as in the run, but no more than a batch of `offline.rows` has
    on a data shard. They have room for the longest row.
    """
    offline, length = config.offline, config.row_length - 1
    token_count = offline.rows // meshes.row_shard_count(learner.mesh) * length
    micro_tokens = min(meshes.round_to_tiles(learner.mesh, token_count), learner.micro_tokens)
    optimizer = optimizers.adamw(
        optimizers.cosine_schedule(config.learning_rates.offline, offline.steps),
        config.draft_training.grad_clip,
    )
    return learner.for_supervised_texts(
        FrozenPolicy(), draft_optimizer=optimizer, micro_tokens=max(length, micro_tokens)
    )


def train_draft(
    config: ResolvedConfig,
    step: Step,
    policy: Decoder,
    texts: DraftTexts,
    folder: Path,
    progress: Progress,
    loaded_draft: PyTree = None,
) -> PyTree:
    """Trains a draft and returns its weights.

    Runs `offline.steps` updates, from the weights of `loaded_draft` or from random ones. Progress
    is saved in `folder` now and then. A later call resumes from there, and ends with bitwise equal
    weights.

    Raises:
      ConfigError: The cache is not shared with process 0.
      Diverged: Too many updates in a row were skipped.
    """
    offline, file = config.offline, folder / "learner.npz"
    learner = make_offline_learner(config, step.learner)

    def start_draft() -> tuple[NetworkState, Array]:
        state = optimizers.init_state(step.init_draft(), learner.draft_optimizer)
        return state, jnp.zeros((), jnp.int32)

    shapes, replicated = jax.eval_shape(start_draft), meshes.replicated_sharding(learner.mesh)
    layout = learner.train_layout(shapes[0]), replicated
    saved = _load_partial_together(file, jax.tree.map(abstract_leaf, shapes, layout), progress)
    if saved is not None:
        trained, start_step = saved
        # Updates have collectives, so all processes must start at the same step.
        require_shared_cache(broadcast_number(int(start_step)) == int(start_step), file)
        progress.print_line(f"going on at step {int(start_step)} of {offline.steps}")
    else:
        trained, start_step = jax.jit(start_draft, out_shardings=layout)()
        stop_ids = step.generator.settings.processing.stop_ids
        network = loaded_draft
        if network is None:
            network = _with_vocabulary(config, stop_ids, texts.rows, trained.network)
        trained = trained.replace(network=network)
    update = jax.jit(_make_update(learner), donate_argnums=0, out_shardings=layout)
    timer = SaveTimer()
    for number in range(int(start_step), offline.steps):
        rows, states = draft_data.select_batch(texts, number, offline.rows, config.seed)
        batch = build_text_batch(rows.tokens, rows.mask, learner.mesh, learner.micro_tokens, states)
        trained, metrics = update(trained, policy, batch)
        # Clocks differ, and saving is a collective: process 0 decides.
        if broadcast_flag(timer.is_due()):
            timer.time_save(partial(save_in_process_0, file, (trained, np.int32(number + 1))))
        _report_update(progress, number + 1, metrics_to_host(metrics))
    return trained.network


def _with_vocabulary(
    config: ResolvedConfig, stop_ids: tuple[int, ...], rows: TextRows, network: PyTree
) -> PyTree:
    """Gives a draft the vocabulary of `rows`, if it has one of its own."""
    draft_vocab = config.draft_spec.vocab
    if not draft_vocab:
        return network
    ids = draft_data.select_vocabulary(rows, draft_vocab, config.model.vocab, stop_ids)
    with_vocabulary = get_learned(config.rollout.draft.kind).with_vocabulary
    assert with_vocabulary is not None, "only such kinds are given a vocabulary"
    return with_vocabulary(network, ids)


def _make_update(
    learner: Learner,
) -> Callable[[NetworkState, Decoder, TrainBatch], tuple[NetworkState, Metrics]]:
    """Returns a function that updates a draft on a batch, next to a fixed policy."""

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
        assert isinstance(state.draft, NetworkState), "it was given"
        return state.draft, metrics

    return update


def _report_update(progress: Progress, number: int, metrics: Mapping[str, float]) -> None:
    """Shows the metrics of an update. Raises `Diverged` if too many in a row were skipped."""
    progress.update(
        number,
        loss=metrics.get("loss/draft", math.nan),
        expected_acceptance_length=acceptance_length(metrics),
    )
    skipped = metrics["skipped_in_row/draft"]
    remedy = "Lower --offline.learning_rate. Intermediate results of this draft are discarded."
    optimizers.require_progress(skipped, "draft", f"step {number} of its offline training", remedy)


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


def acceptance_length(metrics: Mapping[str, float]) -> float:
    """Computes the expected acceptance length from metrics. Without any of a draft, it is 1."""
    return [1.0, *acceptance_lengths(read_depths(metrics, "draft/expected_acceptance"))][-1]


def acceptance_lengths(acceptance: list[float]) -> list[float]:
    """Computes the expected acceptance length by draft length.

    Drafts of lengths 1, 2, 3, ... keep 1 + a1, 1 + a1 + a1 a2, ... tokens, where depth k is
    accepted with probability ak = `acceptance[k - 1]`.
    """
    return (1 + np.cumsum(np.cumprod(acceptance))).tolist()


def measure_acceptance(
    config: ResolvedConfig,
    learner: Learner,
    policy: Decoder,
    network: PyTree,
    held_out: list[TextRows],
) -> list[float]:
    """Measures the expected acceptance by depth.

    Returns the mean of sum_v min(target, draft) over the tokens to predict of `held_out`. A draft
    that is a small model has one depth.
    """
    # Every depth that is trained, and every depth that the run drafts, is measured.
    depths = max(MIN_DEPTHS, config.draft_training.ttt_steps, config.rollout.draft.max_draft_length)
    objective = learner.draft_objective
    assert isinstance(objective, DraftObjective), "only a draft with weights is measured"
    learner = replace(
        make_offline_learner(config, learner), draft_objective=objective._replace(steps=depths)
    )
    replicated = meshes.replicated_sharding(learner.mesh)
    compare = jax.jit(learner.compare_draft, out_shardings=replicated)
    texts = (build_text_batch(*batch, learner.mesh, learner.micro_tokens) for batch in held_out)
    results = [jax.device_get(compare(policy, network, batch)) for batch in texts]
    sums, counts = (
        np.sum(totals, axis=0)
        for totals in zip(*((sums.acceptance, counts) for sums, counts in results), strict=True)
    )
    return (sums / np.maximum(counts, 1)).tolist()
