"""Roofline model of generation rounds.

Counts bytes read, operations of matrix products, and kernel launches.
"""

from typing import NamedTuple

from jaxspec.compiled.hardware import HARDWARE, Card

# Measured on an H100.
BANDWIDTH_SHARE, PEAK_SHARE = 0.85, 0.65
"""Fractions of a card's public bandwidth and peak that decoding reaches."""
# Measured on an H100.
LAUNCH_SECONDS = 2.85e-6
"""Seconds that each kernel launch adds."""
# From docs/benchmarks.md: a round of 36 layers starts 570 kernels plain, and 692 with 3 drafts.
LAYER_KERNELS, OTHER_KERNELS, DRAFT_KERNELS = 14, 66, 41
"""Kernels per target layer, per round outside the layers, and per drafted token."""
VERIFY_PASSES = 3
"""Times that verification reads or writes the logits (`rollout/verification`)."""
LOGIT_BYTES = 4
"""Bytes of a float32 logit."""
# Draft lengths are chosen by ratios of costs, which differ less between cards than the costs.
DEFAULT_CARD = HARDWARE["h100"]
"""Card that stands for devices without public figures here."""


class NetworkSizes(NamedTuple):
    """Sizes of a decoder, summed over its devices."""

    layer_count: int
    weight_bytes: int
    """Bytes of the layers without experts."""
    expert_bytes: int
    """Bytes of all experts."""
    expert_share: float
    """Fraction of the experts that a token is routed to. 0 without experts."""
    head_bytes: int
    """Bytes of the output head."""
    vocab_size: int
    """Logits per position."""
    cache_bytes: int
    """Bytes of keys and values per position."""
    attention_flops: int
    """Operations per pair of query and key, over all layers."""
    embed_size: int
    dtype_bytes: int
    """Bytes of a weight or activation."""


class GeneratorDevices(NamedTuple):
    """Devices that generate the rows of one data shard."""

    card: Card
    tensor: int = 1
    """Size of the tensor axis, which splits each weight."""
    expert: int = 1
    """Size of the expert axis, which distributes the experts."""


def find_card_by_kind(kind: str) -> Card | None:
    """Finds a card by JAX's `device_kind`, if known."""
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
    """Estimates the seconds of a round.

    Args:
      devices: devices that generate the rows.
      target: sizes of the policy.
      draft: sizes of the draft, which makes one pass per drafted token.
      draft_length: number of drafted tokens. 0 means a plain decode step.
      rows: number of rows in slots.
      context: number of tokens before each row's next token.
      draft_reads: number of tokens per row that the draft's first pass reads.
    """
    # Verification reads the drafted tokens and the one before them.
    positions = rows * (draft_length + 1)
    verify_bytes = positions * VERIFY_PASSES * target.vocab_size * LOGIT_BYTES / devices.tensor
    seconds = _pass_seconds(devices, target, positions, positions, rows, context)
    seconds += verify_bytes / (BANDWIDTH_SHARE * devices.card.bandwidth)
    if draft_length:
        seconds += _pass_seconds(devices, draft, rows * draft_reads, rows, rows, context)
        seconds += (draft_length - 1) * _pass_seconds(devices, draft, rows, rows, rows, context)
    return seconds + count_kernels(target.layer_count, draft_length) * LAUNCH_SECONDS


def count_kernels(layer_count: int, draft_length: int) -> int:
    """Counts the kernels that a round starts."""
    return layer_count * LAYER_KERNELS + OTHER_KERNELS + draft_length * DRAFT_KERNELS


def _pass_seconds(
    devices: GeneratorDevices,
    network: NetworkSizes,
    positions: int,
    head_positions: int,
    rows: int,
    context: int,
) -> float:
    """Estimates the seconds of one pass.

    It reads `positions` tokens of `rows` rows, `head_positions` of which get logits.
    """
    card, tensor_size = devices.card, devices.tensor
    # An upper bound on the experts that are read: tokens may share experts. Tokens of all members
    # of the expert axis count, since each expert serves all of them.
    expert_fraction = min(1.0, positions * devices.expert * network.expert_share)
    read_bytes = network.weight_bytes + network.expert_bytes * expert_fraction / devices.expert
    # A token is multiplied with its own experts only.
    used_bytes = network.weight_bytes + network.expert_bytes * network.expert_share
    products = [
        (read_bytes, 2 * positions * used_bytes / network.dtype_bytes),
        (network.head_bytes, 2 * head_positions * network.head_bytes / network.dtype_bytes),
        # The positions of a row share one read of its keys and values.
        (rows * context * network.cache_bytes, positions * context * network.attention_flops),
    ]
    # A product waits for its weights or for the tensor cores, whichever takes longer.
    seconds = sum(
        max(byte_count / (BANDWIDTH_SHARE * card.bandwidth), operations / (PEAK_SHARE * card.peak))
        / tensor_size
        for byte_count, operations in products
    )
    if tensor_size > 1:
        # Each layer has two all-reduces, after attention and after the feed-forward block. A ring
        # sends (n - 1) / n of the bytes twice.
        reduced_bytes = (
            2 * network.layer_count * positions * network.embed_size * network.dtype_bytes
        )
        seconds += (
            2 * network.layer_count * LAUNCH_SECONDS
            + 2 * reduced_bytes * (tensor_size - 1) / tensor_size / card.link
        )
    return seconds
