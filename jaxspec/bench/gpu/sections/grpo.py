"""GRPO step as separate programs.

Builds its config, recipes, state and batches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.bench.gpu.cells import random_prompts, replicate_shapes
from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.run import GpuPlan
from jaxspec.bench.gpu.weights import random_weights
from jaxspec.bench.loaded import synthetic_rule
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
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.host.programs import abstract_arguments, put_like
from jaxspec.inputs.spec import LoraConfig
from jaxspec.models.layers import cast_floats
from jaxspec.rl.draft_objective import UntrainedDraft
from jaxspec.rollout.verification.modes import Rejection
from jaxspec.state import LENGTH, Prompts, Rollout, RolloutWeights, ScoredRollout, TrainState
from jaxspec.step import Step

PHASES = ("prepare", "prefill", "rounds", "learn")
"""Timed phases of a step, in order."""


class StepMode(NamedTuple):
    """Speculative or plain step, with its programs and inputs."""

    plan: GpuPlan
    speculative: bool

    def program_name(self, phase: str) -> str:
        """Returns the name of a phase's program."""
        return f"{phase} of a {'speculative' if self.speculative else 'plain'} GRPO step"

    @property
    def options(self) -> GpuOptions:
        """Options of the command line."""
        return self.plan.options

    @property
    def rows(self) -> int:
        """Number of answers per step."""
        return self.options.step_prompts * self.options.group

    @property
    def step(self) -> Step:
        """Generator and learner of the step.

        A speculative step has a frozen draft with the prescribed acceptance. A plain step has no
        draft.
        """
        # No stop ids, so that every answer has its full length.
        step = build_step(_step_config(self.options), self.plan.mesh, (), self.options.vocab)
        if self.speculative:
            mode = Rejection(synthetic_rule(self.options.acceptance))
            return dataclasses.replace(step, generator=step.generator.make_variant(mode=mode))
        # Without a draft nothing reads the aux hidden states, so the learner collects none.
        learner = dataclasses.replace(step.learner, draft_objective=UntrainedDraft(), taps=())
        return dataclasses.replace(
            step, learner=learner, generator=step.generator.without_draft(), init_draft=lambda: None
        )

    def network_shapes(self) -> tuple[Any, Any]:
        """Returns abstract policy and draft. The draft of a plain step is None.

        With LoRA, the policy is the frozen base, in the dtype of matrix products.
        """
        step = build_step(_step_config(self.options), self.plan.mesh, (), self.options.vocab)
        policy, draft = jax.eval_shape(lambda: (step.init_policy(), step.init_draft()))
        if self.options.lora_rank:
            dtype = jnp.dtype(self.options.dtype)
            policy = jax.eval_shape(lambda network: cast_floats(network, dtype), policy)
        policy, draft = replicate_shapes(self.plan.mesh, (policy, draft))
        return policy, draft if self.speculative else None

    def list_recipes(self) -> list[Recipe]:
        """Lists the step's programs in order, and one that compares logprobs."""
        step, prompt_count, mesh = self.step, self.options.step_prompts, self.plan.mesh
        generator = step.generator

        def state_inputs(*indices: int) -> Callable[[], tuple[Any, ...]]:
            # Evaluated by the compiling thread, like all arguments of recipes.
            return lambda: tuple(
                replicate_shapes(mesh, abstract_arguments(step, prompt_count)[index])
                for index in indices
            )

        def prefill_inputs() -> tuple[RolloutWeights, Prompts]:
            state, _, prompts = replicate_shapes(mesh, abstract_arguments(step, prompt_count))
            return replicate_shapes(mesh, jax.eval_shape(step.sync, state)), prompts

        def rounds_inputs() -> tuple[Any, ...]:
            weights, prompts = prefill_inputs()
            decode_state = jax.eval_shape(generator.begin, weights, prompts)
            return weights, *replicate_shapes(
                mesh, (decode_state, jax.ShapeDtypeStruct((), jnp.int32))
            )

        compiler_options = generator.compiler_options
        return [
            # The networks are donated, so that the state takes over their memory.
            Recipe(self.program_name("start"), step.init_state, self.network_shapes, donate=(0, 1)),
            Recipe(self.program_name("prepare"), step.sync, state_inputs(0)),
            Recipe(self.program_name("prefill"), generator.begin, prefill_inputs),
            Recipe(
                self.program_name("rounds"),
                generator.advance,
                rounds_inputs,
                # Rounds update the caches of the decode state in place.
                donate=(1,),
                compiler_options=compiler_options,
            ),
            Recipe(self.program_name("learn"), step.learn, state_inputs(0, 1), donate=(0,)),
            Recipe(
                self.program_name("logprobs"),
                lambda *arguments: logprob_gap(step, *arguments),
                state_inputs(0, 1),
            ),
        ]

    # ---- arguments

    def random_networks(self) -> tuple[Any, Any]:
        """Returns a random policy and draft. The draft of a plain step is None."""
        policy, draft = self.network_shapes()
        mesh, seed = self.plan.mesh, self.options.seed
        return random_weights(policy, mesh, seed), random_weights(draft, mesh, seed + 1)

    def make_prompts(self, call: int) -> Prompts:
        """Returns random prompts of full length. They depend on `call`."""
        options = self.options
        return random_prompts(self.step.generator, options.step_prompts, options, call)

    def score_rollout(self, rollout: Rollout, call: int) -> ScoredRollout:
        """Gives a rollout random rewards and a plan of micro-batches."""
        step = self.step
        shapes = abstract_arguments(step, self.options.step_prompts)[1]
        # Random, since equal rewards of a group have no advantages.
        rewards = np.random.default_rng((self.options.seed, call)).random(self.rows, np.float32)
        rollout = jax.device_put(rollout, jax.tree.map(lambda leaf: leaf.sharding, shapes.rollout))
        values = (
            rewards,
            np.ones(self.rows, bool),
            step.plan_batch(self.read_lengths(rollout)),
            True,
        )
        rewards, valid, plan, learn = put_like(
            values, (shapes.rewards, shapes.valid, shapes.plan, shapes.learn)
        )
        return ScoredRollout(rollout=rollout, rewards=rewards, valid=valid, plan=plan, learn=learn)

    def read_lengths(self, rollout: Rollout) -> np.ndarray:
        """Returns the number of positions of each row that learning reads."""
        # The last token has no successor to predict.
        return np.asarray(rollout.lengths).astype(np.int32) - 1

    def full_rollout(self) -> Rollout:
        """Returns a rollout of random tokens and full length, to time learning without sampling."""
        options, size = self.options, self.options.step_prompt + self.options.step_new
        shapes = abstract_arguments(self.step, options.step_prompts)[1].rollout
        empty_rollout = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        rng, shape = np.random.default_rng(options.seed), (self.rows, size)
        full_lengths = np.full(self.rows, size)
        rollout = empty_rollout.replace(
            tokens=rng.integers(0, options.vocab, shape),
            prompt_lengths=np.full(self.rows, options.step_prompt),
            lengths=full_lengths,
            # The tokens are uniformly distributed.
            logprobs=np.full(shape, -np.log(options.vocab)),
            status=np.full(self.rows, LENGTH),
        )
        return put_like(rollout, shapes)


