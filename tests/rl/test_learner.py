"""The learner: what a device holds and sends, and gradients that no packing or mesh changes."""

import dataclasses
import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    EngineConfig,
    LoraConfig,
    MeshConfig,
    ResolvedConfig,
    RolloutConfig,
)
from jaxspec.drafts.model.settings import DraftModelConfig
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.host.programs import abstract_arguments
from jaxspec.kernels import chunks
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import cast_floats
from jaxspec.models.lora import AdaptedDecoder, merge_lora
from jaxspec.models.mtp import Mtp
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import DraftObjective, compute_draft_loss
from jaxspec.rl.losses import negative_log_likelihood
from jaxspec.rl.objective import PolicyObjective
from jaxspec.rl.train_batch import TrainBatch, build_text_batch, rows_to_pack
from jaxspec.state import LearnerState, NetworkState
from jaxspec.step import Step
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network

pytestmark = pytest.mark.usefixtures("x64")

PROMPTS, GROUP, WIDTH, NEW = 104, 2, 7, 6
ROWS, SIZE = PROMPTS * GROUP, WIDTH + NEW
MODEL = tiny_model(vocab=40, heads=8, kv_heads=4, embed=32, ffn=72)


def config_of(
    model: Any = MODEL, draft: DraftConfig | None = None, tokens: int = 0, **parts: Any
) -> ResolvedConfig:
    drafted = draft or DraftConfig(draft_length=2)
    return tiny_config(
        model,
        rollout=RolloutConfig(
            max_new_tokens=NEW, verify="coupled", draft=drafted, engine=EngineConfig(tail=False)
        ),
        batch=BatchConfig(prompts=PROMPTS, group_size=GROUP, micro_tokens=tokens),
        data=DataConfig(max_prompt_length=WIDTH),
        mesh=MeshConfig(shard_above=0),
        draft_training=DraftTrainingConfig(ttt_steps=2),
        **parts,
    )


# ---- the compiled program


@functools.cache
def compiled(data: int, tensor: int, tokens: int = 100) -> Any:
    step = build_step(config_of(tokens=tokens), small_mesh(data, tensor), (1,), MODEL.vocab)
    state, finished, _ = abstract_arguments(step, PROMPTS)
    return jax.jit(step.learn).lower(state, finished).compile()


MESHES = [
    pytest.param(8, 1, marks=pytest.mark.slow),
    *(pytest.param(*shape, marks=pytest.mark.sweep) for shape in [(4, 2), (2, 4)]),
]


@pytest.mark.parametrize(("data", "tensor"), MESHES)
def test_no_array_of_the_learner_has_all_rows(data: int, tensor: int) -> None:
    text = compiled(data, tensor).as_text()
    sizes = {ROWS, ROWS * SIZE, ROWS * (SIZE - 1)}
    shapes = {
        shape
        for shape in re.findall(r"\w\d+\[([\d,]+)\]", text)
        if sizes & {int(size) for size in shape.split(",")}
    }
    assert not shapes, f"arrays of all {ROWS} rows: {sorted(shapes)}"


