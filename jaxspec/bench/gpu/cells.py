"""Cells of the tables of `bench gpu`.

A cell is generation at one number of rows with one draft. This module builds its two programs, its
weights and its prompts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.weights import random_weights
from jaxspec.bench.loaded import synthetic_rule
from jaxspec.build import build_step
from jaxspec.config.settings import (
    AdvantageConfig,
    BatchConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
    OfflineConfig,
    ResolvedConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.host.programs import abstract_leaf, abstract_prompts, put_like
from jaxspec.inputs.spec import ModelSpec
from jaxspec.inputs.streams import Stream
from jaxspec.mesh import replicated_sharding
from jaxspec.rollout.generator import Generator
from jaxspec.rollout.verification.modes import Rejection
from jaxspec.state import Drafter, Prompts, PyTree, RolloutWeights
from jaxspec.step import Step
from jaxspec.transfer import export_weights


class Cell(NamedTuple):
    """Generation settings of one entry of a table. Each generated row has its own prompt."""

    rows: int
    draft_length: int
    """Draft tokens per round (K), 0 for plain decoding."""
    new_tokens: int
    """Tokens of each answer."""
    draft_vocab: int = 0
    """Size of the draft's own vocabulary, 0 for the policy's."""
    command_buffers: bool = False
    """Whether the rounds' loops are captured into command buffers."""

    @property
    def label(self) -> str:
        """Name of the cell, without its command buffers."""
        draft_label = f"K={self.draft_length}" if self.draft_length else "plain"
        vocab_label = (
            ", full draft vocabulary" if self.draft_length and not self.draft_vocab else ""
        )
        return f"{self.rows} rows, {draft_label}{vocab_label}, answers of {self.new_tokens}"

    @property
    def prefill_name(self) -> str:
        """Name of the program that prefills the prompts."""
        # Cells with and without command buffers share the program, as they affect rounds only.
        return f"prefill of {self.label}"

    @property
    def rounds_name(self) -> str:
        """Name of the program that runs rounds."""
        return f"rounds of {self.label}{', command buffers' if self.command_buffers else ''}"


def replicate_shapes(mesh: Mesh, shapes: PyTree) -> PyTree:
    """Returns abstract arrays with a replicated sharding."""
    return jax.tree.map(lambda leaf: abstract_leaf(leaf, replicated_sharding(mesh)), shapes)


def inference_config(
    options: GpuOptions, model: ModelSpec, rollout: RolloutConfig, rows: int, prompt: int
) -> ResolvedConfig:
    """Builds a config for generation without learning, one answer per prompt."""
    # A group advantage needs two answers, so there is no baseline and no std.
    return ResolvedConfig(
        model=model,
        rollout=rollout,
        batch=BatchConfig(prompts=rows, group_size=1),
        advantage=AdvantageConfig(baseline="none", std="none"),
        data=DataConfig(max_prompt_length=prompt),
        sft=SftConfig(steps=0),
        offline=OfflineConfig(steps=0),
        seed=options.seed,
    )


