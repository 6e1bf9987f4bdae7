"""LoRA adapters in PEFT's form: what is exported merges to the same bits, what cannot be followed
is refused by name, and PEFT itself computes the same numbers, in both directions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.config.settings import LoraConfig
from jaxspec.hf.peft import adapter_config_json, adapter_tensors, merge_adapters
from jaxspec.inputs.checked import ConfigError
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import TARGETS, merge_lora
from tests.conftest import tiny_network
from tests.models.adapters import MODEL, TOKENS, adapted, logits, same_bits
from tests.twins import numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

WEIGHTS = [target.weight for target in TARGETS.values()]


def test_exported_adapters_merge_to_the_same_bits() -> None:
    """Into the base that they were trained beside; a layer that PEFT left out stays as it is."""
    network, base = adapted(), tiny_network(Decoder, MODEL, 1)
    tensors = adapter_tensors(network)
    config = adapter_config_json(LoraConfig(rank=3, alpha=4.0), MODEL, "base")
    assert tensors["base_model.model.model.layers.3.self_attn.k_proj.lora_B.weight"].shape == (
        12,
        3,
    )
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (3, 20)
    assert same_bits(
        merge_adapters(base, tensors, json.loads(json.dumps(config))), merge_lora(network)
    )
    assert same_bits(base, tiny_network(Decoder, MODEL, 1)), (
        "the network that is given stays as it is"
    )
    some = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
    partly = numpy_weights(merge_adapters(base, some, {**config, "layers_to_transform": [2]}))
    for name in WEIGHTS:
        before, whole = (
            numpy_weights(tree)[f"layers.{name}"] for tree in (base, merge_lora(network))
        )
        np.testing.assert_array_equal(
            partly[f"layers.{name}"],
            np.where((np.arange(4) == 2).reshape(-1, *[1] * (whole.ndim - 1)), whole, before),
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora is True, which cannot be merged"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save is \["lm_head"\]'),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights is 'pissa_niter_4'.*alters the checkpoint's own weights",
        ),
        ({"something_new": {"a": 1}}, "something_new is"),
        ({"r": 8}, r"r is 8 for model.layers.0.self_attn.q_proj, whose lora_A has rank 3"),
        (
            {"rank_pattern": {"layers.2.mlp.up_proj": 5}},
            r"r is 5 for model.layers.2.mlp.up_proj, whose lora_A has rank 3",
        ),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            r"target_modules has 'embed_tokens'; choose from q_proj",
        ),
    ],
)
def test_configs_that_cannot_be_followed_are_refused_by_key(
    changes: dict[str, Any], words: str
) -> None:
    network = adapted()
    config = adapter_config_json(LoraConfig(rank=3, alpha=4.0), MODEL, "base") | changes
    with pytest.raises(ConfigError, match=words):
        merge_adapters(tiny_network(Decoder, MODEL, 1), adapter_tensors(network), config)


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (
            "base_model.model.lm_head.lora_A.weight",
            (3, 16),
            "tensor base_model.model.lm_head.lora_A.weight: not a LoRA matrix",
        ),
        (Q.replace("q_proj", "router"), (3, 16), r"q_proj|router.*choose from q_proj"),
        (Q.replace("self_attn", "mlp"), (3, 16), "q_proj is in self_attn, not in mlp"),
        (Q.replace("layers.1.", "layers.4."), (3, 16), "layers.4.*the model has 4 layers"),
        (Q, (3, 18), rf"{Q} has shape \[3, 18\], and the model needs \[r, 16\]"),
        (
            Q,
            (2, 16),
            r"layers.1.self_attn.q_proj: lora_A and lora_B must both be there, of one rank.*'A': 2",
        ),
        (Q.replace("lora_A", "lora_magnitude_vector"), (36,), "not a LoRA matrix"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    name: str, shape: tuple[int, ...], words: str
) -> None:
    tensors = adapter_tensors(adapted()) | {name: np.zeros(shape)}
    with pytest.raises(ConfigError, match=words):
        merge_adapters(
            tiny_network(Decoder, MODEL, 1),
            tensors,
            adapter_config_json(LoraConfig(rank=3, alpha=4.0), MODEL, "base"),
        )


def test_missing_matrices_are_named() -> None:
    tensors = adapter_tensors(adapted())
    config = adapter_config_json(LoraConfig(rank=3, alpha=4.0), MODEL, "base")
    half = {name: tensor for name, tensor in tensors.items() if name != Q}
    with pytest.raises(
        ConfigError, match=r"model.layers.1.self_attn.q_proj: lora_A and lora_B must both be there"
    ):
        merge_adapters(tiny_network(Decoder, MODEL, 1), half, config)
    neither = {
        name: tensor for name, tensor in half.items() if name != Q.replace("lora_A", "lora_B")
    }
    with pytest.raises(
        ConfigError,
        match=(
            r"target_modules has 'q_proj', but the adapter file lacks"
            r" model.layers.1.self_attn.q_proj"
        ),
    ):
        merge_adapters(tiny_network(Decoder, MODEL, 1), neither, config)


def torch_state(network: Decoder) -> dict[str, np.ndarray]:
    """Its weights as Hugging Face has them."""
    config, weights = network.config, numpy_weights(network)
    state = {
        "model.embed_tokens.weight": weights["embedding"],
        "lm_head.weight": weights["head"].T,
        "model.norm.weight": weights["norm"],
    }
    for layer in range(config.layers):
        part = {
            name.removeprefix("layers."): value[layer]
            for name, value in weights.items()
            if name.startswith("layers.")
        }
        attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
        prefix = f"model.layers.{layer}"
        state |= {
            f"{prefix}.self_attn.{name}.weight": part[ours].reshape(config.embed, -1).T
            for name, ours in attention.items()
        }
        state[f"{prefix}.self_attn.o_proj.weight"] = part["output"].reshape(-1, config.embed).T
        state |= {
            f"{prefix}.mlp.{name}_proj.weight": part[name].T for name in ("gate", "up", "down")
        }
        state |= {
            f"{prefix}.self_attn.{name[0]}_norm.weight": part[f"{name}_norm"]
            for name in ("query", "key")
        }
        state[f"{prefix}.input_layernorm.weight"] = part["attention_norm"]
        state[f"{prefix}.post_attention_layernorm.weight"] = part["ffn_norm"]
    return state


def hugging_face(network: Decoder) -> Any:
    """The same decoder in transformers, in float64 but for its norms and softmax, which it computes
    in float32."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = network.config
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab,
            hidden_size=config.embed,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_size,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).double()
    model.load_state_dict(
        {name: torch.tensor(value) for name, value in torch_state(network).items()}
    )
    return model.eval()


