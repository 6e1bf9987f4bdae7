"""What several answers to each of many problems say of a policy: avg@k, pass@k, cons@k, with
intervals over problems, and the difference between two policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Z = 1.959964
"""Standard errors on each side of a mean that an interval of 95 % has."""


class Estimate(NamedTuple):
    """A mean over problems, with its interval of 95 %."""

    value: float
    low: float
    high: float
    problems: int
    """How many it is of."""


class Tally(NamedTuple):
    """What became of the answers to each problem."""

    counted: Float[np.ndarray, " problems"]
    """Answers that something is known of; the others have no part in anything."""
    correct: Float[np.ndarray, " problems"]
    consensus: Float[np.ndarray, " problems"]
    """As in `consensus`; 0 where answers cannot be compared with one another."""
    reward: Float[np.ndarray, " problems"]
    """Sum over the answers."""


def pass_at(count: int, correct: int, k: int) -> float:
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


def consensus(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """How likely the most frequent answer is correct (majority vote, Wang et al., arXiv 2203.11171)
    where one of equally frequent ones is chosen at random; None states nothing, and is no answer.

    What is written alike but judged differently counts by the share that is correct.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leading = [answer for answer, count in votes.items() if count == most]
    shares = [
        sum(right for answer, right in zip(answers, correct, strict=True) if answer == leader)
        / most
        for leader in leading
    ]
    return sum(shares) / len(shares)


def mean_of(values: Sequence[float] | np.ndarray, share: bool = True) -> Estimate:
    """The mean over problems with its interval of 95 %; NaN where there are no problems.

    A `share` has Wilson's score interval, as if each problem were one trial. That is exact for one
    answer a problem. Values within 0 and 1 never vary more than such trials, so that it holds for
    shares of several answers too. Other values have the standard error of the mean (Miller,
    arXiv 2411.00640).
    """
    found = np.asarray(values, np.float64)
    count = len(found)
    if not count:
        return Estimate(np.nan, np.nan, np.nan, 0)
    mean = float(found.mean())
    if count == 1:  # says nothing of other problems
        return Estimate(mean, *((0.0, 1.0) if share else (-np.inf, np.inf)), 1)
    if share:
        return Estimate(mean, *wilson(mean, count), count)
    error = Z * float(found.std(ddof=1)) / count**0.5
    return Estimate(mean, mean - error, mean + error, count)


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Ends of the score interval of 95 % (Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    extra = Z**2 / trials
    middle = (share + extra / 2) / (1 + extra)
    half = (Z / (1 + extra)) * (share * (1 - share) / trials + extra / (4 * trials)) ** 0.5
    # rounding must not leave the range, nor the share outside
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))


def estimates(tally: Tally, samples: int, votes: bool) -> dict[str, Estimate]:
    """What a set's problems, each answered `samples` times, say: avg@k, pass@k for powers of two
    and for all, cons@k where answers can be compared (`votes`), and the mean reward.

    All are of the same problems: those of which something is known. If fewer than k answers to a
    problem are known, its pass@k is that of these answers.
    """
    known = tally.counted > 0
    counted, correct = tally.counted[known], tally.correct[known]
    found = {f"avg@{samples}": mean_of(correct / counted)}
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
    for k in [*powers, samples] if samples > 1 else []:
        pairs = zip(counted.astype(int).tolist(), correct.astype(int).tolist(), strict=True)
        found[f"pass@{k}"] = mean_of([pass_at(n, c, min(k, n)) for n, c in pairs])
    if votes and samples > 1:
        found[f"cons@{samples}"] = mean_of(tally.consensus[known])
    # an answer that is right earns 1, and others nothing, unless rewards say otherwise
    share = np.array_equal(tally.reward, tally.correct)
    found["reward"] = mean_of(tally.reward[known] / counted, share=share)
    return found


class Difference(NamedTuple):
    """How much more of their answers are correct by a second policy than by a first, paired by
    problem."""

    estimate: Estimate
    first: float
    second: float
    better: int
    """Problems of which the second answers more."""
    worse: int


def difference(first: Mapping[str, float], second: Mapping[str, float]) -> Difference:
    """Compares shares of correct answers by problem, over the problems that both have: what is hard
    for both is no noise then (Miller, arXiv 2411.00640, section 4)."""
    both = [name for name in first if name in second]
    before = np.array([first[name] for name in both])
    after = np.array([second[name] for name in both])
    change = after - before
    return Difference(
        mean_of(change, share=False),
        float(before.mean()) if both else np.nan,
        float(after.mean()) if both else np.nan,
        int((change > 0).sum()),
        int((change < 0).sum()),
    )
