"""A training run's checkpoint on the devices, answering one prompt at a time, round by round."""

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
from jaxspec.drafts.kinds import DraftKind, kind_of
from jaxspec.host.job import Job, make_job, start_jax, with_whole_pool
from jaxspec.host.programs import abstract, ahead, ahead_with, numbers, put
from jaxspec.host.workdir import BEST, CHECKPOINTS, CONFIG, saved_config, steps
from jaxspec.inputs.checked import prefix_errors, require
from jaxspec.inputs.streams import Stream
from jaxspec.models.lora import AdaptedDecoder, merge_lora
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.generator import Generator, rounding_key
from jaxspec.state import RUNNING, Prompts, Ready, TrainState
from jaxspec.step import Metrics, Step
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.files import expand_user_path
from jaxspec.tokens.tokenizer import Tokenizer

EXPECTED = (
    "give the folder of a training run (a workdir of jaxspec.train, with config.json and"
    " checkpoints/), RUN/checkpoints/NUMBER, or RUN/best where eval.keep_best has kept one"
)


class Run(NamedTuple):
    """A training run's checkpoint on disk."""

    folder: Path
    number: int
    config: ResolvedConfig
    kept: str = CHECKPOINTS
    """The folder in `folder` that has the checkpoint."""

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoint is."""
        return self.folder / self.kept


def find_run(path: str) -> Run:
    """Looks a checkpoint up: the one named, or a run's newest.

    Raises:
      ConfigError: there is no run, or no checkpoint in it.
    """
    named = expand_user_path(path, "--checkpoint")
    chosen = (
        named.parent.name in (CHECKPOINTS, BEST) and named.name.isascii() and named.name.isdecimal()
    )
    kept = named.parent.name if chosen else BEST if named.name == BEST else CHECKPOINTS
    folder = named.parent.parent if chosen else named.parent if kept == BEST else named
    file = folder / CONFIG
    require(folder.is_dir(), f"--checkpoint {path}: no such folder; {EXPECTED}")
    require(file.is_file(), f"--checkpoint {path}: {folder} has no config.json; {EXPECTED}")
    saved = saved_config(folder, EXPECTED)
    require(
        "rollout" in saved, f"--checkpoint {path}: {file} is not that of a training run; {EXPECTED}"
    )
    found = steps(folder, kept)
    first = f"the first is saved after {saved.get('save_every')} batches (--save_every)"
    if kept == BEST:
        first = "the run keeps one if --eval.keep_best names a metric of its evaluations"
    require(bool(found), f"{folder / kept} has no checkpoint yet; {first}")
    number = int(named.name) if chosen else found[-1]
    require(
        number in found,
        f"{folder / kept} has no checkpoint {number}; it has {', '.join(map(str, found))}",
    )
    with prefix_errors(str(file)):
        # nothing is learnt from it, and a loss of the user's own may not be here
        config = replace(from_json(saved), loss=LossConfig())
        return Run(folder, number, config, kept)


def check_tokenizer(trained: str, wanted: str) -> None:
    """Whether a tokenizer's folder can be that of a run, which was told `trained`.

    Raises:
      ConfigError: only one of them is the built-in tokenizer, or there is no such folder.
    """
    differs = (
        f"--tokenizer {wanted!r}: the run was trained with {trained or 'the built-in characters'};"
        " leave it out"
    )
    require(bool(wanted) == bool(trained), differs)
    file = Path(wanted, "tokenizer.json").absolute()
    require(
        not wanted or file.is_file(),
        f"the run's tokenizer is not at {file}; name its folder with --tokenizer",
    )


def check_weights(trained: DraftConfig, wanted: DraftConfig) -> None:
    """Whether a run has weights for a draft that is wanted of it.

    Raises:
      ConfigError: it has none, or of another form.
    """
    unlearned = [name for name in get_args(DraftKind) if kind_of(name).learned is None]
    unlearned.sort(key=lambda name: name != "none")
    names = [*([trained.kind] if trained.is_learned else []), *unlearned]
    possible = f"{', '.join(names[:-1])} and {names[-1]}"
    has = (
        f"the run's draft is {trained.kind}, so there are no weights for --rollout.draft.kind"
        f" {wanted.kind}; possible are {possible}"
    )
    require(not wanted.is_learned or wanted.kind == trained.kind, has)
    for name in (
        ("vocab", "ffn", "layers", "embedding_first", "path", "tap_convention")
        if wanted.is_learned
        else ()
    ):
        was, now = getattr(trained, name), getattr(wanted, name)
        require(
            was == now,
            f"--rollout.draft.{name} {now}: the run's draft was trained with {was!r}; leave it out",
        )


def open_here(config: ResolvedConfig) -> Job:
    """The job on one data shard: all threads of a CPU, or as many devices as `mesh.tensor` says,
    for a few rows."""
    start_jax(config, config.mesh.tensor)
    tensor = config.mesh.tensor if config.mesh.tensor <= meshes.count_devices() else 1
    config = replace(with_whole_pool(config), mesh=MeshConfig(data=1, tensor=tensor))
    return make_job(config, meshes.make_mesh(*check_config(config, devices=tensor)))


def restore(run: Run, job: Job, samples: int) -> Ready:
    """Policy and draft in the rollout layout, to answer one prompt `samples` times.

    The draft temperatures are those that the run has tuned; where the job drafts deeper, at factor
    1 from there on.
    """
    bare, trained = restored(run, job)
    generator = job.step.generator.with_(prompts=1, group_size=samples)
    measured = measured_factors(bare.generator.overlap_by_factor, generator, trained.settings.grid)
    state = bare.replace(generator=bare.generator.replace(overlap_by_factor=measured))
    return jax.jit(replace(job.step, generator=generator).sync)(state)


def restored(run: Run, job: Job) -> tuple[TrainState, Generator]:
    """The run's state on the job's mesh, as `read_state` does, with the draft if the job's drafts
    by weights; and the run's own generator.

    Adapters are merged as the run merges them to generate.
    """
    own = replace(run.config, mesh=job.config.mesh)
    stop = job.step.generator.settings.stop
    trained = build_step(own, job.mesh, job.tokenizer.stop_ids, job.tokenizer.size, stop)
    state = read_state(run, trained, job.config.rollout.draft.is_learned)
    learner, policy = state.learner, state.learner.policy
    if isinstance(policy.network, AdaptedDecoder):
        # rounded by the run's own seed, which need not be that of the job
        network = jax.jit(merge_lora)(policy.network, rounding_key(own.seed, learner.version))
        learner = learner.replace(policy=policy.replace(network=network))
    return state.replace(learner=learner), trained.generator


def read_state(run: Run, step: Step, with_draft: bool) -> TrainState:
    """The run's state on the mesh of `step`, which has the run's config, without the optimizers;
    the draft only where it is wanted."""
    state, _, _ = abstract(step, run.config.batch.prompts)
    learner = state.learner
    draft = learner.draft.replace(optimizer=None) if learner.draft and with_draft else None
    policy = learner.policy.replace(optimizer=None)
    bare = state.replace(learner=learner.replace(policy=policy, draft=draft, reference=None))
    with contextlib.closing(Checkpoints(run.checkpoints, read_only=True)) as checkpoints:
        bare, _ = checkpoints.restore(run.number, (bare, None), partial=True).arrays
    return bare


def measured_factors(
    trained: Float[Array, "K F"], generator: Generator, grid: tuple[float, ...]
) -> Float[Array, "K2 F2"]:
    """What a run has measured of the draft temperatures on a `grid` of factors, for as many depths
    as a generator drafts; nothing, if that has another grid."""
    length = generator.draft_length
    if generator.settings.grid != grid:
        return draft_temperature.start(length, generator.settings.grid)
    return jnp.pad(trained, [(0, max(0, length - len(trained))), (0, 0)])[:length]


class Piece(NamedTuple):
    """What one round gave to a row."""

    tokens: list[int]
    accepted: int
    """How many of them, from the first on, were drafted."""


class Answer(NamedTuple):
    """All rows of a prompt, when they have ended."""

    metrics: dict[str, float]
    """As in training."""
    status: list[int]
    seconds: float


class LoadedRun:
    """A checkpoint on the devices, and its compiled calls: one prompt at a time, round by round."""

    def __init__(self, job: Job, ready: Ready, samples: int) -> None:
        # A group of one is no group to learn from, so the config cannot say it. Rounds come one at
        # a time, all alike.
        generator = job.step.generator.with_(prompts=1, group_size=samples, tail=(), lengths=())

        def one_round(ready: Ready, running: DecodeState) -> DecodeState:
            return generator.advance(ready, running, jnp.int32(1))

        def measure(running: DecodeState, ready: Ready) -> Metrics:
            return generator.measure(generator.collect(ready, running), ready)

        self.job, self._ready, self._answered = job, ready, 0
        _, _, self._like = abstract(replace(job.step, generator=generator), 1)
        self._begin, running = ahead_with(generator, generator.begin, ready, self._like)
        same = jax.tree.map(lambda leaf: leaf.sharding, running)
        self._advance, _ = ahead_with(
            generator, one_round, ready, running, donate_argnums=1, out_shardings=same
        )
        self._measure, _ = ahead(measure, running, ready)
        idle = put(
            jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._like), self._like
        )
        # a program's first call is slower than the others
        self._advance(ready, self._begin(ready, idle))

    def rounds(self, problem: Problem) -> Iterator[list[Piece] | Answer]:
        """Yields what each round gives to every row, then the answer as a whole."""
        began, seconds = time.perf_counter(), 0.0
        running = self._begin(self._ready, self._prompts(problem))
        ends, accepted, status = np.full(1, len(problem.ids)), np.zeros(1, int), np.full(1, RUNNING)
        while np.any(status == RUNNING):
            running = self._advance(self._ready, running)
            rollout = jax.device_get(running.rollout)
            starts, before = np.broadcast_to(ends, rollout.lengths.shape), accepted
            ends = rollout.lengths
            accepted = rollout.statistics.accepted.sum(axis=1)
            status = rollout.status
            seconds += time.perf_counter() - began
            rows = zip(
                rollout.tokens,
                starts,
                ends,
                np.broadcast_to(accepted - before, ends.shape),
                strict=True,
            )
            yield [Piece(row[start:end].tolist(), int(count)) for row, start, end, count in rows]
            began = time.perf_counter()
        yield Answer(numbers(self._measure(running, self._ready)), status.tolist(), seconds)

    def _prompts(self, problem: Problem) -> Prompts:
        tokens, lengths = pad_prompts(
            [problem], self._like.tokens.shape[1], self.job.tokenizer.pad_id
        )
        number, self._answered = self._answered, self._answered + 1
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._like)
        asked = nothing.replace(
            tokens=tokens,
            lengths=lengths,
            live=np.ones(1, bool),
            stream=np.int32(Stream.SAMPLE),
            batch=np.int32(number),
        )
        return put(asked, self._like)


def read_prompt(text: str, config: ResolvedConfig, tokenizer: Tokenizer) -> Problem:
    """Renders a prompt as training did; of a mixture, as its first set.

    Raises:
      ConfigError: characters that the tokenizer lacks, or more tokens than `max_prompt_length`.
    """
    data = config.training_sets[0].data
    asked = f"{text}\n{data.instruction}" if data.path and data.instruction else text
    unknown = "" if config.data.tokenizer else tokenizer.unknown_characters(asked)
    require(
        not unknown,
        f"the run's built-in tokenizer lacks {unknown[:20]!r}; its prompts look like 27+85=",
    )
    prompt = tokenizer.render_prompt(asked)
    ids, limit = tuple(tokenizer.encode(prompt)), config.data.max_prompt_length
    require(
        len(ids) <= limit,
        f"the prompt takes {len(ids)} tokens, and the limit is {limit}; shorten it, or set"
        f" --max_prompt_length {len(ids)}",
    )
    return Problem(prompt, ids, "", 0)
