"""The training-time-test unroll against inference run slot by slot, for each kind of network."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.kinds import get_learned
from jaxspec.drafts.unroll import UNROLL
from jaxspec.kernels import chunks
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.models.eagle3 import Eagle3, with_vocabulary
from jaxspec.models.layers import cast_floats
from jaxspec.models.mtp import Mtp
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import LOSSES, DraftLoss, DraftObjective, compute_draft_loss
from jaxspec.rl.train_batch import rows_to_pack
from tests.conftest import eagle3, tiny_model, tiny_network, with_weights
from tests.twins import (
    numpy_decoder,
    numpy_eagle_slot,
    numpy_mtp_slot,
    numpy_softmax,
    numpy_taps,
    numpy_weights,
)

pytestmark = pytest.mark.usefixtures("x64")

ROWS, LENGTH = 3, 9
TOKENS = np.random.default_rng(0).integers(0, 11, (ROWS, LENGTH)).astype(np.int32)
MASK = np.array([[0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1], [0] * 9], bool)
"""A response in the middle, one up to the last token, and a row that was not valid."""
IDS = np.array([0, 2, 3, 5, 7, 8, 10])
"""A draft vocabulary."""

TEXTS = rows_to_pack(jnp.asarray(TOKENS), jnp.asarray(MASK))
compiled = jax.jit(compute_draft_loss, static_argnums=4)


def networks(
    kv_heads: int = 2, tied: bool = False, vocab: int = 0, layers: int = 1
) -> tuple[Eagle3, Decoder]:
    model = tiny_model(kv_heads=kv_heads, tied=tied)
    network = tiny_network(
        functools.partial(eagle3, vocab=vocab, sizes={"layers": layers}, own_embedding=layers > 1),
        model,
        2,
        1.5,
    )
    return with_vocabulary(network, IDS[:vocab]) if vocab else network, tiny_network(
        Decoder, model, 1, 1.5
    )


@jax.jit
def forward_of(target: Decoder) -> DecoderOutput:
    return target(TEXTS.tokens, TEXTS.positions, taps=(1, 2, 3))


def objective(
    loss: str = "ce", steps: int = 3, decay: float = 0.8, temperature: float = 1.0
) -> DraftObjective:
    return DraftObjective(LOSSES[loss], steps, decay, temperature, UNROLL)


def loss_of(
    network: Any, target: Decoder, forward: DecoderOutput, chosen: DraftObjective
) -> DraftLoss:
    return compiled(network, target, forward, TEXTS, chosen)


def slot(network: Any, target: Decoder, layer: int, *inputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """The next hidden state, and logits over the draft's vocabulary."""
    if isinstance(network, Eagle3):
        return numpy_eagle_slot(network, *inputs)
    weights = numpy_weights(target)
    hidden = numpy_mtp_slot(network, layer, *inputs)
    return hidden, hidden @ (weights["embedding"].T if target.config.tied else weights["head"])


def drafted_logits(
    network: Any, target: Decoder, row: int, steps: int
) -> tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]:
    """Target logits [T V], and what a draft that knows the tokens up to t+1 says at each depth on
    true tokens: (t, depth) -> logits.

    Each layer has a list of keys and values. Its true slots are those that earlier drafts reached
    with the tokens that turned out true.
    """
    embedding = numpy_weights(network).get("embedding", numpy_weights(target)["embedding"])
    logits, final, stream = numpy_decoder(target, TOKENS[row])
    features = (
        numpy_taps(stream) @ numpy_weights(network)["fuse"]
        if isinstance(network, Eagle3)
        else final
    )
    layers = network.depth
    true: list[list[Any]] = [[] for _ in range(layers)]  # by layer and entry
    waiting: dict[tuple[int, int], Any] = {}  # (layer, entry) -> what becomes true later
    said = {}
    for t in range(LENGTH - 2):
        for layer in range(1, layers):
            if t >= layer:  # token t+1 has made true what entry t-layer guessed at slot t
                true[layer].append(waiting.pop((layer, t - layer)))
        caches = [list(part) for part in true]
        hidden = features[t]
        for depth in range(steps):
            if t + 1 + depth >= LENGTH:
                break
            layer = depth % layers
            token = TOKENS[row, t + 1 + depth]
            hidden, said[t, depth] = slot(
                network, target, layer, hidden, embedding[token], t + depth, caches[layer]
            )
            if depth == 0:
                true[0].append(caches[0][-1])
            elif depth < layers:
                waiting[layer, t] = caches[layer][-1]
    return logits, said


