"""AdamW written out in numpy; schedules at their corners; and updates that must not happen."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.inputs.spec import FamilySpec, LoraConfig
from jaxspec.mesh import ROWS, TRAIN_RULES, assign_shardings
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3, with_vocabulary
from jaxspec.models.lora import AdaptedDecoder
from jaxspec.rl import optimizers
from jaxspec.rl.optimizers import DEFAULT_ADAM
from jaxspec.state import NetworkState
from tests.conftest import eagle3, small_mesh, tiny_model, tiny_network, trimmed, value_and_grad
from tests.rl.toy_weights import WEIGHTS, as_jax, gradients
from tests.twins import numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

start = jax.jit(optimizers.init_state, static_argnums=1)
update = jax.jit(optimizers.apply_update, static_argnums=3)


@pytest.mark.parametrize(
    ("decay", "adam"),
    [
        (0.0, DEFAULT_ADAM),
        (0.1, DEFAULT_ADAM),
        (0.1, DEFAULT_ADAM._replace(b1=0.8, b2=0.999, eps=0.01)),
    ],
)
def test_clip_then_adamw(decay: float, adam: optimizers.AdamConstants) -> None:
    """Three updates, of which the global-norm clip changes the first and the last."""
    clip, rate = 1.0, 0.01
    assert (DEFAULT_ADAM.b1, DEFAULT_ADAM.b2, DEFAULT_ADAM.eps) == (0.9, 0.95, 1e-8)
    optimizer = optimizers.adamw(rate, clip, decay, adam)
    learner = start(as_jax(WEIGHTS), optimizer)
    weights = {name: value.copy() for name, value in WEIGHTS.items()}
    first, second = (
        {name: np.zeros_like(value) for name, value in WEIGHTS.items()} for _ in range(2)
    )
    for number, scale in enumerate((5.0, 0.1, 30.0), start=1):
        raw = gradients(scale, number)
        norm = np.sqrt(sum((part**2).sum() for part in raw.values()))
        assert (norm > clip) == (number != 2)
        learner, found = update(learner, as_jax(raw), jnp.asarray(1.0), optimizer)
        assert float(found) == pytest.approx(norm)  # the norm before the clip
        for name in WEIGHTS:
            slope = raw[name] * min(1.0, clip / norm)
            first[name] = adam.b1 * first[name] + (1 - adam.b1) * slope
            second[name] = adam.b2 * second[name] + (1 - adam.b2) * slope**2
            step = (
                first[name]
                / (1 - adam.b1**number)
                / (np.sqrt(second[name] / (1 - adam.b2**number)) + adam.eps)
            )
            weights[name] = weights[name] - rate * (step + decay * weights[name])
            np.testing.assert_allclose(learner.network[name], weights[name], rtol=1e-9)


@pytest.mark.parametrize("make", [optimizers.adamw, optimizers.muon])
def test_weight_decay_leaves_norms_biases_and_embeddings(make: Any) -> None:
    """Without a gradient, decay is all that changes a weight."""
    policy = tiny_network(Decoder, tiny_model(family=FamilySpec(attention_bias=True)))
    weights = optimizers.trainable_parameters(policy)
    nothing = jax.tree.map(jnp.zeros_like, weights)

    def shrunk(adam: optimizers.AdamConstants) -> set[str]:
        learner, _ = update(
            start(policy, made := make(0.1, 1.0, 0.5, adam)), nothing, jnp.ones(()), made
        )
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(weights),
            jax.tree.leaves(optimizers.trainable_parameters(learner.network)),
            strict=True,
        )
        return {
            jax.tree_util.keystr(path).split(".")[-2]
            for (path, old), new in pairs
            if (np.asarray(old) != np.asarray(new)).any()
        }

    matrices = {"query", "key", "value", "output", "gate", "up", "down", "head"}
    assert shrunk(DEFAULT_ADAM._replace(decays_matrices_only=True)) == matrices
    everything = shrunk(DEFAULT_ADAM)
    assert everything >= matrices | {"embedding", "norm", "query_bias"}


@pytest.mark.parametrize("jitted", [True, False])
def test_non_finite_losses_and_gradients_change_only_the_counts(jitted: bool) -> None:
    optimizer = optimizers.adamw(optimizers.warmup_schedule("constant", 0.1, 3, 9), 1.0)

    def apply(learner: NetworkState, slope: Any, loss: Any) -> Any:
        return optimizers.apply_update(learner, slope, loss, optimizer)

    update = jax.jit(apply) if jitted else apply
    learner, _ = update(
        optimizers.init_state(as_jax(WEIGHTS), optimizer),
        as_jax(gradients(1.0)),
        jnp.asarray(1.0),
    )
    before = jax.tree.map(np.asarray, learner)
    assert (int(learner.skipped), int(learner.skipped_in_row)) == (0, 0)
    one_bad = {**gradients(1.0), "b": np.array([0.1, np.nan])}
    infinite = {**gradients(1.0), "a": np.full((2, 2), np.inf)}
    cases = [
        (gradients(1.0), np.nan),
        (gradients(1.0), np.inf),
        (one_bad, 1.0),
        (infinite, 1.0),
        (gradients(1e200), 1.0),
    ]
    for times, (slope, loss) in enumerate(cases, start=1):
        learner, _ = update(learner, as_jax(slope), jnp.asarray(loss))
        assert (int(learner.skipped), int(learner.skipped_in_row)) == (times, times)
        jax.tree.map(np.testing.assert_array_equal, learner.network, before.network)
        jax.tree.map(np.testing.assert_array_equal, learner.optimizer, before.optimizer)
    learner, _ = update(learner, as_jax(gradients(1.0)), jnp.asarray(1.0))
    assert (int(learner.skipped), int(learner.skipped_in_row)) == (len(cases), 0)
    assert (np.asarray(learner.network["a"]) != before.network["a"]).all()


# ---- Muon


def in_layers(weights: Any) -> dict[str, np.ndarray]:
    """The matrices of a decoder's layers, each [layers, inputs, outputs]."""
    sizes = {"query": 1, "key": 1, "value": 1, "output": 2, "gate": 1, "up": 1, "down": 1}
    found = {}
    for name, inputs in sizes.items():
        leaf = np.asarray(getattr(weights.layers, name)[...])
        rows = int(np.prod(leaf.shape[1 : 1 + inputs]))
        found[name] = leaf.reshape(len(leaf), rows, -1)
    return found


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (4, 2)])
def test_muon_orthogonalises_every_matrix_by_itself_and_leaves_the_rest_to_adamw(
    data: int, tensor: int
) -> None:
    """Two updates: whatever the mesh, a matrix changes as one that optax has alone, and all other
    weights as by AdamW."""
    policy, rate = tiny_network(Decoder, tiny_model(heads=4, kv_heads=4)), 0.1
    made = optimizers.muon(rate, 1e9), optimizers.adamw(rate, 1e9)
    slopes = [tiny_network(Decoder, tiny_model(heads=4, kv_heads=4), seed) for seed in (5, 6)]
    mesh = small_mesh(data, tensor)

    def updated(optimizer: optax.GradientTransformation) -> Any:
        state = start(policy, optimizer)
        state = jax.device_put(state, assign_shardings(mesh, state, TRAIN_RULES))
        update = jax.jit(
            lambda state, slope: optimizers.apply_update(state, slope, jnp.ones(()), optimizer)[0]
        )
        for slope in slopes:
            state = update(state, slope)
        return state.network

    by_muon, by_adamw = (updated(optimizer) for optimizer in made)
    alone = optax.contrib.muon(rate, consistent_rms=0.2)

    @jax.jit
    def update_alone(slope: Any, state: Any, weights: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            changes, state = alone.update(slope, state, weights)
        return optax.apply_updates(weights, changes), state

    before, after = in_layers(policy), in_layers(by_muon)
    of_slopes = [in_layers(slope) for slope in slopes]
    for name, matrices in before.items():
        for layer, matrix in enumerate(matrices):
            weights: Any = {"w": jnp.asarray(matrix)}
            state = alone.init(weights)
            for each in of_slopes:
                slope: Any = {"w": jnp.asarray(each[name][layer])}
                weights, state = update_alone(slope, state, weights)
            np.testing.assert_allclose(after[name][layer], weights["w"], rtol=0, atol=1e-9)
    for name in ("embedding", "norm", "head"):
        ours, theirs = (getattr(network, name)[...] for network in (by_muon, by_adamw))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    # singular values of a change are near one another, as those of a gradient are not
    changed = np.linalg.svd(after["gate"][0] - before["gate"][0], compute_uv=False)
    of_slope = np.linalg.svd(of_slopes[0]["gate"][0], compute_uv=False)
    assert changed.max() / changed.min() < of_slope.max() / of_slope.min()


def test_muon_takes_adapters_for_matrices_and_keeps_its_coefficients() -> None:
    policy = AdaptedDecoder(
        tiny_network(Decoder, tiny_model()), LoraConfig(rank=2), jax.random.key(0)
    )
    weights = optimizers.trainable_parameters(policy)
    axes = jax.tree_util.tree_leaves_with_path(
        optimizers.matrix_dimension_numbers(weights),
        is_leaf=lambda node: hasattr(node, "reduction_axis"),
    )
    assert len(axes) == 2 * 7
    optimizer = optimizers.with_state_dtype("bfloat16", optimizers.muon(0.1, 1.0))
    learner = start(policy, optimizer)
    slope = jax.tree.map(jnp.ones_like, weights)
    learner, _ = update(learner, slope, jnp.ones(()), optimizer)
    names = {
        getattr(path[-1], "name", ""): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(learner.optimizer)
    }
    assert names["ns_coeffs"] in ("float32", "float64")
    assert int(learner.skipped) == 0
    a, b = (np.asarray(getattr(learner.network.adapters, f"q_proj_{part}")[...]) for part in "ab")
    assert (a != np.asarray(getattr(policy.adapters, "q_proj_a")[...])).all()  # noqa: B009
    assert (b != 0).all()


@pytest.mark.parametrize("made", [optimizers.adamw, optimizers.muon])
def test_frozen_weights_stay_and_the_others_move_as_without_them(made: Any) -> None:
    """A frozen router has no moments, is not decayed, and is no part of the clipped norm."""
    family = FamilySpec(model_type="qwen3_moe", experts=4, experts_per_token=2)
    weights = optimizers.trainable_parameters(
        tiny_network(Decoder, tiny_model(layers=1, family=family), 1)
    )
    gradients = jax.tree.map(lambda leaf: 0.1 * jnp.cos(leaf), weights)
    quiet = jax.tree.map(lambda leaf: leaf, gradients)
    quiet.layers.router = jax.tree.map(jnp.zeros_like, quiet.layers.router)
    rate = optimizers.warmup_schedule("constant", 0.1, 1, 9)
    plain, frozen = (
        made(rate, 0.5, 0.3),
        optimizers.freeze_weights(("router",), made(rate, 0.5, 0.3)),
    )
    wanted, _ = jax.jit(plain.update)(quiet, plain.init(weights), weights)
    changes, state = jax.jit(frozen.update)(gradients, frozen.init(weights), weights)
    assert optimizers.count_updates(state) == 1
    found = numpy_weights(changes)
    assert not found.pop("layers.router").any()
    for name, change in found.items():
        np.testing.assert_allclose(change, numpy_weights(wanted)[name], rtol=1e-9, atol=1e-15)


def test_muon_decays_matrices_that_have_no_gradient() -> None:
    network = tiny_network(Decoder, tiny_model(layers=1), 1)
    optimizer = optimizers.muon(0.1, 1.0, 0.3)
    weights = optimizers.trainable_parameters(network)
    nothing = jax.tree.map(jnp.zeros_like, weights)
    changes, _ = jax.jit(optimizer.update)(nothing, optimizer.init(weights), weights)
    for name in ("gate", "query", "output"):
        change, weight = (getattr(tree.layers, name)[...] for tree in (changes, network))
        np.testing.assert_allclose(change, -0.1 * 0.3 * weight, rtol=1e-9)


def test_schedules() -> None:
    def at(schedule: optax.Schedule, *counts: int) -> np.ndarray:
        with jax.numpy_dtype_promotion("standard"):  # optax promotes inside
            return np.array([np.asarray(schedule(jnp.int32(count))) for count in counts])

    for kind, later in (
        ("constant", [0.4, 0.4, 0.4, 0.4]),
        ("linear", [0.4, 0.2, 0, 0]),
        ("cosine", [0.4, 0.2, 0, 0]),
    ):
        found = at(optimizers.warmup_schedule(kind, 0.4, 4, 24), 0, 1, 3, 4, 14, 24, 100)
        np.testing.assert_allclose(found, [0.1, 0.2, 0.4, *later], atol=1e-7)
        assert at(optimizers.warmup_schedule(kind, 0.4, 0, 24), 0) == pytest.approx(0.4)
        # with a floor, what was above 0 is above a tenth of the peak
        floor = at(optimizers.warmup_schedule(kind, 0.4, 4, 24, 0.1), 0, 1, 3, 4, 14, 24, 100)
        wanted = [0.04 + 0.9 * rate for rate in later]
        np.testing.assert_allclose(floor[3:], wanted, atol=1e-7)
        np.testing.assert_allclose(floor[:3], [0.1, 0.2, 0.4], atol=1e-7)
    quarter = at(optimizers.warmup_schedule("cosine", 1.0, 0, 8), 2)
    assert quarter == pytest.approx((1 + np.sqrt(0.5)) / 2)
    np.testing.assert_allclose(
        at(optimizers.cosine_schedule(1.0, 200), 0, 10, 105, 200, 500),
        [0.05, 1.0, 0.55, 0.1, 0.1],
        atol=1e-6,
    )
    assert np.isfinite(at(optimizers.cosine_schedule(1.0, 1), 0, 1, 2)).all()


IDS = np.array([1, 4, 5, 10])


def mapped() -> Eagle3:
    return with_vocabulary(tiny_network(functools.partial(eagle3, vocab=4), tiny_model()), IDS)


def size_of(network: Any) -> tuple[jax.Array, jax.Array]:
    """A loss that every weight and the map enter, and half of it."""
    shift = 0 if network.vocabulary is None else network.vocabulary[...].sum().astype(jnp.float64)
    total = sum(
        (
            jnp.sum((leaf - 0.01 * shift) ** 2)
            for leaf in jax.tree.leaves(optimizers.trainable_parameters(network))
        ),
        jnp.zeros(()),
    )
    return total, total / 2


def test_a_network_of_weights_alone_is_its_own_parameters() -> None:
    """Bit for bit the gradient and the update that optax gives for the whole tree."""
    policy, optimizer = tiny_network(Decoder, tiny_model()), optimizers.adamw(0.01, 1.0)
    assert jax.tree.structure(optimizers.trainable_parameters(policy)) == jax.tree.structure(policy)

    def loss_of(network: Decoder) -> jax.Array:
        return sum((jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(network)), jnp.zeros(()))

    def ours(policy: Decoder) -> Decoder:
        loss, slope = value_and_grad(loss_of, policy)
        return optimizers.apply_update(
            optimizers.init_state(policy, optimizer), slope, loss, optimizer
        )[0].network

    def plain(policy: Decoder) -> Any:
        changes, _ = optimizer.update(jax.grad(loss_of)(policy), optimizer.init(policy), policy)  # pyright: ignore[reportArgumentType]
        return optax.apply_updates(policy, changes)  # pyright: ignore[reportArgumentType]

    for function in (ours, plain):
        assert jax.tree.structure(jax.eval_shape(function, policy)) == jax.tree.structure(policy)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ours)(policy), jax.jit(plain)(policy))


