"""MTP layers in torch, from the tensors of a published file, for one sequence: written from
what the published implementations of DeepSeek-V3 and MiMo do, not from ours."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear, silu


class Names(NamedTuple):
    """What a family calls the parts around the decoder layer, and the order in which the two halves
    are joined."""

    embedding_norm: str
    hidden_norm: str
    project: str
    final_norm: str
    embedding_first: bool


MIMO = Names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", False)
DEEPSEEK = Names("enorm", "hnorm", "eh_proj", "shared_head.norm", True)


class TorchMtp:
    """One MTP layer by its raw tensor names (`model.mtp_layers.0.*`, `model.layers.36.*`), with the
    keys and values of earlier slots."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        prefix: str,
        names: Names,
        heads: tuple[int, int],
        eps: float,
        theta: float,
    ):
        """`heads` counts those of queries and those of keys."""
        self.tensors = {
            name.removeprefix(prefix): torch.tensor(value)
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        self.names, self.heads, self.eps, self.theta = names, heads, eps, theta
        self.seen: tuple[list[Any], list[Any]] = ([], [])

    def norm(self, x: Any, name: str) -> Any:
        return (
            x
            * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
            * self.tensors[f"{name}.weight"]
        )

    def product(self, x: Any, name: str) -> Any:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def turned(self, heads: Any, slot: int) -> Any:
        size = heads.shape[-1]
        angle = slot * self.theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        low, high = heads.chunk(2, dim=-1)
        return torch.cat(
            [low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1
        )

    def attention(self, x: Any, slot: int) -> Any:
        query, key, value = (
            self.product(x, f"self_attn.{name}_proj").unflatten(0, (count, -1))
            for name, count in zip(
                "qkv", (self.heads[0], self.heads[1], self.heads[1]), strict=True
            )
        )
        if "self_attn.q_norm.weight" in self.tensors:
            query, key = self.norm(query, "self_attn.q_norm"), self.norm(key, "self_attn.k_norm")
        self.seen[0].append(self.turned(key, slot))
        self.seen[1].append(value)
        keys, values = (
            torch.stack(part).repeat_interleave(self.heads[0] // self.heads[1], dim=1)
            for part in self.seen
        )
        scores = torch.einsum("nh,snh->ns", self.turned(query, slot), keys) / query.shape[-1] ** 0.5
        return self.product(
            torch.einsum("ns,snh->nh", scores.softmax(-1), values).flatten(), "self_attn.o_proj"
        )

    def slot(self, hidden: Any, embedded: Any, slot: int) -> Any:
        """Reads one slot; returns the post-norm output, which is the next hidden state and what the
        policy's head reads."""
        halves = [
            self.norm(embedded, self.names.embedding_norm),
            self.norm(hidden, self.names.hidden_norm),
        ]
        out = self.product(
            torch.cat(halves if self.names.embedding_first else halves[::-1]), self.names.project
        )
        out = out + self.attention(self.norm(out, "input_layernorm"), slot)
        normed = self.norm(out, "post_attention_layernorm")
        out = out + self.product(
            silu(self.product(normed, "mlp.gate_proj")) * self.product(normed, "mlp.up_proj"),
            "mlp.down_proj",
        )
        return self.norm(out, self.names.final_norm)

    def run(
        self, features: Any, tokens: list[int], drafted: list[int], embedding: Any, head: Any
    ) -> Any:
        """Logits by the policy's `embedding` and `head` [V D] of all true slots, then of a
        recurrent step for each drafted token."""
        embedding, outputs = torch.tensor(embedding), []
        features = torch.tensor(features)
        for slot, token in enumerate(tokens[1:] + drafted):
            hidden = features[slot] if slot < len(features) else outputs[-1]
            outputs.append(self.slot(hidden, embedding[token], slot))
        return torch.stack(outputs) @ torch.tensor(head).T
