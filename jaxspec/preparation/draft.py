"""Trained draft of a run, with its cache."""

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxspec.config.settings import DataConfig, OfflineConfig, ResolvedConfig
from jaxspec.data.files import data_digest
from jaxspec.drafts.kinds import get_learned
from jaxspec.hf.pretrained import fingerprint_checkpoint
from jaxspec.host.programs import abstract_arguments
from jaxspec.models.decoder import Decoder
from jaxspec.preparation import draft_data
from jaxspec.preparation.draft_data import TextRows
from jaxspec.preparation.draft_training import (
    DraftTexts,
    acceptance_lengths,
    collect_responses,
    make_offline_learner,
    measure_acceptance,
    save_in_process_0,
    train_draft,
)
from jaxspec.preparation.policy import (
    RESUME_HINT,
    WEIGHTS,
    load_draft,
    load_policy,
    policy_key,
    report_agreement,
)
from jaxspec.rl import optimizers
from jaxspec.rl.learner import Learner
from jaxspec.sampling import Processing
from jaxspec.state import NetworkState, PyTree
from jaxspec.step import Step
from jaxspec.storage.cache import (
    cache_folder,
    content_key,
    get_or_build_together,
    read_sources,
)
from jaxspec.storage.trees import gather_to_process_0
from jaxspec.system.files import explain_write_errors, hash_file, remove_path, write_text_atomic
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.system.terminal import LinePrinter
from jaxspec.tokens.tokenizer import TOKENIZER_FILES, Tokenizer

ACCEPTANCE = "acceptance.json"
"""File with the draft's acceptance on held-out responses, in the folder of its weights."""
CODE_FILES = (
    *("preparation/draft.py", "preparation/draft_training.py", "preparation/draft_data.py"),
    "data/problem_source.py",
    *("data/messages.py", "data/json_lines.py", "data/problem_file.py", "data/problems.py"),
    *("tokens/stop_strings.py", "tokens/turns.py", "tokens/chat_template.py"),
    "tokens/template_process.py",
    *("build.py", "step.py", "transfer.py", "inputs/streams.py", "sampling.py"),
    *("hf/*.py", "drafts/*.py", "rollout/**/*.py", "rl/*.py", "kernels/*.py"),
)
"""Source files that a draft depends on, in addition to those of the policy."""


def build_draft(
    config: ResolvedConfig,
    step: Step,
    tokenizer: Tokenizer,
    text: TextRows | None,
    partial_folder: Path,
    folder: Path,
    interrupt: Interrupt,
    say: LinePrinter,
) -> None:
    """Trains a draft, and writes its weights and acceptance to `folder`.

    Trains on `text`, or on responses of the policy if it is None. Intermediate results are saved in
    `partial_folder`, from which an interrupted build resumes. All processes must call it, and
    process 0 writes.
    """
    start_time = time.perf_counter()
    if jax.process_index() == 0:
        _make_partial_folder(partial_folder)
    abstract_draft = abstract_arguments(step, config.batch.prompts)[0].learner.draft
    assert isinstance(abstract_draft, NetworkState), "build is only called for a draft with weights"
    # The draft is read first: it is small, and its errors should not wait for the policy.
    loaded_draft = load_draft(config, abstract_draft.network, say)
    policy = load_policy(config, step, tokenizer, interrupt, say)
    if loaded_draft is not None:
        report_agreement(config, step.generator, tokenizer, policy, loaded_draft, say)
    make_responder = partial(draft_data.make_responder, config, step.generator, tokenizer, policy)
    abstract_batch = draft_data.abstract_responses(config, step.generator.mesh)
    rows, held_out = _collect_rows(
        config.offline,
        text,
        partial(collect_responses, make_responder, abstract_batch, folder=partial_folder),
        interrupt,
        say,
    )
    texts = _add_policy_states(config, step.learner, policy, rows, interrupt)
    with (
        Progress("draft", config.offline.steps, jax.process_index()) as progress,
        interrupt.exit_on_signal("training the draft", progress.stop, consequence=RESUME_HINT),
    ):
        network = train_draft(config, step, policy, texts, partial_folder, progress, loaded_draft)
    outcome = _describe_draft(config, network, held_out)
    with interrupt.exit_on_signal("measuring the draft", consequence=RESUME_HINT):
        batches = draft_data.batch_rows(held_out, config.offline.rows)
        outcome["acceptance"] = measure_acceptance(config, step.learner, policy, network, batches)
        save_in_process_0(folder / WEIGHTS, network)
        if jax.process_index() == 0:
            write_text_atomic(folder / ACCEPTANCE, json.dumps(outcome) + "\n")
    lengths = acceptance_lengths(outcome["acceptance"][: config.rollout.draft.max_draft_length])
    outcome_text = (
        f"rounds of {len(lengths)} draft{'s' * (len(lengths) > 1)} would keep"
        f" {lengths[-1]:.2f} tokens on held-out responses"
    )
    say(f"the draft took {time.perf_counter() - start_time:.0f} s; {outcome_text}")


