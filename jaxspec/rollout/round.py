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
    active,
    added,
    rows_may_wait,
    rows_of_slots,
    slot_count,
    taken,
)
from jaxspec.rollout.feedback import acceptance
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.block import Block
from jaxspec.rollout.verify import leading, match_rule
from jaxspec.state import RUNNING, AcceptanceEstimate, Drafter, Statistics


class _Round(NamedTuple):
    """What a round starts from, by slot."""

    running: Bool[Array, " B"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]


def one_round(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    state: DecodeState,
    settings: Settings,
    length: int,
) -> DecodeState:
    """Draft `length` tokens, verify once, commit; slots whose rows have ended stay as they are."""
    rollout, rows, now = state.rollout, rows_of_slots(state), _start(state)
    matching, measured = by_matching(draft, settings), _measured(state, settings.group_size)
    noise = _noise(
        taken(state.keys, rows),
        now.lengths,
        length,
        target.config.vocab,
        rollout.logprobs.dtype,
        matching,
        settings,
    )
    context = Context(rollout.tokens, jnp.where(now.running, now.lengths, 0), rows, rollout.lengths)
    caches = state.caches.with_table(state.pages.table[: slot_count(state)])
    draft_state, draft_cache = state.draft, caches.draft
    proposal = Proposal(
        jnp.zeros((len(now.lengths), 0), jnp.int32), None, jnp.zeros_like(now.lengths)
    )
    if draft is not None:
        with jax.named_scope("draft"):
            held = drafter.network, target, draft_state, draft_cache, context
            if length:
                draft_state, draft_cache, proposal = draft.propose(
                    *held,
                    _sampler(now, length, drafter, target.config.vocab, settings, noise),
                    length,
                )
            else:
                draft_state, draft_cache = draft.catch_up(*held)
    with jax.named_scope("verify"):
        positions = block_positions(now.lengths - 1, length + 1)
        tokens = jnp.concatenate(
            [context.tokens_at(now.lengths[:, None] - 1), proposal.tokens], axis=1
        )
        forward = target(tokens, positions, caches.target, draft.taps if draft else ())
        assert forward.cache is not None, "a cache that goes in comes back"
        logits = target.logits(forward.hidden)
        produced = _produced(now, length + 1)
        # Drafts that are matched with what the target samples were not drawn from their logits.
        as_point_masses = matching and settings.rule is not None
        compared = settings.verification.compare(
            Block(
                logits,
                proposal._replace(logits=None) if as_point_masses else proposal,
                produced,
                settings.processing,
                _factors(drafter, settings, length),
                settings.grid,
                measured.slots,
            )
        )
        # where the target fails, nothing can be verified
        offered = jnp.minimum(proposal.lengths, leading(compared.finite[:, :length]))
        if noise.shared is not None:
            verdict = match_rule(compared.distributions, proposal.tokens, offered, noise.shared)
        else:
            assert settings.rule is not None and noise.next is not None, "they go together"  # noqa: PT018
            verdict = settings.rule(
                compared.distributions, proposal.tokens, offered, noise.coins, noise.next
            )
    with jax.named_scope("commit"):
        committed = commit_block(state, verdict, proposal, compared, settings)
        change = acceptance.of_round(
            now.running,
            verdict,
            proposal.lengths,
            compared.comparison,
            compared.entropy,
            committed.kept,
            measured.slots,
            acceptance.QUARTERS * produced[:, 0] // settings.max_new_tokens,
        )
        rollout = committed.rollout
        ended = now.running & (taken(rollout.status, rows) != RUNNING)
        change = _widened(
            change.replace(end_round=jnp.where(ended, state.round + 1, 0)),
            draft.max_length if draft else 0,
        )
        if draft is not None:
            kept = Committed(committed.tokens, features(forward), positions, committed.kept)
            draft_state = draft.commit(draft_state, kept)
    return state.replace(
        rollout=rollout.replace(
            statistics=_counted(rollout.statistics, change, rows, measured.groups)
        ),
        matched=committed.matched,
        caches=Caches(target=forward.cache, draft=draft_cache).without_table(),
        draft=draft_state,
        round=state.round + 1,
        acceptance=_learnt(state.acceptance, change) if settings.lengths else state.acceptance,
    )


def _start(state: DecodeState) -> _Round:
    rollout, rows = state.rollout, rows_of_slots(state)
    return _Round(
        running=active(state),
        lengths=taken(rollout.lengths, rows),
        prompt_lengths=taken(rollout.prompt_lengths, rows),
    )


def features(forward: DecoderOutput) -> Float[Array, "B T C"]:
    return forward.hidden if forward.taps is None else forward.taps


def _produced(now: _Round, count: int) -> Int[Array, "B T"]:
    """Response tokens before each of `count` positions that follow the committed text."""
    return block_positions(now.lengths - now.prompt_lengths, count)


def by_matching(draft: Draft | None, settings: Settings) -> bool:
    """Whether drafts are compared with what the target samples: in coupled mode, and where none is
    drawn (at temperature 0 none is)."""
    return (
        settings.rule is None or draft is None or not draft.is_stochastic or settings.grid == (0.0,)
    )


