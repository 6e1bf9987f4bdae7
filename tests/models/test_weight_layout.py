"""However a network's weights are laid out for generation, its products are those of the network as
it was."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import mesh as meshes
from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    DraftKind,
    RolloutConfig,
)
from jaxspec.inputs.spec import FamilySpec
from jaxspec.kernels import cpu_layouts
from jaxspec.kernels.cpu_layouts import BlockedParam, SplitParam, TransposedParam
from jaxspec.models.decoder import Decoder, Layers
from jaxspec.models.mtp import Mtp
from jaxspec.models.weight_layout import (
    WeightLayout,
    apply_layout,
    fastest_layout,
    pad_vocabulary,
)
from jaxspec.step import Step
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network
from tests.dense import attend, up_to_position
from tests.twins import numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

ROWS, WIDTH, FIRST = 2, 7, 4
EVERY = ("qkv", "output", "gate_up", "down", "head")
LAYOUTS = {
    "fused": WeightLayout(fused=True),
    "fused, unrolled": WeightLayout(fused=True, unrolled=True),
    "fused, unrolled, one transposed": WeightLayout(
        fused=True, unrolled=True, transposed=("down",)
    ),
    "fused, unrolled, transposed": WeightLayout(fused=True, unrolled=True, transposed=EVERY),
    "fused, transposed": WeightLayout(fused=True, transposed=EVERY),
    "fused, unrolled, in blocks": WeightLayout(fused=True, unrolled=True, blocked=EVERY),
    "fused, in blocks, one transposed": WeightLayout(
        fused=True, transposed=("qkv",), blocked=EVERY[1:]
    ),
    "fused, unrolled, in parts": WeightLayout(fused=True, unrolled=True, split=EVERY),
    "fused, in parts, one transposed": WeightLayout(
        fused=True, transposed=("down",), split=("qkv", "output", "gate_up", "head")
    ),
}
LLAMA = FamilySpec(model_type="llama", query_key_norm=False)
BIASES = FamilySpec(model_type="llama", query_key_norm=False, attention_bias=True, output_bias=True)
EXPERTS = FamilySpec(model_type="qwen3_moe", experts=4, experts_per_token=2)
DECODERS = {
    "norms": {},
    "no norms, a query head for each key head": {"family": LLAMA, "kv_heads": 4},
    "biases, one key head": {"family": BIASES, "kv_heads": 1},
    "norms and biases, tied": {"family": FamilySpec(attention_bias=True), "tied": True},
    "experts": {"family": EXPERTS},
}
HEADS = {
    "one layer": eagle3,
    "two layers, a vocabulary and an embedding of its own": functools.partial(
        eagle3,
        vocab=6,
        ffn=10,
        sizes={"layers": 2, "embed": 8},
        own_embedding=True,
        norm_before_residual=True,
    ),
    "norms and biases": functools.partial(
        eagle3, sizes={"family": FamilySpec(attention_bias=True, output_bias=True)}
    ),
}
LAYERS = {
    "two layers": functools.partial(Mtp, layers=2),
    "biases": functools.partial(Mtp, layers=2, embedding_first=False),
    "experts": Mtp,
}
FAMILIES = {"biases": BIASES, "experts": EXPERTS}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and parts, the last block not full; nine rows and more are no longer few, and
    ten are many."""
    monkeypatch.setattr(cpu_layouts, "BLOCK_OUTPUTS", 8)
    monkeypatch.setattr(cpu_layouts, "PART_INPUTS", 4)
    monkeypatch.setattr(cpu_layouts, "BLOCK_LOOP_ROWS", 9)
    monkeypatch.setattr(cpu_layouts, "RIGHT_OPERAND_ROWS", 10)


def inputs() -> tuple[jax.Array, jax.Array]:
    """Tokens and positions."""
    tokens = np.random.default_rng(0).integers(0, 11, (ROWS, WIDTH))
    return jnp.asarray(tokens, jnp.int32), jnp.broadcast_to(
        jnp.arange(WIDTH, dtype=jnp.int32), (ROWS, WIDTH)
    )


def same(run: Callable[[Any], Any], network: Any) -> Iterator[tuple[WeightLayout, Any]]:
    """Runs the network as it was and in every layout, and gives the latter; neither run nor
    layout changes what it was."""
    before, wanted = numpy_weights(network), jax.tree.leaves(jax.jit(run)(network))
    for name, chosen in LAYOUTS.items():
        other = apply_layout(network, chosen)
        found = jax.tree.leaves(jax.jit(run)(other))
        assert len(wanted) == len(found) > 1
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12, err_msg=name)
        yield chosen, other
    after = numpy_weights(network)
    assert before.keys() == after.keys()
    for weight, value in before.items():
        np.testing.assert_array_equal(after[weight], value, err_msg=weight)


