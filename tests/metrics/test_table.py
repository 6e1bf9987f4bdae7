"""The table of metrics, and means with their counts."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import KlConfig
from jaxspec.inputs.spec import ModelSpec
from jaxspec.metrics.mean import Mean, metrics_to_host
from jaxspec.metrics.table import SECTIONS, find_metric, to_markdown
from jaxspec.rewards.outcome import Outcome
from tests.conftest import small_mesh
from tests.whole_step import MODEL, PROMPTS, STOP, WITH_EXPERTS, config_of

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.usefixtures("x64")


def test_the_page_is_the_table() -> None:
    assert (DOCS / "metrics.md").read_text() == to_markdown(), (
        "python -m jaxspec.metrics.table > docs/metrics.md makes it anew"
    )


def test_no_name_stands_twice() -> None:
    names = [metric.name for metrics in SECTIONS.values() for metric in metrics]
    assert len(names) == len(set(names))
    for name in names:
        filled = re.sub(r"\{(\w+)\}", lambda part: "held_out" if part[1] == "set" else "2", name)
        found = find_metric(filled)
        assert found is not None
        assert found.name == name


@pytest.mark.parametrize(
    "name", ["reward", "rollout/tokens/x", "xreward/mean", "eval/a/b/avg@2", "status/other", "loss"]
)
def test_a_name_that_is_not_there_is_not_found(name: str) -> None:
    assert find_metric(name) is None


@pytest.mark.parametrize("model", [MODEL, WITH_EXPERTS], ids=["dense", "experts"])
def test_all_that_a_step_measures_is_in_the_table(model: ModelSpec) -> None:
    """Also with a reference policy, several updates, and a policy with experts."""
    config = config_of(mini_batches=2, model=model, kl=KlConfig(beta=0.1))
    step = build_step(config, small_mesh(), STOP, MODEL.vocab)
    state = jax.eval_shape(step.init_random_state)
    prompts = jax.eval_shape(lambda: step.generator.empty_prompts(PROMPTS))
    scored = jax.eval_shape(lambda: step.empty_scored_rollout(2 * PROMPTS))
    _, _, learned, generated = jax.eval_shape(step.train_step, state, scored, prompts)
    names = [*learned, *generated, *(f"reward/{outcome.name.lower()}" for outcome in Outcome)]
    assert len(names) > 60
    assert [name for name in names if find_metric(name) is None] == []


def test_a_mean_is_of_the_values_that_there_were() -> None:
    values = [Mean.from_value(jnp.float32(value)) for value in (1.0, 4.0)]
    absent = Mean.from_value(jnp.float32(jnp.nan), jnp.asarray(False))
    mean = values[0].merge_with(absent).merge_with(values[1])
    assert float(mean.value) == 2.5
    assert metrics_to_host({"a": mean, "b": absent, "c": jnp.int32(3)}) == {"a": 2.5, "c": 3.0}
    assert metrics_to_host({"a": mean.keep_if(jnp.asarray(False))}) == {}


def test_a_value_that_is_no_number_spoils_the_mean() -> None:
    """NaN says that something diverged, and is not left out."""
    spoiled = Mean.from_value(jnp.float32(1)).merge_with(Mean.from_value(jnp.float32(jnp.nan)))
    assert np.isnan(metrics_to_host({"loss": spoiled})["loss"])
