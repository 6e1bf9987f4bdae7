"""Published models as constants.

The sizes are those of each model's `config.json` on Hugging Face.
"""

from dataclasses import replace

from jaxspec.inputs.spec import FamilySpec, ModelConfig, ModelSpec, RopeSpec

TINY = ModelConfig(
    # Room for the built-in characters.
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
"""Default model for characters of arithmetic: deep and narrow, about 0.5 M parameters."""

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
    # Width of one expert.
    ffn=768,
    rope_theta=1e6,
    tied=False,
)
"""Mixture of 128 experts per layer, each of width `ffn`. A token uses 8.

Only the checkpoint's config.json states the experts (model.path).
"""
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
"""Mixture of 128 experts per layer, of which a token uses 8."""

# Settings cannot state experts, so the published numbers are repeated here.
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
"""Context of all Qwen3 models, before any scaling."""


def spec_without_checkpoint(model: ModelConfig) -> ModelSpec:
    """Returns the spec of a model whose checkpoint is not read.

    If it has the sizes of a published model, it gets that model's experts and context. Another
    number of layers is allowed, to see the memory of a layer.
    """
    # Leaves only sizes to compare. The other fields do not identify a model.
    sizes = replace(
        model,
        path="",
        ignore=False,
        rope_factor=1.0,
        # All published models have the defaults, so any of them can lend these two.
        dtype=QWEN3_8B.dtype,
        remat=QWEN3_8B.remat,
    )
    for published, family in _FAMILIES:
        # Ignores the number of layers, which the caller may have reduced.
        if replace(sizes, layers=published.layers) == published:
            return ModelSpec(
                **vars(replace(model, path="")), family=family, rope=RopeSpec(context=_POSITIONS)
            )
    return ModelSpec.from_config(replace(model, path=""))
