"""Configs as the command line of training reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.config.cli import load_config
from jaxspec.config.settings import Config
from jaxspec.inputs.checked import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("dapo.py", "draft_offline.py", "rl_code.py", "rl_think.py", "rl_zero.py")


def load(*argv: str) -> tuple[Config, str]:
    return load_config(argv, "train", "Trains.")


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)
