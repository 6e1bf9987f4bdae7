"""What draft lengths are chosen by: a cost table of this machine, kept for the next run, and the
draft's acceptance."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
    RolloutConfig,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.host import round_cost
from jaxspec.host.round_cost import make_length_chooser
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.state import LengthChooser
from jaxspec.storage.cache import content_key
from jaxspec.tokens.stop_strings import build_stop_table
from tests import fork_server
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network, tiny_prompts
from tests.whole_step import load_weights

MODEL = tiny_model(vocab=16, dtype="float32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    return tmp_path / "costs"


def chooser_of(draft: DraftConfig) -> LengthChooser:
    config = tiny_config(
        MODEL,
        rollout=RolloutConfig(max_new_tokens=24, draft=draft, engine=EngineConfig(tail=False)),
        batch=BatchConfig(prompts=8, group_size=4),
        data=DataConfig(max_prompt_length=5),
        draft_model=MODEL if draft.kind == "model" else ModelSpec(),
    )
    # every token would end a row, if stop strings were not off
    stop = build_stop_table(("a",), [b"a"] * MODEL.vocab, "its")
    generator = build_step(config, small_mesh(2, 1), (1,), MODEL.vocab, stop).generator
    network = (
        tiny_network(Decoder, MODEL, 1) if draft.kind == "model" else tiny_network(eagle3, MODEL, 2)
    )
    ready = load_weights(generator, tiny_network(Decoder, MODEL, 1), network)
    return jax.tree.map(
        np.asarray, make_length_chooser(generator, ready, tiny_prompts(8, 5, MODEL.vocab))
    )


@pytest.mark.slow
def test_costs_are_measured_once_and_kept_for_the_machine_model_and_shape(folder: Path) -> None:
    auto = DraftConfig(draft_length="auto")
    first = chooser_of(auto)
    (file,) = folder.iterdir()
    assert first.round_cost.shape == (4, 3, 1)
    assert (first.round_cost > 0).all()
    np.testing.assert_array_equal(
        first.round_cost, np.asarray(json.loads(file.read_text())["cost"], np.float32)
    )
    doubled = (np.asarray(first.round_cost) * 2).tolist()
    file.write_text(json.dumps({"cost": doubled, "digest": content_key(doubled)}))
    np.testing.assert_array_equal(
        chooser_of(auto).round_cost, first.round_cost * 2
    )  # what is kept is what counts
    # of another shape
    file.write_text(json.dumps({"cost": [[1.0]], "digest": content_key([[1.0]])}))
    assert chooser_of(auto).round_cost.shape == (4, 3, 1)
    chooser_of(DraftConfig(kind="model", draft_length="auto"))
    assert len(list(folder.iterdir())) == 2


NAME_OF_THE_FILE = """
from pathlib import Path
from tests.host.test_round_cost import MODEL, file_of
print(file_of().name)
"""


def file_of() -> Path:
    config = tiny_config(
        MODEL,
        rollout=RolloutConfig(draft=DraftConfig(draft_length="auto", eagle3=Eagle3Config(vocab=8))),
    )
    return round_cost.cost_file(build_step(config, small_mesh(1), (), MODEL.vocab).generator, 5)


def test_another_process_finds_the_costs(folder: Path) -> None:
    ran = fork_server.run(
        [sys.executable, "-c", NAME_OF_THE_FILE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == file_of().name


@pytest.mark.slow
def test_acceptance_is_that_of_the_draft_on_some_prompts(folder: Path) -> None:
    """Random weights keep some of what they draft, the policy's own weights all."""
    random = chooser_of(DraftConfig(draft_length="auto")).acceptance
    same = chooser_of(DraftConfig(kind="model", draft_length="auto")).acceptance
    drafted = 2 * 16 * 3  # three rounds of both shards' slots
    assert random.reached[0] == drafted
    np.testing.assert_array_equal(random.reached[1:], random.accepted[:-1])
    assert 0 < random.accepted[0] < drafted
    np.testing.assert_array_equal(same.reached, drafted)
    np.testing.assert_array_equal(same.accepted, drafted)
    assert random.seconds_to_lose == 0
