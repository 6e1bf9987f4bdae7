"""Native MTP layers against loops in plain numpy, and against the mistakes that
others made."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.inputs.spec import FamilySpec
from jaxspec.mesh import ROWS, TRAIN_RULES, assign_shardings
from jaxspec.models.decoder import Decoder
from jaxspec.models.mtp import Mtp
from tests.conftest import small_mesh, tiny_model, tiny_network, trimmed
from tests.dense import attend, up_to_position
from tests.twins import numpy_mtp_slot, numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

LENGTH = 6


MIMO = FamilySpec(model_type="mimo", query_key_norm=False, attention_bias=True)


def network(
    layers: int = 1,
    embedding_first: bool = True,
    kv_heads: int = 2,
    family: FamilySpec | None = None,
) -> Mtp:
    kind = functools.partial(Mtp, layers=layers, embedding_first=embedding_first)
    return tiny_network(kind, tiny_model(kv_heads=kv_heads, family=family or FamilySpec()), 3, 1.5)


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(1, LENGTH, 16)), random.normal(size=(1, LENGTH, 16))


def run(mtp: Mtp, layer: int, hidden: jax.Array, embedded: np.ndarray, first: int = 0) -> jax.Array:
    """Post-norm outputs of a block that attends causally to itself."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None] + first
    heads = mtp.attention_inputs(layer, hidden, jnp.asarray(embedded), positions)
    mask = up_to_position(positions - first, LENGTH)
    return mtp.layer_output(
        layer, heads.residual, attend(heads.query, heads.key, heads.value, mask)
    )


@pytest.mark.parametrize(
    ("layers", "embedding_first", "kv_heads", "family"),
    [(1, True, 2, None), (1, False, 1, MIMO), (2, True, 4, None), (2, False, 2, None)],
)
def test_matches_plain_numpy(
    layers: int, embedding_first: bool, kv_heads: int, family: FamilySpec | None
) -> None:
    """The second layer reads what the first gives: the post-norm output. MiMo's layers have biases,
    and no norms of queries and keys."""
    mtp = network(layers, embedding_first, kv_heads, family)
    assert (mtp.layers.query_norm is None, mtp.layers.query_bias is None) == (
        family == MIMO,
        family != MIMO,
    )
    features, embedded = inputs()
    hidden, wanted = mtp.to_hidden(jnp.asarray(features)), features[0]
    for layer in range(layers):
        hidden = run(mtp, layer, hidden, embedded)
        seen = []
        wanted = np.array(
            [numpy_mtp_slot(mtp, layer, wanted[t], embedded[0, t], t, seen) for t in range(LENGTH)]
        )
        np.testing.assert_allclose(hidden[0], wanted, rtol=0, atol=1e-12)
    assert mtp.depth == layers


def test_the_order_of_the_two_halves_matters() -> None:
    """MiMo-7B reverses DeepSeek's; reading the wrong one looks like a draft that never learnt."""
    features, embedded = inputs()
    first, second = (
        run(network(1, order), 0, jnp.asarray(features), embedded) for order in (True, False)
    )
    assert float(jnp.abs(first - second).max()) > 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_targets(tied: bool) -> None:
    target = tiny_network(Decoder, tiny_model(tied=tied), 1)
    hidden = jnp.asarray(inputs()[0])
    weights = numpy_weights(target)
    head = weights["embedding"].T if tied else weights["head"]
    logits = network().logits(target, hidden)
    np.testing.assert_allclose(logits[0], np.asarray(hidden[0]) @ head, rtol=0, atol=1e-12)
    assert network().vocabulary is None


def test_only_differences_of_positions_matter() -> None:
    features, embedded = inputs()
    near, far = (run(network(), 0, jnp.asarray(features), embedded, first) for first in (0, 40))
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-11)


def test_every_matrix_is_sharded_and_every_norm_whole() -> None:
    """Train layout of the stacked weights, by attribute name."""
    mtp = network(2, kv_heads=4)
    layout = assign_shardings(small_mesh(4, 2), mtp, TRAIN_RULES)
    found = {
        name: trimmed(operator.attrgetter(name)(layout).get_raw_value().spec)
        for name in numpy_weights(mtp)
    }
    projection = (None, ROWS, "tensor")
    assert found == {
        "project": (None, None, ROWS),
        **dict.fromkeys(("embedding_norm", "hidden_norm", "norm"), ()),
        **{f"layers.{name}": projection for name in ("query", "key", "value", "gate", "up")},
        "layers.output": (None, "tensor", None, ROWS), "layers.down": (None, "tensor", ROWS),
        **dict.fromkeys(("layers.attention_norm", "layers.ffn_norm"), ()),
        **dict.fromkeys(("layers.query_norm", "layers.key_norm"), ()),
    }  # fmt: skip


def test_fresh_weights_are_finite_and_of_unit_gain() -> None:
    """What the two branches add to the stream is scaled down by the root of two, as in a decoder of
    one layer."""
    mtp = Mtp(tiny_model(embed=64, heads=8, ffn=32), jax.random.key(0), layers=3)
    weights = {name.removeprefix("layers."): value for name, value in numpy_weights(mtp).items()}
    gains = {
        "project": 128**-0.5,
        "query": 64**-0.5,
        "key": 64**-0.5,
        "value": 64**-0.5,
        "output": 64**-0.5,
        "gate": 64**-0.5,
        "down": 64**-0.5,
    }
    for name, gain in gains.items():
        assert weights[name].std() == pytest.approx(gain, rel=0.1), name
    assert (mtp.layers.gate.shape, mtp.layers.down.shape) == ((3, 64, 32), (3, 32, 64))
    assert all((weights[name] == 1).all() for name in weights if "norm" in name)
