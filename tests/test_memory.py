"""What training keeps on a device, counted before it is there, and the message where it does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import memory
from jaxspec.config import Config, ConfigError, EngineConfig, LoraConfig, MeshConfig
from jaxspec.runner import abstract, ahead, put
from jaxspec.step import Step, build_step
from tests.conftest import small_mesh, tiny_config, tiny_model

MODEL = tiny_model(vocab=12, dtype="float32")
PROMPTS = tiny_config(MODEL).grpo.prompts


def step_of(config: Config, data: int = 2, tensor: int = 1) -> Step:
    return build_step(config, small_mesh(data, tensor), (1,), 11)


def sizes(step: Step) -> dict[str, int]:
    return {part.name: part.size for part in memory.parts(step, PROMPTS)}


def on_one_device(tree) -> int:
    """Bytes of what really lies on the first device."""
    first = jax.devices()[0]
    return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == first)


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2)])
def test_parts_are_what_then_lies_on_a_device(data: int, tensor: int) -> None:
    step = step_of(tiny_config(MODEL, mesh=MeshConfig(shard_above=0)), data, tensor)
    found = sizes(step)
    state = jax.jit(step.fresh, out_shardings=step.state_shardings())()
    assert found["policy weights"] == on_one_device(state.learner.policy.network)
    assert found["the policy's optimizer"] == on_one_device(state.learner.policy.optimizer)
    assert found["the draft and its optimizer"] == on_one_device(state.learner.draft)
    ready = jax.jit(step.load)(state)
    asked = abstract(step, PROMPTS)[2]
    nothing = put(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), asked), asked)
    begin, _ = ahead(step.generator.begin, ready, asked)
    assert found["the pool of keys and values"] == on_one_device(begin(ready, nothing).caches)


def test_each_remedy_shrinks_its_part() -> None:
    whole = sizes(step_of(tiny_config(MODEL)))
    few = dataclasses.replace(tiny_config(MODEL).rollout, engine=EngineConfig(slots=2))
    fewer = sizes(step_of(dataclasses.replace(tiny_config(MODEL), rollout=few)))
    assert fewer["the pool of keys and values"] <= whole["the pool of keys and values"] / 2  # what waiting rows start from stays
    adapters = sizes(step_of(tiny_config(MODEL, lora=LoraConfig(rank=1))))
    assert adapters["the policy's optimizer"] < whole["the policy's optimizer"] / 3


def test_what_cannot_fit_is_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(tiny_config(MODEL))
    total = sum(sizes(step).values())
    monkeypatch.setattr(memory, "device_memory", lambda: total)
    with memory.explained(step, PROMPTS):
        pass
    monkeypatch.setattr(memory, "device_memory", lambda: total - 1)
    words = r"keeps at least \d.*on each device, which has.*optimizer.*--lora.rank.*--rollout.engine.slots"
    with pytest.raises(ConfigError, match=words), memory.explained(step, PROMPTS):
        pytest.fail("nothing may begin")


def test_running_out_names_what_takes_the_memory() -> None:
    with pytest.raises(ConfigError) as caught, memory.explained(step_of(tiny_config(MODEL)), PROMPTS):
        jax.block_until_ready(jnp.zeros((2**50,), jnp.int8))
    for words in ("ran out of memory", "1125899906842624", "policy weights", "pool of keys and values", "--rollout.engine.slots"):
        assert words in str(caught.value)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory.explained(step_of(tiny_config(MODEL)), PROMPTS):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
