"""Drafts without weights: what followed the row's last tokens where they stood before, in its own
text or in others of its prompt."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.drafts.base import Context, Draft, Kept, Kind, Proposal, Sampler
from jaxspec.drafts.pieces import Pieces
from jaxspec.inputs.spec import DraftSpec
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import scatter_to_vocabulary
from jaxspec.state import Prompts, PyTree, Tree, pytree

Rule = Literal["vllm", "hf", "latest"]
"""Which of the places with the longest match: `vllm` and `hf` the earliest, `latest` the latest
with the most tokens after it."""


class Found(NamedTuple):
    """The best place of a text for one row: how good it is (0: nowhere), and the tokens that follow
    it."""

    score: Int[Array, "*B"]
    tokens: Int[Array, "*B K"]
    offered: Int[Array, "*B"]
    """Tokens that really follow, 0..K."""


def ngram(
    max_draft_length: int,
    rule: Rule,
    min_match: int,
    max_match: int,
    stop_ids: tuple[int, ...] = (),
) -> Draft:
    """Prompt lookup: up to `max_draft_length` tokens that followed an earlier occurrence of the
    row's last `min_match` to `max_match` tokens.

    `vllm` is vLLM's `ngram`, `hf` is transformers' prompt lookup, which offers nothing from the
    first of `stop_ids` on.
    """
    _check(max_draft_length, min_match, max_match)

    def start(network: PyTree, target: Decoder, prompts: Prompts) -> tuple[()]:
        return ()

    def propose(
        network: PyTree,
        target: Decoder,
        state: tuple[()],
        cache: None,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[tuple[()], None, Proposal]:
        search = partial(_search, length=length, min_match=min_match, latest=rule == "latest")
        found = jax.vmap(search)(context.texts(), context.lengths, _last_tokens(context, max_match))
        count = found.offered
        if rule == "hf" and stop_ids:
            ends = jnp.isin(found.tokens, jnp.asarray(stop_ids, jnp.int32))
            count = jnp.where(
                jnp.any(ends, axis=1),
                jnp.minimum(count, jnp.argmax(ends, axis=1).astype(jnp.int32)),
                count,
            )
        return state, None, Proposal(tokens=found.tokens, logits=None, offered=count)

    return _without_weights(max_draft_length, start, propose)


@pytree
class HistoryState(Tree):
    """Earlier texts of each row's prompt."""

    texts: Int[Array, "B H S"]
    lengths: Int[Array, "B H"]


