"""What networks are built from: the sizes that a user may give, and what a checkpoint says beside
them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from jaxspec.inputs.checked import CheckedConfig, Range, require

ModelType = Literal["qwen3", "qwen3_moe", "qwen2", "llama", "mimo"]
Natural = Annotated[int, Range(min=0)]
Count = Annotated[int, Range(min=1)]
Positive = Annotated[float, Range(above=0)]
LayerCount = Annotated[int, Range(min=1, max=1000)]
"""Several times as many as any published model has; compiling more would take hours."""


@dataclass(frozen=True, kw_only=True)
class RopeSpec(CheckedConfig, prefix="model.rope."):
    """How `model.rope_factor` stretches the rotary positions; nothing here matters at factor 1 but
    the context."""

    kind: Literal["yarn", "llama3", "linear"] = "yarn"
    """YaRN (arXiv 2309.00071), Llama 3's bands, or all frequencies alike."""
    context: Natural = 0
    """Positions that the model was made for, before any stretching; 0: not known, and not
    checked."""
    longest: Natural = 0
    """Positions that the stretched model allows for; 0: the context times rope_factor."""
    beta_fast: Positive = 32.0
    """YaRN: frequencies that turn more often in the context keep their pace."""
    beta_slow: Positive = 1.0
    """YaRN: frequencies that turn less often are stretched by the whole factor."""
    attention_factor: Annotated[float, Range(min=0)] = 0.0
    """YaRN: factor on cosines and sines; 0: 0.1 ln(rope_factor) + 1."""
    truncate: bool = True
    """YaRN: the band's ends are rounded to whole frequencies."""
    low_freq_factor: Positive = 1.0
    """Llama 3: as beta_slow."""
    high_freq_factor: Positive = 4.0
    """Llama 3: as beta_fast."""

    def check(self) -> None:
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            pair = getattr(self, low), getattr(self, high)
            require(
                pair[0] < pair[1],
                f"model.rope.{low} {pair[0]} is not below model.rope.{high} {pair[1]}",
            )


@dataclass(frozen=True, kw_only=True)
class FamilySpec(CheckedConfig, prefix="model.family."):
    """What the families of decoders differ in; the defaults are Qwen3's."""

    model_type: ModelType = "qwen3"
    """The family's name in config.json."""
    query_key_norm: bool = True
    """RMSNorm of each query and key head."""
    attention_bias: bool = False
    """Biases of the query, key and value products."""
    output_bias: bool = False
    """Bias of the attention's output product."""
    experts: Natural = 0
    """Experts a layer, each of width `ffn`; 0: one dense feed-forward layer."""
    experts_per_token: Count = 8
    """Experts that a token is sent to."""
    normalize_experts: bool = True
    """Whether the weights of a token's experts are made to sum to 1."""

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
"""Architectures by their name in config.json; what a file may vary in them is said by
`implied_family`."""


