"""The EAGLE-3 head against loops in plain numpy, and against the mistakes that
others made."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3, VocabularyMap, with_vocabulary
from jaxspec.models.layers import cast_floats
from jaxspec.rl import optimizers
from tests.conftest import eagle3, tiny_model, tiny_network
from tests.dense import attend, up_to_position
from tests.twins import numpy_eagle_slot, numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

LENGTH = 6
IDS = np.array([0, 2, 3, 7, 8, 10])


def network(kv_heads: int = 2, vocab: int = 0) -> Eagle3:
    return tiny_network(
        functools.partial(eagle3, vocab=vocab), tiny_model(kv_heads=kv_heads), 3, 1.5
    )


@pytest.fixture(scope="module")
def target(x64: None) -> Decoder:
    return tiny_network(Decoder, tiny_model(), 1)


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(1, LENGTH, 3 * 16)), random.normal(size=(1, LENGTH, 16))


def run(
    target: Decoder, head: Eagle3, taps: np.ndarray, embedded: np.ndarray, first: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Pre-norm outputs and logits of a block that attends causally to itself."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None] + first
    heads = head.attention_inputs(
        0, head.to_hidden(jnp.asarray(taps)), jnp.asarray(embedded), positions
    )
    outputs = head.layer_output(
        0,
        heads.residual,
        attend(heads.query, heads.key, heads.value, up_to_position(positions - first, LENGTH)),
    )
    return outputs, head.logits(target, outputs)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_matches_plain_numpy(target: Decoder, kv_heads: int) -> None:
    head = network(kv_heads)
    taps, embedded = inputs()
    outputs, logits = run(target, head, taps, embedded)
    seen = []
    for t in range(LENGTH):
        hidden = taps[0, t] @ numpy_weights(head)["fuse"]
        out, law = numpy_eagle_slot(head, hidden, embedded[0, t], t, seen)
        np.testing.assert_allclose(outputs[0, t], out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(logits[0, t], law, rtol=0, atol=1e-12)


def test_only_differences_of_positions_matter(target: Decoder) -> None:
    """A uniform shift of all positions is invisible under rotary embeddings."""
    taps, embedded = inputs()
    np.testing.assert_allclose(
        run(target, network(), taps, embedded, 40)[1],
        run(target, network(), taps, embedded)[1],
        rtol=0,
        atol=1e-11,
    )


def test_shapes_are_those_of_a_llama_layer_over_twice_the_width() -> None:
    """Embedding and hidden state side by side; no norms of queries and keys even under a Qwen3
    target; a head of its own."""
    shapes = {name: weight.shape for name, weight in numpy_weights(network()).items()}
    assert shapes == {
        "fuse": (48, 16), "norm": (16,), "head": (16, 11),
        "first.embedding_norm": (1, 16), "first.hidden_norm": (1, 16),
        "first.query": (1, 32, 4, 4), "first.key": (1, 32, 2, 4), "first.value": (1, 32, 2, 4),
        "first.output": (1, 4, 4, 16), "first.ffn_norm": (1, 16), "first.gate": (1, 16, 24),
        "first.up": (1, 16, 24), "first.down": (1, 24, 16),
    }  # fmt: skip


def test_fresh_weights_are_finite_and_of_unit_gain() -> None:
    head = eagle3(tiny_model(embed=64, heads=8), jax.random.key(0))
    weights = {name.removeprefix("first."): value for name, value in numpy_weights(head).items()}
    for name, fan_in in {
        "fuse": 192,
        "query": 128,
        "key": 128,
        "value": 128,
        "output": 32,
        "gate": 64,
        "down": 24,
        "head": 64,
    }.items():
        assert weights[name].std() == pytest.approx(fan_in**-0.5, rel=0.1), name
    assert all(
        (weights[name] == 1).all() for name in ("embedding_norm", "hidden_norm", "ffn_norm", "norm")
    )


def test_a_vocabulary_of_its_own_has_logits_of_its_own(target: Decoder) -> None:
    """Row i of the head speaks of token ids[i]."""
    head = with_vocabulary(network(vocab=len(IDS)), IDS)
    taps, embedded = inputs()
    outputs, logits = run(target, head, taps, embedded)
    narrow = np.asarray(head.logits(target, outputs))
    assert narrow.shape == (1, LENGTH, len(IDS))
    np.testing.assert_array_equal(logits, narrow)
    _, law = numpy_eagle_slot(head, taps[0, 0] @ numpy_weights(head)["fuse"], embedded[0, 0], 0, [])
    np.testing.assert_allclose(narrow[0, 0], law, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_logits_are_added_up_in_float32(target: Decoder, scale: float) -> None:
    """Of a head in bfloat16, at largest logits of 32."""
    made = functools.partial(eagle3, vocab=40, logit_scale=scale, norm_output=True)
    head = tiny_network(made, tiny_model(vocab=50, embed=64, dtype="bfloat16"), 3, 10.0)
    head = cast_floats(head, jnp.dtype(jnp.bfloat16))
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 64)), jnp.bfloat16)
    logits = head.logits(target, hidden)
    exact = numpy_weights(head)["head"]
    wanted = np.asarray(hidden, np.float64) @ exact.astype(np.float64) * scale
    assert logits.dtype == jnp.float32
    assert 20 * scale < np.abs(wanted).max() < 40 * scale
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5)


def test_the_map_starts_as_the_first_tokens_and_is_data() -> None:
    made = eagle3(tiny_model(), jax.random.key(0), vocab=4, ffn=40)
    assert isinstance(made.vocabulary, VocabularyMap)
    assert made.vocabulary[...].dtype == jnp.int32
    assert made.vocabulary[...].tolist() == [0, 1, 2, 3]
    assert (made.head.shape, made.first.gate.shape, made.first.down.shape) == (
        (16, 4),
        (1, 16, 40),
        (1, 40, 16),
    )
    assert eagle3(tiny_model(), jax.random.key(0)).vocabulary is None
    mapped = with_vocabulary(network(vocab=len(IDS)), IDS)
    found = jax.jit(lambda head: jax.tree.map(lambda leaf: leaf, head), donate_argnums=0)(mapped)
    assert found.vocabulary[...].tolist() == IDS.tolist()
    shapes = jax.eval_shape(lambda: eagle3(tiny_model(), jax.random.key(0), vocab=6))
    assert jax.tree.structure(shapes) == jax.tree.structure(found)


def test_an_embedding_of_its_own_is_looked_up_and_never_trained(target: Decoder) -> None:
    head = tiny_network(functools.partial(eagle3, own_embedding=True), tiny_model(), 3)
    tokens = np.array([[3, 7]], np.int32)
    for made, owner in ((head, head), (network(), target)):
        np.testing.assert_array_equal(
            made.embed_tokens(target, jnp.asarray(tokens)),
            numpy_weights(owner)["embedding"][tokens],
        )
    assert optimizers.trainable_parameters(head).embedding is None
    assert (
        optimizers.replace_parameters(head, optimizers.trainable_parameters(head)).embedding
        is not None
    )


@pytest.mark.parametrize(
    ("vocab", "ids", "said"),
    [
        (6, [0, 1, 2], r"6 rows.*\(3,\)"),
        (4, [0, 5, 5, 7], "entry 1 is 5, the next one 5"),
        (4, [0, 9, 3, 10], "entry 1 is 9, the next one 3"),
        (4, [0, 1, 2, 11], r"0\.\.11.*0\.\.10"),
        (4, [-1, 1, 2, 3], r"-1\.\.3"),
        (0, [0, 1], "whole vocabulary of 11"),
    ],
)
def test_bad_maps_are_refused(vocab: int, ids: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_vocabulary(network(vocab=vocab), np.array(ids))
