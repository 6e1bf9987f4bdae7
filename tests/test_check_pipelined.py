"""What is said of a pipelined run: both sides, and what travels between them, by hand."""

from typing import Any

import pytest

from jaxspec import check
from jaxspec.host.check_report import SidesResult
from tests.test_check import (
    EMBED,
    FFN,
    HEAD,
    HEADS,
    KV_HEADS,
    LAYERS,
    NEW,
    PROMPT,
    ROWS,
    RUN,
    VOCAB,
    checked,
    told,
    without_plugin,  # noqa: F401  # a fixture of this file too
)

pytestmark = pytest.mark.slow

SIDES = [
    *"--schedule.kind pipelined --schedule.lag 2 --generation.devices 2".split(),  # noqa: SIM905
    *"--mesh.shard_above 0 --mesh.data 4".split(),  # noqa: SIM905
]


@pytest.fixture(scope="module")
def both(without_plugin: None) -> dict[str, Any]:  # noqa: F811
    """What is said of a small model on 4 devices that learn and 2 that generate, as JSON."""
    result = checked([*RUN, *SIDES, "--devices", "6", "--hardware", "h200"])
    assert isinstance(result, SidesResult)
    return check.sides_to_json("both", result)


def test_each_side_has_its_own_memory_and_work(both: dict[str, Any]) -> None:
    learner, generator = both["learner"], both["generator"]
    assert (learner["devices"], generator["devices"]) == (4, 2)
    layer = 2 * EMBED * HEADS * HEAD + 2 * EMBED * KV_HEADS * HEAD + 3 * EMBED * FFN
    weights = LAYERS * layer + VOCAB * EMBED
    norms = LAYERS * (2 * EMBED + 2 * HEAD) + EMBED
    owners = learner["memory"]["owners"]
    assert owners["policy weights"] == pytest.approx(4 * (weights / 4 + norms), rel=0.02)
    assert "weights as generation reads them" not in owners
    owners = generator["memory"]["owners"]
    assert owners["weights as generation reads them"] == pytest.approx(4 * weights, rel=0.05)
    positions = -(-(PROMPT + NEW) // 8) * 8
    pool = ROWS // 2 * positions * LAYERS * 2 * KV_HEADS * HEAD * 4
    assert owners["the pool of keys and values"] == pytest.approx(pool, rel=0.02)
    assert "policy weights" not in owners
    assert learner["work"]["a micro-batch"]["flops"] > 0
    assert learner["work"]["a round"]["flops"] == 0
    assert generator["work"]["a micro-batch"]["flops"] == 0
    assert generator["work"]["a round"]["flops"] > 0
    # Loading gathers each weight once from its parts.
    assert generator["sync_moves_each_weight"] == pytest.approx(1, rel=0.05)
    assert both["runs"] is True


def test_each_weight_travels_once_in_the_type_of_generation(both: dict[str, Any]) -> None:
    layer = 2 * EMBED * HEADS * HEAD + 2 * EMBED * KV_HEADS * HEAD + 3 * EMBED * FFN
    norms = LAYERS * (2 * EMBED + 2 * HEAD) + EMBED
    weights = LAYERS * layer + VOCAB * EMBED + norms
    assert both["weight_bytes"] == pytest.approx(4 * weights, rel=0.01)
    # Tokens, log-probabilities and origins of the rows, and some numbers for each.
    assert both["batch_bytes"] == pytest.approx(ROWS * (PROMPT + NEW) * (4 + 4 + 1), rel=0.5)
    # Two devices receive, over the links of an H200.
    assert both["transfer_seconds"] == pytest.approx(both["weight_bytes"] / 2 / 450e9, rel=0.01)


def test_the_report_has_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = told([*RUN, *SIDES, "--devices", "6", "--hardware", "h200"], capsys)
    assert status == 0
    words = ("learning:", "generation:", "lag 2:", "of weights travel for each version", "450 GB/s")
    for word in words:
        assert word in text
