"""Table of all metrics by name, from which docs/metrics.md is made.

python -m jaxspec.metrics.table > docs/metrics.md
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple


class Metric(NamedTuple):
    """A metric, or a family of metrics."""

    name: str
    """Name. `{depth}`, `{quarter}`, `{set}`, `{k}` stand for one part of it."""
    unit: str
    meaning: str
    merge: Callable[[Sequence[float]], float] = fmean
    """Merges its values of several rollouts that fill one batch."""


REWARDS = (
    Metric("reward/mean", "reward", "Mean over rows that have a reward."),
    Metric(
        "reward/std",
        "reward",
        "Standard deviation of these rewards. 0 if all are equal.",
    ),
    Metric(
        "reward/frac_zero_std",
        "share",
        "Groups whose rewards, before overlong penalties, are all equal. Their advantages against"
        " the group are 0.",
    ),
    Metric("reward/correct", "share", "Correct answers, of rows that ended."),
    Metric("reward/wrong", "share", "Wrong answers, of rows that ended."),
    Metric("reward/no_answer", "share", "Rows that ended without an answer."),
    Metric("reward/timeout", "share", "Answers whose check took too long, of rows that ended."),
    Metric("reward/error", "share", "Answers whose check failed, of rows that ended."),
    Metric("reward/{set}/mean", "reward", "Mean over the rows of one set of a mixture."),
    Metric("reward/overlong", "reward", "Mean penalty for length."),
    Metric("reward/kl", "nats per answer", "Estimated divergence from the reference policy."),
)
DYNAMIC_SAMPLING = (
    Metric("dynamic_sampling/rollouts", "rollouts", "Rollouts that filled the batch."),
    Metric("dynamic_sampling/groups", "groups", "Groups of the batch."),
    Metric("dynamic_sampling/carried", "groups", "Surplus groups kept for the next batch."),
    Metric("dynamic_sampling/dropped", "groups", "Surplus groups dropped."),
)
ROLLOUT = (
    Metric("rollout/tokens", "tokens", "Response tokens.", sum),
    Metric("rollout/rounds", "rounds", "Target passes of a row, on average."),
    Metric("rollout/prompt_length", "tokens", "Prompt length, mean over rows."),
    Metric("rollout/length_mean", "tokens", "Response length, mean over rows."),
    Metric("rollout/length_min", "tokens", "Shortest response.", min),
    Metric("rollout/length_max", "tokens", "Longest response.", max),
    Metric("rollout/length_ended", "tokens", "Mean length of responses that were not cut."),
    Metric("status/eos", "rows", "Rows that ended by themselves.", sum),
    Metric("status/length", "rows", "Rows that were cut at `rollout.max_new_tokens`.", sum),
    Metric(
        "status/failed", "rows", "Rows with non-finite logits. They take no part in the loss.", sum
    ),
    Metric(
        "rollout/tokens_per_target_pass",
        "tokens",
        "Tokens kept per pass of the policy and live row. Comparable across drafts.",
    ),
    Metric(
        "rollout/acceptance_length",
        "tokens",
        "Tokens kept per round that had a draft, 1 to K+1. 1 if no round had one.",
    ),
    Metric(
        "rollout/acceptance_length_quarter_{quarter}",
        "tokens",
        "The same for rounds that began in that quarter of `rollout.max_new_tokens`.",
    ),
    Metric("rollout/coverage", "share", "Rounds that had a draft."),
    Metric("rollout/acceptance_rate", "share", "Drafted tokens that were kept."),
    Metric(
        "rollout/acceptance_rate_{depth}", "share", "Rounds with a draft that kept so many tokens."
    ),
    Metric(
        "rollout/conditional_rate_{depth}",
        "share",
        "Rounds that kept this token too, of those that kept all before it. Absent if none did.",
    ),
    Metric(
        "rollout/expected_acceptance_{depth}",
        "share",
        "Mean overlap of target and draft, `sum min(target, draft)`. The conditional rate with less"
        " noise, of the same rounds.",
    ),
    Metric(
        "rollout/draft_temperature_{depth}",
        "factor",
        "Factor on the temperature at which that depth was drafted.",
    ),
    Metric(
        "rollout/draft_entropy_{depth}",
        "nats per token",
        "Entropy of the draft in the same rounds.",
    ),
    Metric("rollout/target_entropy", "nats per token", "Entropy of the policy that sampled."),
    Metric("rollout/tokens_per_s", "tokens/s", "Response tokens over `time/step`."),
    Metric(
        "rollout/generation_tokens_per_s",
        "tokens/s",
        "Response tokens over `time/generate`, in a staged run.",
    ),
)
LEARNING = (
    Metric("loss/policy", "loss", "Loss of the policy."),
    Metric("loss/draft", "loss", "Loss of the draft."),
    Metric("grad_norm/policy", "norm", "Gradient of the policy before clipping."),
    Metric("grad_norm/draft", "norm", "Gradient of the draft before clipping."),
    Metric("entropy", "nats per token", "Entropy of the policy that learns."),
    Metric("kl", "nats per token", "Estimated divergence from the reference policy."),
    Metric("ratio/mean", "factor", "Ratio of policy to old policy."),
    Metric("ratio/mean_square", "factor", "Squares of ratios."),
    Metric(
        "ratio/effective_share",
        "share",
        "Effective sample size of ratios, of the tokens to learn from.",
    ),
    Metric("ratio/min", "factor", "Smallest ratio."),
    Metric("ratio/max", "factor", "Largest ratio."),
    Metric(
        "ratio/clipped_low", "share", "Tokens on which the lower clip binds. For `cispo`, weights."
    ),
    Metric(
        "ratio/clipped_high",
        "share",
        "Tokens on which the upper or the dual clip binds. For `cispo`, weights.",
    ),
    Metric(
        "ratio/kl", "nats per token", "Estimated divergence of the old policy from the policy (k3)."
    ),
    Metric("advantage/min", "advantage", "Smallest advantage of a token to learn from."),
    Metric("advantage/max", "advantage", "Largest advantage of a token to learn from."),
    Metric("advantage/zero", "share", "Tokens to learn from whose advantage is 0."),
    Metric("importance/mean", "factor", "Importance weights."),
    Metric("importance/mean_square", "factor", "Squares of importance weights."),
    Metric(
        "importance/effective_share",
        "share",
        "Effective sample size of importance weights, of the tokens to learn from.",
    ),
    Metric("importance/outside", "share", "Importance weights outside their bounds."),
    Metric(
        "rollout/logprob_gap_mean",
        "nats per token",
        "Difference between recorded log-probabilities and the learner's, before the first update.",
    ),
    Metric("rollout/logprob_gap_max", "nats", "The largest difference."),
    Metric(
        "rollout/probability_factor", "factor", "The same as a factor: mean exp of the difference."
    ),
    Metric("rollout/kl", "nats per token", "The same as a divergence."),
    Metric(
        "experts/load_min",
        "factor",
        "Tokens of the least used expert over an even share, mean over layers.",
    ),
    Metric("experts/load_max", "factor", "The same of the most used expert."),
    Metric("experts/entropy", "nats per token", "Entropy of the routers' distributions."),
    Metric(
        "draft/expected_acceptance_{depth}",
        "share",
        "Overlap with the target in training. Absent if no text has a token to predict there.",
    ),
    Metric("optimizer/learning_rate", "rate", "Learning rate of the batch's first update."),
    Metric("learner/micro_batches", "micro-batches", "Micro-batches of a shard."),
    Metric("learner/packing", "share", "Positions of micro-batches that hold text."),
    Metric("learner/lag", "batches", "Batches between sampling and learning, the most of any row."),
    Metric(
        "learner/recompute",
        "0 or 1",
        "Whether old log-probabilities are to be recomputed. With one update a batch, the learning"
        " pass itself has them, and nothing is recomputed.",
    ),
    Metric(
        "skipped/policy",
        "updates",
        "Updates skipped so far: loss or gradient was not finite, or no token had a reward.",
    ),
    Metric("skipped/draft", "updates", "The same of the draft."),
    Metric(
        "skipped_in_row/policy",
        "updates",
        "Skipped updates in a row. Three at the end of a batch end the run.",
    ),
    Metric("skipped_in_row/draft", "updates", "The same of the draft."),
)
EVALUATION = (
    Metric("eval/{set}/avg@{k}", "share", "Correct answers, mean over problems."),
    Metric("eval/{set}/avg@{k}/low", "share", "Lower end of its 95 % interval."),
    Metric("eval/{set}/avg@{k}/high", "share", "Upper end of its 95 % interval."),
    Metric("eval/{set}/pass@{k}", "share", "Problems with a correct answer among k."),
    Metric("eval/{set}/cons@{k}", "share", "Problems whose most frequent answer is correct."),
    Metric("eval/{set}/reward", "reward", "Mean reward."),
)
TIME = (
    Metric("time/data", "s", "Choosing and placing the prompts.", sum),
    Metric("time/reward", "s", "Scoring the answers.", sum),
    Metric(
        "time/prepare",
        "s",
        "Export and load of the weights, in a staged run. In a pipelined run, load.",
        sum,
    ),
    Metric("time/generate", "s", "Generation, in a staged or pipelined run.", sum),
    Metric("time/train", "s", "Learning from this batch, in a staged or pipelined run.", sum),
    Metric(
        "time/step",
        "s",
        "Sum of the seconds of this batch. In a fused run, the call that generated it, which also"
        " learned from the batch before. In a pipelined run, the seconds of the learner.",
        sum,
    ),
    Metric(
        "time/learning_call",
        "s",
        "Call that learned from this batch, in a fused run. It also generated the next one.",
        sum,
    ),
)
PIPELINE = (
    Metric(
        "time/exposed_generation",
        "s",
        "Wait of the learner for this batch and its transfer, after the update before it.",
    ),
    Metric("time/swap", "s", "Export of the weights after the update on this batch."),
    Metric("time/plan", "s", "Planning of its micro-batches."),
    Metric("time/other", "s", "All else of the learner: records, checkpoints."),
    Metric("time/idle_generate", "s", "Wait of the generator for the version that samples it."),
    Metric("time/send", "s", "Start of its transfer to the learner."),
    Metric("time/evaluate", "s", "Evaluations."),
    Metric("time/generator_other", "s", "All else of the generator."),
    Metric("time/generator_step", "s", "Sum of the generator's seconds of this batch."),
    Metric("pipeline/queue_depth", "batches", "Batches that waited at the start of the update."),
)
SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Rewards": REWARDS,
    "Dynamic sampling": DYNAMIC_SAMPLING,
    "Rollouts": ROLLOUT,
    "Learning": LEARNING,
    "Evaluations": EVALUATION,
    "Seconds": TIME,
    "Pipelined runs": PIPELINE,
}
_PLACEHOLDERS = {"depth": r"\d+", "quarter": r"[1-4]", "k": r"\d+", "set": r"[^/]+"}


@cache
def _compile_pattern(name: str) -> re.Pattern[str]:
    """Compiles the pattern of a metric's name."""
    # Every second part is the name of a placeholder.
    parts = re.split(r"\{(\w+)\}", name)
    literals, placeholders = map(re.escape, parts[::2]), [_PLACEHOLDERS[p] for p in parts[1::2]]
    return re.compile(
        "".join(
            literal + pattern
            for literal, pattern in zip(literals, [*placeholders, ""], strict=True)
        )
    )


