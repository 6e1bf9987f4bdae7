"""Memory use on each device, by owner."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxspec.host.programs import abstract_arguments, times_real_rounds
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import row_shard_count
from jaxspec.processes import roles
from jaxspec.processes.global_arrays import gather_over_processes
from jaxspec.rollout.pages import max_pool_size, pool_size_for_rows
from jaxspec.state import PyTree
from jaxspec.step import HOST_MEMORY, Step

GIB = 2**30


class MemoryUse(NamedTuple):
    """Memory of one owner, like the policy weights."""

    name: str
    size: int
    """Bytes on each device."""
    remedy: str
    """Settings that reduce it."""


POOL = "the pool of keys and values"
TEMPORARIES = "temporary buffers of learning and generation"


class DeviceBytes(NamedTuple):
    """Bytes on each device, computed from shapes."""

    training_uses: list[MemoryUse]
    """Memory that learning holds during the whole run."""
    training: int
    """Bytes of `training_uses` on the devices that generate: 0 if these do not learn."""
    weights: int
    """Bytes of the weights in the rollout layout."""
    pool: int
    """Bytes of one pool of keys and values."""
    pool_count: int
    """Largest number of pools that exist at once."""

    def room(self, limit: int) -> int:
        """Returns the bytes available to each pool within `limit`."""
        return (limit - limit // SPARE - self.training - self.weights) // self.pool_count


def compute_usage(step: Step, prompts: int) -> DeviceBytes:
    """Computes memory use from shapes. Compiles and allocates nothing."""
    (state, _, abstract_prompts), generator = abstract_arguments(step, prompts), step.generator
    rollout_weights = jax.eval_shape(step.sync, state)
    decode_state = jax.eval_shape(generator.begin, rollout_weights, abstract_prompts)
    prompt_caches = decode_state.queue.prompts.caches
    learner = state.learner
    offload = "" if step.offloads_moments else "--optimizer.offload, "
    fewer_moments = f"--optimizer.moments bfloat16, {offload}--lora.rank 16, or more devices"
    training_uses = [
        MemoryUse(
            "policy weights",
            _device_size(learner.policy.network),
            "more devices: training splits weights over all of them",
        ),
        MemoryUse("the policy's optimizer", _device_size(learner.policy.optimizer), fewer_moments),
        MemoryUse(
            "the reference policy",
            _device_size(learner.reference),
            "--kl.beta 0, or --lora.rank 16: then it is the policy without its adapters",
        ),
        MemoryUse(
            "the draft and its optimizer",
            _device_size(learner.draft),
            f"smaller rollout.draft.{step.draft_kind}, or --rollout.draft.kind ngram or none",
        ),
    ]
    return DeviceBytes(
        training_uses=training_uses,
        training=sum(use.size for use in training_uses) if step.shares_devices else 0,
        weights=generator.count_weight_bytes(rollout_weights),
        pool=_tree_size((decode_state.caches, prompt_caches)) // step.generator.mesh.size,
        # A pilot times each draft length from the same state, so its pool cannot be donated.
        pool_count=2 if generator.settings.lengths and not times_real_rounds(generator) else 1,
    )


def list_memory_uses(
    step: Step, prompts: int, programs: Mapping[str, Any], published_versions: int = 0
) -> list[MemoryUse]:
    """Lists memory use on each device by owner.

    If learning and generation have devices of their own, lists the side that needs more. A process
    of one side lists that one. Arguments are those of `list_side_uses`.
    """
    sides = list_side_uses(step, prompts, programs, published_versions)
    return max(sides, key=lambda uses: sum(use.size for use in uses))


def list_side_uses(
    step: Step, prompts: int, programs: Mapping[str, Any], published_versions: int = 0
) -> tuple[list[MemoryUse], ...]:
    """Lists memory use on each device by owner, of learner and generator or of both together.

    A side without `programs` belongs to other processes, and is left out.

    Owners are arrays of the training state, the rollout copy of the weights, the pool of keys and
    values, the batch of dynamic sampling, and temporary buffers of the compiled `programs`. The
    buffers are mostly activations of a micro-batch. Owners without memory are left out.

    Args:
      step: the step.
      prompts: number of prompts in a batch.
      programs: compiled programs by name.
      published_versions: published versions of the weights that exist during generation.
    """
    usage = compute_usage(step, prompts)
    published = MemoryUse(
        "published weights",
        count_published_bytes(programs, published_versions),
        "--schedule.lag 1, --model.dtype bfloat16, or more devices that generate",
    )
    # Programs of a device never run at the same time, so only the largest one counts.
    if step.shares_devices:
        peak = peak_size(programs, usage.training)
        generation_uses = _list_generation_uses(step, prompts, usage, peak)
        uses = [*usage.training_uses, published, *generation_uses]
        return ([use for use in uses if use.size],)
    learning = {name: program for name, program in programs.items() if name in LEARNING_SIDE}
    generation = {name: program for name, program in programs.items() if name not in LEARNING_SIDE}
    state_size = sum(use.size for use in usage.training_uses)
    temporaries = MemoryUse(
        TEMPORARIES, peak_size(learning, state_size), _describe_tokens_remedy(step)
    )
    generation_uses = _list_generation_uses(step, prompts, usage, peak_size(generation, 0))
    sides = (
        (learning, [*usage.training_uses, temporaries]),
        (generation, [published, *generation_uses]),
    )
    return tuple([use for use in uses if use.size] for own_programs, uses in sides if own_programs)


def _describe_tokens_remedy(step: Step) -> str:
    """Names the settings that reduce temporary buffers, with their values."""
    min_tokens = step.generator.row_length - 1
    return (
        f"--batch.micro_tokens, now {step.learner.micro_tokens} and at least {min_tokens},"
        " --model.remat, or more --mesh.tensor"
    )


def _list_generation_uses(
    step: Step, prompts: int, usage: DeviceBytes, peak: int
) -> list[MemoryUse]:
    """Lists memory use of generation, whose largest program has `peak` bytes."""
    pool = usage.pool_count * usage.pool
    return [
        MemoryUse(
            "weights as generation reads them",
            usage.weights,
            "--model.dtype bfloat16, or --mesh.tensor",
        ),
        MemoryUse(POOL, pool, _describe_pool_remedy(step, prompts)),
        MemoryUse(
            "the batch that rollouts fill",
            _device_size(abstract_arguments(step, prompts)[1].replace(plan=None))
            if step.uses_dynamic_sampling
            else 0,
            "--dynamic_sampling.max_batches 0, or smaller batches",
        ),
        # The compiler reports one sum. Shapes tell how much of it is weights and pool.
        MemoryUse(TEMPORARIES, max(peak - usage.weights - pool, 0), _describe_tokens_remedy(step)),
    ]


def _describe_pool_remedy(step: Step, prompts: int) -> str:
    """Names the settings that reduce the pool, with their values."""
    settings, answers_remedy = step.generator.settings, "or shorter answers"
    if not settings.page_size:
        return (
            f"--rollout.engine.slots, now {settings.slots}, --rollout.engine.page_size 64 with"
            f" fewer --rollout.engine.pages, {answers_remedy}"
        )
    page_count = settings.pages or count_all_pages(step, prompts)
    min_pages = pool_size_for_rows(1, *page_arguments(step, prompts))
    return (
        f"--rollout.engine.pages, now {page_count} and at least {min_pages},"
        f" --rollout.engine.slots, now {settings.slots}, {answers_remedy}"
    )


LEARNERS = ("step", "train")
"""Names of programs that run the learner. Their arguments include the whole training state."""
_LOADERS = ("prepare", "publish", "load")
"""Names of programs whose arguments are parts of the training state, or published weights."""
LEARNING_SIDE = (*LEARNERS, "publish", "receive")
"""Names of programs of the learner's side, if generation has other devices."""


