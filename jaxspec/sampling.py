"""Sampling of tokens: processed logits, keyed noise, and draws."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

TARGET_STREAM, ROUND_STREAM = range(2)
"""Noise streams of a row: by absolute position, and by committed length at the start of a round."""

BRANCHES = 32
"""Number of weights in a cumulative sum when a token is drawn by uniform numbers."""


class Processing(NamedTuple):
    """Options of the sampling distribution, in order of application.

    They are static in a program.
    """

    banned: tuple[int, ...] = ()
    """Token ids that are never sampled."""
    min_new_tokens: int = 0
    """Response tokens before one of `stop_ids` may be sampled."""
    stop_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    """Divides the logits. 0 samples the most likely token."""
    top_k: int = 0
    """Keeps the k most likely tokens. 0 keeps all."""
    top_p: float = 1.0
    """Keeps the smallest set of most likely tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Keeps tokens with at least this share of the highest probability (arXiv 2407.01082)."""
    # A published embedding may have more rows than its tokenizer has tokens.
    vocab_size: int = 0
    """Size of the vocabulary, applied first. Ids from here on are never sampled. 0 allows all."""


def process_logits(
    logits: Float[Array, "*B V"],
    processing: Processing,
    response_position: Int[Array, "*B"],
    factor: Float[Array, "*#B"] | float = 1.0,
    sampled_ids: Int[Array, "*B"] | None = None,
    may_be_zero: bool = True,
    ids: Int[Array, "*#B V"] | None = None,
) -> Float[Array, "*B V"]:
    """Computes logits of the sampling distribution.

    They are correct up to a constant. Excluded tokens get -inf.

    Args:
      logits: logits of a network.
      processing: options of the distribution.
      response_position: response tokens before the one to sample, for the minimum length.
      factor: multiplies the temperature, since a draft may be sharper or flatter than its target.
        An array, which may be traced, broadcasts over the positions.
      sampled_ids: ids that top-k, top-p and min-p never drop.
      may_be_zero: whether a traced `factor` can be 0. If not, no argmax is compiled.
      ids: token id of each logit. None if the logits are those of all tokens, in order.
    """
    # Every option is static, so one that is not set compiles to nothing.
    # `sampled_ids` are tokens that generation has sampled. When logprobs are recomputed, rounding
    # may put them just below a cut, which would make their probability 0.

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
        # A token stays if the sum of those before it is below top_p. The first one always does.
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
    """Returns whether each id is in `members`."""
    return jnp.isin(ids, jnp.asarray(members, jnp.int32))


def _drop_below(
    logits: Float[Array, "*B V"],
    threshold: Float[Array, "*B 1"],
    sampled_ids: Int[Array, "*B"] | None,
) -> Float[Array, "*B V"]:
    """Excludes logits below `threshold`, except `sampled_ids`."""
    # Ties and NaNs compare false and stay. A NaN has to show that the logits are broken.
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
    """Divides logits by temperature times factor. At 0, the largest logit gets all probability."""
    # A factor that is a Python number costs no selection in the program.
    if not isinstance(factor, jax.Array):
        product = temperature * factor
        if product == 1:
            return logits
        return logits / product if product > 0 else _greedy_logits(logits)
    products = jnp.asarray(temperature * factor, logits.dtype)[..., None]
    if temperature > 0 and not may_be_zero:
        return logits / products
    # The division is evaluated everywhere, so the divisor must not be 0.
    return jnp.where(
        products > 0, logits / jnp.where(products > 0, products, 1), _greedy_logits(logits)
    )


def _greedy_logits(logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """Excludes all tokens except the most likely one.

    Its logit becomes 0. Ties keep the first, and NaNs stay. If all are excluded, they stay so.
    """
    is_largest = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32) == jnp.arange(
        logits.shape[-1], dtype=jnp.int32
    )
    # argmax returns 0 if all are -inf, but an excluded token must never be sampled.
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
    """Computes log-probabilities of the sampling distribution, as `process_logits`."""
    processed = process_logits(
        logits, processing, response_position, factor, sampled_ids, may_be_zero
    )
    return jax.nn.log_softmax(processed, axis=-1)


def promote_logits(logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """Casts logits to float32, or keeps float64."""
    # Probabilities of target and draft are compared, for which bfloat16 is too coarse.
    return logits.astype(np.promote_types(logits.dtype, np.float32))


def scatter_to_vocabulary(
    logits: Float[Array, "*B W"], ids: Int[Array, " W"] | None, vocab: int
) -> Float[Array, "*B V"]:
    """Scatters logits of `ids` to the full vocabulary.

    Other tokens get -inf. Returns the logits unchanged if `ids` is None.
    """
    if ids is None:
        return logits
    full_logits = jnp.full((*logits.shape[:-1], vocab), -jnp.inf, logits.dtype)
    return full_logits.at[..., ids].set(logits, indices_are_sorted=True, unique_indices=True)


def entropy(logprobs: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Computes the entropy in nats."""
    # 0 * -inf is NaN, so tokens of probability 0 are masked before the product.
    is_possible = logprobs != -jnp.inf
    return -jnp.sum(
        jnp.where(is_possible, jnp.exp(logprobs) * jnp.where(is_possible, logprobs, 0), 0), axis=-1
    )


