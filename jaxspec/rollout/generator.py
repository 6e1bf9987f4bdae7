"""The generator: how weights become rollouts, on a mesh of its own; what it needs to know of a run
was chosen when it was built."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Key, Num

from jaxspec.drafts import draft_temperature, schedule
from jaxspec.drafts.base import Draft
from jaxspec.inputs.streams import Stream, stream_key
from jaxspec.kernels.order import needs_ordering, order_after, signal_all_ready, signal_ready
from jaxspec.mesh import (
    DATA,
    ROLLOUT_RULES,
    TENSOR,
    assign_shardings,
    has_accelerators,
    row_shard_count,
)
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import LOGICAL_AXES, cast_floats
from jaxspec.models.lora import AdaptedDecoder, merge_lora
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
from jaxspec.state import (
    EOS,
    FAILED,
    IDLE,
    LENGTH,
    PROMPT,
    Drafter,
    GeneratorState,
    Prompts,
    PyTree,
    Rollout,
    RolloutWeights,
    Statistics,
)

COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
"""XLA's names of what can go into a CUDA graph: all that it puts there by itself, and loops."""
SMALLEST_TAIL = 4
"""Slots below which a smaller loop saves nothing that compiling it is worth."""
TAILS, TAIL_ON_CARDS = (4, 16), (8,)
"""Parts of the slots that the loops of the last rows have. On accelerators a round costs nearly
the same with fewer rows, and each loop takes seconds to compile."""


