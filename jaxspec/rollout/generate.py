"""The rollout engine: `begin` (prefill), `advance` (rounds of draft, verify, commit), `collect`; `generate` composes them.

All three work on the rows of one `data` shard; `generate`, `begin_sharded` and `advance_sharded` run them on every shard of a mesh.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import sampling
from jaxspec.drafts.base import Context, Draft, Kept, Proposal, Sampler, block_positions
from jaxspec.mesh import DATA
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.kv import KVCache, empty_cache, repeat_rows
from jaxspec.rollout import acceptance
from jaxspec.rollout.verify import Verdict, leading, match_rule
from jaxspec.state import EOS, FAILED, IDLE, LENGTH, RUNNING, Drafter, Prompts, PyTree, Rollout, Tree, pytree


class Settings(NamedTuple):
    """What shapes a rollout; part of the compiled program."""

    group_size: int
    max_new_tokens: int
    processing: sampling.Processing
    rule: Callable[..., Verdict] | None
    """How drafts that were drawn are verified, `token_rule` or `block_rule`; None couples draft and target by shared noise."""
    grid: tuple[float, ...] = (1.0,)
    """Factors on the temperature at which a draft is compared; of several, `Drafter.choice` says which one it samples at. (0,): argmax."""


@pytree
class Engine(Tree):
    """Everything a rollout carries between rounds."""

    rollout: Rollout
    """The rows so far."""
    keys: Key[Array, " B"]
    cache: KVCache
    """The target's, valid below the last committed token, which the next round reads."""
    draft: PyTree


def begin(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    prompts: Prompts,
    first_prompt: Int[Array, ""],
    key: Key[Array, ""],
    settings: Settings,
) -> Engine:
    """Prefills each prompt once and gives every row of its group a copy.

    Args:
      target: the policy in the rollout layout.
      drafter: the draft's weights and temperatures.
      draft: None is plain decoding.
      prompts: those of this shard.
      first_prompt: number of this shard's first prompt among all prompts of the call.
      key: of the call; rows fold in their global number, so results do not depend on the mesh.
      settings: see `Settings`.
    """
    count, width = prompts.tokens.shape
    group, length = settings.group_size, draft.length if draft else 0
    size = width + settings.max_new_tokens
    slots = size + length  # headroom: a block may reach K positions beyond the last token kept
    config = target.config
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (count, width))
    cache = empty_cache(config.layers, count, slots, config.kv_heads, config.head_size, target.embedding[...].dtype)
    with jax.named_scope("prefill"):
        forward = target(prompts.tokens, positions, cache, taps=draft.taps if draft else ())
        assert forward.cache is not None, "a cache that goes in comes back"
        draft_state = None
        if draft is not None:
            draft_state = draft.repeat(draft.prefill(drafter.network, target, prompts, _features(forward), slots), group)
    rows = (first_prompt + jnp.arange(count, dtype=jnp.int32))[:, None] * group + jnp.arange(group, dtype=jnp.int32)
    lengths = jnp.repeat(prompts.lengths, group)
    inside = jnp.arange(width, dtype=jnp.int32) < prompts.lengths[:, None]
    tokens = jnp.pad(jnp.where(inside, prompts.tokens, 0), ((0, 0), (0, settings.max_new_tokens)))
    wide = np.promote_types(target.embedding[...].dtype, np.float32)
    rollout = Rollout(
        tokens=jnp.repeat(tokens, group, axis=0),
        prompt_lengths=lengths,
        lengths=lengths,
        logprobs=jnp.zeros((count * group, size), wide),
        status=jnp.where(jnp.repeat(prompts.live, group), RUNNING, IDLE).astype(jnp.int32),
        statistics=acceptance.no_statistics(count * group, group, length, len(settings.grid), wide),
    )
    keys = sampling.row_keys(key, rows.reshape(-1))
    return Engine(rollout=rollout, keys=keys, cache=repeat_rows(forward.cache, group), draft=draft_state)


def advance(
    target: Decoder, drafter: Drafter, draft: Draft | None, engine: Engine, max_rounds: Int[Array, ""] | int, settings: Settings
) -> Engine:
    """Runs up to `max_rounds` rounds, or until every row has ended; slices give the same tokens as one long call."""

    def unfinished(carry: tuple[Engine, Int[Array, ""]]) -> Any:
        return jnp.any(carry[0].rollout.status == RUNNING) & (carry[1] < max_rounds)

    def body(carry: tuple[Engine, Int[Array, ""]]) -> tuple[Engine, Int[Array, ""]]:
        return one_round(target, drafter, draft, carry[0], settings), carry[1] + 1

    return lax.while_loop(unfinished, body, (engine, jnp.zeros((), jnp.int32)))[0]


def collect(engine: Engine) -> Rollout:
    """The rows as they stand, without the engine's caches."""
    return engine.rollout


