"""The external draft over rounds: it always stands where its own model stands after reading the
committed text."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Committed, Context, DrawnProposal
from jaxspec.drafts.model.drafting import ModelState, model_draft
from jaxspec.models import contiguous
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder
from tests.conftest import tiny_model, tiny_network, tiny_prompts
from tests.twins import numpy_decoder
from tests.whole_texts import read_whole

pytestmark = pytest.mark.usefixtures("x64")

LENGTH, ROWS, WIDTH, SLOTS, VOCAB = 3, 4, 5, 48, 11
DRAFT = model_draft(LENGTH)


@pytest.fixture(scope="module")
def network(x64: None) -> Decoder:
    return tiny_network(Decoder, tiny_model(embed=8), 3, 1.5)


class Held(NamedTuple):
    """What the engine holds of the draft."""

    state: ModelState
    cache: KVCache


@functools.partial(jax.jit, static_argnames="times")
def prefill(network: Decoder, tokens: jax.Array, lengths: jax.Array, times: int = 1) -> Held:
    prompts = tiny_prompts(tokens.shape[0]).replace(tokens=tokens, lengths=lengths)
    features = jnp.zeros((*tokens.shape, 0))
    state, cache = read_whole(DRAFT, network, network, prompts, features)
    return Held(
        jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), state),
        contiguous.expand_prompts(cache, times, SLOTS),
    )


@jax.jit
def propose(
    network: Decoder, held: Held, tokens: jax.Array, lengths: jax.Array, drafted: jax.Array
) -> tuple[Held, DrawnProposal]:
    sample, context = lambda logits, offset: drafted[:, offset], Context(tokens, lengths)
    state, cache, proposal = DRAFT.propose(
        network, network, held.state, held.cache, context, sample, drafted.shape[1]
    )
    assert cache is not None
    assert isinstance(proposal, DrawnProposal)
    return Held(state, cache), proposal


def committed(text: np.ndarray, lengths: np.ndarray, junk: int = 0) -> jax.Array:
    """Rows as far as they are committed."""
    return jnp.asarray(np.where(np.arange(text.shape[1]) < lengths[:, None], text, junk), jnp.int32)


@pytest.mark.slow
def test_laws_and_cache_are_those_of_the_model_after_the_text(network: Decoder) -> None:
    """Also where all drafts were kept, the last of which was never read, in rows that start with
    one token, and after rounds of other lengths or without drafts."""
    random = np.random.default_rng(0)
    text = random.integers(0, VOCAB, (ROWS, SLOTS)).astype(np.int32)
    lengths = np.array([1, 5, 2, 4])
    held = prefill(network, committed(text[:, :WIDTH], lengths, 9), jnp.asarray(lengths, jnp.int32))
    counts_seen: set[int] = set()
    for number, drafts in enumerate((3, 3, 3, 1, 3, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1, 3)):
        count = random.integers(1, drafts + 2, ROWS)
        if number == 0:
            count[0] = LENGTH + 1  # a row of one token keeps everything
        if number == 2:
            count[1] = 0  # the row has ended
        coming = text[np.arange(ROWS)[:, None], lengths[:, None] + np.arange(drafts)]
        wrong = (coming + random.integers(1, VOCAB, coming.shape)) % VOCAB
        drafted = np.where(np.arange(drafts) < count[:, None] - 1, coming, wrong).astype(np.int32)
        if drafts:
            held = proposed(network, held, text, lengths, drafted, f"round {number}")
        counts_seen |= set(count.tolist())
        held = held._replace(
            state=DRAFT.commit(held.state, kept_block(text, lengths, count, drafts))
        )
        lengths = lengths + count
    assert counts_seen == {0, 1, 2, 3, 4}


def proposed(
    network: Decoder,
    held: Held,
    text: np.ndarray,
    lengths: np.ndarray,
    drafted: np.ndarray,
    when: str,
) -> Held:
    """What the draft holds after a proposal, which is that of its model after the text, as what it
    then has in its cache is."""
    tokens, drafts = committed(text, lengths), drafted.shape[1]
    held, proposal = propose(
        network, held, tokens, jnp.asarray(lengths, jnp.int32), jnp.asarray(drafted)
    )
    np.testing.assert_array_equal(proposal.tokens, drafted)
    np.testing.assert_array_equal(proposal.lengths, drafts)
    assert proposal.logits is not None
    scratch = prefill(network, committed(text, lengths, 7), jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        whole = np.concatenate([text[row, :length], drafted[row]])
        wanted = numpy_decoder(network, whole)[0][length - 1 : length - 1 + drafts]
        np.testing.assert_allclose(
            proposal.logits[row], wanted, rtol=0, atol=1e-11, err_msg=f"{when} row {row}"
        )
        for name, axis in (("keys", 3), ("values", 2)):
            ours, theirs = (
                np.take(getattr(either, name)[:, row], range(length), axis)
                for either in (held.cache, scratch.cache)
            )
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    return held


def kept_block(text: np.ndarray, lengths: np.ndarray, count: np.ndarray, drafts: int) -> Committed:
    """What a round of so many drafts commits."""
    positions = (lengths[:, None] - 1 + np.arange(drafts + 1)).astype(np.int32)
    return Committed(
        tokens=jnp.asarray(text[np.arange(len(text))[:, None], positions + 1]),
        features=jnp.zeros((*positions.shape, 0)),
        positions=jnp.asarray(positions),
        lengths=jnp.asarray(count, jnp.int32),
    )


def test_it_reads_nothing_of_the_target(network: Decoder) -> None:
    assert DRAFT.taps == ()
    assert DRAFT.is_stochastic


def test_repeat_gives_each_row_of_a_group_its_prompts_state(network: Decoder) -> None:
    text = np.random.default_rng(2).integers(0, VOCAB, (2, WIDTH)).astype(np.int32)
    lengths, drafted = jnp.asarray([3, 5], jnp.int32), jnp.asarray([[1, 2, 3]] * 2, jnp.int32)
    once = propose(
        network, prefill(network, jnp.asarray(text), lengths), jnp.asarray(text), lengths, drafted
    )[1]
    repeated = prefill(network, jnp.asarray(text), lengths, times=3)
    thrice = propose(
        network,
        repeated,
        *(jnp.repeat(part, 3, axis=0) for part in (jnp.asarray(text), lengths, drafted)),
    )[1]
    np.testing.assert_allclose(
        thrice.logits, np.repeat(np.asarray(once.logits), 3, 0), rtol=0, atol=1e-12
    )
