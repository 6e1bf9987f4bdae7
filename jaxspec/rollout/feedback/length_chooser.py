"""Choice of the draft length of each round.

A round takes the length with the most expected tokens per second. The expectation comes from the
acceptance so far, and the seconds from a table of round costs. Sometimes a round tries the next
longer draft, for at most `EXPLORATION_SHARE` of the seconds of the best rounds.

A length is chosen before the round drafts and depends on earlier rounds only, so sampling stays
exact. All processes compute the same choice, so `tensor` peers agree.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.compiled.roofline import GeneratorDevices, NetworkSizes, estimate_round_seconds
from jaxspec.models.attention import BLOCK
from jaxspec.models.decoder import Decoder
from jaxspec.state import RUNNING, AcceptanceEstimate, LengthChooser, NoChooser, Statistics

MAX_LOOPS = 3
"""Maximum number of loops, of fewer slots each, in a cost table."""
EXPLORATION_SHARE = 0.01
"""Seconds that trying longer drafts may cost, as a share of the seconds of the best rounds."""
# Draft and policy change from call to call, so earlier calls count less.
DECAY = 0.5
"""Weight of the earlier estimate after each call that offered drafts."""
# Other work of the machine may slow the first timing.
TIMINGS_PER_COST = 3
"""Number of timings of each cost in real calls."""
PRIOR_RATE, PRIOR_DRAFTS = 0.8, 1.0
"""Prior conditional acceptance rate of a draft, and the number of drafts that it counts as."""


def context_buckets(max_length: int) -> tuple[int, ...]:
    """Returns the last position of each context bucket.

    Each ends at four times the position of the one before. The last one ends at `max_length`.
    """
    bucket_ends = [BLOCK * 4**power for power in range(12) if BLOCK * 4**power < max_length]
    return (*bucket_ends, max_length)


def init_chooser(lengths: tuple[int, ...], max_length: int) -> LengthChooser:
    """Returns a chooser without costs or acceptance, for rows of up to `max_length` tokens."""
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
    """Updates the chooser with the statistics of all rows of a call."""
    previous = chooser.acceptance
    reached, accepted = (
        jnp.sum(leaf, axis=0, dtype=jnp.float32)
        for leaf in (statistics.reached, statistics.accepted)
    )
    has_drafts = reached[0] > 0
    # A call that drafted has used its budget up. Plain rounds earn budget for the next call. Their
    # number is the mean over rows, which is less than the number of rounds of a shard.
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
    """Returns the expected tokens of a round of each length.

    The next token counts too.
    """
    # The prior of a depth is the rate of the depth before. A length that was never tried is thus
    # tried if it would pay at that rate.
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


class FixedLength(NamedTuple):
    """One draft length for all rounds."""

    length: int

    def init_estimate(self) -> AcceptanceEstimate:
        """Returns zeros, since no length is chosen."""
        zeros = jnp.zeros((1, self.length), jnp.float32)
        return AcceptanceEstimate(
            reached=zeros, accepted=zeros, seconds_to_lose=jnp.zeros((1,), jnp.float32)
        )


class ChosenLengths(NamedTuple):
    """Draft lengths that each round chooses from."""

    lengths: tuple[int, ...]
    """Compiled lengths, ascending."""
    chooser: LengthChooser

    def init_estimate(self) -> AcceptanceEstimate:
        """Returns the acceptance before the call."""
        return jax.tree.map(lambda leaf: leaf[None], self.chooser.acceptance)


def lengths_of_rounds(
    chooser: LengthChooser | NoChooser, lengths: tuple[int, ...], max_length: int
) -> FixedLength | ChosenLengths:
    """Returns the draft lengths of rounds.

    Args:
      chooser: data to choose by.
      lengths: lengths to choose from, or none.
      max_length: length of all rounds if there is no choice.

    Raises:
      ValueError: there are lengths to choose from, but no chooser.
    """
    if not lengths:
        return FixedLength(max_length)
    if isinstance(chooser, NoChooser):
        raise ValueError(f"rounds of {lengths} tokens need a chooser: add one to the drafter")
    return ChosenLengths(lengths, chooser)


class LengthChoice(NamedTuple):
    """Draft length of the next round.

    It does not depend on where slices of generation end.
    """

    length_index: Int[Array, ""]
    """Index of the best length, or of the next longer one if the budget suffices."""
    seconds_to_lose: Float[Array, ""]
    """Budget after the round. The best length adds to it, and the longer one uses it."""


def choose_length(
    estimate: AcceptanceEstimate, cost: Float[Array, " A"], lengths: tuple[int, ...]
) -> LengthChoice:
    """Chooses the length of the next round.

    Args:
      estimate: acceptance of the draft so far.
      cost: seconds of a round of each length, at the slots and context of the next round.
      lengths: compiled lengths, ascending.
    """
    best = jnp.argmax(expected_tokens(estimate, lengths) / cost).astype(jnp.int32)
    longer = jnp.minimum(best + 1, len(lengths) - 1)
    # At worst the longer draft keeps no more tokens than the best length.
    extra_seconds = jnp.maximum(cost[longer] - cost[best], 0)
    tries_longer = (longer > best) & (estimate.seconds_to_lose >= extra_seconds)
    seconds_left = jnp.where(
        tries_longer,
        estimate.seconds_to_lose - extra_seconds,
        estimate.seconds_to_lose + EXPLORATION_SHARE * cost[best],
    )
    return LengthChoice(jnp.where(tries_longer, longer, best), seconds_left)


# ---- costs


class TimedCosts:
    """Cost table on the host, corrected by timings of real calls.

    Costs without a timing are scaled with timings of the same length. A length without any timing
    is scaled with those of other lengths.
    """

    def __init__(self, table: Float[np.ndarray, "A S C"], final: bool = False) -> None:
        """Creates the table.

        Args:
          table: seconds of a round, by length, loop and context.
          final: whether the table is from an earlier run, and is not timed again.
        """
        self.table = np.array(table, np.float32)
        self._calls: np.ndarray = np.full(table.shape, TIMINGS_PER_COST if final else 0)
        self._short = np.full(table.shape, np.inf)
        self._long = np.full(table.shape, np.inf)

    def next_length_index(self, loop: int, context: int, retime: bool = True) -> int | None:
        """Returns the index of the length to time next, None if all are timed.

        Each length is timed `TIMINGS_PER_COST` times. Without `retime`, once is enough.
        """
        calls = self._calls[:, loop, context]
        length_index = int(np.argmin(calls))
        return length_index if calls[length_index] < (TIMINGS_PER_COST if retime else 1) else None

    def add_timing(
        self, index: tuple[int, int, int], short_seconds: float, long_seconds: float, rounds: int
    ) -> None:
        """Adds a timing of one cost, made of two calls.

        Args:
          index: index of the length, the loop and the context.
          short_seconds: seconds of the call of fewer rounds.
          long_seconds: seconds of the call of more rounds. None of its rounds may be the first of
            its length.
          rounds: number of rounds that the longer call has more.
        """
        # Other work of the machine only adds time, so the minimum is the best estimate.
        short_seconds = self._short[index] = min(short_seconds, self._short[index])
        long_seconds = self._long[index] = min(long_seconds, self._long[index])
        seconds = compute_round_seconds(short_seconds, long_seconds, rounds)
        other_timed = (self._calls > 0).any(axis=(1, 2)) & (np.arange(len(self._calls)) != index[0])
        # Predictions are better as ratios than as seconds, so costs without a timing are scaled by
        # the same factor.
        follows = (self._calls == 0) & ~other_timed[:, None, None]
        self.table *= np.where(follows, np.float32(seconds / self.table[index]), np.float32(1))
        self.table[index] = seconds
        self._calls[index] += 1

    @property
    def has_all_lengths(self) -> bool:
        """Whether every length has a timing."""
        return bool((self._calls > 0).any(axis=(1, 2)).all())


def compute_round_seconds(short_seconds: float, long_seconds: float, rounds: int) -> float:
    """Returns the seconds of a round, from two calls.

    The longer call has `rounds` rounds more.
    """
    # If the longer call was not slower, a round takes less than the noise of the timings.
    return (
        (long_seconds - short_seconds) / rounds
        if long_seconds > short_seconds
        else long_seconds / (1 + rounds)
    )


def single_length_cost(shape: tuple[int, ...], length_index: int) -> np.ndarray:
    """Returns costs that make every round choose one length."""
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
    """Returns the load of the shards.

    The first number is the running rows of the shard with the most. The second is the tokens of the
    longest row in a slot. The third is 1 if a row was evicted and waits, else 0.
    """
    running = status == RUNNING
    most_rows = jnp.max(jnp.sum(running.reshape(shards, -1), axis=1, dtype=jnp.int32))
    longest = jnp.max(jnp.where(running & ~waiting, lengths, 0))
    # A row that waits with tokens had a slot before.
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
    """Predicts seconds of a round, by draft length, slots and context.

    Args:
      devices: devices that generate the rows of a shard.
      target: policy in the rollout layout, or its shapes.
      network: network of the draft, or its shapes.
      lengths: draft lengths that rounds choose from.
      slots: slots of each loop, descending.
      max_length: maximum tokens of a row.
    """
    policy = _network_sizes(target)
    draft = _network_sizes(network, policy.head_bytes)
    # A table has `MAX_LOOPS` loops. Missing ones cost as much as the last one.
    slot_counts = (*slots, *slots[-1:] * MAX_LOOPS)[:MAX_LOOPS]
    # Before it drafts, a small model reads two tokens, and a head the block of a round.
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
    """Returns the sizes of a pass through a network, from the shapes of its weights.

    `target_head` is the bytes of the target's head, for networks that have none of their own.
    """
    config, depth = network.config, getattr(network, "depth", 1)
    size = {"layers": 0, "experts": 0, "head": 0, "embedding": 0}
    width = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(network):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue  # Ids of a draft's own vocabulary.
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
    is_tied = isinstance(network, Decoder) and config.tied
    # An embedding that is not the head is read for a few tokens only, and does not count.
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