def _make_partial_folder(folder: Path) -> None:
    """Creates the folder of intermediate results."""
    with explain_write_errors(
        f"{folder} cannot be made", "free some space or name another folder with JAXSPEC_CACHE"
    ):
        # A file of that name would make mkdir fail.
        if not folder.is_dir():
            remove_path(folder)
        folder.mkdir(exist_ok=True)


def _collect_rows(
    offline: OfflineConfig,
    text: TextRows | None,
    collect: Callable[..., dict[int, TextRows]],
    interrupt: Interrupt,
    say: LinePrinter,
) -> tuple[TextRows, TextRows]:
    """Collects rows to train on, and held-out ones to measure on."""
    training_numbers, held_out_numbers = draft_data.hold_out_batches(offline)
    # Even a draft trained on a text is measured on responses, as it is used on them.
    numbers = [*(() if text else training_numbers), *held_out_numbers]
    sampled_count = len(numbers) * offline.rows
    with (
        Progress("sampling", sampled_count, jax.process_index()) as progress,
        interrupt.exit_on_signal("sampling", progress.stop, consequence=RESUME_HINT),
    ):
        batches = collect(numbers=numbers, progress=progress)
    rows = text or draft_data.select_usable_rows([batches[number] for number in training_numbers])
    held_out = draft_data.select_usable_rows([batches[n] for n in held_out_numbers])
    usable_count = len(held_out.tokens) + (0 if text else len(rows.tokens))
    if usable_count < sampled_count:
        say(
            f"{sampled_count - usable_count} of {sampled_count} responses failed (logits that are"
            " not finite) and are left out"
        )
    return rows, held_out


def _add_policy_states(
    config: ResolvedConfig,
    learner: Learner,
    policy: Decoder,
    rows: TextRows,
    interrupt: Interrupt,
) -> DraftTexts:
    """Adds the policy's states to rows, if they are worth keeping."""
    # The policy stays fixed, so its states can be computed once instead of in every update.
    if not draft_data.should_keep_states(config, learner, rows):
        return DraftTexts(rows)
    with (
        Progress("reading", len(rows.tokens), jax.process_index()) as progress,
        interrupt.exit_on_signal("reading the responses", progress.stop, consequence=RESUME_HINT),
    ):
        reader = make_offline_learner(config, learner)
        states = draft_data.compute_states(reader, policy, rows, config.offline.rows, progress)
    return DraftTexts(rows, states)