def collectives(text: str, tensor: int) -> Counter[str]:
    """Collectives over `data`, by kind and shape, without those between `tensor` peers alone."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        said = re.search(
            r"= (\(?[^=]*?\)?)"
            r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(",
            line,
        )
        peers = tensor > 1 and re.search(r"replica_groups=(\[\d+,\d+\]<=\[8\],|mesh\[)", line)
        if said and not peers:
            found[f"{said[2]} {re.sub(r'{[^}]*}', '', said[1])}"] += 1
    return found


@pytest.mark.parametrize(("data", "tensor"), MESHES)
def test_a_layer_is_gathered_once_a_pass_and_its_gradient_scattered_once(
    data: int, tensor: int
) -> None:
    """Weights [in, out] are split along their inputs over `data`; loops over layers and
    micro-batches have one body each.

    Two all-gathers a layer's weight (forward and backward), one for what stands outside the layers
    or in the draft, a reduce-scatter for each gradient. Beside them there are sums of numbers, and
    the rows that change shards; all counted in the text of the program, where a loop's body stands
    once.
    """
    found = collectives(compiled(data, tensor).as_text(), tensor)
    kinds: Counter[str] = Counter()
    for name, count in found.items():
        kinds[name.split()[0]] += count
    # query, key, value, output, gate, up, down; embedding and head; a layer's, `fuse` and the head
    layer, outside, draft = 7, 2, 9
    assert kinds["all-gather"] == 2 * layer + outside + draft, found
    assert kinds["reduce-scatter"] == layer + outside + draft, found
    numbers = [
        name for name in found if name.startswith("all-reduce") and re.search(r"\[\d+,", name)
    ]
    assert not numbers, f"sums of more than numbers: {numbers}"
    assert kinds["all-to-all"] == 0
    assert kinds["collective-permute"] <= 5, (
        "tokens, logprobs, mask, advantages and version go round once"
    )


@pytest.mark.parametrize(("data", "tensor"), MESHES[1:])
def test_between_tensor_peers_activations_are_summed_and_never_gathered(
    data: int, tensor: int
) -> None:
    """What peers gather is a number a position and peer, for the likeliest of tokens that are split
    between them."""
    tokens, gathers = 100, []
    for line in compiled(data, tensor).as_text().splitlines():
        found = re.search(
            r"= \w\d+\[([\d,]+)\]\S* (all-gather|all-to-all|collective-permute)(-start)?\(", line
        )
        if found and re.search(r"replica_groups=(\[\d+,\d+\]<=\[8\],|mesh\[)", line):
            gathers.append(math.prod(int(size) for size in found[1].split(",")))
    assert gathers, "the draft's comparison has some"
    assert max(gathers) <= tokens * tensor, gathers


@pytest.mark.slow
def test_temporaries_follow_the_positions_of_a_micro_batch() -> None:
    """Twice the positions take about twice the memory, and what does not follow them (a layer,
    gradients) comes on top; the number of micro-batches is no part of the program."""
    sizes = [
        compiled(8, 1, tokens).memory_analysis().temp_size_in_bytes for tokens in (256, 512, 1024)
    ]
    assert (sizes[2] - sizes[1]) == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.1)


# ---- gradients


KINDS = {
    "eagle3": (DraftConfig(draft_length=2), eagle3),
    "mtp": (
        DraftConfig(kind="mtp", draft_length=2, mtp=MtpConfig(layers=2)),
        functools.partial(Mtp, layers=2),
    ),
    "model": (DraftConfig(kind="model", draft_length=2, model=DraftModelConfig(layers=2)), Decoder),
}


def step_of(
    kind: str, tokens: int, data: int = 1, tensor: int = 1, dtype: Any = "float64", **parts: Any
) -> Step:
    """Plain gradient descent at rate 1: what weights lose is the gradient."""
    model = dataclasses.replace(MODEL, remat=tokens % 2 == 0, dtype=dtype)
    config = config_of(model, KINDS[kind][0], tokens, **parts)
    step = build_step(config, small_mesh(data, tensor), (1,), MODEL.vocab)
    descent = dict.fromkeys(("policy_optimizer", "draft_optimizer"), optax.sgd(lambda _: 1.0))
    return dataclasses.replace(
        step,
        learner=step.learner.for_supervised_texts(
            PolicyObjective(negative_log_likelihood), **descent
        ),
    )


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Rows of different lengths, some tokens of which are to be learnt; one row has none."""
    random = np.random.default_rng(4)
    tokens = random.integers(2, MODEL.vocab, (16, SIZE)).astype(np.int32)
    chosen = (random.random(tokens.shape) < 0.6) & (
        np.arange(SIZE) < random.integers(4, SIZE + 1, 16)[:, None]
    )
    chosen[3] = False
    return tokens, chosen


def networks(kind: str) -> tuple[Decoder, Any]:
    drafted, build = KINDS[kind]
    model = dataclasses.replace(MODEL, layers=drafted.model.layers) if kind == "model" else MODEL
    return tiny_network(Decoder, MODEL, 1), tiny_network(build, model, 2)


