"""Monte Carlo over the lossless rules with the sampler's own keys and noise: rounds have the
target's law, and known bugs are seen not to."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from jaxspec.rollout.verify import Verdict, match_rule
from jaxspec.sampling import Processing, Uniforms
from tests.conftest import FOR_LONG_RUNS, chi_square
from tests.rollout.harness import RULES, InUse, distributions

pytestmark = pytest.mark.usefixtures("x64")

LENGTH, FLOAT = 2, jnp.dtype(jnp.float32)
THIRD, TWO_THIRDS = (
    jnp.log(jnp.array(law, jnp.float32)) for law in ([1 / 3, 2 / 3], [2 / 3, 1 / 3])
)


class Draws(NamedTuple):
    """The uniform numbers of a round of 2 drafts."""

    drafts: Uniforms
    coins: jax.Array
    next: Uniforms


MATCHING = ("match", "certain")
"""Drafts that share the target's noise, and drafts that nothing is drawn for."""


def by_round(rows: jax.Array, lengths: jax.Array, levels: int = 1) -> Draws:
    """As the engine draws: all numbers of a round by row and committed length, so many a token as
    the vocabulary asks for."""
    numbers = sampling.uniform_numbers(
        rows, lengths[:, None], LENGTH + (LENGTH + 1) * levels, FLOAT
    )[:, 0]
    coins, draws = numbers[:, :LENGTH], numbers[:, LENGTH:].reshape(-1, LENGTH + 1, levels)
    return Draws(Uniforms(draws[:, :LENGTH]), coins, Uniforms(draws[:, LENGTH]))


def matched(
    rule: str, target: jax.Array, draft: jax.Array, rows: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, Verdict]:
    """Drafts and verdict of a round that compares them with what the target samples, by row and
    absolute position."""
    offered = jnp.full_like(lengths, LENGTH)
    if rule == "match":
        noise = sampling.gumbel_noise(
            sampling.position_keys(rows, lengths, LENGTH + 1), target.shape[-1], FLOAT
        )
        drafts = sampling.categorical(draft, noise[:, :LENGTH])
    else:
        positions = lengths[:, None] + jnp.arange(LENGTH + 1, dtype=jnp.int32)
        levels = sampling.level_count(target.shape[-1])
        noise = Uniforms(sampling.uniform_numbers(rows, positions, levels, FLOAT))
        drafts = jnp.argmax(draft, axis=-1).astype(jnp.int32)
    return drafts, match_rule(distributions(target, draft, InUse.form), drafts, offered, noise)


