"""The fast form of verification beside the plain one, which is its oracle."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import mesh as meshes
from jaxspec import sampling
from jaxspec.build import build_step
from jaxspec.config.settings import RolloutConfig
from jaxspec.drafts.base import DrawnProposal
from jaxspec.rollout.verification.block import Block, Verification
from jaxspec.rollout.verification.fused import FUSED, is_supported
from jaxspec.rollout.verification.plain import PLAIN
from jaxspec.rollout.verify import block_rule, count_leading, match_rule, token_rule
from jaxspec.sampling import Processing, Uniforms
from tests.conftest import small_mesh, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("x64")

ROWS, LENGTH, VOCAB = 96, 3, 700
BROKEN_DRAFTS = 30, 38
EVERYTHING = Processing(
    banned=(0, 5, 699), min_new_tokens=4, stop_ids=(1, 640), temperature=0.7, vocab_size=690
)
GRID = (0.0, 0.5, 1.0, 1.4)


class Case(NamedTuple):
    """What is verified."""

    processing: Processing = Processing()
    grid: tuple[float, ...] = (1.0,)
    own: bool = True
    """Whether the draft has a vocabulary of its own."""
    measured: Any = slice(None, None, 4)

    def factors(self) -> Any:
        """At each depth another one of the grid."""
        if len(self.grid) == 1:
            return self.grid[0]
        return jnp.asarray(self.grid, jnp.float32)[np.arange(LENGTH) % len(self.grid)]


CASES = {
    "eagle3": Case(),
    "eagle3 in between": Case(EVERYTHING, GRID, measured=jnp.arange(7, dtype=jnp.int32)),
    "whole vocabulary": Case(own=False),
    "whole vocabulary in between": Case(EVERYTHING, GRID, own=False),
    "one factor": Case(EVERYTHING, (0.6,)),
}


def hard_logits(random: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Logits [ROWS count width] up to +-80: with ties, next to all mass on one token or on a few,
    all equal."""
    logits = random.normal(size=(ROWS, count, width)) * random.choice([0.1, 1, 4], (ROWS, 1, 1))
    kinds = np.arange(ROWS) % 8
    logits[kinds == 1] = np.clip(40 * logits[kinds == 1], -80, 80)
    logits[kinds == 2] = np.round(logits[kinds == 2])
    logits[kinds == 3] = -80
    logits[kinds == 3, :, ::37] = 80
    logits[kinds == 4] = 0
    alone = np.flatnonzero(kinds == 5)
    logits[alone] = -900
    logits[alone[:, None], np.arange(count), random.integers(0, width, (len(alone), count))] = 1
    return logits


def hard_block(case: Case, dtype: Any, form: Verification) -> tuple[Block, dict[str, Any]]:
    """A block with all of these, NaNs and infinities, whose drafts were drawn by `form`."""
    random = np.random.default_rng(0)
    size = 250 if case.own else VOCAB
    ids = np.sort(random.permutation(VOCAB)[:size]).astype(np.int32)
    target, draft = hard_logits(random, LENGTH + 1, VOCAB), hard_logits(random, LENGTH, size)
    near = np.arange(ROWS) % 3 == 0  # else next to nothing would be accepted
    draft[near] = target[near][:, :LENGTH, ids] + 0.5 * draft[near] / np.abs(draft[near]).max()
    target[6, 2, 11], target[14, 0, 3], target[22, 1, 7] = np.nan, np.inf, -np.inf
    draft[BROKEN_DRAFTS[0], 1, 4], draft[BROKEN_DRAFTS[1], 0] = np.nan, -np.inf
    produced = random.integers(0, 6, (ROWS, 1)) + np.arange(LENGTH + 1)
    factors = case.factors()
    logits, given = jnp.asarray(target, dtype), jnp.asarray(draft, dtype)
    produced, mapped = jnp.asarray(produced, jnp.int32), jnp.asarray(ids) if case.own else None
    levels = sampling.level_count(VOCAB)
    numbers = jnp.asarray(random.random((ROWS, 2 * LENGTH + 1, levels)), dtype)
    tokens = [
        form.draw_drafts(
            given[:, depth],
            mapped,
            VOCAB,
            case.processing,
            produced[:, depth],
            factors[depth] if isinstance(factors, jax.Array) else factors,
            0.0 in case.grid,
            Uniforms(numbers[:, depth]),
        )
        for depth in range(LENGTH)
    ]
    offered = jnp.asarray(random.integers(0, LENGTH + 1, ROWS) | 2, jnp.int32)
    proposal = DrawnProposal(jnp.stack(tokens, axis=1), given, offered, mapped)
    block = Block(logits, proposal, produced, case.processing, factors, case.grid, case.measured)
    more = {
        "coins": jnp.asarray(random.random((ROWS, LENGTH)), dtype),
        "next": Uniforms(numbers[:, LENGTH]),
        "matched": Uniforms(numbers[:, LENGTH:]),
        "gumbel": jnp.asarray(random.gumbel(size=(ROWS, VOCAB)), dtype),
    }
    return block, more


