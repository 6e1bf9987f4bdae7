"""Native MTP layers against torch, which reads the tensors of the published files; and a MiMo
checkpoint from its folder."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.from_checkpoint import read_draft, resolve_config
from jaxspec.config.settings import DraftConfig, ResolvedConfig, RolloutConfig
from jaxspec.drafts.kinds import build_network
from jaxspec.inputs.spec import FamilySpec, ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.mtp import Mtp
from tests.conftest import small_mesh, tiny_model, tiny_network
from tests.dense import attend, up_to_position
from tests.hf_checkpoints import draft_tensors, edit_config, load, logits, make, tokens_of, whole
from tests.twins import numpy_weights

pytest.importorskip("transformers")
pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("x64")]

TOKENS, DRAFTED = [3, 7, 1, 9, 4, 2], [5, 8]
MIMO = FamilySpec(model_type="mimo", query_key_norm=False, attention_bias=True)


@jax.jit
def said(mtp: Mtp, target: Decoder, features: jax.Array) -> jax.Array:
    """Logits of our first layer at all true slots, then of recurrent steps on `DRAFTED`."""
    hidden, true = mtp.to_hidden(features), features.shape[1]
    positions = jnp.arange(true, dtype=jnp.int32)[None]
    tokens = jnp.asarray([TOKENS[1:]], jnp.int32)
    mask = up_to_position(positions, true)
    keys = values = jnp.zeros((1, 0, mtp.config.kv_heads, mtp.config.head_size), features.dtype)
    laws = []
    for step in range(1 + len(DRAFTED)):
        heads = mtp.attention_inputs(0, hidden, mtp.embed_tokens(target, tokens), positions)
        keys = jnp.concatenate([keys, heads.key], axis=1)
        values = jnp.concatenate([values, heads.value], axis=1)
        hidden = mtp.layer_output(0, heads.residual, attend(heads.query, keys, values, mask))
        laws.append(mtp.logits(target, hidden)[0])
        if step < len(DRAFTED):
            hidden = hidden[:, -1:]
            positions = positions[:, -1:] + 1
            tokens = jnp.asarray([[DRAFTED[step]]], jnp.int32)
            mask = jnp.ones((1, 1, true + step + 1), bool)
    return jnp.concatenate(laws)


def torch_says(mtp: Mtp, tensors: Any, prefix: str, target: Decoder, features: np.ndarray) -> Any:
    from tests.models.torch_mtp import DEEPSEEK, MIMO, TorchMtp

    config, weights = mtp.config, numpy_weights(target)
    names = MIMO if "mtp_layers" in prefix else DEEPSEEK
    layer = TorchMtp(
        tensors, prefix, names, (config.heads, config.kv_heads), config.norm_eps, config.rope_theta
    )
    return layer.run(features[0], TOKENS, DRAFTED, weights["embedding"], weights["head"].T).numpy()


@pytest.mark.parametrize("mimo", [True, False], ids=["MiMo", "DeepSeek"])
def test_torch_reads_the_published_names_and_says_the_same(mimo: bool) -> None:
    """Over all true slots and two recurrent steps, which feed the post-norm output back."""
    model = tiny_model(family=MIMO if mimo else FamilySpec())
    target = tiny_network(Decoder, model, 1)
    mtp = tiny_network(functools.partial(Mtp, embedding_first=not mimo), model, 4, 1.5)
    features = np.random.default_rng(3).normal(size=(1, len(TOKENS) - 1, 16))
    prefix = "model.mtp_layers.0." if mimo else "model.layers.36."
    wanted = torch_says(mtp, draft_tensors(mtp, "raw", 36), prefix, target, features)
    np.testing.assert_allclose(said(mtp, target, jnp.asarray(features)), wanted, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_mimo_folder_gives_the_policy_and_its_own_draft(tmp_path: Path) -> None:
    """Qwen2 by another name, whose file has the tensors of one prediction layer beside those of the
    policy."""
    from safetensors.numpy import load_file, save_file

    model = make("qwen2", tmp_path).double()
    random, file = np.random.default_rng(5), tmp_path / "model.safetensors"
    stored = load_file(file)
    width = stored["model.norm.weight"].shape[0]
    shapes = {
        name.split("layers.0.")[1]: tensor.shape
        for name, tensor in stored.items()
        if "layers.0." in name
    }
    shapes |= {
        f"{name}.weight": (width,)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    shapes["input_proj.weight"] = (width, 2 * width)
    added = {
        f"model.mtp_layers.0.{name}": (
            random.normal(size=shape) / shape[-1] ** 0.5 + ("norm" in name)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file({**stored, **added}, file)
    edit_config(
        tmp_path, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1
    )
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mimo"

    config = ResolvedConfig(
        model=ModelSpec(path=str(tmp_path), dtype="float64", remat=False),
        rollout=RolloutConfig(draft=DraftConfig(kind="mtp")),
    )
    config = resolve_config(config, print)
    draft = config.rollout.draft
    assert (config.model.family, draft.path, draft.mtp.layers, draft.mtp.embedding_first) == (
        MIMO,
        str(tmp_path),
        1,
        False,
    )
    policy, tokens = load(tmp_path, dtype="float64"), tokens_of()
    # transformers' norms and rotations are in float32, and `logits` too.
    np.testing.assert_allclose(
        whole(policy, jnp.asarray(tokens)), logits(model, tokens), rtol=0, atol=2e-5
    )

    placed = jax.sharding.NamedSharding(small_mesh(), jax.sharding.PartitionSpec())
    abstract = jax.eval_shape(lambda: build_network(config.draft_spec, jax.random.key(0)))
    mtp = read_draft(
        config,
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), abstract
        ),
    )
    features = random.normal(size=(1, len(TOKENS) - 1, width))
    wide = {name: tensor.astype(np.float64) for name, tensor in added.items()}
    wanted = torch_says(mtp, wide, "model.mtp_layers.0.", policy, features)
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(said(mtp, policy, jnp.asarray(features)), wanted, rtol=0, atol=1e-10)