def row_keys(key: Key[Array, ""], rows: Int[Array, " B"], stream: int) -> Key[Array, " B"]:
    """Derives one key for each row."""
    # Keys depend on the global row number, so that a row has the same noise on every mesh.
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), stream))(rows)


def position_keys(
    keys: Key[Array, " B"], positions: Int[Array, " B"], count: int
) -> Key[Array, "B count"]:
    """Derives keys for `count` positions of each row, from `positions` on.

    A key depends only on row and absolute position.
    """
    offsets = jnp.arange(count, dtype=jnp.int32)
    return jax.vmap(
        lambda key, position: jax.vmap(jax.random.fold_in, (None, 0))(key, position + offsets)
    )(keys, positions)


def gumbel_noise(keys: Key[Array, "B T"], vocab: int, dtype: jnp.dtype) -> Float[Array, "B T V"]:
    """Draws standard Gumbel noise for each key."""
    # By default float32 noise has 23 random bits. It would never exceed 16, and a token of
    # probability 1e-7 would be drawn half as often as it should.
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), dtype, mode="high")))(
        keys
    )


def uniform_numbers(
    keys: Key[Array, " B"], positions: Int[Array, "B T"], count: int, dtype: jnp.dtype
) -> Float[Array, "B T count"]:
    """Draws `count` uniform numbers in (0, 1) per position.

    Numbers depend only on the row's key, the position and their index. They are the midpoints of
    2^23 equal bins in float32, and of 2^52 in float64.
    """
    # `jax.random` compiles to a chain of small loops, which on a CPU take as long as the forward
    # pass of a small model.
    key_words = jax.random.key_data(keys)[:, None, None, :2]
    is_float64 = dtype == jnp.float64
    # One call gives two words of 32 bits. A float64 takes both, a float32 takes one.
    counters = jnp.arange(count if is_float64 else -(-count // 2), dtype=jnp.uint32)
    first, second = threefry(
        key_words[..., 0], key_words[..., 1], positions[:, :, None].astype(jnp.uint32), counters
    )
    if is_float64:
        # Midpoints, because a 0 would draw the first possible token, however rare.
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
    """Computes Threefry-2x32 with 20 rounds, element by element.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    # The constant is the parity word of the key schedule.
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
    """Uniform numbers for one draw: one in (0, 1) for each level of the search."""

    levels: Float[Array, "*B N"]


Noise = Float[Array, "*B V"] | Uniforms
"""Noise of one draw: standard Gumbel noise over the vocabulary, or a few uniform numbers."""


WeightFunction = Callable[[Int[Array, "*B M"]], Float[Array, "*B M"]]
"""Function from token ids of each row to their weights."""


def level_count(vocab: int) -> int:
    """Returns how many uniform numbers a draw takes."""
    levels = 1
    while vocab > BRANCHES:
        vocab, levels = -(-vocab // BRANCHES), levels + 1
    return levels


def categorical(logprobs: Float[Array, "*B V"], noise: Noise) -> Int[Array, "*B"]:
    """Draws tokens with probability proportional to exp(logprobs).

    Tokens of probability 0 are never drawn.
    """
    # With the same Gumbel noise, target and draft often draw the same token. Uniform numbers
    # invert the cumulative probabilities, at a fraction of the cost.
    if not isinstance(noise, Uniforms):
        return jnp.argmax(logprobs + noise, axis=-1).astype(jnp.int32)
    return draw_by_weight(jnp.exp(logprobs - jnp.max(logprobs, axis=-1, keepdims=True)), noise)


def draw_by_weight(
    weights: Float[Array, "*B V"], noise: Uniforms, reweigh: WeightFunction | None = None
) -> Int[Array, "*B"]:
    """Draws tokens with probability proportional to `weights`.

    `reweigh` computes the weights of the drawn block again.
    """
    # First a block is drawn, then a token in it, each by its own number. So none has to resolve
    # more than BRANCHES choices, for which 23 bits are enough.
    vocab = weights.shape[-1]
    if vocab <= BRANCHES:
        return _search_cumsum(weights, noise.levels[..., 0])
    blocks = _split_blocks(weights)
    block = draw_by_weight(jnp.sum(blocks, axis=-1), Uniforms(noise.levels[..., 1:]))
    # With `reweigh`, only sums of blocks are read, so XLA need not store the weights.
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
    """Draws tokens by the weights `first` or `second`.

    Rows with `prefers_first` use `first` if it has any weight. `second` must have some wherever
    `first` has. `reweigh` computes the weights of the drawn block again.
    """
    # One pass over both computes the sums of all blocks.
    vocab = first.shape[-1]
    if vocab <= BRANCHES:
        use_first = prefers_first & jnp.any(first > 0, axis=-1)
        return _search_cumsum(jnp.where(use_first[..., None], first, second), noise.levels[..., 0])
    sums = [jnp.sum(_split_blocks(weights), axis=-1) for weights in (first, second)]
    use_first = prefers_first & jnp.any(sums[0] > 0, axis=-1)
    block = draw_by_weight(jnp.where(use_first[..., None], *sums), Uniforms(noise.levels[..., 1:]))
    block_weights = [weigh_block(weigh, block, vocab) for weigh in reweigh]
    # Tiny weights may round to 0 when they are computed again.
    use_first &= jnp.any(block_weights[0] > 0, axis=-1)
    return block * BRANCHES + _search_cumsum(
        jnp.where(use_first[..., None], *block_weights), noise.levels[..., 0]
    )


def weigh_block(weigh: WeightFunction, block: Int[Array, "*B"], vocab: int) -> Float[Array, "*B M"]:
    """Computes the weights of one block of tokens. 0 beyond the vocabulary."""
    ids = block[..., None] * BRANCHES + jnp.arange(BRANCHES, dtype=jnp.int32)
    return jnp.where(ids < vocab, weigh(jnp.minimum(ids, vocab - 1)), 0)


def _split_blocks(weights: Float[Array, "*B V"]) -> Float[Array, "*B N M"]:
    """Splits weights into blocks, padding with zeros."""
    count = -(-weights.shape[-1] // BRANCHES)
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, count * BRANCHES - weights.shape[-1])]
    return jnp.pad(weights, padding).reshape(*weights.shape[:-1], count, BRANCHES)


def _search_cumsum(weights: Float[Array, "*B V"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """Inverts the cumulative sum of weights.

    Returns the first entry whose sum exceeds the share `uniform` of the total. Never returns an
    entry of weight 0, unless all weights are 0.
    """
    # By rounding, a parallel sum may grow at an entry of weight 0, so these are masked.
    cumsums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), -1)
    total = jnp.max(cumsums, axis=-1, keepdims=True)
    # The product may round up to the total, which no sum exceeds.
    return jnp.argmax((cumsums > uniform[..., None] * total) | (cumsums == total), axis=-1).astype(
        jnp.int32
    )
