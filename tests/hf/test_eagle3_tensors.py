"""Tensors of published drafts: to the names and back in every bit, and what torch makes of them;
and every trap that published files are known for."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.mtp.files import assemble_mtp_arrays, find_mtp_layers
from jaxspec.hf.draft_tensors import replace_leaves
from jaxspec.hf.eagle3_config import parse_head_config
from jaxspec.hf.eagle3_json import HeadFormat, head_config_json
from jaxspec.hf.eagle3_tensors import head_arrays, normalize_names, reconcile_with_tensors
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import FamilySpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3, with_vocabulary
from jaxspec.models.mtp import Mtp
from tests.conftest import eagle3, tiny_model, tiny_network
from tests.dense import attend, up_to_position
from tests.hf_checkpoints import draft_tensors
from tests.twins import numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

TOKENS, DRAFTED = [3, 7, 1, 9, 4, 2], [5, 8]
IDS = np.array([0, 2, 3, 7, 8, 10])


class Case(NamedTuple):
    name: str
    form: dict[str, Any] = {}  # noqa: RUF012
    sizes: dict[str, Any] = {}  # noqa: RUF012
    vocab: int = 0


QWEN = FamilySpec(query_key_norm=True, attention_bias=True, output_bias=True)
CASES = [
    Case("default"),
    Case(
        "one norm before fuse, residual normed",
        {"norm_before_fuse": True, "norm_before_residual": True, "taps": (0, 2, 3, 4)},
    ),
    Case(
        "EAGLE-3.1 of two layers, small vocabulary",
        {"fuse_norms": True, "norm_output": True, "taps": (2, 4)},
        {"layers": 2},
        6,
    ),
    Case(
        "no taps, scaled",
        {"use_taps": False, "logit_scale": 0.5, "norm_output": True},
        {"rope_theta": 50.0, "norm_eps": 1e-3},
        6,
    ),
    Case(
        "its own width, embedding and Qwen3 layers",
        {"own_embedding": True},
        {
            "embed": 12,
            "heads": 6,
            "kv_heads": 3,
            "head_size": 8,
            "ffn": 20,
            "layers": 3,
            "family": QWEN,
        },
    ),
]


@functools.cache
def target() -> Decoder:
    return tiny_network(Decoder, tiny_model(), 1)


def lent() -> dict[str, np.ndarray]:
    return {name: numpy_weights(target())[name] for name in ("embedding", "head")}


@functools.cache
def network(case: Any) -> Eagle3:
    chosen = CASES[case] if isinstance(case, int) else Case("")
    kind = functools.partial(eagle3, vocab=chosen.vocab, sizes=chosen.sizes, **chosen.form)
    made = tiny_network(kind, tiny_model(), 2, 1.5)
    return with_vocabulary(made, IDS) if chosen.vocab else made


def config_of(made: Eagle3, form: HeadFormat) -> dict[str, Any]:
    return head_config_json(
        made.config,
        made.form,
        target().config,
        form,
        0 if made.vocabulary is None else made.head.shape[-1],
    )


def read(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Eagle3:
    """The way of a folder into a network."""
    sizes, form, vocab = parse_head_config(config, "here", "auto", target().config, str)
    named = normalize_names(tensors, "here")
    sizes, form = reconcile_with_tensors(sizes, form, named, lent()["embedding"], str)
    shapes = jax.eval_shape(lambda: Eagle3(sizes, form, target().config, jax.random.key(0), vocab))
    return replace_leaves(shapes, head_arrays(sizes, form, named, lent(), "here"))


def assert_same_tensors(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_every_form_is_read_back_in_every_bit(number: int) -> None:
    made = network(number)
    raw = draft_tensors(made, "raw")
    first = read(raw, config_of(made, "raw"))
    published = draft_tensors(first, "speculators")
    second = read(published, config_of(first, "speculators"))
    assert (first.form, second.form) == (made.form, made.form)
    for name, array in numpy_weights(made).items():
        np.testing.assert_array_equal(numpy_weights(first)[name], array, err_msg=name)
    assert_same_tensors(draft_tensors(second, "raw"), raw)
    assert {name for name in raw if "midlayer" in name} == {
        name.replace("layers.0.", "midlayer.") for name in published if "layers.0" in name
    }
    prefixed = {f"module._orig_mod.model.{name}": array for name, array in published.items()}
    assert_same_tensors(draft_tensors(read(prefixed, config_of(made, "speculators")), "raw"), raw)


def test_names_and_shapes_are_those_of_published_files() -> None:
    """Names and axes of a raw file, with the sizes of the tiny model: embed 16, 4 query heads and 2
    key/value heads of 4, ffn 24."""
    shapes = {name: array.shape for name, array in draft_tensors(network(0), "raw").items()}
    assert shapes == {
        "fc.weight": (16, 48),
        "midlayer.input_layernorm.weight": (16,), "midlayer.hidden_norm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (16, 32), "midlayer.self_attn.k_proj.weight": (8, 32),
        "midlayer.self_attn.v_proj.weight": (8, 32), "midlayer.self_attn.o_proj.weight": (16, 16),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.mlp.gate_proj.weight": (24, 16),
        "midlayer.mlp.up_proj.weight": (24, 16), "midlayer.mlp.down_proj.weight": (16, 24),
        "norm.weight": (16,), "lm_head.weight": (11, 16),
    }  # fmt: skip
    small = draft_tensors(network(2), "raw")
    assert small["d2t"].tolist() == [0, 1, 1, 4, 4, 5]  # target id - draft id
    assert np.flatnonzero(small["t2d"]).tolist() == IDS.tolist()
    assert (small["d2t"].dtype, small["t2d"].dtype) == (np.int64, bool)


@jax.jit
def said(made: Eagle3, features: jax.Array) -> jax.Array:
    """Logits of our own network at all true slots, then of recurrent steps on `DRAFTED`."""
    positions = jnp.arange(features.shape[1], dtype=jnp.int32)[None]
    tokens = jnp.asarray([TOKENS[1:]], jnp.int32)
    hidden, mask = made.to_hidden(features), up_to_position(positions, features.shape[1])
    caches: dict[int, Any] = {}
    laws = []
    for step in range(1 + len(DRAFTED)):
        for layer in range(made.stack):
            heads = made.attention_inputs(
                layer, hidden, made.embed_tokens(target(), tokens), positions
            )
            old = caches.get(layer)
            keys, values = (
                (heads.key, heads.value)
                if old is None
                else (jnp.concatenate(pair, 1) for pair in zip(old, heads[1:3], strict=True))
            )
            caches[layer] = keys, values
            hidden = made.layer_output(
                layer, heads.residual, attend(heads.query, keys, values, mask)
            )
        laws.append(made.logits(target(), hidden)[0])
        if step < len(DRAFTED):
            hidden, positions = hidden[:, -1:], positions[:, -1:] + 1
            tokens = jnp.asarray([[DRAFTED[step]]], jnp.int32)
            mask = jnp.ones((1, 1, features.shape[1] + step + 1), bool)
    return jnp.concatenate(laws)


@pytest.mark.hf
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=case.name, marks=() if number in (0, 2) else pytest.mark.sweep)
        for number, case in enumerate(CASES)
    ],
)
def test_torch_reads_the_raw_file_and_says_the_same(number: int) -> None:
    pytest.importorskip("torch")
    from tests.models.torch_eagle3 import TorchEagle3

    made = network(number)
    config = config_of(made, "raw")

    def positions(slot: int) -> Any:
        angle = slot * made.config.rope_theta ** (
            -np.arange(0, config["head_dim"], 2) / config["head_dim"]
        )
        return np.cos(angle), np.sin(angle)

    taps = len(made.form.taps) or 3 if made.form.use_taps else 1
    features = np.random.default_rng(3).normal(size=(len(TOKENS) - 1, taps * 16))
    wanted = TorchEagle3(draft_tensors(made, "raw"), config, lent()["embedding"], positions).run(
        features, TOKENS, DRAFTED
    )
    np.testing.assert_allclose(said(made, jnp.asarray(features)[None]), wanted, rtol=0, atol=1e-10)


def test_an_embedding_in_the_file_is_shared_only_if_it_is_the_targets() -> None:
    made, config = network(0), config_of(network(0), "raw")
    same = read({**draft_tensors(made, "raw"), "embed_tokens.weight": lent()["embedding"]}, config)
    assert same.embedding is None
    other = lent()["embedding"].copy()
    other[3, 5] += 1
    own = read({**draft_tensors(made, "raw"), "model.embed_tokens.weight": other}, config)
    assert own.form.own_embedding
    np.testing.assert_array_equal(numpy_weights(own)["embedding"], other)


@pytest.mark.parametrize("number", [0, 2])
def test_a_missing_head_is_the_targets_rows(number: int) -> None:
    """At the mapped ids; `tie_word_embeddings` says nothing about it."""
    made = network(number)
    tensors = draft_tensors(made, "raw")
    tensors.pop("lm_head.weight")
    found = read(tensors, {**config_of(made, "raw"), "tie_word_embeddings": True})
    np.testing.assert_array_equal(
        numpy_weights(found)["head"], lent()["head"][:, IDS] if number else lent()["head"]
    )


def test_the_tensors_decide_about_the_size_of_a_head() -> None:
    """Where config.json has no head_dim, embed / heads may be wrong, as it is for Qwen3-4B and 32B;
    here it is 12 / 6, and heads are of 8."""
    made = network(4)
    told: list[str] = []
    config = config_of(made, "speculators")
    config["transformer_layer_config"].pop("head_dim")
    sizes, form, _ = parse_head_config(config, "here", "auto", target().config, told.append)
    assert sizes.head_size == 2
    settled, _ = reconcile_with_tensors(
        sizes,
        form,
        normalize_names(draft_tensors(made, "raw"), "here"),
        lent()["embedding"],
        told.append,
    )
    assert settled.head_size == 8
    assert "lacks head_dim" in "".join(told)
    assert "head_dim is 8 by the tensors, not 2" in "".join(told)


def test_older_names_of_the_norms_of_taps() -> None:
    made = network(2)
    tensors = draft_tensors(made, "raw")
    for old, new in (("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1")):
        tensors[f"{old}.weight"] = tensors.pop(f"{new}.weight")
    config = config_of(made, "raw")
    config.pop("fc_norm")
    assert_same_tensors(
        draft_tensors(read(tensors, {**config, "use_aux_norm": True}), "raw"),
        draft_tensors(made, "raw"),
    )


def test_files_of_other_drafts_and_damaged_ones_are_refused() -> None:
    made = network(0)
    tensors, config = draft_tensors(made, "raw"), config_of(made, "raw")
    without = {name: array for name, array in tensors.items() if "hidden_norm" not in name}
    for changed, message in (
        (without, "EAGLE-1 or EAGLE-2"),
        ({**tensors, "mask_hidden": np.zeros(3)}, "P-EAGLE"),
        (
            {**tensors, "layers.0.hidden_norm.weight": np.zeros(16)},
            r"layers\.0\.hidden_norm\.weight twice",
        ),
        (
            {**tensors, "layers.1.mlp.up_proj.weight": np.zeros((24, 16))},
            r"layers\.1\.mlp\.up_proj\.weight, which .* no place",
        ),
        (
            {name: array for name, array in tensors.items() if "mlp" not in name},
            r"lacks layers\.0\.mlp\.gate_proj",
        ),
        (
            {**tensors, "fc.weight": np.zeros((16, 32))},
            r"fc\.weight has shape \[16, 32\]; the config asks for \[16, 48\]",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            read(changed, config)
    # the tensors have the last word
    found = read(tensors, {**config, "num_hidden_layers": 1000})
    assert_same_tensors(draft_tensors(found, "raw"), tensors)
    with pytest.raises(ConfigError, match=r"here has a\\n\\x1b, which"):
        read({**tensors, "a\n\x1b": np.zeros(2)}, config)
    assert (
        read({**tensors, "midlayer.self_attn.rotary_emb.inv_freq": np.zeros(2)}, config) is not None
    )


@pytest.mark.parametrize("embedding_first", [True, False])
def test_mtp_layers_come_back_and_copies_must_be_the_policys(embedding_first: bool) -> None:
    """MiMo's names and order, [hidden, embedding], or DeepSeek's, [embedding, hidden], numbered on
    from the policy's layers."""
    family = (
        FamilySpec()
        if embedding_first
        else FamilySpec(model_type="mimo", query_key_norm=False, attention_bias=True)
    )
    kind = functools.partial(Mtp, layers=2, embedding_first=embedding_first)
    made = tiny_network(kind, tiny_model(family=family), 4)
    tensors = draft_tensors(made, "raw", target_layers=36)
    name = (
        "model.layers.37.eh_proj.weight"
        if embedding_first
        else "model.mtp_layers.1.input_proj.weight"
    )
    np.testing.assert_array_equal(tensors[name], numpy_weights(made)["project"][1].T)
    bias = "model.mtp_layers.0.self_attn.q_proj.bias"
    assert (bias in tensors) != embedding_first
    assert find_mtp_layers([*tensors, "model.layers.3.mlp.up_proj.weight"], 36) == (
        2,
        embedding_first,
    )
    assert find_mtp_layers(["model.layers.36.mlp.up_proj.weight"], 36) == (0, True)
    copies = {
        "model.layers.36.embed_tokens.weight": lent()["embedding"],
        "model.layers.37.shared_head.head.weight": lent()["head"].T,
    }
    found = replace_leaves(
        made, assemble_mtp_arrays(made.config, embedding_first, {**tensors, **copies}, lent(), 36)
    )
    for path, array in numpy_weights(made).items():
        np.testing.assert_array_equal(numpy_weights(found)[path], array)
    copies = {name: array + 1 for name, array in copies.items()}
    with pytest.raises(ConfigError, match=r"embed_tokens.weight is not the policy's own"):
        assemble_mtp_arrays(made.config, embedding_first, {**tensors, **copies}, lent(), 36)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, "fuse is not among"),
        ({"fuse": np.zeros((48, 8))}, r"fuse has shape \[48, 16\], and \[48, 8\] was loaded"),
    ],
)
def test_a_network_is_filled_wholly(arrays: dict[str, np.ndarray], said: str) -> None:
    whole = {name: array for name, array in numpy_weights(network(0)).items() if name != "fuse"}
    with pytest.raises(ConfigError, match=said):
        replace_leaves(network(0), {**whole, **arrays})
    with pytest.raises(ConfigError, match="no other, which was loaded"):
        replace_leaves(network(0), {**numpy_weights(network(0)), "other": np.zeros(2)})
