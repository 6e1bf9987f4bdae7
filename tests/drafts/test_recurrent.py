"""Recurrent drafting over rounds with rejections: at every round it stands where a draft that had
just read the whole text would stand."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Committed, Context, Draft, DrawnProposal
from jaxspec.drafts.recurrent import RecurrentState, recurrent_draft
from jaxspec.models import contiguous
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder
from jaxspec.models.mtp import Mtp
from tests.conftest import eagle3, tiny_model, tiny_network, tiny_prompts
from tests.twins import (
    numpy_decoder,
    numpy_eagle_read,
    numpy_eagle_slot,
    numpy_softmax,
    numpy_taps,
    numpy_weights,
)
from tests.whole_texts import read_whole

pytestmark = pytest.mark.usefixtures("x64")

LENGTH, ROWS, WIDTH, SLOTS, VOCAB = 4, 5, 5, 80, 11
DEPTHS = {"eagle3": 1, "eagle3 of 2": 1, "mtp1": 1, "mtp2": 2, "mtp4": 4}


class Held(NamedTuple):
    """What the engine holds of a draft."""

    state: RecurrentState
    cache: KVCache


class Case(NamedTuple):
    draft: Draft
    depth: int
    target: Decoder
    network: Any
    features: Callable[[np.ndarray], np.ndarray]
    """Tokens of whole rows -> what the target's own pass gives at each position."""
    prefill: Callable[..., Held]
    """(tokens, lengths, features) -> held; each row `times` times."""
    catch_up: Callable[..., Held]
    """(held, committed tokens, lengths) -> held."""
    propose: Callable[..., tuple[Held, DrawnProposal]]
    """(held, committed tokens, lengths, tokens to draft, as many as are wanted) -> held, proposal:
    two drafts can walk the same way."""


MORE = [
    pytest.param("mtp2", marks=pytest.mark.slow),
    *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("eagle3", "mtp1", "mtp4")),
]


@pytest.fixture(scope="module", params=["eagle3 of 2", *MORE])
def case(x64: None, request: pytest.FixtureRequest) -> Case:
    kind, depth = request.param, DEPTHS[request.param]
    taps = (1, 2, 3) if "eagle3" in kind else ()
    draft = recurrent_draft(LENGTH, taps, depth)
    target = tiny_network(Decoder, tiny_model(), 1, 1.5)
    head = functools.partial(eagle3, sizes={"layers": 2 if kind == "eagle3 of 2" else 1})
    network = tiny_network(
        head if taps else lambda config, key: Mtp(config, key, depth), tiny_model(), 2, 1.5
    )

    @jax.jit
    def features(target: Decoder, tokens: jax.Array) -> Any:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        forward = target(tokens, positions, taps=taps)
        return forward.taps if taps else forward.hidden

    @functools.partial(jax.jit, static_argnames="times")
    def prefill(
        target: Decoder,
        network: Any,
        tokens: jax.Array,
        lengths: jax.Array,
        features: jax.Array,
        times: int = 1,
    ) -> Held:
        prompts = tiny_prompts(tokens.shape[0]).replace(tokens=tokens, lengths=lengths)
        state, cache = read_whole(draft, network, target, prompts, features)
        return Held(
            jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), state),
            contiguous.expand_prompts(cache, times, SLOTS),
        )

    @jax.jit
    def catch_up(
        target: Decoder, network: Any, held: Held, tokens: jax.Array, lengths: jax.Array
    ) -> Held:
        state, cache = draft.catch_up(
            network, target, held.state, held.cache, Context(tokens, lengths)
        )
        assert cache is not None
        return Held(state, cache)

    @jax.jit
    def propose(
        target: Decoder,
        network: Any,
        held: Held,
        tokens: jax.Array,
        lengths: jax.Array,
        drafted: jax.Array,
    ) -> tuple[Held, DrawnProposal]:
        state, cache, proposal = draft.propose(
            network,
            target,
            held.state,
            held.cache,
            Context(tokens, lengths),
            lambda logits, offset, ids: drafted[:, offset],
            drafted.shape[1],
        )
        assert cache is not None
        assert isinstance(proposal, DrawnProposal)
        return Held(state, cache), proposal

    def ready(*arrays: Any) -> list[Any]:
        return [
            jnp.asarray(array, jnp.int32)
            if np.asarray(array).dtype.kind == "i"
            else jnp.asarray(array)
            for array in arrays
        ]

    return Case(
        draft,
        depth,
        target,
        network,
        lambda tokens: np.asarray(features(target, *ready(tokens))),
        lambda *arrays, times=1: prefill(target, network, *ready(*arrays), times=times),
        lambda held, *arrays: catch_up(target, network, held, *ready(*arrays)),
        lambda held, *arrays: propose(target, network, held, *ready(*arrays)),
    )


