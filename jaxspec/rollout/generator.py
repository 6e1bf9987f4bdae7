"""Generator of rollouts on a mesh.

All settings of a run that it needs are fixed when it is built.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Key

from jaxspec.drafts import draft_temperature, schedule
from jaxspec.drafts.base import PLAIN, Draft
from jaxspec.inputs.streams import stream_key
from jaxspec.kernels.order import CollectiveOrder
from jaxspec.mesh import (
    DATA,
    ROLLOUT_RULES,
    TENSOR,
    assign_shardings,
    has_accelerators,
    row_shard_count,
)
from jaxspec.metrics.mean import Mean, Metrics
from jaxspec.models.weight_layout import (
    WeightLayout,
    apply_layout,
    pad_vocabulary,
    shard_specs,
)
from jaxspec.rollout import generate as generation
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.feedback.acceptance import acceptance_metrics, init_statistics
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import VerificationMode
from jaxspec.state import (
    EOS,
    FAILED,
    IDLE,
    LENGTH,
    PROMPT,
    Drafter,
    ExportedWeights,
    GeneratorState,
    LengthChooser,
    NoChooser,
    Prompts,
    Rollout,
    RolloutWeights,
    Statistics,
)

# The types that XLA captures by default, and loops.
COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
"""XLA's names of the operations that may go into CUDA graphs."""
# A loop of fewer slots saves too little to be worth compiling.
SMALLEST_TAIL = 4
"""Minimum slots of a tail loop."""
# On accelerators a round costs nearly the same with fewer rows, and each loop takes seconds to
# compile.
TAILS, TAIL_ON_CARDS = (4, 16), (8,)
"""Divisors that give the slots of the tail loops, on CPUs and on accelerators."""