class _Noise(NamedTuple):
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


def _noise(
    keys: Key[Array, " B"],
    lengths: Int[Array, " B"],
    length: int,
    vocab: int,
    dtype: Any,
    matching: bool,
    settings: Settings,
) -> _Noise:
    """Where tokens are matched, noise by absolute position, which target and draft share in coupled
    mode; else everything is keyed by the committed length at the start of the round: what lies
    beyond the cut must not come back in the next one."""
    if settings.rule is None:
        gumbel = sampling.gumbel_noise(
            sampling.position_keys(keys, lengths, length + 1), vocab, dtype
        )
        return _Noise(gumbel, gumbel, None, None)
    levels = sampling.level_count(vocab)
    if not matching and not length:  # a plain round among others: keyed as they are
        own = sampling.Uniforms(sampling.uniform_numbers(keys, lengths[:, None], levels, dtype))
        return _Noise(own, None, None, None)
    if matching:
        shared = sampling.Uniforms(
            sampling.uniform_numbers(keys, block_positions(lengths, length + 1), levels, dtype)
        )
        return _Noise(shared, shared, None, None)
    numbers = sampling.uniform_numbers(
        keys, lengths[:, None], length + (length + 1) * levels, dtype
    )[:, 0]
    coins, draws = numbers[:, :length], numbers[:, length:].reshape(-1, length + 1, levels)
    return _Noise(
        None, sampling.Uniforms(draws[:, :length]), coins, sampling.Uniforms(draws[:, length])
    )


def _factors(drafter: Drafter, settings: Settings, length: int) -> Float[Array, " K"] | float:
    """Factor on the temperature at each of `length` depths."""
    return (
        settings.grid[0]
        if len(settings.grid) == 1
        else jnp.asarray(settings.grid, jnp.float32)[drafter.factor_index[:length]]
    )


def _sampler(
    now: _Round, length: int, drafter: Drafter, vocab: int, settings: Settings, noise: _Noise
) -> Sampler:
    """Draws drafts from the very distribution that verification gives to the rule."""
    factors = _factors(drafter, settings, length)

    def sample(
        logits: Float[Array, "B W"], offset: int, ids: Int[Array, " W"] | None = None
    ) -> Int[Array, " B"]:
        return settings.verification.draw(
            logits,
            ids,
            vocab,
            settings.processing,
            _produced(now, offset + 1)[:, offset],
            factors[offset] if isinstance(factors, jax.Array) else factors,
            0.0 in settings.grid,
            jax.tree.map(lambda leaf: leaf[:, offset], noise.draft),
        )

    return sample


def _widened(change: Statistics, length: int) -> Statistics:
    """What a round of fewer drafts counted, with zeros for the depths that it left out."""
    missing = length - change.draft_rounds.shape[1]
    if not missing:
        return change

    def wide(leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, 0), (0, missing)] + [(0, 0)] * (leaf.ndim - 2))

    names = "draft_rounds reached accepted overlap overlap_by_factor draft_entropy"
    return change.replace(**{name: wide(getattr(change, name)) for name in names.split()})


class _Measured(NamedTuple):
    """Where draft temperatures are compared: in the first row of each group."""

    slots: slice | Int[Array, " m"]
    groups: slice | Int[Array, " m"]
    """The group of each of these slots, none where it has another row."""


def _measured(state: DecodeState, group_size: int) -> _Measured:
    if isinstance(rows_of_slots(state), slice):
        return _Measured(slice(None, None, group_size), slice(None))
    groups = len(state.rollout.status) // group_size
    # In the tail there may be a first row in every slot. While rows come and go there are as many
    # as groups fit the slots, on average.
    seats = slot_count(state)
    count = min(seats, groups, 2 * -(-seats // group_size) if rows_may_wait(state) else groups)
    first = active(state) & (state.row % group_size == 0)
    chosen = jnp.argsort(~first, stable=True)[:count].astype(jnp.int32)
    return _Measured(chosen, jnp.where(first[chosen], state.row[chosen] // group_size, groups))


def _counted(
    statistics: Statistics,
    change: Statistics,
    rows: Rows,
    groups: slice | Int[Array, " m"],
) -> Statistics:
    """Adds what a round counted by slot; by group for what is measured in some slots only."""
    by_factor = added(statistics.overlap_by_factor, groups, change.overlap_by_factor)
    summed = jax.tree.map(
        lambda leaf, more: added(leaf, rows, more),
        *(each.replace(overlap_by_factor=None) for each in (statistics, change)),
    )
    return summed.replace(overlap_by_factor=by_factor)


def _learnt(estimate: AcceptanceEstimate, change: Statistics) -> AcceptanceEstimate:
    """The estimate after a round. Drafts beyond the end of a text do not count: they follow
    nothing that the target accepted."""
    offered_in_turn, accepted = (
        sum_over_experts(jnp.sum(leaf, axis=0, dtype=jnp.float32))[None]
        for leaf in (change.reached, change.accepted)
    )
    return estimate.replace(
        reached=estimate.reached + offered_in_turn,
        accepted=estimate.accepted + accepted,
    )
