"""What a run takes of a device's memory, as its compiled programs say: told at its start, and
refused with numbers where it cannot fit."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.build import Automatic
from jaxspec.host.programs import abstract, generation_alone, times_real_rounds
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import accelerated, row_shards, whole_tiles
from jaxspec.rollout.pages import FEW, pool_of_rows, rows_in, whole_pool
from jaxspec.state import PyTree
from jaxspec.step import HOST, Sizes, Step

GIB = 2**30


class Part(NamedTuple):
    """One of the things that a run keeps."""

    name: str
    size: int
    """Bytes on each device."""
    remedy: str
    """What shrinks it."""


POOL = "the pool of keys and values"
BESIDE = "what learning and generation take beside that while they run"


class _Bytes(NamedTuple):
    """Bytes on each device, as shapes say them."""

    kept: list[Part]
    """What training keeps all the time."""
    weights: int
    """As generation reads them."""
    pool: int
    """Of keys and values."""
    pools: int
    """How many there are at once, at most."""

    @property
    def total(self) -> int:
        """Of what is kept."""
        return sum(part.size for part in self.kept)

    def room(self, limit: int) -> int:
        """That a pool may have beside the others."""
        return (limit - limit // SPARE - self.total - self.weights) // self.pools


def _bytes_of(step: Step, prompts: int) -> _Bytes:
    (state, _, asked), generator = abstract(step, prompts), step.generator
    ready = jax.eval_shape(step.sync, state)
    running = jax.eval_shape(generator.begin, ready, asked)
    read = running.queue.prompts.caches
    learner = state.learner
    offload = "" if step.offloaded else "--optimizer.offload, "
    fewer_moments = f"--optimizer.moments bfloat16, {offload}--lora.rank 16, or more devices"
    kept = [
        Part(
            "policy weights",
            _placed(learner.policy.network),
            "more devices: training splits weights over all of them",
        ),
        Part("the policy's optimizer", _placed(learner.policy.optimizer), fewer_moments),
        Part(
            "the reference policy",
            _placed(learner.reference),
            "--kl.beta 0, or --lora.rank 16: then it is the policy without its adapters",
        ),
        Part(
            "the draft and its optimizer",
            _placed(learner.draft),
            "--rollout.draft.layers, or --rollout.draft.kind ngram or none",
        ),
    ]
    return _Bytes(
        kept=kept,
        weights=generator.weight_bytes(ready),
        pool=_size((running.caches, read)) // step.mesh.size,
        # a pilot times rounds of each length on a pool that stays as it is
        pools=2 if generator.settings.lengths and not times_real_rounds(generator) else 1,
    )


def parts(step: Step, prompts: int, programs: Mapping[str, Any]) -> list[Part]:
    """What a run takes on each device, by owner: what it keeps, and what its compiled `programs`
    take beside that while they run.

    Programs do not run at the same time, so the one that takes most counts. What that is for is
    told where shapes say it: weights as generation reads them, and the pool of keys and values; the
    rest are mostly the activations of a micro-batch.
    """
    found = _bytes_of(step, prompts)
    most = _most(programs, found.total)
    pool = found.pools * found.pool
    longest = step.generator.row_length - 1
    micro = (
        f"--batch.micro_tokens, now {step.learner.tokens} and at least {longest}, --model.remat, or"
        " more --mesh.tensor"
    )
    listed = [
        *found.kept,
        Part(
            "weights as generation reads them",
            found.weights,
            "--model.dtype bfloat16, or --mesh.tensor",
        ),
        Part(POOL, pool, _smaller_pool(step, prompts)),
        Part(
            "the batch that rollouts fill",
            _placed(abstract(step, prompts)[1].replace(plan=None)) if step.fills else 0,
            "--dynamic_sampling.max_batches 0, or smaller batches",
        ),
        Part(BESIDE, max(most - found.weights - pool, 0), micro),
    ]
    return [part for part in listed if part.size]


def _smaller_pool(step: Step, prompts: int) -> str:
    """What shrinks the pool."""
    settings, shorter = step.generator.settings, "or shorter answers"
    if not settings.page_size:
        return (
            f"--rollout.engine.slots, now {settings.slots}, --rollout.engine.page_size 64 with"
            f" fewer --rollout.engine.pages, {shorter}"
        )
    now = settings.pages or _all_pages(step, prompts)
    least = pool_of_rows(1, *_shape(step, prompts))
    return (
        f"--rollout.engine.pages, now {now} and at least {least}, --rollout.engine.slots, now"
        f" {settings.slots}, {shorter}"
    )


_LEARNS = ("step", "train")
"""Programs in which the learner runs: they get the whole state."""
_LOADS = "prepare"
"""The program that gets nothing but the part of the state that it reads. The rest run while the
state lies there."""


def _most(programs: Mapping[str, Any], kept: int) -> int:
    """Bytes that the program which takes most takes beside the `kept` ones of the state."""
    return max((_beside(name, program, kept) for name, program in programs.items()), default=0)


def _beside(name: str, program: Any, state: int) -> int:
    """Bytes that a compiled program takes on each device beside those of the state."""
    found = program.memory_analysis()
    if found is None:  # a backend that does not say
        return 0
    kept = state if name in _LEARNS else found.argument_size_in_bytes if name == _LOADS else 0
    inputs = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return found.temp_size_in_bytes + max(inputs - kept, 0)


@runtime_checkable
class Compiled(Protocol):
    """Compiled programs of a step."""

    @property
    def programs(self) -> Mapping[str, Any]:
        """Programs by name."""
        ...


_C = TypeVar("_C", bound=Compiled)


@dataclasses.dataclass(frozen=True)
class Fitted(Generic[_C]):
    """A step whose programs fit the devices, or do not with its smallest sizes."""

    step: Step
    compiled: _C
    parts: list[Part]
    limit: int
    """Bytes of the device that has least."""


class DoesNotFit(ConfigError):
    """A step takes more than a device has, with all that may give way at its smallest."""

    def __init__(self, message: str, smallest: Fitted) -> None:
        super().__init__(message)
        self.smallest = smallest


MORE = 10
"""By one in so many bytes a whole step must take more than its generation alone for learning to be
the reason."""
SPARE = 50
"""One in so many bytes stays free where the pool is sized: programs put together take a little more
than each by itself."""


def fitted(
    step: Step,
    prompts: int,
    compile_step: Callable[[Step], _C],
    may: Automatic,
    limit: int = 0,
) -> Fitted[_C]:
    """Compiles a step, with ever smaller sizes until it fits where `may` says that they are open,
    before any weights are loaded.

    What takes most gives way: learning reads micro-batches of half the tokens; generation's pool
    gets the pages that are left beside its weights and temporaries, and as many slots as these
    hold. A step that is one program says only what both take at most, so where that does not fit,
    generation is compiled by itself to tell. A pool that is too large by its shape alone is never
    compiled. `limit` is what a device has; 0: what JAX may use of those that are here.

    Raises:
      DoesNotFit: names each owner, its size and the setting that shrinks it.
    """
    limit = limit or least_of_processes(device_memory())
    if may.pages:
        step = step.resized(prompts, step.sizes._replace(pages=_all_pages(step, prompts)))
    if may.slots or may.pages:
        found = _bytes_of(step, prompts)
        if found.total + found.weights + found.pools * found.pool > limit:
            sizes = _with_room(step, prompts, step.sizes, may, found.pool, found.room(limit))
            step = step.resized(prompts, sizes)
    while True:
        compiled = compile_step(step)
        found = parts(step, prompts, compiled.programs)
        if sum(part.size for part in found) <= limit:
            return Fitted(step, compiled, found, limit)
        sizes = _smaller(step, prompts, compiled, may, limit)
        if sizes == step.sizes:
            told = (
                f"training takes {_total(found)} on each device, which has {_gib(limit)}:"
                f" {_listed(found)}"
            )
            told += _enough(step, prompts, compiled, may, limit)
            raise DoesNotFit(told, Fitted(step, compiled, found, limit))
        step = step.resized(prompts, sizes)


def _enough(step: Step, prompts: int, compiled: Compiled, may: Automatic, limit: int) -> str:
    """The least change of what was asked of an accelerator's engine that makes it fit, in words;
    nothing where that would not help."""
    paged = step.sizes.page_size > 0
    asked = Automatic(
        tokens=False, slots=not paged and not may.slots, pages=paged and not may.pages
    )
    if not accelerated(step.mesh) or not (asked.slots or asked.pages):
        return ""
    sizes = _smaller(step, prompts, compiled, asked, limit)
    changed = [
        f"--rollout.engine.{name} {new}"
        for name, new in sizes._asdict().items()
        if new != getattr(step.sizes, name)
    ]
    return f"; {changed[0]} should fit" if changed else ""


def _smaller(step: Step, prompts: int, compiled: Compiled, may: Automatic, limit: int) -> Sizes:
    """Smaller sizes of a step that does not fit; the same where none may give way, or none is left
    that would help."""
    half = whole_tiles(step.mesh, max(step.generator.row_length - 1, step.learner.tokens // 2))
    half = min(half, step.learner.tokens)
    fewer = step.sizes._replace(tokens=half) if may.tokens else step.sizes
    if not (may.slots or may.pages):
        return fewer
    found = _bytes_of(step, prompts)
    learning = {name: program for name, program in compiled.programs.items() if name in _LEARNS}
    generating = {
        name: program for name, program in compiled.programs.items() if name not in _LEARNS
    }
    generating = generating or {"generate": generation_alone(step, prompts)}
    taken = _most(generating, found.total)
    learns = _most(learning, found.total)
    # Whoever takes most gives way. Both together take a little more than either, which is no reason
    # to shrink a micro-batch.
    if learns > taken + taken // MORE:
        sizes = fewer if found.total + learns > limit else step.sizes
    else:
        sizes, taken = step.sizes, max(taken, learns)
    room = min(found.room(limit), limit - limit // SPARE - found.total - taken + found.pool)
    return _with_room(step, prompts, sizes, may, found.pool, room) if room < found.pool else sizes


def _with_room(
    step: Step, prompts: int, sizes: Sizes, may: Automatic, pool: int, room: int
) -> Sizes:
    """Sizes whose pool takes at most `room` bytes instead of `pool`; fewer slots alone, and their
    temporaries, where none such is left."""
    slots = step.generator.settings.slots
    if not sizes.page_size:
        return (
            sizes._replace(slots=min(slots - 1, slots * max(room, 0) // pool) or slots)
            if may.slots
            else sizes
        )
    if may.pages:
        pages = sizes.pages * max(room, 0) // pool
        if pages >= pool_of_rows(min(FEW, slots), *_shape(step, prompts)):
            return sizes._replace(
                pages=pages,
                slots=min(slots, rows_in(pages, *_shape(step, prompts)))
                if may.slots
                else sizes.slots,
            )
    fewer = max(min(FEW, slots), slots // 4)
    if not may.slots or fewer == slots:
        return sizes
    sizes = sizes._replace(slots=fewer)
    if may.pages:
        sizes = sizes._replace(pages=_all_pages(step.resized(prompts, sizes), prompts))
    return sizes


def _shape(step: Step, prompts: int) -> tuple[int, int, int, int, int]:
    """Of a shard's pages, as `smallest_pool` takes it."""
    made, settings = step.generator, step.generator.settings
    sizes = made.prompt_length, settings.max_new_tokens, made.draft_length
    return (prompts // row_shards(made.mesh), *sizes, settings.page_size)


def _all_pages(step: Step, prompts: int) -> int:
    return whole_pool(*_shape(step, prompts), slots=step.generator.settings.slots)


def told(step: Step, found: list[Part], limit: int) -> str:
    """The bytes of a device by owner, in a line; `limit` is what it has."""
    owners = ", ".join(
        f"{part.name} {_gib(part.size)}" for part in sorted(found, key=lambda part: -part.size)
    )
    settings = step.generator.settings
    pool = (
        f"{settings.pages or 'all'} pages of {settings.page_size} positions"
        if settings.page_size
        else "a page a row"
    )
    chosen = (
        f"micro-batches of {step.learner.tokens} tokens a data shard; {settings.slots} slots,"
        f" {pool}"
    )
    return f"each device takes {_total(found)} of {_gib(limit)}: {owners} ({chosen})"


@contextlib.contextmanager
def explained(found: list[Part]) -> Iterator[None]:
    """Says what takes the memory where a device runs out of it all the same.

    Raises:
      ConfigError: names each part, its size and the setting that shrinks it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).splitlines()[0]
        limit = _gib(device_memory())
        raise ConfigError(
            f"a device ran out of memory ({first}); it has {limit}, and training takes there"
            f" {_listed(found)}"
        ) from error


def device_memory() -> int:
    """Bytes that JAX may use on a device: a CPU's devices share the machine's memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def least_of_processes(size: int) -> int:
    """The least of a number of bytes that each process has, in whole MiB where there are several:
    all must choose alike."""
    if jax.process_count() == 1:
        return size
    return int(np.min(multihost_utils.process_allgather(np.int32(size // 2**20)))) * 2**20


def _listed(kept: list[Part]) -> str:
    return "; ".join(
        f"{part.name} {_gib(part.size)} (less with {part.remedy})"
        for part in sorted(kept, key=lambda part: -part.size)
    )


def _total(found: list[Part]) -> str:
    return _gib(sum(part.size for part in found))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _bytes(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * leaf.dtype.itemsize


def _placed(tree: PyTree) -> int:
    """Bytes on a device; what lies in host memory is none of them."""
    there = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST]
    return sum(_bytes(leaf.sharding.shard_shape(leaf.shape), leaf) for leaf in there)


def _size(tree: PyTree) -> int:
    return sum(_bytes(leaf.shape, leaf) for leaf in jax.tree.leaves(tree))