def implied_family(family: FamilySpec) -> FamilySpec:
    """A family with all that its model_type fixes in place of what it says: what readers of its
    config.json make of it."""
    defaults = next(
        entry for entry in ARCHITECTURES.values() if entry.model_type == family.model_type
    )
    experts = (
        (family.experts or family.experts_per_token) if family.model_type == "qwen3_moe" else 0
    )
    # the others have biases whatever the key says
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
    """The policy: a decoder of the Qwen and Llama families, from a Hugging Face folder or with
    sizes of its own."""

    path: str = ""
    """Folder of a Hugging Face checkpoint (or an id on the hub): its config.json sets all that
    follows but rope_factor, dtype and remat; empty: these settings, and random weights or a warm
    start."""
    ignore: bool = False
    """Leave out tensors of the checkpoint, and keys of its config.json, that are not known here,
    instead of refusing them."""
    vocab: Count = 40
    """Rows of the embedding table; at least the tokenizer's size (published models pad it)."""
    layers: LayerCount = 12
    """Decoder layers; a draft of kind eagle3 reads three of them by default and then needs at least
    4."""
    embed: Count = 64
    """Width of the residual stream."""
    heads: Count = 4
    """Query heads."""
    kv_heads: Count = 2
    """Key and value heads (grouped-query attention); divides `heads`."""
    head_size: Count = 16
    """Size of one head; even, for rotary positions."""
    ffn: Count = 192
    """Width of the SwiGLU layer."""
    rope_theta: Annotated[float, Range(above=1)] = 1e4
    """Base of the rotary frequencies."""
    rope_factor: Annotated[float, Range(min=1)] = 1.0
    """Stretches the positions of a checkpoint for contexts so many times as long, by YaRN (arXiv
    2309.00071); 1: as they are."""
    norm_eps: Positive = 1e-6
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """Whether the output head is the embedding table."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the matmuls; master weights are float32 (float64 with `float64`)."""
    remat: bool = True
    """Recompute each layer in the backward pass instead of storing what it needs: far less memory
    for a pass more."""

    def check(self) -> None:
        choices = ", ".join(
            str(count) for count in range(1, min(self.heads, 1000) + 1) if self.heads % count == 0
        )
        message = f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}"
        require(self.heads % self.kv_heads == 0, f"{message}; give one of {choices}")
        remedy = f"rotary positions need an even size, such as {self.head_size + 1}"
        require(self.head_size % 2 == 0, f"model.head_size is {self.head_size}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelConfig, prefix="model."):
    """A decoder as it is built: the sizes, and what only a checkpoint says."""

    rope: RopeSpec = field(default_factory=RopeSpec)
    family: FamilySpec = field(default_factory=FamilySpec)

    def check(self) -> None:
        super().check()
        is_known = self.rope_factor == 1 or self.rope.kind == "linear" or self.rope.context > 0
        require(
            is_known or bool(self.path),
            f"model.rope_factor is {self.rope_factor}, and how many positions the model was trained"
            " on is not known; give a checkpoint (model.path) whose config.json says it",
        )

    @classmethod
    def from_config(cls, model: ModelConfig) -> ModelSpec:
        """The decoder of a model without a checkpoint: of Qwen3's family."""
        return model if isinstance(model, ModelSpec) else cls(**vars(model))

    @property
    def max_positions(self) -> int:
        """Positions that the model allows for; 0: not known."""
        return self.rope.longest or int(self.rope.context * self.rope_factor)


@dataclass(frozen=True, kw_only=True)
class HeadConfig(CheckedConfig, prefix="head."):
    """The form of an EAGLE-3 head, in which published ones differ; a head that is loaded brings its
    own."""

    taps: tuple[Natural, ...] = ()
    """Numbers of the policy's layers applied where its residual stream is read; empty: those of a
    loaded head, else 2, L//2 and L-3."""
    use_taps: bool = True
    """False: the head reads the policy's final-norm hidden state, as it is."""
    norm_before_fuse: bool = False
    """One RMSNorm over the joined taps."""
    fuse_norms: bool = False
    """An RMSNorm for each tap (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """The residual stream starts with the normed hidden state."""
    norm_output: bool = False
    """Deeper steps are fed the final-norm output instead of what precedes it (EAGLE-3.1)."""

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
    """An EAGLE-3 head as it is built: its form, and what only a loaded one has."""

    logit_scale: Positive = 1.0
    """Factor on the logits."""
    own_embedding: bool = False
    """An embedding table of its own, which is not trained; False: the policy's."""

    @classmethod
    def from_config(cls, head: HeadConfig) -> HeadSpec:
        """The head that training starts from without a checkpoint."""
        return head if isinstance(head, HeadSpec) else cls(**vars(head))


@dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedConfig, prefix="lora."):
    """Low-rank adapters (LoRA, arXiv 2106.09685) in the form of PEFT."""

    rank: Natural = 0
    """Train adapters of this rank instead of the policy's weights; 0: train the weights."""
    alpha: Positive = 32.0
    """The adapters' product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Weights that get an adapter, by PEFT's names (q_proj, up_proj, ...); empty: all of attention
    and of a feed-forward layer without experts."""
    path: str = ""
    """Folder of PEFT adapters that are merged into the policy's weights when these are loaded."""


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """A draft as it is built: all of a run that a kind of draft may look at."""

    kind: str
    max_length: int
    """The most tokens a round (K)."""
    policy: ModelSpec
    decoder: ModelSpec | None
    """The decoder of a draft that was loaded; None: it is made for the policy."""
    head: HeadSpec
    vocab: int
    """Tokens of its own vocabulary; 0: the policy's."""
    ffn: int
    """Width of its feed-forward layer; 0: the policy's."""
    layers: int
    embedding_first: bool
    path: str
    """Folder of a trained draft; empty: there is none."""
    tap_convention: Literal["auto", "boundary", "output_of"]
    lookup: str
    """The kind of look-up in use, alone or beside a learned draft, or `none`."""
    rule: Literal["vllm", "hf", "latest"]
    min_match: int
    max_match: int
    group_size: int
    row_length: int
    """Tokens of the longest row, prompt and response."""
    depths: int
    """Depths at which it is trained; 0: it is not."""
