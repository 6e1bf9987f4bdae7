"""What a batch's metrics should make somebody look at, in words; nothing where all is well."""

from collections.abc import Mapping
from typing import Any


def of_gap(line: Mapping[str, Any], limit: float) -> str:
    """Recorded logprobs that are, from this batch on, too far from the learner's to be reused."""
    factor = line.get("rollout/probability_factor", 0.0)
    if not factor > limit or line["learner/recompute"]:  # also where it is no number
        return ""
    return (
        f"warning: batch {line['step']}: probabilities that generation recorded differ from the"
        f" learner's by a factor of {factor:.3g} on average, which is above loss.reuse_below"
        f" {limit:g}: old logprobs are recomputed from now on"
    )


def of_acceptance(line: Mapping[str, Any], before: float, share: float) -> str:
    """A draft that is suddenly accepted less, by more than a share of the acceptance length
    `before`: nothing else would show it but seconds."""
    now = line.get("rollout/acceptance_length", 0.0)
    if now >= before * (1 - share):
        return ""
    return (
        f"warning: batch {line['step']}: acceptance_length fell from {before:.2f} to {now:.2f}, by"
        f" more than draft_training.alarm {share:g}. Look at loss/draft, grad_norm/draft and"
        " skipped/draft (did the draft's own update break it? a lower"
        " --draft_training.learning_rate), at grad_norm/policy and rollout/target_entropy (did the"
        " policy jump, or get less certain?), at rollout/coverage and"
        " rollout/expected_acceptance_1 (fewer drafts, as draft_length auto may choose, or worse"
        " ones?), and at samples.jsonl (other prompts?)"
    )


def of_short_batch(line: Mapping[str, Any], prompts: int) -> str:
    """A batch that all its rollouts did not fill."""
    groups = line.get("dynamic_sampling/groups", prompts)
    if groups >= prompts:
        return ""
    return (
        f"warning: batch {line['step']}: {line['dynamic_sampling/rollouts']} rollouts have only"
        f" {groups:g} groups whose rewards differ, of the {prompts} of a batch, and the policy"
        " learns from these alone;"
        " --dynamic_sampling.max_batches lets it look further, other problems or a larger"
        " --batch.group_size find more"
    )
