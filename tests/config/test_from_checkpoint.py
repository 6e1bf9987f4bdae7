"""What checkpoints say of a config: the policy's sizes and tokenizer, the draft's form; and drafts
read back into networks."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.config.from_checkpoint import read_draft, resolve_config
from jaxspec.config.settings import DataConfig, DraftConfig, ResolvedConfig, RolloutConfig
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.kinds import build_network
from jaxspec.hf.eagle3_json import head_config_json
from jaxspec.hf.names import policy_mappings
from jaxspec.hf.pretrained import stream_tensors
from jaxspec.hf.tensor_files import WEIGHTS_FILE
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import HeadSpec, ModelSpec, RopeSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3, with_vocabulary
from jaxspec.models.mtp import Mtp
from tests.conftest import eagle3, save_policy, small_mesh, tiny_model, tiny_network
from tests.hf_checkpoints import draft_tensors

MODEL = tiny_model(dtype="float32", rope=RopeSpec(context=64))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return save_policy(tmp_path / "policy", MODEL)


def save_head(folder: Path, network: Eagle3, form: Any = "raw", **more: np.ndarray) -> Path:
    folder.mkdir()
    save_file({**draft_tensors(network, form), **more}, folder / WEIGHTS_FILE)
    vocab = 0 if network.vocabulary is None else network.head.shape[-1]
    (folder / "config.json").write_text(
        json.dumps(head_config_json(network.config, network.form, MODEL, form, vocab))
    )
    return folder


def config_for(
    policy: Path, draft: Path | str = "", kind: Any = "eagle3", **model: Any
) -> ResolvedConfig:
    rollout = RolloutConfig(draft=DraftConfig(kind=kind, path=str(draft)))
    return ResolvedConfig(model=ModelSpec(path=str(policy), **model), rollout=rollout)


def read_back(config: ResolvedConfig) -> Any:
    shapes = jax.eval_shape(lambda: build_network(config.draft_spec, jax.random.key(0)))
    whole = jax.sharding.NamedSharding(small_mesh(2, 2), jax.sharding.PartitionSpec())
    return read_draft(
        config,
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes
        ),
    )


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_checkpoint_settles_the_config(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and tokenizer are the folder's; type and remat stay. A relative path is kept as an
    absolute one, for resuming elsewhere."""
    monkeypatch.chdir(policy.parent)
    plain = RolloutConfig(draft=DraftConfig(kind="none"))
    found = resolve_config(
        ResolvedConfig(
            model=ModelSpec(path=policy.name, vocab=99, dtype="bfloat16", remat=False),
            rollout=plain,
        ),
        print,
    )
    assert (found.model.path, found.data.tokenizer) == (str(policy), str(policy))
    assert (found.model.vocab, found.model.layers, found.model.dtype, found.model.remat) == (
        11,
        4,
        "bfloat16",
        False,
    )
    assert resolve_config(found, print) == found
    assert (
        resolve_config(
            ResolvedConfig(model=ModelSpec(path=policy.name), data=DataConfig(tokenizer="other")),
            print,
        ).data.tokenizer
        == "other"
    )
    plain = ResolvedConfig(rollout=RolloutConfig(draft=DraftConfig(eagle3=Eagle3Config(vocab=0))))
    assert resolve_config(plain, print) == plain


