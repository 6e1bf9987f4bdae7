"""One round of all slots: draft, verify, commit."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import sampling
from jaxspec.drafts.base import Committed, Context, Draft, Proposal, Sampler, block_positions
from jaxspec.mesh import sum_over_experts
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.rollout.commit import commit_block
from jaxspec.rollout.decode_state import (
    Caches,
    DecodeState,
    Rows,
    active_slots,
    add_to_rows,
    gather_rows,
    rows_may_wait,
    rows_of_slots,
    slot_count,
)
from jaxspec.rollout.feedback import acceptance
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.block import Block
from jaxspec.rollout.verify import count_leading, match_rule
from jaxspec.state import RUNNING, AcceptanceEstimate, Drafter, Statistics


class _RoundStart(NamedTuple):
    """State of the slots' rows before a round."""

    running: Bool[Array, " B"]
    """Whether the slot has a row that has not ended."""
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]


def run_round(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    state: DecodeState,
    settings: Settings,
    length: int,
) -> DecodeState:
    """Runs a round: drafts `length` tokens, verifies them, and commits.

    Slots without a running row do not change.
    """
    rollout, rows, round_start = state.rollout, rows_of_slots(state), _read_round_start(state)
    is_matched, selection = (
        uses_matching(draft, settings),
        _choose_measured_slots(state, settings.group_size),
    )
    noise = _draw_noise(
        gather_rows(state.keys, rows),
        round_start.lengths,
        length,
        target.config.vocab,
        rollout.logprobs.dtype,
        is_matched,
        settings,
    )
    context = Context(
        rollout.tokens,
        # A length of 0 marks a slot without a running row.
        jnp.where(round_start.running, round_start.lengths, 0),
        rows,
        rollout.lengths,
    )
    caches = state.caches.with_table(state.pages.table[: slot_count(state)])
    draft_state, draft_cache = state.draft, caches.draft
    proposal = Proposal(
        jnp.zeros((len(round_start.lengths), 0), jnp.int32),
        None,
        jnp.zeros_like(round_start.lengths),
    )
    if draft is not None:
        with jax.named_scope("draft"):
            draft_inputs = drafter.network, target, draft_state, draft_cache, context
            if length:
                draft_state, draft_cache, proposal = draft.propose(
                    *draft_inputs,
                    _make_sampler(
                        round_start, length, drafter, target.config.vocab, settings, noise
                    ),
                    length,
                )
            else:
                # The draft reads the text of plain rounds too, so that it has no gap later.
                draft_state, draft_cache = draft.catch_up(*draft_inputs)
    with jax.named_scope("verify"):
        # The block starts with the last committed token, which the target has not read yet.
        positions = block_positions(round_start.lengths - 1, length + 1)
        tokens = jnp.concatenate(
            [context.tokens_at(round_start.lengths[:, None] - 1), proposal.tokens], axis=1
        )
        forward = target(tokens, positions, caches.target, draft.taps if draft else ())
        assert forward.cache is not None, "a decoder with a cache returns it"
        logits = target.logits(forward.hidden)
        response_positions = _response_positions(round_start, length + 1)
        # Drafts that are matched with target samples were not drawn from their logits.
        as_point_masses = is_matched and settings.rule is not None
        comparison = settings.verification.compare_block(
            Block(
                logits,
                proposal._replace(logits=None) if as_point_masses else proposal,
                response_positions,
                settings.processing,
                _temperature_factors(drafter, settings, length),
                settings.grid,
                selection.slots,
            )
        )
        # Nothing can be verified from the first position on where the target is not finite.
        draft_counts = jnp.minimum(proposal.lengths, count_leading(comparison.finite[:, :length]))
        if noise.shared is not None:
            verdict = match_rule(
                comparison.distributions, proposal.tokens, draft_counts, noise.shared
            )
        else:
            assert settings.rule is not None and noise.next is not None, "rules need noise"  # noqa: PT018
            verdict = settings.rule(
                comparison.distributions, proposal.tokens, draft_counts, noise.coins, noise.next
            )
    with jax.named_scope("commit"):
        committed = commit_block(state, verdict, proposal, comparison, settings)
        counts = acceptance.count_round(
            round_start.running,
            verdict,
            proposal.lengths,
            comparison.draft_overlap,
            comparison.entropy,
            committed.token_counts,
            selection.slots,
            acceptance.QUARTERS * response_positions[:, 0] // settings.max_new_tokens,
        )
        rollout = committed.rollout
        has_ended = round_start.running & (gather_rows(rollout.status, rows) != RUNNING)
        counts = _pad_depths(
            counts.replace(end_round=jnp.where(has_ended, state.round + 1, 0)),
            draft.max_length if draft else 0,
        )
        if draft is not None:
            draft_commit = Committed(
                committed.tokens, draft_features(forward), positions, committed.token_counts
            )
            draft_state = draft.commit(draft_state, draft_commit)
    return state.replace(
        rollout=rollout.replace(
            statistics=_add_statistics(rollout.statistics, counts, rows, selection.groups)
        ),
        stop_state=committed.stop_state,
        caches=Caches(target=forward.cache, draft=draft_cache).without_table(),
        draft=draft_state,
        round=state.round + 1,
        acceptance=_update_estimate(state.acceptance, counts)
        if settings.lengths
        else state.acceptance,
    )


