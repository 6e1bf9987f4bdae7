"""The surroundings of a program that is run to its end."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has been started; what is written by default goes where nothing else is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "kept")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
