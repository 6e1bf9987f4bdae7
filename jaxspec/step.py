"""One step: learn, sync, generate.

A schedule runs the phases as one program, or each as a program of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec import mesh as meshes
from jaxspec.drafts.kinds import check_fits
from jaxspec.drafts.schedule import Schedule
from jaxspec.metrics.mean import Mean, Metrics
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder
from jaxspec.rl import optimizers
from jaxspec.rl.advantages import AdvantageEstimator
from jaxspec.rl.learner import Learner
from jaxspec.rl.loss_terms import KlPenalty
from jaxspec.rl.train_batch import TrainBatch, empty_plan, plan_packing, response_mask
from jaxspec.rollout.generator import Generator
from jaxspec.state import (
    ExportedWeights,
    GeneratorState,
    PackingPlan,
    Prompts,
    PyTree,
    RolloutWeights,
    ScoredRollout,
    TrainState,
)

HOST_MEMORY = "pinned_host"
"""JAX's name for memory of the host from which a device reads by itself."""
PhaseRunner = Callable[..., Any]
"""(phase, function, *arguments) -> result of the function. Runs one phase."""


def run_inline(phase: str, function: Callable, *arguments: Any) -> Any:
    """Runs a phase inside the program that is traced."""
    with jax.named_scope(phase):
        return function(*arguments)