@dataclasses.dataclass(frozen=True)
class Generator:
    """How prompts are answered."""

    mesh: Mesh
    settings: Settings
    draft: Draft | None
    dtype: str
    """Of weights, keys and values."""
    seed: int
    prompt_length: int
    """Of the longest prompt."""
    past_answers: int
    """Earlier answers that a prompt brings along."""
    slots: int
    """Rows that a data shard generates at once, at most."""
    uses_tail: bool
    """Whether the last rows move to smaller loops."""
    make_layouts: Callable[[Mesh, int, int], tuple[WeightLayout, WeightLayout]]
    """(mesh, slots, draft length) -> how the weights of the policy lie for that, and those of the
    draft."""
    command_buffers: bool
    """Whether its loops go into CUDA graphs."""
    description: str
    """What else its programs depend on (policy, draft), in words that a key of measurements is made
    of."""

    # ---- variants

    def make_variant(
        self,
        *,
        prompts: int = 0,
        group_size: int = 0,
        draft: Draft | None = None,
        **settings: Any,
    ) -> "Generator":
        """This generator for another number of `prompts` a call, each answered `group_size`
        times, with another draft, or with other settings.

        A variant is one more program to compile.

        Raises:
          ValueError: another group size without the number of prompts, on which the number of slots
            depends.
        """
        new_settings = self.settings._replace(**settings)
        if group_size and not prompts:
            raise ValueError(f"groups of {group_size} rows: say how many prompts there are, too")
        if prompts:
            rows_per_prompt = group_size or new_settings.group_size
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
        return dataclasses.replace(self, settings=new_settings, draft=draft or self.draft)

    def without_draft(self) -> "Generator":
        """This generator without a draft: plain decoding."""
        return dataclasses.replace(self, draft=None, settings=self.settings._replace(lengths=()))

    # ---- what it knows

    @property
    def compiler_options(self) -> dict[str, str]:
        """Of programs that generate. A graph may be of one kernel, as without that limit lifted
        some pieces, and with them the loops around, would stay outside."""
        if not self.command_buffers:
            return {}
        members = self.mesh.size // self.mesh.shape[DATA]
        kinds = COMMAND_BUFFERS + ",COLLECTIVES" * (members > 1)
        return {"xla_gpu_enable_command_buffer": kinds, "xla_gpu_graph_min_graph_size": "1"}

    @property
    def draft_length(self) -> int:
        """Tokens drafted a round (K); 0: plain decoding."""
        return self.draft.max_length if self.draft else 0

    @property
    def taps(self) -> tuple[int, ...]:
        """Boundaries at which the draft reads the policy's residual stream."""
        return self.draft.taps if self.draft else ()

    @property
    def row_length(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_length + self.settings.max_new_tokens

    @property
    def weight_layouts(self) -> tuple[WeightLayout, WeightLayout]:
        """How the weights of policy and draft lie."""
        return self.make_layouts(self.mesh, self.settings.slots, self.draft_length)

    def init_state(self) -> GeneratorState:
        """What is known before anything was generated."""
        chooser = (
            length_chooser.init_chooser(self.settings.lengths, self.row_length)
            if self.settings.lengths
            else None
        )
        return GeneratorState(
            overlap_by_factor=draft_temperature.init_overlap(self.draft_length, self.settings.grid),
            trend=schedule.init_trend(),
            chooser=chooser,
        )

    def update_state(self, state: GeneratorState, statistics: Statistics) -> GeneratorState:
        """What is known after a rollout: for the draft's temperatures and lengths in the next
        ones, and for its training."""
        chooser = (
            None
            if state.chooser is None
            else length_chooser.update_chooser(state.chooser, statistics)
        )
        return GeneratorState(
            overlap_by_factor=draft_temperature.update_overlap(state.overlap_by_factor, statistics),
            trend=schedule.update_trend(state.trend, statistics),
            chooser=chooser,
        )

    def count_weight_bytes(self, weights: RolloutWeights) -> int:
        """Bytes of the weights on each device: whole on every data shard, but that `tensor` splits
        them, and `expert` the experts."""
        networks = weights.target, weights.drafter
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

    @jax.named_scope("sync")
    def sync_weights(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        state: GeneratorState,
        version: Int[Array, ""] | int = 0,
    ) -> RolloutWeights:
        """Weights as generation reads them: adapters merged, cast, resharded, laid out. The only
        place where weights change sides."""
        policy = merge_lora(policy, rounding_key(self.seed, version))
        networks = to_rollout_layout(
            (policy, draft), self.mesh, LOGICAL_AXES, jnp.dtype(self.dtype)
        )
        version = jnp.asarray(version, jnp.int32)
        # prefill does not read all weights, and would run beside the collectives of the others
        if needs_ordering(self.mesh):
            version = order_after(version, [signal_all_ready(networks, self.mesh, LOGICAL_AXES)])
        target, network = map(apply_layout, networks, self.weight_layouts)
        factor_index = draft_temperature.choose_factors(state.overlap_by_factor, self.settings.grid)
        drafter = Drafter(network=network, factor_index=factor_index, chooser=state.chooser)
        return RolloutWeights(target=target, drafter=drafter, version=version)

    def call_key(self, prompts: Prompts) -> Key[Array, ""]:
        """All noise of a call comes from here: (seed, stream, batch)."""
        return stream_key(self.seed, prompts.stream, prompts.batch)

    @jax.named_scope("generate")
    def generate(self, weights: RolloutWeights, prompts: Prompts) -> Rollout:
        """Answers every prompt."""
        if needs_ordering(self.mesh):
            lengths = order_after(prompts.lengths, [signal_ready(weights.version)])
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
        """Prefills, for generation in slices."""
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
        """One slice of generation; slices give the tokens of one long call."""
        return generation.advance_sharded(
            weights.target, weights.drafter, self.draft, state, max_rounds, self.settings, self.mesh
        )

    def collect(self, weights: RolloutWeights, state: DecodeState) -> Rollout:
        """The rows as they stand."""
        return state.rollout.replace(
            version=jnp.zeros_like(state.rollout.version) + weights.version
        )

    def measure_rollout(
        self, rollout: Rollout, weights: RolloutWeights
    ) -> dict[str, Num[Array, ""]]:
        """Lengths, endings and acceptance of the rows that were generated."""
        has_run, has_ended = rollout.status != IDLE, rollout.status == EOS
        rows = jnp.maximum(jnp.sum(has_run), 1)
        lengths = rollout.lengths - rollout.prompt_lengths
        tokens = jnp.sum(jnp.where(has_run, lengths, 0))
        ended_count = jnp.sum(has_ended)
        ended_length = jnp.sum(jnp.where(has_ended, lengths, 0)) / jnp.maximum(ended_count, 1)
        run_lengths = jnp.where(has_run, lengths.astype(jnp.float32), jnp.nan)
        return {
            "rollout/tokens": tokens,
            "rollout/rounds": jnp.sum(rollout.statistics.rounds) / rows,
            "rollout/length_mean": tokens / rows,
            "rollout/length_min": jnp.nanmin(run_lengths),
            "rollout/length_max": jnp.nanmax(run_lengths),
            "rollout/length_ended": jnp.where(ended_count > 0, ended_length, jnp.nan),
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
        """Zeros in the shape of a call's prompts."""
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
        """Zeros in the shape of a rollout."""
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


def rounding_key(seed: int, version: Int[Array, ""] | int) -> Key[Array, ""]:
    """Key by which a version's merged adapters are rounded, whenever it generates."""
    return stream_key(seed, Stream.ROUNDING, version)


def to_rollout_layout(
    network: Any, mesh: Mesh, axes: Mapping[str, tuple[str | None, ...]], dtype: Any
) -> Any:
    """Weights from the train layout to the rollout layout: casts to `dtype` and constrains every
    leaf, inside a jit one all-gather for each sharded weight."""
    # without the barrier XLA gathers some weights first, in the wider type, and casts them then
    weights = pad_vocabulary(jax.lax.optimization_barrier(cast_floats(network, dtype)), mesh)
    return jax.lax.with_sharding_constraint(
        weights, assign_shardings(mesh, weights, axes, ROLLOUT_RULES)
    )
