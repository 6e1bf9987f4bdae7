"""EAGLE-3 in torch, from the tensors of a published file and its flags, for one sequence: written
from what the published implementations (SafeAILab/EAGLE, SpecForge, speculators) do, not from
ours."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import linear, silu


class TorchEagle3:
    """A head by its raw tensor names (`midlayer.*`, `layers.1.*`, ...) and its config.json, with
    the keys and values of earlier slots."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        config: Mapping[str, Any],
        target_embedding: Any,
        positions: Any,
    ):
        """`positions(t)` gives cosines and sines of half a head."""
        self.tensors = {name: torch.tensor(value) for name, value in tensors.items()}
        self.config, self.positions = config, positions
        self.embedding = self.tensors.get("embed_tokens.weight", torch.tensor(target_embedding))
        layers = config["num_hidden_layers"]
        self.seen: list[tuple[list[Any], list[Any]]] = [([], []) for _ in range(layers)]

    def flag(self, name: str, default: Any = False) -> Any:
        return self.config.get(name, self.config.get("eagle_config", {}).get(name, default))

    def norm(self, x: Any, name: str) -> Any:
        return (
            x
            * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
            * self.tensors[name]
        )

    def product(self, x: Any, name: str) -> Any:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def fused(self, features: Any) -> Any:
        features = torch.as_tensor(features)
        if not self.flag("use_aux_hidden_state", True):
            return features
        if self.flag("fc_norm"):
            chunks = features.chunk(self.config.get("num_aux_hidden_states", 3), dim=-1)
            features = torch.cat(
                [self.norm(chunk, f"fc_norm.{index}.weight") for index, chunk in enumerate(chunks)],
                dim=-1,
            )
        if self.flag("norm_before_fc"):
            features = self.norm(features, "input_norm.weight")
        return linear(features, self.tensors["fc.weight"])

    def turned(self, heads: Any, slot: int) -> Any:
        cosine, sine = (torch.as_tensor(part) for part in self.positions(slot))
        low, high = heads.chunk(2, dim=-1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)

    def attention(self, x: Any, prefix: str, layer: int, slot: int) -> Any:
        size, kv_heads = self.config["head_dim"], self.config["num_key_value_heads"]
        query, key, value = (
            self.product(x, f"{prefix}.self_attn.{name}_proj").reshape(-1, size) for name in "qkv"
        )
        if f"{prefix}.self_attn.q_norm.weight" in self.tensors:
            query, key = (
                self.norm(part, f"{prefix}.self_attn.{name}_norm.weight")
                for part, name in ((query, "q"), (key, "k"))
            )
        keys, values = self.seen[layer]
        keys.append(self.turned(key, slot))
        values.append(value)
        out = []
        for number, head in enumerate(self.turned(query, slot)):
            shared = number * kv_heads // len(query)
            scores = torch.stack([key[shared] @ head for key in keys]) / size**0.5
            out.append(torch.softmax(scores, 0) @ torch.stack([value[shared] for value in values]))
        return self.product(torch.cat(out), f"{prefix}.self_attn.o_proj")

    def slot(self, hidden: Any, token: int, slot: int) -> tuple[Any, Any]:
        """Reads one slot; returns the next recurrent hidden state and the logits."""
        for layer in range(self.config["num_hidden_layers"]):
            prefix = "midlayer" if layer == 0 else f"layers.{layer}"
            if layer == 0:
                normed = self.norm(hidden, "midlayer.hidden_norm.weight")
                entered = torch.cat(
                    [self.norm(self.embedding[token], "midlayer.input_layernorm.weight"), normed]
                )
                hidden = normed if self.flag("norm_before_residual") else hidden
            else:
                entered = self.norm(hidden, f"{prefix}.input_layernorm.weight")
            hidden = hidden + self.attention(entered, prefix, layer, slot)
            normed = self.norm(hidden, f"{prefix}.post_attention_layernorm.weight")
            gated = silu(self.product(normed, f"{prefix}.mlp.gate_proj")) * self.product(
                normed, f"{prefix}.mlp.up_proj"
            )
            hidden = hidden + self.product(gated, f"{prefix}.mlp.down_proj")
        final = self.norm(hidden, "norm.weight")
        logits = linear(final, self.tensors["lm_head.weight"]) * self.flag("logit_scale", 1.0)
        return (final if self.flag("norm_output") else hidden), logits

    def run(self, features: Any, tokens: list[int], drafted: list[int]) -> Any:
        """Logits of all true slots (token t+1 at slot t), then of one recurrent step for each
        drafted token; [slots, rows of the head]."""
        logits, hidden = [], None
        for slot, read in enumerate(self.fused(features)):
            hidden, said = self.slot(read, tokens[slot + 1], slot)
            logits.append(said)
        for token in drafted:
            hidden, said = self.slot(hidden, token, len(logits))
            logits.append(said)
        return torch.stack(logits)
