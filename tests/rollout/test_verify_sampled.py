"""The lossless rules on sampled rows: extreme coins, rounding and NaNs, and noise that the rules
share with plain sampling."""

import numpy as np
import pytest

from tests.conftest import chi_square
from tests.rollout.harness import BELOW_ONE, RULES, log, match

pytestmark = pytest.mark.usefixtures("x64", "form")


def random_rows(
    size: int, length: int, vocab: int, dtype: type = np.float64, seed: int = 0
) -> tuple[np.ndarray, ...]:
    """Target and draft log-probabilities with zeros in both, drafts sampled from the latter, and
    full offers."""
    random = np.random.default_rng(seed)
    target, draft = random.dirichlet(np.ones(vocab), (2, size, length + 1))
    for law in (target, draft):
        law[random.random(law.shape) < 0.3] = 0
        law[..., 0] += 0.05 * (law.sum(-1) == 0)
        law /= law.sum(-1, keepdims=True)
    target, draft = log(target).astype(dtype), log(draft[:, :length]).astype(dtype)
    drafts = (draft + random.gumbel(size=draft.shape)).argmax(-1).astype(np.int32)
    return target, draft, drafts, np.full(size, length, np.int32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES)
def test_extreme_coins(rule: str, dtype: type) -> None:
    """A coin of 0 never accepts what the target excludes, and the largest coin below 1 accepts what
    it prefers to the draft."""
    target, draft = np.array([0.0, 0.4, 0.6]), np.array([0.5, 0.4, 0.1])
    drafts = np.array([[0], [1], [2]], np.int32)
    laws = [
        log(np.broadcast_to(law, (3, count, 3))).astype(dtype)
        for law, count in ((target, 2), (draft, 1))
    ]
    noise = np.tile(np.array([1e5, 0, 0], dtype), (3, 1))  # pulls towards the excluded token
    for coin in (0.0, np.nextafter(dtype(1), dtype(0))):
        verdict = RULES[rule](
            *laws, drafts, np.ones(3, np.int32), np.full((3, 1), coin, dtype), noise
        )
        assert verdict.accepted.tolist() == [0, 1, 1]
        assert 0 not in verdict.next_token.tolist()


