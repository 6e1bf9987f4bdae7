"""One step on one mesh: learn, sync, generate. The order is written once; who makes the calls
decides whether it is one program.

`train_step` is rotated by one: it learns from the previous call's rollouts, whose rewards the host
has attached, then loads the weights into the generator, then generates the next rollout. There are
no callbacks and no maths here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.config.settings import ResolvedConfig
from jaxspec.drafts.kinds import build_draft, build_network, check_fits, kind_of
from jaxspec.inputs.checked import require
from jaxspec.kernels.key_chunks import CHUNK
from jaxspec.kernels.order import after, computed, needed_on
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import Adapted
from jaxspec.models.weight_layout import WeightLayout, fastest
from jaxspec.rl import optimizers
from jaxspec.rl.advantages import group_advantages
from jaxspec.rl.draft_objective import LOSSES, Objective
from jaxspec.rl.learner import Learner, Metrics
from jaxspec.rl.logprobs import response_mask
from jaxspec.rl.losses import clipped_ratio
from jaxspec.rl.train_batch import TrainBatch, no_plan
from jaxspec.rollout import draft_temperature
from jaxspec.rollout.generator import Generator
from jaxspec.rollout.round import Settings
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.state import Finished, Prompts, PyTree, Ready, TrainState
from jaxspec.streams import Stream, stream_key

HOST = "pinned_host"
"""JAX's name for memory of the host from which a device reads by itself."""
Do = Callable[..., Any]
"""(phase, function, *arguments) -> what the function gives: how a phase is run."""


def at_once(phase: str, function: Callable, *arguments: Any) -> Any:
    """Runs a phase as part of whatever is being traced."""
    with jax.named_scope(phase):
        return function(*arguments)


class Sizes(NamedTuple):
    """What a step takes memory by, on each data shard: where it runs and how fast follows from
    these, not what it computes."""

    tokens: int
    """Of a micro-batch."""
    slots: int
    """Rows that are generated at once, at most."""
    page_size: int
    """Positions of a page; 0: a page is as long as a row."""
    pages: int
    """Of the pool; 0: as many as can be needed."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The two sides of a run on one mesh."""

    learner: Learner
    generator: Generator
    fresh_policy: Callable[[], Decoder]
    """Random weights; also, through `jax.eval_shape`, the shapes of a policy that is loaded."""
    kind: str
    """The draft's kind."""
    fresh_draft: Callable[[], PyTree]
    """Random weights of the draft, and its shapes likewise; None: it has nothing to learn."""
    adapt: Callable[[Decoder], Decoder | Adapted]
    """What is trained of a policy: itself, or adapters beside it."""
    online: bool
    """Whether the draft learns during the run."""

    @property
    def mesh(self) -> Mesh:
        """Of both sides."""
        return self.generator.mesh

    @property
    def sizes(self) -> "Sizes":
        """What it takes memory by."""
        settings = self.generator.settings
        return Sizes(self.learner.tokens, self.generator.slots, settings.page_size, settings.pages)

    def resized(self, prompts: int, sizes: "Sizes") -> "Step":
        """The same for so many prompts a call with other sizes."""
        generator = dataclasses.replace(self.generator, slots=sizes.slots)
        generator = generator.with_(prompts=prompts, page_size=sizes.page_size, pages=sizes.pages)
        return dataclasses.replace(
            self,
            learner=dataclasses.replace(self.learner, tokens=sizes.tokens),
            generator=generator,
        )

    @property
    def offloaded(self) -> bool:
        """Whether the policy's moments lie in host memory between updates."""
        return isinstance(self.learner.policy_optimizer, optimizers.Offloaded)

    # ---- phases

    def train_step(
        self, state: TrainState, finished: Finished, prompts: Prompts, do: Do = at_once
    ) -> tuple[Any, Any, Any, Any]:
        """Learns from `finished`, syncs, generates the next rollout; returns state and rollout with
        the metrics of both batches."""
        state, learnt = do("train", self.learn, state, finished)
        ready = do("prepare", self.load, state)
        rollout = do("generate", self.generator.generate, ready, prompts)
        return state, rollout, learnt, do("measure", self.generator.measure, rollout, ready)

    def learn(self, state: TrainState, finished: Finished) -> tuple[TrainState, Metrics]:
        """What both sides make of a finished rollout, when there is something to learn."""
        learner, metrics = self.learner.learn(
            state.learner, self.batch_of(finished), finished.learn
        )
        observed = self.generator.observed(state.generator, finished.rollout.statistics)
        generator = jax.tree.map(
            lambda new, old: jnp.where(finished.learn, new, old), observed, state.generator
        )
        return TrainState(learner=learner, generator=generator), metrics

    def load(self, state: TrainState) -> Ready:
        """The weights as generation reads them."""
        draft = state.learner.draft.network if state.learner.draft else None
        policy, version = state.learner.policy.network, state.learner.version
        # also what no update changes goes between devices after the update
        if needed_on(self.mesh):
            tied = jax.tree.map(lambda leaf: after(leaf, [computed(version)]), policy)
            policy = jax.lax.with_sharding_constraint(tied, self.learner.layout(policy))
        return self.generator.load(policy, draft, state.generator, version)

    def batch_of(self, finished: Finished) -> TrainBatch:
        """What the learner reads of a rollout: the responses that have a reward."""
        rollout = finished.rollout
        rewards = finished.rewards.astype(rollout.logprobs.dtype)
        return TrainBatch(
            tokens=rollout.tokens,
            sampled_logprobs=rollout.logprobs,
            chosen=response_mask(rollout) & finished.valid[:, None],
            advantages=group_advantages(
                rewards, finished.valid, self.generator.settings.group_size
            ),
            version=rollout.version,
            plan=finished.plan,
        )

    # ---- state

    def start(self, policy: Decoder, network: PyTree) -> TrainState:
        """The state before the first batch, from weights, to which `lora.rank` adds adapters.

        Raises:
          ConfigError: the draft does not fit the policy, or the policy lacks what should have an
            adapter.
        """
        if network is not None:
            check_fits(self.kind, network, policy.config)
        learner = self.learner.start(self.adapt(policy), network, self.online)
        return TrainState(learner=learner, generator=self.generator.start())

    def fresh(self) -> TrainState:
        """The state with random weights; also gives its shapes, through `jax.eval_shape`."""
        return self.start(self.fresh_policy(), self.fresh_draft())

    def state_shardings(self) -> TrainState:
        """The train layout of everything in the state."""
        shapes = jax.eval_shape(self.fresh)
        layout = self.learner.layout(shapes)
        if not self.offloaded:
            return layout
        policy = layout.learner.policy
        there = jax.tree.map(
            lambda to, leaf: to.with_memory_kind(HOST) if leaf.ndim else to,
            policy.optimizer,
            shapes.learner.policy.optimizer,
        )
        return layout.replace(
            learner=layout.learner.replace(policy=policy.replace(optimizer=there))
        )

    def nothing_finished(self, rows: int) -> Finished:
        """Zeros in the shape of a finished rollout, with nothing to learn."""
        rollout, off = self.generator.no_rollout(rows), jnp.zeros((rows,), bool)
        rewards = jnp.zeros((rows,), jnp.float32)
        return Finished(
            rollout=rollout,
            rewards=rewards,
            valid=off,
            plan=no_plan(rows),
            learn=jnp.zeros((), bool),
        )