def test_data_may_lie_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other paths are kept as they are given."""
    monkeypatch.setenv("HOME", "/home/somebody")
    found = resolve_config(
        ResolvedConfig(data=DataConfig(path="~/a.jsonl", eval_path="b.jsonl", tokenizer="~/t")),
        print,
    ).data
    assert (found.path, found.eval_path, found.tokenizer) == (
        "/home/somebody/a.jsonl",
        "b.jsonl",
        "/home/somebody/t",
    )
    with pytest.raises(
        ConfigError, match=r"^data\.eval_path is '~nobody7/a', and no home directory of ~nobody7"
    ):
        resolve_config(ResolvedConfig(data=DataConfig(eval_path="~nobody7/a")), print)


@pytest.mark.parametrize("form", ["raw", "speculators"])
def test_a_head_brings_its_form_and_its_weights(policy: Path, tmp_path: Path, form: Any) -> None:
    flags: dict[str, Any] = {
        "norm_before_residual": True,
        "fuse_norms": True,
        "norm_output": True,
        "taps": (0, 2, 4),
    }
    made = tiny_network(
        lambda config, key: eagle3(config, key, vocab=6, sizes={"heads": 8, "ffn": 20}, **flags),
        MODEL,
        2,
    )
    made = with_vocabulary(made, np.array([0, 2, 3, 7, 8, 10]))
    told: list[str] = []
    config = resolve_config(
        config_for(policy, save_head(tmp_path / "draft", made, form)), told.append
    )
    assert config.head == HeadSpec(**flags)
    assert config.draft_model is not None
    assert (config.draft_model.heads, config.draft_model.ffn, config.draft_spec.vocab) == (
        8,
        20,
        6,
    )
    assert any("after 0, 2, 4" in line for line in told)
    assert_same(read_back(config), made)


def test_rows_longer_than_a_head_was_trained_on_are_told(policy: Path, tmp_path: Path) -> None:
    """Published heads may have seen 2048 positions only, and the answers are longer."""
    folder = save_head(
        tmp_path / "draft",
        tiny_network(
            lambda config, key: eagle3(config, key, sizes={"rope": RopeSpec(context=20)}),
            MODEL,
            2,
        ),
    )
    told: list[str] = []
    config = resolve_config(config_for(policy, folder), told.append)
    assert config.draft_model is not None
    assert config.draft_model.rope.context == 20
    assert any("trained on 20 positions, rows take up to 36" in line for line in told)


def test_a_shared_embedding_is_not_copied(policy: Path, tmp_path: Path) -> None:
    """A table in the draft's file is its own only where it differs from the policy's."""
    made = tiny_network(eagle3, MODEL, 2)
    table = np.asarray(tiny_network(Decoder, MODEL).embedding[...])
    same = resolve_config(
        config_for(policy, save_head(tmp_path / "same", made, **{"embed_tokens.weight": table})),
        print,
    )
    other = resolve_config(
        config_for(
            policy, save_head(tmp_path / "other", made, **{"embed_tokens.weight": table + 1})
        ),
        print,
    )
    assert (same.head.own_embedding, other.head.own_embedding) == (False, True)
    assert read_back(same).embedding is None
    np.testing.assert_array_equal(read_back(other).embedding[...], table + 1)


def test_a_head_without_rows_of_its_own_takes_the_policys(policy: Path, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "draft", tiny_network(eagle3, MODEL, 2))
    tensors = draft_tensors(tiny_network(eagle3, MODEL, 2), "raw")
    tensors.pop("lm_head.weight")
    save_file(tensors, folder / WEIGHTS_FILE)
    found = read_back(resolve_config(config_for(policy, folder), print))
    np.testing.assert_array_equal(found.head[...], tiny_network(Decoder, MODEL).head[...])
    alone = dataclasses.replace(resolve_config(config_for(policy, folder), print), model=MODEL)
    with pytest.raises(ConfigError, match="borrows the policy's embedding or head"):
        read_back(alone)


def test_taps_that_are_named_are_used(policy: Path, tmp_path: Path) -> None:
    """What the probe advises when a head reads one layer too early."""
    folder = save_head(
        tmp_path / "draft",
        tiny_network(lambda config, key: eagle3(config, key, taps=(0, 2, 3)), MODEL, 2),
    )
    config = config_for(policy, folder)
    assert resolve_config(config, print).head.taps == (0, 2, 3)
    assert resolve_config(
        dataclasses.replace(config, head=HeadSpec(taps=(1, 3, 4))), print
    ).head.taps == (1, 3, 4)


@pytest.mark.parametrize("embedding_first", [True, False])
def test_native_layers_of_the_policy_are_used_by_themselves(
    policy: Path, embedding_first: bool
) -> None:
    """MTP layers in the policy's own files, by MiMo's or DeepSeek's names; they are left alone by
    other drafts."""
    sizes = dataclasses.replace(MODEL, ffn=20)
    made = tiny_network(lambda config, key: Mtp(config, key, 2, embedding_first), sizes, 3)
    tensors = {
        name: build()
        for name, _, build in stream_tensors(
            policy_mappings(MODEL), tiny_network(Decoder, MODEL), np.float32
        )
    }
    save_file({**tensors, **draft_tensors(made, "raw", 4)}, policy / WEIGHTS_FILE)
    config = resolve_config(config_for(policy, kind="mtp"), print)
    draft = config.rollout.draft
    assert (draft.path, draft.mtp.layers, draft.mtp.embedding_first, draft.mtp.ffn) == (
        str(policy),
        2,
        embedding_first,
        20,
    )
    assert_same(read_back(config), made)
    assert resolve_config(config_for(policy, kind="none"), print).rollout.draft.path == ""


def test_a_small_model_is_read_as_policies_are(policy: Path) -> None:
    config = resolve_config(config_for(policy, policy, kind="model"), print)
    assert config.draft_model is not None
    assert config.draft_model.layers == 4
    assert_same(read_back(config), tiny_network(Decoder, MODEL))


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "model"])
def test_a_draft_with_a_number_that_is_not_finite_is_refused_by_its_tensor(
    policy: Path, tmp_path: Path, kind: Any
) -> None:
    folder = tmp_path / "draft"
    if kind == "eagle3":
        save_head(folder, tiny_network(eagle3, MODEL, 2))
    else:
        save_policy(folder, MODEL)
    layers = (
        draft_tensors(
            tiny_network(lambda config, key: Mtp(config, key, 1, True), MODEL, 3), "raw", 4
        )
        if kind == "mtp"
        else {}
    )
    tensors = {**load_file(folder / WEIGHTS_FILE), **layers}
    save_file(tensors, folder / WEIGHTS_FILE)
    read_back(resolve_config(config_for(policy, folder, kind=kind), print))
    name = next(name for name in reversed(tensors) if name.endswith("up_proj.weight"))
    tensors[name][-1, -1] = np.nan
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(
        ConfigError,
        match=(
            rf"{folder}/model\.safetensors: the tensor {re.escape(name)} has values that are not"
            r" finite"
        ),
    ):
        read_back(resolve_config(config_for(policy, folder, kind=kind), print))


FP8 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm_head.weight": np.float32(1)}, r"lm_head\.weight has shape \[\]"),
        (
            {"lm_head.weight": np.ones((0, 16), np.float32)},
            r"lm_head\.weight has shape \[0, 16\].*none of them of size 0",
        ),
        (
            {"midlayer.self_attn.q_proj.weight": np.float32(1)},
            r"midlayer\.self_attn\.q_proj\.weight has shape",
        ),
        ({"d2t": np.int64(0)}, r"d2t has shape \[\]"),
        ({"d2t": np.zeros(11, np.float32)}, "d2t is of type F32; it must be one of I64"),
        ({"t2d": np.zeros((1, 11), bool)}, r"t2d has shape \[1, 11\]"),
        (
            {"norm.weight": np.ones(16, np.int32)},
            r"norm\.weight is of type I32; it must be one of F64",
        ),
        ({"norm.weight": np.ones(16, bool)}, r"norm\.weight is of type BOOL"),
        ({"norm.weight": np.ones(16, FP8)}, r"norm\.weight is of type F8_E4M3; .* not quantized"),
    ],
)
def test_tensors_of_a_draft_are_checked_before_they_are_read(
    policy: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = save_head(
        tmp_path / "draft",
        tiny_network(eagle3, MODEL, 2),
        **{name: np.asarray(value) for name, value in changes.items()},
    )
    with pytest.raises(ConfigError, match=rf"^{folder}/model\.safetensors: the tensor {words}"):
        resolve_config(config_for(policy, folder), print)


def test_an_mtp_layer_without_axes_is_refused(policy: Path) -> None:
    made = draft_tensors(
        tiny_network(lambda config, key: Mtp(config, key, 1, True), MODEL, 3), "raw", 4
    )
    gate = np.asarray(np.float32(1))
    save_file(
        {**load_file(policy / WEIGHTS_FILE), **made, "model.layers.4.mlp.gate_proj.weight": gate},
        policy / WEIGHTS_FILE,
    )
    with pytest.raises(
        ConfigError, match=r"model\.layers\.4\.mlp\.gate_proj\.weight has shape \[\]"
    ):
        resolve_config(config_for(policy, kind="mtp"), print)


def test_a_policy_without_the_tensor_that_a_draft_borrows_is_named(
    policy: Path, tmp_path: Path
) -> None:
    table = np.asarray(tiny_network(Decoder, MODEL).embedding[...])
    folder = save_head(
        tmp_path / "draft", tiny_network(eagle3, MODEL, 2), **{"embed_tokens.weight": table}
    )
    tensors = load_file(policy / WEIGHTS_FILE)
    tensors.pop("model.embed_tokens.weight")
    save_file(tensors, policy / WEIGHTS_FILE)
    with pytest.raises(
        ConfigError,
        match=r"lacks the tensor model\.embed_tokens\.weight, which the draft borrows; download",
    ):
        resolve_config(config_for(policy, folder), print)


def test_a_drafts_positions_follow_the_policys_stretching(policy: Path, tmp_path: Path) -> None:
    """With its own base of the frequencies."""
    made = tiny_network(
        lambda config, key: eagle3(config, key, sizes={"rope_theta": 77.0}), MODEL, 2
    )
    folder = save_head(tmp_path / "draft", made)
    plain = resolve_config(config_for(policy, folder), print)
    stretched = resolve_config(config_for(policy, folder, rope_factor=4.0), print)
    assert plain.draft_model is not None
    assert stretched.draft_model is not None
    assert (plain.draft_model.rope_factor, plain.draft_model.rope_theta) == (1, 77)
    own = stretched.draft_model
    assert (own.rope_factor, own.rope.kind, own.rope.context, own.rope_theta) == (4, "yarn", 64, 77)
    assert stretched.model.max_positions == 256


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ngram", "is for drafts of kind eagle3, mtp and model"),
        ("none", "rollout.draft.kind is none"),
        ("mtp", "has no MTP layers"),
    ],
)
def test_a_path_of_another_kind_is_refused(
    policy: Path, tmp_path: Path, kind: str, words: str
) -> None:
    folder = save_head(tmp_path / "draft", tiny_network(eagle3, MODEL, 2))
    with pytest.raises(ConfigError, match=words):
        resolve_config(config_for(policy, folder, kind=kind), print)
    with pytest.raises(ConfigError, match=r"rollout\.draft\.path nowhere: no such folder"):
        resolve_config(config_for(policy, "nowhere"), print)
