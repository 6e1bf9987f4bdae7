"""Drafts by look-up, without weights.

They copy the tokens after an earlier occurrence of the row's last tokens. They search the row's own
text, or also other answers to its prompt.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.drafts.base import Committed, Context, Draft, DrawnProposal, PointProposal, Sampler
from jaxspec.drafts.lookup.settings import Rule
from jaxspec.drafts.pieces import Pieces
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import scatter_to_vocabulary
from jaxspec.state import Prompts, PyTree, Tree, pytree


class Match(NamedTuple):
    """Best match in a text for one row."""

    score: Int[Array, "*B"]
    """Quality of the match; 0 without one."""
    tokens: Int[Array, "*B K"]
    lengths: Int[Array, "*B"]
    """Number of tokens after the match, 0..K."""


def ngram_draft(
    max_draft_length: int,
    rule: Rule,
    min_match: int,
    max_match: int,
    stop_ids: tuple[int, ...] = (),
) -> Draft:
    """Builds a prompt look-up draft.

    It proposes up to `max_draft_length` tokens that followed an earlier occurrence of the row's
    last `min_match` to `max_match` tokens. `vllm` reproduces vLLM's `ngram`. `hf` reproduces
    transformers' prompt look-up, which proposes nothing from the first of `stop_ids` on.
    """
    _check_limits(max_draft_length, min_match, max_match)

    def init_state(network: PyTree, target: Decoder, prompts: Prompts) -> tuple[()]:
        return ()

    def propose(
        network: PyTree,
        target: Decoder,
        state: tuple[()],
        cache: None,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[tuple[()], None, PointProposal]:
        search_text = partial(
            _search_text, length=length, min_match=min_match, latest=rule == "latest"
        )
        match = jax.vmap(search_text)(
            context.slot_tokens(), context.lengths, _last_tokens(context, max_match)
        )
        lengths = match.lengths
        if rule == "hf" and stop_ids:
            is_stop = jnp.isin(match.tokens, jnp.asarray(stop_ids, jnp.int32))
            lengths = jnp.where(
                jnp.any(is_stop, axis=1),
                jnp.minimum(lengths, jnp.argmax(is_stop, axis=1).astype(jnp.int32)),
                lengths,
            )
        return state, None, PointProposal(match.tokens, lengths)

    return _weightless_draft(max_draft_length, init_state, propose)


@pytree
class HistoryState(Tree):
    """Earlier answers to each row's prompt."""

    texts: Int[Array, "B H S"]
    lengths: Int[Array, "B H"]


