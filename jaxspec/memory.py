"""What a run keeps in a device's memory from its start: refused with names and numbers where it cannot fit, and told where it did not."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxspec.config import ConfigError
from jaxspec.mesh import DATA, TENSOR
from jaxspec.runner import abstract
from jaxspec.state import PyTree
from jaxspec.step import Step

GIB = 2**30


class Part(NamedTuple):
    """One of the things that a run keeps."""

    name: str
    size: int
    """Bytes on each device."""
    remedy: str
    """What shrinks it."""


def parts(step: Step, prompts: int) -> list[Part]:
    """What training keeps on each device while it generates; what comes and goes beside it is not counted. Nothing is allocated."""
    state, _, asked = abstract(step, prompts)
    ready = jax.eval_shape(step.load, state)
    running = jax.eval_shape(step.generator.begin, ready, asked)
    read = None if running.queue is None else running.queue.prompts.caches
    learner = state.learner
    pools = 2 if step.generator.settings.lengths else 1  # what rounds of each length cost is measured on a pool that stays as it is
    tensor = step.mesh.shape[TENSOR]
    fewer_rows = "--rollout.engine.slots, --rollout.engine.page_size 64 with fewer --rollout.engine.pages, or shorter answers"
    found = [
        Part("policy weights", _placed(learner.policy.network), "more devices: training splits weights over all of them"),
        Part("the policy's optimizer", _placed(learner.policy.optimizer), "--lora.rank 16, or more devices"),
        Part("the draft and its optimizer", _placed(learner.draft), "--rollout.draft.layers, or --rollout.draft.kind ngram or none"),
        Part(
            "weights as generation reads them",
            _size((ready.target, ready.drafter.network)) // tensor,
            "--model.dtype bfloat16, or --mesh.tensor",
        ),
        Part("the pool of keys and values", pools * _size((running.caches, read)) // (step.mesh.shape[DATA] * tensor), fewer_rows),
    ]
    return [part for part in found if part.size]


@contextlib.contextmanager
def explained(step: Step, prompts: int) -> Iterator[None]:
    """Checks that what a run keeps fits its devices, and says what takes the memory where it runs out all the same.

    Raises:
      ConfigError: names each part, its size and the setting that shrinks it.
    """
    kept, limit = parts(step, prompts), device_memory()
    total, listed = sum(part.size for part in kept), _listed(kept)
    if total > limit:
        raise ConfigError(f"training keeps at least {_gib(total)} on each device, which has {_gib(limit)}: {listed}")
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).splitlines()[0]
        raise ConfigError(f"a device ran out of memory ({first}); it has {_gib(limit)}, and training keeps there {listed}") from error


def device_memory() -> int:
    """Bytes that JAX may use on a device: a CPU's devices share the machine's memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def _listed(kept: list[Part]) -> str:
    return "; ".join(f"{part.name} {_gib(part.size)} (less with {part.remedy})" for part in sorted(kept, key=lambda part: -part.size))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _bytes(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * leaf.dtype.itemsize


def _placed(tree: PyTree) -> int:
    return sum(_bytes(leaf.sharding.shard_shape(leaf.shape), leaf) for leaf in jax.tree.leaves(tree))


def _size(tree: PyTree) -> int:
    return sum(_bytes(leaf.shape, leaf) for leaf in jax.tree.leaves(tree))