def learnt(
    step: Step, kind: str, rows: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[Any, dict[str, float]]:
    """The gradients of policy and draft, and the metrics; of other rows than `texts`, where they
    are given."""
    learner = step.learner
    masters = "float64" if learner.dtype == "float64" else "float32"
    policy, draft = cast_floats(networks(kind), masters)
    state = learner.init_state(policy, draft, online=True)
    state = jax.device_put(state, learner.train_layout(state))
    batch = build_text_batch(*(rows or texts()), step.learner.mesh, learner.micro_tokens)
    after, metrics = jax.jit(learner.learn)(state, batch)
    assert isinstance(after.draft, NetworkState)
    before = jax.tree.map(np.asarray, (policy, draft))
    now = jax.tree.map(np.asarray, (after.policy.network, after.draft.network))
    return jax.tree.map(np.subtract, before, now), metrics_to_host(metrics)


@functools.cache
def plain(kind: str) -> tuple[Any, float, float]:
    """The same gradients and losses on padded rows, with nothing packed, gathered or
    accumulated."""
    policy, draft = networks(kind)
    step, rows = step_of(kind, 64), rows_to_pack(*map(jnp.asarray, texts()))
    objective = step.learner.draft_objective
    assert isinstance(objective, DraftObjective)

    def policy_loss(policy: Decoder) -> jax.Array:
        logprobs = jax.nn.log_softmax(policy.logits(policy(rows.tokens, rows.positions).hidden))
        picked = jnp.take_along_axis(logprobs, rows.labels[:, :, None], axis=2)[:, :, 0]
        return -jnp.sum(jnp.where(rows.loss_mask, picked, 0)) / jnp.sum(
            rows.loss_mask, dtype=picked.dtype
        )

    def loss_of_draft(draft: Any) -> jax.Array:
        forward = policy(rows.tokens, rows.positions, taps=step.generator.taps)
        return compute_draft_loss(draft, policy, forward, rows, objective).loss

    first, second = (jax.jit(jax.value_and_grad(loss)) for loss in (policy_loss, loss_of_draft))
    (of_policy, policy_slope), (of_draft, draft_slope) = first(policy), second(draft)
    return jax.tree.map(np.asarray, (policy_slope, draft_slope)), float(of_policy), float(of_draft)


def assert_close(found: Any, wanted: Any, bound: float) -> None:
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound),
        found,
        wanted,
    )
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted)) > 1e-3


@pytest.mark.parametrize(
    ("kind", "tokens", "data", "tensor"),
    [
        # some texts a pack, the last one not full; layers are not run again in the backward pass
        ("eagle3", 47, 1, 1),
        pytest.param("mtp", 30, 2, 1, marks=pytest.mark.slow),
        *(
            pytest.param(*shape, marks=pytest.mark.sweep)
            for shape in (
                ("eagle3", 12, 1, 1),  # a row a pack: a micro-batch for each, or nearly
                ("model", 30, 2, 2),
                ("eagle3", 200, 1, 1),
                ("mtp", 12, 1, 1),
                ("eagle3", 30, 4, 2),
                ("eagle3", 47, 2, 4),
                ("mtp", 30, 8, 1),
            )
        ),
    ],
)
def test_packing_accumulation_and_mesh_leave_the_gradients_of_plain_rows(
    kind: str, tokens: int, data: int, tensor: int
) -> None:
    found, metrics = learnt(step_of(kind, tokens, data, tensor), kind)
    slopes, of_policy, of_draft = plain(kind)
    assert_close(found, slopes, 1e-12)
    assert metrics["loss/policy"] == pytest.approx(of_policy, abs=1e-12)
    assert metrics["loss/draft"] == pytest.approx(of_draft, abs=1e-12)
    assert metrics["learner/micro_batches"] >= (3 if data == 1 and tokens < 100 else 1)


