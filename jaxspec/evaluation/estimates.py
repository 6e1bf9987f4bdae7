"""What several answers to each of many problems say of a policy: avg@k, pass@k, cons@k, with
intervals over problems, and the difference between two policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Z_SCORE = 1.959964
"""Standard errors on each side of a mean that an interval of 95 % has."""


class Estimate(NamedTuple):
    """A mean over problems, with its interval of 95 %."""

    value: float
    low: float
    high: float
    problems: int
    """How many it is of."""


class AnswerTally(NamedTuple):
    """What became of the answers to each problem."""

    answer_count: Float[np.ndarray, " problems"]
    """Answers that something is known of; the others have no part in anything."""
    correct_count: Float[np.ndarray, " problems"]
    vote_accuracy: Float[np.ndarray, " problems"]
    """As in `majority_accuracy`; 0 where answers cannot be compared with one another."""
    reward_sum: Float[np.ndarray, " problems"]
    """Sum over the answers."""


def pass_at_k(count: int, correct: int, k: int) -> float:
    """The probability that of `k` answers at least one is correct, without bias, from `count`
    answers of which `correct` are: 1 - C(count - correct, k) / C(count, k) (Chen et al.,
    arXiv 2107.03374, equation 1).

    Raises:
      ValueError: there are fewer answers than `k`.
    """
    if count < k:
        raise ValueError(f"pass@{k} of {count} answers")
    if count - correct < k:
        return 1.0
    return float(1 - np.prod(1 - k / np.arange(count - correct + 1, count + 1)))


def majority_accuracy(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """How likely the most frequent answer is correct (majority vote, Wang et al., arXiv 2203.11171)
    where one of equally frequent ones is chosen at random; None states nothing, and is no answer.

    What is written alike but judged differently counts by the share that is correct.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    top_count = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == top_count]
    shares = [
        sum(
            is_correct
            for answer, is_correct in zip(answers, correct, strict=True)
            if answer == leader
        )
        / top_count
        for leader in leaders
    ]
    return sum(shares) / len(shares)


def estimate_mean(values: Sequence[float] | np.ndarray, is_share: bool = True) -> Estimate:
    """The mean over problems with its interval of 95 %; NaN where there are no problems.

    A share (`is_share`) has Wilson's score interval, as if each problem were one trial. That is
    exact for one answer a problem. Values within 0 and 1 never vary more than such trials, so that
    it holds for shares of several answers too. Other values have the standard error of the mean
    (Miller, arXiv 2411.00640).
    """
    samples = np.asarray(values, np.float64)
    count = len(samples)
    if not count:
        return Estimate(np.nan, np.nan, np.nan, 0)
    mean = float(samples.mean())
    if count == 1:  # says nothing of other problems
        return Estimate(mean, *((0.0, 1.0) if is_share else (-np.inf, np.inf)), 1)
    if is_share:
        return Estimate(mean, *wilson_interval(mean, count), count)
    error = Z_SCORE * float(samples.std(ddof=1)) / count**0.5
    return Estimate(mean, mean - error, mean + error, count)


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """Ends of the score interval of 95 % (Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    correction = Z_SCORE**2 / trials
    center = (share + correction / 2) / (1 + correction)
    half_width = (Z_SCORE / (1 + correction)) * (
        share * (1 - share) / trials + correction / (4 * trials)
    ) ** 0.5
    # rounding must not leave the range, nor the share outside
    return max(0.0, min(center - half_width, share)), min(1.0, max(center + half_width, share))


def estimate_metrics(tally: AnswerTally, samples: int, has_votes: bool) -> dict[str, Estimate]:
    """What a set's problems, each answered `samples` times, say: avg@k, pass@k for powers of two
    and for all, cons@k where answers can be compared (`has_votes`), and the mean reward.

    All are of the same problems: those of which something is known. If fewer than k answers to a
    problem are known, its pass@k is that of these answers.
    """
    has_answers = tally.answer_count > 0
    answers, correct = (tally.answer_count[has_answers], tally.correct_count[has_answers])
    results = {f"avg@{samples}": estimate_mean(correct / answers)}
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
    for k in [*powers, samples] if samples > 1 else []:
        pairs = zip(answers.astype(int).tolist(), correct.astype(int).tolist(), strict=True)
        results[f"pass@{k}"] = estimate_mean([pass_at_k(n, c, min(k, n)) for n, c in pairs])
    if has_votes and samples > 1:
        results[f"cons@{samples}"] = estimate_mean(tally.vote_accuracy[has_answers])
    # an answer that is right earns 1, and others nothing, unless rewards say otherwise
    is_share = np.array_equal(tally.reward_sum, tally.correct_count)
    results["reward"] = estimate_mean(tally.reward_sum[has_answers] / answers, is_share=is_share)
    return results


class PairedDifference(NamedTuple):
    """How much more of their answers are correct by a second policy than by a first, paired by
    problem."""

    estimate: Estimate
    first_mean: float
    second_mean: float
    better_count: int
    """Problems of which the second answers more."""
    worse_count: int


def compare_shares(first: Mapping[str, float], second: Mapping[str, float]) -> PairedDifference:
    """Compares shares of correct answers by problem, over the problems that both have: what is hard
    for both is no noise then (Miller, arXiv 2411.00640, section 4)."""
    shared_names = [name for name in first if name in second]
    first_values = np.array([first[name] for name in shared_names])
    second_values = np.array([second[name] for name in shared_names])
    change = second_values - first_values
    return PairedDifference(
        estimate_mean(change, is_share=False),
        float(first_values.mean()) if shared_names else np.nan,
        float(second_values.mean()) if shared_names else np.nan,
        int((change > 0).sum()),
        int((change < 0).sum()),
    )
