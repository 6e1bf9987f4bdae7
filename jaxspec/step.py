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
from jaxtyping import Array, Float, Int

from jaxspec import mesh as meshes
from jaxspec.drafts.kinds import check_fits
from jaxspec.drafts.schedule import Schedule
from jaxspec.metrics.mean import Mean, Metrics
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder
from jaxspec.rl import optimizers
from jaxspec.rl.learner import Learner
from jaxspec.rl.loss_terms import KlPenalty
from jaxspec.rl.train_batch import TrainBatch, empty_plan, plan_packing, response_mask
from jaxspec.rollout.generator import Generator
from jaxspec.state import PackingPlan, Prompts, PyTree, RolloutWeights, ScoredRollout, TrainState
from jaxspec.transfer import transfer_arrays

HOST_MEMORY = "pinned_host"
"""JAX's name for memory of the host from which a device reads by itself."""
AdvantageFunction = Callable[..., Float[Array, "B ..."]]
"""(rewards, which rows have one, counts of tokens[, costs=]) -> advantages, as in
`rl/advantages.py`."""
PhaseRunner = Callable[..., Any]
"""(phase, function, *arguments) -> what the function gives: how a phase is run."""


def run_inline(phase: str, function: Callable, *arguments: Any) -> Any:
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
    init_policy: Callable[[], Decoder]
    """Random weights; also, through `jax.eval_shape`, the shapes of a policy that is loaded."""
    draft_kind: str
    """The draft's kind."""
    init_draft: Callable[[], PyTree]
    """Random weights of the draft, and its shapes likewise; None: it has nothing to learn."""
    add_adapters: Callable[[Decoder], Decoder | AdaptedDecoder]
    """What is trained of a policy: itself, or adapters beside it."""
    online: bool
    """Whether the draft learns during the run."""
    draft_schedule: Schedule
    """From which batches, where it does."""
    compute_advantages: AdvantageFunction
    """What rewards become."""
    kl_in_reward: KlPenalty | None = None
    """What is taken from the rewards for leaving the reference policy."""
    mini_batches: int = 1
    """Into which a batch is divided, each for an update."""
    uses_dynamic_sampling: bool = False
    """Whether several rollouts fill a batch (dynamic sampling)."""

    @property
    def sizes(self) -> "Sizes":
        """What it takes memory by."""
        settings = self.generator.settings
        return Sizes(
            self.learner.micro_tokens, self.generator.slots, settings.page_size, settings.pages
        )

    def with_sizes(self, prompts: int, sizes: "Sizes") -> "Step":
        """This step for another number of prompts a call, with other sizes."""
        generator = dataclasses.replace(self.generator, slots=sizes.slots)
        generator = generator.make_variant(
            prompts=prompts, page_size=sizes.page_size, pages=sizes.pages
        )
        return dataclasses.replace(
            self,
            learner=dataclasses.replace(self.learner, micro_tokens=sizes.tokens),
            generator=generator,
        )

    @property
    def offloads_moments(self) -> bool:
        """Whether the policy's moments lie in host memory between updates."""
        return isinstance(self.learner.policy_optimizer, optimizers.OffloadedOptimizer)

    # ---- phases

    def train_step(
        self,
        state: TrainState,
        scored: ScoredRollout,
        prompts: Prompts,
        run_phase: PhaseRunner = run_inline,
    ) -> tuple[Any, Any, Any, Any]:
        """Learns from `scored`, syncs, generates the next rollout; returns state and rollout with
        the metrics of both batches."""
        state, training_metrics = run_phase("train", self.learn, state, scored)
        weights = run_phase("prepare", self.sync, state)
        rollout = run_phase("generate", self.generator.generate, weights, prompts)
        return (
            state,
            rollout,
            training_metrics,
            run_phase("measure", self.generator.measure_rollout, rollout, weights),
        )

    def learn(self, state: TrainState, scored: ScoredRollout) -> tuple[TrainState, Metrics]:
        """What both sides make of a finished rollout, when there is something to learn."""
        batch, kl_metrics = self._build_rewarded_batch(state, scored)
        observed_state = self.generator.update_state(state.generator, scored.rollout.statistics)
        generator = jax.tree.map(
            lambda new, old: jnp.where(scored.learn, new, old), observed_state, state.generator
        )
        learner = state.learner
        online = learner.online & self.draft_schedule(generator.trend, learner.version)
        new_learner, metrics = self.learner.learn(
            learner.replace(online=online), batch, scored.learn
        )
        new_learner = new_learner.replace(online=learner.online)
        return TrainState(learner=new_learner, generator=generator), metrics | kl_metrics

    def _build_rewarded_batch(
        self, state: TrainState, scored: ScoredRollout
    ) -> tuple[TrainBatch, Metrics]:
        """Builds the learner's batch. If KL is charged to the reward, subtracts it first and
        returns its mean as a metric."""
        batch, penalty = self.build_batch(scored), self.kl_in_reward
        if penalty is None:
            return batch, {}
        kl_to_go = self.learner.reference_kl(state.learner, batch, penalty, scored.learn)
        kl = kl_to_go[:, 0]
        count = jnp.sum(scored.valid, dtype=kl.dtype)
        mean = jnp.sum(jnp.where(scored.valid, kl, 0)) / jnp.maximum(count, 1)
        metrics: Metrics = {"reward/kl": Mean.from_value(mean, scored.learn & (count > 0))}
        if penalty.reward_to_go:
            return self.build_batch(scored, penalty.beta * kl_to_go), metrics
        rewards = scored.rewards.astype(kl.dtype) - penalty.beta * kl
        return self.build_batch(scored.replace(rewards=rewards)), metrics

    def sync(self, state: TrainState) -> RolloutWeights:
        """Exports the weights, transfers them to the generator's mesh, and loads them there."""
        exported = transfer_arrays(
            self.learner.export(state.learner), self.learner.mesh, self.generator.mesh
        )
        return self.generator.load(exported, state.generator)

    def build_batch(
        self, scored: ScoredRollout, costs: Float[Array, "B S"] | None = None
    ) -> TrainBatch:
        """Builds the learner's batch of the responses that have a reward; `costs` are taken from
        it, token by token."""
        rollout = scored.rollout
        rewards = scored.rewards.astype(rollout.logprobs.dtype)
        loss_mask = response_mask(rollout) & scored.valid[:, None]
        lengths = rollout.lengths - rollout.prompt_lengths
        label_counts = lengths if costs is None else loss_mask.astype(lengths.dtype)
        return TrainBatch(
            tokens=rollout.tokens,
            sampled_logprobs=rollout.logprobs,
            loss_mask=loss_mask,
            advantages=self.compute_advantages(rewards, scored.valid, label_counts, costs=costs),
            version=rollout.version,
            plan=scored.plan,
        )

    def plan_batch(self, token_counts: Int[np.ndarray, " B"]) -> PackingPlan:
        """Which of a batch's rows, of which so many tokens are read each, is read where; on the
        host. Mini-batches have the same number of rows.

        Raises:
          ValueError: a row does not fit a micro-batch.
        """
        mini_batch = (
            np.arange(len(token_counts), dtype=np.int32) * self.mini_batches // len(token_counts)
        )
        shards = meshes.row_shard_count(self.learner.mesh)
        return plan_packing(token_counts, shards, self.learner.micro_tokens, mini_batch)

    # ---- state

    def init_state(self, policy: Decoder, draft: PyTree) -> TrainState:
        """The state before the first batch, from weights, to which `lora.rank` adds adapters.

        Raises:
          ConfigError: the draft does not fit the policy, or the policy lacks what should have an
            adapter.
        """
        if draft is not None:
            check_fits(self.draft_kind, draft, policy.config)
        learner = self.learner.init_state(self.add_adapters(policy), draft, self.online)
        return TrainState(learner=learner, generator=self.generator.init_state())

    def init_random_state(self) -> TrainState:
        """The state with random weights; also gives its shapes, through `jax.eval_shape`."""
        return self.init_state(self.init_policy(), self.init_draft())

    def state_shardings(self) -> TrainState:
        """The train layout of everything in the state."""
        shapes = jax.eval_shape(self.init_random_state)
        layout = self.learner.train_layout(shapes)
        if not self.offloads_moments:
            return layout
        policy = layout.learner.policy
        host_shardings = jax.tree.map(
            lambda sharding, leaf: (
                sharding.with_memory_kind(HOST_MEMORY) if leaf.ndim else sharding
            ),
            policy.optimizer,
            shapes.learner.policy.optimizer,
        )
        return layout.replace(
            learner=layout.learner.replace(policy=policy.replace(optimizer=host_shardings))
        )

    def empty_scored_rollout(self, rows: int) -> ScoredRollout:
        """Zeros in the shape of a finished rollout, with nothing to learn."""
        rollout, valid = self.generator.empty_rollout(rows), jnp.zeros((rows,), bool)
        rewards = jnp.zeros((rows,), jnp.float32)
        return ScoredRollout(
            rollout=rollout,
            rewards=rewards,
            valid=valid,
            plan=empty_plan(rows, self.mini_batches),
            learn=jnp.zeros((), bool),
        )
