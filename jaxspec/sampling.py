"""From logits to tokens: processed log-probabilities and noise that depends on nothing but its
keys."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

TARGET_STREAM, ROUND_STREAM = range(2)
"""Streams of noise of one row: by absolute position, and by committed length at the start of a
round."""

BRANCHES = 32
"""How many weights are cumulated at once when a token is drawn by uniform numbers."""


class Processing(NamedTuple):
    """What turns the target's logits into the distribution it is sampled from: `vocab_size` first,
    then in this order; static in a program."""

    banned: tuple[int, ...] = ()
    """Ids that are never sampled."""
    min_new_tokens: int = 0
    """Tokens a response has before one of `stop_ids` may end it."""
    stop_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    """0: the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the most likely one (arXiv 2407.01082)."""
    vocab_size: int = 0
    """Ids from here on have no token (a published embedding may have more rows than its tokenizer)
    and are never sampled; 0: all have."""


def process_logits(
    logits: Float[Array, "*B V"],
    processing: Processing,
    response_position: Int[Array, "*B"],
    factor: Float[Array, "*#B"] | float = 1.0,
    sampled_ids: Int[Array, "*B"] | None = None,
    may_be_zero: bool = True,
    ids: Int[Array, "*#B V"] | None = None,
) -> Float[Array, "*B V"]:
    """Logits of the sampling distribution, up to a constant; excluded tokens are at -inf. The plain
    case costs nothing.

    Args:
      logits: of a network, over the real vocabulary.
      processing: see `Processing`.
      response_position: response tokens before the one sampled here, for the minimum length.
      factor: the temperature is multiplied by it (a draft may be sharper or flatter than its
        target); an array is one for all positions or broadcasts over them, and may be traced.
      sampled_ids: ids that top-k, top-p and min-p never drop: those known to have been sampled,
        where rounding must not exclude them afterwards.
      may_be_zero: whether a traced `factor` can be 0. If not, no argmax is compiled for it.
      ids: the token of each logit. None: the logits are those of all tokens, in order.
    """

    def token_ids() -> Int[Array, "*#B V"]:
        return jnp.arange(logits.shape[-1], dtype=jnp.int32) if ids is None else ids

    has_ids = ids is not None
    if processing.vocab_size and (has_ids or processing.vocab_size < logits.shape[-1]):
        logits = jnp.where(token_ids() < processing.vocab_size, logits, -jnp.inf)
    if processing.banned:
        logits = jnp.where(_is_member(processing.banned, token_ids()), -jnp.inf, logits)
    if processing.min_new_tokens and processing.stop_ids:
        is_stop = _is_member(processing.stop_ids, token_ids())
        logits = jnp.where(
            is_stop & (response_position < processing.min_new_tokens)[..., None], -jnp.inf, logits
        )
    logits = _apply_temperature(logits, processing.temperature, factor, may_be_zero)
    if 0 < processing.top_k < logits.shape[-1]:
        logits = _drop_below(
            logits, jax.lax.top_k(logits, processing.top_k)[0][..., -1:], sampled_ids
        )
    if processing.top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        # what stands before a token has not reached the sum
        in_nucleus = jnp.cumsum(probs, axis=-1) - probs < processing.top_p
        logits = _drop_below(
            logits,
            jnp.min(jnp.where(in_nucleus, descending, descending[..., :1]), axis=-1, keepdims=True),
            sampled_ids,
        )
    if processing.min_p > 0:
        largest = jnp.max(logits, axis=-1, keepdims=True)
        logits = _drop_below(logits, largest + math.log(processing.min_p), sampled_ids)
    return logits


def _is_member(members: tuple[int, ...], ids: Int[Array, "*B V"]) -> Bool[Array, "*B V"]:
    """Whether each id is among the chosen."""
    return jnp.isin(ids, jnp.asarray(members, jnp.int32))


def _drop_below(
    logits: Float[Array, "*B V"],
    threshold: Float[Array, "*B 1"],
    sampled_ids: Int[Array, "*B"] | None,
) -> Float[Array, "*B V"]:
    """Drops what is below `threshold`; tokens tied with it stay, and so do NaNs, which must be
    seen."""
    is_below = logits < threshold
    if sampled_ids is not None:
        is_below &= jnp.arange(logits.shape[-1], dtype=jnp.int32) != sampled_ids[..., None]
    return jnp.where(is_below, -jnp.inf, logits)


def _apply_temperature(
    logits: Float[Array, "*B V"],
    temperature: float,
    factor: Float[Array, "*#B"] | float,
    may_be_zero: bool,
) -> Float[Array, "*B V"]:
    """Logits over temperature x factor; at 0, all mass on the largest."""
    if not isinstance(factor, jax.Array):
        product = temperature * factor
        if product == 1:
            return logits
        return logits / product if product > 0 else _greedy_logits(logits)
    products = jnp.asarray(temperature * factor, logits.dtype)[..., None]
    if temperature > 0 and not may_be_zero:
        return logits / products
    return jnp.where(
        products > 0, logits / jnp.where(products > 0, products, 1), _greedy_logits(logits)
    )


def _greedy_logits(logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """0 at the (first) largest logit; -inf, and NaN for NaN, elsewhere. Where every token is
    excluded, none is the largest."""
    is_largest = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32) == jnp.arange(
        logits.shape[-1], dtype=jnp.int32
    )
    is_largest &= logits > -jnp.inf
    return jnp.where(
        jnp.isnan(logits), logits, jnp.where(is_largest, jnp.zeros_like(logits), -jnp.inf)
    )


def compute_logprobs(
    logits: Float[Array, "*B V"],
    processing: Processing,
    response_position: Int[Array, "*B"],
    factor: Float[Array, "*#B"] | float = 1.0,
    sampled_ids: Int[Array, "*B"] | None = None,
    may_be_zero: bool = True,
) -> Float[Array, "*B V"]:
    """Log-probabilities of the sampling distribution; see `process_logits`."""
    processed = process_logits(
        logits, processing, response_position, factor, sampled_ids, may_be_zero
    )
    return jax.nn.log_softmax(processed, axis=-1)


def promote_logits(logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """Casts logits to at least float32, in which they are compared."""
    return logits.astype(np.promote_types(logits.dtype, np.float32))


def scatter_to_vocabulary(
    logits: Float[Array, "*B W"], ids: Int[Array, " W"] | None, vocab: int
) -> Float[Array, "*B V"]:
    """Logits over all `vocab` tokens, of those of the tokens `ids`; -inf for the others."""
    if ids is None:
        return logits
    full_logits = jnp.full((*logits.shape[:-1], vocab), -jnp.inf, logits.dtype)
    return full_logits.at[..., ids].set(logits, indices_are_sorted=True, unique_indices=True)


def entropy(logprobs: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Entropy in nats; tokens of probability 0 count nothing."""
    is_possible = logprobs != -jnp.inf
    return -jnp.sum(
        jnp.where(is_possible, jnp.exp(logprobs) * jnp.where(is_possible, logprobs, 0), 0), axis=-1
    )


