"""What training keeps on a device, counted before it is there, and the message where it does not
fit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import AutomaticSizes, build_step
from jaxspec.config.settings import (
    DynamicSamplingConfig,
    EngineConfig,
    KlConfig,
    LoraConfig,
    MeshConfig,
)
from jaxspec.host import fit as fitting
from jaxspec.host import memory
from jaxspec.host.fit import fit_step
from jaxspec.host.programs import abstract_arguments, compile_ahead, put_like
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import make_mesh
from jaxspec.run.schedules import StepSchedule
from jaxspec.step import Step
from tests.conftest import tiny_config
from tests.host.fit_parts import MODEL, PROMPTS, plain_config, sizes, step_of


def on_one_device(tree) -> int:
    """Bytes of what really lies on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


@pytest.mark.parametrize(("data", "tensor"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
def test_parts_are_what_then_lies_on_a_device(data: int, tensor: int) -> None:
    fills = DynamicSamplingConfig(max_batches=3)
    split, kl = MeshConfig(shard_above=0), KlConfig(beta=0.04)
    config = tiny_config(MODEL, mesh=split, kl=kl, dynamic_sampling=fills)
    step = step_of(config, data, tensor)
    found = sizes(step)
    state = jax.jit(step.init_random_state, out_shardings=step.state_shardings())()
    assert found["policy weights"] == on_one_device(state.learner.policy.network)
    assert found["the policy's optimizer"] == on_one_device(state.learner.policy.optimizer)
    assert found["the draft and its optimizer"] == on_one_device(state.learner.draft)
    assert found["the reference policy"] == on_one_device(state.learner.reference) > 0
    _, rows, _ = abstract_arguments(step, PROMPTS)
    rows = rows.replace(plan=None)
    nothing = put_like(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), rows), rows)
    assert found["the batch that rollouts fill"] == on_one_device(nothing)
    ready = jax.jit(step.sync)(state)
    asked = abstract_arguments(step, PROMPTS)[2]
    nothing = put_like(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), asked), asked)
    begin, _ = compile_ahead(step.generator.begin, ready, asked)
    assert found["the pool of keys and values"] == on_one_device(begin(ready, nothing).caches)


def test_each_remedy_shrinks_its_part() -> None:
    whole = sizes(step_of(tiny_config(MODEL)))
    few = dataclasses.replace(tiny_config(MODEL).rollout, engine=EngineConfig(slots=2))
    fewer = sizes(step_of(dataclasses.replace(tiny_config(MODEL), rollout=few)))
    # what waiting rows start from stays
    assert fewer["the pool of keys and values"] <= whole["the pool of keys and values"] / 2
    adapters = sizes(step_of(tiny_config(MODEL, lora=LoraConfig(rank=1))))
    assert adapters["the policy's optimizer"] < whole["the policy's optimizer"] / 3
    assert "the reference policy" not in whole
    assert "the batch that rollouts fill" not in whole
    lora, kl = LoraConfig(rank=1), KlConfig(beta=0.04)
    assert "the reference policy" not in sizes(step_of(tiny_config(MODEL, lora=lora, kl=kl)))


@functools.cache
def runner_of(tokens: int) -> StepSchedule:
    """Of learning alone, which is what micro-batches change."""
    step = step_of(plain_config(tokens))
    state, finished, _ = abstract_arguments(step, PROMPTS)
    learn, _ = compile_ahead(
        step.learn, state, finished, donate_argnums=0, out_shardings=(step.state_shardings(), None)
    )

    def never(*_: Any) -> Any:
        pytest.fail("nothing runs here")

    return StepSchedule(never, {"train": learn})


def compiled(step: Step) -> StepSchedule:
    return runner_of(step.learner.micro_tokens)


def total_of(tokens: int) -> int:
    step = step_of(plain_config(tokens))
    return sum(sizes(step, compiled(step).programs).values())


