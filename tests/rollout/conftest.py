"""The forms of verification that rules are tested in."""

import pytest

from tests.rollout.harness import FORMS, InUse

# The fast forms take seconds to compile for each shape. The fast part has `test_fused.py` for them.
PARAMS = [pytest.param(name, marks=[] if name == "plain" else pytest.mark.slow) for name in FORMS]


@pytest.fixture(params=PARAMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A form of verification, which `RULES` and `match` have in the test."""
    monkeypatch.setattr(InUse, "form", request.param)
    return request.param
