"""Configs and specs of networks.

A config has the settings of a user. A spec adds the facts that only a checkpoint has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from jaxspec.inputs.checked import CheckedConfig, Range, require

ModelType = Literal["qwen3", "qwen3_moe", "qwen2", "llama", "mimo"]
Natural = Annotated[int, Range(min=0)]
Count = Annotated[int, Range(min=1)]
Positive = Annotated[float, Range(above=0)]
# Several times the layers of any published model. Compiling more would take hours.
LayerCount = Annotated[int, Range(min=1, max=1000)]


@dataclass(frozen=True, kw_only=True)
class RopeSpec(CheckedConfig, prefix="model.rope."):
    """Scaling of rotary positions by `model.rope_factor`.

    At factor 1, only `context` and `longest` have an effect.
    """

    kind: Literal["yarn", "llama3", "linear"] = "yarn"
    """Method: YaRN (arXiv 2309.00071), Llama 3's bands, or linear scaling of all frequencies."""
    context: Natural = 0
    """Positions that the model was trained on, before any scaling. 0 = unknown and not checked."""
    longest: Natural = 0
    """Positions that the scaled model allows. 0 = the context times rope_factor."""
    beta_fast: Positive = 32.0
    """YaRN: frequencies with more turns than this in the context stay as they are."""
    beta_slow: Positive = 1.0
    """YaRN: frequencies with fewer turns than this in the context are scaled by the full factor."""
    attention_factor: Annotated[float, Range(min=0)] = 0.0
    """YaRN: factor on cosines and sines. 0 = 0.1 ln(rope_factor) + 1."""
    truncate: bool = True
    """YaRN: whether the bounds of the band are rounded outward to whole frequencies."""
    low_freq_factor: Positive = 1.0
    """Llama 3: the same as beta_slow."""
    high_freq_factor: Positive = 4.0
    """Llama 3: the same as beta_fast."""

    def check(self) -> None:
        # Frequencies between the two bounds are interpolated, which needs them in this order.
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            pair = getattr(self, low), getattr(self, high)
            require(
                pair[0] < pair[1],
                f"model.rope.{low} {pair[0]} is not below model.rope.{high} {pair[1]}",
            )


@dataclass(frozen=True, kw_only=True)
class FamilySpec(CheckedConfig, prefix="model.family."):
    """Differences between families of decoders. The defaults are those of Qwen3."""

    model_type: ModelType = "qwen3"
    """Name of the family in config.json."""
    query_key_norm: bool = True
    """Whether each query and key head has an RMSNorm."""
    attention_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    experts: Natural = 0
    """Experts per layer, each of width `ffn`. 0 = a dense feed-forward layer."""
    experts_per_token: Count = 8
    """Experts that process a token."""
    normalize_experts: bool = True
    """Whether the weights of a token's experts are normalized to a sum of 1."""

    def check(self) -> None:
        message = (
            f"model.family.experts_per_token is {self.experts_per_token}; at most"
            f" model.family.experts {self.experts}"
        )
        require(self.experts == 0 or self.experts_per_token <= self.experts, message)


_QWEN3 = FamilySpec()
ARCHITECTURES: dict[str, FamilySpec] = {
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": replace(_QWEN3, model_type="qwen3_moe"),
    "Qwen2ForCausalLM": FamilySpec(model_type="qwen2", query_key_norm=False, attention_bias=True),
    "LlamaForCausalLM": FamilySpec(model_type="llama", query_key_norm=False),
    "MiMoForCausalLM": FamilySpec(model_type="mimo", query_key_norm=False, attention_bias=True),
}
"""Families by the name of their architecture in config.json.

`implied_family` shows which fields a file can change.
"""


