"""Search for sizes of a step that fit."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxspec.build import AutomaticSizes
from jaxspec.host.memory import (
    LEARNERS,
    LEARNING_SIDE,
    SPARE,
    MemoryUse,
    compute_usage,
    count_all_pages,
    count_published_bytes,
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
from jaxspec.rollout.pages import MIN_ROWS, estimate_row_capacity, pool_size_for_rows
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
    """A compiled step and its memory use."""

    step: Step
    compiled: _C
    memory_uses: list[MemoryUse]
    limit: int
    """Bytes of memory on the smallest device."""


class DoesNotFit(ConfigError):
    """Error of a step that exceeds device memory.

    Its automatic sizes could not be reduced any further.
    """

    def __init__(self, message: str, smallest: FittedStep) -> None:
        super().__init__(message)
        # The check command still reports the smallest step, with its owners of memory.
        self.smallest = smallest


LEARNING_MARGIN = 10
"""Learning counts as the larger only if it exceeds generation by more than 1 / `LEARNING_MARGIN` of
generation."""


def fit_step(
    step: Step,
    prompts: int,
    compile_step: Callable[[Step], _C],
    auto: AutomaticSizes,
    limit: int = 0,
    published_versions: int = 0,
) -> FittedStep[_C]:
    """Compiles a step with sizes that fit memory.

    Automatic sizes shrink until the step fits. The larger of learning and generation is shrunk.
    Learning halves the tokens of its micro-batches. Generation gets a pool of the pages that fit
    next to its weights and temporaries, and the slots that this pool supports. Sizes that `auto`
    does not name are never changed. No weights need to be loaded.

    Args:
      step: Step to compile.
      prompts: Number of prompts in a batch, over all data shards.
      compile_step: Compiles the programs of a step.
      auto: Sizes that may shrink.
      limit: Bytes of memory on a device. 0 = the memory that JAX may use on this machine.
      published_versions: Published versions of the weights that exist during generation.

    Raises:
      DoesNotFit: The step exceeds memory, and its sizes cannot shrink further. The message names
        each owner of memory, its size and the setting that shrinks it.
    """
    # All processes must choose the same sizes, so the smallest device decides.
    limit = limit or min_over_processes(device_memory())
    if auto.pages:
        step = step.with_sizes(prompts, step.sizes._replace(pages=count_all_pages(step, prompts)))
    if auto.slots or auto.pages:
        usage = compute_usage(step, prompts)
        # A pool that exceeds memory by its shape alone is shrunk first: compiling takes minutes.
        if usage.training + usage.weights + usage.pool_count * usage.pool > limit:
            sizes = _shrink_pool(step, prompts, step.sizes, auto, usage.pool, usage.room(limit))
            step = step.with_sizes(prompts, sizes)
    while True:
        compiled = compile_step(step)
        memory = list_memory_uses(step, prompts, compiled.programs, published_versions)
        if sum(use.size for use in memory) <= limit:
            return FittedStep(step, compiled, memory, limit)
        published = count_published_bytes(compiled.programs, published_versions)
        sizes = _shrink_sizes(step, prompts, compiled, auto, limit - published)
        # Sizes only ever shrink, so the loop ends.
        if sizes == step.sizes:
            message = (
                f"training takes {format_total(memory)} on each device, which has"
                f" {format_size(limit)}: {list_remedies(memory)}"
            )
            message += _suggest_engine_size(step, prompts, compiled, auto, limit - published)
            raise DoesNotFit(message, FittedStep(step, compiled, memory, limit))
        step = step.with_sizes(prompts, sizes)


def _suggest_engine_size(
    step: Step, prompts: int, compiled: CompiledStep, auto: AutomaticSizes, limit: int
) -> str:
    """Suggests an engine setting that should fit.

    Returns the end of a message. It is empty on CPUs, and if no change of a fixed engine size would
    help.
    """
    paged = step.sizes.page_size > 0
    # Only the size that the user fixed is tried, as if it were automatic.
    engine_sizes = AutomaticSizes(
        tokens=False, slots=not paged and not auto.slots, pages=paged and not auto.pages
    )
    if not has_accelerators(step.generator.mesh) or not (engine_sizes.slots or engine_sizes.pages):
        return ""
    # Processes that only learn have no devices to compile generation for.
    if not step.shares_devices and set(compiled.programs) <= set(LEARNING_SIDE):
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
    """Shrinks the sizes of a step.

    Returns the same sizes if none may shrink, or if shrinking would not help.
    """
    # A micro-batch must hold the longest row.
    tokens = round_to_tiles(
        step.learner.mesh, max(step.generator.row_length - 1, step.learner.micro_tokens // 2)
    )
    # Rounding to tiles may have gone above the present size.
    tokens = min(tokens, step.learner.micro_tokens)
    smaller_tokens = step.sizes._replace(tokens=tokens) if auto.tokens else step.sizes
    if not (auto.slots or auto.pages):
        return smaller_tokens
    usage = compute_usage(step, prompts)
    learners = {name: program for name, program in compiled.programs.items() if name in LEARNERS}
    generation = {
        name: program
        for name, program in compiled.programs.items()
        if name not in (LEARNERS if step.shares_devices else LEARNING_SIDE)
    }
    # A step in a single program reports the maximum over learning and generation. Generation is
    # then compiled by itself.
    generation = generation or {"generate": compile_generation_alone(step, prompts)}
    peak = peak_size(generation, usage.training)
    state_size = sum(use.size for use in usage.training_uses)
    learner_peak = peak_size(learners, state_size)
    # The larger one is shrunk. With devices of their own, each that does not fit is. One program of
    # both takes a little more than generation alone, even where generation is the larger. The
    # margin keeps that from shrinking a micro-batch.
    if not step.shares_devices or learner_peak > peak + peak // LEARNING_MARGIN:
        sizes = smaller_tokens if state_size + learner_peak > limit else step.sizes
    else:
        sizes, peak = step.sizes, max(peak, learner_peak)
    # The measured peak already contains the pool, so its bytes are free for the new one.
    room = min(usage.room(limit), limit - limit // SPARE - usage.training - peak + usage.pool)
    return (
        _shrink_pool(step, prompts, sizes, auto, usage.pool, room) if room < usage.pool else sizes
    )


def _shrink_pool(
    step: Step, prompts: int, sizes: Sizes, auto: AutomaticSizes, pool: int, room: int
) -> Sizes:
    """Returns `sizes` with a pool of about `room` bytes, where it had `pool`.

    If there are no pages, or too few would be left, reduces the slots. This also shrinks their
    temporaries. Sizes that may not shrink stay as they are.
    """
    slots = step.generator.settings.slots
    if not sizes.page_size:
        # Without pages a slot holds a whole row, so the pool shrinks almost in proportion to slots.
        # Caches of prompts do not shrink, which the next attempt corrects.
        return (
            sizes._replace(slots=min(slots - 1, slots * max(room, 0) // pool) or slots)
            if auto.slots
            else sizes
        )
    if auto.pages:
        pages = sizes.pages * max(room, 0) // pool
        # The pool must hold a few rows of full length. Below that, slots shrink instead.
        if pages >= pool_size_for_rows(min(MIN_ROWS, slots), *page_arguments(step, prompts)):
            return sizes._replace(
                pages=pages,
                slots=min(slots, estimate_row_capacity(pages, *page_arguments(step, prompts)))
                if auto.slots
                else sizes.slots,
            )
    fewer_slots = max(min(MIN_ROWS, slots), slots // 4)
    if not auto.slots or fewer_slots == slots:
        return sizes
    sizes = sizes._replace(slots=fewer_slots)
    if auto.pages:
        # Fewer slots need fewer pages. The next attempt shrinks them further if it must.
        sizes = sizes._replace(pages=count_all_pages(step.with_sizes(prompts, sizes), prompts))
    return sizes
