"""The settings of sampling that `sample` takes."""

import dataclasses

from jaxspec.config.cli import override_settings
from jaxspec.config.settings import ResolvedConfig, RolloutConfig
from jaxspec.sample import ROLLOUT_OPTIONS, options_from_config, sampling_config
from tests.plain_answers import CONFIG

CHANGES = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.1,
    "min_new_tokens": 2,
    "max_new_tokens": 9,
    "banned": (1, 3),
    "stop": ("#", "##"),
    "stop_ids": (3,),
}


def sampled(config: ResolvedConfig, *words: str) -> RolloutConfig:
    options = override_settings(options_from_config(config), words, "sample", "")
    return sampling_config(config, options, words).rollout


def test_every_sampling_setting_can_be_named() -> None:
    words: list[str] = []
    for name, value in CHANGES.items():
        words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    made = sampled(CONFIG, *words)
    assert {name: getattr(made, name) for name in CHANGES} == CHANGES
    assert not override_settings(
        options_from_config(CONFIG), ["--no_enable_thinking"], "", ""
    ).enable_thinking
    others = {"engine"}
    assert {item.name for item in dataclasses.fields(RolloutConfig)} - others == {*ROLLOUT_OPTIONS}


def test_settings_that_are_not_named_are_the_runs() -> None:
    own = dataclasses.replace(CONFIG.rollout, top_k=3, min_p=0.1, stop=("=",), banned=(2,))
    assert sampled(dataclasses.replace(CONFIG, rollout=own)) == own
