"""How many pages a step's rows need, and how many rows some pages hold."""

from jaxspec.mesh import DATA
from jaxspec.rollout.pages import smallest_pool, whole_pool
from jaxspec.step import Step

FEW = 4
"""Rows of the longest kind that the pool holds at least where its size is chosen, and slots at
least."""


def _shape(step: Step, prompts: int) -> tuple[int, int, int, int, int]:
    """Of what lies in a shard's pages: prompts, tokens of each, tokens of an answer and of a draft,
    and positions of a page."""
    generator = step.generator
    settings, shards = generator.settings, generator.mesh.shape[DATA]
    return (
        prompts // shards,
        generator.prompt_length,
        settings.max_new_tokens,
        generator.draft_length,
        settings.page_size,
    )


def all_pages(step: Step, prompts: int) -> int:
    return whole_pool(*_shape(step, prompts), slots=step.generator.settings.slots)


def fewest_pages(step: Step, prompts: int, rows: int) -> int:
    """Pages with which so many of the longest rows can be generated at once."""
    _, prompt, response, draft, size = shape = _shape(step, prompts)
    return smallest_pool(*shape) + (rows - 1) * -(-(prompt + response + draft) // size)


def slots_in(step: Step, prompts: int, pages: int) -> int:
    """Rows that some pages hold halfway through their longest answers, each with the pages of its
    prompt that others write to as well."""
    count, prompt, response, draft, size = _shape(step, prompts)
    own = -(-(response // 2 + draft + 1) // size) + 1
    return max(FEW, (pages - count * -(-prompt // size)) // own)