def _step_config(options: GpuOptions) -> ResolvedConfig:
    draft = DraftConfig(
        draft_length=options.draft_length, eagle3=Eagle3Config(vocab=options.draft_vocab)
    )
    engine = EngineConfig(
        slots=options.step_prompts * options.group, page_size=options.page_size, tail=False
    )
    return ResolvedConfig(
        seed=options.seed,
        model=options.step_policy,
        lora=LoraConfig(rank=options.lora_rank),
        rollout=RolloutConfig(max_new_tokens=options.step_new, draft=draft, engine=engine),
        batch=BatchConfig(prompts=options.step_prompts, group_size=options.group),
        data=DataConfig(max_prompt_length=options.step_prompt),
        # The learning rate is too low to affect the measurements.
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=0),
        # The draft is frozen, since its acceptance is prescribed.
        draft_training=DraftTrainingConfig(online=False),
        sft=SftConfig(steps=0),
        offline=OfflineConfig(steps=0),
    )


def logprob_gap(
    step: Step, state: TrainState, finished: ScoredRollout
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compares recorded logprobs with the learner's own, over the tokens of the answers.

    Returns the mean and the maximum of their absolute difference.
    """
    # The draft has no part in the policy's logprobs, so its objective and its inputs are left out.
    learner = dataclasses.replace(step.learner, draft_objective=UntrainedDraft(), taps=())
    positions = learner.passes.place_rows(step.build_batch(finished))
    logprobs, _ = learner.passes.compute_logprobs(state.learner.policy.network, 0, positions)
    gap = jnp.abs(logprobs - positions.sampled_logprobs.astype(logprobs.dtype))
    gap = jnp.where(positions.loss_mask, gap, 0)
    return jnp.sum(gap) / jnp.sum(positions.loss_mask, dtype=gap.dtype), jnp.max(gap)
