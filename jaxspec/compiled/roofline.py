"""Seconds that a round of generation takes on a card, by its public figures: bytes that are read,
operations of products, and kernels that are launched."""

from typing import NamedTuple

from jaxspec.compiled.hardware import HARDWARE, Card

BANDWIDTH_SHARE, PEAK_SHARE = 0.85, 0.65
"""Shares of a card's public figures that decoding reaches. Measured on an H100."""
LAUNCH_SECONDS = 2.85e-6
"""Seconds that each kernel adds by being launched. Measured on an H100."""
LAYER_KERNELS, OTHER_KERNELS, DRAFT_KERNELS = 16, 103, 59
"""Kernels of a layer of the target, of a round outside the layers, and of each drafted token.
Counted in programs compiled for an H100."""
VERIFY_PASSES = 3
"""Times that verification reads or writes the logits of a position (`rollout/verification`)."""
LOGIT_BYTES = 4
"""A logit is float32."""
DEFAULT_CARD = HARDWARE["h100"]
"""Stands for a device without public figures here. Lengths are chosen by ratios of costs, which
differ less between cards than costs do."""


class NetworkSizes(NamedTuple):
    """Sizes of one pass through a decoder, whole: over all devices that share it."""

    layer_count: int
    weight_bytes: int
    """Bytes of its layers, without experts."""
    expert_bytes: int
    """Bytes of all experts."""
    expert_share: float
    """Share of the experts that a token is sent to. 0: there are none."""
    head_bytes: int
    """Bytes of the output head."""
    vocab_size: int
    """Logits of a position."""
    cache_bytes: int
    """Bytes of keys and values of a position."""
    attention_flops: int
    """Operations of a query on one key and its value, over all layers."""
    embed_size: int
    dtype_bytes: int
    """Bytes of a number."""


class GeneratorDevices(NamedTuple):
    """The devices that generate the rows of a shard."""

    card: Card
    tensor: int = 1
    """Devices that split each weight."""
    expert: int = 1
    """Members that hold the experts between them."""


def find_card_by_kind(kind: str) -> Card | None:
    """The card that JAX calls `kind`. None: it is not known here."""
    return next((card for card in HARDWARE.values() if card.kind == kind), None)


def estimate_round_seconds(
    devices: GeneratorDevices,
    target: NetworkSizes,
    draft: NetworkSizes,
    draft_length: int,
    rows: int,
    context: int,
    draft_reads: int,
) -> float:
    """Seconds of a round.

    Args:
      devices: that generate.
      target: the policy.
      draft: one pass of it for each drafted token.
      draft_length: tokens drafted. 0: a plain decode step.
      rows: in slots.
      context: tokens before each row's next one.
      draft_reads: tokens of a row that the draft reads in its first pass.
    """
    positions = rows * (draft_length + 1)
    verify_bytes = positions * VERIFY_PASSES * target.vocab_size * LOGIT_BYTES / devices.tensor
    seconds = _pass_seconds(devices, target, positions, positions, rows, context)
    seconds += verify_bytes / (BANDWIDTH_SHARE * devices.card.bandwidth)
    kernels = target.layer_count * LAYER_KERNELS + OTHER_KERNELS + draft_length * DRAFT_KERNELS
    if draft_length:
        seconds += _pass_seconds(devices, draft, rows * draft_reads, rows, rows, context)
        seconds += (draft_length - 1) * _pass_seconds(devices, draft, rows, rows, rows, context)
    return seconds + kernels * LAUNCH_SECONDS


def _pass_seconds(
    devices: GeneratorDevices,
    network: NetworkSizes,
    positions: int,
    head_positions: int,
    rows: int,
    context: int,
) -> float:
    """Seconds of a pass over `positions` tokens of `rows` rows, `head_positions` of which get
    logits."""
    card, tensor_size = devices.card, devices.tensor
    expert_fraction = min(1.0, positions * devices.expert * network.expert_share)
    read_bytes = network.weight_bytes + network.expert_bytes * expert_fraction / devices.expert
    used_bytes = network.weight_bytes + network.expert_bytes * network.expert_share
    products = [
        (read_bytes, 2 * positions * used_bytes / network.dtype_bytes),
        (network.head_bytes, 2 * head_positions * network.head_bytes / network.dtype_bytes),
        (rows * context * network.cache_bytes, positions * context * network.attention_flops),
    ]
    # a product waits for its weights or for the tensor cores, whichever takes longer
    seconds = sum(
        max(byte_count / (BANDWIDTH_SHARE * card.bandwidth), operations / (PEAK_SHARE * card.peak))
        / tensor_size
        for byte_count, operations in products
    )
    if tensor_size > 1:
        # each layer adds up two products over the devices
        reduced_bytes = (
            2 * network.layer_count * positions * network.embed_size * network.dtype_bytes
        )
        seconds += (
            2 * network.layer_count * LAUNCH_SECONDS
            + 2 * reduced_bytes * (tensor_size - 1) / tensor_size / card.link
        )
    return seconds
