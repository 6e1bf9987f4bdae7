"""The learner computes wide functions only where a label needs them: with the same gradients."""

import pytest

from jaxspec.kernels import chunks
from tests.rl.test_learner import assert_close, learnt, plain, step_of

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    ("kind", "data", "tensor"),
    [
        pytest.param("eagle3", 2, 1, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, 2, marks=pytest.mark.sweep),
        pytest.param("mtp", 4, 1, marks=pytest.mark.sweep),
    ],
)
def test_positions_that_no_label_needs_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, kind: str, data: int, tensor: int
) -> None:
    slopes, of_policy, of_draft = plain(kind)
    monkeypatch.setattr(chunks, "WIDE_ELEMENTS", 1)
    monkeypatch.setattr(chunks, "CHUNK_POSITIONS_CPU", 3)
    found, metrics = learnt(step_of(kind, 30, data, tensor), kind)
    assert_close(found, slopes, 1e-12)
    assert metrics["loss/policy"] == pytest.approx(of_policy, abs=1e-12)
    assert metrics["loss/draft"] == pytest.approx(of_draft, abs=1e-12)