RICHEST = "norms and biases, tied"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == RICHEST else pytest.mark.sweep)
        for kind in DECODERS
    ],
)
def test_decoders_give_what_they_gave(kind: str) -> None:
    """In one pass, and in two blocks with a cache, stacked or apart; taps too."""
    policy = tiny_network(Decoder, tiny_model(layers=3, **DECODERS[kind]), 1, 1.5)

    def run(policy: Decoder) -> Any:
        tokens, positions = inputs()
        whole = policy(tokens, positions, taps=(1, 3))
        first = policy(
            tokens[:, :FIRST], positions[:, :FIRST], policy.empty_cache(ROWS, WIDTH), taps=(0, 2)
        )
        second = policy(tokens[:, FIRST:], positions[:, FIRST:], first.cache)
        assert second.cache is not None
        parts = [
            jnp.stack(leaves) if isinstance(leaves, tuple) else leaves
            for leaves in (second.cache.keys, second.cache.values)
        ]
        single = policy(tokens[:1, :1], positions[:1, :1])
        return (
            whole[:2],
            first[:2],
            second.hidden,
            parts,
            [policy.logits(read.hidden) for read in (whole, second, single)],
        )

    for chosen, other in same(run, policy):
        assert isinstance(other.layers, Layers) != chosen.unrolled
        last = other.layers[2] if chosen.unrolled else other.layers
        assert last.query is None
        weights = {part: getattr(last, part, None) for part in EVERY[:4]} | {"head": other.head}
        missing = (
            {"gate_up", "down"} if kind == "experts" else {"head"} if policy.config.tied else set()
        )
        assert {part for part, weight in weights.items() if weight is None} == missing
        turned = {part for part, weight in weights.items() if isinstance(weight, TransposedParam)}
        assert turned == set(chosen.transposed) - missing
        assert {
            part for part, weight in weights.items() if isinstance(weight, BlockedParam)
        } == set(chosen.blocked) - missing
        assert {part for part, weight in weights.items() if isinstance(weight, SplitParam)} == set(
            chosen.split
        ) - missing


def read(network: Any, target: Decoder) -> list[jax.Array]:
    """What all layers of a draft give for a block that attends to itself, and its logits."""
    tokens, positions = inputs()
    random = np.random.default_rng(1)
    wide = (
        network.fuse.shape[0]
        if getattr(network, "fuse", None) is not None
        else network.config.embed
    )
    hidden, given = network.to_hidden(jnp.asarray(random.normal(size=(ROWS, WIDTH, wide)))), []
    for layer in range(network.depth * network.stack):
        heads = network.attention_inputs(
            layer, hidden, network.embed_tokens(target, tokens), positions
        )
        hidden = network.layer_output(
            layer,
            heads.residual,
            attend(heads.query, heads.key, heads.value, up_to_position(positions, WIDTH)),
        )
        given += [*heads, hidden]
    return [*given, network.logits(target, hidden)]


@pytest.mark.parametrize("kind", HEADS)
def test_eagle3_heads_give_what_they_gave(kind: str) -> None:
    target = tiny_network(Decoder, tiny_model(), 1)
    head = tiny_network(HEADS[kind], tiny_model(), 2, 1.5)
    for chosen, other in same(lambda head: read(head, target), head):
        for part in (other.first, *([] if head.layers is None else [other.layers])):
            assert part.qkv is not None
            assert isinstance(part.down, TransposedParam) == ("down" in chosen.transposed)


@pytest.mark.parametrize("kind", LAYERS)
def test_mtp_layers_give_what_they_gave(kind: str) -> None:
    network = tiny_network(
        LAYERS[kind], tiny_model(family=FAMILIES.get(kind, FamilySpec())), 2, 1.5
    )
    target = tiny_network(Decoder, tiny_model(), 1)
    for chosen, other in same(lambda network: read(network, target), network):
        assert other.layers.qkv is not None
        assert isinstance(other.layers.output, TransposedParam) == ("output" in chosen.transposed)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_lent_however_it_lies(tied: bool) -> None:
    target = tiny_network(Decoder, tiny_model(tied=tied), 1)
    network = tiny_network(Mtp, tiny_model(), 2)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH, 16)))
    for _, other in same(
        lambda target: [target.logits(hidden), network.logits(target, hidden)], target
    ):
        assert (other.head is None) == tied


def test_nothing_is_arranged_that_cannot_be_joined() -> None:
    policy = tiny_network(Decoder, tiny_model(), 1)
    assert apply_layout(policy, WeightLayout(unrolled=True, transposed=EVERY)) is policy
    assert apply_layout(None, LAYOUTS["fused"]) is None


