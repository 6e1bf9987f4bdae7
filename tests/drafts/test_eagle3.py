"""EAGLE-3 drafting over rounds with rejections: at every round it stands where a draft that had just read the whole text would stand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Kept, Proposal
from jaxspec.drafts.eagle3 import Eagle3State, eagle3
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from tests.conftest import numpy_decoder, numpy_eagle_read, numpy_eagle_slot, numpy_taps, numpy_weights, tiny_model, tiny_network

pytestmark = pytest.mark.usefixtures("x64")

LENGTH, ROWS, WIDTH, SLOTS, VOCAB = 3, 4, 5, 40, 11
DRAFT = eagle3(LENGTH)


@pytest.fixture(scope="module")
def networks(x64: None) -> tuple[Decoder, Eagle3]:
    return tiny_network(Decoder, tiny_model(), 1, 1.5), tiny_network(Eagle3, tiny_model(), 2, 1.5)


@jax.jit
def target_taps(target: Decoder, tokens: jax.Array) -> jax.Array | None:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return target(tokens, positions, with_taps=True).taps


def taps_of(target: Decoder, tokens: np.ndarray) -> np.ndarray:
    """The target's own taps of whole rows, in one pass."""
    return np.asarray(target_taps(target, jnp.asarray(tokens)))


@jax.jit
def read(target: Decoder, network: Eagle3, tokens: jax.Array, lengths: jax.Array, taps: jax.Array) -> Eagle3State:
    return DRAFT.prefill(network, target, tokens, lengths, taps, SLOTS)


def prefill(networks: tuple[Decoder, Eagle3], tokens: np.ndarray, lengths: Any, taps: np.ndarray) -> Eagle3State:
    return read(*networks, jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), jnp.asarray(taps))


@jax.jit
def walk(target: Decoder, network: Eagle3, state: Eagle3State, drafted: jax.Array) -> tuple[Eagle3State, Proposal]:
    """Proposes with the tokens given, so that two drafts walk the same way."""
    return DRAFT.propose(network, target, state, lambda logits, offset: (drafted[:, offset], jax.nn.log_softmax(logits)))


def propose(networks: tuple[Decoder, Eagle3], state: Eagle3State, drafted: np.ndarray) -> tuple[Eagle3State, Proposal]:
    return walk(*networks, state, jnp.asarray(drafted))


def committed_slots(state: Eagle3State) -> np.ndarray:
    return np.asarray(state.first + state.count)


def test_every_round_equals_a_prefill_from_scratch(networks: tuple[Decoder, Eagle3]) -> None:
    """drafters.md 7, row 16: the cache is rewritten with true taps; nothing of a rejected draft remains."""
    target, _ = networks
    random = np.random.default_rng(0)
    text = random.integers(0, VOCAB, (ROWS, SLOTS)).astype(np.int32)  # what will be committed, row by row
    taps = taps_of(target, text)
    lengths = np.array([2, 5, 3, 4])
    prompt = np.where(np.arange(WIDTH) < lengths[:, None], text[:, :WIDTH], 9).astype(np.int32)
    state = prefill(networks, prompt, lengths, taps_of(target, prompt))
    counts_seen: set[int] = set()
    for number in range(6):
        drafted = random.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        state, proposal = propose(networks, state, drafted)
        np.testing.assert_array_equal(proposal.tokens, drafted)
        # Row by row: a draft that reads the committed text as its prompt.
        whole = np.where(np.arange(SLOTS) < lengths[:, None], text, 7).astype(np.int32)
        scratch = prefill(networks, whole, lengths, taps)
        scratch, wanted = propose(networks, scratch, drafted)
        np.testing.assert_allclose(proposal.logprobs, wanted.logprobs, rtol=0, atol=1e-12, err_msg=f"round {number}")
        np.testing.assert_array_equal(committed_slots(state), lengths - 1)
        for row in range(ROWS):
            used = slice(0, lengths[row] - 1 + LENGTH - 1)  # the text's slots, and those of this round's own drafts
            for name in ("keys", "values"):
                ours, theirs = (np.asarray(getattr(either.cache, name))[0, row, used] for either in (state, scratch))
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        # The next round: each row keeps between 1 and K + 1 tokens; what stands beyond the cut is junk. One row has ended once.
        count = random.integers(1, LENGTH + 2, ROWS)
        if number == 2:
            count[1] = 0
        counts_seen |= set(count.tolist())
        positions = (lengths[:, None] - 1 + np.arange(LENGTH + 1)).astype(np.int32)
        beyond = np.arange(LENGTH + 1) >= count[:, None]
        row_index = np.arange(ROWS)[:, None]
        kept = Kept(
            tokens=jnp.asarray(
                np.where(beyond, random.integers(0, VOCAB, positions.shape), text[row_index, positions + 1]).astype(np.int32)
            ),
            taps=jnp.asarray(np.where(beyond[..., None], 50.0, taps[row_index, positions])),
            positions=jnp.asarray(positions),
            length=jnp.asarray(count, jnp.int32),
        )
        state = DRAFT.commit(state, kept)
        lengths = lengths + count
    assert counts_seen == {0, 1, 2, 3, 4}


def test_proposals_match_plain_numpy(networks: tuple[Decoder, Eagle3]) -> None:
    """Slot t reads the taps of t and token t+1; deeper slots read the previous output and the drafted token (drafters.md 1.9)."""
    target, network = networks
    random = np.random.default_rng(1)
    lengths = [2, 4, 5]
    prompt = random.integers(0, VOCAB, (3, WIDTH)).astype(np.int32)
    drafted = random.integers(0, VOCAB, (3, LENGTH)).astype(np.int32)
    state = prefill(networks, prompt, lengths, taps_of(target, prompt))
    _, proposal = propose(networks, state, drafted)
    embedding = numpy_weights(target)["embedding"]
    for row, length in enumerate(lengths):
        text = prompt[row, :length]
        hidden, logits, seen = numpy_eagle_read(network, embedding, numpy_taps(numpy_decoder(target, text)[2]), text)
        for offset in range(LENGTH):
            law = np.exp(logits - logits.max())
            np.testing.assert_allclose(np.exp(proposal.logprobs[row, offset]), law / law.sum(), rtol=0, atol=1e-12)
            hidden, logits = numpy_eagle_slot(network, hidden, embedding[drafted[row, offset]], length - 1 + offset, seen)


def test_repeat_gives_each_row_of_a_group_its_prompts_state(networks: tuple[Decoder, Eagle3]) -> None:
    target, _ = networks
    prompt = np.random.default_rng(2).integers(0, VOCAB, (2, WIDTH)).astype(np.int32)
    state = prefill(networks, prompt, [3, 5], taps_of(target, prompt))
    repeated = DRAFT.repeat(state, 3)
    drafted = np.tile(np.array([[1, 2, 3]], np.int32), (2, 1))
    once, thrice = propose(networks, state, drafted)[1], propose(networks, repeated, np.repeat(drafted, 3, 0))[1]
    np.testing.assert_allclose(thrice.logprobs, np.repeat(np.asarray(once.logprobs), 3, 0), rtol=0, atol=1e-12)
