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
from jaxspec.drafts.base import Draft, Kept, Proposal, Sampler, block_positions
from jaxspec.mesh import DATA
from jaxspec.models.decoder import Decoder
from jaxspec.models.kv import KVCache, empty_cache, repeat_rows
from jaxspec.rollout.verify import Verdict, coupled_rule, token_rule
from jaxspec.state import EOS, FAILED, IDLE, LENGTH, RUNNING, Prompts, PyTree, Rollout, Tree, pytree


class Settings(NamedTuple):
    """What shapes a rollout; part of the compiled program."""

    group_size: int
    max_new_tokens: int
    temperature: float
    coupled: bool
    stop_ids: tuple[int, ...]


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
    network: PyTree,
    draft: Draft | None,
    prompts: Prompts,
    first_prompt: Int[Array, ""],
    key: Key[Array, ""],
    settings: Settings,
) -> Engine:
    """Prefills each prompt once and gives every row of its group a copy.

    Args:
      target: the policy in the rollout layout.
      network: the draft's weights.
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
        forward = target(prompts.tokens, positions, cache, with_taps=draft is not None)
        assert forward.cache is not None, "a cache that goes in comes back"
        draft_state = None
        if draft is not None:
            draft_state = draft.repeat(draft.prefill(network, target, prompts.tokens, prompts.lengths, forward.taps, slots), group)
    rows = (first_prompt + jnp.arange(count, dtype=jnp.int32))[:, None] * group + jnp.arange(group, dtype=jnp.int32)
    lengths = jnp.repeat(prompts.lengths, group)
    inside = jnp.arange(width, dtype=jnp.int32) < prompts.lengths[:, None]
    tokens = jnp.pad(jnp.where(inside, prompts.tokens, 0), ((0, 0), (0, settings.max_new_tokens)))
    rollout = Rollout(
        tokens=jnp.repeat(tokens, group, axis=0),
        prompt_lengths=lengths,
        lengths=lengths,
        logprobs=jnp.zeros((count * group, size), np.promote_types(target.embedding[...].dtype, np.float32)),
        status=jnp.where(jnp.repeat(prompts.live, group), RUNNING, IDLE).astype(jnp.int32),
        rounds=jnp.zeros_like(lengths),
        accepted=jnp.zeros((count * group, length), jnp.int32),
    )
    keys = sampling.row_keys(key, rows.reshape(-1))
    return Engine(rollout=rollout, keys=keys, cache=repeat_rows(forward.cache, group), draft=draft_state)


def advance(
    target: Decoder, network: PyTree, draft: Draft | None, engine: Engine, max_rounds: Int[Array, ""] | int, settings: Settings
) -> Engine:
    """Runs up to `max_rounds` rounds, or until every row has ended; slices give the same tokens as one long call."""

    def unfinished(carry: tuple[Engine, Int[Array, ""]]) -> Any:
        return jnp.any(carry[0].rollout.status == RUNNING) & (carry[1] < max_rounds)

    def body(carry: tuple[Engine, Int[Array, ""]]) -> tuple[Engine, Int[Array, ""]]:
        return one_round(target, network, draft, carry[0], settings), carry[1] + 1

    return lax.while_loop(unfinished, body, (engine, jnp.zeros((), jnp.int32)))[0]


def collect(engine: Engine) -> Rollout:
    """The rows as they stand, without the engine's caches."""
    return engine.rollout


def one_round(target: Decoder, network: PyTree, draft: Draft | None, engine: Engine, settings: Settings) -> Engine:
    """Draft K, verify once, commit; rows that have ended stay as they are."""
    rollout = engine.rollout
    length, rows, vocab = draft.length if draft else 0, rollout.tokens.shape[0], target.config.vocab
    rule = _coupled if settings.coupled or draft is None else _token
    sample, verify = rule(engine, length, vocab, settings.temperature)
    draft_state, proposal = None, Proposal(jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, 0, vocab), rollout.logprobs.dtype))
    if draft is not None:
        with jax.named_scope("draft"):
            draft_state, proposal = draft.propose(network, target, engine.draft, sample)
    with jax.named_scope("verify"):
        last = jnp.take_along_axis(rollout.tokens, rollout.lengths[:, None] - 1, axis=1)
        positions = block_positions(rollout.lengths - 1, length + 1)
        forward = target(jnp.concatenate([last, proposal.tokens], axis=1), positions, engine.cache, with_taps=draft is not None)
        logits = target.logits(forward.hidden)
        target_logprobs = sampling.processed_logprobs(logits, settings.temperature)
        verdict = verify(target_logprobs, proposal)
    with jax.named_scope("commit"):
        finite = jnp.isfinite(logits).all(axis=-1)
        rollout, block, count = _commit(rollout, verdict, proposal.tokens, target_logprobs, finite, settings)
        if draft is not None:
            assert forward.taps is not None, "the pass above was asked for taps"
            draft_state = draft.commit(draft_state, Kept(tokens=block, taps=forward.taps, positions=positions, length=count))
    return engine.replace(rollout=rollout, cache=forward.cache, draft=draft_state)


Rule = tuple[Sampler, Callable[[Float[Array, "B K1 V"], Proposal], Verdict]]
"""How drafts are drawn, and how they are verified."""