def committed(text: np.ndarray, lengths: Any, junk: int = 0) -> np.ndarray:
    """Rows as far as they are committed."""
    return np.where(np.arange(text.shape[1]) < np.asarray(lengths)[:, None], text, junk).astype(
        np.int32
    )


def logits_of(proposal: DrawnProposal) -> np.ndarray:
    return np.asarray(proposal.logits)


def drafts_that_keep(
    random: np.random.Generator,
    text: np.ndarray,
    lengths: np.ndarray,
    count: np.ndarray,
    drafts: int,
) -> np.ndarray:
    """So many drafts, of which the first `count - 1` come true and the next one does not."""
    coming = text[np.arange(len(text))[:, None], lengths[:, None] + np.arange(drafts)]
    wrong = (coming + random.integers(1, VOCAB, coming.shape)) % VOCAB
    return np.where(np.arange(drafts) < count[:, None] - 1, coming, wrong).astype(np.int32)


def kept_block(
    random: np.random.Generator,
    text: np.ndarray,
    features: np.ndarray,
    lengths: np.ndarray,
    count: np.ndarray,
    drafts: int,
) -> Committed:
    """What a round commits; beyond the cut stands junk."""
    positions = (lengths[:, None] - 1 + np.arange(drafts + 1)).astype(np.int32)
    beyond = np.arange(drafts + 1) >= count[:, None]
    row = np.arange(len(text))[:, None]
    return Committed(
        tokens=jnp.asarray(
            np.where(beyond, random.integers(0, VOCAB, positions.shape), text[row, positions + 1]),
            jnp.int32,
        ),
        features=jnp.asarray(np.where(beyond[..., None], 50.0, features[row, positions])),
        positions=jnp.asarray(positions),
        lengths=jnp.asarray(count, jnp.int32),
    )


