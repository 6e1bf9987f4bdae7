"""Greedy answers of a model of few layers, by programs that must give the same tokens."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.gpu.cells import answering, random_prompts, whole_on
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.run import Plan
from jaxspec.bench.gpu.weights import random_weights
from jaxspec.build import build_step
from jaxspec.config.settings import DraftConfig, EngineConfig, RolloutConfig
from jaxspec.host.runner import abstract_prompts
from jaxspec.models.layers import cast
from jaxspec.rollout.generator import Generator
from jaxspec.state import Prompts, Ready
from jaxspec.step import Step

ROWS, PROMPT, NEW = 8, 256, 64
VOCAB = 8192
"""At most: of a large vocabulary nothing would be learned here, and another process holds the
weights, too."""


class Variant(NamedTuple):
    """A way to make the answers."""

    name: str
    length: int
    stacked: bool = False
    graphs: bool = False

    @property
    def program(self) -> str:
        """Names its program."""
        return f"greedy answers, {self.name}"

    @property
    def layout(self) -> str:
        """Names the program that lays its weights out."""
        way = "layers stacked" if self.stacked else "layers unrolled"
        return f"weights of greedy answers, {'K' if self.length else 'plain'}, {way}"


def variants(plan: Plan) -> dict[str, Variant]:
    """By name; those with command buffers only for GPUs."""
    length = plan.options.draft_length
    listed = [
        Variant("plain", 0),
        Variant("drafts", length),
        Variant("drafts, layers stacked", length, stacked=True),
    ]
    if plan.on_gpu:
        listed.append(Variant("drafts, command buffers", length, graphs=True))
    return {variant.name: variant for variant in listed}


def _step(plan: Plan, variant: Variant) -> Step:
    options = plan.options
    vocab = min(options.vocab, VOCAB)
    prompt, new = min(options.prompt, PROMPT), min(options.new, NEW)
    model = dataclasses.replace(options.policy, layers=options.right_layers, vocab=vocab)
    engine = EngineConfig(
        slots=ROWS,
        page_size=options.page_size,
        tail=False,
        stack_layers=variant.stacked,
        command_buffers=variant.graphs,
    )
    draft = DraftConfig(draft_length=options.draft_length, vocab=vocab // 4)
    rollout = RolloutConfig(max_new_tokens=new, temperature=0.0, draft=draft, engine=engine)
    config = answering(options, model, rollout, ROWS, prompt)
    return build_step(config, plan.mesh, (), vocab)


def _generator(plan: Plan, variant: Variant) -> Generator:
    generator = _step(plan, variant).generator
    return generator if variant.length else generator.plain()


def _networks(plan: Plan, variant: Variant) -> tuple[Any, Any]:
    """Shapes of policy and draft in the train layout, in the type of generation."""
    step = _step(plan, variant)

    def networks() -> Any:
        return cast((step.fresh_policy(), step.fresh_draft()), jnp.dtype(plan.options.dtype))

    policy, draft = whole_on(plan.mesh, jax.eval_shape(networks))
    return policy, draft if variant.length else None


def greedy_recipes(plan: Plan) -> list[Recipe]:
    """Programs of all variants, and those that lay their weights out."""
    found: dict[str, Recipe] = {}
    for variant in variants(plan).values():
        generator = _generator(plan, variant)

        def laid_out(policy: Any, draft: Any, generator: Generator = generator) -> Ready:
            return generator.sync(policy, draft, generator.start())

        def networks(variant: Variant = variant) -> tuple[Any, Any]:
            return _networks(plan, variant)

        def inputs(
            networks: Any = networks, laid_out: Any = laid_out, generator: Generator = generator
        ) -> tuple[Ready, Prompts]:
            ready = whole_on(plan.mesh, jax.eval_shape(laid_out, *networks()))
            return ready, abstract_prompts(generator, ROWS)

        found[variant.layout] = Recipe(variant.layout, laid_out, networks)
        found[variant.program] = Recipe(
            variant.program, generator.generate, inputs, options=generator.compiler_options
        )
    return list(found.values())


class Inputs(NamedTuple):
    """Networks in the train layout, and prompts."""

    policy: Any
    draft: Any
    prompts: Prompts


def greedy_inputs(plan: Plan) -> Inputs:
    """Makes them, the same in every process."""
    drafts = variants(plan)["drafts"]
    policy, draft = _networks(plan, drafts)
    seed, options = plan.options.seed, plan.options
    vocab = min(options.vocab, VOCAB)
    prompts = random_prompts(
        _generator(plan, drafts), ROWS, dataclasses.replace(options, vocab=vocab, draft_vocab=0), 0
    )
    return Inputs(
        random_weights(policy, plan.mesh, seed), random_weights(draft, plan.mesh, seed + 1), prompts
    )


def answers(layout: Any, program: Any, variant: Variant, inputs: Inputs) -> np.ndarray:
    """Generates the answers' tokens, after their prompts."""
    ready = layout(inputs.policy, inputs.draft if variant.length else None)
    return np.asarray(program(ready, inputs.prompts).tokens)


def difference(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Compares tokens of two programs: rows that are equal, and where the first other differs."""
    same = ours == theirs
    rows = same.all(axis=1)
    firsts = np.argmin(same[~rows], axis=1)
    return {
        "equal": bool(rows.all()),
        "equal_rows": int(rows.sum()),
        "rows": len(rows),
        "first_difference": int(firsts.min()) if len(firsts) else None,
    }


def told(found: dict[str, Any]) -> str:
    """Puts a difference in words."""
    if found["equal"]:
        return "the same tokens"
    rows = f"{found['rows'] - found['equal_rows']} of {found['rows']} rows differ"
    return f"{rows}, the first at position {found['first_difference']}"