@dataclasses.dataclass(frozen=True)
class Generator:
    """Generator with fixed shapes and settings."""

    mesh: Mesh
    settings: Settings
    """Settings for `draft`. Their mode follows from `mode`."""
    draft: Draft
    """`PLAIN` for plain decoding."""
    mode: VerificationMode
    """Mode of the config. `settings.mode` is its form for the draft."""
    dtype: str
    """Type of weights, keys and values."""
    seed: int
    prompt_length: int
    """Maximum tokens of a prompt."""
    past_answers: int
    """Number of earlier answers that come with each prompt."""
    slots: int
    """Maximum number of rows that a shard of rows generates at once."""
    uses_tail: bool
    """Whether the last rows move to smaller loops."""
    make_layouts: Callable[[Mesh, int, int], tuple[WeightLayout, WeightLayout]]
    """(mesh, slots, draft length) -> weight layouts of policy and draft."""
    command_buffers: bool
    """Whether its loops go into CUDA graphs."""
    description: str
    """Description of policy and draft. It is part of the cache key of round costs."""

    # ---- variants

    def make_variant(
        self,
        *,
        prompts: int = 0,
        group_size: int = 0,
        draft: Draft | None = None,
        mode: VerificationMode | None = None,
        **settings: Any,
    ) -> "Generator":
        """Returns this generator with other sizes, draft, mode or settings.

        Each variant is another program to compile.

        Args:
          prompts: number of prompts per call. 0 keeps slots and tail as they are.
          group_size: answers per prompt. 0 keeps the current number.
          draft: None keeps the current draft.
          mode: mode of the config. None keeps the current mode.
          **settings: other fields of `Settings` to replace.

        Raises:
          ValueError: if `group_size` is given without `prompts`.
        """
        new_settings = self.settings._replace(**settings)
        # The number of slots depends on both.
        if group_size and not prompts:
            raise ValueError(
                f"group_size is {group_size}, but the number of prompts is missing: pass prompts"
            )
        if prompts:
            rows_per_prompt = group_size or new_settings.group_size
            # More slots than rows would stay empty.
            slots = min(self.slots, prompts * rows_per_prompt // row_shard_count(self.mesh))
            tail = (
                tuple(
                    slots // divisor
                    for divisor in (TAIL_ON_CARDS if has_accelerators(self.mesh) else TAILS)
                    if slots // divisor >= SMALLEST_TAIL
                )
                if self.uses_tail
                else ()
            )
            new_settings = new_settings._replace(
                group_size=rows_per_prompt, slots=slots, tail=settings.get("tail", tail)
            )
        draft, mode = draft or self.draft, mode or self.mode
        # Drafts that are not drawn at random need another mode than those that are.
        new_settings = new_settings._replace(mode=mode.for_draft(draft, new_settings.grid))
        return dataclasses.replace(self, settings=new_settings, draft=draft, mode=mode)

    def without_draft(self) -> "Generator":
        """Returns this generator without a draft, for plain decoding."""
        return self.make_variant(draft=PLAIN, lengths=())

    # ---- properties and state

    @property
    def compiler_options(self) -> dict[str, str]:
        """XLA options for programs that generate."""
        if not self.command_buffers:
            return {}
        # Generation communicates only within a data shard.
        members = self.mesh.size // self.mesh.shape[DATA]
        kinds = COMMAND_BUFFERS + ",COLLECTIVES" * (members > 1)
        # Allows graphs of a single kernel. XLA's default minimum would leave small pieces, and the
        # loops around them, outside.
        return {"xla_gpu_enable_command_buffer": kinds, "xla_gpu_graph_min_graph_size": "1"}

    @property
    def draft_length(self) -> int:
        """Maximum number of draft tokens per round (K), 0 for plain decoding."""
        return self.draft.max_length

    @property
    def taps(self) -> tuple[int, ...]:
        """Layer boundaries whose residual stream the draft reads."""
        return self.draft.taps

    @property
    def row_length(self) -> int:
        """Maximum tokens of a row, prompt and response together."""
        return self.prompt_length + self.settings.max_new_tokens

    @property
    def weight_layouts(self) -> tuple[WeightLayout, WeightLayout]:
        """Weight layouts of policy and draft."""
        return self.make_layouts(self.mesh, self.settings.slots, self.draft_length)

    def init_state(self) -> GeneratorState:
        """Returns the state before the first rollout."""
        lengths = self.settings.lengths
        return GeneratorState(
            overlap_by_factor=draft_temperature.init_overlap(self.draft_length, self.settings.grid),
            trend=schedule.init_trend(),
            chooser=(
                length_chooser.init_chooser(lengths, self.row_length) if lengths else NoChooser()
            ),
        )

    def update_state(self, state: GeneratorState, statistics: Statistics) -> GeneratorState:
        """Updates the state with a rollout's statistics.

        The state sets the draft's temperatures and lengths in later rollouts. It also tracks the
        acceptance length for the draft's training.
        """
        chooser = state.chooser
        if isinstance(chooser, LengthChooser):
            chooser = length_chooser.update_chooser(chooser, statistics)
        return GeneratorState(
            overlap_by_factor=draft_temperature.update_overlap(state.overlap_by_factor, statistics),
            trend=schedule.update_trend(state.trend, statistics),
            chooser=chooser,
        )

    def count_weight_bytes(self, weights: RolloutWeights) -> int:
        """Returns the bytes of the weights on each device.

        Each data shard holds all weights, split over `tensor`. Experts are also split over
        `expert`.
        """
        networks = weights.target, weights.drafter
        # These specs split nothing over `tensor`, which the last line accounts for.
        shard_shapes = jax.tree.map(
            lambda leaf, spec: NamedSharding(self.mesh, spec).shard_shape(leaf.shape),
            networks,
            shard_specs(self.mesh, networks),
        )
        sizes = jax.tree.map(
            lambda leaf, shape: math.prod(shape) * leaf.dtype.itemsize, networks, shard_shapes
        )
        return sum(jax.tree.leaves(sizes)) // self.mesh.shape[TENSOR]

    # ---- generation

    @jax.named_scope("load")
    def load(self, exported: ExportedWeights, state: GeneratorState) -> RolloutWeights:
        """Reshards exported weights, and lays them out for generation.

        Also chooses the draft's temperatures. The weights must be on this generator's mesh.
        """
        networks = to_rollout_layout((exported.policy, exported.draft), self.mesh)
        # Prefill does not read all weights. Without this order, its collectives could run in
        # parallel with those that gather the other weights.
        version = CollectiveOrder(self.mesh).run_after_networks(exported.version, networks)
        target, network = map(apply_layout, networks, self.weight_layouts)
        factor_index = draft_temperature.choose_factors(state.overlap_by_factor, self.settings.grid)
        drafter = Drafter(network=network, factor_index=factor_index, chooser=state.chooser)
        return RolloutWeights(target=target, drafter=drafter, version=version)

    def call_key(self, prompts: Prompts) -> Key[Array, ""]:
        """Returns the key of all noise of a call, derived from (seed, stream, batch)."""
        return stream_key(self.seed, prompts.stream, prompts.batch)

    @jax.named_scope("generate")
    def generate(self, weights: RolloutWeights, prompts: Prompts) -> Rollout:
        """Answers every prompt, in one program."""
        # The version exists once all weights are loaded.
        lengths = CollectiveOrder(self.mesh).run_after(prompts.lengths, weights.version)
        prompts = prompts.replace(lengths=lengths)
        rollout = generation.generate_sharded(
            weights.target,
            weights.drafter,
            self.draft,
            prompts,
            self.call_key(prompts),
            self.settings,
            self.mesh,
        )
        return rollout.replace(version=jnp.zeros_like(rollout.version) + weights.version)

    @jax.named_scope("generate")
    def begin(self, weights: RolloutWeights, prompts: Prompts) -> DecodeState:
        """Prefills the prompts, for generation in slices."""
        return generation.begin_sharded(
            weights.target,
            weights.drafter,
            self.draft,
            prompts,
            self.call_key(prompts),
            self.settings,
            self.mesh,
        )

    @jax.named_scope("generate")
    def advance(
        self, weights: RolloutWeights, state: DecodeState, max_rounds: Int[Array, ""]
    ) -> DecodeState:
        """Runs one slice of generation.

        Slices give the same tokens as one long call.
        """
        return generation.advance_sharded(
            weights.target, weights.drafter, self.draft, state, max_rounds, self.settings, self.mesh
        )

    def collect(self, weights: RolloutWeights, state: DecodeState) -> Rollout:
        """Returns the rows generated so far."""
        return state.rollout.replace(
            version=jnp.zeros_like(state.rollout.version) + weights.version
        )

    def measure_rollout(self, rollout: Rollout, weights: RolloutWeights) -> Metrics:
        """Returns metrics of the generated rows: lengths, endings and acceptance."""
        # Padding is idle, and so are all rows in the last call of a run.
        has_run, has_ended = rollout.status != IDLE, rollout.status == EOS
        rows = jnp.maximum(jnp.sum(has_run), 1)
        lengths = rollout.lengths - rollout.prompt_lengths
        tokens = jnp.sum(jnp.where(has_run, lengths, 0))
        ended_count = jnp.sum(has_ended)
        ended_length = jnp.sum(jnp.where(has_ended, lengths, 0)) / jnp.maximum(ended_count, 1)
        # Idle rows must be neither the shortest nor the longest.
        shortest = jnp.min(jnp.where(has_run, lengths, self.row_length))
        longest = jnp.max(jnp.where(has_run, lengths, 0))
        has_rows = jnp.any(has_run)
        return {
            "rollout/tokens": tokens,
            "rollout/rounds": jnp.sum(rollout.statistics.rounds) / rows,
            "rollout/length_mean": tokens / rows,
            "rollout/length_min": Mean.from_value(shortest, has_rows),
            "rollout/length_max": Mean.from_value(longest, has_rows),
            "rollout/length_ended": Mean.from_value(ended_length, ended_count > 0),
            "rollout/prompt_length": jnp.sum(jnp.where(has_run, rollout.prompt_lengths, 0)) / rows,
            **acceptance_metrics(
                rollout.statistics, tokens, weights.drafter.factor_index, self.settings.grid
            ),
            **{
                f"status/{name}": jnp.sum(rollout.status == code)
                for name, code in (("eos", EOS), ("length", LENGTH), ("failed", FAILED))
            },
        }

    # ---- shapes

    def empty_prompts(self, prompt_count: int) -> Prompts:
        """Returns zeros in the shape of a call's prompts."""
        tokens = jnp.zeros((prompt_count, self.prompt_length), jnp.int32)
        lengths = jnp.zeros((prompt_count,), jnp.int32)
        number = jnp.zeros((), jnp.int32)
        return Prompts(
            tokens=tokens,
            lengths=lengths,
            live=jnp.zeros((prompt_count,), bool),
            stream=number,
            batch=number,
            history=jnp.zeros((prompt_count, self.past_answers, self.row_length), jnp.int32),
            history_lengths=jnp.zeros((prompt_count, self.past_answers), jnp.int32),
        )

    def empty_rollout(self, row_count: int) -> Rollout:
        """Returns zeros in the shape of a rollout."""
        # As in `prepare_state`: log-probabilities have at least float32.
        accum_dtype: Any = jnp.float64 if self.dtype == "float64" else jnp.float32
        zeros, size = jnp.zeros((row_count,), jnp.int32), self.row_length
        statistics = init_statistics(
            row_count,
            self.settings.group_size,
            self.draft_length,
            len(self.settings.grid),
            accum_dtype,
        )
        logprobs: Float[Array, "B S"] = jnp.zeros((row_count, size), accum_dtype)
        tokens = jnp.zeros((row_count, size), jnp.int32)
        return Rollout(
            tokens=tokens,
            prompt_lengths=zeros,
            lengths=zeros,
            logprobs=logprobs,
            origin=jnp.full((row_count, size), PROMPT, jnp.int8),
            status=zeros,
            version=zeros,
            statistics=statistics,
        )


def to_rollout_layout(weights: Any, mesh: Mesh) -> Any:
    """Pads the vocabulary, and constrains every weight to the rollout layout.

    Inside a jit this is one all-gather for each sharded weight.
    """
    weights = pad_vocabulary(weights, mesh)
    return jax.lax.with_sharding_constraint(weights, assign_shardings(mesh, weights, ROLLOUT_RULES))
