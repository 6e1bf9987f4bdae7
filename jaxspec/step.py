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
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec import mesh as meshes
from jaxspec.drafts.kinds import check_fits
from jaxspec.drafts.schedule import Schedule
from jaxspec.kernels.order import needs_ordering, order_after, signal_ready
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder
from jaxspec.rl import optimizers
from jaxspec.rl.learner import Learner, Metrics
from jaxspec.rl.logprobs import response_mask
from jaxspec.rl.loss_terms import KlPenalty
from jaxspec.rl.train_batch import TrainBatch, no_plan, planned
from jaxspec.rollout.generator import Generator
from jaxspec.state import Finished, Plan, Prompts, PyTree, Ready, TrainState

HOST = "pinned_host"
"""JAX's name for memory of the host from which a device reads by itself."""
Advantages = Callable[..., Float[Array, "B ..."]]
"""(rewards, which rows have one, counts of tokens[, costs=]) -> advantages, as in
`rl/advantages.py`."""
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
    adapt: Callable[[Decoder], Decoder | AdaptedDecoder]
    """What is trained of a policy: itself, or adapters beside it."""
    online: bool
    """Whether the draft learns during the run."""
    draft_learns: Schedule
    """From which batches, where it does."""
    advantages: Advantages
    """What rewards become."""
    kl_in_reward: KlPenalty | None = None
    """What is taken from the rewards for leaving the reference policy."""
    mini_batches: int = 1
    """Into which a batch is divided, each for an update."""
    fills: bool = False
    """Whether several rollouts fill a batch (dynamic sampling)."""

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
        """This step for another number of prompts a call, with other sizes."""
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
        ready = do("prepare", self.sync, state)
        rollout = do("generate", self.generator.generate, ready, prompts)
        return state, rollout, learnt, do("measure", self.generator.measure, rollout, ready)

    def learn(self, state: TrainState, finished: Finished) -> tuple[TrainState, Metrics]:
        """What both sides make of a finished rollout, when there is something to learn."""
        batch, own = self._rewarded(state, finished)
        observed = self.generator.observed(state.generator, finished.rollout.statistics)
        generator = jax.tree.map(
            lambda new, old: jnp.where(finished.learn, new, old), observed, state.generator
        )
        learner = state.learner
        online = learner.online & self.draft_learns(generator.trend, learner.version)
        after, metrics = self.learner.learn(learner.replace(online=online), batch, finished.learn)
        after = after.replace(online=learner.online)
        return TrainState(learner=after, generator=generator), metrics | own

    def _rewarded(self, state: TrainState, finished: Finished) -> tuple[TrainBatch, Metrics]:
        """Builds the learner's batch. If KL is charged to the reward, subtracts it first and
        returns its mean as a metric."""
        batch, penalty = self.batch_of(finished), self.kl_in_reward
        if penalty is None:
            return batch, {}
        to_go = self.learner.reference_kl(state.learner, batch, penalty, finished.learn)
        kl = to_go[:, 0]
        count = jnp.sum(finished.valid, dtype=kl.dtype)
        mean = jnp.sum(jnp.where(finished.valid, kl, 0)) / jnp.maximum(count, 1)
        metrics = {"reward/kl": jnp.where(finished.learn & (count > 0), mean, jnp.nan)}
        if penalty.to_go:
            return self.batch_of(finished, penalty.beta * to_go), metrics
        rewards = finished.rewards.astype(kl.dtype) - penalty.beta * kl
        return self.batch_of(finished.replace(rewards=rewards)), metrics

    def sync(self, state: TrainState) -> Ready:
        """The weights as generation reads them."""
        draft = state.learner.draft.network if state.learner.draft else None
        policy, version = state.learner.policy.network, state.learner.version
        # also what no update changes goes between devices after the update
        if needs_ordering(self.mesh):
            tied = jax.tree.map(lambda leaf: order_after(leaf, [signal_ready(version)]), policy)
            policy = jax.lax.with_sharding_constraint(tied, self.learner.layout(policy))
        return self.generator.sync(policy, draft, state.generator, version)

    def batch_of(self, finished: Finished, costs: Float[Array, "B S"] | None = None) -> TrainBatch:
        """Builds the learner's batch of the responses that have a reward; `costs` are taken from
        it, token by token."""
        rollout = finished.rollout
        rewards = finished.rewards.astype(rollout.logprobs.dtype)
        chosen = response_mask(rollout) & finished.valid[:, None]
        lengths = rollout.lengths - rollout.prompt_lengths
        counts = lengths if costs is None else chosen.astype(lengths.dtype)
        return TrainBatch(
            tokens=rollout.tokens,
            sampled_logprobs=rollout.logprobs,
            chosen=chosen,
            advantages=self.advantages(rewards, finished.valid, counts, costs=costs),
            version=rollout.version,
            plan=finished.plan,
        )

    def planned(self, read: Int[np.ndarray, " B"]) -> Plan:
        """Which of a batch's rows, of which so many tokens are read each, is read where; on the
        host. Mini-batches have the same number of rows.

        Raises:
          ValueError: a row does not fit a micro-batch.
        """
        mini = np.arange(len(read), dtype=np.int32) * self.mini_batches // len(read)
        shards = meshes.row_shards(self.learner.mesh)
        return planned(read, shards, self.learner.tokens, mini)

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
            plan=no_plan(rows, self.mini_batches),
            learn=jnp.zeros((), bool),
        )
