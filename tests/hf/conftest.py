"""Folders of weights."""

from pathlib import Path

import pytest

from tests.conftest import save_policy
from tests.hf.policy_folders import MODEL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    return save_policy(tmp_path / "checkpoint", MODEL)
