"""What a run takes of a device's memory, as its compiled programs say: told at its start, and refused with numbers where it cannot fit."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.config import ConfigError
from jaxspec.mesh import DATA, TENSOR
from jaxspec.runner import Runner, abstract
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


def parts(step: Step, prompts: int, programs: Mapping[str, Any]) -> list[Part]:
    """What a run takes on each device, by owner: what it keeps, and what its compiled `programs` take beside that while they run.

    Programs do not run at the same time, so the one that takes most counts. What that is for is told where shapes say it: weights as
    generation reads them, and the pool of keys and values; the rest are mostly the activations of a micro-batch.
    """
    state, _, asked = abstract(step, prompts)
    ready = jax.eval_shape(step.load, state)
    running = jax.eval_shape(step.generator.begin, ready, asked)
    read = None if running.queue is None else running.queue.prompts.caches
    learner, mesh = state.learner, step.mesh.shape
    weights = _size((ready.target, ready.drafter.network)) // mesh[TENSOR]
    pools = 2 if step.generator.settings.lengths else 1  # what rounds of each length cost is measured on a pool that stays as it is
    pool = pools * _size((running.caches, read)) // (mesh[DATA] * mesh[TENSOR])
    kept = [
        Part("policy weights", _placed(learner.policy.network), "more devices: training splits weights over all of them"),
        Part("the policy's optimizer", _placed(learner.policy.optimizer), "--learner.moments bfloat16, --lora.rank 16, or more devices"),
        Part("the draft and its optimizer", _placed(learner.draft), "--rollout.draft.layers, or --rollout.draft.kind ngram or none"),
    ]
    total = sum(part.size for part in kept)
    most = max((_beside(program, total) for program in programs.values()), default=0)
    fewer_rows = "--rollout.engine.slots, --rollout.engine.page_size 64 with fewer --rollout.engine.pages, or shorter answers"
    longest = step.generator.row_length - 1
    micro = f"--learner.tokens, now {step.learner.tokens} and at least {longest}, --model.remat, or more --mesh.tensor"
    kept += [
        Part("weights as generation reads them", weights, "--model.dtype bfloat16, or --mesh.tensor"),
        Part("the pool of keys and values", pool, fewer_rows),
        Part("what learning and generation take beside that while they run", max(most - weights - pool, 0), micro),
    ]
    return [part for part in kept if part.size]


def _beside(program: Any, kept: int) -> int:
    """Bytes that a compiled program takes on each device beside `kept`, which lies there all the time."""
    found = program.memory_analysis()
    if found is None:  # a backend that does not say
        return 0
    inputs = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return found.temp_size_in_bytes + max(inputs - kept, 0)


class Fitted(NamedTuple):
    """A step whose programs fit the devices."""

    step: Step
    runner: Runner
    parts: list[Part]


def fitted(step: Step, prompts: int, compiled: Callable[[Step], Runner], may_shrink: bool) -> Fitted:
    """Compiles a step, with smaller and smaller micro-batches until it fits where `may_shrink`, before any weights are loaded.

    Raises:
      ConfigError: it does not fit; names each owner, its size and the setting that shrinks it.
    """
    limit, longest = least_of_processes(device_memory()), step.generator.row_length - 1
    while True:
        runner = compiled(step)
        found = parts(step, prompts, runner.programs)
        if sum(part.size for part in found) <= limit:
            return Fitted(step, runner, found)
        tokens = max(longest, step.learner.tokens // 2)
        if not may_shrink or tokens == step.learner.tokens:
            raise ConfigError(f"training takes {_total(found)} on each device, which has {_gib(limit)}: {_listed(found)}")
        step = dataclasses.replace(step, learner=dataclasses.replace(step.learner, tokens=tokens))


def told(step: Step, found: list[Part]) -> str:
    """The bytes of a device by owner, in a line."""
    owners = ", ".join(f"{part.name} {_gib(part.size)}" for part in sorted(found, key=lambda part: -part.size))
    micro = f"micro-batches of {step.learner.tokens} tokens a data shard"
    return f"each device takes {_total(found)} of {_gib(device_memory())}: {owners} ({micro})"


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
        raise ConfigError(f"a device ran out of memory ({first}); it has {limit}, and training takes there {_listed(found)}") from error


def device_memory() -> int:
    """Bytes that JAX may use on a device: a CPU's devices share the machine's memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def least_of_processes(size: int) -> int:
    """The least of a number of bytes that each process has, in whole MiB where there are several: all must choose alike."""
    if jax.process_count() == 1:
        return size
    return int(np.min(multihost_utils.process_allgather(np.int32(size // 2**20)))) * 2**20


def _listed(kept: list[Part]) -> str:
    return "; ".join(f"{part.name} {_gib(part.size)} (less with {part.remedy})" for part in sorted(kept, key=lambda part: -part.size))


def _total(found: list[Part]) -> str:
    return _gib(sum(part.size for part in found))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _bytes(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * leaf.dtype.itemsize


def _placed(tree: PyTree) -> int:
    return sum(_bytes(leaf.sharding.shard_shape(leaf.shape), leaf) for leaf in jax.tree.leaves(tree))


def _size(tree: PyTree) -> int:
    return sum(_bytes(leaf.shape, leaf) for leaf in jax.tree.leaves(tree))
