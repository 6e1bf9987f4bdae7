"""One round of all slots: draft, verify once, commit."""

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
    """What a round starts from, by slot."""

    running: Bool[Array, " B"]
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
    """Draft `length` tokens, verify once, commit; slots whose rows have ended stay as they are."""
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
                draft_state, draft_cache = draft.catch_up(*draft_inputs)
    with jax.named_scope("verify"):
        positions = block_positions(round_start.lengths - 1, length + 1)
        tokens = jnp.concatenate(
            [context.tokens_at(round_start.lengths[:, None] - 1), proposal.tokens], axis=1
        )
        forward = target(tokens, positions, caches.target, draft.taps if draft else ())
        assert forward.cache is not None, "a cache that goes in comes back"
        logits = target.logits(forward.hidden)
        response_positions = _response_positions(round_start, length + 1)
        # Drafts that are matched with what the target samples were not drawn from their logits.
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
        # where the target fails, nothing can be verified
        draft_counts = jnp.minimum(proposal.lengths, count_leading(comparison.finite[:, :length]))
        if noise.shared is not None:
            verdict = match_rule(
                comparison.distributions, proposal.tokens, draft_counts, noise.shared
            )
        else:
            assert settings.rule is not None and noise.next is not None, "they go together"  # noqa: PT018
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
    return forward.hidden if forward.taps is None else forward.taps


def _response_positions(round_start: _RoundStart, count: int) -> Int[Array, "B T"]:
    """Response tokens before each of `count` positions that follow the committed text."""
    return block_positions(round_start.lengths - round_start.prompt_lengths, count)


def uses_matching(draft: Draft | None, settings: Settings) -> bool:
    """Whether drafts are compared with what the target samples: in coupled mode, and where none is
    drawn (at temperature 0 none is)."""
    return (
        settings.rule is None or draft is None or not draft.is_stochastic or settings.grid == (0.0,)
    )


class _RoundNoise(NamedTuple):
    """What a round draws with."""

    shared: sampling.Noise | None
    """What tokens are matched with: keyed by absolute position, so that the next round draws what
    stood beyond the cut alike."""
    draft: sampling.Noise | None
    """Of each draft."""
    coins: Float[Array, "B K"] | None
    """Of acceptance."""
    next: sampling.Noise | None
    """Of the token after the cut."""


def _draw_noise(
    keys: Key[Array, " B"],
    lengths: Int[Array, " B"],
    length: int,
    vocab: int,
    dtype: Any,
    is_matched: bool,
    settings: Settings,
) -> _RoundNoise:
    """Where tokens are matched, noise by absolute position, which target and draft share in coupled
    mode; else everything is keyed by the committed length at the start of the round: what lies
    beyond the cut must not come back in the next one."""
    if settings.rule is None:
        gumbel = sampling.gumbel_noise(
            sampling.position_keys(keys, lengths, length + 1), vocab, dtype
        )
        return _RoundNoise(gumbel, gumbel, None, None)
    levels = sampling.level_count(vocab)
    if not is_matched and not length:  # a plain round among others: keyed as they are
        uniforms = sampling.Uniforms(
            sampling.uniform_numbers(keys, lengths[:, None], levels, dtype)
        )
        return _RoundNoise(uniforms, None, None, None)
    if is_matched:
        shared = sampling.Uniforms(
            sampling.uniform_numbers(keys, block_positions(lengths, length + 1), levels, dtype)
        )
        return _RoundNoise(shared, shared, None, None)
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
    """Factor on the temperature at each of `length` depths."""
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
    """Draws drafts from the very distribution that verification gives to the rule."""
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
    """What a round of fewer drafts counted, with zeros for the depths that it left out."""
    missing_depths = length - counts.draft_rounds.shape[1]
    if not missing_depths:
        return counts

    def pad_leaf(leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, 0), (0, missing_depths)] + [(0, 0)] * (leaf.ndim - 2))

    names = "draft_rounds reached accepted overlap overlap_by_factor draft_entropy"
    return counts.replace(**{name: pad_leaf(getattr(counts, name)) for name in names.split()})


class _MeasuredSlots(NamedTuple):
    """Where draft temperatures are compared: in the first row of each group."""

    slots: slice | Int[Array, " m"]
    groups: slice | Int[Array, " m"]
    """The group of each of these slots, none where it has another row."""


def _choose_measured_slots(state: DecodeState, group_size: int) -> _MeasuredSlots:
    if isinstance(rows_of_slots(state), slice):
        return _MeasuredSlots(slice(None, None, group_size), slice(None))
    group_count = len(state.rollout.status) // group_size
    # In the tail there may be a first row in every slot. While rows come and go there are as many
    # as groups fit the slots, on average.
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
    """Adds what a round counted by slot; by group for what is measured in some slots only."""
    by_factor = add_to_rows(statistics.overlap_by_factor, groups, counts.overlap_by_factor)
    summed = jax.tree.map(
        lambda leaf, leaf_counts: add_to_rows(leaf, rows, leaf_counts),
        *(tree.replace(overlap_by_factor=None) for tree in (statistics, counts)),
    )
    return summed.replace(overlap_by_factor=by_factor)


def _update_estimate(estimate: AcceptanceEstimate, counts: Statistics) -> AcceptanceEstimate:
    """The estimate after a round. Drafts beyond the end of a text do not count: they follow
    nothing that the target accepted."""
    reached, accepted = (
        sum_over_experts(jnp.sum(leaf, axis=0, dtype=jnp.float32))[None]
        for leaf in (counts.reached, counts.accepted)
    )
    return estimate.replace(
        reached=estimate.reached + reached,
        accepted=estimate.accepted + accepted,
    )
