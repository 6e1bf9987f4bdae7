"""Warnings about the metrics of a run."""

import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE = 10
"""Consecutive batches that must show a sign before it is reported."""
FALL_PATIENCE = 3
"""Consecutive evaluations that must fall before it is reported."""
# Half the spacing of float32 numbers at 0.02, a usual weight, is about 1e-9. An update of AdamW or
# Muon is about as large as the learning rate.
NEGLIGIBLE_RATE = 1e-9
"""Learning rate below which float32 weights do not change."""
# Entropy has collapsed if it is below both limits.
ENTROPY, ENTROPY_SHARE = 0.1, 0.1
"""Limits in nats per token, and as a fraction of the first batches' entropy."""
LENGTH_SHARE = 0.2
"""Limit of collapsed length, as a fraction of the first batches' length."""
_EVALUATION = re.compile(r"eval/(\S+/avg@\d+)")


def logprob_gap_warning(record: Mapping[str, Any], limit: float) -> str:
    """Returns a warning if recorded logprobs differ from the learner's.

    It is "" if the difference is within the limit, or if old logprobs are already recomputed.
    """
    factor = record.get("rollout/probability_factor", 0.0)
    # Negated so that NaN gives no warning. Recomputation, once turned on, stays on.
    if not factor > limit or record["learner/recompute"]:
        return ""
    return (
        f"warning: batch {record['step']}: probabilities that generation recorded differ from the"
        f" learner's by a factor of {factor:.3g} on average, which is above loss.reuse_below"
        f" {limit:g}: old logprobs are recomputed from now on"
    )


def acceptance_warning(record: Mapping[str, Any], baseline: float, max_drop: float) -> str:
    """Returns a warning if the acceptance length drops suddenly, else "".

    Args:
      record: metrics of a batch.
      baseline: acceptance length of the batch before.
      max_drop: fraction of `baseline` that it may drop by.
    """
    # Decoding stays lossless with a bad draft, so only speed would show the drop.
    acceptance_length = record.get("rollout/acceptance_length", 0.0)
    if acceptance_length >= baseline * (1 - max_drop):
        return ""
    return (
        f"warning: batch {record['step']}: acceptance_length fell from {baseline:.2f} to"
        f" {acceptance_length:.2f}, by more than draft_training.alarm {max_drop:g}. Look at"
        " loss/draft, grad_norm/draft and skipped/draft (did the draft's own update break it? a"
        " lower --draft_training.learning_rate), at grad_norm/policy and rollout/target_entropy"
        " (did the policy jump, or get less certain?), at rollout/coverage and"
        " rollout/expected_acceptance_1 (fewer drafts, as draft_length auto may choose, or worse"
        " ones?), and at samples.jsonl (other prompts?)"
    )


def short_batch_warning(record: Mapping[str, Any], prompt_count: int) -> str:
    """Returns a warning about a batch that dynamic sampling left short, else ""."""
    group_count = record.get("dynamic_sampling/groups", prompt_count)
    if group_count >= prompt_count:
        return ""
    return (
        f"warning: batch {record['step']}: {record['dynamic_sampling/rollouts']} rollouts have only"
        f" {group_count:g} groups whose rewards differ, of the {prompt_count} of a batch. The"
        " policy learns from these groups only. A higher --dynamic_sampling.max_batches samples"
        " more rollouts; other problems or a larger --batch.group_size give more such groups"
    )


@dataclass
class Streak:
    """Consecutive batches or evaluations that show a sign."""

    patience: int
    """Length from which the streak is reported."""
    count: int = 0
    first_step: int = 0
    last_step: int = 0
    text: str = ""

    def __str__(self) -> str:
        """Formats the range of batches and the text."""
        if self.first_step == self.last_step:
            return f"batch {self.first_step}: {self.text}"
        return f"batches {self.first_step} to {self.last_step}: {self.text}"