def peak_size(programs: Mapping[str, Any], state: int) -> int:
    """Returns the bytes of the largest program. Excludes `state` bytes of the training state."""
    return max((_extra_size(name, program, state) for name, program in programs.items()), default=0)


def _extra_size(name: str, program: Any, state: int) -> int:
    """Returns a program's bytes on each device. Excludes the training state."""
    stats = program.memory_analysis()
    if stats is None:  # some backends have no memory analysis
        return 0
    # Arguments that are part of the training state are already counted by its owners.
    shared = state if name in LEARNERS else stats.argument_size_in_bytes if name in _LOADERS else 0
    # Donated arguments share memory with outputs, and would be counted twice.
    inputs = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes + max(inputs - shared, 0)


def count_published_bytes(programs: Mapping[str, Any], versions: int) -> int:
    """Counts the bytes of published versions of the weights on each device that generates."""
    stats = programs["load"].memory_analysis() if versions and "load" in programs else None
    return versions * stats.argument_size_in_bytes if stats is not None else 0


SPARE = 50
"""A share of 1 / `SPARE` of memory stays free when the pool is sized, since programs joined into
one take slightly more memory than each by itself."""


def page_arguments(step: Step, prompts: int) -> tuple[int, int, int, int, int]:
    """Returns one shard's arguments of the functions of `rollout.pages` that size a pool."""
    generator, settings = step.generator, step.generator.settings
    sizes = generator.prompt_length, settings.max_new_tokens, generator.draft_length
    return (prompts // row_shard_count(generator.mesh), *sizes, settings.page_size)


def count_all_pages(step: Step, prompts: int) -> int:
    """Counts the pages that avoid any preemption."""
    return max_pool_size(*page_arguments(step, prompts), slots=step.generator.settings.slots)


def format_memory_uses(
    step: Step,
    memory: list[MemoryUse],
    limit: int,
    learns: bool = True,
    generates: bool = True,
) -> str:
    """Formats memory use by owner in one line, with the sizes of the sides that are here.

    `limit` is the memory of a device.
    """
    owners = ", ".join(
        f"{use.name} {format_size(use.size)}" for use in sorted(memory, key=lambda use: -use.size)
    )
    settings = step.generator.settings
    pool = (
        f"{settings.pages or 'all'} pages of {settings.page_size} positions"
        if settings.page_size
        else "a page a row"
    )
    learning = f"micro-batches of {step.learner.micro_tokens} tokens a data shard"
    sides = ((learns, learning), (generates, f"{settings.slots} slots, {pool}"))
    sizes = "; ".join(text for is_here, text in sides if is_here)
    return f"each device takes {format_total(memory)} of {format_size(limit)}: {owners} ({sizes})"


@contextlib.contextmanager
def explain_memory_errors(memory: list[MemoryUse]) -> Iterator[None]:
    """Explains out-of-memory errors in the context by the owners of memory.

    Raises:
      ConfigError: A device ran out of memory. The message names each owner, its size and remedy.
    """
    # The plan covers only the state and the compiled programs, so a device can still run out.
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # JAX has no exception type for too little memory, only the status code in the text.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = str(error).splitlines()[0]
        limit = format_size(device_memory())
        raise ConfigError(
            f"a device ran out of memory ({first_line}); it has {limit}, and training takes there"
            f" {list_remedies(memory)}"
        ) from error


def device_memory() -> int:
    """Returns the bytes available to JAX per device."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    # CPU devices report nothing, and share the memory of the machine.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def min_over_processes(size: int) -> int:
    """Returns the minimum of `size` over all processes.

    With several processes it is rounded down to whole MiB.
    """
    if roles.member_count() == 1:
        return size
    # JAX has no 64-bit integers by default, and a number of MiB fits into 32 bits.
    return int(gather_over_processes(size // 2**20).min()) * 2**20


def list_remedies(memory: list[MemoryUse]) -> str:
    """Lists owners, sizes and remedies, largest first."""
    return "; ".join(
        f"{use.name} {format_size(use.size)} (less with {use.remedy})"
        for use in sorted(memory, key=lambda use: -use.size)
    )


def format_total(memory: list[MemoryUse]) -> str:
    """Formats the sum over all owners."""
    return format_size(sum(use.size for use in memory))


def format_size(size: int) -> str:
    """Formats bytes as GiB, or MiB if smaller."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _byte_count(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * leaf.dtype.itemsize


def _device_size(tree: PyTree) -> int:
    """Returns a tree's bytes per device. Leaves in host memory do not count."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST_MEMORY]
    return sum(_byte_count(leaf.sharding.shard_shape(leaf.shape), leaf) for leaf in leaves)


def _tree_size(tree: PyTree) -> int:
    return sum(_byte_count(leaf.shape, leaf) for leaf in jax.tree.leaves(tree))
