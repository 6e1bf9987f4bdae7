"""Checkpoints of runs, loaded to answer prompts round by round."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec import mesh as meshes
from jaxspec.build import build_step
from jaxspec.config.as_json import from_json
from jaxspec.config.check import check_config
from jaxspec.config.settings import DraftConfig, LossConfig, MeshConfig, ResolvedConfig
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import pad_prompts
from jaxspec.drafts import draft_temperature
from jaxspec.drafts.kinds import SECTIONS, DraftKind, get_kind
from jaxspec.host.job import Job, configure_jax, make_job, with_full_pool
from jaxspec.host.programs import SlicedAnswerer, abstract_arguments, compile_ahead, put_like
from jaxspec.host.starts import BEST, CHECKPOINTS, CONFIG, list_checkpoints
from jaxspec.host.workdir import read_saved_config
from jaxspec.inputs.checked import prefix_errors, require
from jaxspec.inputs.streams import Stream
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.models.lora import AdaptedDecoder, merge_lora
from jaxspec.processes.devices import count_devices
from jaxspec.rollout.generator import Generator
from jaxspec.state import (
    RUNNING,
    AbsentNetwork,
    NetworkState,
    Prompts,
    RolloutWeights,
    TrainState,
)
from jaxspec.step import Step
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.files import expand_user_path
from jaxspec.tokens.tokenizer import Tokenizer
from jaxspec.transfer import rounding_key

EXPECTED_FOLDER = (
    "give the folder of a training run (a workdir of jaxspec.train, with config.json and"
    " checkpoints/), RUN/checkpoints/NUMBER, or RUN/best where eval.keep_best has kept one"
)


class SavedRun(NamedTuple):
    """A training run's checkpoint on disk."""

    folder: Path
    """Folder of the run."""
    number: int
    """Number of the checkpoint."""
    config: ResolvedConfig
    subfolder: str = CHECKPOINTS
    """Folder within `folder` that contains the checkpoint."""

    @property
    def checkpoints(self) -> Path:
        """Folder that contains the checkpoint."""
        return self.folder / self.subfolder


def find_run(path: str) -> SavedRun:
    """Finds a run and one of its checkpoints.

    `path` names a checkpoint, the run's folder `best`, or the run. The latter two stand for their
    newest checkpoint.

    Raises:
      ConfigError: There is no run at the path, its config cannot be read, or it has no such
        checkpoint.
    """
    named = expand_user_path(path, "--checkpoint")
    names_number = (
        named.parent.name in (CHECKPOINTS, BEST) and named.name.isascii() and named.name.isdecimal()
    )
    subfolder = named.parent.name if names_number else BEST if named.name == BEST else CHECKPOINTS
    folder = named.parent.parent if names_number else named.parent if subfolder == BEST else named
    file = folder / CONFIG
    require(folder.is_dir(), f"--checkpoint {path}: no such folder; {EXPECTED_FOLDER}")
    require(file.is_file(), f"--checkpoint {path}: {folder} has no config.json; {EXPECTED_FOLDER}")
    saved = read_saved_config(folder, EXPECTED_FOLDER)
    require(
        "rollout" in saved,
        f"--checkpoint {path}: {file} is not that of a training run; {EXPECTED_FOLDER}",
    )
    numbers = list_checkpoints(folder, subfolder)
    remedy = f"the first is saved after {saved.get('save_every')} batches (--save_every)"
    if subfolder == BEST:
        remedy = "the run keeps one if --eval.keep_best names a metric of its evaluations"
    require(bool(numbers), f"{folder / subfolder} has no checkpoint yet; {remedy}")
    number = int(named.name) if names_number else numbers[-1]
    require(
        number in numbers,
        f"{folder / subfolder} has no checkpoint {number}; it has {', '.join(map(str, numbers))}",
    )
    with prefix_errors(str(file)):
        # The loss is not needed to generate, and a user's own loss may not be installed here.
        config = replace(from_json(saved), loss=LossConfig())
        return SavedRun(folder, number, config, subfolder)


def check_tokenizer(trained_folder: str, requested_folder: str) -> None:
    """Checks that a tokenizer can replace the run's own.

    Raises:
      ConfigError: Only one of the two is the built-in tokenizer, or the folder has no tokenizer.
    """
    # The folder may have moved since, so the paths need not be equal.
    differs = (
        f"--tokenizer {requested_folder!r}: the run was trained with"
        f" {trained_folder or 'the built-in characters'}; leave it out"
    )
    require(bool(requested_folder) == bool(trained_folder), differs)
    file = Path(requested_folder, "tokenizer.json").absolute()
    require(
        not requested_folder or file.is_file(),
        f"the run's tokenizer is not at {file}; name its folder with --tokenizer",
    )