class Sizes(NamedTuple):
    """Sizes that determine a step's memory on each data shard. They do not change its results."""

    tokens: int
    """Tokens of a micro-batch."""
    slots: int
    """Maximum number of rows that are generated at once."""
    page_size: int
    """Positions of a page. 0 for pages as long as a row."""
    pages: int
    """Pages of the pool. 0 for as many as can be needed."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Learner and generator of a run. Only a pipelined schedule has two meshes."""

    learner: Learner
    generator: Generator
    init_policy: Callable[[], Decoder]
    """Returns a policy with random weights.

    Under `jax.eval_shape` it also gives the shapes of a policy that is loaded.
    """
    draft_kind: str
    init_draft: Callable[[], PyTree]
    """Returns a draft with random weights, or None if the draft has no weights."""
    add_adapters: Callable[[Decoder], Decoder | AdaptedDecoder]
    """Adds adapters to a policy, if the run trains adapters."""
    online: bool
    """Whether the draft learns during the run."""
    draft_schedule: Schedule
    """Decides from which batches the draft learns."""
    advantages: AdvantageEstimator
    kl_in_reward: KlPenalty | None = None
    """Penalty that is subtracted from the rewards. None without one."""
    mini_batches: int = 1
    """Number of mini-batches of a batch. Each makes an update."""
    uses_dynamic_sampling: bool = False
    """Whether several rollouts may fill a batch."""

    @property
    def sizes(self) -> "Sizes":
        """Sizes that determine memory."""
        settings = self.generator.settings
        return Sizes(
            self.learner.micro_tokens, self.generator.slots, settings.page_size, settings.pages
        )

    def with_sizes(self, prompts: int, sizes: "Sizes") -> "Step":
        """Returns this step with other sizes, for `prompts` prompts per call."""
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
    def shares_devices(self) -> bool:
        """Whether learner and generator have the same mesh."""
        return self.learner.mesh == self.generator.mesh

    @property
    def offloads_moments(self) -> bool:
        """Whether the policy's moments are in host memory between updates."""
        return isinstance(self.learner.policy_optimizer, optimizers.OffloadedOptimizer)

    # ---- phases

    def train_step(
        self,
        state: TrainState,
        scored: ScoredRollout,
        prompts: Prompts,
        run_phase: PhaseRunner = run_inline,
    ) -> tuple[Any, Any, Any, Any]:
        """Learns from `scored`, syncs the weights, and generates the next rollout.

        Returns the state, the rollout, and the metrics of learning and of generation.
        """
        # Learning comes first, so that the host scores a rollout between two calls, and the program
        # needs no callback.
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
        """Updates learner and generator from a scored rollout, unless `scored.learn` is false."""
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
        """Builds the learner's batch, and charges KL to its rewards if the run does.

        Also returns the metrics of this penalty.
        """
        batch, penalty = self.build_batch(scored), self.kl_in_reward
        if penalty is None:
            return batch, {}
        kl_to_go = self.learner.sum_reference_kl(state.learner, batch, penalty, scored.learn)
        kl = kl_to_go[:, 0]
        count = jnp.sum(scored.valid, dtype=kl.dtype)
        mean = jnp.sum(jnp.where(scored.valid, kl, 0)) / jnp.maximum(count, 1)
        metrics: Metrics = {"reward/kl": Mean.from_value(mean, scored.learn & (count > 0))}
        if penalty.reward_to_go:
            rewards = scored.rewards.astype(batch.sampled_logprobs.dtype)
            advantages = self.advantages.compute_token_advantages(
                rewards, scored.valid, batch.loss_mask, penalty.beta * kl_to_go
            )
            return batch.replace(advantages=advantages), metrics
        rewards = scored.rewards.astype(kl.dtype) - penalty.beta * kl
        return self.build_batch(scored.replace(rewards=rewards)), metrics

    def export(self, state: TrainState) -> tuple[ExportedWeights, GeneratorState]:
        """Returns all that the generator needs of a state, in the learner's layout."""
        return self.learner.export(state.learner), state.generator

    def sync(self, state: TrainState) -> RolloutWeights:
        """Exports the weights, and loads them on the same mesh."""
        return self.generator.load(*self.export(state))

    def build_batch(self, scored: ScoredRollout) -> TrainBatch:
        """Builds the learner's batch. The loss masks responses without a reward."""
        rollout = scored.rollout
        rewards = scored.rewards.astype(rollout.logprobs.dtype)
        loss_mask = response_mask(rollout) & scored.valid[:, None]
        lengths = rollout.lengths - rollout.prompt_lengths
        return TrainBatch(
            tokens=rollout.tokens,
            sampled_logprobs=rollout.logprobs,
            loss_mask=loss_mask,
            advantages=self.advantages.compute_row_advantages(rewards, scored.valid, lengths),
            version=rollout.version,
            plan=scored.plan,
        )

    def plan_batch(self, token_counts: Int[np.ndarray, " B"]) -> PackingPlan:
        """Plans the packing of a batch's rows, on the host.

        `token_counts` has the number of tokens to read of each row. Mini-batches have equal numbers
        of rows.

        Raises:
          ValueError: A row does not fit a micro-batch.
        """
        mini_batch = (
            np.arange(len(token_counts), dtype=np.int32) * self.mini_batches // len(token_counts)
        )
        shards = meshes.row_shard_count(self.learner.mesh)
        return plan_packing(token_counts, shards, self.learner.micro_tokens, mini_batch)

    # ---- state

    def init_state(self, policy: Decoder, draft: PyTree) -> TrainState:
        """Returns the state before the first batch.

        Adds adapters to the policy if the run trains adapters.

        Raises:
          ConfigError: The draft does not fit the policy, or a weight that gets an adapter is
            missing.
          ValueError: A weight has no logical axes.
        """
        if draft is not None:
            check_fits(self.draft_kind, draft, policy.config)
        trained = self.add_adapters(policy)
        meshes.require_weights({"policy": trained, "draft": draft})
        learner = self.learner.init_state(trained, draft, self.online)
        return TrainState(learner=learner, generator=self.generator.init_state())

    def init_random_state(self) -> TrainState:
        """Returns the state with random weights. `jax.eval_shape` gives its shapes."""
        return self.init_state(self.init_policy(), self.init_draft())

    def state_shardings(self) -> TrainState:
        """Returns the train layout of the whole state."""
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
        """Returns a scored rollout of zeros, with nothing to learn."""
        rollout, valid = self.generator.empty_rollout(rows), jnp.zeros((rows,), bool)
        rewards = jnp.zeros((rows,), jnp.float32)
        return ScoredRollout(
            rollout=rollout,
            rewards=rewards,
            valid=valid,
            plan=empty_plan(rows, self.mini_batches),
            learn=jnp.zeros((), bool),
        )