def _read_round_start(state: DecodeState) -> _RoundStart:
    rollout, rows = state.rollout, rows_of_slots(state)
    return _RoundStart(
        running=active_slots(state),
        lengths=gather_rows(rollout.lengths, rows),
        prompt_lengths=gather_rows(rollout.prompt_lengths, rows),
    )


def draft_features(forward: DecoderOutput) -> Float[Array, "B T C"]:
    """Returns the features that a draft reads: aux or final hidden states."""
    return forward.hidden if forward.taps is None else forward.taps


def _response_positions(round_start: _RoundStart, count: int) -> Int[Array, "B T"]:
    """Returns response positions of the next `count` tokens of each slot."""
    return block_positions(round_start.lengths - round_start.prompt_lengths, count)


def uses_matching(draft: Draft | None, settings: Settings) -> bool:
    """Returns whether drafts are matched with tokens that the target samples.

    This holds in coupled mode, and if no draft is drawn at random.
    """
    # With a grid of (0,), drafts are the argmax.
    return (
        settings.rule is None or draft is None or not draft.is_stochastic or settings.grid == (0.0,)
    )


class _RoundNoise(NamedTuple):
    """Noise of a round."""

    shared: sampling.Noise | None
    """Noise of the target's samples, which drafts are matched with. None for the other rules."""
    draft: sampling.Noise | None
    """Noise of each draft."""
    coins: Float[Array, "B K"] | None
    """Acceptance coins."""
    next: sampling.Noise | None
    """Noise of the token after the cut."""


def _draw_noise(
    keys: Key[Array, " B"],
    lengths: Int[Array, " B"],
    length: int,
    vocab: int,
    dtype: Any,
    is_matched: bool,
    settings: Settings,
) -> _RoundNoise:
    """Draws the noise of a round.

    Noise of matched tokens is keyed by absolute position. All other noise is keyed by the committed
    length at the start of the round.
    """
    # Coupled mode: draft and target share noise. A token beyond the cut gets the same noise in the
    # next round, so tokens do not depend on where rounds cut.
    if settings.rule is None:
        gumbel = sampling.gumbel_noise(
            sampling.position_keys(keys, lengths, length + 1), vocab, dtype
        )
        return _RoundNoise(gumbel, gumbel, None, None)
    levels = sampling.level_count(vocab)
    # A plain round among rounds with drafts: keyed as they are.
    if not is_matched and not length:
        uniforms = sampling.Uniforms(
            sampling.uniform_numbers(keys, lengths[:, None], levels, dtype)
        )
        return _RoundNoise(uniforms, None, None, None)
    if is_matched:
        shared = sampling.Uniforms(
            sampling.uniform_numbers(keys, block_positions(lengths, length + 1), levels, dtype)
        )
        return _RoundNoise(shared, shared, None, None)
    # Rules look at drafts and coins beyond the cut. With keys by position, these would come again
    # in the next round, which would bias the distribution.
    numbers = sampling.uniform_numbers(
        keys, lengths[:, None], length + (length + 1) * levels, dtype
    )[:, 0]
    coins, draws = numbers[:, :length], numbers[:, length:].reshape(-1, length + 1, levels)
    return _RoundNoise(
        None, sampling.Uniforms(draws[:, :length]), coins, sampling.Uniforms(draws[:, length])
    )