def check_draft_weights(trained: DraftConfig, requested: DraftConfig) -> None:
    """Checks that a run has the requested draft.

    Raises:
      ConfigError: The run has no weights for that kind, or weights of another form.
    """
    unlearned = [name for name in get_args(DraftKind) if get_kind(name).learned is None]
    unlearned.sort(key=lambda name: name != "none")
    names = [*([trained.kind] if trained.is_learned else []), *unlearned]
    possible_kinds = f"{', '.join(names[:-1])} and {names[-1]}"
    mismatch = (
        f"the run's draft is {trained.kind}, so there are no weights for --rollout.draft.kind"
        f" {requested.kind}; possible are {possible_kinds}"
    )
    require(not requested.is_learned or requested.kind == trained.kind, mismatch)
    if not requested.is_learned:
        return
    # A draft with another value of these would need other weights.
    values = {"path": (trained.path, requested.path)}
    if requested.kind in SECTIONS:
        trained_section, section = (getattr(each, requested.kind) for each in (trained, requested))
        values |= {
            f"{requested.kind}.{name}": (getattr(trained_section, name), value)
            for name, value in vars(section).items()
        }
    for name, (trained_value, requested_value) in values.items():
        require(
            trained_value == requested_value,
            f"--rollout.draft.{name} {requested_value}: the run's draft was trained with"
            f" {trained_value!r}; leave it out",
        )


def open_single_shard(config: ResolvedConfig) -> Job:
    """Opens a job with a single data shard.

    The shard has `mesh.tensor` devices, or one if this machine has fewer. A single CPU device uses
    all threads.
    """
    configure_jax(config, config.mesh.tensor)
    # The run may have had more devices than this machine.
    tensor = config.mesh.tensor if config.mesh.tensor <= count_devices() else 1
    config = replace(with_full_pool(config), mesh=MeshConfig(data=1, tensor=tensor))
    return make_job(config, meshes.make_mesh(*check_config(config, devices=tensor)))


def restore_weights(
    run: SavedRun, config: ResolvedConfig, step: Step, samples: int
) -> RolloutWeights:
    """Restores policy and draft in the rollout layout.

    A prompt is answered `samples` times. Draft temperatures are those tuned by the run. Depths
    beyond the run's own use the factor nearest to 1.
    """
    bare, trained = restore_merged_state(run, config, step)
    generator = step.generator.make_variant(prompts=1, group_size=samples)
    overlap = resize_overlap(bare.generator.overlap_by_factor, generator, trained.settings.grid)
    state = bare.replace(generator=bare.generator.replace(overlap_by_factor=overlap))
    return jax.jit(replace(step, generator=generator).sync)(state)


def restore_merged_state(
    run: SavedRun, config: ResolvedConfig, step: Step
) -> tuple[TrainState, Generator]:
    """Restores the run's state on the mesh of `step`.

    Adapters are merged into the policy. Includes the draft if `config`, which `step` was built
    from, uses a learned one. Also returns the run's own generator.
    """
    # Checkpoints have the shapes of the run's config, but shardings of the mesh that is here.
    run_config = replace(run.config, mesh=config.mesh)
    settings, mesh = step.generator.settings, step.learner.mesh
    stop_ids, vocab_size = settings.processing.stop_ids, settings.processing.vocab_size
    run_step = build_step(run_config, mesh, stop_ids, vocab_size, settings.stop)
    state = read_state(run, run_step, config.rollout.draft.is_learned)
    learner, policy = state.learner, state.learner.policy
    if isinstance(policy.network, AdaptedDecoder):
        # The merged weights are rounded by the run's seed, so that they equal those that the run
        # sampled with. `config` may have another seed.
        network = jax.jit(merge_lora)(
            policy.network, rounding_key(run_config.seed, learner.version)
        )
        learner = learner.replace(policy=policy.replace(network=network))
    return state.replace(learner=learner), run_step.generator


def read_state(run: SavedRun, step: Step, with_draft: bool) -> TrainState:
    """Reads the run's state without optimizer states and reference policy.

    The result is on the mesh of `step`, which must be built from the run's config. The draft is
    read only if `with_draft` is set.
    """
    state, _, _ = abstract_arguments(step, run.config.batch.prompts)
    learner = state.learner
    # Leaves that are None here are not read: moments alone can be twice the size of the weights.
    draft = AbsentNetwork()
    if with_draft and isinstance(learner.draft, NetworkState):
        draft = learner.draft.replace(optimizer=None)
    policy = learner.policy.replace(optimizer=None)
    bare = state.replace(learner=learner.replace(policy=policy, draft=draft, reference=None))
    with contextlib.closing(Checkpoints(run.checkpoints, read_only=True)) as checkpoints:
        bare, _ = checkpoints.restore(run.number, (bare, None), partial=True).arrays
    return bare


def resize_overlap(
    overlap: Float[Array, "K F"], generator: Generator, grid: tuple[float, ...]
) -> Float[Array, "K2 F2"]:
    """Resizes a run's overlap table to a generator.

    The table has a row for each depth and a column for each factor of the temperature. `grid` has
    the temperature factors of the run. If the generator's grid differs, the result is as for a new
    run.
    """
    length = generator.draft_length
    # Columns belong to factors, so a table of another grid cannot be used.
    if generator.settings.grid != grid:
        return draft_temperature.init_overlap(length, generator.settings.grid)
    return jnp.pad(overlap, [(0, max(0, length - len(overlap))), (0, 0)])[:length]