def history_draft(max_draft_length: int, group_size: int, min_match: int, max_match: int) -> Draft:
    """Builds a look-up draft over a prompt's answers.

    It searches the row's own text, the group's other rows so far, and `Prompts.history`. The
    longest match of `min_match` to `max_match` tokens wins. Ties go to the match with the most
    tokens after it, up to the draft's length. Further ties go to the row's own text, its group,
    earlier answers, and the latest match, in this order.
    """
    _check_limits(max_draft_length, min_match, max_match)

    def propose(
        network: PyTree,
        target: Decoder,
        state: HistoryState,
        cache: None,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[HistoryState, None, PointProposal]:
        search_texts = jax.vmap(
            partial(_search_text, length=length, min_match=min_match, latest=True), (0, 0, None)
        )
        group_texts = _split_groups(context, group_size)

        def search_group(
            row: Int[Array, ""],
            own_length: Int[Array, ""],
            last_tokens: Int[Array, " N"],
            texts: Int[Array, "H S1"],
            text_lengths: Int[Array, " H"],
        ) -> Match:
            tokens, lengths = (leaf[row // group_size] for leaf in group_texts)
            is_own_row = jnp.arange(group_size, dtype=jnp.int32) == row % group_size
            matches = search_texts(tokens, jnp.where(is_own_row, own_length, lengths), last_tokens)
            # Ties go to the row's own text, then to its group's, then to earlier answers, which
            # older weights wrote. The factor 3 keeps the tie-break below any other difference.
            matches = matches._replace(score=3 * matches.score + 1 + is_own_row.astype(jnp.int32))
            # Without history the axis H has size 0, over which there is nothing to compare.
            if texts.size:
                past_matches = search_texts(texts, text_lengths, last_tokens)
                past_matches = past_matches._replace(score=3 * past_matches.score)
                matches = jax.tree.map(
                    lambda ours, theirs: jnp.concatenate([ours, theirs]), matches, past_matches
                )
            best = jnp.argmax(matches.score)
            return jax.tree.map(lambda leaf: leaf[best], matches)

        match = jax.vmap(search_group)(
            context.row_indices(),
            context.lengths,
            _last_tokens(context, max_match),
            state.texts,
            state.lengths,
        )
        return state, None, PointProposal(match.tokens, match.lengths)

    return _weightless_draft(max_draft_length, _init_history, propose)


def _init_history(network: PyTree, target: Decoder, prompts: Prompts) -> HistoryState:
    return HistoryState(texts=prompts.history, lengths=prompts.history_lengths)


def _split_groups(
    context: Context, group_size: int
) -> tuple[Int[Array, "n G S"], Int[Array, "n G"]]:
    """Returns the tokens and lengths of all rows, by group."""
    all_lengths = context.lengths if context.row_lengths is None else context.row_lengths
    return (
        context.tokens.reshape(-1, group_size, context.tokens.shape[1]),
        all_lengths.reshape(-1, group_size),
    )


@pytree
class CombinedState(Tree):
    """States of both drafts."""

    lookup: PyTree
    learned: PyTree


def prefer_lookup(lookup: Draft, learned: Draft) -> Draft:
    """Combines a look-up draft with a learned one.

    A row uses the look-up if it proposes a full block, else it draws from `learned`. The choice
    depends on the prefix only.

    Raises:
      ValueError: The lengths differ, or the kinds of draft are the wrong way round.
    """
    if lookup.max_length != learned.max_length or lookup.is_stochastic or not learned.is_stochastic:
        raise ValueError(
            f"a lookup of length {lookup.max_length} cannot stand before a draft of length"
            f" {learned.max_length}"
        )

    def init_state(network: PyTree, target: Decoder, prompts: Prompts) -> CombinedState:
        return CombinedState(
            lookup=lookup.init_state(network, target, prompts),
            learned=learned.init_state(network, target, prompts),
        )

    def prefill(
        network: PyTree,
        target: Decoder,
        state: CombinedState,
        cache: KVCache | None,
        pieces: Pieces,
        features: Float[Array, "N T C"],
    ) -> tuple[CombinedState, KVCache | None]:
        learned_state, cache = learned.prefill(
            network, target, state.learned, cache, pieces, features
        )
        return state.replace(learned=learned_state), cache

    def propose(
        network: PyTree,
        target: Decoder,
        state: CombinedState,
        cache: KVCache | None,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[CombinedState, KVCache | None, DrawnProposal]:
        lookup_state, _, match = lookup.propose(
            network, target, state.lookup, None, context, sample, length
        )
        is_full = match.lengths == length

        def force_match(
            logits: Float[Array, "*B W"], ids: Int[Array, " W"] | None, tokens: Int[Array, "*B"]
        ) -> Float[Array, "*B V"]:
            """Allows only the matched token in fully matched rows."""
            # The matched tokens may be missing from the draft's vocabulary, so the logits are
            # scattered to the target's first.
            logits = scatter_to_vocabulary(logits, ids, target.config.vocab)
            one_hot = tokens[..., None] == jnp.arange(logits.shape[-1], dtype=tokens.dtype)
            point_mass = jnp.where(one_hot, 0.0, -jnp.inf).astype(logits.dtype)
            return jnp.where(is_full.reshape(-1, *[1] * (logits.ndim - 1)), point_mass, logits)

        def sample_unless_matched(
            logits: Float[Array, "B W"], offset: int, ids: Int[Array, " W"] | None = None
        ) -> Int[Array, " B"]:
            return sample(force_match(logits, ids, match.tokens[:, offset]), offset)

        # The learned draft runs on the proposed tokens, matched ones too, so its cache is right
        # for either draft.
        learned_state, cache, proposal = learned.propose(
            network, target, state.learned, cache, context, sample_unless_matched, length
        )
        assert isinstance(proposal, DrawnProposal), "a stochastic draft draws its tokens"
        logits = force_match(proposal.logits, proposal.ids, match.tokens)
        lengths = jnp.where(is_full, match.lengths, proposal.lengths)
        combined = CombinedState(lookup=lookup_state, learned=learned_state)
        return combined, cache, DrawnProposal(proposal.tokens, logits, lengths)

    def catch_up(
        network: PyTree,
        target: Decoder,
        state: CombinedState,
        cache: KVCache | None,
        context: Context,
    ) -> tuple[CombinedState, KVCache | None]:
        learned_state, cache = learned.catch_up(network, target, state.learned, cache, context)
        return state.replace(learned=learned_state), cache

    def commit(state: CombinedState, committed: Committed) -> CombinedState:
        return CombinedState(
            lookup=lookup.commit(state.lookup, committed),
            learned=learned.commit(state.learned, committed),
        )

    return Draft(
        max_length=learned.max_length,
        taps=learned.taps,
        is_stochastic=True,
        empty_cache=learned.empty_cache,
        init_state=init_state,
        prefill=prefill,
        catch_up=catch_up,
        propose=propose,
        commit=commit,
    )


def _check_limits(max_draft_length: int, min_match: int, max_match: int) -> None:
    if max_draft_length < 1 or not 1 <= min_match <= max_match:
        raise ValueError(
            f"a lookup of {max_draft_length} tokens after {min_match} to {max_match} that match;"
            " 1 <= min_match <= max_match is needed"
        )


def _weightless_draft(
    max_draft_length: int,
    init_state: Callable[..., PyTree],
    propose: Callable[..., tuple[PyTree, None, PointProposal]],
) -> Draft:
    """Builds a draft without weights or cache."""

    def catch_up(
        network: PyTree, target: Decoder, state: PyTree, cache: None, context: Context
    ) -> tuple[PyTree, None]:
        return state, None

    return Draft(
        max_length=max_draft_length,
        taps=(),
        is_stochastic=False,
        empty_cache=lambda network, rows, positions: None,
        init_state=init_state,
        prefill=lambda network, target, state, cache, pieces, features: (state, cache),
        catch_up=catch_up,
        propose=propose,
        commit=lambda state, committed: state,
    )


def _last_tokens(context: Context, count: int) -> Int[Array, "B N"]:
    """Returns each row's last tokens, reversed.

    Positions before the row's start hold -1.
    """
    positions = context.lengths[:, None] - 1 - jnp.arange(count, dtype=jnp.int32)
    return jnp.where(positions >= 0, context.tokens_at(jnp.maximum(positions, 0)), -1)


def _search_text(
    text: Int[Array, " S"],
    text_length: Int[Array, ""],
    last_tokens: Int[Array, " N"],
    *,
    length: int,
    min_match: int,
    latest: bool,
) -> Match:
    """Finds the longest run of `last_tokens` in a text.

    Searches the first `text_length` tokens. At least one of them must follow the run. Compares N
    shifted copies of the text.
    """
    width = text.shape[0]
    positions = jnp.arange(width, dtype=jnp.int32)
    following_counts = jnp.clip(text_length - positions, 0, length)
    is_matching, match_lengths = positions < text_length, jnp.zeros_like(positions)
    for offset in range(last_tokens.shape[0]):
        # -2 equals no token, and not the -1 that pads `last_tokens` either.
        is_matching &= (
            jnp.pad(text, (offset + 1, 0), constant_values=-2)[:width] == last_tokens[offset]
        )
        match_lengths += is_matching.astype(jnp.int32)
    score = jnp.where(match_lengths >= min_match, match_lengths, 0)
    if latest:
        # Ties go to the match with more tokens after it, counted up to the draft's length.
        score = jnp.where(score > 0, score * length + following_counts, 0)
        # `argmax` returns the first of equal scores, so the order is reversed to get the latest.
        best_position = width - 1 - jnp.argmax(score[::-1]).astype(jnp.int32)
    else:
        best_position = jnp.argmax(score).astype(jnp.int32)
    tokens = jnp.take(text, best_position + jnp.arange(length, dtype=jnp.int32), mode="clip")
    return Match(
        score=score[best_position],
        tokens=tokens,
        lengths=jnp.where(score[best_position] > 0, following_counts[best_position], 0),
    )
