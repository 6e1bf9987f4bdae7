"""One round of all slots: draft, verify, commit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import (
    Committed,
    Context,
    Draft,
    Proposal,
    Sampler,
    block_positions,
    empty_proposal,
)
from jaxspec.mesh import sum_over_experts
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.commit import BlockCommit, commit_block
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
from jaxspec.rollout.verification.block import Block, BlockComparison
from jaxspec.rollout.verification.modes import RoundNoise
from jaxspec.rollout.verify import Verdict, count_leading
from jaxspec.state import RUNNING, AcceptanceEstimate, Drafter, PyTree, Statistics


class _MeasuredSlots(NamedTuple):
    """Slots in which draft temperatures are compared.

    Only those with the first row of a group count.
    """

    slots: slice | Int[Array, " m"]
    # Counts of a group number beyond the last group are dropped.
    groups: slice | Int[Array, " m"]
    """Group of each slot, or the number of groups if its row is not the first of a group."""


class _RoundStart(NamedTuple):
    """State of the slots' rows before a round."""

    context: Context
    running: Bool[Array, " B"]
    """Whether the slot has a row that has not ended."""
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    measured: _MeasuredSlots

    def response_positions(self, count: int) -> Int[Array, "B T"]:
        """Returns response positions of the next `count` tokens of each slot."""
        return block_positions(self.lengths - self.prompt_lengths, count)


class _Drafted(NamedTuple):
    """Draft after its proposal."""

    state: PyTree
    cache: KVCache | None
    proposal: Proposal


class TargetPass(NamedTuple):
    """Outputs of a pass of the target."""

    hidden: Float[Array, "B T D"]
    """Input of `Decoder.logits`."""
    features: Float[Array, "B T C"]
    """Features that a draft reads: aux or final hidden states."""
    cache: KVCache


class _Verified(NamedTuple):
    """Block after verification."""

    positions: Int[Array, "B K1"]
    target_pass: TargetPass
    comparison: BlockComparison
    verdict: Verdict


def run_round(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    state: DecodeState,
    settings: Settings,
    length: int,
) -> DecodeState:
    """Runs a round: drafts `length` tokens, verifies them, and commits.

    Rows that have ended do not change.
    """
    round_start = _read_round_start(state, settings.group_size)
    noise = settings.mode.draw_noise(
        gather_rows(state.keys, rows_of_slots(state)),
        round_start.lengths,
        length,
        target.config.vocab,
        state.rollout.logprobs.dtype,
    )
    state = state.replace(caches=state.caches.with_table(state.pages.table[: slot_count(state)]))
    with jax.named_scope("draft"):
        sample = _make_sampler(drafter, settings, target.config.vocab, length, round_start, noise)
        drafted = _draft_tokens(target, drafter, draft, state, round_start.context, sample, length)
    proposal = drafted.proposal
    with jax.named_scope("verify"):
        verified = _verify_block(
            target, drafter, draft, proposal, state.caches.target, settings, round_start, noise
        )
    with jax.named_scope("commit"):
        committed = commit_block(state, verified.verdict, proposal, verified.comparison, settings)
        counts = _count_round(
            state, round_start, proposal, verified, committed, settings.max_new_tokens
        )
        counts = _pad_depths(counts, draft.max_length)
        draft_commit = Committed(
            committed.tokens,
            verified.target_pass.features,
            verified.positions,
            committed.token_counts,
        )
        draft_state = draft.commit(drafted.state, draft_commit)
    statistics = _add_statistics(
        committed.rollout.statistics, counts, rows_of_slots(state), round_start.measured.groups
    )
    return state.replace(
        rollout=committed.rollout.replace(statistics=statistics),
        stop_state=committed.stop_state,
        caches=Caches(target=verified.target_pass.cache, draft=drafted.cache).without_table(),
        draft=draft_state,
        round=state.round + 1,
        acceptance=_update_estimate(state.acceptance, counts)
        if settings.lengths
        else state.acceptance,
    )