class RoundTokens(NamedTuple):
    """Tokens of one row from one round."""

    tokens: list[int]
    accepted: int
    """Number of leading tokens that came from the draft."""


class PromptAnswer(NamedTuple):
    """Summary of the finished rows of a prompt."""

    metrics: dict[str, float]
    """Generation metrics, as in training."""
    status: list[int]
    """Final status of each row."""
    seconds: float
    """Time of generation, without the time that the caller takes between rounds."""


class LoadedRun:
    """A checkpoint on the devices, ready to answer prompts."""

    def __init__(self, step: Step, pad_id: int, weights: RolloutWeights, samples: int) -> None:
        # The group size is set here, since a config with a baseline refuses a group size of 1.
        # Loops with fewer slots and a choice of draft lengths are off, as a caller advances single
        # rounds.
        generator = step.generator.make_variant(prompts=1, group_size=samples, tail=(), lengths=())

        self._pad_id, self._weights, self._prompt_count = pad_id, weights, 0
        _, _, self._layout = abstract_arguments(replace(step, generator=generator), 1)
        self._answerer = SlicedAnswerer(generator, weights, self._layout)
        shapes = self._answerer.decode_state.rollout
        self._measure, _ = compile_ahead(generator.measure_rollout, shapes, weights)
        idle_prompts = put_like(
            jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._layout), self._layout
        )
        # Warms up the programs, whose first calls are slower.
        self._answerer(weights, idle_prompts)

    def generate_rounds(self, problem: Problem) -> Iterator[list[RoundTokens] | PromptAnswer]:
        """Yields each round's tokens of all rows, then a summary."""
        start_time, seconds = time.perf_counter(), 0.0
        decode_state = self._answerer.begin(self._weights, self._place_prompt(problem))
        lengths, accepted, status = (
            np.full(1, len(problem.ids)),
            np.zeros(1, int),
            np.full(1, RUNNING),
        )
        # Until the first round returns all rows, one element stands for all of them.
        while np.any(status == RUNNING):
            decode_state = self._answerer.advance(self._weights, decode_state, np.int32(1))
            rollout = jax.device_get(decode_state.rollout)
            previous_lengths, previous_accepted = (
                np.broadcast_to(lengths, rollout.lengths.shape),
                accepted,
            )
            lengths = rollout.lengths
            accepted = rollout.statistics.accepted.sum(axis=1)
            status = rollout.status
            seconds += time.perf_counter() - start_time
            rows = zip(
                rollout.tokens,
                previous_lengths,
                lengths,
                np.broadcast_to(accepted - previous_accepted, lengths.shape),
                strict=True,
            )
            yield [
                RoundTokens(row[first:stop].tolist(), int(count))
                for row, first, stop, count in rows
            ]
            # The clock restarts here, so that time spent by the caller is not counted.
            start_time = time.perf_counter()
        yield PromptAnswer(
            metrics_to_host(self._measure(decode_state.rollout, self._weights)),
            status.tolist(),
            seconds,
        )

    def _place_prompt(self, problem: Problem) -> Prompts:
        tokens, lengths = pad_prompts([problem], self._layout.tokens.shape[1], self._pad_id)
        # Noise depends on the batch number, so a repeated prompt gets new samples.
        number, self._prompt_count = self._prompt_count, self._prompt_count + 1
        empty_prompts = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._layout)
        prompts = empty_prompts.replace(
            tokens=tokens,
            lengths=lengths,
            live=np.ones(1, bool),
            stream=np.int32(Stream.SAMPLE),
            batch=np.int32(number),
        )
        return put_like(prompts, self._layout)


def encode_prompt(text: str, config: ResolvedConfig, tokenizer: Tokenizer) -> Problem:
    """Renders and encodes a prompt as in training.

    If the run was trained on a mixture, uses the first set's instruction.

    Raises:
      ConfigError: The tokenizer lacks some characters, or the prompt has more tokens than
        `max_prompt_length`.
    """
    data = config.training_sets[0].data
    question = f"{text}\n{data.instruction}" if data.path and data.instruction else text
    unknown_characters = "" if config.data.tokenizer else tokenizer.unknown_characters(question)
    require(
        not unknown_characters,
        f"the run's built-in tokenizer lacks {unknown_characters[:20]!r};"
        " its prompts look like 27+85=",
    )
    prompt = tokenizer.render_prompt(question)
    ids, limit = tuple(tokenizer.encode(prompt)), config.data.max_prompt_length
    require(
        len(ids) <= limit,
        f"the prompt takes {len(ids)} tokens, and the limit is {limit}; shorten it, or set"
        f" --max_prompt_length {len(ids)}",
    )
    return Problem(prompt, ids, "", 0)