def test_a_vocabulary_map_is_neither_differentiated_nor_updated() -> None:
    """Two donated updates on a mesh: every weight moves as without a map, the ids stay, and the
    optimizer has never seen them."""
    optimizer = optimizers.adamw(0.01, 1.0, 0.1)

    def fresh() -> NetworkState:
        return optimizers.init_state(mapped(), optimizer)

    def step(learner: NetworkState) -> tuple[NetworkState, jax.Array]:
        (loss, half), slope = value_and_grad(size_of, learner.network, has_aux=True)
        return optimizers.apply_update(learner, slope, loss, optimizer)[0], loss / half

    learner = fresh()
    # before their buffers are donated
    weights = [
        np.array(leaf) for leaf in jax.tree.leaves(optimizers.trainable_parameters(learner.network))
    ]
    abstract = jax.eval_shape(
        lambda: optimizers.init_state(eagle3(tiny_model(), jax.random.key(0), vocab=4), optimizer)
    )
    assert jax.tree.structure(abstract) == jax.tree.structure(learner)
    assert len(jax.tree.leaves(learner.network)) == 14
    # both moments of every weight, and the count
    assert len(jax.tree.leaves(learner.optimizer)) == 2 * 13 + 1
    layout = assign_shardings(small_mesh(4, 2), abstract, TRAIN_RULES)
    found = {
        str(path[-2]): trimmed(spec.spec)
        for path, spec in jax.tree_util.tree_leaves_with_path(layout.network)
    }
    assert (found[".vocabulary"], found[".head"]) == ((), (ROWS, "tensor"))
    placed = jax.device_put(learner, layout)
    update = jax.jit(step, donate_argnums=0)
    for _ in range(2):
        placed, ratio = update(placed)
        assert float(ratio) == 2  # the auxiliary output is of the same pass
    assert placed.network.vocabulary[...].tolist() == IDS.tolist()
    assert placed.network.vocabulary[...].dtype == jnp.int32
    assert int(placed.skipped) == 0
    state, plainly = optimizer.init(weights), jax.jit(optimizer.update)
    for _ in range(2):
        slope = [2 * (leaf - 0.01 * IDS.sum()) for leaf in weights]
        changes, state = plainly(slope, state, weights)
        weights = [
            leaf + np.asarray(change)
            for leaf, change in zip(weights, jax.tree.leaves(changes), strict=True)
        ]
    for ours, theirs in zip(
        jax.tree.leaves(optimizers.trainable_parameters(placed.network)), weights, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_moments_kept_in_bfloat16_are_those_rounded_and_weights_stay_as_wide() -> None:
    """Two updates beside those of plain AdamW: the first is the same, the second differs by what
    rounding the moments does."""
    plain = optimizers.adamw(0.1, 1.0)
    narrow = optimizers.with_state_dtype("bfloat16", plain)
    learners = [optimizers.init_state(as_jax(WEIGHTS), optimizer) for optimizer in (plain, narrow)]
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(learners[1].optimizer)}
    assert dtypes == {"bfloat16", "int32"}
    for scale in (1.0, 0.3):
        slope, loss = as_jax(gradients(scale)), jnp.asarray(1.0)
        learners = [
            optimizers.apply_update(each, slope, loss, made)[0]
            for each, made in zip(learners, (plain, narrow), strict=True)
        ]
        for name in WEIGHTS:
            exact, rounded = (np.asarray(each.network[name]) for each in learners)
            assert rounded.dtype == exact.dtype
            np.testing.assert_allclose(
                rounded, exact, rtol=0, atol=0 if scale == 1.0 else 0.1 * 2**-7
            )
    assert any(
        np.any(np.asarray(learners[0].network[name]) != np.asarray(learners[1].network[name]))
        for name in WEIGHTS
    )