@pytest.mark.parametrize("coin", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("rule", RULES)
def test_no_coin_lets_an_excluded_token_through(rule: str, coin: float) -> None:
    """In float32, over blocks of 3, with noise that pulls towards what the target excludes."""
    size, length, vocab = 3000, 3, 5
    target, draft, drafts, count = random_rows(size, length, vocab, np.float32)
    excluded = 0
    for pulled in range(vocab):
        noise = np.where(np.arange(vocab) == pulled, np.float32(1e5), np.float32(0)) * np.ones(
            (size, 1), np.float32
        )
        verdict = RULES[rule](
            target, draft, drafts, count, np.full((size, length), coin, np.float32), noise
        )
        accepted, next_token = np.asarray(verdict.accepted), np.asarray(verdict.next_token)
        assert len(set(accepted)) > 1
        everyone = np.arange(size)
        excluded += int((target[everyone, accepted, pulled] == -np.inf).sum())
        assert (target[everyone, accepted, next_token] > -np.inf).all()
        at_draft = np.take_along_axis(target[:, :length], drafts[..., None], axis=2)[..., 0]
        assert (at_draft > -np.inf)[np.arange(length) < accepted[:, None]].all()
    assert excluded > size


@pytest.mark.parametrize("rule", RULES)
def test_equal_laws_accept_everything_and_never_draw_from_an_empty_residual(rule: str) -> None:
    law = np.random.default_rng(0).dirichlet(np.ones(5), (64, 4))
    law[:, :, 0], law[:, :, 1] = 0, law[:, :, 0] + law[:, :, 1]
    drafts = law[:, :3].argmax(-1).astype(np.int32)
    noise = np.tile(np.array([1e5, 0, 0, 0, 0]), (64, 1))
    for count in range(4):
        verdict = RULES[rule](
            log(law),
            log(law[:, :3]),
            drafts,
            np.full(64, count, np.int32),
            np.full((64, 3), BELOW_ONE),
            noise,
        )
        np.testing.assert_array_equal(verdict.accepted, count)
        assert 0 not in np.asarray(verdict.next_token)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", ["plain"], indirect=True)
def test_a_residual_that_rounding_emptied_falls_back_to_the_target(rule: str, form: str) -> None:
    """The draft exceeds the target by a rounding error at the drafted token, and nowhere else do
    they differ."""
    draft = np.array([0.0, 0.4, 0.6])
    target = np.array([0.0, 0.4, np.nextafter(0.6, 0.0)])
    coins = np.full((1, 1), BELOW_ONE)
    for favoured in (1, 2):
        noise = np.zeros((1, 3))
        noise[:, 0], noise[:, favoured] = 2e5, 1e5
        laws = log(np.tile(target, (1, 2, 1))), log(draft)[None, None] + 1e-9
        verdict = RULES[rule](*laws, np.array([[2]], np.int32), np.ones(1, np.int32), coins, noise)
        assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([0], [favoured])


def test_without_drafts_every_rule_is_plain_sampling(form: str) -> None:
    """In the fast form only by matching: its rounds without drafts have no other noise."""
    target, _, _, _ = random_rows(50, 0, 4)
    noise = np.random.default_rng(0).gumbel(size=(50, 1, 4))
    empty = (np.zeros((50, 0, 4)), np.zeros((50, 0), np.int32), np.zeros(50, np.int32))
    none = np.zeros((50, 0))
    for verdict in [
        *(rule(target, *empty, none, noise[:, 0]) for rule in RULES.values() if form == "plain"),
        match(target, *empty[1:], noise),
    ]:
        assert verdict.accepted.tolist() == [0] * 50
        np.testing.assert_array_equal(verdict.next_token, (target + noise)[:, 0].argmax(-1))


@pytest.mark.parametrize("rule", [*RULES, "match"])
def test_what_stands_beyond_the_offer_is_not_looked_at(rule: str) -> None:
    size, length, vocab = 400, 3, 4
    target, draft, drafts, _ = random_rows(size, length, vocab)
    random = np.random.default_rng(1)
    count = random.integers(0, length + 1, size).astype(np.int32)
    coins, noise = random.random((size, length)), random.gumbel(size=(size, length + 1, vocab))

    def verdict(target: np.ndarray, draft: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        if rule == "match":
            return np.stack(match(target, drafts, count, noise), axis=1)
        return np.stack(RULES[rule](target, draft, drafts, count, coins, noise[:, 0]), axis=1)

    clean, beyond = verdict(target, draft, drafts), np.arange(length + 1) >= count[:, None]
    drafts = np.where(beyond[:, :length], -1, drafts).astype(np.int32)
    draft[beyond[:, :length]] = np.nan
    target[:, 1:][beyond[:, :length]] = np.nan
    np.testing.assert_array_equal(verdict(target, draft, drafts), clean)
    assert (clean[:, 0] == count).any()
    assert (clean[:, 0] < count).any()


@pytest.mark.parametrize("rule", [*RULES, "match"])
def test_a_nan_of_the_target_after_the_last_offer_spoils_the_next_token_only(rule: str) -> None:
    """The engine offers no draft beyond a failing position: as many are kept, and what follows is
    another only where it is read there."""
    size, length, vocab = 400, 3, 4
    target, draft, drafts, offered = random_rows(size, length, vocab)
    random = np.random.default_rng(1)
    coins, noise = random.random((size, length)), random.gumbel(size=(size, length + 1, vocab))
    at = random.integers(-1, length + 1, size)
    offered = np.where(at >= 0, np.minimum(offered, at), offered).astype(np.int32)

    def verdicts(target: np.ndarray) -> np.ndarray:
        one = (
            match(target, drafts, offered, noise)
            if rule == "match"
            else RULES[rule](target, draft, drafts, offered, coins, noise[:, 0])
        )
        return np.stack(one, axis=1)

    clean = verdicts(target)
    target[at >= 0, at[at >= 0]] = np.nan
    found = verdicts(target)
    np.testing.assert_array_equal(found[:, 0], clean[:, 0])
    reads = found[:, 0] == at
    np.testing.assert_array_equal(found[~reads], clean[~reads])
    assert 20 < reads.sum() < size - 20
    assert ((found[:, 1] >= 0) & (found[:, 1] < vocab)).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_gone_nan_ends_the_offer(rule: str) -> None:
    size, length, vocab = 400, 3, 4
    target, draft, drafts, count = random_rows(size, length, vocab)
    random = np.random.default_rng(1)
    coins, noise = random.random((size, length)), random.gumbel(size=(size, vocab))
    at = random.integers(0, length + 1, size).astype(np.int32)
    shorter = RULES[rule](target, draft, drafts, at, coins, noise)
    draft[at < length, at[at < length]] = np.nan
    for found, wanted in zip(
        RULES[rule](target, draft, drafts, count, coins, noise), shorter, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_match_rule_gives_the_tokens_of_plain_sampling() -> None:
    """Whatever was drafted, the tokens are argmax(target + noise) of each position, up to and
    including the first that differs."""
    random = np.random.default_rng(0)
    rows, length, vocab = 4000, 3, 4
    target = log(random.dirichlet(np.ones(vocab), (rows, length + 1)))
    noise = random.gumbel(size=(rows, length + 1, vocab))
    plain = (target + noise).argmax(-1)
    drafts = np.where(
        random.random((rows, length)) < 0.7,
        plain[:, :length],
        random.integers(vocab, size=(rows, length)),
    ).astype(np.int32)
    count = random.integers(0, length + 1, rows).astype(np.int32)
    verdict = match(target, drafts, count, noise)
    accepted, next_token = np.asarray(verdict.accepted), np.asarray(verdict.next_token)
    assert set(zip(count.tolist(), accepted.tolist(), strict=True)) == {
        (c, a) for c in range(length + 1) for a in range(c + 1)
    }
    for row in range(rows):
        kept = [*drafts[row, : accepted[row]], int(next_token[row])]
        assert kept == plain[row, : accepted[row] + 1].tolist()
        assert (
            accepted[row] == count[row] or drafts[row, accepted[row]] != plain[row, accepted[row]]
        )


def test_coupled_drafts_agree_as_often_as_the_source_promises() -> None:
    """With shared noise, acceptance is at least (1 - TV) / (1 + TV) (Daliri et al., theorem 2), and
    at most 1 - TV."""
    random = np.random.default_rng(1)
    rows, vocab = 100_000, 8
    target, draft = random.dirichlet(np.ones(vocab), 2)
    noise = random.gumbel(size=(rows, 2, vocab))
    drafts = (log(draft) + noise[:, :1]).argmax(-1).astype(np.int32)
    verdict = match(
        log(np.broadcast_to(target, (rows, 2, vocab))), drafts, np.ones(rows, np.int32), noise
    )
    rate, distance = float(np.asarray(verdict.accepted).mean()), np.abs(target - draft).sum() / 2
    slack = 4 / np.sqrt(rows)
    assert (1 - distance) / (1 + distance) - slack < rate < 1 - distance + slack
    counts = np.bincount(
        np.where(np.asarray(verdict.accepted) > 0, drafts[:, 0], np.asarray(verdict.next_token)),
        minlength=vocab,
    )
    assert chi_square(counts, rows * target) > 1e-3