def _temperature_factors(
    drafter: Drafter, settings: Settings, length: int
) -> Float[Array, " K"] | float:
    """Returns the temperature factor at each of `length` depths."""
    return (
        settings.grid[0]
        if len(settings.grid) == 1
        else jnp.asarray(settings.grid, jnp.float32)[drafter.factor_index[:length]]
    )


def _make_sampler(
    round_start: _RoundStart,
    length: int,
    drafter: Drafter,
    vocab: int,
    settings: Settings,
    noise: _RoundNoise,
) -> Sampler:
    """Returns the function with which a draft samples its tokens."""
    # These are the factors of `compare_block`: the rules are exact only for drafts from the
    # distribution that they compare.
    factors = _temperature_factors(drafter, settings, length)

    def sample(
        logits: Float[Array, "B W"], offset: int, ids: Int[Array, " W"] | None = None
    ) -> Int[Array, " B"]:
        return settings.verification.draw_drafts(
            logits,
            ids,
            vocab,
            settings.processing,
            _response_positions(round_start, offset + 1)[:, offset],
            factors[offset] if isinstance(factors, jax.Array) else factors,
            0.0 in settings.grid,
            jax.tree.map(lambda leaf: leaf[:, offset], noise.draft),
        )

    return sample


def _pad_depths(counts: Statistics, length: int) -> Statistics:
    """Pads counts by depth with zeros, from the round's draft length to the maximum."""
    missing_depths = length - counts.draft_rounds.shape[1]
    if not missing_depths:
        return counts

    def pad_leaf(leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, 0), (0, missing_depths)] + [(0, 0)] * (leaf.ndim - 2))

    names = "draft_rounds reached accepted overlap overlap_by_factor draft_entropy"
    return counts.replace(**{name: pad_leaf(getattr(counts, name)) for name in names.split()})


class _MeasuredSlots(NamedTuple):
    """Slots in which draft temperatures are compared.

    They have the first row of each group.
    """

    slots: slice | Int[Array, " m"]
    # Counts of a group number beyond the last group are dropped.
    groups: slice | Int[Array, " m"]
    """Group of each of these slots, or the number of groups if it has another row."""


def _choose_measured_slots(state: DecodeState, group_size: int) -> _MeasuredSlots:
    if isinstance(rows_of_slots(state), slice):
        return _MeasuredSlots(slice(None, None, group_size), slice(None))
    group_count = len(state.rollout.status) // group_size
    # In the tail every slot may have a first row. While rows wait, one slot in `group_size` has one
    # on average, and twice as many are measured.
    slot_total = slot_count(state)
    count = min(
        slot_total,
        group_count,
        2 * -(-slot_total // group_size) if rows_may_wait(state) else group_count,
    )
    is_first_row = active_slots(state) & (state.row % group_size == 0)
    slots = jnp.argsort(~is_first_row, stable=True)[:count].astype(jnp.int32)
    return _MeasuredSlots(
        slots, jnp.where(is_first_row[slots], state.row[slots] // group_size, group_count)
    )


def _add_statistics(
    statistics: Statistics,
    counts: Statistics,
    rows: Rows,
    groups: slice | Int[Array, " m"],
) -> Statistics:
    """Adds a round's counts to the statistics.

    Counts are by slot, but those of measured slots are by group.
    """
    by_factor = add_to_rows(statistics.overlap_by_factor, groups, counts.overlap_by_factor)
    summed = jax.tree.map(
        lambda leaf, leaf_counts: add_to_rows(leaf, rows, leaf_counts),
        *(tree.replace(overlap_by_factor=None) for tree in (statistics, counts)),
    )
    return summed.replace(overlap_by_factor=by_factor)


def _update_estimate(estimate: AcceptanceEstimate, counts: Statistics) -> AcceptanceEstimate:
    """Updates the acceptance estimate with a round's counts.

    Drafts beyond the end of a text do not count.
    """
    # Expert members must choose the same next length.
    reached, accepted = (
        sum_over_experts(jnp.sum(leaf, axis=0, dtype=jnp.float32))[None]
        for leaf in (counts.reached, counts.accepted)
    )
    return estimate.replace(
        reached=estimate.reached + reached,
        accepted=estimate.accepted + accepted,
    )