def find_metric(name: str) -> Metric | None:
    """Finds the metric of a name. None for one that a user's loss added."""
    for metrics in SECTIONS.values():
        for metric in metrics:
            if _compile_pattern(metric.name).fullmatch(name):
                return metric
    return None


MERGED_SECTIONS = ("Rewards", "Rollouts", "Seconds")
"""Sections whose metrics each rollout has."""


def to_markdown() -> str:
    """Formats the table as the page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "A batch has one line in `metrics.jsonl`. A metric without a value is absent from it, and"
        " one that is not finite is null.",
        "`{depth}` counts the tokens of a draft from 1, and `{quarter}` the quarters of"
        " `rollout.max_new_tokens`.",
        "Where several rollouts fill a batch, the last column says how a metric is merged.",
        "Losses, gradients, ratios and advantages are means over the updates on the batch, also"
        " those of a smallest or largest value. A loss of your own adds its own names.",
    ]
    for title, metrics in SECTIONS.items():
        is_merged = title in MERGED_SECTIONS
        lines += ["", f"## {title}", ""]
        lines += ["| metric | unit | meaning |" + " merged by |" * is_merged]
        lines += ["|---|---|---|" + "---|" * is_merged]
        for metric in metrics:
            merge = "mean" if metric.merge is fmean else metric.merge.__name__
            row = f"| `{metric.name}` | {metric.unit} | {metric.meaning} |"
            lines.append(row + f" {merge} |" * is_merged)
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(to_markdown(), end="")