@functools.partial(jax.jit, static_argnames=("case", "fast"))
def answers(
    logits: jax.Array,
    proposal: DrawnProposal,
    produced: jax.Array,
    more: dict[str, Any],
    case: str,
    fast: bool,
) -> dict[str, Any]:
    """All that a form says of a block, and what every rule draws."""
    chosen = CASES[case]
    block = Block(
        logits,
        proposal,
        produced,
        chosen.processing,
        chosen.factors(),
        chosen.grid,
        chosen.measured,
    )
    compared = (FUSED if fast else PLAIN).compare_block(block)
    offered = jnp.minimum(proposal.lengths, count_leading(compared.finite[:, :LENGTH]))
    said: dict[str, Any] = {"finite": compared.finite, "offered": offered}
    for rule in (token_rule, block_rule):
        for name in ("next", "gumbel"):
            verdict = rule(
                compared.distributions, proposal.tokens, offered, more["coins"], more[name]
            )
            said[f"{rule.__name__} {name}"] = verdict
    said["match_rule"] = match_rule(
        compared.distributions, proposal.tokens, offered, more["matched"]
    )
    tokens = jnp.pad(proposal.tokens, ((0, 0), (0, 1)), constant_values=2)
    said["logprobs"], said["entropy"] = compared.logprobs(tokens), compared.entropy
    said["comparison"] = compared.draft_overlap
    weights = jnp.log(jnp.linspace(0.2, 1, LENGTH - 1, dtype=logits.dtype))
    said["left_over"] = compared.distributions.residual_mass(
        jnp.broadcast_to(weights, (ROWS, LENGTH - 1))
    )
    return said


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_both_forms_say_and_draw_the_same(case: str, dtype: str) -> None:
    """Tokens, cuts and failures are equal; numbers are within rounding where the target is
    finite."""
    block, more = hard_block(CASES[case], jnp.dtype(dtype), PLAIN)
    drawn_too, _ = hard_block(CASES[case], jnp.dtype(dtype), FUSED)
    if not CASES[case].own:  # of its own vocabulary it draws with the same noise in another order
        np.testing.assert_array_equal(drawn_too.proposal.tokens, block.proposal.tokens)
    for given in (block, drawn_too):
        arrays = given.logits, given.proposal, given.response_positions, more
        plain, fast = (answers(*arrays, case=case, fast=fast) for fast in (False, True))
        finite: np.ndarray = np.asarray(plain["finite"])
        rows: np.ndarray = np.all(finite, axis=1)
        assert 3 <= (~rows).sum() < ROWS / 2
        np.testing.assert_array_equal(fast["finite"], finite)
        accepted = np.asarray(plain["block_rule next"].accepted)
        assert set(accepted) == set(range(LENGTH + 1))
        for name in plain:
            if "rule" in name:
                np.testing.assert_array_equal(
                    fast[name].accepted, plain[name].accepted, err_msg=name
                )
                at_cut = finite[np.arange(ROWS), np.asarray(plain[name].accepted)]
                np.testing.assert_array_equal(
                    fast[name].next_token[at_cut], plain[name].next_token[at_cut], err_msg=name
                )
        tolerance = 1e-12 if dtype == "float64" else 2e-5
        for name in ("logprobs", "entropy"):
            np.testing.assert_allclose(
                fast[name][finite], plain[name][finite], rtol=tolerance, atol=tolerance
            )
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=tolerance)
        # beyond a draft gone NaN nothing is offered, so this is not looked at
        whole = rows & ~np.isin(np.arange(ROWS), BROKEN_DRAFTS)
        close(fast["left_over"][whole], plain["left_over"][whole])
        ours, theirs = fast["comparison"], plain["comparison"]
        close(ours.overlap[rows], theirs.overlap[rows])
        close(ours.draft_entropy[rows], theirs.draft_entropy[rows])
        seen = rows[given.measured_slots]
        close(ours.overlap_by_factor[seen], theirs.overlap_by_factor[seen])


