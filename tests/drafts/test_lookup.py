"""Lookups against plain searches in python lists, and the combination of a lookup with a draft that
learns."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Committed, Context, Draft, DrawnProposal, PointProposal, Proposal
from jaxspec.drafts.lookup.drafting import (
    CombinedState,
    HistoryState,
    history_draft,
    ngram_draft,
    prefer_lookup,
)
from jaxspec.drafts.model.drafting import model_draft
from jaxspec.drafts.recurrent import recurrent_draft
from jaxspec.models import contiguous
from jaxspec.models.decoder import Decoder
from tests.conftest import eagle3, tiny_model, tiny_network, tiny_prompts
from tests.twins import numpy_decoder
from tests.whole_texts import read_whole

TARGET = jax.eval_shape(lambda: Decoder(tiny_model(dtype="float32"), jax.random.key(0)))
"""Shapes alone: a lookup reads nothing of a target."""


def rows_of(texts: list[list[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """Texts as padded rows and their lengths."""
    rows = np.zeros((len(texts), width), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return jnp.asarray(rows), jnp.asarray([len(text) for text in texts], jnp.int32)


def random_texts(count: int, width: int, vocab: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, random.integers(1, width + 1)).tolist() for _ in range(count)]


def repeated(state: Any, times: int) -> Any:
    """A draft's state for each row of a group, as the engine makes it."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), state)


def refuse(logits: Any, offset: int) -> Any:
    raise AssertionError("a lookup draws nothing")


@partial(jax.jit, static_argnums=0)
def propose(draft: Draft, state: Any, tokens: jax.Array, lengths: jax.Array) -> PointProposal:
    context = Context(tokens, lengths)
    proposal = draft.propose(None, TARGET, state, None, context, refuse, draft.max_length)[2]
    assert isinstance(proposal, PointProposal)
    return proposal


def offered(draft: Draft, texts: list[list[int]], width: int, state: Any = ()) -> list[list[int]]:
    """The tokens really offered to each row."""
    proposal = propose(draft, state, *rows_of(texts, width))
    assert proposal.tokens.shape == (len(texts), draft.max_length)
    return [
        row[:count].tolist()
        for row, count in zip(
            np.asarray(proposal.tokens), np.asarray(proposal.lengths), strict=True
        )
    ]


def places(text: list[int], row: list[int], size: int) -> list[int]:
    """Places in `text` that have a token and before them the last `size` tokens of `row`, in
    order."""
    return [place for place in range(size, len(text)) if text[place - size : place] == row[-size:]]


def searched(
    text: list[int], length: int, min_match: int, max_match: int, latest: bool
) -> list[int]:
    """Longest n-gram first, as in vLLM's and transformers' descriptions."""
    for size in range(min(max_match, len(text) - 1), min_match - 1, -1):
        where = places(text, text, size)
        if where:
            full = [place for place in where if place + length <= len(text)]
            # The latest with a whole block after it; without any, the earliest has the most.
            chosen = full[-1] if latest and full else where[0]
            return text[chosen : chosen + length]
    return []


@pytest.mark.parametrize("rule", ["vllm", "hf", "latest"])
@pytest.mark.parametrize(
    ("length", "min_match", "max_match"), [(3, 1, 2), (2, 2, 4), (5, 1, 1), (1, 3, 3)]
)
def test_ngram_offers_what_a_plain_search_finds(
    rule: Any, length: int, min_match: int, max_match: int
) -> None:
    texts = random_texts(150, 24, 2) + random_texts(150, 24, 3, 1)
    wanted = [searched(text, length, min_match, max_match, rule == "latest") for text in texts]
    assert len({len(tokens) for tokens in wanted}) == length + 1, (
        "the texts must show every number of tokens"
    )
    assert offered(ngram_draft(length, rule, min_match, max_match), texts, 24) == wanted