def implied_family(family: FamilySpec) -> FamilySpec:
    """Returns the family that readers of its config.json would build.

    Fields that the model_type fixes are replaced by its values.
    """
    defaults = next(
        entry for entry in ARCHITECTURES.values() if entry.model_type == family.model_type
    )
    # A qwen3_moe always has experts: its config.json must state a number above 0.
    experts = (
        (family.experts or family.experts_per_token) if family.model_type == "qwen3_moe" else 0
    )
    # Other families ignore the key `attention_bias`.
    reads_biases = family.model_type in ("qwen3", "qwen3_moe", "llama")
    biases = (
        (family.attention_bias, family.attention_bias)
        if reads_biases
        else (defaults.attention_bias, defaults.output_bias)
    )
    return replace(
        family,
        query_key_norm=defaults.query_key_norm,
        attention_bias=biases[0],
        output_bias=biases[1],
        experts=experts,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedConfig, prefix="model."):
    """The policy, a decoder of the Qwen or Llama families.

    It is loaded from a Hugging Face folder, or built with the sizes given here.
    """

    path: str = ""
    """Folder of a Hugging Face checkpoint, or an id on the hub. Its config.json sets all fields
    from vocab on, except rope_factor, dtype and remat. If empty, the policy is built with these
    settings, and starts from random weights or a warm start."""
    ignore: bool = False
    """Whether unknown tensors of the checkpoint, and unknown keys of its config.json, are ignored
    instead of refused."""
    vocab: Count = 40
    """Rows of the embedding table, at least as many as the tokenizer has tokens. Published models
    pad the table."""
    layers: LayerCount = 12
    """Decoder layers. A draft of kind eagle3 reads three of them by default, and then needs at
    least 4 layers."""
    embed: Count = 64
    """Width of the residual stream."""
    heads: Count = 4
    """Query heads."""
    kv_heads: Count = 2
    """Key and value heads, for grouped-query attention. Must divide `heads`."""
    head_size: Count = 16
    """Size of one head. Must be even, for rotary positions."""
    ffn: Count = 192
    """Width of the SwiGLU layer."""
    rope_theta: Annotated[float, Range(above=1)] = 1e4
    """Base of the rotary frequencies."""
    rope_factor: Annotated[float, Range(min=1)] = 1.0
    """Factor by which YaRN (arXiv 2309.00071) extends a checkpoint's context. 1 = no change."""
    norm_eps: Positive = 1e-6
    """Constant added to the mean square in RMSNorm."""
    tied: bool = True
    """Whether the output head is the embedding table."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of matrix products. Master weights are float32, or float64 with `float64`."""
    remat: bool = True
    """Whether the backward pass recomputes each layer instead of storing its activations. This
    takes far less memory, at the cost of another forward pass."""

    def check(self) -> None:
        # Bounded, since an absurd number of heads would take long to list.
        choices = ", ".join(
            str(count) for count in range(1, min(self.heads, 1000) + 1) if self.heads % count == 0
        )
        message = f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}"
        require(self.heads % self.kv_heads == 0, f"{message}; give one of {choices}")
        remedy = f"rotary positions need an even size, such as {self.head_size + 1}"
        require(self.head_size % 2 == 0, f"model.head_size is {self.head_size}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelConfig, prefix="model."):
    """Specification of a decoder.

    It has the settings of a user, and the facts that only a checkpoint has.
    """

    rope: RopeSpec = field(default_factory=RopeSpec)
    family: FamilySpec = field(default_factory=FamilySpec)

    def check(self) -> None:
        super().check()
        # YaRN and Llama 3 scale each frequency by its turns in the original context. Linear scaling
        # does not use the context.
        is_known = self.rope_factor == 1 or self.rope.kind == "linear" or self.rope.context > 0
        require(
            is_known or bool(self.path),
            f"model.rope_factor is {self.rope_factor}, but the number of positions that the model"
            " was trained on is unknown; give a checkpoint (model.path) whose config.json has it",
        )

    @classmethod
    def from_config(cls, model: ModelConfig) -> ModelSpec:
        """Makes the spec of a model of Qwen3's family. Returns a spec as it is."""
        return model if isinstance(model, ModelSpec) else cls(**vars(model))

    @property
    def max_positions(self) -> int:
        """Maximum number of positions. 0 = unknown."""
        return self.rope.longest or int(self.rope.context * self.rope_factor)


@dataclass(frozen=True, kw_only=True)
class HeadConfig(CheckedConfig, prefix="head."):
    """Variants of EAGLE-3 heads. A loaded head has its own values."""

    taps: tuple[Natural, ...] = ()
    """Positions in the policy's residual stream that the head reads, as numbers of layers applied
    before. If empty, those of a loaded head, or else 2, L//2 and L-3."""
    use_taps: bool = True
    """Whether the head reads the taps. If not, it reads the policy's hidden state after the final
    norm."""
    norm_before_fuse: bool = False
    """Whether there is one RMSNorm over the joined taps."""
    fuse_norms: bool = False
    """Whether each tap has an RMSNorm (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """Whether the residual stream starts with the hidden state after its norm."""
    norm_output: bool = False
    """Whether later steps read the hidden state after the final norm, instead of before it
    (EAGLE-3.1)."""

    def check(self) -> None:
        require(
            list(self.taps) == sorted(set(self.taps)),
            f"head.taps {list(self.taps)} must ascend, without repetition: give"
            f" {sorted(set(self.taps))}",
        )
        require(
            self.use_taps or not (self.taps or self.norm_before_fuse or self.fuse_norms),
            "head.use_taps is off, so that there are no head.taps to read or norm; leave out"
            " head.taps, head.norm_before_fuse and head.fuse_norms, or turn head.use_taps on",
        )
        require(
            not (self.norm_before_fuse and self.fuse_norms),
            "head.norm_before_fuse and head.fuse_norms would norm the taps twice; choose one",
        )


@dataclass(frozen=True, kw_only=True)
class HeadSpec(HeadConfig, prefix="head."):
    """Specification of an EAGLE-3 head.

    It has the settings of a user, and the facts that only a loaded head has.
    """

    logit_scale: Positive = 1.0
    """Factor on the logits."""
    own_embedding: bool = False
    """Whether the head has a separate, frozen embedding table. If not, it uses the policy's."""

    @classmethod
    def from_config(cls, head: HeadConfig) -> HeadSpec:
        """Makes the spec of a new head. Returns a spec as it is."""
        return head if isinstance(head, HeadSpec) else cls(**vars(head))


@dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedConfig, prefix="lora."):
    """Low-rank adapters (LoRA, arXiv 2106.09685) in the format of PEFT."""

    rank: Natural = 0
    """Rank of adapters that are trained instead of the policy's weights. 0 = no adapters."""
    alpha: Positive = 32.0
    """Scale of the adapters. Their product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Weights that get an adapter, by PEFT's names (q_proj, up_proj, ...). If empty, all weights of
    attention and of feed-forward layers without experts."""
    path: str = ""
    """Folder of PEFT adapters to merge into the policy's weights when these are loaded."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run from which a kind of draft makes its spec."""

    max_length: int
    """Maximum draft length of a round (K)."""
    policy: ModelSpec
    path: str
    """Folder of a trained draft, or empty."""
    decoder: ModelSpec | None
    """Decoder of a loaded draft, or None if the draft is made for the policy."""
    head: HeadSpec
    group_size: int
    row_length: int
    """Maximum tokens of a row, with prompt and response."""
    banned: tuple[int, ...]
    """Token ids that are never sampled."""
    trains_offline: bool
    depths: int
    """Number of depths at which the draft is trained. 0 = not trained."""


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """Specification of a draft.

    Each kind has a subclass, with the facts that it uses.
    """

    kind: ClassVar[str]

    @property
    def vocab(self) -> int:
        """Tokens of the draft's own vocabulary. 0 = the policy's vocabulary."""
        return 0


@dataclass(frozen=True, kw_only=True)
class LearnedSpec(DraftSpec):
    """Specification of a draft with weights."""

    max_length: int
    """Maximum draft length of a round (K)."""
    policy: ModelSpec
    path: str
    """Folder of a trained draft, or empty."""
    decoder: ModelSpec | None
    """Decoder of a loaded draft. None if the draft is made for the policy."""
