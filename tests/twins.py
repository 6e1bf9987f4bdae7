"""Twins of the networks in plain numpy, by loops over positions and heads, which the networks are
compared with."""

from typing import Any

import jax
import numpy as np

from jaxspec.models.decoder import Decoder


def numpy_weights(network: Any) -> dict[str, np.ndarray]:
    """A network's arrays in float64 by dotted attribute path."""
    leaves = jax.tree_util.tree_flatten_with_path(network)[0]
    names = [
        [
            str(key.name if hasattr(key, "name") else key.key)
            for key in path
            if hasattr(key, "name") or hasattr(key, "key")
        ]
        for path, _ in leaves
    ]
    return {
        ".".join(name[:-1] if name[-1] == "value" else name): np.asarray(leaf, np.float64)
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


def numpy_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Root-mean-square norm."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def numpy_rotate(head: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotary embedding of one head vector: coordinates i and i + H/2 form a complex number, turned
    by position * theta^(-2i/H)."""
    half = len(head) // 2
    turned = (head[:half] + 1j * head[half:]) * np.exp(
        1j * position * theta ** (-2 * np.arange(half) / len(head))
    )
    return np.concatenate([turned.real, turned.imag])


def numpy_softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def numpy_swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """down(silu(gate(x)) * up(x))."""
    inner = x @ gate
    return (inner / (1 + np.exp(-inner)) * (x @ up)) @ down


def numpy_decoder(
    policy: Decoder, tokens: Any, positions: Any = None
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Qwen3 by loops over positions and heads, for one sequence: logits [T V], final-norm hidden [T
    D], residual stream at 0..L layers."""
    positions = np.arange(len(tokens)) if positions is None else positions
    config, weights, tokens = policy.config, numpy_weights(policy), np.asarray(tokens)
    x = weights["embedding"][tokens]
    boundaries = [x]
    for layer in range(config.layers):
        part = {
            name.removeprefix("layers."): value[layer]
            for name, value in weights.items()
            if name.startswith("layers.")
        }
        normed = numpy_rms_norm(x, part["attention_norm"], config.norm_eps)
        attended = np.zeros((len(tokens), config.embed))
        for head in range(config.heads):
            shared = head * config.kv_heads // config.heads  # the key/value head of this query head
            query = numpy_rms_norm(
                normed @ part["query"][:, head], part["query_norm"], config.norm_eps
            )
            key = numpy_rms_norm(normed @ part["key"][:, shared], part["key_norm"], config.norm_eps)
            value = normed @ part["value"][:, shared]
            turned = np.array(
                [numpy_rotate(key[s], positions[s], config.rope_theta) for s in range(len(tokens))]
            )
            for t in range(len(tokens)):
                scores = (
                    turned[: t + 1]
                    @ numpy_rotate(query[t], positions[t], config.rope_theta)
                    / np.sqrt(config.head_size)
                )
                attended[t] += numpy_softmax(scores) @ value[: t + 1] @ part["output"][head]
        x = x + attended
        x = x + numpy_swiglu(
            numpy_rms_norm(x, part["ffn_norm"], config.norm_eps),
            part["gate"],
            part["up"],
            part["down"],
        )
        boundaries.append(x)
    hidden = numpy_rms_norm(x, weights["norm"], config.norm_eps)
    head = weights["embedding"].T if config.tied else weights["head"]
    return hidden @ head, hidden, boundaries


def numpy_eagle_slot(
    network: Any, hidden: np.ndarray, embedded: np.ndarray, position: int, seen: list[Any]
) -> tuple[np.ndarray, np.ndarray]:
    """One EAGLE-3 slot as inference runs it: appends each layer's key and value to `seen` and
    attends to all of them.

    Returns the pre-norm output (the next depth's hidden state) and the logits.
    """
    config, weights, eps = network.config, numpy_weights(network), network.config.norm_eps
    seen.append([])
    out = hidden
    for layer in range(network.stack):
        prefix, index = ("first.", 0) if layer == 0 else ("layers.", layer - 1)
        part = {
            name.removeprefix(prefix): value[index]
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        if layer == 0:
            joined = np.concatenate(
                [
                    numpy_rms_norm(embedded, part["embedding_norm"], eps),
                    numpy_rms_norm(out, part["hidden_norm"], eps),
                ]
            )
        else:
            joined = numpy_rms_norm(out, part["attention_norm"], eps)
        query, key, value = (
            np.einsum("c,cnh->nh", joined, part[name]) for name in ("query", "key", "value")
        )
        seen[-1].append(
            (np.array([numpy_rotate(head, position, config.rope_theta) for head in key]), value)
        )
        out = out.copy()
        for head in range(config.heads):
            shared = head * config.kv_heads // config.heads
            turned = numpy_rotate(query[head], position, config.rope_theta)
            scores = np.array([slot[layer][0][shared] @ turned for slot in seen]) / np.sqrt(
                config.head_size
            )
            out += (
                numpy_softmax(scores)
                @ np.array([slot[layer][1][shared] for slot in seen])
                @ part["output"][head]
            )
        out = out + numpy_swiglu(
            numpy_rms_norm(out, part["ffn_norm"], eps), part["gate"], part["up"], part["down"]
        )
    return out, numpy_rms_norm(out, weights["norm"], eps) @ weights["head"]


def numpy_taps(boundaries: list[np.ndarray]) -> np.ndarray:
    """The taps of a decoder of 4 layers, [T 3D], from its residual stream at 0..4 layers."""
    return np.concatenate(boundaries[1:4], axis=-1)


def numpy_eagle_read(
    network: Any, embedding: np.ndarray, taps: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """A fresh draft reads `tokens`, slot t with the taps of t and token t+1: last pre-norm output
    and logits, and what it has seen."""
    fuse, seen = numpy_weights(network)["fuse"], []
    hidden = logits = np.zeros(0)
    for t in range(len(tokens) - 1):
        hidden, logits = numpy_eagle_slot(
            network, taps[t] @ fuse, embedding[tokens[t + 1]], t, seen
        )
    return hidden, logits, seen


def numpy_mtp_slot(
    network: Any,
    layer: int,
    hidden: np.ndarray,
    embedded: np.ndarray,
    position: int,
    seen: list[Any],
) -> np.ndarray:
    """One slot of an MTP layer as inference runs it: appends its key and value to `seen` and
    attends to all of them.

    Returns the post-norm output, which is the next depth's hidden state and what the target's head
    reads.
    """
    config = network.config
    weights = {
        name.removeprefix("layers."): value[layer] for name, value in numpy_weights(network).items()
    }
    eps = config.norm_eps
    pair = (
        numpy_rms_norm(embedded, weights["embedding_norm"], eps),
        numpy_rms_norm(hidden, weights["hidden_norm"], eps),
    )
    out = np.concatenate(pair if network.embedding_first else pair[::-1]) @ weights["project"]
    normed = numpy_rms_norm(out, weights["attention_norm"], eps)
    query, key, value = (
        np.einsum("d,dnh->nh", normed, weights[name]) + weights.get(f"{name}_bias", 0)
        for name in ("query", "key", "value")
    )
    if "query_norm" in weights:
        query = numpy_rms_norm(query, weights["query_norm"], eps)
        key = numpy_rms_norm(key, weights["key_norm"], eps)
    seen.append(
        (np.array([numpy_rotate(head, position, config.rope_theta) for head in key]), value)
    )
    for head in range(config.heads):
        shared = head * config.kv_heads // config.heads
        turned = numpy_rotate(query[head], position, config.rope_theta)
        scores = np.array([keys[shared] @ turned for keys, _ in seen]) / np.sqrt(config.head_size)
        out = (
            out
            + numpy_softmax(scores)
            @ np.array([values[shared] for _, values in seen])
            @ weights["output"][head]
        )
    out = out + numpy_swiglu(
        numpy_rms_norm(out, weights["ffn_norm"], eps),
        weights["gate"],
        weights["up"],
        weights["down"],
    )
    return numpy_rms_norm(out, weights["norm"], eps)