def assert_the_same_as_peft(ours: Decoder, theirs: Any) -> None:
    """Its own forward pass, adapters beside the weights, and its own merged weights."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        found = theirs(torch.tensor(np.asarray(TOKENS), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits(ours), found, rtol=0, atol=2e-5)
    assert np.abs(logits(tiny_network(Decoder, MODEL, 1)) - found).max() > 0.1
    merged_by_peft = theirs.merge_and_unload().state_dict()
    for name, weight in torch_state(ours).items():
        np.testing.assert_allclose(
            weight, merged_by_peft[name].numpy(), rtol=0, atol=1e-14, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.hf
def test_peft_reads_what_is_exported_and_computes_the_same(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    network, base = adapted(), tiny_network(Decoder, MODEL, 1)
    save_file(adapter_tensors(network), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(adapter_config_json(LoraConfig(rank=3, alpha=4.0), MODEL, "base"))
    )
    theirs = peft.PeftModel.from_pretrained(
        hugging_face(base), str(tmp_path), autocast_adapter_dtype=False
    )
    assert_the_same_as_peft(merge_lora(network), theirs)


@pytest.mark.slow
@pytest.mark.hf
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_peft_are_merged_as_it_applies_them(tmp_path: Path, rslora: bool) -> None:
    """With ranks and alphas of their own for some modules, on some layers only."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    base = tiny_network(Decoder, MODEL, 1)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        layers_to_transform=[0, 2, 3],
        rank_pattern={"o_proj": 2, r"layers\.3\.self_attn\.q_proj": 7},
        alpha_pattern={"up_proj": 9, r"^model\.layers\.0\.self_attn\.o_proj": 1},
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(hugging_face(base), settings, autocast_adapter_dtype=False).eval()
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert_the_same_as_peft(
        merge_adapters(base, tensors, json.loads((tmp_path / "adapter_config.json").read_text())),
        theirs,
    )
