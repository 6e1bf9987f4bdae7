"""Seconds that a round of generation takes on a card, by its public figures: bytes that are read,
operations of products, and kernels that are launched."""

from typing import NamedTuple

from jaxspec.compiled.hardware import HARDWARE, Card

BANDWIDTH, PEAK = 0.85, 0.65
"""Shares of a card's public figures that decoding reaches. Measured on an H100."""
LAUNCH = 2.85e-6
"""Seconds that each kernel adds by being launched. Measured on an H100."""
LAYER_KERNELS, OTHER_KERNELS, DRAFT_KERNELS = 16, 103, 59
"""Kernels of a layer of the target, of a round outside the layers, and of each drafted token.
Counted in programs compiled for an H100."""
VERIFY_PASSES = 3
"""Times that verification reads or writes the logits of a position (`rollout/verification`)."""
LOGIT_BYTES = 4
"""A logit is float32."""
UNKNOWN = HARDWARE["h100"]
"""Stands for a device without public figures here. Lengths are chosen by ratios of costs, which
differ less between cards than costs do."""


class Network(NamedTuple):
    """Sizes of one pass through a decoder, whole: over all devices that share it."""

    layers: int
    weights: int
    """Bytes of its layers, without experts."""
    experts: int
    """Bytes of all experts."""
    expert_share: float
    """Share of the experts that a token is sent to. 0: there are none."""
    head: int
    """Bytes of the output head."""
    vocab: int
    """Logits of a position."""
    cache: int
    """Bytes of keys and values of a position."""
    attention: int
    """Operations of a query on one key and its value, over all layers."""
    embed: int
    width: int
    """Bytes of a number."""


class Devices(NamedTuple):
    """The devices that generate the rows of a shard."""

    card: Card
    tensor: int = 1
    """Devices that split each weight."""
    expert: int = 1
    """Members that hold the experts between them."""


def card_of_kind(kind: str) -> Card | None:
    """The card that JAX calls `kind`. None: it is not known here."""
    return next((card for card in HARDWARE.values() if card.kind == kind), None)


def round_seconds(
    devices: Devices,
    target: Network,
    draft: Network,
    length: int,
    rows: int,
    context: int,
    reads: int,
) -> float:
    """Seconds of a round.

    Args:
      devices: that generate.
      target: the policy.
      draft: one pass of it for each drafted token.
      length: tokens drafted. 0: a plain decode step.
      rows: in slots.
      context: tokens before each row's next one.
      reads: tokens of a row that the draft reads in its first pass.
    """
    block = rows * (length + 1)
    verify = block * VERIFY_PASSES * target.vocab * LOGIT_BYTES / devices.tensor
    seconds = _pass(devices, target, block, block, rows, context)
    seconds += verify / (BANDWIDTH * devices.card.bandwidth)
    kernels = target.layers * LAYER_KERNELS + OTHER_KERNELS + length * DRAFT_KERNELS
    if length:
        seconds += _pass(devices, draft, rows * reads, rows, rows, context)
        seconds += (length - 1) * _pass(devices, draft, rows, rows, rows, context)
    return seconds + kernels * LAUNCH


def _pass(
    devices: Devices, network: Network, positions: int, heads: int, rows: int, context: int
) -> float:
    """Seconds of a pass over `positions` tokens of `rows` rows, `heads` of which get logits."""
    card, split = devices.card, devices.tensor
    touched = min(1.0, positions * devices.expert * network.expert_share)
    read = network.weights + network.experts * touched / devices.expert
    used = network.weights + network.experts * network.expert_share
    products = [
        (read, 2 * positions * used / network.width),
        (network.head, 2 * heads * network.head / network.width),
        (rows * context * network.cache, positions * context * network.attention),
    ]
    # a product waits for its weights or for the tensor cores, whichever takes longer
    seconds = sum(
        max(size / (BANDWIDTH * card.bandwidth), operations / (PEAK * card.peak)) / split
        for size, operations in products
    )
    if split > 1:
        # each layer adds up two products over the devices
        sent = 2 * network.layers * positions * network.embed * network.width
        seconds += 2 * network.layers * LAUNCH + 2 * sent * (split - 1) / split / card.link
    return seconds
