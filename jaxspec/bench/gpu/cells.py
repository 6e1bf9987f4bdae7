"""Cells of the tables: generation of some rows with some draft, as two programs, its weights and
its prompts."""

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
from jaxspec.host.programs import abstract_leaf, abstract_prompts, put_like
from jaxspec.inputs.spec import ModelSpec
from jaxspec.inputs.streams import Stream
from jaxspec.mesh import replicated_sharding
from jaxspec.rollout.generator import Generator
from jaxspec.state import Drafter, Prompts, PyTree, RolloutWeights
from jaxspec.step import Step


class Cell(NamedTuple):
    """Generation of some rows, each with a prompt of its own."""

    rows: int
    draft_length: int
    """Tokens drafted a round (K); 0: plain decoding."""
    new_tokens: int
    """Tokens of each answer."""
    draft_vocab: int = 0
    """Tokens of the draft's own vocabulary; 0: the policy's."""
    command_buffers: bool = False
    """Whether loops go into command buffers."""

    @property
    def label(self) -> str:
        """Names the cell but for its rounds' command buffers."""
        draft_label = f"K={self.draft_length}" if self.draft_length else "plain"
        vocab_label = (
            ", full draft vocabulary" if self.draft_length and not self.draft_vocab else ""
        )
        return f"{self.rows} rows, {draft_label}{vocab_label}, answers of {self.new_tokens}"

    @property
    def prefill_name(self) -> str:
        """Names the program that reads the prompts; command buffers are of no matter there."""
        return f"prefill of {self.label}"

    @property
    def rounds_name(self) -> str:
        """Names the program of the rounds."""
        return f"rounds of {self.label}{', command buffers' if self.command_buffers else ''}"


def replicate_shapes(mesh: Mesh, shapes: PyTree) -> PyTree:
    """Shapes placed on the one device of a mesh."""
    return jax.tree.map(lambda leaf: abstract_leaf(leaf, replicated_sharding(mesh)), shapes)


def inference_config(
    options: GpuOptions, model: ModelSpec, rollout: RolloutConfig, rows: int, prompt: int
) -> ResolvedConfig:
    """A config for answers of which nothing is learned, each to a prompt of its own."""
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
    """Builds the cells' programs and arguments; weights are shared by all of them."""

    def __init__(self, options: GpuOptions, mesh: Mesh) -> None:
        """Makes no array yet."""
        self.options, self.mesh = options, mesh
        self._weights: dict[Any, PyTree] = {}

    def make_step(self, cell: Cell) -> Step:
        """Builds the step that a cell's generator belongs to."""
        options = self.options
        draft = DraftConfig(
            draft_length=max(cell.draft_length, 1),
            vocab=cell.draft_vocab,
            # no temperature of the draft is tuned where nothing learns
            sampling="sample",
        )
        engine = EngineConfig(
            slots=cell.rows,
            page_size=options.page_size,
            tail=False,
            command_buffers=cell.command_buffers,
        )
        rollout = RolloutConfig(max_new_tokens=cell.new_tokens, draft=draft, engine=engine)
        config = inference_config(options, options.policy, rollout, cell.rows, options.prompt)
        return build_step(config, self.mesh, (), options.vocab)

    def make_generator(self, cell: Cell) -> Generator:
        """Builds a cell's generator; of its drafts as many are kept as is prescribed."""
        generator = self.make_step(cell).generator
        if not cell.draft_length:
            return generator.without_draft()
        return generator.make_variant(rule=synthetic_rule(self.options.acceptance))

    # ---- programs

    def abstract_weights(self, cell: Cell) -> RolloutWeights:
        """Shapes of the weights as a cell's generator reads them."""
        step, generator = self.make_step(cell), self.make_generator(cell)
        networks = jax.eval_shape(lambda: (step.init_policy(), step.init_draft()))
        policy, draft = networks if cell.draft_length else (networks[0], None)
        weights = jax.eval_shape(generator.sync_weights, policy, draft, generator.init_state())
        return replicate_shapes(self.mesh, weights)

    def list_recipes(self, cell: Cell) -> list[Recipe]:
        """The programs of a cell: prefill, and a number of rounds."""
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
                donate=(1,),
                compiler_options=generator.compiler_options,
            ),
        ]

    # ---- arguments

    def rollout_weights(self, cell: Cell) -> RolloutWeights:
        """Weights on the device: the policy once for all cells, a draft for each vocabulary."""
        shapes = self.abstract_weights(cell)
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
        """Random prompts of full length."""
        return random_prompts(self.make_generator(cell), cell.rows, self.options, call)

    def drop_weights(self) -> None:
        """Gives up all weights; those that are wanted again are made anew."""
        self._weights.clear()

    def _reuse_weights(self, shapes: PyTree, seed: int) -> PyTree:
        leaves, structure = jax.tree.flatten(shapes)
        key = structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), seed
        if key not in self._weights:
            self._weights[key] = random_weights(shapes, self.mesh, seed)
        return self._weights[key]


def random_prompts(generator: Generator, count: int, options: GpuOptions, call: int) -> Prompts:
    """Prompts of full length, of tokens drawn evenly."""
    shapes = abstract_prompts(generator, count)
    empty_prompts = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    rng = np.random.default_rng((options.seed, call))
    prompts = empty_prompts.replace(
        tokens=rng.integers(0, options.vocab, shapes.tokens.shape, np.int32),
        lengths=np.full(count, generator.prompt_length, np.int32),
        live=np.ones(count, bool),
        stream=np.int32(Stream.SAMPLE),
        batch=np.int32(call),
    )
    return put_like(prompts, shapes)
