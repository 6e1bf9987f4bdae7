"""Memory that a run takes on each device, by owner."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.host.programs import abstract_arguments, times_real_rounds
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import row_shard_count
from jaxspec.rollout.pages import pool_of_rows, whole_pool
from jaxspec.state import PyTree
from jaxspec.step import HOST_MEMORY, Step

GIB = 2**30


class MemoryUse(NamedTuple):
    """One of the things that a run keeps."""

    name: str
    size: int
    """Bytes on each device."""
    remedy: str
    """What shrinks it."""


POOL = "the pool of keys and values"
TEMPORARIES = "what learning and generation take beside that while they run"


class DeviceBytes(NamedTuple):
    """Bytes on each device, as shapes say them."""

    training_uses: list[MemoryUse]
    """What training keeps all the time."""
    weights: int
    """As generation reads them."""
    pool: int
    """Of keys and values."""
    pool_count: int
    """How many there are at once, at most."""

    @property
    def training(self) -> int:
        """Of what is kept."""
        return sum(use.size for use in self.training_uses)

    def room(self, limit: int) -> int:
        """That a pool may have beside the others."""
        return (limit - limit // SPARE - self.training - self.weights) // self.pool_count


def compute_usage(step: Step, prompts: int) -> DeviceBytes:
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
            "--rollout.draft.layers, or --rollout.draft.kind ngram or none",
        ),
    ]
    return DeviceBytes(
        training_uses=training_uses,
        weights=generator.weight_bytes(rollout_weights),
        pool=_tree_size((decode_state.caches, prompt_caches)) // step.mesh.size,
        # a pilot times rounds of each length on a pool that stays as it is
        pool_count=2 if generator.settings.lengths and not times_real_rounds(generator) else 1,
    )


def list_memory_uses(step: Step, prompts: int, programs: Mapping[str, Any]) -> list[MemoryUse]:
    """What a run takes on each device, by owner: what it keeps, and what its compiled `programs`
    take beside that while they run.

    Programs do not run at the same time, so the one that takes most counts. What that is for is
    told where shapes say it: weights as generation reads them, and the pool of keys and values; the
    rest are mostly the activations of a micro-batch.
    """
    usage = compute_usage(step, prompts)
    peak = peak_size(programs, usage.training)
    pool = usage.pool_count * usage.pool
    min_tokens = step.generator.row_length - 1
    tokens_remedy = (
        f"--batch.micro_tokens, now {step.learner.micro_tokens} and at least {min_tokens},"
        " --model.remat, or more --mesh.tensor"
    )
    memory = [
        *usage.training_uses,
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
        MemoryUse(TEMPORARIES, max(peak - usage.weights - pool, 0), tokens_remedy),
    ]
    return [use for use in memory if use.size]


def _describe_pool_remedy(step: Step, prompts: int) -> str:
    """What shrinks the pool."""
    settings, answers_remedy = step.generator.settings, "or shorter answers"
    if not settings.page_size:
        return (
            f"--rollout.engine.slots, now {settings.slots}, --rollout.engine.page_size 64 with"
            f" fewer --rollout.engine.pages, {answers_remedy}"
        )
    page_count = settings.pages or count_all_pages(step, prompts)
    min_pages = pool_of_rows(1, *page_arguments(step, prompts))
    return (
        f"--rollout.engine.pages, now {page_count} and at least {min_pages},"
        f" --rollout.engine.slots, now {settings.slots}, {answers_remedy}"
    )


LEARNERS = ("step", "train")
"""Programs in which the learner runs: they get the whole state."""
_LOADER = "prepare"
"""The program that gets nothing but the part of the state that it reads. The rest run while the
state lies there."""


def peak_size(programs: Mapping[str, Any], state: int) -> int:
    """Bytes that the program which takes most takes beside the `state` ones of the state."""
    return max((_extra_size(name, program, state) for name, program in programs.items()), default=0)


def _extra_size(name: str, program: Any, state: int) -> int:
    """Bytes that a compiled program takes on each device beside those of the state."""
    stats = program.memory_analysis()
    if stats is None:  # a backend that does not say
        return 0
    shared = state if name in LEARNERS else stats.argument_size_in_bytes if name == _LOADER else 0
    inputs = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes + max(inputs - shared, 0)


SPARE = 50
"""One in so many bytes stays free where the pool is sized: programs put together take a little more
than each by itself."""


def page_arguments(step: Step, prompts: int) -> tuple[int, int, int, int, int]:
    """Of a shard's pages, as `smallest_pool` takes it."""
    generator, settings = step.generator, step.generator.settings
    sizes = generator.prompt_length, settings.max_new_tokens, generator.draft_length
    return (prompts // row_shard_count(generator.mesh), *sizes, settings.page_size)


def count_all_pages(step: Step, prompts: int) -> int:
    return whole_pool(*page_arguments(step, prompts), slots=step.generator.settings.slots)


def report_memory(step: Step, memory: list[MemoryUse], limit: int) -> str:
    """The bytes of a device by owner, in a line; `limit` is what it has."""
    owners = ", ".join(
        f"{use.name} {format_size(use.size)}" for use in sorted(memory, key=lambda use: -use.size)
    )
    settings = step.generator.settings
    pool = (
        f"{settings.pages or 'all'} pages of {settings.page_size} positions"
        if settings.page_size
        else "a page a row"
    )
    sizes = (
        f"micro-batches of {step.learner.micro_tokens} tokens a data shard; {settings.slots} slots,"
        f" {pool}"
    )
    return f"each device takes {format_total(memory)} of {format_size(limit)}: {owners} ({sizes})"


@contextlib.contextmanager
def explain_memory_errors(memory: list[MemoryUse]) -> Iterator[None]:
    """Says what takes the memory where a device runs out of it all the same.

    Raises:
      ConfigError: names each part, its size and the setting that shrinks it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = str(error).splitlines()[0]
        limit = format_size(device_memory())
        raise ConfigError(
            f"a device ran out of memory ({first_line}); it has {limit}, and training takes there"
            f" {list_remedies(memory)}"
        ) from error


def device_memory() -> int:
    """Bytes that JAX may use on a device: a CPU's devices share the machine's memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def min_over_processes(size: int) -> int:
    """The least of a number of bytes that each process has, in whole MiB where there are several:
    all must choose alike."""
    if jax.process_count() == 1:
        return size
    return int(np.min(multihost_utils.process_allgather(np.int32(size // 2**20)))) * 2**20


def list_remedies(memory: list[MemoryUse]) -> str:
    return "; ".join(
        f"{use.name} {format_size(use.size)} (less with {use.remedy})"
        for use in sorted(memory, key=lambda use: -use.size)
    )


def format_total(memory: list[MemoryUse]) -> str:
    return format_size(sum(use.size for use in memory))


def format_size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _byte_count(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * leaf.dtype.itemsize


def _device_size(tree: PyTree) -> int:
    """Bytes on a device; what lies in host memory is none of them."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST_MEMORY]
    return sum(_byte_count(leaf.sharding.shard_shape(leaf.shape), leaf) for leaf in leaves)


def _tree_size(tree: PyTree) -> int:
    return sum(_byte_count(leaf.shape, leaf) for leaf in jax.tree.leaves(tree))
