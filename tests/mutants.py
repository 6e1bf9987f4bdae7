"""The bugs of `test_mutants.py`: text that must be in a file exactly once, what takes its place,
and the test that must fail."""

from typing import NamedTuple


class Mutant(NamedTuple):
    row: str
    """Number of its class of bugs, which several mutants may share; `-`: it is in none."""
    bug: str
    file: str
    old: str
    new: str
    killer: str
    """The test that fails, under tests/."""


LAW = "rollout/test_lossless.py::test_sequences_have_exactly_the_law_of_plain_decoding"
SAMPLED = "rollout/test_monte_carlo.py::test_answers_of_the_engine_pass_a_chi_square"
ONE_ROUND = "rollout/test_verify.py::test_one_round_then_plain_decoding_has_the_targets_law"
CUTS = (
    "rollout/test_generate.py::"
    "test_the_end_token_and_the_limit_cut_the_block_at_every_offset[token_rule-5]"
)
SLOTS = "rollout/test_slots.py::test_rows_that_lose_their_pages_go_on_as_if_they_had_kept_them"
TWINS = "rollout/test_fused.py::test_both_forms_say_and_draw_the_same[eagle3 in between-float64]"
MUTANTS = [
    Mutant(
        "1",
        "the draft's noise is used again for the residual",
        "rollout/round.py",
        "sampling.Uniforms(draws[:, length]))",
        "sampling.Uniforms(draws[:, 0]))",
        f"{LAW}[eagle3, block, 2, sample]",
    ),
    Mutant(
        "2",
        "a coin of 0 accepts what the target excludes",
        "rollout/verify.py",
        "keep = coins * jnp.exp(draft_at_draft) < jnp.exp(target_at_draft)",
        "keep = coins * jnp.exp(draft_at_draft) <= jnp.exp(target_at_draft)",
        "rollout/test_verify_sampled.py::test_extreme_coins",
    ),
    Mutant(
        "3",
        "verification takes the draft at another temperature than it was drawn at",
        "rollout/verification/plain.py",
        "    draft_logprobs, overlap = at(block.factors, slice(None))",
        "    draft_logprobs, overlap = at(1.0, slice(None))",
        f"{LAW}[eagle3, block, 3, at (0.7,), truncated]",
    ),
    Mutant(
        "4",
        "a rejected token is drawn from the target, not from the residual",
        "rollout/verification/plain.py",
        "residual = jnp.maximum(jnp.exp(log_weight[:, None] + target) - jnp.exp(draft), 0)",
        "residual = jnp.exp(log_weight[:, None] + target)",
        f"{ONE_ROUND}[plain-3-3-token-no zeros]",
    ),
    Mutant(
        "5",
        "the draft's distributions follow the wrong row",
        "rollout/verification/plain.py",
        "distributions=distributions(target_logprobs, draft_logprobs),",
        "distributions=distributions(target_logprobs, jnp.roll(draft_logprobs, 1, axis=0)),",
        f"{LAW}[eagle3, block, 2, sample]",
    ),
    Mutant(
        "6",
        "processors see the start of the block at all its positions",
        "rollout/round.py",
        "return block_positions(now.lengths - now.prompt_lengths, count)",
        "return block_positions(now.lengths - now.prompt_lengths, count) * 0 + (now.lengths -"
        " now.prompt_lengths)[:, None]",
        f"{LAW}[eagle3, block, 3, at (0.7,), truncated]",
    ),
    Mutant(
        "7",
        "the recorded log-probability is that before temperature and truncation",
        "rollout/verification/plain.py",
        "logprobs=lambda tokens: _pick(target_logprobs, tokens),",
        "logprobs=lambda tokens: _pick(sampling.processed_logprobs(block.logits, Processing(),"
        " block.produced), tokens),",
        "rollout/test_lossless.py::test_recorded_logprobs_are_those_of_a_teacher_forced_pass[history-float64]",
    ),
    Mutant(
        "8",
        "the round is not in the keys of its coins",
        "rollout/round.py",
        "coins, draws = numbers[:, :length],",
        "coins, draws = sampling.uniforms(keys, 0 * lengths[:, None], length, dtype)[:, 0],",
        f"{SAMPLED}[block, opposite, 3]",
    ),
    Mutant(
        "9",
        "tokens are taken greedily where they should be sampled",
        "sampling.py",
        "return drawn(jnp.exp(logprobs - jnp.max(logprobs, axis=-1, keepdims=True)), noise)",
        "return jnp.argmax(logprobs, axis=-1).astype(jnp.int32)",
        f"{SAMPLED}[token, opposite, 3]",
    ),
    Mutant(
        "10",
        "drafts that were not offered are verified",
        "rollout/verify.py",
        "accepted = jnp.minimum(leading(keep), offered)",
        "accepted = leading(keep)",
        f"{ONE_ROUND}[plain-3-3-token-no zeros]",
    ),
    Mutant(
        "11",
        "attention sees what stands in the cache above the block",
        "kernels/visible.py",
        "return (true & (positions >= self.first) if self.first else true) | beyond",
        "return (true & (positions >= self.first) if self.first else true) | beyond | (positions >"
        " own.max(axis=1, keepdims=True))",
        f"{LAW}[eagle3, block, 2, sample]",
    ),
    Mutant(
        "12",
        "tokens after an end token inside the block are kept",
        "rollout/round.py",
        "jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, good)",
        "good",
        CUTS,
    ),
    Mutant(
        "12",
        "the minimum length counts one token too few",
        "sampling.py",
        "(produced < processing.min_new_tokens)",
        "(produced + 1 < processing.min_new_tokens)",
        "test_sampling.py::test_processors_follow_their_order",
    ),
    Mutant(
        "13",
        "a block may run past the length limit",
        "rollout/round.py",
        "count = jnp.where(now.running, jnp.minimum(until_end, room), 0)",
        "count = jnp.where(now.running, until_end, 0)\n    room = jnp.maximum(room, count)",
        CUTS,
    ),
    Mutant(
        "16",
        "the draft's cache keeps its own states instead of the target's",
        "drafts/recurrent.py",
        "jnp.pad(kept.features, ((0, 0), (0, padding), (0, 0))), state.features),",
        "jnp.pad(0 * kept.features, ((0, 0), (0, padding), (0, 0))), state.features),",
        "drafts/test_recurrent.py::test_every_round_equals_a_prefill_from_scratch",
    ),
    Mutant(
        "-",
        "what a round without drafts kept is never read by the draft",
        "drafts/recurrent.py",
        "return _appended(state, kept, went_on)",
        "return state",
        "drafts/test_recurrent.py::test_every_round_equals_a_prefill_from_scratch",
    ),
    Mutant(
        "17",
        "rows are numbered within their shard",
        "rollout/prefill.py",
        "numbers = (first_prompt + jnp.arange(count, dtype=jnp.int32))[:, None] * group",
        "numbers = (0 * first_prompt + jnp.arange(count, dtype=jnp.int32))[:, None] * group",
        "rollout/test_coupled.py::test_coupled_tokens_are_those_of_plain_decoding[hf, 2, mesh 8x1]",
    ),
    Mutant(
        "18",
        "block verification stops at the first coin that fails",
        "rollout/verify.py",
        "accepted = jnp.max(jnp.where(keep, depths, 0), axis=1, initial=0)",
        "accepted = leading(keep)",
        "rollout/test_verify.py::test_acceptance_of_the_published_vectors",
    ),
    Mutant(
        "18",
        "block verification draws the residual without its weight",
        "rollout/verify.py",
        "log_weight = jnp.take_along_axis(log_weights, accepted[:, None], axis=1)[:, 0]",
        "log_weight = jnp.zeros_like(log_weights[:, 0])",
        f"{ONE_ROUND}[plain-3-3-block-no zeros]",
    ),
    Mutant(
        "20",
        "logits that are not finite go unnoticed",
        "rollout/verification/plain.py",
        "finite=jnp.isfinite(block.logits).all(axis=-1) & ~jnp.isnan(target_logprobs[:, :, 0]),",
        "finite=jnp.ones(block.logits.shape[:2], bool),",
        "rollout/test_generate.py::test_nan_weights_fail_every_row_and_write_no_token[3-False]",
    ),
    Mutant(
        "-",
        "block coins are keyed by absolute position",
        "rollout/round.py",
        "coins, draws = numbers[:, :length],",
        "coins, draws = sampling.uniforms(keys, block_positions(lengths, length), 1, dtype)[:,"
        " :, 0],",
        f"{SAMPLED}[block, one_hot, 3]",
    ),
    Mutant(
        "-",
        "drafts are drawn with noise keyed by absolute position",
        "rollout/round.py",
        "sampling.Uniforms(draws[:, :length])",
        "sampling.Uniforms(sampling.uniforms(keys, block_positions(lengths, length), length +"
        " levels, dtype)[:, :, length:])",
        f"{SAMPLED}[block, opposite, 3]",
    ),
    Mutant(
        "-",
        "a row that lost its pages samples its text again",
        "rollout/slots.py",
        "statistics=statistics.replace(began=statistics.began.at[row].set(began))",
        "statistics=statistics.replace(began=statistics.began.at[row].set(began)),"
        " lengths=rollout.lengths.at[row].set(length)",
        SLOTS,
    ),
    Mutant(
        "-",
        "the log-probabilities of a row that is recomputed are overwritten",
        "rollout/append.py",
        "        draft=of_slots,",
        "        draft=of_slots,\n        rollout=rollout.replace(\n           "
        " logprobs=jnp.where(jnp.any(state.unread > 0), 0, rollout.logprobs)\n        ),",
        SLOTS,
    ),
    Mutant(
        "-",
        "a row that lost its pages goes on without being recomputed",
        "rollout/slots.py",
        "unread=state.unread.at[slot].set(rollout.lengths[row] - length),",
        "unread=state.unread,",
        SLOTS,
    ),
    Mutant(
        "-",
        "a recomputed row drafts from its prompt",
        "rollout/append.py",
        "        draft=of_slots,",
        "        draft=state.draft,",
        SLOTS,
    ),
    Mutant(
        "-",
        "a piece of text is drafted from without the position before it",
        "drafts/recurrent.py",
        "pending = pieces.shift(features, state.features[:, 0])",
        "pending = pieces.shift(features, 0 * state.features[:, 0])",
        SLOTS,
    ),
    Mutant(
        "-",
        "rows share the page of their prompt that the draft writes to",
        "rollout/slots.py",
        "return jnp.maximum(length - 2, 0) // size",
        "return length // size",
        SLOTS,
    ),
    Mutant(
        "-",
        "the last rows' draft is forgotten when they move back to their slots",
        "rollout/slots.py",
        "draft=jax.tree.map(put, state.draft, fewer.draft),",
        "draft=state.draft,",
        "rollout/test_slots.py::test_slots_are_full_until_nobody_waits",
    ),
    Mutant(
        "-",
        "pages count holders that have let go of them",
        "rollout/pages.py",
        'references=pages.references.at[lost].add(-1, mode="drop"),',
        "references=pages.references,",
        SLOTS,
    ),
    Mutant(
        "-",
        "an empty slot writes to the pages that its row had",
        "rollout/pages.py",
        "table=jnp.where(holders[:, None], nobody, pages.table),",
        "table=pages.table,",
        SLOTS,
    ),
    Mutant(
        "-",
        "plain rounds in a row share their noise",
        "rollout/round.py",
        "own = sampling.Uniforms(sampling.uniforms(keys, lengths[:, None], levels, dtype))",
        "own = sampling.Uniforms(sampling.uniforms(keys, 0 * lengths[:, None], levels, dtype))",
        "rollout/test_monte_carlo.py::test_pairs_of_tokens_of_two_plain_rounds_pass_a_chi_square[3]",
    ),
    Mutant(
        "-",
        "rounds go on without the pages that they write to",
        "rollout/slots.py",
        "return admits | _too_few(state, block) if evicts else admits",
        "return admits",
        SLOTS,
    ),
    Mutant(
        "-",
        "statistics count drafts beyond the cut",
        "rollout/acceptance.py",
        "offered_in_turn = drafted & (depths <= kept[:, None])",
        "offered_in_turn = drafted",
        "rollout/test_monte_carlo.py::test_a_round_counts_drafts_up_to_its_cut[block_rule]",
    ),
    Mutant(
        "-",
        "the fast form leaves out what the draft's vocabulary does not have",
        "rollout/verification/fused.py",
        "(inside + jnp.exp(weights) * known.outside[:, :length])[:, 1:]",
        "inside[:, 1:]",
        TWINS,
    ),
    Mutant(
        "-",
        "the fast form gives tokens that the draft does not have a draft's probability",
        "rollout/verification/fused.py",
        "return own if places is None else jnp.where(places < 0, 0, own)",
        "return own",
        TWINS,
    ),
    Mutant(
        "-",
        "the fast form reads draft tokens as the target's",
        "rollout/verification/fused.py",
        "return drawn if ids is None else ids[drawn]",
        "return drawn",
        f"{LAW}[eagle3 small, block, 3, sample, fused]",
    ),
    Mutant(
        "-",
        "the fast form draws the residual without its weight",
        "rollout/verification/fused.py",
        "weighted = log_weight[:, None] + _logprobs_at(block, known, accepted, tokens)",
        "weighted = _logprobs_at(block, known, accepted, tokens)",
        f"{ONE_ROUND}[fused by ids-3-3-block-no zeros]",
    ),
    Mutant(
        "-",
        "the fast form takes logits that are not finite for good ones",
        "rollout/verification/fused.py",
        "finite=moments.finite & ~jnp.isnan(target.log_total),",
        "finite=~jnp.isnan(target.log_total),",
        TWINS,
    ),
    Mutant(
        "-",
        "temperature 0 is summarized as if it were 1",
        "rollout/verification/summary.py",
        "shifted = jnp.where(hot, logits / jnp.where(hot, temperature, 1) - largest, only)",
        "shifted = logits / jnp.where(hot, temperature, 1) - largest",
        TWINS,
    ),
    Mutant(
        "-",
        "parts of a vocabulary are joined without scaling the lower one down",
        "rollout/verification/summary.py",
        "high.total + shrinks * low.total,",
        "high.total + low.total,",
        TWINS,
    ),
]
