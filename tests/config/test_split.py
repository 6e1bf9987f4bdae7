"""Split of a job's devices between the two sides."""

from dataclasses import replace
from typing import Any

import pytest

from jaxspec.config.algorithms import collect_warnings
from jaxspec.config.settings import (
    BatchConfig,
    DynamicSamplingConfig,
    EvalConfig,
    GenerationConfig,
    MeshConfig,
    OfflineConfig,
    ScheduleConfig,
    SftConfig,
)
from jaxspec.config.split import check_meshes
from jaxspec.inputs.checked import ConfigError
from tests.conftest import tiny_config, tiny_model


def config_of(devices: int, prompts: int = 12, lag: int = 1, **changes: Any) -> Any:
    """A pipelined run with so many devices that generate."""
    generation = changes.pop("generation", {})
    return tiny_config(
        tiny_model(kv_heads=4),
        batch=BatchConfig(prompts=prompts, group_size=2),
        schedule=ScheduleConfig(kind="pipelined", lag=lag),
        generation=GenerationConfig(devices=devices, **generation),
        sft=SftConfig(steps=0),
        offline=OfflineConfig(steps=0),
        **changes,
    )


@pytest.mark.parametrize(
    ("devices", "processes", "generators", "generation", "shapes"),
    [
        (2, 1, 1, {}, ((1, 1, 1), (1, 1, 1))),
        (4, 1, 1, {}, ((3, 1, 1), (1, 1, 1))),
        (8, 1, 2, {"tensor": 2}, ((6, 1, 1), (1, 2, 1))),
        (8, 4, 4, {}, ((4, 1, 1), (4, 1, 1))),
        (4, 1, 0, {}, ((4, 1, 1), (4, 1, 1))),
    ],
)
def test_each_side_has_its_devices(
    devices: int, processes: int, generators: int, generation: dict, shapes: tuple
) -> None:
    config = config_of(generators, generation=generation)
    found = check_meshes(config, devices, processes)
    assert (found.learner, found.generator) == shapes
    assert found.generator_devices == generators


@pytest.mark.parametrize(
    ("config", "devices", "processes", "words"),
    [
        (config_of(4), 4, 1, "generation.devices 4 leave no device to learn on, of 4 .* most 3"),
        (config_of(9), 8, 1, "generation.devices 9 leave no device"),
        (
            config_of(2),
            12,
            3,
            "devices 2 with 3 processes of 4 devices .* multiple of 4",
        ),
        (config_of(0), 4, 2, "generation.devices 0: both sides would take turns in 2 processes"),
        (
            config_of(3, generation={"tensor": 2}),
            *(8, 1, "generation.tensor 2 does not divide 3 devices"),
        ),
        (config_of(5, generation={"data": 5}), 8, 1, "batch.prompts 12 is not a multiple of 5"),
        (
            config_of(2, generation={"data": 3}),
            *(4, 1, r"generation.data 3 x generation.tensor 1 = 3 devices, but there are 2"),
        ),
        (config_of(1, mesh=MeshConfig(data=4)), 4, 1, "mesh.data 4 .* but there are 3"),
        (
            config_of(1, eval=EvalConfig(keep_best="held_out/avg@2")),
            2,
            1,
            "eval.keep_best held_out",
        ),
        (
            config_of(1, dynamic_sampling=DynamicSamplingConfig(max_batches=2, surplus="carry")),
            *(2, 1, "carried groups would lag 2 updates behind, and not 1"),
        ),
    ],
)
def test_a_split_that_cannot_work_is_refused_with_numbers(
    config: Any, devices: int, processes: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_meshes(config, devices, processes)


def test_a_lag_is_at_least_0_and_a_large_one_is_warned_of() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.lag is -1"):
        ScheduleConfig(kind="pipelined", lag=-1)
    assert not [line for line in collect_warnings(config_of(1, lag=8)) if "schedule.lag" in line]
    (warning,) = [line for line in collect_warnings(config_of(1, lag=9)) if "schedule.lag" in line]
    assert warning.startswith("warning: schedule.lag is 9")


def test_the_correction_follows_the_lag() -> None:
    """Ratios to recorded log-probabilities correct for it. Where there are none, weights do."""

    def resolve(config: Any, **loss: Any) -> tuple[str, str]:
        resolved = replace(config, loss=replace(config.loss, **loss)).resolved_loss
        return resolved.importance, resolved.logprobs

    lagging, level = config_of(1), config_of(1, lag=0)
    for kind in ("clip", "cispo", "gspo", "reinforce"):
        has_ratio = kind in ("clip", "cispo")
        weighted = ("tis", "recompute")
        assert resolve(lagging, kind=kind) == (("none", "reuse") if has_ratio else weighted)
        assert resolve(lagging, kind=kind, logprobs="recompute") == weighted
        assert resolve(level, kind=kind) == ("none", "reuse")
    assert not lagging.is_on_policy
    assert level.is_on_policy
    reinforced = replace(lagging, loss=replace(lagging.loss, kind="reinforce"))
    assert not [line for line in collect_warnings(reinforced) if "reinforce" in line]
    chosen = replace(lagging, loss=replace(lagging.loss, importance="none"))
    assert chosen.resolved_loss.importance == "none"
