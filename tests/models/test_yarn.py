"""Stretched positions: the frequencies are transformers', and a policy that was trained on short texts goes on with longer ones."""

from typing import Any

import numpy as np
import pytest

from jaxspec.models.hf_config import rope_of
from jaxspec.models.rope import frequencies

QWEN3 = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "Qwen3": QWEN3,
    "Qwen3, band not rounded": {**QWEN3, "truncate": False},
    "own band": {**QWEN3, "beta_fast": 16.0, "beta_slow": 2.0, "factor": 2.0},
    "attention factor": {**QWEN3, "attention_factor": 1.25},
    "DeepSeek's mscale": {**QWEN3, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    "Llama 3.1": LLAMA31,
    "Llama 3.2": {**LLAMA31, "factor": 32.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
}


@pytest.mark.hf
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """For heads of 128, from the keys of config.json."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given, longest = PARAMETERS[name], 131_072
    config = transformers.Qwen3Config(head_dim=128, max_position_embeddings=longest, rope_parameters=given)
    wanted, wanted_scale = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, None)
    theta, factor, rope = rope_of({"max_position_embeddings": longest, "rope_parameters": given}, "config.json")
    rates, scale = frequencies(128, theta, factor, rope)
    np.testing.assert_allclose(rates, wanted.numpy(), rtol=1e-6, atol=0)
    assert scale == pytest.approx(wanted_scale, rel=1e-6)
    unstretched = theta ** (-np.arange(0, 128, 2) / 128)
    assert np.abs(rates / unstretched - 1).max() > 0.3