def _read_round_start(state: DecodeState, group_size: int) -> _RoundStart:
    rollout, rows, running = state.rollout, rows_of_slots(state), active_slots(state)
    lengths = gather_rows(rollout.lengths, rows)
    return _RoundStart(
        # A length of 0 marks a slot without a running row.
        Context(rollout.tokens, jnp.where(running, lengths, 0), rows, rollout.lengths),
        running,
        lengths,
        gather_rows(rollout.prompt_lengths, rows),
        _choose_measured_slots(state, group_size),
    )


def _draft_tokens(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    state: DecodeState,
    context: Context,
    sample: Sampler,
    length: int,
) -> _Drafted:
    """Drafts `length` tokens for each slot."""
    draft_inputs = drafter.network, target, state.draft, state.caches.draft, context
    # The draft reads the text of plain rounds too, so that it has no gap later.
    if not length:
        return _Drafted(*draft.catch_up(*draft_inputs), empty_proposal(context))
    return _Drafted(*draft.propose(*draft_inputs, sample, length))


def run_target(
    target: Decoder,
    draft: Draft,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: KVCache,
) -> TargetPass:
    """Runs the target on a block, with the features of a draft."""
    forward = target(tokens, positions, cache, draft.taps)
    assert forward.cache is not None, "a decoder with a cache returns it"
    features = forward.hidden if forward.taps is None else forward.taps
    return TargetPass(forward.hidden, features, forward.cache)


def _verify_block(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    proposal: Proposal,
    cache: KVCache,
    settings: Settings,
    round_start: _RoundStart,
    noise: RoundNoise,
) -> _Verified:
    """Runs the target on the drafts, and chooses those to keep."""
    length = proposal.tokens.shape[1]
    # The block starts with the last committed token, which the target has not read yet.
    positions = block_positions(round_start.lengths - 1, length + 1)
    last_tokens = round_start.context.tokens_at(round_start.lengths[:, None] - 1)
    tokens = jnp.concatenate([last_tokens, proposal.tokens], axis=1)
    target_pass = run_target(target, draft, tokens, positions, cache)
    comparison = settings.verification.compare_block(
        Block(
            target.logits(target_pass.hidden),
            settings.mode.select_distributions(proposal),
            round_start.response_positions(length + 1),
            settings.processing,
            _temperature_factors(drafter, settings, length),
            settings.grid,
            round_start.measured.slots,
        )
    )
    # Nothing can be verified from the first position on where the target is not finite.
    draft_counts = jnp.minimum(proposal.lengths, count_leading(comparison.finite[:, :length]))
    verdict = noise.verify(comparison.distributions, proposal.tokens, draft_counts)
    return _Verified(positions, target_pass, comparison, verdict)


def _count_round(
    state: DecodeState,
    round_start: _RoundStart,
    proposal: Proposal,
    verified: _Verified,
    committed: BlockCommit,
    max_new_tokens: int,
) -> Statistics:
    """Counts the round of each slot."""
    first_positions = round_start.response_positions(1)[:, 0]
    counts = acceptance.count_round(
        round_start.running,
        verified.verdict,
        proposal.lengths,
        verified.comparison.draft_overlap,
        verified.comparison.entropy,
        committed.token_counts,
        round_start.measured.slots,
        acceptance.QUARTERS * first_positions // max_new_tokens,
    )
    status = gather_rows(committed.rollout.status, rows_of_slots(state))
    has_ended = round_start.running & (status != RUNNING)
    return counts.replace(end_round=jnp.where(has_ended, state.round + 1, 0))


def _temperature_factors(
    drafter: Drafter, settings: Settings, length: int
) -> Float[Array, " K"] | float:
    """Returns the temperature factor at each of `length` depths, or one factor for all."""
    return (
        settings.grid[0]
        if len(settings.grid) == 1
        else jnp.asarray(settings.grid, jnp.float32)[drafter.factor_index[:length]]
    )


def _make_sampler(
    drafter: Drafter,
    settings: Settings,
    vocab: int,
    length: int,
    round_start: _RoundStart,
    noise: RoundNoise,
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
            round_start.response_positions(offset + 1)[:, offset],
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