@pytest.mark.slow
def test_adapters_have_the_gradient_of_their_merged_weights() -> None:
    """Beside a base in the model's type and without moments, which stays as it is."""
    step = step_of("eagle3", 30, 2, lora=LoraConfig(rank=2, alpha=3.0))
    policy, draft = networks("eagle3")
    adapted = step.add_adapters(policy)
    assert isinstance(adapted, AdaptedDecoder)
    random = np.random.default_rng(5)
    adapted.adapters = jax.tree.map(
        lambda leaf: jnp.asarray(0.1 * random.normal(size=leaf.shape)), adapted.adapters
    )
    state = step.learner.init_state(adapted, draft, online=True)
    state: LearnerState = jax.device_put(state, step.learner.train_layout(state))
    after, _ = jax.jit(step.learner.learn)(
        state, build_text_batch(*texts(), step.learner.mesh, step.learner.micro_tokens)
    )
    found = jax.tree.map(
        lambda old, new: np.asarray(old) - np.asarray(new),
        adapted.adapters,
        after.policy.network.adapters,
    )
    rows = rows_to_pack(*map(jnp.asarray, texts()))

    @jax.jit
    @jax.grad
    def slope(weights: Any) -> jax.Array:
        network = merge_lora(optimizers.replace_parameters(adapted, weights))
        logprobs = jax.nn.log_softmax(network.logits(network(rows.tokens, rows.positions).hidden))
        picked = jnp.take_along_axis(logprobs, rows.labels[:, :, None], axis=2)[:, :, 0]
        return -jnp.sum(jnp.where(rows.loss_mask, picked, 0)) / jnp.sum(
            rows.loss_mask, dtype=picked.dtype
        )

    assert_close(found, slope(optimizers.trainable_parameters(adapted)).adapters, 1e-12)
    jax.tree.map(np.testing.assert_array_equal, after.policy.network.base, adapted.base)


@pytest.mark.slow
def test_comparing_is_the_learners_own_measure_and_changes_nothing() -> None:
    step = step_of("eagle3", 30, 2)
    policy, draft = networks("eagle3")
    batch: TrainBatch = build_text_batch(*texts(), step.learner.mesh, step.learner.micro_tokens)
    sums, counts = jax.jit(step.learner.compare_draft)(policy, draft, batch)
    _, metrics = learnt(step, "eagle3")
    wanted = [metrics["draft/expected_acceptance_1"], metrics["draft/expected_acceptance_2"]]
    np.testing.assert_allclose(sums.acceptance / counts, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masters_and_gradients_are_float32_whatever_the_products_are(dtype: str) -> None:
    model = dataclasses.replace(MODEL, dtype=dtype)
    step = build_step(config_of(model, tokens=64), small_mesh(2), (1,), MODEL.vocab)
    state, finished, _ = abstract_arguments(step, PROMPTS)
    after, _ = jax.eval_shape(step.learn, state, finished)
    floats = {
        leaf.dtype.name
        for leaf in jax.tree.leaves(after.learner)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert floats == {"float32"}
    passes = step.learner.passes
    gradients, _, _ = jax.eval_shape(
        passes.compute_gradients,
        state.learner.policy.network,
        state.learner.draft.network,
        state.learner.online,
        jax.eval_shape(lambda rows: passes.place_rows(step.build_batch(rows)), finished),
        jax.ShapeDtypeStruct((), np.int32),
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("eagle3", marks=pytest.mark.slow),
        pytest.param("model", marks=pytest.mark.sweep),
    ],
)
def test_chunks_of_positions_are_added_up_in_float32(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In bfloat16, a position a chunk: 128 times the same text give the gradient of one, which sums
    in bfloat16 miss by far.

    128 is a power of 2, so that each part of the sum is exactly as many times smaller.
    """
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 1)
    text, chosen = np.arange(2, SIZE + 2, dtype=np.int32)[None], np.arange(SIZE)[None] >= 3
    one, many = (
        learnt(
            step_of(kind, 128 * SIZE, dtype="bfloat16"),
            kind,
            (np.repeat(text, copies, 0), np.repeat(chosen, copies, 0)),
        )[0]
        for copies in (1, 128)
    )
    for found, wanted in (
        (many[0].head[...], one[0].head[...]),
        (many[1].head[...], one[1].head[...]),
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
