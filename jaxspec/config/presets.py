"""Published models as constants; the sizes are those of each model's `config.json` on Hugging
Face."""

from dataclasses import replace

from jaxspec.inputs.spec import FamilySpec, ModelConfig, ModelSpec, RopeSpec

TINY = ModelConfig(
    vocab=40,
    layers=12,
    embed=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    ffn=192,
    rope_theta=1e4,
    tied=True,
)
"""The embedded default: deep and narrow, about 0.5 M parameters, for characters of arithmetic."""

SMOLLM2_135M = ModelConfig(
    vocab=49_152,
    layers=30,
    embed=576,
    heads=9,
    kv_heads=3,
    head_size=64,
    ffn=1536,
    rope_theta=1e5,
    norm_eps=1e-5,
    tied=True,
)
QWEN3_0_6B = ModelConfig(
    vocab=151_936,
    layers=28,
    embed=1024,
    heads=16,
    kv_heads=8,
    head_size=128,
    ffn=3072,
    rope_theta=1e6,
    tied=True,
)
QWEN3_1_7B = ModelConfig(
    vocab=151_936,
    layers=28,
    embed=2048,
    heads=16,
    kv_heads=8,
    head_size=128,
    ffn=6144,
    rope_theta=1e6,
    tied=True,
)
QWEN3_4B = ModelConfig(
    vocab=151_936,
    layers=36,
    embed=2560,
    heads=32,
    kv_heads=8,
    head_size=128,
    ffn=9728,
    rope_theta=1e6,
    tied=True,
)
QWEN3_8B = ModelConfig(
    vocab=151_936,
    layers=36,
    embed=4096,
    heads=32,
    kv_heads=8,
    head_size=128,
    ffn=12_288,
    rope_theta=1e6,
    tied=False,
)
QWEN3_30B_A3B = ModelConfig(
    vocab=151_936,
    layers=48,
    embed=2048,
    heads=32,
    kv_heads=4,
    head_size=128,
    ffn=768,
    rope_theta=1e6,
    tied=False,
)
"""128 experts a layer, each of width `ffn`, and 8 of them a token; that there are experts is said
by the checkpoint's config.json alone (model.path)."""
QWEN3_235B_A22B = ModelConfig(
    vocab=151_936,
    layers=94,
    embed=4096,
    heads=64,
    kv_heads=4,
    head_size=128,
    ffn=1536,
    rope_theta=1e6,
    tied=False,
)
"""128 experts a layer, 8 a token, as for QWEN3_30B_A3B."""

_EXPERTS = FamilySpec(model_type="qwen3_moe", experts=128, experts_per_token=8)
_FAMILIES = (
    (QWEN3_0_6B, FamilySpec()),
    (QWEN3_1_7B, FamilySpec()),
    (QWEN3_4B, FamilySpec()),
    (QWEN3_8B, FamilySpec()),
    (QWEN3_30B_A3B, _EXPERTS),
    (QWEN3_235B_A22B, _EXPERTS),
)
_POSITIONS = 40_960
"""Of all of Qwen3, before any stretching."""


def spec_without_checkpoint(model: ModelConfig) -> ModelSpec:
    """A model without its checkpoint; where it has the sizes of a published one, with what that
    one's config.json says beside them: experts, and the positions that it allows for. Fewer layers
    may be asked for, to see what a layer takes."""
    sizes = replace(
        model,
        path="",
        ignore=False,
        rope_factor=1.0,
        dtype=QWEN3_8B.dtype,
        remat=QWEN3_8B.remat,
    )
    for published, family in _FAMILIES:
        if replace(sizes, layers=published.layers) == published:
            return ModelSpec(
                **vars(replace(model, path="")), family=family, rope=RopeSpec(context=_POSITIONS)
            )
    return ModelSpec.from_config(replace(model, path=""))
