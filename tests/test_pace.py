"""What draft lengths are chosen by: a cost table of this machine, kept for the next run, and the draft's acceptance."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.cache import content_key
from jaxspec.config import DataConfig, DraftConfig, EngineConfig, GrpoConfig, ModelConfig, RolloutConfig
from jaxspec.models.decoder import Decoder
from jaxspec.pace import measured_pace
from jaxspec.state import Pace
from jaxspec.step import build_step
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network, tiny_prompts

MODEL = tiny_model(vocab=16, dtype="float32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    return tmp_path / "costs"


def pace_of(draft: DraftConfig) -> Pace:
    config = tiny_config(
        MODEL,
        rollout=RolloutConfig(max_new_tokens=24, draft=draft, engine=EngineConfig(tail=False)),
        grpo=GrpoConfig(prompts=8, group_size=4),
        data=DataConfig(max_prompt_length=5),
        draft_model=MODEL if draft.kind == "model" else ModelConfig(),
    )
    step = build_step(config, small_mesh(2, 1), (1,), MODEL.vocab)
    network = tiny_network(Decoder, MODEL, 1) if draft.kind == "model" else tiny_network(eagle3, MODEL, 2)
    ready = jax.jit(lambda policy, network: step.prepare(step.start(policy, network)))
    target, drafter = ready(tiny_network(Decoder, MODEL, 1), network)
    return jax.tree.map(np.asarray, measured_pace(step, target, drafter, tiny_prompts(8, 5, MODEL.vocab)))


@pytest.mark.slow
def test_costs_are_measured_once_and_kept_for_the_machine_model_and_shape(folder: Path) -> None:
    auto = DraftConfig(draft_length="auto")
    first = pace_of(auto)
    (file,) = folder.iterdir()
    assert first.cost.shape == (4, 3, 1)
    assert (first.cost > 0).all()
    np.testing.assert_array_equal(first.cost, np.asarray(json.loads(file.read_text())["cost"], np.float32))
    doubled = (np.asarray(first.cost) * 2).tolist()
    file.write_text(json.dumps({"cost": doubled, "digest": content_key(doubled)}))
    np.testing.assert_array_equal(pace_of(auto).cost, first.cost * 2)  # what is kept is what counts
    file.write_text(json.dumps({"cost": [[1.0]], "digest": content_key([[1.0]])}))  # of another shape
    assert pace_of(auto).cost.shape == (4, 3, 1)
    pace_of(DraftConfig(kind="model", draft_length="auto"))
    assert len(list(folder.iterdir())) == 2


@pytest.mark.slow
def test_acceptance_is_that_of_the_draft_on_some_prompts(folder: Path) -> None:
    """Random weights keep some of what they draft, the policy's own weights all."""
    random = pace_of(DraftConfig(draft_length="auto")).known
    same = pace_of(DraftConfig(kind="model", draft_length="auto")).known
    drafted = 2 * 16 * 3  # three rounds of both shards' slots
    assert random.reached[0] == drafted
    np.testing.assert_array_equal(random.reached[1:], random.kept[:-1])
    assert 0 < random.kept[0] < drafted
    np.testing.assert_array_equal(same.reached, drafted)
    np.testing.assert_array_equal(same.kept, drafted)
    assert random.spare == 0