def _coupled(engine: Engine, length: int, vocab: int, temperature: float) -> Rule:
    """Draft and target add the same noise, keyed by absolute position."""
    noise = sampling.gumbel(sampling.position_keys(engine.keys, engine.rollout.lengths, length + 1), vocab, engine.rollout.logprobs.dtype)
    return _sampler(noise, temperature), lambda target_logprobs, proposal: coupled_rule(target_logprobs, proposal.tokens, noise)


def _token(engine: Engine, length: int, vocab: int, temperature: float) -> Rule:
    """Noise keyed by the committed length at the start of the round: what lies beyond the cut must not come back in the next one."""
    dtype = engine.rollout.logprobs.dtype

    def keys(stream: int, count: int) -> Key[Array, "B count"]:
        return sampling.offset_keys(engine.keys, engine.rollout.lengths, stream, count)

    def verify(target_logprobs: Float[Array, "B K1 V"], proposal: Proposal) -> Verdict:
        coins = sampling.uniform(keys(sampling.COIN, length), dtype)
        next_noise = sampling.gumbel(keys(sampling.NEXT, 1), vocab, dtype)[:, 0]
        return token_rule(target_logprobs, proposal.logprobs, proposal.tokens, coins, next_noise)

    return _sampler(sampling.gumbel(keys(sampling.DRAFT, length), vocab, dtype), temperature), verify


def _sampler(noise: Float[Array, "B T V"], temperature: float) -> Sampler:
    def sample(logits: Float[Array, "B V"], offset: int) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
        logprobs = sampling.processed_logprobs(logits, temperature)
        return sampling.categorical(logprobs, noise[:, offset]), logprobs

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
    running = rollout.status == RUNNING
    failed = running & jnp.any(within & ~finite, axis=1)
    going = running & ~failed
    ends = jnp.isin(block, jnp.asarray(settings.stop_ids, jnp.int32)) & within
    until_end = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, verdict.accepted + 1)
    room = rollout.prompt_lengths + settings.max_new_tokens - rollout.lengths
    count = jnp.where(going, jnp.minimum(until_end, room), 0)
    kept = offsets < count[:, None]
    at_end = going & jnp.any(ends & kept, axis=1)
    status = jnp.where(failed, FAILED, jnp.where(at_end, EOS, jnp.where(going & (count == room), LENGTH, rollout.status)))
    block_logprobs = jnp.take_along_axis(target_logprobs, block[:, :, None], axis=2)[:, :, 0]
    size = rollout.tokens.shape[1]
    where = jnp.where(kept, rollout.lengths[:, None] + offsets, size)  # beyond the buffer: dropped
    row = jnp.arange(block.shape[0], dtype=jnp.int32)[:, None]
    kept_drafts = jnp.minimum(verdict.accepted, count)[:, None]
    depths = jnp.arange(1, drafted.shape[1] + 1, dtype=jnp.int32)
    return (
        rollout.replace(
            tokens=rollout.tokens.at[row, where].set(block, mode="drop"),
            logprobs=rollout.logprobs.at[row, where].set(block_logprobs, mode="drop"),
            lengths=rollout.lengths + count,
            status=status.astype(jnp.int32),
            rounds=rollout.rounds + running.astype(jnp.int32),
            accepted=rollout.accepted + (going[:, None] & (kept_drafts >= depths)).astype(jnp.int32),
        ),
        block,
        count,
    )


def generate(
    target: Decoder, network: PyTree, draft: Draft | None, prompts: Prompts, key: Key[Array, ""], settings: Settings, mesh: Mesh
) -> Rollout:
    """Answers every prompt `group_size` times; no Python between the first token and the last.

    Rows are sharded over `data`; every shard leaves its loop when its own rows have ended, and only `tensor` peers communicate.
    """

    def shard(target: Decoder, network: PyTree, prompts: Prompts, numbers: Int[Array, " n"], key: Key[Array, ""]) -> Rollout:
        engine = begin(target, network, draft, prompts, numbers[0], key, settings)
        return collect(advance(target, network, draft, engine, jnp.iinfo(jnp.int32).max, settings))

    inputs, numbers = _begin_inputs(prompts)
    return _on_each_shard(mesh, shard, inputs, P(DATA))(target, network, prompts, numbers, key)


def begin_sharded(
    target: Decoder, network: PyTree, draft: Draft | None, prompts: Prompts, key: Key[Array, ""], settings: Settings, mesh: Mesh
) -> Engine:
    """`begin` on every shard of `mesh`."""

    def shard(target: Decoder, network: PyTree, prompts: Prompts, numbers: Int[Array, " n"], key: Key[Array, ""]) -> Engine:
        return begin(target, network, draft, prompts, numbers[0], key, settings)

    inputs, numbers = _begin_inputs(prompts)
    engine = jax.eval_shape(shard, target, network, prompts, numbers, key)
    return _on_each_shard(mesh, shard, inputs, _engine_specs(engine))(target, network, prompts, numbers, key)


def advance_sharded(
    target: Decoder, network: PyTree, draft: Draft | None, engine: Engine, max_rounds: Int[Array, ""], settings: Settings, mesh: Mesh
) -> Engine:
    """`advance` on every shard of `mesh`."""

    def shard(target: Decoder, network: PyTree, engine: Engine, max_rounds: Int[Array, ""]) -> Engine:
        return advance(target, network, draft, engine, max_rounds, settings)

    specs = _engine_specs(engine)
    return _on_each_shard(mesh, shard, (P(), P(), specs, P()), specs)(target, network, engine, max_rounds)


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
