"""A GRPO step as separate programs: its config, recipes, state and batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.bench.gpu.cells import random_prompts, whole_on
from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.run import Plan
from jaxspec.bench.gpu.weights import random_weights
from jaxspec.bench.loaded import synthetic
from jaxspec.bench.workload import LEARNING_RATE
from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    EngineConfig,
    OfflineConfig,
    OptimizerConfig,
    ResolvedConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.host.runner import abstract, put
from jaxspec.inputs.spec import LoraConfig
from jaxspec.models.layers import cast
from jaxspec.state import LENGTH, Finished, Prompts, Ready, Rollout, TrainState
from jaxspec.step import Step

PHASES = ("prepare", "prefill", "rounds", "learn")


class Mode(NamedTuple):
    """A step, speculative or plain, and the names of its programs."""

    plan: Plan
    speculative: bool

    def name(self, phase: str) -> str:
        """Names the program of a phase."""
        return f"{phase} of a {'speculative' if self.speculative else 'plain'} GRPO step"

    @property
    def options(self) -> GpuOptions:
        """Of the command line."""
        return self.plan.options

    @property
    def rows(self) -> int:
        """Answers of a step."""
        return self.options.step_prompts * self.options.group

    @property
    def step(self) -> Step:
        """Both sides of the step; a frozen draft whose tokens are kept as prescribed, or none."""
        step = build_step(_config(self.options), self.plan.mesh, (), self.options.vocab)
        if self.speculative:
            rule = synthetic(self.options.acceptance)
            return dataclasses.replace(step, generator=step.generator.with_(rule=rule))
        learner = dataclasses.replace(step.learner, objective=None, taps=())
        return dataclasses.replace(
            step, learner=learner, generator=step.generator.plain(), fresh_draft=lambda: None
        )

    def networks(self) -> tuple[Any, Any]:
        """Shapes of policy and draft; of a policy with adapters in the type of products."""
        step = build_step(_config(self.options), self.plan.mesh, (), self.options.vocab)
        policy, draft = jax.eval_shape(lambda: (step.fresh_policy(), step.fresh_draft()))
        if self.options.lora_rank:
            dtype = jnp.dtype(self.options.dtype)
            policy = jax.eval_shape(lambda network: cast(network, dtype), policy)
        policy, draft = whole_on(self.plan.mesh, (policy, draft))
        return policy, draft if self.speculative else None

    def recipes(self) -> list[Recipe]:
        """Its programs, in the order of a step."""
        step, prompts, mesh = self.step, self.options.step_prompts, self.plan.mesh
        generator = step.generator

        def of_state(*places: int) -> Callable[[], tuple[Any, ...]]:
            return lambda: tuple(whole_on(mesh, abstract(step, prompts)[place]) for place in places)

        def generating() -> tuple[Ready, Prompts]:
            state, _, asked = whole_on(mesh, abstract(step, prompts))
            return whole_on(mesh, jax.eval_shape(step.sync, state)), asked

        def running() -> tuple[Any, ...]:
            ready, asked = generating()
            begun = jax.eval_shape(generator.begin, ready, asked)
            return ready, *whole_on(mesh, (begun, jax.ShapeDtypeStruct((), jnp.int32)))

        options = generator.compiler_options
        return [
            Recipe(self.name("start"), step.start, self.networks, donate=(0, 1)),
            Recipe(self.name("prepare"), step.sync, of_state(0)),
            Recipe(self.name("prefill"), generator.begin, generating),
            Recipe(self.name("rounds"), generator.advance, running, donate=(1,), options=options),
            Recipe(self.name("learn"), step.learn, of_state(0, 1), donate=(0,)),
            Recipe(self.name("logprobs"), lambda *given: logprob_gap(step, *given), of_state(0, 1)),
        ]

    # ---- arguments

    def weights(self) -> tuple[Any, Any]:
        """Random policy and draft."""
        policy, draft = self.networks()
        mesh, seed = self.plan.mesh, self.options.seed
        return random_weights(policy, mesh, seed), random_weights(draft, mesh, seed + 1)

    def prompts(self, call: int) -> Prompts:
        """Random prompts of full length."""
        options = self.options
        return random_prompts(self.step.generator, options.step_prompts, options, call)

    def finished(self, rollout: Rollout, call: int) -> Finished:
        """A rollout with random rewards, ready to be learned from."""
        step = self.step
        like = abstract(step, self.options.step_prompts)[1]
        rewards = np.random.default_rng((self.options.seed, call)).random(self.rows, np.float32)
        rollout = jax.device_put(rollout, jax.tree.map(lambda leaf: leaf.sharding, like.rollout))
        about = rewards, np.ones(self.rows, bool), step.planned(self.read(rollout)), True
        rewards, valid, plan, learn = put(about, (like.rewards, like.valid, like.plan, like.learn))
        return Finished(rollout=rollout, rewards=rewards, valid=valid, plan=plan, learn=learn)

    def read(self, rollout: Rollout) -> np.ndarray:
        """Positions of each row that learning reads."""
        return np.asarray(rollout.lengths).astype(np.int32) - 1

    def any_rollout(self) -> Rollout:
        """A rollout of full length that nobody sampled, for learning alone."""
        options, size = self.options, self.options.step_prompt + self.options.step_new
        like = abstract(self.step, options.step_prompts)[1].rollout
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        random, shape = np.random.default_rng(options.seed), (self.rows, size)
        full = np.full(self.rows, size)
        made = nothing.replace(
            tokens=random.integers(0, options.vocab, shape),
            prompt_lengths=np.full(self.rows, options.step_prompt),
            lengths=full,
            logprobs=np.full(shape, -np.log(options.vocab)),
            status=np.full(self.rows, LENGTH),
        )
        return put(made, like)


def _config(options: GpuOptions) -> ResolvedConfig:
    draft = DraftConfig(draft_length=options.draft_length, vocab=options.draft_vocab)
    engine = EngineConfig(
        slots=options.step_prompts * options.group, page_size=options.page_size, tail=False
    )
    return ResolvedConfig(
        seed=options.seed,
        model=options.trained_policy,
        lora=LoraConfig(rank=options.lora_rank),
        rollout=RolloutConfig(max_new_tokens=options.step_new, draft=draft, engine=engine),
        batch=BatchConfig(prompts=options.step_prompts, group_size=options.group),
        data=DataConfig(max_prompt_length=options.step_prompt),
        # too low to change how much is accepted
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=0),
        draft_training=DraftTrainingConfig(online=False),
        sft=SftConfig(steps=0),
        offline=OfflineConfig(steps=0),
    )


def logprob_gap(
    step: Step, state: TrainState, finished: Finished
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean and largest difference between recorded logprobs and the learner's own, over the tokens
    of the answers."""
    learner = dataclasses.replace(step.learner, objective=None, taps=())
    placed = learner.passes.at_places(step.batch_of(finished))
    logprobs, _ = learner.passes.logprobs(state.learner.policy.network, 0, placed)
    gap = jnp.abs(logprobs - placed.sampled_logprobs.astype(logprobs.dtype))
    gap = jnp.where(placed.chosen, gap, 0)
    return jnp.sum(gap) / jnp.sum(placed.chosen, dtype=gap.dtype), jnp.max(gap)
