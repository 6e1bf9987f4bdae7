"""Estimates of avg@k, pass@k and cons@k, with intervals.

Intervals are over problems. Two policies are compared by the differences on each problem.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Z_SCORE = 1.959964
"""Standard errors on each side of the mean in a 95 % interval."""


class Estimate(NamedTuple):
    """Mean over problems, with its 95 % interval."""

    value: float
    low: float
    high: float
    problems: int
    """Number of problems."""

    def to_record(self) -> dict[str, float | int]:
        """Returns the numbers that have a value, by name."""
        return {name: value for name, value in self._asdict().items() if math.isfinite(value)}


class AnswerTally(NamedTuple):
    """Counts of the answers to each problem."""

    answer_count: Float[np.ndarray, " problems"]
    """Number of judged answers. All fields ignore other answers."""
    correct_count: Float[np.ndarray, " problems"]
    """Number of correct answers."""
    vote_accuracy: Float[np.ndarray, " problems"]
    """Accuracy of a majority vote (`majority_accuracy`). 0 if answers cannot be compared."""
    reward_sum: Float[np.ndarray, " problems"]
    """Sum of the rewards."""


def pass_at_k(count: int, correct: int, k: int) -> float:
    """Estimates pass@k from several answers.

    Pass@k is the probability that at least one of k answers is correct. The estimate
    1 - C(count - correct, k) / C(count, k) is unbiased (Chen et al., arXiv 2107.03374, equation 1).

    Args:
      count: number of answers.
      correct: number of correct answers.
      k: number of answers to draw.

    Raises:
      ValueError: there are fewer than `k` answers.
    """
    if count < k:
        raise ValueError(f"pass@{k} of {count} answers; k must not exceed them")
    # Any k answers include a correct one if fewer than k are wrong.
    if count - correct < k:
        return 1.0
    # The product equals the quotient of binomials, which could overflow.
    return float(1 - np.prod(1 - k / np.arange(count - correct + 1, count + 1)))


def majority_accuracy(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Computes the accuracy of a majority vote.

    The vote chooses the most frequent answer (Wang et al., arXiv 2203.11171). Among equally
    frequent answers it chooses at random. The result is the probability that the chosen answer is
    correct, and 0 without any vote.

    Args:
      answers: stated answers. None = no answer, which has no vote.
      correct: whether each answer is correct.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    top_count = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == top_count]
    # Answers of the same text may be judged differently, so the share of correct ones counts.
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
    """Estimates a mean and its 95 % interval.

    Shares get Wilson's score interval. Other values get an interval by the standard error of the
    mean (Miller, arXiv 2411.00640). A single value gets an interval of all possible means. Without
    values, mean and interval are NaN.

    Args:
      values: one value for each problem.
      is_share: whether the values are shares, from 0 to 1.
    """
    samples = np.asarray(values, np.float64)
    count = len(samples)
    if not count:
        return Estimate(np.nan, np.nan, np.nan, 0)
    mean = float(samples.mean())
    # One problem says nothing about the variance between problems.
    if count == 1:
        return Estimate(mean, *((0.0, 1.0) if is_share else (-np.inf, np.inf)), 1)
    # Wilson's interval is for trials that succeed or fail, such as problems with one answer each.
    # Shares of several answers have no greater variance at the same mean, so it covers them, too.
    if is_share:
        return Estimate(mean, *wilson_interval(mean, count), count)
    error = Z_SCORE * float(samples.std(ddof=1)) / count**0.5
    return Estimate(mean, mean - error, mean + error, count)


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """Computes Wilson's 95 % score interval.

    Returns the lower and upper bound. Source: Wilson, J. Am. Stat. Assoc. 22, 1927.
    """
    correction = Z_SCORE**2 / trials
    center = (share + correction / 2) / (1 + correction)
    half_width = (Z_SCORE / (1 + correction)) * (
        share * (1 - share) / trials + correction / (4 * trials)
    ) ** 0.5
    # Rounding may move a bound out of 0 to 1, or past the share itself.
    return max(0.0, min(center - half_width, share)), min(1.0, max(center + half_width, share))


def estimate_metrics(tally: AnswerTally, samples: int, has_votes: bool) -> dict[str, Estimate]:
    """Estimates the metrics of a set of problems.

    They are avg@k, cons@k and the mean reward for k = `samples`. There is a pass@k for 2, 4,
    8 and so on below `samples`, and for `samples`. With one sample, there is no pass@k and no
    cons@k.

    Args:
      tally: counts of the answers to each problem.
      samples: answers to each problem.
      has_votes: whether answers can be compared, as cons@k needs.
    """
    # All metrics use the same problems, those with judged answers.
    has_answers = tally.answer_count > 0
    answers, correct = (tally.answer_count[has_answers], tally.correct_count[has_answers])
    results = {f"avg@{samples}": estimate_mean(correct / answers)}
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
    for k in [*powers, samples] if samples > 1 else []:
        # Judging may fail for some answers. A problem with fewer than k then uses all that it has.
        pairs = zip(answers.astype(int).tolist(), correct.astype(int).tolist(), strict=True)
        results[f"pass@{k}"] = estimate_mean([pass_at_k(n, c, min(k, n)) for n, c in pairs])
    if has_votes and samples > 1:
        results[f"cons@{samples}"] = estimate_mean(tally.vote_accuracy[has_answers])
    # Rewards of 1 for correct answers and 0 for others are shares, too.
    is_share = np.array_equal(tally.reward_sum, tally.correct_count)
    results["reward"] = estimate_mean(tally.reward_sum[has_answers] / answers, is_share=is_share)
    return results


class PairedDifference(NamedTuple):
    """Difference in accuracy between two policies.

    It is positive if the second policy is better. Differences are taken on each problem.
    """

    estimate: Estimate
    first_mean: float
    second_mean: float
    better_count: int
    """Number of problems on which the second policy is better."""
    worse_count: int
    """Number of problems on which it is worse."""


def compare_shares(first: Mapping[str, float], second: Mapping[str, float]) -> PairedDifference:
    """Compares two policies' shares of correct answers.

    Uses the problems that both have.
    """
    # Pairing removes the variance of problems that are hard for both policies (Miller, arXiv
    # 2411.00640, section 4).
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