def one_round(target: Decoder, drafter: Drafter, draft: Draft | None, engine: Engine, settings: Settings) -> Engine:
    """Draft K, verify once, commit; rows that have ended stay as they are."""
    rollout = engine.rollout
    length, rows, vocab = draft.length if draft else 0, rollout.tokens.shape[0], target.config.vocab
    drawn = draft is not None and draft.draws and settings.grid != (0.0,)  # at temperature 0 the most likely token is taken, none drawn
    matching = settings.rule is None or not drawn
    noise = _noise(engine, length, vocab, matching)
    draft_state, proposal = None, Proposal(jnp.zeros((rows, 0), jnp.int32), None, jnp.zeros((rows,), jnp.int32))
    if draft is not None:
        with jax.named_scope("draft"):
            context = Context(rollout.tokens, rollout.lengths)
            sample = _sampler(rollout, drafter, settings, noise)
            draft_state, proposal = draft.propose(drafter.network, target, engine.draft, context, sample)
    with jax.named_scope("verify"):
        last = jnp.take_along_axis(rollout.tokens, rollout.lengths[:, None] - 1, axis=1)
        positions = block_positions(rollout.lengths - 1, length + 1)
        taps = draft.taps if draft else ()
        forward = target(jnp.concatenate([last, proposal.tokens], axis=1), positions, engine.cache, taps)
        logits = target.logits(forward.hidden)
        produced = _produced(rollout, length + 1)
        target_logprobs = sampling.processed_logprobs(logits, settings.processing, produced)
        told = proposal if drawn else proposal._replace(logits=None)
        comparison = acceptance.compare(
            told, target_logprobs, produced, settings.processing, _factors(drafter, settings), settings.grid, settings.group_size
        )
        finite = jnp.isfinite(logits).all(axis=-1)
        offered = jnp.minimum(proposal.offered, leading(finite[:, :length]))  # where the target fails, nothing can be verified
        if matching:
            verdict = match_rule(target_logprobs, proposal.tokens, offered, noise)
        else:
            assert settings.rule is not None, "matching covers it"
            verdict = settings.rule(target_logprobs, comparison.draft_logprobs, proposal.tokens, offered, *_coins(engine, length, vocab))
    with jax.named_scope("commit"):
        rollout, block, kept = _commit(rollout, verdict, proposal.tokens, target_logprobs, finite, settings)
        entropy = sampling.entropy(target_logprobs)
        statistics = acceptance.count(engine.rollout, verdict, proposal.offered, comparison, entropy, kept, settings.group_size)
        if draft is not None:
            draft_state = draft.commit(draft_state, Kept(block, _features(forward), positions, kept))
    return engine.replace(rollout=rollout.replace(statistics=statistics), cache=forward.cache, draft=draft_state)


def _features(forward: Forward) -> Float[Array, "B T C"]:
    return forward.hidden if forward.taps is None else forward.taps


def _produced(rollout: Rollout, count: int) -> Int[Array, "B T"]:
    """Response tokens before each of `count` positions that follow the committed text."""
    return block_positions(rollout.lengths - rollout.prompt_lengths, count)


def _noise(engine: Engine, length: int, vocab: int, matching: bool) -> Float[Array, "B T V"]:
    """What target and draft share where tokens are matched, keyed by absolute position; else the draft's own, keyed by the committed
    length at the start of the round: what lies beyond the cut must not come back in the next one."""
    lengths, dtype = engine.rollout.lengths, engine.rollout.logprobs.dtype
    if matching:
        return sampling.gumbel(sampling.position_keys(engine.keys, lengths, length + 1), vocab, dtype)
    return sampling.gumbel(sampling.offset_keys(engine.keys, lengths, sampling.DRAFT, length), vocab, dtype)


def _coins(engine: Engine, length: int, vocab: int) -> tuple[Float[Array, "B K"], Float[Array, "B V"]]:
    """Acceptance coins, and the noise of the token after the cut; fresh in every round."""
    lengths, dtype = engine.rollout.lengths, engine.rollout.logprobs.dtype
    coins = sampling.uniform(sampling.offset_keys(engine.keys, lengths, sampling.COIN, length), dtype)
    return coins, sampling.gumbel(sampling.offset_keys(engine.keys, lengths, sampling.NEXT, 1), vocab, dtype)[:, 0]


def _factors(drafter: Drafter, settings: Settings) -> Float[Array, " K"] | float:
    """Factor on the temperature at each depth."""
    return settings.grid[0] if len(settings.grid) == 1 else jnp.asarray(settings.grid, jnp.float32)[drafter.choice]


def _sampler(rollout: Rollout, drafter: Drafter, settings: Settings, noise: Float[Array, "B T V"]) -> Sampler:
    """Draws drafts from the very distribution that `acceptance.compare` gives to the rule."""
    factors = _factors(drafter, settings)

    def sample(logits: Float[Array, "B V"], offset: int) -> Int[Array, " B"]:
        factor = factors[offset] if isinstance(factors, jax.Array) else factors
        produced = _produced(rollout, offset + 1)[:, offset]
        return sampling.categorical(sampling.processed_logits(logits, settings.processing, produced, factor), noise[:, offset])

    return sample