@pytest.mark.parametrize(
    ("rule", "text", "wanted"),
    [
        ("vllm", [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [3, 9, 1]),  # of equal matches the earliest
        ("latest", [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1]),
        ("vllm", [7, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1]),  # the longer match, though later
        ("latest", [1, 2, 3, 9, 7, 2, 4, 9, 1, 2], [3, 9, 7]),  # the longer match, though earlier
        ("vllm", [5, 6, 5], [6, 5]),  # no more than the text has
        # a place with a whole block after it before one with less
        ("latest", [4, 4, 4, 4, 4, 4], [4, 4, 4]),
        # the match of two tokens, before the one with two tokens after it
        ("latest", [4, 4, 4], [4]),
        ("vllm", [5, 6, 7], []),
        ("vllm", [5], []),
        ("hf", [1, 2, 3, 8, 1, 2], [3]),  # nothing from the stop id 8 on
        ("hf", [1, 2, 8, 3, 1, 2], []),
    ],
)
def test_ngram_examples(rule: Any, text: list[int], wanted: list[int]) -> None:
    assert offered(ngram_draft(3, rule, 1, 2, (8, 9) if rule == "hf" else ()), [text], 10) == [
        wanted
    ]


@pytest.mark.hf
@pytest.mark.parametrize(("length", "max_match"), [(3, 2), (10, 2), (2, 4)])
def test_hf_rule_is_transformers_prompt_lookup(length: int, max_match: int) -> None:
    torch = pytest.importorskip("torch")
    generator = pytest.importorskip(
        "transformers.generation.candidate_generator"
    ).PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([0, 5]),
        num_output_tokens=length,
        max_matching_ngram_size=max_match,
        max_length=1000,
    )
    texts = [
        text for text in random_texts(200, 20, 6, 2) + random_texts(100, 20, 2, 3) if len(text) > 1
    ]
    wanted = [
        generator.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist() for text in texts
    ]
    assert offered(ngram_draft(length, "hf", 1, max_match, (0, 5)), texts, 20) == wanted


def remembered(
    group: list[list[int]],
    row: int,
    earlier: list[list[int]],
    length: int,
    min_match: int,
    max_match: int,
) -> list[int]:
    """The documented order, over every place of every text: match, tokens after it, whose text,
    first text, latest place."""
    sources = [(2 if other == row else 1, text) for other, text in enumerate(group)] + [
        (0, text) for text in earlier
    ]
    best, tokens = (0,), []
    for number, (whose, text) in enumerate(sources):
        for place in range(1, len(text)):
            sizes = [
                size
                for size in range(min_match, max_match + 1)
                if size <= len(group[row]) and place in places(text, group[row], size)
            ]
            rank = (max(sizes, default=0), min(len(text) - place, length), whose, -number, place)
            if sizes and rank > best:
                best, tokens = rank, text[place : place + length]
    return tokens


