"""Shrinks the sizes of a step until its compiled programs fit the devices."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxspec.build import AutomaticSizes
from jaxspec.host.memory import (
    LEARNERS,
    SPARE,
    MemoryUse,
    compute_usage,
    count_all_pages,
    device_memory,
    format_size,
    format_total,
    list_memory_uses,
    list_remedies,
    min_over_processes,
    page_arguments,
    peak_size,
)
from jaxspec.host.programs import compile_generation_alone
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import has_accelerators, round_to_tiles
from jaxspec.rollout.pages import FEW, pool_of_rows, rows_in
from jaxspec.step import Sizes, Step


@runtime_checkable
class CompiledStep(Protocol):
    """Compiled programs of a step."""

    @property
    def programs(self) -> Mapping[str, Any]:
        """Programs by name."""
        ...


_C = TypeVar("_C", bound=CompiledStep)


@dataclasses.dataclass(frozen=True)
class FittedStep(Generic[_C]):
    """A step whose programs fit the devices, or do not with its smallest sizes."""

    step: Step
    compiled: _C
    memory_uses: list[MemoryUse]
    limit: int
    """Bytes of the device that has least."""


class DoesNotFit(ConfigError):
    """A step takes more than a device has, with all that may give way at its smallest."""

    def __init__(self, message: str, smallest: FittedStep) -> None:
        super().__init__(message)
        self.smallest = smallest


LEARNING_MARGIN = 10
"""By one in so many bytes a whole step must take more than its generation alone for learning to be
the reason."""


def fit_step(
    step: Step,
    prompts: int,
    compile_step: Callable[[Step], _C],
    auto: AutomaticSizes,
    limit: int = 0,
) -> FittedStep[_C]:
    """Compiles a step, with ever smaller sizes until it fits where `auto` says that they are open,
    before any weights are loaded.

    What takes most gives way: learning reads micro-batches of half the tokens; generation's pool
    gets the pages that are left beside its weights and temporaries, and as many slots as these
    hold. A step that is one program says only what both take at most, so where that does not fit,
    generation is compiled by itself to tell. A pool that is too large by its shape alone is never
    compiled. `limit` is what a device has; 0: what JAX may use of those that are here.

    Raises:
      DoesNotFit: names each owner, its size and the setting that shrinks it.
    """
    limit = limit or min_over_processes(device_memory())
    if auto.pages:
        step = step.with_sizes(prompts, step.sizes._replace(pages=count_all_pages(step, prompts)))
    if auto.slots or auto.pages:
        usage = compute_usage(step, prompts)
        if usage.training + usage.weights + usage.pool_count * usage.pool > limit:
            sizes = _shrink_pool(step, prompts, step.sizes, auto, usage.pool, usage.room(limit))
            step = step.with_sizes(prompts, sizes)
    while True:
        compiled = compile_step(step)
        memory = list_memory_uses(step, prompts, compiled.programs)
        if sum(use.size for use in memory) <= limit:
            return FittedStep(step, compiled, memory, limit)
        sizes = _shrink_sizes(step, prompts, compiled, auto, limit)
        if sizes == step.sizes:
            message = (
                f"training takes {format_total(memory)} on each device, which has"
                f" {format_size(limit)}: {list_remedies(memory)}"
            )
            message += _suggest_engine_size(step, prompts, compiled, auto, limit)
            raise DoesNotFit(message, FittedStep(step, compiled, memory, limit))
        step = step.with_sizes(prompts, sizes)


def _suggest_engine_size(
    step: Step, prompts: int, compiled: CompiledStep, auto: AutomaticSizes, limit: int
) -> str:
    """The least change of what was asked of an accelerator's engine that makes it fit, in words;
    nothing where that would not help."""
    paged = step.sizes.page_size > 0
    engine_sizes = AutomaticSizes(
        tokens=False, slots=not paged and not auto.slots, pages=paged and not auto.pages
    )
    if not has_accelerators(step.mesh) or not (engine_sizes.slots or engine_sizes.pages):
        return ""
    sizes = _shrink_sizes(step, prompts, compiled, engine_sizes, limit)
    changes = [
        f"--rollout.engine.{name} {size}"
        for name, size in sizes._asdict().items()
        if size != getattr(step.sizes, name)
    ]
    return f"; {changes[0]} should fit" if changes else ""


def _shrink_sizes(
    step: Step, prompts: int, compiled: CompiledStep, auto: AutomaticSizes, limit: int
) -> Sizes:
    """Smaller sizes of a step that does not fit; the same where none may give way, or none is left
    that would help."""
    tokens = round_to_tiles(
        step.mesh, max(step.generator.row_length - 1, step.learner.micro_tokens // 2)
    )
    tokens = min(tokens, step.learner.micro_tokens)
    smaller_tokens = step.sizes._replace(tokens=tokens) if auto.tokens else step.sizes
    if not (auto.slots or auto.pages):
        return smaller_tokens
    usage = compute_usage(step, prompts)
    learners = {name: program for name, program in compiled.programs.items() if name in LEARNERS}
    generation = {
        name: program for name, program in compiled.programs.items() if name not in LEARNERS
    }
    generation = generation or {"generate": compile_generation_alone(step, prompts)}
    peak = peak_size(generation, usage.training)
    learner_peak = peak_size(learners, usage.training)
    # Whoever takes most gives way. Both together take a little more than either, which is no reason
    # to shrink a micro-batch.
    if learner_peak > peak + peak // LEARNING_MARGIN:
        sizes = smaller_tokens if usage.training + learner_peak > limit else step.sizes
    else:
        sizes, peak = step.sizes, max(peak, learner_peak)
    room = min(usage.room(limit), limit - limit // SPARE - usage.training - peak + usage.pool)
    return (
        _shrink_pool(step, prompts, sizes, auto, usage.pool, room) if room < usage.pool else sizes
    )


def _shrink_pool(
    step: Step, prompts: int, sizes: Sizes, auto: AutomaticSizes, pool: int, room: int
) -> Sizes:
    """Sizes whose pool takes at most `room` bytes instead of `pool`; fewer slots alone, and their
    temporaries, where none such is left."""
    slots = step.generator.settings.slots
    if not sizes.page_size:
        return (
            sizes._replace(slots=min(slots - 1, slots * max(room, 0) // pool) or slots)
            if auto.slots
            else sizes
        )
    if auto.pages:
        pages = sizes.pages * max(room, 0) // pool
        if pages >= pool_of_rows(min(FEW, slots), *page_arguments(step, prompts)):
            return sizes._replace(
                pages=pages,
                slots=min(slots, rows_in(pages, *page_arguments(step, prompts)))
                if auto.slots
                else sizes.slots,
            )
    fewer_slots = max(min(FEW, slots), slots // 4)
    if not auto.slots or fewer_slots == slots:
        return sizes
    sizes = sizes._replace(slots=fewer_slots)
    if auto.pages:
        sizes = sizes._replace(pages=count_all_pages(step.with_sizes(prompts, sizes), prompts))
    return sizes