def history(max_draft_length: int, group_size: int, min_match: int, max_match: int) -> Draft:
    """Looks the row's last tokens up in its own text, in what its group's other rows have so far,
    and in `Prompts.history`.

    The longest match of `min_match` to `max_match` tokens wins; among equals the one with the most
    tokens after it (up to the draft's length), then the row's own text before its siblings' (the
    same weights), and theirs before earlier ones (older weights), then the latest place.
    """
    _check(max_draft_length, min_match, max_match)

    def start(network: PyTree, target: Decoder, prompts: Prompts) -> HistoryState:
        return HistoryState(texts=prompts.history, lengths=prompts.history_lengths)

    def propose(
        network: PyTree,
        target: Decoder,
        state: HistoryState,
        cache: None,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[HistoryState, None, Proposal]:
        each_text = jax.vmap(
            partial(_search, length=length, min_match=min_match, latest=True), (0, 0, None)
        )
        all_lengths = context.lengths if context.row_lengths is None else context.row_lengths
        groups = (
            context.tokens.reshape(-1, group_size, context.tokens.shape[1]),
            all_lengths.reshape(-1, group_size),
        )

        def look(
            row: Int[Array, ""],
            size: Int[Array, ""],
            last: Int[Array, " N"],
            texts: Int[Array, "H S1"],
            text_lengths: Int[Array, " H"],
        ) -> Found:
            tokens, lengths = (leaf[row // group_size] for leaf in groups)
            own = jnp.arange(group_size, dtype=jnp.int32) == row % group_size
            live = each_text(tokens, jnp.where(own, size, lengths), last)
            live = live._replace(score=3 * live.score + 1 + own.astype(jnp.int32))
            if texts.size:
                earlier = each_text(texts, text_lengths, last)
                earlier = earlier._replace(score=3 * earlier.score)
                live = jax.tree.map(
                    lambda ours, theirs: jnp.concatenate([ours, theirs]), live, earlier
                )
            best = jnp.argmax(live.score)
            return jax.tree.map(lambda leaf: leaf[best], live)

        found = jax.vmap(look)(
            context.rows(),
            context.lengths,
            _last_tokens(context, max_match),
            state.texts,
            state.lengths,
        )
        return state, None, Proposal(tokens=found.tokens, logits=None, offered=found.offered)

    return _without_weights(max_draft_length, start, propose)


@pytree
class PreferringState(Tree):
    """The states of both drafts."""

    lookup: PyTree
    learned: PyTree


def preferring(lookup: Draft, learned: Draft) -> Draft:
    """Rows for which `lookup` offers a whole block take it, the others draw from `learned`: a
    choice by the prefix alone.

    The learned draft walks along the tokens that are proposed, so its cache is right whichever they
    are.
    """
    if lookup.length != learned.length or lookup.draws or not learned.draws:
        raise ValueError(
            f"a lookup of length {lookup.length} cannot stand before a draft of length"
            f" {learned.length}"
        )

    def start(network: PyTree, target: Decoder, prompts: Prompts) -> PreferringState:
        return PreferringState(
            lookup=lookup.start(network, target, prompts),
            learned=learned.start(network, target, prompts),
        )

    def read(
        network: PyTree,
        target: Decoder,
        state: PreferringState,
        cache: KVCache | None,
        pieces: Pieces,
        features: Float[Array, "N T C"],
    ) -> tuple[PreferringState, KVCache | None]:
        read, cache = learned.read(network, target, state.learned, cache, pieces, features)
        return state.replace(learned=read), cache

    def propose(
        network: PyTree,
        target: Decoder,
        state: PreferringState,
        cache: KVCache | None,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[PreferringState, KVCache | None, Proposal]:
        lookup_state, _, found = lookup.propose(
            network, target, state.lookup, None, context, sample, length
        )
        whole = found.offered == length

        def certain(
            logits: Float[Array, "*B W"], ids: Int[Array, " W"] | None, tokens: Int[Array, "*B"]
        ) -> Float[Array, "*B V"]:
            """Logits that allow only the tokens found, where a whole block was; over the target's
            vocabulary, since these may be none of the draft's."""
            logits = scatter_to_vocabulary(logits, ids, target.config.vocab)
            one_hot = tokens[..., None] == jnp.arange(logits.shape[-1], dtype=tokens.dtype)
            certainly = jnp.where(one_hot, 0.0, -jnp.inf).astype(logits.dtype)
            return jnp.where(whole.reshape(-1, *[1] * (logits.ndim - 1)), certainly, logits)

        def sample_found(
            logits: Float[Array, "B W"], offset: int, ids: Int[Array, " W"] | None = None
        ) -> Int[Array, " B"]:
            return sample(certain(logits, ids, found.tokens[:, offset]), offset)

        learned_state, cache, proposal = learned.propose(
            network, target, state.learned, cache, context, sample_found, length
        )
        assert proposal.logits is not None, "a draft that draws says from what"
        logits = certain(proposal.logits, proposal.ids, found.tokens)
        offered = jnp.where(whole, found.offered, proposal.offered)
        states = PreferringState(lookup=lookup_state, learned=learned_state)
        return states, cache, Proposal(tokens=proposal.tokens, logits=logits, offered=offered)

    def catch_up(
        network: PyTree,
        target: Decoder,
        state: PreferringState,
        cache: KVCache | None,
        context: Context,
    ) -> tuple[PreferringState, KVCache | None]:
        learned_state, cache = learned.catch_up(network, target, state.learned, cache, context)
        return state.replace(learned=learned_state), cache

    def commit(state: PreferringState, kept: Kept) -> PreferringState:
        return PreferringState(
            lookup=lookup.commit(state.lookup, kept), learned=learned.commit(state.learned, kept)
        )

    return Draft(
        length=learned.length,
        taps=learned.taps,
        draws=True,
        empty_cache=learned.empty_cache,
        start=start,
        read=read,
        catch_up=catch_up,
        propose=propose,
        commit=commit,
    )


def _check(max_draft_length: int, min_match: int, max_match: int) -> None:
    if max_draft_length < 1 or not 1 <= min_match <= max_match:
        raise ValueError(
            f"a lookup of {max_draft_length} tokens after {min_match} to {max_match} that match;"
            " 1 <= min_match <= max_match is needed"
        )


def _without_weights(
    max_draft_length: int,
    start: Callable[..., PyTree],
    propose: Callable[..., tuple[PyTree, None, Proposal]],
) -> Draft:
    """A draft that is a function of the context and of what was known before: it has no cache, and
    nothing is committed to it."""

    def catch_up(
        network: PyTree, target: Decoder, state: PyTree, cache: None, context: Context
    ) -> tuple[PyTree, None]:
        return state, None

    return Draft(
        length=max_draft_length,
        taps=(),
        draws=False,
        empty_cache=lambda network, rows, positions: None,
        start=start,
        read=lambda network, target, state, cache, pieces, features: (state, cache),
        catch_up=catch_up,
        propose=propose,
        commit=lambda state, kept: state,
    )


def _last_tokens(context: Context, count: int) -> Int[Array, "B N"]:
    """Each row's last tokens, the last one first; -1 before its beginning."""
    where = context.lengths[:, None] - 1 - jnp.arange(count, dtype=jnp.int32)
    return jnp.where(where >= 0, context.at(jnp.maximum(where, 0)), -1)


def _search(
    text: Int[Array, " S"],
    size: Int[Array, ""],
    last: Int[Array, " N"],
    *,
    length: int,
    min_match: int,
    latest: bool,
) -> Found:
    """Where in the first `size` tokens of `text` a token follows the longest run of `last`;
    compares N shifted copies."""
    width = text.shape[0]
    places = jnp.arange(width, dtype=jnp.int32)
    following = jnp.clip(size - places, 0, length)
    agrees, matched = places < size, jnp.zeros_like(places)
    for back in range(last.shape[0]):
        # -2: before the text, which nothing matches
        agrees &= jnp.pad(text, (back + 1, 0), constant_values=-2)[:width] == last[back]
        matched += agrees.astype(jnp.int32)
    score = jnp.where(matched >= min_match, matched, 0)
    if latest:
        score = jnp.where(score > 0, score * length + following, 0)
        place = width - 1 - jnp.argmax(score[::-1]).astype(jnp.int32)
    else:
        place = jnp.argmax(score).astype(jnp.int32)
    tokens = jnp.take(text, place + jnp.arange(length, dtype=jnp.int32), mode="clip")
    return Found(
        score=score[place], tokens=tokens, offered=jnp.where(score[place] > 0, following[place], 0)
    )


def _ngram(spec: DraftSpec, stop_ids: tuple[int, ...]) -> Draft:
    return ngram(spec.max_length, spec.rule, spec.min_match, spec.max_match, stop_ids)


def _history(spec: DraftSpec, stop_ids: tuple[int, ...]) -> Draft:
    return history(spec.max_length, spec.group_size, spec.min_match, spec.max_match)


_MATCH = frozenset({"rollout.lookup.min_match", "rollout.lookup.max_match"})
NGRAM = Kind(build=_ngram, settings=_MATCH | {"rollout.lookup.rule"}, lookup="ngram")
HISTORY = Kind(
    build=_history,
    settings=_MATCH | {"rollout.lookup.past"},
    lookup="history",
    reads_history=True,
    alone="ngram",
)