def row_keys(key: Key[Array, ""], rows: Int[Array, " B"], stream: int) -> Key[Array, " B"]:
    """One key for each global row number, the same on every mesh."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), stream))(rows)


def position_keys(
    keys: Key[Array, " B"], positions: Int[Array, " B"], count: int
) -> Key[Array, "B count"]:
    """Keys by (row, absolute position), for `count` positions from each row's own."""
    offsets = jnp.arange(count, dtype=jnp.int32)
    return jax.vmap(
        lambda key, position: jax.vmap(jax.random.fold_in, (None, 0))(key, position + offsets)
    )(keys, positions)


def gumbel_noise(keys: Key[Array, "B T"], vocab: int, dtype: jnp.dtype) -> Float[Array, "B T V"]:
    """Standard Gumbel noise, one vector over the vocabulary for each key.

    Of float32's 23 bits alone the largest noise would be 16, and a token of probability 1e-7 would
    be drawn half as often as it should.
    """
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), dtype, mode="high")))(
        keys
    )


def uniform_numbers(
    keys: Key[Array, " B"], positions: Int[Array, "B T"], count: int, dtype: jnp.dtype
) -> Float[Array, "B T count"]:
    """`count` independent uniform numbers in (0, 1) for each place of each row: Threefry-2x32 of
    (place, number) under the row's key.

    They are the middles of 2^23 equal bins in float32, of 2^52 in float64: a 0 would draw the first
    token that is possible, however rare. `jax.random` would take a chain of small loops for a few
    numbers, which on a CPU is as long as the forward pass of a small model.
    """
    key_words = jax.random.key_data(keys)[:, None, None, :2]
    is_float64 = dtype == jnp.float64
    counters = jnp.arange(count if is_float64 else -(-count // 2), dtype=jnp.uint32)
    first, second = threefry(
        key_words[..., 0], key_words[..., 1], positions[:, :, None].astype(jnp.uint32), counters
    )
    if is_float64:
        bits = (first.astype(jnp.uint64) << 32 | second.astype(jnp.uint64)) >> 12
        return (bits.astype(dtype) + 0.5) * 2.0**-52
    pairs = jnp.stack([first, second], axis=-1).reshape(*positions.shape, -1)[:, :, :count]
    return ((pairs >> 9).astype(dtype) + jnp.asarray(0.5, dtype)) * jnp.asarray(2.0**-23, dtype)


def threefry(
    key0: UInt32[Array, "*#B"],
    key1: UInt32[Array, "*#B"],
    first: UInt32[Array, "*#B"],
    second: UInt32[Array, "*#B"],
) -> tuple[UInt32[Array, "*B"], UInt32[Array, "*B"]]:
    """Threefry-2x32 with 20 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC
    2011), element by element."""
    keys = key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA)
    first, second = first + keys[0], second + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            first = first + second
            second = first ^ (second << rotation | second >> (32 - rotation))
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second


class Uniforms(NamedTuple):
    """What one draw takes instead of Gumbel noise: a uniform number in (0, 1) for each level of the
    search for its token."""

    levels: Float[Array, "*B N"]


Noise = Float[Array, "*B V"] | Uniforms
"""What a token is drawn with: standard Gumbel noise, which target and draft can share, or less of
it."""


WeightFunction = Callable[[Int[Array, "*B M"]], Float[Array, "*B M"]]
"""Weights of some tokens of each row."""


def level_count(vocab: int) -> int:
    """Numbers of `Uniforms` that a draw from a vocabulary takes."""
    levels = 1
    while vocab > BRANCHES:
        vocab, levels = -(-vocab // BRANCHES), levels + 1
    return levels


def categorical(logprobs: Float[Array, "*B V"], noise: Noise) -> Int[Array, "*B"]:
    """Draws tokens with probability proportional to exp(logprobs); one of probability 0 is never
    drawn.

    By Gumbel noise the draw is the argmax of the sum, which is what target and draft can share. By
    uniform numbers it is the inverse of the cumulated probabilities, at a fraction of the cost: of
    ever shorter blocks of the vocabulary, down to the token, so that no number has to resolve
    more than `BRANCHES` of them.
    """
    if not isinstance(noise, Uniforms):
        return jnp.argmax(logprobs + noise, axis=-1).astype(jnp.int32)
    return draw_by_weight(jnp.exp(logprobs - jnp.max(logprobs, axis=-1, keepdims=True)), noise)


def draw_by_weight(
    weights: Float[Array, "*B V"], noise: Uniforms, reweigh: WeightFunction | None = None
) -> Int[Array, "*B"]:
    """Draws tokens with probability proportional to `weights`, by the inverse of their cumulated
    sums. `reweigh` computes those of one block anew, so that nobody needs to hold all of them."""
    vocab = weights.shape[-1]
    if vocab <= BRANCHES:
        return _search_cumsum(weights, noise.levels[..., 0])
    blocks = _split_blocks(weights)
    block = draw_by_weight(jnp.sum(blocks, axis=-1), Uniforms(noise.levels[..., 1:]))
    if reweigh is None:
        block_weights = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    else:
        block_weights = weigh_block(reweigh, block, vocab)
    return block * BRANCHES + _search_cumsum(block_weights, noise.levels[..., 0])


def draw_from_either(
    first: Float[Array, "*B V"],
    second: Float[Array, "*B V"],
    prefers_first: Bool[Array, "*B"],
    noise: Uniforms,
    reweigh: tuple[WeightFunction, WeightFunction],
) -> Int[Array, "*B"]:
    """Draws tokens with probability proportional to `first` where it is preferred and has any
    weight, else to `second`, which has some wherever `first` has.

    One pass over both gives the sums of all blocks; `reweigh` computes the weights of the one
    drawn.
    """
    vocab = first.shape[-1]
    if vocab <= BRANCHES:
        use_first = prefers_first & jnp.any(first > 0, axis=-1)
        return _search_cumsum(jnp.where(use_first[..., None], first, second), noise.levels[..., 0])
    sums = [jnp.sum(_split_blocks(weights), axis=-1) for weights in (first, second)]
    use_first = prefers_first & jnp.any(sums[0] > 0, axis=-1)
    block = draw_by_weight(jnp.where(use_first[..., None], *sums), Uniforms(noise.levels[..., 1:]))
    block_weights = [weigh_block(weigh, block, vocab) for weigh in reweigh]
    # Weights that were next to nothing may be nothing when they are computed again.
    use_first &= jnp.any(block_weights[0] > 0, axis=-1)
    return block * BRANCHES + _search_cumsum(
        jnp.where(use_first[..., None], *block_weights), noise.levels[..., 0]
    )


def weigh_block(weigh: WeightFunction, block: Int[Array, "*B"], vocab: int) -> Float[Array, "*B M"]:
    """Weights of the tokens of one block; 0 beyond the vocabulary."""
    ids = block[..., None] * BRANCHES + jnp.arange(BRANCHES, dtype=jnp.int32)
    return jnp.where(ids < vocab, weigh(jnp.minimum(ids, vocab - 1)), 0)


def _split_blocks(weights: Float[Array, "*B V"]) -> Float[Array, "*B N M"]:
    """Weights in blocks of `BRANCHES`, filled up with zeros."""
    count = -(-weights.shape[-1] // BRANCHES)
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, count * BRANCHES - weights.shape[-1])]
    return jnp.pad(weights, padding).reshape(*weights.shape[:-1], count, BRANCHES)


def _search_cumsum(weights: Float[Array, "*B V"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The first entry with a weight whose cumulated sum exceeds the given share of the whole."""
    # sums may grow by rounding at an entry without a weight
    cumsums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), -1)
    total = jnp.max(cumsums, axis=-1, keepdims=True)
    return jnp.argmax((cumsums > uniform[..., None] * total) | (cumsums == total), axis=-1).astype(
        jnp.int32
    )
