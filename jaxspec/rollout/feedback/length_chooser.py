"""How many tokens the next round drafts: the length of most expected tokens a second, by what was
accepted so far and a cost table.

Chosen before anything is drafted, from earlier rounds only, by the same arithmetic on every
process: sampling stays exact, and `tensor` peers agree. Now and then the next longer draft is
tried, for at most `EXPLORATION_SHARE` of the seconds that the best rounds took.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.compiled.roofline import GeneratorDevices, NetworkSizes, estimate_round_seconds
from jaxspec.models.attention import BLOCK
from jaxspec.models.decoder import Decoder
from jaxspec.state import RUNNING, AcceptanceEstimate, LengthChooser, Statistics

MAX_LOOPS = 3
"""Loops of ever fewer slots that a cost table has room for."""
EXPLORATION_SHARE = 0.01
"""Seconds that trying longer drafts may cost, over those of the rounds that seemed best."""
DECAY = 0.5
"""Weight of what was known before each call in which drafts were offered: draft and policy move."""
TIMINGS_PER_COST = 3
"""Times that a cost is timed in real work: the first may meet other work of the machine."""
PRIOR_RATE, PRIOR_DRAFTS = 0.8, 1.0
"""Conditional acceptance of a draft of which nothing is known, and how many drafts' word that is
worth."""


def context_buckets(max_length: int) -> tuple[int, ...]:
    """Last position of each context bucket: four times as long as the one before, and the longest
    there can be."""
    bucket_ends = [BLOCK * 4**power for power in range(12) if BLOCK * 4**power < max_length]
    return (*bucket_ends, max_length)


def init_chooser(lengths: tuple[int, ...], max_length: int) -> LengthChooser:
    """Nothing known of rows of up to `longest` tokens: no cost, and no draft ever offered."""
    zeros = jnp.zeros((lengths[-1],), jnp.float32)
    estimate = AcceptanceEstimate(
        reached=zeros, accepted=zeros, seconds_to_lose=jnp.zeros((), jnp.float32)
    )
    return LengthChooser(
        acceptance=estimate,
        round_cost=jnp.zeros(
            (len(lengths), MAX_LOOPS, len(context_buckets(max_length))), jnp.float32
        ),
    )


def update_chooser(chooser: LengthChooser, statistics: Statistics) -> LengthChooser:
    """Adds a call, over all rows of the mesh."""
    previous = chooser.acceptance
    reached, accepted = (
        jnp.sum(leaf, axis=0, dtype=jnp.float32)
        for leaf in (statistics.reached, statistics.accepted)
    )
    has_drafts = reached[0] > 0
    # A call that drafted has spent what there was; plain rounds earn, as many as a row took on
    # average, which is fewer than its shard's.
    plain_rounds = jnp.mean((statistics.rounds - statistics.draft_rounds[:, 0]).astype(jnp.float32))
    estimate = AcceptanceEstimate(
        reached=jnp.where(has_drafts, DECAY * previous.reached + reached, previous.reached),
        accepted=jnp.where(has_drafts, DECAY * previous.accepted + accepted, previous.accepted),
        seconds_to_lose=jnp.where(
            has_drafts,
            0,
            previous.seconds_to_lose
            + EXPLORATION_SHARE * chooser.round_cost[0, 0, 0] * plain_rounds,
        ),
    )
    return chooser.replace(acceptance=estimate)


def expected_tokens(estimate: AcceptanceEstimate, lengths: tuple[int, ...]) -> Float[Array, " A"]:
    """Tokens a round of each length is expected to keep, its next_token included.

    Depths never reached are taken to do as well as the one before: a length is tried when that
    would make it pay.
    """
    rates, rate = [], jnp.float32(PRIOR_RATE)
    for depth in range(estimate.accepted.shape[0]):
        rate = (estimate.accepted[depth] + PRIOR_DRAFTS * rate) / (
            estimate.reached[depth] + PRIOR_DRAFTS
        )
        rates.append(rate)
    by_depth = 1 + jnp.concatenate(
        [jnp.zeros((1,), jnp.float32), jnp.cumsum(jnp.cumprod(jnp.stack(rates)))]
    )
    return by_depth[np.asarray(lengths)]


class LengthChoice(NamedTuple):
    """What the next round drafts, by what is known before it and nothing else: where a slice of
    generation ends must not matter."""

    length_index: Int[Array, ""]
    """In the lengths, ascending: the best, or the next longer one when there are seconds to lose
    on it."""
    seconds_to_lose: Float[Array, ""]
    """What is left of them once the round is made: earned by the best, spent by the longer one."""


def choose_length(
    estimate: AcceptanceEstimate, cost: Float[Array, " A"], lengths: tuple[int, ...]
) -> LengthChoice:
    """The length of the next round.

    Args:
      estimate: of the draft's acceptance so far.
      cost: seconds of a round of each length, at the slots and the context of the next one.
      lengths: that are compiled, ascending.
    """
    best = jnp.argmax(expected_tokens(estimate, lengths) / cost).astype(jnp.int32)
    longer = jnp.minimum(best + 1, len(lengths) - 1)
    extra_seconds = jnp.maximum(cost[longer] - cost[best], 0)  # as if it kept no more than the best
    tries_longer = (longer > best) & (estimate.seconds_to_lose >= extra_seconds)
    seconds_left = jnp.where(
        tries_longer,
        estimate.seconds_to_lose - extra_seconds,
        estimate.seconds_to_lose + EXPLORATION_SHARE * cost[best],
    )
    return LengthChoice(jnp.where(tries_longer, longer, best), seconds_left)


# ---- costs


class TimedCosts:
    """A cost table that seconds of real calls correct, on the host.

    Costs that were not timed follow those of the same length. A length that was never timed
    follows every other: predictions are better in ratios than in seconds.
    """

    def __init__(self, table: Float[np.ndarray, "A S C"], final: bool = False) -> None:
        """`final`: it was timed already, and no cost is due."""
        self.table = np.array(table, np.float32)
        self._calls: np.ndarray = np.full(table.shape, TIMINGS_PER_COST if final else 0)
        self._short = np.full(table.shape, np.inf)
        self._long = np.full(table.shape, np.inf)

    def next_length_index(self, loop: int, context: int, retime: bool = True) -> int | None:
        """Place of the length to time there next. With `retime`, also one that was timed before."""
        calls = self._calls[:, loop, context]
        length_index = int(np.argmin(calls))
        return length_index if calls[length_index] < (TIMINGS_PER_COST if retime else 1) else None

    def add_timing(
        self, index: tuple[int, int, int], short_seconds: float, long_seconds: float, rounds: int
    ) -> None:
        """Takes the seconds of two calls at a place of the table.

        Args:
          index: places of the length, the loop and the context.
          short_seconds: seconds of the call of fewer rounds.
          long_seconds: seconds of the call of more rounds, none of them the first of its length.
          rounds: that the longer call makes more.
        """
        # others' work only ever adds
        short_seconds = self._short[index] = min(short_seconds, self._short[index])
        long_seconds = self._long[index] = min(long_seconds, self._long[index])
        seconds = round_seconds(short_seconds, long_seconds, rounds)
        other_timed = (self._calls > 0).any(axis=(1, 2)) & (np.arange(len(self._calls)) != index[0])
        follows = (self._calls == 0) & ~other_timed[:, None, None]
        self.table *= np.where(follows, np.float32(seconds / self.table[index]), np.float32(1))
        self.table[index] = seconds
        self._calls[index] += 1

    @property
    def has_all_lengths(self) -> bool:
        """Whether every length was timed somewhere."""
        return bool((self._calls > 0).any(axis=(1, 2)).all())


def round_seconds(short_seconds: float, long_seconds: float, rounds: int) -> float:
    """Seconds of a round, by those of two calls of which the longer makes `rounds` more."""
    # where they are as long, a round is less than what calls differ by
    return (
        (long_seconds - short_seconds) / rounds
        if long_seconds > short_seconds
        else long_seconds / (1 + rounds)
    )


def single_length_cost(shape: tuple[int, ...], length_index: int) -> np.ndarray:
    """Costs by which every round has one length."""
    cost = np.full(shape, 1e6, np.float32)
    cost[length_index] = 1e-6
    return cost


def summarize_load(
    status: Int[Array, " R"],
    lengths: Int[Array, " R"],
    prompt_lengths: Int[Array, " R"],
    waiting: Bool[Array, " R"],
    shards: int,
) -> Int[Array, " 3"]:
    """Rows left on the shard with most, the longest row in a slot, and whether one was evicted."""
    running = status == RUNNING
    most_rows = jnp.max(jnp.sum(running.reshape(shards, -1), axis=1, dtype=jnp.int32))
    longest = jnp.max(jnp.where(running & ~waiting, lengths, 0))
    has_evicted = jnp.any(running & waiting & (lengths > prompt_lengths))
    return jnp.stack([most_rows, longest, has_evicted.astype(jnp.int32)])


def predict_costs(
    devices: GeneratorDevices,
    target: Decoder,
    network: Any,
    lengths: tuple[int, ...],
    slots: tuple[int, ...],
    max_length: int,
) -> np.ndarray:
    """Predicts seconds of a round by draft length, number of slots and context.

    Args:
      devices: that generate the rows of a shard.
      target: the policy as generation reads it, or its shapes.
      network: of the draft, likewise.
      lengths: among which rounds choose.
      slots: of each loop, most first.
      max_length: tokens of the longest row.
    """
    policy = _network_sizes(target)
    draft = _network_sizes(network, policy.head_bytes)
    slot_counts = (*slots, *slots[-1:] * MAX_LOOPS)[:MAX_LOOPS]
    # a small model has yet to read two tokens before it drafts, a head the block of a round
    read_tokens = [2 if isinstance(network, Decoder) else length + 1 for length in lengths]

    def predict_seconds(length_index: int, rows: int, context: int) -> float:
        return estimate_round_seconds(
            devices, policy, draft, lengths[length_index], rows, context, read_tokens[length_index]
        )

    table = [
        [
            [
                predict_seconds(length_index, rows, context)
                for context in context_buckets(max_length)
            ]
            for rows in slot_counts
        ]
        for length_index in range(len(lengths))
    ]
    return np.asarray(table, np.float32)


def _network_sizes(network: Any, target_head: int = 0) -> NetworkSizes:
    """Sizes of a pass through a decoder or a draft, by the shapes of its weights."""
    config, depth = network.config, getattr(network, "depth", 1)
    size = {"layers": 0, "experts": 0, "head": 0, "embedding": 0}
    width = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(network):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue  # ids of a draft's own vocabulary
        path_names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        weight_group = next(
            (name for name in path_names if name in ("head", "embedding")), "layers"
        )
        size_key = (
            "experts" if any(name.startswith("expert_") for name in path_names) else weight_group
        )
        width = leaf.dtype.itemsize
        size[size_key] += leaf.size * width
    layers, family = config.layers // depth, config.family
    is_tied = isinstance(network, Decoder) and network.head is None
    # an embedding that is not the head is read for a few tokens alone
    head_bytes = size["embedding"] if is_tied else size["head"] or target_head
    return NetworkSizes(
        layer_count=layers,
        weight_bytes=size["layers"] // depth,
        expert_bytes=size["experts"] // depth,
        expert_share=family.experts_per_token / family.experts if size["experts"] else 0.0,
        head_bytes=head_bytes,
        vocab_size=config.vocab,
        cache_bytes=2 * layers * config.kv_heads * config.head_size * width,
        attention_flops=4 * layers * config.heads * config.head_size,
        embed_size=config.embed,
        dtype_bytes=width,
    )