@pytest.mark.parametrize(
    ("tensor", "threads", "embed", "tokens", "wanted"),
    [
        (1, 0, 512, (8,), WeightLayout(fused=True, unrolled=True)),
        (2, 0, 512, (8,), WeightLayout(fused=True, unrolled=True)),
        (4, 0, 512, (8,), WeightLayout()),  # two key heads for four devices
        (1, 1, 128, (8,), WeightLayout(fused=True, unrolled=True)),
        (1, 1, 256, (1,), WeightLayout(fused=True, unrolled=True, transposed=("down",))),
        (
            1,
            2,
            512,
            (1,),
            WeightLayout(
                fused=True, unrolled=True, transposed=("down",), split=(*EVERY[:3], "head")
            ),
        ),
        (1, 2, 256, (4, 1), WeightLayout(fused=True, unrolled=True, transposed=("down",))),
        (1, 2, 256, (4, 2), WeightLayout(fused=True, unrolled=True, transposed=EVERY)),
        (1, 1, 256, (2,), WeightLayout(fused=True, unrolled=True, blocked=EVERY)),
        (1, 1, 256, (15, 1), WeightLayout(fused=True, unrolled=True, blocked=EVERY)),
        (1, 1, 256, (16, 4), WeightLayout(fused=True, unrolled=True, transposed=EVERY)),
    ],
)
def test_the_layout_follows_mesh_and_sizes(
    tensor: int, threads: int, embed: int, tokens: tuple[int, ...], wanted: WeightLayout
) -> None:
    assert fastest_layout(tiny_model(embed=embed), tensor, threads, tokens) == wanted


def step_of(rows: int, kind: DraftKind, length: int) -> Step:
    """Rollouts of a width that is laid out."""
    model = tiny_model(embed=256)
    rollout = RolloutConfig(max_new_tokens=4, draft=DraftConfig(kind=kind, draft_length=length))
    config = tiny_config(
        model,
        rollout=rollout,
        batch=BatchConfig(prompts=1, group_size=2),
        data=DataConfig(max_prompt_length=4),
    )
    step = build_step(config, small_mesh(1), (1,), model.vocab)
    return dataclasses.replace(
        step, generator=step.generator.make_variant(prompts=1, group_size=rows)
    )


@pytest.mark.parametrize(
    ("rows", "kind", "length", "threads", "policy", "draft"),
    [
        (
            1,
            "eagle3",
            2,
            2,
            TransposedParam,
            nnx.Param,
        ),  # three tokens at once; of the draft, also one
        (1, "eagle3", 1, 2, TransposedParam, TransposedParam),  # two tokens, and no single ones
        (1, "none", 2, 2, nnx.Param, None),
        (3, "eagle3", 2, 2, TransposedParam, TransposedParam),
        (3, "eagle3", 2, 1, BlockedParam, BlockedParam),  # nine tokens, and three
        (
            5,
            "model",
            3,
            1,
            TransposedParam,
            BlockedParam,
        ),  # twenty tokens; of the draft, ten and five
    ],
)
def test_policy_and_draft_are_arranged_for_their_own_passes(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    kind: DraftKind,
    length: int,
    threads: int,
    policy: type,
    draft: type | None,
) -> None:
    monkeypatch.setenv("NPROC", str(threads))
    step = step_of(rows, kind, length)
    ready = jax.eval_shape(step.sync, jax.eval_shape(step.init_random_state))
    target, drafter = ready.target, ready.drafter
    assert type(target.layers[0].qkv) is policy
    if draft is None:
        assert drafter.network is None
    else:
        layer = drafter.network.first if kind == "eagle3" else drafter.network.layers[0]
        assert type(layer.qkv) is draft
        assert type(layer.down) is (TransposedParam if draft is nnx.Param else draft)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_make_a_vocabulary_split_are_not_seen(tied: bool) -> None:
    model = dataclasses.replace(tiny_model(vocab=11), tied=tied)
    policy = tiny_network(Decoder, model, 1)
    even = pad_vocabulary(policy, meshes.make_mesh(1, 4))
    assert even.embedding.shape == (12, model.embed)
    assert tied or even.head.shape == (model.embed, 12)
    tokens = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    positions = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), tokens.shape)
    ours, theirs = (network.logits(network(tokens, positions).hidden) for network in (even, policy))
    np.testing.assert_array_equal(ours, theirs)
    assert pad_vocabulary(policy, meshes.make_mesh(8)).embedding.shape == (11, model.embed)


@pytest.mark.parametrize(("tensor", "transposed"), [(1, EVERY), (2, ())])
def test_weights_are_turned_where_a_device_has_a_shard_alone(
    monkeypatch: pytest.MonkeyPatch, tensor: int, transposed: tuple
) -> None:
    monkeypatch.setenv("NPROC", "2")
    generator = dataclasses.replace(
        step_of(3, "eagle3", 2).generator, mesh=meshes.make_mesh(1, tensor)
    )
    assert [how.transposed for how in generator.weight_layouts] == [transposed, transposed]
    assert all(how.unrolled for how in generator.weight_layouts)