@functools.partial(
    jax.jit,
    static_argnames=("rule", "size", "tokens", "draws"),
    compiler_options=FOR_LONG_RUNS,
)
def decoded(
    rule: str,
    target: jax.Array,
    draft: jax.Array,
    verified: jax.Array,
    size: int,
    tokens: int,
    draws: Callable[[jax.Array, jax.Array], Draws] = by_round,
) -> jax.Array:
    """The first tokens of `size` rows, [size tokens], by rounds of 2 drafts.

    Target and draft have one law [V] at every position; the draft is verified as if it had the law
    `verified`.
    """
    length, vocab = LENGTH, len(target)
    offsets = jnp.arange(length + 1, dtype=jnp.int32)
    wide, narrow, checked = (
        jnp.broadcast_to(law, (size, count, vocab))
        for law, count in ((target, 3), (draft, 2), (verified, 2))
    )
    offered = jnp.full((size,), length, jnp.int32)
    stream = sampling.TARGET_STREAM if rule in MATCHING else sampling.ROUND_STREAM
    rows = sampling.row_keys(jax.random.key(3), jnp.arange(size, dtype=jnp.int32), stream)

    def verify(lengths: jax.Array) -> tuple[jax.Array, Verdict]:
        if rule in MATCHING:
            return matched(rule, wide, narrow, rows, lengths)
        drawn = draws(rows, lengths)
        drafts = sampling.categorical(narrow, drawn.drafts)
        return drafts, RULES[rule](wide, checked, drafts, offered, drawn.coins, drawn.next)

    def one_round(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lengths, out = state
        drafts, verdict = verify(lengths)
        accepted = verdict.accepted[:, None]
        block = jnp.where(
            offsets < accepted, jnp.pad(drafts, ((0, 0), (0, 1))), verdict.next_token[:, None]
        )
        # beyond the last token: dropped
        where = jnp.where(offsets <= accepted, lengths[:, None] + offsets, tokens)
        out = jax.vmap(lambda row, at, values: row.at[at].set(values, mode="drop"))(
            out, where, block
        )
        return lengths + verdict.accepted + 1, out

    return jax.lax.fori_loop(
        0,
        tokens,
        one_round,
        (jnp.zeros((size,), jnp.int32), jnp.full((size, tokens), -1, jnp.int32)),
    )[1]


def by_position(rows: jax.Array, lengths: jax.Array) -> Draws:
    """Numbers by absolute position, as no draft that is drawn may have them: what lay beyond the
    cut would come back in the next round."""
    each = [by_round(rows, lengths + offset) for offset in range(LENGTH)]
    drafts = jax.tree.map(
        lambda *numbers: jnp.stack([number[:, 0] for number in numbers], axis=1),
        *(draws.drafts for draws in each),
    )
    return Draws(drafts, jnp.stack([draws.coins[:, 0] for draws in each], axis=1), each[0].next)


def draft_noise_again(rows: jax.Array, lengths: jax.Array) -> Draws:
    """The token after the cut drawn with the numbers of the first draft, as vLLM once did
    (vllm-project/vllm, issue 47386)."""
    draws = by_round(rows, lengths)
    return draws._replace(next=jax.tree.map(lambda numbers: numbers[:, 0], draws.drafts))


def fit(decoded: jax.Array, target: jax.Array) -> float:
    """The p-value of all tokens of a row taken together, each of the target's law."""
    tokens = np.asarray(decoded)
    count, vocab = tokens.shape[1], len(target)
    law = np.exp(np.asarray(target, np.float64))
    expected = np.ones(1)
    for _ in range(count):
        expected = np.outer(expected, law / law.sum()).ravel()
    return chi_square(
        np.bincount(tokens @ vocab ** np.arange(count)[::-1], minlength=vocab**count),
        len(tokens) * expected,
    )


@pytest.mark.parametrize("rule", [*RULES, *MATCHING])
def test_several_sampled_rounds_have_the_targets_law(rule: str) -> None:
    """Four tokens of law (1/3, 2/3), drafted as (2/3, 1/3): of two drafts a round, the token rule
    accepts 10/9 on average and the block rule 11/9 (Sun et al., arXiv 2403.10444)."""
    tokens = decoded(rule, THIRD, TWO_THIRDS, TWO_THIRDS, 200_000, 4)
    assert fit(tokens, THIRD) > 1e-3
    for position in range(4):
        assert fit(tokens[:, position : position + 1], THIRD) > 1e-3


def test_several_rounds_keyed_by_position_are_seen_to_be_wrong() -> None:
    """Block verification has looked at drafts and coins beyond the cut. Drawn again there, they
    make P(0) .389, .361 and .353 at the first three positions instead of 1/3."""
    tokens = decoded("block", THIRD, TWO_THIRDS, TWO_THIRDS, 200_000, 4, by_position)
    assert fit(tokens, THIRD) < 1e-9
    np.testing.assert_allclose(
        np.mean(tokens == 0, axis=0), [1 / 3, 0.389, 0.361, 0.353], atol=0.004
    )
    assert all(fit(tokens[:, position : position + 1], THIRD) < 1e-9 for position in (1, 2, 3))


@pytest.mark.parametrize("rule", RULES)
def test_known_bugs_are_seen_to_be_wrong(rule: str) -> None:
    logits = 1.5 * np.random.default_rng(3).normal(size=3)
    target, draft, hotter = (
        logprobs(sign * logits, factor) for sign, factor in ((1, 1.0), (-1, 1.0), (-1, 1.3))
    )
    assert fit(decoded(rule, target, draft, draft, 200_000, 2, draft_noise_again), target) < 1e-9
    assert fit(decoded(rule, target, draft, hotter, 200_000, 2), target) < 1e-9


def logprobs(logits: np.ndarray, factor: float = 1.0) -> jax.Array:
    with np.errstate(divide="ignore"):
        return sampling.compute_logprobs(
            jnp.asarray(logits, jnp.float32), Processing(temperature=0.8), jnp.int32(0), factor
        )


CASES = {
    "opposite": lambda logits: (logits, -logits, 1.0),
    "disjoint": lambda logits: (
        np.where(np.arange(len(logits)) % 2, -np.inf, logits),
        np.where(np.arange(len(logits)) % 2, 0.0, -np.inf),
        1.0,
    ),
    "one-hot": lambda logits: (
        logits,
        np.where(np.arange(len(logits)) == np.argsort(logits)[-2], 0.0, -np.inf),
        1.0,
    ),
    "equal": lambda logits: (logits, logits, 1.0),
    "hotter": lambda logits: (logits, logits[::-1], 1.7),
    "bfloat16": lambda logits: (
        logits,
        np.asarray(jnp.asarray(0.7 * logits, jnp.bfloat16).astype(jnp.float32)),
        1.0,
    ),
}


def laws(case: str, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Target and draft; the draft's logits may come in bfloat16, and its temperature may be
    another."""
    target, draft, factor = CASES[case](1.5 * np.random.default_rng(vocab).normal(size=vocab))
    return logprobs(target), logprobs(draft, factor)


@pytest.mark.parametrize("vocab", [3, 16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", [*RULES, *MATCHING])
def test_sampled_rounds_pass_a_chi_square(rule: str, case: str, vocab: int) -> None:
    target, draft = laws(case, vocab)
    assert fit(decoded(rule, target, draft, draft, 200_000, 2), target) > 1e-3


@pytest.mark.sweep
def test_a_wide_vocabulary_passes_a_chi_square() -> None:
    """The first token of a round of two drafts out of 4096, 200,000 times. The draws are made once,
    for all laws and rules.

    What is compared with the target's own sample is that sample whatever was drafted, so it is
    judged once for each of the two targets.
    """
    size = 200_000
    vocab, chunk = 4096, 50  # so few rows at once stay in a core's cache
    pairs = [laws(case, vocab) for case in CASES]
    matching = [MATCHING if case in ("opposite", "disjoint") else () for case in CASES]
    offered = jnp.full((chunk,), LENGTH, jnp.int32)

    def first_tokens(
        numbers: jax.Array, pairs: list[tuple[jax.Array, jax.Array]]
    ) -> list[list[jax.Array]]:
        start = jnp.zeros((chunk,), jnp.int32)
        by_stream = [
            sampling.row_keys(jax.random.key(5), numbers, stream)
            for stream in (sampling.TARGET_STREAM, sampling.ROUND_STREAM)
        ]
        draws, tokens = by_round(by_stream[1], start, sampling.level_count(vocab)), []
        for (target, draft), compared in zip(pairs, matching, strict=True):
            wide = jnp.broadcast_to(target, (chunk, LENGTH + 1, vocab))
            narrow = jnp.broadcast_to(draft, (chunk, LENGTH, vocab))
            drafts = sampling.categorical(narrow, draws.drafts)
            rounds = [
                (drafts, rule(wide, narrow, drafts, offered, draws.coins, draws.next))
                for rule in RULES.values()
            ]
            rounds += [matched(rule, wide, narrow, by_stream[0], start) for rule in compared]
            tokens.append(
                [
                    jnp.where(verdict.accepted > 0, drafts[:, 0], verdict.next_token)
                    for drafts, verdict in rounds
                ]
            )
        return tokens

    numbers = jnp.arange(size, dtype=jnp.int32).reshape(-1, chunk)
    # one program for all chunks, which keeps its temporaries
    found = jax.jit(
        lambda numbers, pairs: jax.lax.map(lambda part: first_tokens(part, pairs), numbers),
        compiler_options=FOR_LONG_RUNS,
    )(numbers, pairs)
    for by_rule, (target, _) in zip(found, pairs, strict=True):
        law = np.exp(np.asarray(target, np.float64))
        for tokens in by_rule:
            counts = np.bincount(np.asarray(tokens).ravel(), minlength=vocab)
            assert chi_square(counts, size * law / law.sum()) > 1e-3