def test_float32_is_as_exact_as_the_plain_form() -> None:
    """At the sizes of a published policy and draft, against float64: at most twice as far."""
    vocab, size, rows = 151_936, 32_000, 2
    random = np.random.default_rng(0)
    ids = jnp.asarray(np.sort(random.permutation(vocab)[:size]), jnp.int32)
    target = 3 * random.normal(size=(rows, LENGTH + 1, vocab))
    target[1] = np.clip(20 * target[1], -80, 80)
    draft = target[:, :LENGTH, ids] + random.normal(size=(rows, LENGTH, size))
    given = target.astype(np.float32), draft.astype(np.float32)
    tokens = jnp.asarray(ids)[draft.argmax(-1)]

    @functools.partial(jax.jit, static_argnames="fast")
    def say(target: jax.Array, draft: jax.Array, fast: bool) -> tuple[jax.Array, ...]:
        produced = jnp.zeros((rows, LENGTH + 1), jnp.int32)
        proposal = DrawnProposal(tokens, draft, jnp.full((rows,), LENGTH, jnp.int32), ids)
        block = Block(target, proposal, produced, Processing(), 1.0, (1.0, 0.7), slice(None))
        compared = (FUSED if fast else PLAIN).compare_block(block)
        weights = jnp.full((rows, LENGTH - 1), np.log(0.8), target.dtype)
        return (
            compared.logprobs(jnp.pad(tokens, ((0, 0), (0, 1)))),
            compared.entropy,
            compared.draft_overlap.overlap,
            compared.draft_overlap.overlap_by_factor,
            compared.draft_overlap.draft_entropy,
            compared.distributions.residual_mass(weights),
            *compared.distributions.draft_token_logprobs(tokens),
        )

    exact = say(*(jnp.asarray(array, jnp.float64) for array in given), fast=False)
    plain, fast = (say(*map(jnp.asarray, given), fast=fast) for fast in (False, True))
    for name, (true, theirs, ours) in enumerate(zip(exact, plain, fast, strict=True)):
        distances = [
            float(np.abs(np.asarray(each, np.float64) - np.asarray(true)).max())
            for each in (ours, theirs)
        ]
        # Where both are exact to a few units in the last place, which is nearer is chance.
        rounding = 4 * np.finfo(np.float32).eps * float(np.abs(true).max())
        assert distances[0] <= max(2 * distances[1], rounding), (name, distances)


@pytest.mark.parametrize("vocab", [7, 300])
def test_a_residual_without_weight_falls_back_to_the_target(vocab: int) -> None:
    """And so does one whose weights in the block that was drawn are gone when computed again."""
    random = np.random.default_rng(0)
    second = random.gamma(0.5, size=(200, vocab)) * (random.random((200, vocab)) < 0.5)
    second[:, 3] += 1e-3
    first = np.where(random.random((200, vocab)) < 0.3, second, 0)
    first[::2] = 0
    wants_first = np.arange(200) % 4 > 1
    noise = Uniforms(jnp.asarray(random.random((200, sampling.level_count(vocab)))))
    weights = jnp.asarray(first), jnp.asarray(second)

    def draw(again: tuple[jax.Array, jax.Array]) -> np.ndarray:
        first, second = (functools.partial(jnp.take_along_axis, each, axis=1) for each in again)
        prefers = jnp.asarray(wants_first)
        return np.asarray(sampling.draw_from_either(*weights, prefers, noise, (first, second)))

    chosen = np.where((wants_first & (first > 0).any(axis=1))[:, None], first, second)
    np.testing.assert_array_equal(
        draw(weights), sampling.draw_by_weight(jnp.asarray(chosen), noise)
    )
    assert (chosen[np.arange(200), draw(weights)] > 0).all()
    gone = draw((jnp.zeros_like(weights[0]), weights[1]))
    assert (second[np.arange(200), gone] > 0).all()
    assert (gone != draw(weights)).any() == (vocab > sampling.BRANCHES)


def test_the_fast_form_is_for_accelerators_and_what_is_processed_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def form(tensor: int = 1, **settings: Any) -> Verification:
        config = tiny_config(tiny_model(), rollout=RolloutConfig(**settings))
        step = build_step(config, small_mesh(1, tensor), (1,), 11)
        return step.generator.settings.verification

    assert form() is PLAIN
    monkeypatch.setattr(meshes, "has_accelerators", lambda mesh: True)
    assert form() is FUSED
    assert form(tensor=2) is PLAIN
    others: tuple[dict[str, Any], ...] = (
        {"verify": "coupled"},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 0.0},
    )
    for settings in others:
        assert form(**settings) is PLAIN
    assert is_supported(EVERYTHING)
