"""The external draft over rounds: it always stands where its own model stands after reading the committed text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Context, Kept, Proposal
from jaxspec.drafts.model import ModelState, external
from jaxspec.models.decoder import Decoder
from tests.conftest import numpy_decoder, tiny_model, tiny_network, tiny_prompts

pytestmark = pytest.mark.usefixtures("x64")

LENGTH, ROWS, WIDTH, SLOTS, VOCAB = 3, 4, 5, 32, 11
DRAFT = external(LENGTH)


@pytest.fixture(scope="module")
def network(x64: None) -> Decoder:
    return tiny_network(Decoder, tiny_model(embed=8), 3, 1.5)


@jax.jit
def prefill(network: Decoder, tokens: jax.Array, lengths: jax.Array) -> ModelState:
    prompts = tiny_prompts(tokens.shape[0]).replace(tokens=tokens, lengths=lengths)
    return DRAFT.prefill(network, network, prompts, jnp.zeros((*tokens.shape, 0)), SLOTS)


@jax.jit
def propose(network: Decoder, state: ModelState, tokens: jax.Array, lengths: jax.Array, drafted: jax.Array) -> tuple[ModelState, Proposal]:
    return DRAFT.propose(network, network, state, Context(tokens, lengths), lambda logits, offset: drafted[:, offset])


def committed(text: np.ndarray, lengths: np.ndarray, junk: int = 0) -> jax.Array:
    """Rows as far as they are committed."""
    return jnp.asarray(np.where(np.arange(text.shape[1]) < lengths[:, None], text, junk), jnp.int32)


def test_laws_and_cache_are_those_of_the_model_after_the_text(network: Decoder) -> None:
    """Also where all drafts were kept, the last of which was never read, and in rows that start with one token."""
    random = np.random.default_rng(0)
    text = random.integers(0, VOCAB, (ROWS, SLOTS)).astype(np.int32)
    lengths = np.array([1, 5, 2, 4])
    state = prefill(network, committed(text[:, :WIDTH], lengths, 9), jnp.asarray(lengths, jnp.int32))
    counts_seen: set[int] = set()
    for number in range(5):
        count = random.integers(1, LENGTH + 2, ROWS)
        if number == 0:
            count[0] = LENGTH + 1  # a row of one token keeps everything
        if number == 2:
            count[1] = 0  # the row has ended
        coming = text[np.arange(ROWS)[:, None], lengths[:, None] + np.arange(LENGTH)]
        wrong = (coming + random.integers(1, VOCAB, coming.shape)) % VOCAB
        drafted = np.where(np.arange(LENGTH) < count[:, None] - 1, coming, wrong).astype(np.int32)
        state, proposal = propose(network, state, committed(text, lengths), jnp.asarray(lengths, jnp.int32), jnp.asarray(drafted))
        np.testing.assert_array_equal(proposal.tokens, drafted)
        np.testing.assert_array_equal(proposal.offered, LENGTH)
        scratch = prefill(network, committed(text, lengths, 7), jnp.asarray(lengths, jnp.int32))
        for row in range(ROWS):
            whole = np.concatenate([text[row, : lengths[row]], drafted[row]])
            wanted = numpy_decoder(network, whole)[0][lengths[row] - 1 : lengths[row] - 1 + LENGTH]
            np.testing.assert_allclose(proposal.logits[row], wanted, rtol=0, atol=1e-11, err_msg=f"round {number} row {row}")
            for name in ("keys", "values"):
                ours, theirs = (np.asarray(getattr(either.cache, name))[:, row, : lengths[row]] for either in (state, scratch))
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        counts_seen |= set(count.tolist())
        positions = (lengths[:, None] - 1 + np.arange(LENGTH + 1)).astype(np.int32)
        kept = Kept(
            tokens=jnp.asarray(text[np.arange(ROWS)[:, None], positions + 1]),
            features=jnp.zeros((ROWS, LENGTH + 1, 0)),
            positions=jnp.asarray(positions),
            length=jnp.asarray(count, jnp.int32),
        )
        state = DRAFT.commit(state, kept)
        lengths = lengths + count
    assert counts_seen == {0, 1, 2, 3, 4}


def test_it_reads_nothing_of_the_target(network: Decoder) -> None:
    assert DRAFT.taps == ()
    assert DRAFT.draws


def test_repeat_gives_each_row_of_a_group_its_prompts_state(network: Decoder) -> None:
    text = np.random.default_rng(2).integers(0, VOCAB, (2, WIDTH)).astype(np.int32)
    lengths, drafted = jnp.asarray([3, 5], jnp.int32), jnp.asarray([[1, 2, 3]] * 2, jnp.int32)
    state = prefill(network, jnp.asarray(text), lengths)
    once = propose(network, state, jnp.asarray(text), lengths, drafted)[1]
    thrice = propose(network, DRAFT.repeat(state, 3), *(jnp.repeat(part, 3, axis=0) for part in (jnp.asarray(text), lengths, drafted)))[1]
    np.testing.assert_allclose(thrice.logits, np.repeat(np.asarray(once.logits), 3, 0), rtol=0, atol=1e-12)