def test_what_programs_take_beside_the_weights_is_their_own_analysis() -> None:
    """The most of any: temporaries, inputs and outputs that are not there anyway."""
    step = step_of(plain_config(200))
    programs = compiled(step).programs
    parts = sizes(step, programs)
    kept = sum(parts[name] for name in ("policy weights", "the policy's optimizer"))
    found = [program.memory_analysis() for program in programs.values()]
    wanted = max(
        each.temp_size_in_bytes
        + max(
            each.argument_size_in_bytes
            + each.output_size_in_bytes
            - each.alias_size_in_bytes
            - kept,
            0,
        )
        for each in found
    )
    assert sum(parts.values()) == pytest.approx(kept + wanted, abs=1)
    assert wanted > 200 * 16 * 4 * MODEL.layers, "a micro-batch's activations are in it"


@pytest.mark.sweep
def test_the_micro_batch_shrinks_until_it_fits_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = step_of(tiny_config(MODEL)).generator.row_length - 1
    many, fewer, least = (total_of(tokens) for tokens in (400, 200, longest))
    assert many > fewer > least
    asked = step_of(plain_config(400))
    for limit, tokens in ((many, 400), (many - 1, 200), (least, longest)):
        monkeypatch.setattr(fitting, "device_memory", lambda limit=limit: limit)
        fit = fit_step(asked, PROMPTS, compiled, AutomaticSizes(tokens=True))
        assert fit.step.learner.micro_tokens == tokens
        assert f"micro-batches of {tokens} tokens" in memory.format_memory_uses(
            fit.step, fit.memory_uses, fit.limit
        )
    monkeypatch.setattr(fitting, "device_memory", lambda: least - 1)
    words = (
        rf"training takes \d.*on each device, which has.*--batch.micro_tokens, now {longest} and at"
        rf" least {longest}.*--lora.rank"
    )
    with pytest.raises(ConfigError, match=words):
        fit_step(asked, PROMPTS, compiled, AutomaticSizes(tokens=True))
    monkeypatch.setattr(fitting, "device_memory", lambda: many - 1)
    with pytest.raises(ConfigError, match=rf"--batch.micro_tokens, now 400 and at least {longest}"):
        fit_step(asked, PROMPTS, compiled, AutomaticSizes(tokens=False))


# ---- the engine of an accelerator


def kept() -> list[memory.MemoryUse]:
    return memory.list_memory_uses(step_of(tiny_config(MODEL)), PROMPTS, {})


def test_running_out_names_what_takes_the_memory() -> None:
    with pytest.raises(ConfigError) as caught, memory.explain_memory_errors(kept()):
        jax.block_until_ready(jnp.zeros((2**50,), jnp.int8))
    for words in (
        "ran out of memory",
        "1125899906842624",
        "policy weights",
        "pool of keys and values",
        "--rollout.engine.slots",
    ):
        assert words in str(caught.value)


def test_other_errors_stay_as_they_are() -> None:
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        memory.explain_memory_errors(kept()),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


class Analyzed:
    """A compiled program that takes some bytes beside its arguments."""

    def __init__(self, temporaries: int) -> None:
        self.temp_size_in_bytes = temporaries
        self.argument_size_in_bytes = self.output_size_in_bytes = self.alias_size_in_bytes = 0

    def memory_analysis(self) -> "Analyzed":
        return self


def test_a_process_of_one_side_counts_that_side_alone() -> None:
    """Even if the other side would not fit, which its own processes find out."""
    config = plain_config(200)
    learner, generator = (
        build_step(config, make_mesh(2, devices=jax.devices()[first:]), (1,), 11)
        for first in (0, 2)
    )
    step = dataclasses.replace(learner, generator=generator.generator)
    learning = sizes(step, {"train": Analyzed(10**6)})
    generation = sizes(step, {"load": Analyzed(0), "advance": Analyzed(0)})
    assert learning["policy weights"] > 0
    assert not learning.keys() & generation.keys() - {memory.TEMPORARIES}
    assert memory.POOL in generation

    def compile_learner(step: Step) -> StepSchedule:
        unused: Any = None
        return StepSchedule(unused, {"train": Analyzed(1000 * step.learner.micro_tokens)})

    limit = sum(learning.values())
    tokens = AutomaticSizes(tokens=True)
    fit = fit_step(step, PROMPTS, compile_learner, tokens, limit=limit - 10**6 + 100_000)
    assert fit.step.learner.micro_tokens == 100
    with pytest.raises(ConfigError, match="training takes"):
        fit_step(step, PROMPTS, compile_learner, tokens, limit=1000)