def _commit(
    rollout: Rollout,
    verdict: Verdict,
    drafted: Int[Array, "B K"],
    target_logprobs: Float[Array, "B K1 V"],
    finite: Bool[Array, "B K1"],
    settings: Settings,
) -> tuple[Rollout, Int[Array, "B K1"], Int[Array, " B"]]:
    """Cuts the block at the first end token, the length limit or a failure, and writes what is left of it."""
    offsets = jnp.arange(target_logprobs.shape[1], dtype=jnp.int32)
    within = offsets <= verdict.accepted[:, None]
    block = jnp.where(offsets < verdict.accepted[:, None], jnp.pad(drafted, ((0, 0), (0, 1))), verdict.next_token[:, None])
    good = leading(within & finite)  # no draft is accepted beyond a failure, so at most the last token of the block is not
    ends = jnp.isin(block, jnp.asarray(settings.processing.stop_ids, jnp.int32)) & (offsets < good[:, None])
    until_end = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, good)
    room = rollout.prompt_lengths + settings.max_new_tokens - rollout.lengths
    running = rollout.status == RUNNING
    count = jnp.where(running, jnp.minimum(until_end, room), 0)
    kept = offsets < count[:, None]
    at_end = jnp.any(ends & kept, axis=1)
    ended = jnp.where(at_end, EOS, jnp.where(count == room, LENGTH, jnp.where(good <= verdict.accepted, FAILED, RUNNING)))
    status = jnp.where(running, ended, rollout.status)
    block_logprobs = jnp.take_along_axis(target_logprobs, block[:, :, None], axis=2)[:, :, 0]
    size = rollout.tokens.shape[1]
    where = jnp.where(kept, rollout.lengths[:, None] + offsets, size)  # beyond the buffer: dropped
    row = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None]
    committed = rollout.replace(
        tokens=rollout.tokens.at[row, where].set(block, mode="drop"),
        logprobs=rollout.logprobs.at[row, where].set(block_logprobs, mode="drop"),
        lengths=rollout.lengths + count,
        status=status.astype(jnp.int32),
    )
    return committed, block, count


def generate(
    target: Decoder, drafter: Drafter, draft: Draft | None, prompts: Prompts, key: Key[Array, ""], settings: Settings, mesh: Mesh
) -> Rollout:
    """Answers every prompt `group_size` times; no Python between the first token and the last.

    Rows are sharded over `data`; every shard leaves its loop when its own rows have ended, and only `tensor` peers communicate.
    """

    def shard(target: Decoder, drafter: Drafter, prompts: Prompts, numbers: Int[Array, " n"], key: Key[Array, ""]) -> Rollout:
        engine = begin(target, drafter, draft, prompts, numbers[0], key, settings)
        return collect(advance(target, drafter, draft, engine, jnp.iinfo(jnp.int32).max, settings))

    inputs, numbers = _begin_inputs(prompts)
    return _on_each_shard(mesh, shard, inputs, P(DATA))(target, drafter, prompts, numbers, key)


def begin_sharded(
    target: Decoder, drafter: Drafter, draft: Draft | None, prompts: Prompts, key: Key[Array, ""], settings: Settings, mesh: Mesh
) -> Engine:
    """`begin` on every shard of `mesh`."""

    def shard(target: Decoder, drafter: Drafter, prompts: Prompts, numbers: Int[Array, " n"], key: Key[Array, ""]) -> Engine:
        return begin(target, drafter, draft, prompts, numbers[0], key, settings)

    inputs, numbers = _begin_inputs(prompts)
    engine = jax.eval_shape(shard, target, drafter, prompts, numbers, key)
    return _on_each_shard(mesh, shard, inputs, _engine_specs(engine))(target, drafter, prompts, numbers, key)


def advance_sharded(
    target: Decoder, drafter: Drafter, draft: Draft | None, engine: Engine, max_rounds: Int[Array, ""], settings: Settings, mesh: Mesh
) -> Engine:
    """`advance` on every shard of `mesh`."""

    def shard(target: Decoder, drafter: Drafter, engine: Engine, max_rounds: Int[Array, ""]) -> Engine:
        return advance(target, drafter, draft, engine, max_rounds, settings)

    specs = _engine_specs(engine)
    return _on_each_shard(mesh, shard, (P(), P(), specs, P()), specs)(target, drafter, engine, max_rounds)


def _begin_inputs(prompts: Prompts) -> tuple[tuple[Any, ...], Int[Array, " n"]]:
    by_row = jax.tree.map(lambda leaf: P(DATA) if leaf.ndim else P(), prompts)
    return (P(), P(), by_row, P(DATA), P()), jnp.arange(prompts.tokens.shape[0], dtype=jnp.int32)


def _engine_specs(engine: Engine) -> PyTree:
    """Rows stand second in caches (layers come first), first everywhere else."""

    def spec(path: Any, _: Any) -> P:
        return P(None, DATA) if any(getattr(key, "name", "") == "cache" for key in path) else P(DATA)

    return jax.tree_util.tree_map_with_path(spec, engine)


def _on_each_shard(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={DATA}, check_vma=False)