class StallWatch:
    """Detects from metrics that a run cannot learn.

    Args:
      by_group: whether advantages compare an answer with the others of its group.
      learning_rate: largest learning rate of the run.
    """

    def __init__(self, by_group: bool, learning_rate: float) -> None:
        self._by_group, self._learning_rate = by_group, learning_rate
        self._record_count = 0
        self._open_streaks: dict[str, Streak] = {}
        self._finished_streaks: list[Streak] = []
        self._first_records: list[Mapping[str, Any]] = []
        self._recent_records: deque[Mapping[str, Any]] = deque(maxlen=PATIENCE)
        self._streak_rewards: set[tuple[float, float | None]] = set()
        """Means and deviations of the rewards of batches in which no answer was better."""
        self._falling_values: dict[str, list[float]] = {}
        """Values of each evaluation metric since it last rose."""

    def add_record(self, record: Mapping[str, Any]) -> list[str]:
        """Adds the next batch and returns due warnings.

        A sign is reported when its streak reaches its patience, and again at each doubling.
        """
        self._record_count += 1
        if len(self._first_records) < PATIENCE:
            self._first_records.append(record)
        self._recent_records.append(record)
        signs = self._rate_signs() | self._reward_signs(record) | self._collapse_signs()
        due = [*self._extend_streaks(signs, record["step"], PATIENCE)]
        due += self._extend_streaks(self._evaluation_signs(record), record["step"], FALL_PATIENCE)
        return [f"warning: {streak}" for streak in due]

    def lasting_signs(self) -> list[str]:
        """Returns all signs that lasted as long as their patience."""
        # In a run shorter than the patience, a sign of every batch counts as lasting.
        streaks = [*self._finished_streaks, *self._open_streaks.values()]
        return [
            str(streak)
            for streak in streaks
            if streak.count >= min(streak.patience, self._record_count)
        ]

    def _extend_streaks(self, signs: dict[str, str], step: int, patience: int) -> list[Streak]:
        """Updates streaks and returns the due ones.

        A sign with an empty text ends its streak. A sign that is absent leaves its streak as it is.
        """
        due = []
        for name, text in signs.items():
            streak = self._open_streaks.get(name)
            if not text:
                finished = self._open_streaks.pop(name, None)
                self._finished_streaks += (
                    [finished] if finished and finished.count >= finished.patience else []
                )
                continue
            if streak is None:
                streak = self._open_streaks[name] = Streak(patience, first_step=step)
            streak.count, streak.last_step, streak.text = streak.count + 1, step, text
            # Due at 1, 2, 4, ... times the patience: n & (n - 1) is 0 for powers of two only.
            multiple, remainder = divmod(streak.count, patience)
            if not remainder and multiple & (multiple - 1) == 0:
                due.append(streak)
        return due

    def _rate_signs(self) -> dict[str, str]:
        """Checks for a negligible learning rate."""
        text = (
            f"the learning rate is at most {self._learning_rate:.3g}, too small to change float32"
            " weights; see --optimizer.learning_rate and --optimizer.warmup_steps"
        )
        return {"rate": text if self._learning_rate < NEGLIGIBLE_RATE else ""}

    def _reward_signs(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Checks for rewards that do not distinguish answers."""
        mean, std = record.get("reward/mean"), record.get("reward/std")
        # A batch without rewards (None or NaN) neither continues nor ends a streak.
        if mean is None or mean != mean:
            return {}
        groups_equal = record.get("reward/frac_zero_std") == 1
        if not (std == 0 or (groups_equal and self._by_group)):
            self._streak_rewards.clear()
            return {"rewards": ""}
        self._streak_rewards.add((mean, std))
        # Batches of one group differ from each other even where no group has two rewards.
        if std == 0 and len(self._streak_rewards) == 1:
            observation = f"all rewards are {mean:.3g}"
        else:
            unit = "group" if self._by_group else "batch"
            average = _mean_metric(self._recent_records, "reward/mean")
            observation = f"in no {unit} do rewards differ (their mean is {average:.3g})"
        cause = _explain_equal_rewards(self._recent_records)
        return {"rewards": f"{observation}, so that no answer is better than another. {cause}"}

    def _collapse_signs(self) -> dict[str, str]:
        """Checks for a collapse of entropy or length."""
        # The first and the recent batches must not overlap.
        if self._record_count < 2 * PATIENCE:
            return {}
        metric_names = "entropy", "rollout/length_mean", "reward/mean"
        first_means, recent_means = (
            {name: _mean_metric(records, name) for name in metric_names}
            for records in (self._first_records, self._recent_records)
        )
        has_low_entropy = (
            recent_means["entropy"] < ENTROPY
            and recent_means["entropy"] < ENTROPY_SHARE * first_means["entropy"]
        )
        is_short = (
            recent_means["rollout/length_mean"] < LENGTH_SHARE * first_means["rollout/length_mean"]
        )
        # Shorter responses that earn more reward are a success.
        has_no_gain = recent_means["reward/mean"] <= first_means["reward/mean"]
        return {
            "entropy": f"entropy has collapsed, from {first_means['entropy']:.3g} to"
            f" {recent_means['entropy']:.3g} nats a token: answers to a prompt hardly differ any"
            " more. A lower --optimizer.learning_rate, a higher --loss.clip_high or --loss.entropy"
            " keep it up"
            if has_low_entropy
            else "",
            "length": f"responses have collapsed, from {first_means['rollout/length_mean']:.0f} to"
            f" {recent_means['rollout/length_mean']:.0f} tokens, and earn no more"
            f" ({first_means['reward/mean']:.3g} -> {recent_means['reward/mean']:.3g}). Look at"
            " samples.jsonl: is a short answer rewarded by mistake? A lower"
            " --optimizer.learning_rate may help"
            if is_short and has_no_gain
            else "",
        }

    def _evaluation_signs(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Checks for scores of evaluations that are falling."""
        signs = {}
        for name, value in record.items():
            match = _EVALUATION.fullmatch(name)
            if match is None or value is None or value != value:
                continue
            # An equal or higher score starts a new series.
            series = self._falling_values.setdefault(name, [])
            if not series or value >= series[-1]:
                series.clear()
            series.append(value)
            signs[name] = (
                f"{match[1]} falls: {' > '.join(f'{score:.3g}' for score in series)}."
                f" --eval.keep_best {match[1]} keeps the best checkpoint of a run; a lower"
                " --optimizer.learning_rate or --kl.beta may hold it"
                if len(series) > 1
                else ""
            )
        return signs


def _mean_metric(records: Any, name: str) -> float:
    """Averages a metric over the records that have it. Returns NaN if there are none."""
    values = [
        value for record in records if (value := record.get(name)) is not None and value == value
    ]
    return sum(values) / len(values) if values else float("nan")


def _explain_equal_rewards(records: Collection[Mapping[str, Any]]) -> str:
    """Names the likeliest reason for equal rewards in batches."""
    shares = {
        name: _mean_metric(records, name)
        for name in ("reward/no_answer", "reward/correct", "status/length")
    }
    row_count = sum(_mean_metric(records, f"status/{name}") for name in ("eos", "length", "failed"))
    if shares["reward/no_answer"] > 0.5:
        cut_share = shares["status/length"] / max(row_count, 1)
        return (
            f"No answer was found in {shares['reward/no_answer']:.0%} of the responses"
            f" ({cut_share:.0%} were cut): see --data.answer_style, --data.instruction,"
            " --rollout.max_new_tokens and samples.jsonl"
        )
    if shares["reward/correct"] > 0.5:
        return "The problems are too easy for this policy: give harder ones"
    return (
        "The problems are too hard for this policy, or the reward does not see its answers: read"
        " samples.jsonl, and try easier problems, a larger --batch.group_size or a higher"
        " --rollout.temperature"
    )
