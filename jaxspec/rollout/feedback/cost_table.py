"""Table of what rounds cost, by draft length, slots and context.

The costs are predicted, measured by a pilot, or timed. `length_chooser.py` chooses by them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.compiled.roofline import GeneratorDevices, NetworkSizes, estimate_round_seconds
from jaxspec.models.attention import BLOCK
from jaxspec.models.decoder import Decoder
from jaxspec.state import RUNNING

MAX_LOOPS = 3
"""Maximum number of loops, of fewer slots each, in a cost table."""
# Other work of the machine may slow the first timing.
TIMINGS_PER_COST = 3
"""Number of timings of each cost in real calls."""


def context_buckets(max_length: int) -> tuple[int, ...]:
    """Returns the last position of each context bucket.

    Each ends at four times the position of the one before. The last one ends at `max_length`.
    """
    bucket_ends = [BLOCK * 4**power for power in range(12) if BLOCK * 4**power < max_length]
    return (*bucket_ends, max_length)


def find_context_index(longest: Any, max_length: int) -> Any:
    """Returns the bucket of the longest row's length, a number or an array."""
    return sum(longest > bucket_end for bucket_end in context_buckets(max_length)[:-1])


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