def run_as_inference_does(
    network: Any, target: Decoder, steps: int, temperature: float, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean cross-entropy and mean overlap by depth, over the predicted tokens in the mask; where
    the draft cannot say the likeliest, the cross-entropy counts as 0."""
    losses: list[list[float]] = [[] for _ in range(steps)]
    overlaps: list[list[float]] = [[] for _ in range(steps)]
    for row in range(ROWS):
        logits, said = drafted_logits(network, target, row, max(steps, network.depth))
        laws = numpy_softmax(logits / temperature)
        for (t, depth), draft_logits in said.items():
            predicted = t + 2 + depth
            if depth >= steps or predicted >= LENGTH or not MASK[row, predicted]:
                continue
            law, drafted = laws[predicted - 1], numpy_softmax(draft_logits / temperature)
            overlaps[depth].append(np.minimum(law[ids], drafted).sum())
            cross_entropy = -(law[ids] / law[ids].sum() * np.log(drafted)).sum()
            losses[depth].append(cross_entropy if law.argmax() in ids else 0.0)
    return np.array([np.mean(part) for part in losses]), np.array(
        [np.mean(part) for part in overlaps]
    )


def assert_as_inference(
    network: Any,
    target: Decoder,
    temperature: float,
    decay: float,
    depths: tuple[int, ...],
    ids: np.ndarray,
) -> None:
    losses, overlaps = run_as_inference_does(network, target, max(depths), temperature, ids)
    for steps in depths:
        weights = decay ** np.arange(steps)
        found = loss_of(
            network, target, forward_of(target), objective("ce", steps, decay, temperature)
        )
        assert float(found.loss) == pytest.approx(
            (weights * losses[:steps]).sum() / weights.sum(), abs=1e-11
        )
        np.testing.assert_allclose(found.acceptance, overlaps[:steps], rtol=0, atol=1e-11)
    assert ((overlaps > 0.05) & (overlaps < 0.95)).all()


@pytest.mark.parametrize(
    ("kv_heads", "tied", "temperature", "decay", "vocab", "layers"),
    [
        pytest.param(4, False, 1.0, 0.8, 0, 1, marks=pytest.mark.sweep),
        (1, True, 0.7, 1.0, 0, 1),
        (2, False, 1.3, 0.5, 7, 2),
    ],
)
def test_eagle3_unroll_equals_inference(
    kv_heads: int, tied: bool, temperature: float, decay: float, vocab: int, layers: int
) -> None:
    """Also of two layers, each with true slots and own ones, over an embedding of its own."""
    network, target = networks(kv_heads, tied, vocab, layers)
    assert_as_inference(
        network,
        target,
        temperature,
        decay,
        (4,) if vocab else (1, 3),
        IDS if vocab else np.arange(11),
    )


@pytest.mark.parametrize(
    ("layers", "embedding_first", "tied", "depths"),
    [
        (1, False, True, (3,)),
        (2, True, False, (3,)),
        pytest.param(3, False, False, (5,), marks=pytest.mark.sweep),
    ],
)
def test_mtp_unroll_equals_inference(
    layers: int, embedding_first: bool, tied: bool, depths: tuple[int, ...]
) -> None:
    """With more layers than one, each has true slots of its own, one later than the layer
    before."""
    kind = functools.partial(Mtp, layers=layers, embedding_first=embedding_first)
    target = tiny_network(Decoder, tiny_model(tied=tied), 1, 1.5)
    assert_as_inference(
        tiny_network(kind, tiny_model(), 2, 1.5), target, 0.9, 0.7, depths, np.arange(11)
    )


def test_an_external_model_is_compared_at_each_position() -> None:
    """Its own forward pass, unshifted: position t predicts token t+1; steps and decay change
    nothing."""
    target = tiny_network(Decoder, tiny_model(), 1, 1.5)
    small = tiny_network(Decoder, tiny_model(embed=8, heads=2, kv_heads=1, tied=True), 2, 1.5)
    divergences, overlaps = [], []
    for row in range(ROWS):
        law, drafted = (
            numpy_softmax(numpy_decoder(model, TOKENS[row])[0] / 0.8) for model in (target, small)
        )
        for t in range(LENGTH - 1):
            if MASK[row, t + 1]:
                divergences.append((law[t] * np.log(law[t] / drafted[t])).sum())
                overlaps.append(np.minimum(law[t], drafted[t]).sum())
    run = jax.jit(compute_draft_loss, static_argnums=4)
    for chosen in (objective("kl", 1, 1.0, 0.8), objective("kl", 3, 0.5, 0.8)):
        chosen = chosen._replace(unroll=get_learned("model").unroll)
        found = run(small, target, forward_of(target), TEXTS, chosen)
        assert float(found.loss) == pytest.approx(np.mean(divergences), abs=1e-11)
        np.testing.assert_allclose(found.acceptance, [np.mean(overlaps)], rtol=0, atol=1e-11)


def test_the_target_gets_no_gradient_and_every_weight_of_the_draft_does() -> None:
    network, target = networks(vocab=7)
    forward = forward_of(target)

    def value(weights: Any, target: Decoder, forward: DecoderOutput) -> jax.Array:
        return loss_of(
            optimizers.replace_parameters(network, weights), target, forward, objective()
        ).loss

    slopes = jax.jit(jax.grad(value, (0, 1, 2)))(
        optimizers.trainable_parameters(network), target, forward
    )
    for name, slope in numpy_weights(slopes[0]).items():
        assert slope.any(), name
    assert not any(slope.any() for slope in numpy_weights(slopes[1]).values())
    assert not np.asarray(slopes[2].hidden).any()
    assert not np.asarray(slopes[2].taps).any()


@pytest.mark.parametrize("layers", [0, pytest.param(2, marks=pytest.mark.sweep)])
def test_gradient_matches_finite_differences(layers: int) -> None:
    """Through all depths: the recurrence is not cut. Layers 0: EAGLE-3."""
    network, target = networks()
    if layers:
        network = tiny_network(functools.partial(Mtp, layers=layers), tiny_model(), 2, 1.5)
    forward = forward_of(target)
    both = jax.jit(
        jax.value_and_grad(lambda network: loss_of(network, target, forward, objective()).loss)
    )
    slope = both(network)[1]
    random = np.random.default_rng(3)
    for _ in range(3):
        direction = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape)), network)
        up, down = (
            both(
                jax.tree.map(
                    lambda leaf, move, sign=sign: leaf + sign * 1e-5 * move, network, direction
                )
            )[0]
            for sign in (1, -1)
        )
        along = sum(jax.tree.leaves(jax.tree.map(lambda s, d: jnp.sum(s * d), slope, direction)))
        assert float(up - down) / 2e-5 == pytest.approx(float(along), rel=1e-5)


@pytest.mark.parametrize(("positions_per_chunk", "vocab"), [(1, 0), (4, 7)])
def test_chunks_change_nothing(
    monkeypatch: pytest.MonkeyPatch, positions_per_chunk: int, vocab: int
) -> None:
    network, target = networks(vocab=vocab)
    forward = forward_of(target)

    def run() -> tuple[Any, Any, int]:
        def value(head: jax.Array) -> tuple[jax.Array, DraftLoss]:
            chosen = objective(steps=2)
            found = compute_draft_loss(
                with_weights(network, head=head), target, forward, TEXTS, chosen
            )
            return found.loss, found

        both = jax.jit(jax.value_and_grad(value, has_aux=True))
        return *both(network.head[...]), str(jax.make_jaxpr(value)(network.head[...])).count(
            "scan["
        )

    wanted, slope, loops = run()
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", ROWS * 11 * 3 * positions_per_chunk)
    found, found_slope, chunk_loops = run()
    assert chunk_loops - loops == 1  # for all depths together
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found_slope, slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        "eagle3",
        pytest.param("eagle3 of two layers", marks=pytest.mark.slow),
        pytest.param("mtp", marks=pytest.mark.slow),
    ],
)
def test_depths_run_only_where_a_label_is_learnt_change_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    network, target = networks(layers=1 + kind.endswith("layers"))
    if kind == "mtp":
        network = tiny_network(functools.partial(Mtp, layers=2), target.config, 3, 1.5)
    forward = forward_of(target)

    def slopes() -> tuple[Any, int]:
        def value(network: Any) -> jax.Array:
            return compute_draft_loss(network, target, forward, TEXTS, objective(steps=4)).loss

        loops = str(jax.make_jaxpr(value)(network)).count("while[")
        return jax.jit(jax.value_and_grad(value))(network), loops

    whole, loops = slopes()
    monkeypatch.setattr(chunks, "WIDE_ELEMENTS", 1)
    monkeypatch.setattr(chunks, "CHUNK_POSITIONS_CPU", 2)
    found, more_loops = slopes()
    assert more_loops > loops
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_draft_that_equals_the_target_is_accepted_for_certain() -> None:
    """Both heads zero: uniform laws, overlap 1, cross-entropy log V; an empty mask gives 0 and no
    NaN."""
    network, target = networks()
    network, target = (with_weights(flat, head=np.zeros((16, 11))) for flat in (network, target))
    forward = forward_of(target)
    found = loss_of(network, target, forward, objective())
    np.testing.assert_allclose(found.acceptance, 1, atol=1e-12)
    assert float(found.loss) == pytest.approx(np.log(11))
    nothing = compiled(
        network,
        target,
        forward,
        TEXTS._replace(loss_mask=jnp.zeros(TOKENS.shape, bool)),
        objective(),
    )
    assert float(nothing.loss) == 0
    np.testing.assert_array_equal(nothing.acceptance, 0)


def test_a_draft_vocabulary_caps_the_acceptance_at_its_coverage() -> None:
    """Uniform laws over 11 and 7 tokens: 7/11 is covered and all of it accepted; greedy rollouts
    train at temperature 1."""
    network, target = networks(vocab=7)
    network = with_weights(network, head=np.zeros((16, 7)))
    target = with_weights(target, head=np.zeros((16, 11)))
    found = loss_of(network, target, forward_of(target), objective("lk", 1, 0.8, 0.0))
    np.testing.assert_allclose(found.acceptance, 7 / 11, atol=1e-12)
    assert float(found.loss) == pytest.approx(-np.log(7 / 11))


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_at_least_float32(name: str) -> None:
    """Networks in bfloat16, as a run casts them; nothing is promoted on the way without saying
    so."""
    model = tiny_model(dtype="bfloat16")

    def value() -> DraftLoss:
        kinds = functools.partial(eagle3, vocab=7), Decoder
        network, target = (
            cast_floats(kind(model, jax.random.key(0)), jnp.bfloat16) for kind in kinds
        )
        return compute_draft_loss(network, target, forward_of(target), TEXTS, objective(name))

    found = jax.eval_shape(value)
    assert (found.loss.dtype, found.acceptance.dtype, found.acceptance.shape) == (
        jnp.float32,
        jnp.float32,
        (3,),
    )