class Cells:
    """Builds programs and arguments of cells. All cells share weights of the same shapes."""

    def __init__(self, options: GpuOptions, mesh: Mesh) -> None:
        """Stores options and mesh. Arrays are made on demand."""
        self.options, self.mesh = options, mesh
        self._weights: dict[Any, PyTree] = {}

    def make_step(self, cell: Cell) -> Step:
        """Builds the step of a cell."""
        options = self.options
        draft = DraftConfig(
            # A config has no draft length 0. `make_generator` removes the draft for plain decoding.
            draft_length=max(cell.draft_length, 1),
            eagle3=Eagle3Config(vocab=cell.draft_vocab),
            # `auto` would tune the draft's temperature, which only a run does.
            sampling="sample",
        )
        engine = EngineConfig(
            slots=cell.rows,
            page_size=options.page_size,
            # Every row generates the same number of tokens.
            tail=False,
            command_buffers=cell.command_buffers,
        )
        rollout = RolloutConfig(max_new_tokens=cell.new_tokens, draft=draft, engine=engine)
        config = inference_config(options, options.policy, rollout, cell.rows, options.prompt)
        # No stop ids, so that every answer has its full length.
        return build_step(config, self.mesh, (), options.vocab)

    def make_generator(self, cell: Cell) -> Generator:
        """Builds a cell's generator. It keeps drafts at the prescribed acceptance, if any."""
        generator = self.make_step(cell).generator
        if not cell.draft_length:
            return generator.without_draft()
        # Weights are random, so a real acceptance would be near zero.
        mode = Rejection(synthetic_rule(self.options.acceptance))
        return generator.make_variant(mode=mode)

    # ---- programs

    def abstract_weights(self, cell: Cell) -> RolloutWeights:
        """Describes the weights that a cell's generator reads, without allocating them."""
        step, generator = self.make_step(cell), self.make_generator(cell)
        networks = jax.eval_shape(lambda: (step.init_policy(), step.init_draft()))
        policy, draft = networks if cell.draft_length else (networks[0], None)
        exported = jax.eval_shape(partial(export_weights, dtype=generator.dtype), policy, draft)
        weights = jax.eval_shape(generator.load, exported, generator.init_state())
        return replicate_shapes(self.mesh, weights)

    def list_recipes(self, cell: Cell) -> list[Recipe]:
        """Lists the programs of a cell: prefill, and rounds whose number is an argument."""
        generator = self.make_generator(cell)

        def prefill_inputs() -> tuple[RolloutWeights, Prompts]:
            return self.abstract_weights(cell), abstract_prompts(generator, cell.rows)

        def rounds_inputs() -> tuple[Any, ...]:
            weights, prompts = prefill_inputs()
            decode_state = jax.eval_shape(generator.begin, weights, prompts)
            count = jax.ShapeDtypeStruct((), jnp.int32)
            return weights, *replicate_shapes(self.mesh, (decode_state, count))

        return [
            Recipe(cell.prefill_name, generator.begin, prefill_inputs),
            Recipe(
                cell.rounds_name,
                generator.advance,
                rounds_inputs,
                # Rounds update the caches of the decode state in place.
                donate=(1,),
                compiler_options=generator.compiler_options,
            ),
        ]

    # ---- arguments

    def rollout_weights(self, cell: Cell) -> RolloutWeights:
        """Returns a cell's weights on the device.

        All cells share one policy. Cells with the same draft vocabulary share a draft.
        """
        shapes = self.abstract_weights(cell)
        # Policy and draft have their own seeds, so that leaves at the same place differ.
        target = self._reuse_weights(shapes.target, self.options.seed)
        network = self._reuse_weights(shapes.drafter.network, self.options.seed + 1)
        choice = jnp.zeros(shapes.drafter.factor_index.shape, jnp.int32)
        scalars = jax.device_put((choice, jnp.int32(0)), replicated_sharding(self.mesh))
        return RolloutWeights(
            target=target,
            drafter=Drafter(network=network, factor_index=scalars[0]),
            version=scalars[1],
        )

    def make_prompts(self, cell: Cell, call: int = 0) -> Prompts:
        """Returns random prompts of full length for a cell. They depend on `call`."""
        return random_prompts(self.make_generator(cell), cell.rows, self.options, call)

    def drop_weights(self) -> None:
        """Drops all weights. They are made again when requested."""
        # A GRPO step needs the memory.
        self._weights.clear()

    def _reuse_weights(self, shapes: PyTree, seed: int) -> PyTree:
        # Shapes identify a network, since all cells have the same policy sizes.
        leaves, structure = jax.tree.flatten(shapes)
        key = structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), seed
        if key not in self._weights:
            self._weights[key] = random_weights(shapes, self.mesh, seed)
        return self._weights[key]


def random_prompts(generator: Generator, count: int, options: GpuOptions, call: int) -> Prompts:
    """Returns prompts of full length with uniformly random tokens."""
    shapes = abstract_prompts(generator, count)
    empty_prompts = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    # Seeded by the call, so that its prompts are the same in every process.
    rng = np.random.default_rng((options.seed, call))
    prompts = empty_prompts.replace(
        tokens=rng.integers(0, options.vocab, shapes.tokens.shape, np.int32),
        lengths=np.full(count, generator.prompt_length, np.int32),
        live=np.ones(count, bool),
        stream=np.int32(Stream.SAMPLE),
        batch=np.int32(call),
    )
    return put_like(prompts, shapes)