def slots_of(
    cache: KVCache, layer: int, row: int, slots: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of some slots of a row."""
    return np.asarray(cache.keys[layer])[row][:, :, slots], np.asarray(cache.values[layer])[row][
        :, slots
    ]


SCHEDULE = (4, 4, 4, 1, 4, 2, 1, 0, 1, 4, 0, 0, 2, 4, 0, 1, 0, 0, 0, 0, 0, 0, 1, 4)
"""Drafts of each round: long ones before short ones, and more rounds without drafts in a row than a
round can keep tokens."""


def test_every_round_equals_a_prefill_from_scratch(case: Case) -> None:
    """The cache is rewritten with true features in all layers (in vLLM's issue 14649 it was not);
    nothing of a rejected draft remains, and nothing that was committed is lost, whatever the
    lengths of the rounds."""
    random = np.random.default_rng(0)
    # what will be committed, row by row
    text = random.integers(0, VOCAB, (ROWS, SLOTS)).astype(np.int32)
    features = case.features(text)
    lengths = np.array([2, 5, 3, 4, 1])
    prompt = committed(text[:, :WIDTH], lengths, 9)
    held = case.prefill(prompt, lengths, case.features(prompt))
    counts_seen: set[int] = set()
    for number, drafts in enumerate(SCHEDULE):
        count = random.integers(1, drafts + 2, ROWS)
        count[2] = drafts + 1
        if number == 2:
            count[1] = 0  # the row has ended
        drafted = drafts_that_keep(random, text, lengths, count, drafts)
        if drafts:
            held, proposal = case.propose(held, committed(text, lengths), lengths, drafted)
            np.testing.assert_array_equal(proposal.tokens, drafted)
            np.testing.assert_array_equal(proposal.lengths, np.where(lengths > 1, drafts, 0))
            # Row by row: a draft that reads the committed text as its prompt.
            scratch = case.prefill(committed(text, lengths, 7), lengths, features)
            scratch, wanted = case.propose(scratch, committed(text, lengths), lengths, drafted)
            for row in range(ROWS):
                if lengths[row] > 1:
                    laws = logits_of(proposal)[row], logits_of(wanted)[row]
                    np.testing.assert_allclose(*laws, rtol=0, atol=1e-12, err_msg=f"round {number}")
                for layer in range(case.depth * case.network.stack):
                    # The text's slots, and those that this round drafted in the layer.
                    turn = layer // case.network.stack
                    true = lengths[row] - 1
                    steps = np.arange(turn or case.depth, drafts, case.depth)
                    used = np.concatenate(
                        [np.arange(true), true - 1 + steps if true else steps[:0]]
                    )
                    for ours, theirs in zip(
                        *(slots_of(either.cache, layer, row, used) for either in (held, scratch)),
                        strict=True,
                    ):
                        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        else:
            held = case.catch_up(held, committed(text, lengths), lengths)
        counts_seen |= set(count.tolist())
        held = held._replace(
            state=case.draft.commit(
                held.state, kept_block(random, text, features, lengths, count, drafts)
            )
        )
        lengths = lengths + count
    assert counts_seen == {0, 1, 2, 3, 4, 5}


def slot(
    network: Any, layer: int, hidden: np.ndarray, embedded: np.ndarray, position: int
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Query, (key, value) and residual of one slot."""
    heads = network.attention_inputs(
        layer,
        jnp.asarray(hidden)[None, None],
        jnp.asarray(embedded)[None, None],
        jnp.full((1, 1), position, jnp.int32),
    )
    return (
        np.asarray(heads.query)[0, 0],
        heads.residual,
        (np.asarray(heads.key)[0, 0], np.asarray(heads.value)[0, 0]),
    )


def finish(
    network: Any, layer: int, query: np.ndarray, residual: Any, seen: list[Any]
) -> np.ndarray:
    """The layer's output of one slot that attends to the slots listed."""
    repeats = query.shape[0] // seen[0][0].shape[0]
    keys, values = (np.repeat(np.array(part), repeats, axis=1) for part in zip(*seen, strict=True))
    weights = numpy_softmax(np.einsum("nh,snh->ns", query, keys) / np.sqrt(query.shape[-1]))
    attended = jnp.asarray(np.einsum("ns,snh->nh", weights, values))[None, None]
    return np.asarray(network.layer_output(layer, residual, attended))[0, 0]


def chain(
    case: Case, features: np.ndarray, text: np.ndarray, drafted: np.ndarray
) -> list[np.ndarray]:
    """Logits of each draft of one row, slot by slot with explicit lists: what each slot reads and
    sees is written out."""
    network, embedding = case.network, numpy_weights(case.target)["embedding"]
    read = np.asarray(network.to_hidden(jnp.asarray(features)[None]))[0]
    seen: list[list[Any]] = [[] for _ in range(case.depth * network.stack)]
    outputs: list[list[np.ndarray]] = [[] for _ in range(case.depth)]
    for s in range(len(text) - 1):
        for turn in range(case.depth):
            below = outputs[turn - 1][s - 1] if s else np.zeros(read.shape[1])
            hidden = below if turn else read[s]
            for layer in range(turn * network.stack, (turn + 1) * network.stack):
                query, residual, pair = slot(network, layer, hidden, embedding[text[s + 1]], s)
                seen[layer].append(pair)
                visible = [*seen[layer][turn : max(s - turn + 1, 0)], *([pair] * (turn > 0))]
                hidden = finish(network, layer, query, residual, visible)
            outputs[turn].append(hidden)
    hidden, laws, own = outputs[0][-1], [], [[] for _ in seen]
    for step in range(1, len(drafted) + 1):
        laws.append(np.asarray(network.logits(case.target, jnp.asarray(hidden)[None, None]))[0, 0])
        turn = step % case.depth
        for layer in range(turn * network.stack, (turn + 1) * network.stack):
            query, residual, pair = slot(
                network, layer, hidden, embedding[drafted[step - 1]], len(text) - 2 + step
            )
            own[layer].append(pair)
            hidden = finish(network, layer, query, residual, [*seen[layer][turn:], *own[layer]])
    return laws


def test_proposals_match_a_loop_over_slots(case: Case) -> None:
    """Token i+1 comes from turn i mod n, which reads the turn before it one slot below, and sees no
    other turn's drafts."""
    random = np.random.default_rng(1)
    lengths = [2, 4, 5]
    prompt = random.integers(0, VOCAB, (3, WIDTH)).astype(np.int32)
    drafted = random.integers(0, VOCAB, (3, LENGTH)).astype(np.int32)
    features = case.features(prompt)
    _, proposal = case.propose(
        case.prefill(prompt, lengths, features), committed(prompt, lengths), lengths, drafted
    )
    for row, length in enumerate(lengths):
        wanted = chain(case, features[row, :length], prompt[row, :length], drafted[row])
        np.testing.assert_allclose(logits_of(proposal)[row], wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", ["eagle3 of 2"], indirect=True)
def test_eagle_proposals_match_plain_numpy(case: Case) -> None:
    """Slot t reads the taps of t and token t+1; deeper slots read the previous output and the
    drafted token."""
    random = np.random.default_rng(1)
    lengths = [2, 4, 5]
    prompt = random.integers(0, VOCAB, (3, WIDTH)).astype(np.int32)
    drafted = random.integers(0, VOCAB, (3, LENGTH)).astype(np.int32)
    _, proposal = case.propose(
        case.prefill(prompt, lengths, case.features(prompt)),
        committed(prompt, lengths),
        lengths,
        drafted,
    )
    embedding = numpy_weights(case.target)["embedding"]
    for row, length in enumerate(lengths):
        text = prompt[row, :length]
        hidden, logits, seen = numpy_eagle_read(
            case.network, embedding, numpy_taps(numpy_decoder(case.target, text)[2]), text
        )
        for offset in range(LENGTH):
            np.testing.assert_allclose(logits_of(proposal)[row, offset], logits, rtol=0, atol=1e-11)
            hidden, logits = numpy_eagle_slot(
                case.network, hidden, embedding[drafted[row, offset]], length - 1 + offset, seen
            )


def test_repeat_gives_each_row_of_a_group_its_prompts_state(case: Case) -> None:
    random = np.random.default_rng(2)
    prompt, lengths = random.integers(0, VOCAB, (2, WIDTH)).astype(np.int32), np.array([3, 5])
    text, drafted = committed(prompt, lengths), np.tile(np.array([[1, 2, 3, 4]], np.int32), (2, 1))
    features = case.features(prompt)
    once = case.propose(case.prefill(prompt, lengths, features), text, lengths, drafted)[1]
    repeated = case.prefill(prompt, lengths, features, times=3)
    thrice = case.propose(repeated, *(np.repeat(part, 3, 0) for part in (text, lengths, drafted)))[
        1
    ]
    np.testing.assert_allclose(
        logits_of(thrice), np.repeat(logits_of(once), 3, 0), rtol=0, atol=1e-12
    )
