"""Greedy answers of a small model.

Several programs generate the same answers, and their tokens are compared.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.gpu.cells import inference_config, random_prompts, replicate_shapes
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.run import GpuPlan
from jaxspec.bench.gpu.weights import random_weights
from jaxspec.build import build_step
from jaxspec.config.settings import DraftConfig, EngineConfig, RolloutConfig
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.host.programs import abstract_prompts
from jaxspec.models.layers import cast_floats
from jaxspec.rollout.generator import Generator
from jaxspec.state import Prompts, RolloutWeights
from jaxspec.step import Step
from jaxspec.transfer import export_weights

ROWS, PROMPT, NEW = 8, 256, 64
"""Number of rows, and maximum tokens of a prompt and of an answer."""
# A larger vocabulary would check nothing more, and another process holds the weights, too.
VOCAB = 8192
"""Maximum size of the vocabulary."""


class GreedyVariant(NamedTuple):
    """Program that generates the answers."""

    name: str
    draft_length: int
    stack_layers: bool = False
    command_buffers: bool = False

    @property
    def program_name(self) -> str:
        """Name of the variant's program."""
        return f"greedy answers, {self.name}"

    @property
    def layout_name(self) -> str:
        """Name of the program that lays out the variant's weights."""
        # Variants that differ in command buffers only have the same layout and share this program.
        layers_label = "layers stacked" if self.stack_layers else "layers unrolled"
        return f"weights of greedy answers, {'K' if self.draft_length else 'plain'}, {layers_label}"


def greedy_variants(plan: GpuPlan) -> dict[str, GreedyVariant]:
    """Returns the variants by name. On GPUs, one of them has command buffers."""
    draft_length = plan.options.draft_length
    variant_list = [
        GreedyVariant("plain", 0),
        GreedyVariant("drafts", draft_length),
        GreedyVariant("drafts, layers stacked", draft_length, stack_layers=True),
    ]
    if plan.targets_gpu:
        variant_list.append(
            GreedyVariant("drafts, command buffers", draft_length, command_buffers=True)
        )
    return {variant.name: variant for variant in variant_list}


def _build_step(plan: GpuPlan, variant: GreedyVariant) -> Step:
    options = plan.options
    # The sizes of --size tiny are below these limits.
    vocab = min(options.vocab, VOCAB)
    prompt_length, new_tokens = min(options.prompt, PROMPT), min(options.new, NEW)
    model = dataclasses.replace(options.policy, layers=options.right_layers, vocab=vocab)
    engine = EngineConfig(
        slots=ROWS,
        page_size=options.page_size,
        tail=False,
        stack_layers=variant.stack_layers,
        command_buffers=variant.command_buffers,
    )
    draft = DraftConfig(draft_length=options.draft_length, eagle3=Eagle3Config(vocab=vocab // 4))
    rollout = RolloutConfig(max_new_tokens=new_tokens, temperature=0.0, draft=draft, engine=engine)
    config = inference_config(options, model, rollout, ROWS, prompt_length)
    return build_step(config, plan.mesh, (), vocab)


def _build_generator(plan: GpuPlan, variant: GreedyVariant) -> Generator:
    generator = _build_step(plan, variant).generator
    return generator if variant.draft_length else generator.without_draft()


def _network_shapes(plan: GpuPlan, variant: GreedyVariant) -> tuple[Any, Any]:
    """Returns abstract policy and draft, as the learner has them but in the dtype of generation.

    The draft is None for a variant without one.
    """
    step = _build_step(plan, variant)

    def cast_networks() -> Any:
        return cast_floats((step.init_policy(), step.init_draft()), jnp.dtype(plan.options.dtype))

    policy, draft = replicate_shapes(plan.mesh, jax.eval_shape(cast_networks))
    return policy, draft if variant.draft_length else None


def greedy_recipes(plan: GpuPlan) -> list[Recipe]:
    """Lists the programs of all variants, and those that lay out their weights."""
    # By name, since variants share layouts.
    recipes: dict[str, Recipe] = {}
    for variant in greedy_variants(plan).values():
        generator = _build_generator(plan, variant)

        # Defaults bind this iteration's values. The closures run after the loop has ended.
        def load_weights(
            policy: Any, draft: Any, generator: Generator = generator
        ) -> RolloutWeights:
            exported = export_weights(policy, draft, generator.dtype)
            return generator.load(exported, generator.init_state())

        def network_shapes(variant: GreedyVariant = variant) -> tuple[Any, Any]:
            return _network_shapes(plan, variant)

        def program_inputs(
            network_shapes: Any = network_shapes,
            load_weights: Any = load_weights,
            generator: Generator = generator,
        ) -> tuple[RolloutWeights, Prompts]:
            weights = replicate_shapes(plan.mesh, jax.eval_shape(load_weights, *network_shapes()))
            return weights, abstract_prompts(generator, ROWS)

        recipes[variant.layout_name] = Recipe(variant.layout_name, load_weights, network_shapes)
        recipes[variant.program_name] = Recipe(
            variant.program_name,
            generator.generate,
            program_inputs,
            compiler_options=generator.compiler_options,
        )
    return list(recipes.values())


class GreedyInputs(NamedTuple):
    """Inputs of all variants: networks as a learner has them, and prompts."""

    policy: Any
    draft: Any
    prompts: Prompts


def make_inputs(plan: GpuPlan) -> GreedyInputs:
    """Makes the inputs, which are the same in every process with the same options."""
    variant = greedy_variants(plan)["drafts"]
    policy, draft = _network_shapes(plan, variant)
    seed, options = plan.options.seed, plan.options
    vocab = min(options.vocab, VOCAB)
    prompts = random_prompts(
        _build_generator(plan, variant),
        ROWS,
        dataclasses.replace(options, vocab=vocab, draft_vocab=0),
        0,
    )
    return GreedyInputs(
        random_weights(policy, plan.mesh, seed), random_weights(draft, plan.mesh, seed + 1), prompts
    )


def generate_answers(
    layout: Any, program: Any, variant: GreedyVariant, inputs: GreedyInputs
) -> np.ndarray:
    """Returns the tokens of prompts and answers."""
    weights = layout(inputs.policy, inputs.draft if variant.draft_length else None)
    return np.asarray(program(weights, inputs.prompts).tokens)


def compare_tokens(tokens: np.ndarray, other_tokens: np.ndarray) -> dict[str, Any]:
    """Compares the tokens of two programs.

    The result has the number of equal rows, and the smallest position at which a row differs.
    """
    is_equal = tokens == other_tokens
    equal_rows = is_equal.all(axis=1)
    # The first minimum of booleans is the first False.
    first_positions = np.argmin(is_equal[~equal_rows], axis=1)
    return {
        "equal": bool(equal_rows.all()),
        "equal_rows": int(equal_rows.sum()),
        "rows": len(equal_rows),
        "first_difference": int(first_positions.min()) if len(first_positions) else None,
    }


def describe_difference(comparison: dict[str, Any]) -> str:
    """Describes a comparison in words."""
    if comparison["equal"]:
        return "the same tokens"
    rows = f"{comparison['rows'] - comparison['equal_rows']} of {comparison['rows']} rows differ"
    return f"{rows}, the first at position {comparison['first_difference']}"