def _describe_draft(config: ResolvedConfig, network: PyTree, held_out: TextRows) -> dict[str, Any]:
    """Describes a trained draft: its kind, vocabulary, and the texts that it is measured on.

    The record is complete in process 0 only, which has the vocabulary.
    """
    draft = config.rollout.draft
    description: dict[str, Any] = {
        "kind": draft.kind,
        "responses": len(held_out.tokens),
        "vocabulary": None,
        "coverage": None,
    }
    if config.draft_spec.vocab:
        # Gathering is a collective, so all processes call it.
        ids = gather_to_process_0(get_learned(draft.kind).unroll.vocabulary(network))
        if jax.process_index() == 0:
            coverage = draft_data.coverage(held_out, ids)
            description |= {"vocabulary": len(ids), "coverage": coverage}
    return description


def get_or_train_draft(
    config: ResolvedConfig,
    step: Step,
    tokenizer: Tokenizer,
    text: TextRows | None,
    interrupt: Interrupt,
    say: LinePrinter,
) -> Path:
    """Returns the weights' file, training the draft if needed.

    A draft in the cache is not trained again. All processes must call it. `text` is the result of
    `draft_data.read_training_text`.

    Raises:
      ConfigError: The cache cannot be written, or is not shared with process 0.
      Diverged: Training diverged. Nothing is cached.
    """
    offline, kind = config.offline, config.rollout.draft.kind
    key = _draft_key(config, step.learner.processing, text)
    partial_folder = cache_folder() / f"{key}.partial"
    source = (
        f"{len(text.tokens)} rows of {offline.text}" if text else f"{offline.samples} responses"
    )

    def remove_partial() -> None:
        if jax.process_index() == 0:
            shutil.rmtree(partial_folder, ignore_errors=True)

    def build_here(folder: Path) -> None:
        say(f"no draft in the cache: {offline.steps} steps of {kind} on {source}")
        try:
            build_draft(config, step, tokenizer, text, partial_folder, folder, interrupt, say)
        except optimizers.Diverged:
            # A retry would resume from the diverged weights.
            remove_partial()
            raise

    with interrupt.exit_on_signal("looking for the draft"):
        folder = get_or_build_together(key, build_here, say)
        # Only now: until the draft is in the cache, an interrupted build can resume.
        remove_partial()
    return folder / WEIGHTS


def _draft_key(config: ResolvedConfig, processing: Processing, text: TextRows | None) -> str:
    """Returns the cache key of the draft.

    It covers everything that affects the weights: policy, prompts, sampling, text, network,
    training settings and code.
    """
    folder = config.data.tokenizer
    tokenizer = _hash_files([Path(folder) / name for name in TOKENIZER_FILES] if folder else [])
    data = [(entry.weight, _replace_paths(entry.data, tokenizer)) for entry in config.training_sets]
    # Files count by content: moving one changes nothing, and editing one trains a new draft.
    offline = dataclasses.replace(
        config.offline,
        learning_rate=config.learning_rates.offline,
        text=hashlib.sha256(b"".join(leaf.tobytes() for leaf in text)).hexdigest() if text else "",
    )
    draft, training = config.rollout.draft, config.draft_training
    network = (
        draft.kind,
        config.rollout.settings_of(draft.kind),
        config.head,
        config.draft_model,
    )
    objective = training.loss, training.ttt_steps, training.decay, training.grad_clip
    code = read_sources(*CODE_FILES)
    rollout = config.rollout
    sampling = config.seed, rollout.max_new_tokens, rollout.stop, config.today, processing
    paths = config.model.path, config.lora.path, draft.path
    weights = [fingerprint_checkpoint(path) for path in paths if path]
    return content_key(
        "draft", policy_key(config), weights, sampling, data, offline, network, objective, code
    )


def _replace_paths(data: DataConfig, tokenizer: str) -> DataConfig:
    """Replaces the paths of training data and tokenizer by digests."""
    content = data_digest(data.path, "data.path") if data.path else ""
    return dataclasses.replace(data, path=content, tokenizer=tokenizer)


def _hash_files(files: list[Path]) -> str:
    """Joins the digests of some files."""
    return " ".join(map(hash_file, files))
