"""The EAGLE-3 head against loops in plain numpy (drafters.md 1.1), and against the mistakes that others made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.attention import attend, up_to_position
from jaxspec.models.eagle3 import Eagle3
from tests.conftest import numpy_eagle_slot, numpy_weights, tiny_model, tiny_network

pytestmark = pytest.mark.usefixtures("x64")

LENGTH = 6


def network(kv_heads: int = 2) -> Eagle3:
    return tiny_network(Eagle3, tiny_model(kv_heads=kv_heads), 3, 1.5)


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(1, LENGTH, 3 * 16)), random.normal(size=(1, LENGTH, 16))


def run(head: Eagle3, taps: np.ndarray, embedded: np.ndarray, first: int = 0) -> tuple[jax.Array, jax.Array]:
    """Pre-norm outputs and logits of a block that attends causally to itself."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None] + first
    hidden = head.fuse_taps(jnp.asarray(taps))
    heads = head.heads(hidden, jnp.asarray(embedded), positions)
    outputs = head.finish(hidden, attend(heads.query, heads.key, heads.value, up_to_position(positions - first, LENGTH)))
    return outputs, head.logits(outputs)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_matches_plain_numpy(kv_heads: int) -> None:
    head = network(kv_heads)
    taps, embedded = inputs()
    outputs, logits = run(head, taps, embedded)
    seen = []
    for t in range(LENGTH):
        hidden = taps[0, t] @ numpy_weights(head)["fuse"]
        out, law = numpy_eagle_slot(head, hidden, embedded[0, t], t, seen)
        np.testing.assert_allclose(outputs[0, t], out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(logits[0, t], law, rtol=0, atol=1e-12)


def test_only_differences_of_positions_matter() -> None:
    """drafters.md 1.1: a uniform shift is invisible under rotary positions."""
    taps, embedded = inputs()
    np.testing.assert_allclose(run(network(), taps, embedded, 40)[1], run(network(), taps, embedded)[1], rtol=0, atol=1e-11)


def test_shapes_are_those_of_a_llama_layer_over_twice_the_width() -> None:
    """Embedding and hidden state side by side; no norms of queries and keys even under a Qwen3 target; a head of its own."""
    shapes = {name: weight.shape for name, weight in numpy_weights(network()).items()}
    assert shapes == {
        "fuse": (48, 16), "embedding_norm": (16,), "hidden_norm": (16,),
        "query": (1, 32, 4, 4), "key": (1, 32, 2, 4), "value": (1, 32, 2, 4), "output": (1, 4, 4, 16),
        "ffn_norm": (16,), "gate": (1, 16, 24), "up": (1, 16, 24), "down": (1, 24, 16), "norm": (16,), "head": (16, 11),
    }  # fmt: skip


def test_fresh_weights_are_finite_and_of_unit_gain() -> None:
    head = Eagle3(tiny_model(embed=64, heads=8), jax.random.key(0))
    weights = numpy_weights(head)
    for name, fan_in in {"fuse": 192, "query": 128, "key": 128, "value": 128, "output": 32, "gate": 64, "down": 24, "head": 64}.items():
        assert weights[name].std() == pytest.approx(fan_in**-0.5, rel=0.1), name
    assert all((weights[name] == 1).all() for name in ("embedding_norm", "hidden_norm", "ffn_norm", "norm"))
