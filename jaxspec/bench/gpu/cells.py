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
from jaxspec.bench.loaded import synthetic
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
from jaxspec.host.runner import abstract_prompts, placed, put
from jaxspec.inputs.spec import ModelSpec
from jaxspec.inputs.streams import Stream
from jaxspec.mesh import replicated
from jaxspec.rollout.generator import Generator
from jaxspec.state import Drafter, Prompts, PyTree, Ready
from jaxspec.step import Step


class Cell(NamedTuple):
    """Generation of some rows, each with a prompt of its own."""

    rows: int
    length: int
    """Tokens drafted a round (K); 0: plain decoding."""
    new: int
    """Tokens of each answer."""
    vocab: int = 0
    """Tokens of the draft's own vocabulary; 0: the policy's."""
    graphs: bool = False
    """Whether loops go into command buffers."""

    @property
    def words(self) -> str:
        """Names the cell but for its rounds' command buffers."""
        draft = f"K={self.length}" if self.length else "plain"
        whole = ", full draft vocabulary" if self.length and not self.vocab else ""
        return f"{self.rows} rows, {draft}{whole}, answers of {self.new}"

    @property
    def prefill_name(self) -> str:
        """Names the program that reads the prompts; command buffers are of no matter there."""
        return f"prefill of {self.words}"

    @property
    def rounds_name(self) -> str:
        """Names the program of the rounds."""
        return f"rounds of {self.words}{', command buffers' if self.graphs else ''}"


def whole_on(mesh: Mesh, shapes: PyTree) -> PyTree:
    """Shapes placed on the one device of a mesh."""
    return jax.tree.map(lambda leaf: placed(leaf, replicated(mesh)), shapes)


def answering(
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

    def step(self, cell: Cell) -> Step:
        """Builds the step that a cell's generator belongs to."""
        options = self.options
        draft = DraftConfig(
            draft_length=max(cell.length, 1),
            vocab=cell.vocab,
            # no temperature of the draft is tuned where nothing learns
            sampling="sample",
        )
        engine = EngineConfig(
            slots=cell.rows,
            page_size=options.page_size,
            tail=False,
            command_buffers=cell.graphs,
        )
        rollout = RolloutConfig(max_new_tokens=cell.new, draft=draft, engine=engine)
        config = answering(options, options.policy, rollout, cell.rows, options.prompt)
        return build_step(config, self.mesh, (), options.vocab)

    def generator(self, cell: Cell) -> Generator:
        """Builds a cell's generator; of its drafts as many are kept as is prescribed."""
        generator = self.step(cell).generator
        if not cell.length:
            return generator.plain()
        return generator.with_(rule=synthetic(self.options.acceptance))

    # ---- programs

    def abstract_ready(self, cell: Cell) -> Ready:
        """Shapes of the weights as a cell's generator reads them."""
        step, generator = self.step(cell), self.generator(cell)
        networks = jax.eval_shape(lambda: (step.fresh_policy(), step.fresh_draft()))
        policy, draft = networks if cell.length else (networks[0], None)
        ready = jax.eval_shape(generator.sync, policy, draft, generator.start())
        return whole_on(self.mesh, ready)

    def recipes(self, cell: Cell) -> list[Recipe]:
        """The programs of a cell: prefill, and a number of rounds."""
        generator = self.generator(cell)

        def inputs() -> tuple[Ready, Prompts]:
            return self.abstract_ready(cell), abstract_prompts(generator, cell.rows)

        def rounds_inputs() -> tuple[Any, ...]:
            ready, prompts = inputs()
            running = jax.eval_shape(generator.begin, ready, prompts)
            count = jax.ShapeDtypeStruct((), jnp.int32)
            return ready, *whole_on(self.mesh, (running, count))

        return [
            Recipe(cell.prefill_name, generator.begin, inputs),
            Recipe(
                cell.rounds_name,
                generator.advance,
                rounds_inputs,
                donate=(1,),
                options=generator.compiler_options,
            ),
        ]

    # ---- arguments

    def ready(self, cell: Cell) -> Ready:
        """Weights on the device: the policy once for all cells, a draft for each vocabulary."""
        shapes = self.abstract_ready(cell)
        target = self._kept(shapes.target, self.options.seed)
        network = self._kept(shapes.drafter.network, self.options.seed + 1)
        choice = jnp.zeros(shapes.drafter.choice.shape, jnp.int32)
        small = jax.device_put((choice, jnp.int32(0)), replicated(self.mesh))
        return Ready(
            target=target, drafter=Drafter(network=network, choice=small[0]), version=small[1]
        )

    def prompts(self, cell: Cell, call: int = 0) -> Prompts:
        """Random prompts of full length."""
        return random_prompts(self.generator(cell), cell.rows, self.options, call)

    def drop_weights(self) -> None:
        """Gives up all weights; those that are wanted again are made anew."""
        self._weights.clear()

    def _kept(self, shapes: PyTree, seed: int) -> PyTree:
        leaves, structure = jax.tree.flatten(shapes)
        key = structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), seed
        if key not in self._weights:
            self._weights[key] = random_weights(shapes, self.mesh, seed)
        return self._weights[key]


def random_prompts(generator: Generator, count: int, options: GpuOptions, call: int) -> Prompts:
    """Prompts of full length, of tokens drawn evenly."""
    like = abstract_prompts(generator, count)
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    random = np.random.default_rng((options.seed, call))
    asked = nothing.replace(
        tokens=random.integers(0, options.vocab, like.tokens.shape, np.int32),
        lengths=np.full(count, generator.prompt_length, np.int32),
        live=np.ones(count, bool),
        stream=np.int32(Stream.SAMPLE),
        batch=np.int32(call),
    )
    return put(asked, like)