# ---- from the config


def build_step(
    config: ResolvedConfig, mesh: Mesh, stop_ids: tuple[int, ...], vocab_size: int
) -> Step:
    """Opens the config once and hands its parts to those who use them; of the vocabulary, ids below
    `vocab_size` have a token."""
    rollout = config.rollout
    processing = Processing(
        banned=rollout.banned,
        min_new_tokens=rollout.min_new_tokens,
        stop_ids=stop_ids,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        vocab_size=vocab_size,
    )
    generator = _build_generator(config, mesh, processing)
    lora, model = config.lora, config.model
    adapters = stream_key(config.seed, Stream.ADAPTERS)
    return Step(
        learner=_build_learner(config, mesh, processing, generator),
        generator=generator,
        fresh_policy=lambda: Decoder(model, stream_key(config.seed, Stream.POLICY_WEIGHTS)),
        kind=config.rollout.draft.kind,
        fresh_draft=lambda: build_network(
            config.draft_spec, stream_key(config.seed, Stream.DRAFT_WEIGHTS)
        ),
        adapt=(
            (lambda policy: Adapted(policy, lora, adapters))
            if lora.rank
            else (lambda policy: policy)
        ),
        online=config.draft_training.online,
    )


def _build_learner(
    config: ResolvedConfig, mesh: Mesh, processing: Processing, generator: Generator
) -> Learner:
    wanted, training = config.optimizer, config.draft_training
    kind = kind_of(config.rollout.draft.kind)
    objective = None
    if kind.learned is not None:
        depths, decay = training.ttt_steps, training.decay
        loss, temperature = LOSSES[training.loss], processing.temperature
        objective = Objective(loss, depths, decay, temperature, kind.learned.unroll)
    rate = optimizers.warmup(wanted.learning_rate, wanted.warmup_steps)

    def kept(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        moments = config.optimizer.moments
        return optimizer if moments == "float32" else optimizers.kept_in(moments, optimizer)

    policy = kept(optimizers.adamw(rate, wanted.grad_clip, wanted.weight_decay))
    kinds = (
        [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
        if config.optimizer.offload
        else [HOST]
    )
    none = (
        f"optimizer.offload keeps moments in memory of kind {HOST}, and JAX has none for these"
        f" devices, only {', '.join(kinds)}"
    )
    require(
        HOST in kinds,
        f"{none}; leave it out, and see --optimizer.moments and --lora.rank for less of them",
    )
    return Learner(
        mesh=mesh,
        shard_above=config.mesh.shard_above,
        dtype=config.model.dtype,
        tokens=config.batch.micro_tokens or tokens_of(config, mesh),
        processing=processing,
        policy_loss=clipped_ratio,
        objective=objective,
        taps=generator.taps,
        policy_optimizer=optimizers.Offloaded(*policy) if config.optimizer.offload else policy,
        draft_optimizer=kept(optimizers.adamw(training.learning_rate, training.grad_clip)),
    )


MICRO_BATCH, MICRO_BATCH_CPU = 16_384, 320
"""Positions of a micro-batch on each data shard, about, where nothing else is said: on an
accelerator as many as keep it busy; on a CPU so few that activations stay in a core's cache
(learning from 32 rows of 192, models of 0.8 and 4.7 M parameters: 1.1 to 1.7 times as fast as with
3,056)."""


def tokens_of(config: ResolvedConfig, mesh: Mesh) -> int:
    """Positions of a micro-batch on each data shard: whole longest rows, and no more than a shard
    has."""
    longest = config.data.max_prompt_length + config.rollout.max_new_tokens - 1
    rows = config.batch.prompts * config.batch.group_size // mesh.shape[meshes.DATA]
    wanted = MICRO_BATCH if meshes.accelerated(mesh) else MICRO_BATCH_CPU
    return longest * min(max(1, round(wanted / longest)), max(rows, 1))


PAGE, SLOTS = 64, 256
"""Positions of a page on an accelerator, whose kernel reads such pages, and rows that are generated
at once at most, where nothing is said: with a few drafts each, more rows than that are no longer
bound by the reading of weights."""


class Automatic(NamedTuple):
    """What is chosen by what the devices' memory allows, because the config leaves it open."""

    tokens: bool
    slots: bool = False
    pages: bool = False
    """Of a pool of small pages."""


def automatic(config: ResolvedConfig, mesh: Mesh) -> Automatic:
    """What is left open; the engine's sizes follow memory on accelerators only: a CPU has room for
    what it is fast enough for."""
    engine, follows = config.rollout.engine, meshes.accelerated(mesh)
    return Automatic(
        tokens=config.batch.micro_tokens == 0,
        slots=follows and engine.slots == "auto",
        pages=follows and engine.pages == 0 and _page_size(config, mesh) > 0,
    )


def _page_size(config: ResolvedConfig, mesh: Mesh) -> int:
    size = config.rollout.engine.page_size
    if size == "auto":
        return PAGE if meshes.accelerated(mesh) else 0
    return size


def _build_generator(config: ResolvedConfig, mesh: Mesh, processing: Processing) -> Generator:
    rollout, batch = config.rollout, config.batch
    settings = Settings(
        group_size=batch.group_size,
        max_new_tokens=rollout.max_new_tokens,
        processing=processing,
        rule={"block": block_rule, "token": token_rule, "coupled": None}[rollout.verify],
        grid=_grid(config),
        page_size=_page_size(config, mesh),
        chunk=CHUNK if meshes.lone_cpu(mesh) else 0,
        pages=rollout.engine.pages,
        lengths=rollout.draft.draft_lengths if rollout.draft.drafts else (),
    )

    def lay_out(mesh: Mesh, slots: int, length: int) -> tuple[WeightLayout, WeightLayout]:
        """The draft reads what is new at once, and then drafts token by token."""
        shard = mesh.shape[meshes.TENSOR], meshes.threads() if meshes.lone_cpu(mesh) else 0
        policy = fastest(config.model, *shard, ((length + 1) * slots,))
        own = kind_of(rollout.draft.kind).learned
        if own is None:
            return policy, WeightLayout()
        read = own.reads(length) * slots
        passes = (read, slots) if length > 1 else (read,)
        return policy, fastest(own.decoder(config.draft_spec), *shard, passes)

    generator = Generator(
        mesh=mesh,
        settings=settings,
        draft=build_draft(config.draft_spec, processing.stop_ids),
        dtype=config.model.dtype,
        seed=config.seed,
        prompt_length=config.data.max_prompt_length,
        past=rollout.past,
        slots=SLOTS if rollout.engine.slots == "auto" else rollout.engine.slots,
        tail=rollout.engine.tail,
        lay_out=lay_out,
        about=repr((config.model, rollout.draft, rollout.lookup, config.head, config.draft_model)),
    )
    return generator.with_(prompts=batch.prompts, group_size=batch.group_size)


def _grid(config: ResolvedConfig) -> tuple[float, ...]:
    """Factors on the temperature among which the draft's is chosen."""
    draft = config.rollout.draft
    if draft.sampling == "argmax" or config.rollout.temperature == 0 or not draft.learned:
        return (0.0,)
    return draft_temperature.GRID if draft.sampling == "auto" else (float(draft.temperature),)