@pytest.mark.parametrize(("kept", "wide"), [(0, True), (2, False), (2, True)])
@pytest.mark.parametrize(("min_match", "max_match"), [(1, 3), (2, 6)])
def test_history_finds_the_best_place_of_all_texts(
    kept: int, wide: bool, min_match: int, max_match: int
) -> None:
    with jax.enable_x64(wide):
        groups, size, length, width = 12, 3, 3, 16
        texts = random_texts(groups * size, width, 3)
        earlier = [random_texts(kept, 20, 3, 10 + group) for group in range(groups)]
        if kept:
            earlier[1][0] = []  # no text
        padded = [rows_of(group, 20) for group in earlier]
        prompts = tiny_prompts(groups).replace(
            history=jnp.stack([tokens.reshape(kept, 20) for tokens, _ in padded]),
            history_lengths=jnp.stack([lengths for _, lengths in padded]),
        )
        draft = history_draft(length, size, min_match, max_match)
        state = repeated(draft.init_state(None, TARGET, prompts), size)
        wanted = [
            remembered(
                texts[row - row % size :][:size],
                row % size,
                earlier[row // size],
                length,
                min_match,
                max_match,
            )
            for row in range(groups * size)
        ]
        assert offered(draft, texts, width, state) == wanted
        alone = offered(ngram_draft(length, "latest", min_match, max_match), texts, width)
        assert sum(len(tokens) for tokens in wanted) > sum(len(tokens) for tokens in alone)


def test_slots_offer_what_their_rows_would() -> None:
    """In any order, of some rows only, beside empty slots, and where a row goes through its text
    again: its siblings stay whole."""
    groups, size, length, width = 6, 3, 3, 16
    random, texts = np.random.default_rng(5), random_texts(groups * size, width, 3)
    # the last two are empty
    row = np.append(random.permutation(groups * size)[:9], [groups * size] * 2)
    lengths = np.array([random.integers(1, len(texts[number]) + 1) for number in row[:9]] + [1, 1])
    assert any(count < len(texts[number]) for count, number in zip(lengths, row[:9], strict=False))
    tokens, whole = rows_of(texts, width)
    context = Context(tokens, jnp.asarray(lengths, jnp.int32), jnp.asarray(row, jnp.int32), whole)
    earlier = random_texts(groups, 20, 3, 7)
    kept, kept_lengths = rows_of([earlier[min(number // size, groups - 1)] for number in row], 20)
    state = HistoryState(texts=kept[:, None], lengths=kept_lengths[:, None])
    for draft, given in (
        (history_draft(length, size, 1, 3), state),
        (ngram_draft(length, "latest", 1, 3), ()),
    ):

        @jax.jit
        def proposed(given: Any, context: Context, draft: Draft = draft) -> Proposal:
            return draft.propose(None, TARGET, given, None, context, refuse, draft.max_length)[2]

        found = jax.tree.map(np.asarray, proposed(given, context))
        for slot, number in enumerate(row[:9]):
            own, first = texts[number][: lengths[slot]], number - number % size
            group = [
                own if first + other == number else texts[first + other] for other in range(size)
            ]
            remembers = remembered(group, number % size, [earlier[number // size]], length, 1, 3)
            wanted = remembers if given else searched(own, length, 1, 3, True)
            assert found.tokens[slot, : found.lengths[slot]].tolist() == wanted


@pytest.mark.parametrize("lengths", [(0, 1, 2), (2, 0, 2), (2, 3, 2)])
def test_wrong_lengths_are_named(lengths: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"{lengths[0]} tokens after {lengths[1]} to {lengths[2]}"):
        ngram_draft(lengths[0], "vllm", *lengths[1:])
    with pytest.raises(ValueError, match=f"{lengths[0]} tokens after {lengths[1]} to {lengths[2]}"):
        history_draft(lengths[0], 2, *lengths[1:])


def test_preferring_needs_a_lookup_and_a_draft_that_draws() -> None:
    for lookup, learned in [
        (ngram_draft(2, "vllm", 1, 2), model_draft(3)),
        (model_draft(3), model_draft(3)),
        (ngram_draft(3, "hf", 1, 2), ngram_draft(3, "hf", 1, 2)),
    ]:
        with pytest.raises(ValueError, match="cannot stand before"):
            prefer_lookup(lookup, learned)


@pytest.mark.slow
def test_preferring_takes_whole_blocks_and_keeps_the_learned_cache_right(x64: None) -> None:
    """Rows with a whole block from the lookup are certain of it; the others' laws are those of the
    learned draft after all of the text."""
    length, vocab, width = 3, 11, 32
    network = tiny_network(Decoder, tiny_model(embed=8), 3, 1.5)
    lookup = ngram_draft(length, "latest", 2, 4)
    both = prefer_lookup(lookup, model_draft(length))
    assert (both.is_stochastic, both.taps, both.max_length) == (True, (), length)
    random = np.random.default_rng(0)
    # Two rows repeat themselves, one does not, and one does so once.
    text = random.integers(0, vocab, (4, width)).astype(np.int32)
    text[0], text[1], text[3, :12] = (
        np.arange(width) % 3,
        np.arange(width) % 5,
        [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 9, 8],
    )
    lengths = np.array([4, 5, 3, 4])

    @jax.jit
    def propose(
        network: Decoder,
        state: Any,
        cache: Any,
        tokens: jax.Array,
        lengths: jax.Array,
        drafted: jax.Array,
    ) -> tuple[CombinedState, Any, DrawnProposal]:
        def sample(logits: jax.Array, offset: int) -> jax.Array:
            only = jnp.sum(jnp.isfinite(logits), axis=-1) == 1  # then it is drawn
            return jnp.where(
                only, jnp.argmax(logits, axis=-1).astype(jnp.int32), drafted[:, offset]
            )

        context = Context(tokens, lengths)
        state, cache, proposal = both.propose(
            network, network, state, cache, context, sample, length
        )
        assert isinstance(proposal, DrawnProposal)
        return state, cache, proposal

    prompts = tiny_prompts(4).replace(
        tokens=jnp.asarray(text[:, :5]), lengths=jnp.asarray(lengths, jnp.int32)
    )
    state, cache = read_whole(both, network, network, prompts, jnp.zeros((4, 5, 0)))
    cache = contiguous.expand_prompts(cache, 1, width + length)
    found: list[tuple[bool, ...]] = []
    for _ in range(6):
        tokens = np.where(np.arange(width) < lengths[:, None], text, 0).astype(np.int32)
        searches = [
            searched(text[row, : lengths[row]].tolist(), length, 2, 4, True) for row in range(4)
        ]
        drafted = random.integers(0, vocab, (4, length)).astype(np.int32)
        given = (jnp.asarray(array, jnp.int32) for array in (tokens, lengths, drafted))
        state, cache, proposal = propose(network, state, cache, *given)
        assert proposal.logits is not None
        np.testing.assert_array_equal(proposal.lengths, length)
        for row, search in enumerate(searches):
            logits = np.asarray(proposal.logits[row])
            if len(search) == length:
                assert proposal.tokens[row].tolist() == search
                np.testing.assert_array_equal(
                    logits, np.where(np.arange(vocab) == np.array(search)[:, None], 0, -np.inf)
                )
            else:
                np.testing.assert_array_equal(proposal.tokens[row], drafted[row])
                whole = np.concatenate([text[row, : lengths[row]], drafted[row]])
                wanted = numpy_decoder(network, whole)[0][
                    lengths[row] - 1 : lengths[row] - 1 + length
                ]
                np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-11)
        found.append(tuple(len(search) == length for search in searches))
        # Each row keeps what came true, and a token more.
        coming = text[np.arange(4)[:, None], lengths[:, None] + np.arange(length + 1)]
        true = np.cumprod(np.asarray(proposal.tokens) == coming[:, :length], axis=1).sum(1)
        positions = (lengths[:, None] - 1 + np.arange(length + 1)).astype(np.int32)
        kept = Committed(
            jnp.asarray(coming),
            jnp.zeros((4, length + 1, 0)),
            jnp.asarray(positions),
            jnp.asarray(true + 1, jnp.int32),
        )
        state = both.commit(state, kept)
        lengths = lengths + true + 1
    by_row = list(zip(*found, strict=True))
    assert any(by_row[0])
    assert not any(by_row[2])
    assert any(was and not now for was, now in itertools.pairwise(by_row[3])), (
        "a row must go back to the learned draft"
    )


def test_preferring_hands_everything_on_to_both() -> None:
    learned = recurrent_draft(2, (1, 2, 3))
    both = prefer_lookup(ngram_draft(2, "vllm", 1, 2), learned)
    assert both.taps == (1, 2, 3)
    target = tiny_network(Decoder, tiny_model(dtype="float32"))
    network = tiny_network(eagle3, tiny_model(dtype="float32"), 1)
    prompts = tiny_prompts(2)
    taps = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 48)), jnp.float32)
    (state, cache), (wanted, wanted_cache) = (
        jax.jit(partial(read_whole, draft))(network, target, prompts, taps)
        for draft in (both, learned)
    )
    jax.tree.map(np.testing.assert_array_equal, cache, wanted_cache)
    assert cache is not None
    assert all(leaf.any() for leaf in jax.tree.leaves((cache.keys, cache.values)))
    ours_repeated, alone = repeated(state, 2), repeated(wanted, 2)
    kept = Committed(
        jnp.zeros((4, 3), jnp.int32),
        jnp.ones((4, 3, 48), jnp.float32),
        jnp.full((4, 3), 7, jnp.int32),
        jnp.asarray([0, 1, 2, 3], jnp.int32),
    )
    for ours, theirs in (
        (ours_repeated, alone),
        (jax.jit(both.commit)(ours_repeated, kept), jax.jit(learned.commit)(alone, kept)),
    ):
        jax.tree.map(np.testing.assert_array_equal, ours.learned, theirs)
