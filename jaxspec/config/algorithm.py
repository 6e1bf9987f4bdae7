"""Settings of the algorithm: advantages, the policy's loss, and the penalty for leaving a reference
policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxspec.inputs.checked import Checked, Range, require
from jaxspec.inputs.spec import Natural, Positive

Weight = Annotated[float, Range(least=0)]


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(Checked, prefix="advantage."):
    """How much better an answer is than what could be expected of its prompt."""

    baseline: Literal["none", "group", "leave_one_out"] = "group"
    """Taken from each reward: nothing (REINFORCE), the mean of its group (GRPO), the mean of the
    group's other rewards (RLOO)."""
    std: Literal["none", "population", "sample", "leave_one_out", "batch", "whiten"] = "sample"
    """Standard deviation to divide by: none (Dr. GRPO, RLOO), that of the group's rewards with
    squares over G (population) or over G - 1 (sample, as TRL, verl and NeMo RL), that of the
    group's other rewards (leave_one_out, as NeMo RL beside that baseline), of all rewards of the
    batch, or `whiten` to mean 0 and variance 1 over all tokens (REINFORCE++)."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(Checked, prefix="loss."):
    """The policy's loss at each token, and how tokens are weighed."""

    kind: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    """Clipped ratios of tokens (PPO, GRPO, DAPO), of whole answers (gspo), clipped weights that
    keep their gradient (cispo), or no ratio at all (reinforce)."""
    function: str = ""
    """A loss of your own in place of `kind`, as package.module:name or file.py:name: from the
    LossInputs of `rl/loss_terms.py`, an array of the loss at each token, or a Loss."""
    clip_low: Weight = 0.2
    """Ratios below 1 - clip_low are clipped; at least 1: none."""
    clip_high: Weight = 0.28
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Range(above=1, or_zero=True)] = 0.0
    """Where an advantage is negative, the loss is at most so many times its size; 0: no bound."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens of the batch (DAPO), over answers of their means (GRPO), or sums of
    answers over the longest answer there may be (Dr. GRPO)."""
    entropy: Weight = 0.0
    """Weight of an entropy bonus."""
    logprobs: Literal["reuse", "recompute"] = "reuse"
    """Old logprobs, where a batch has several updates or older rows: those that generation
    recorded, or of a forward pass before the first update."""
    reuse_below: Annotated[float, Range(above=1)] = 1.05
    """Recorded logprobs are reused while the probabilities of tokens differ from the learner's by
    less than this factor on average; from then on they are recomputed."""
    importance: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """Correction by weights exp(old - recorded): none, truncated at importance_max (tis), 0 outside
    importance_min and importance_max (icepop), or 0 for answers whose geometric mean is outside."""
    importance_min: Weight = 0.0
    """Lower bound of weights; 0: the usual one (icepop 0.5, sequence_mask 0.999)."""
    importance_max: Weight = 0.0
    """Upper bound of weights; 0: the usual one (tis 2, icepop 5, sequence_mask 1.002)."""

    def check(self) -> None:
        low, high = self.importance_bounds
        require(
            low < high,
            f"loss.importance_min {low:g} is not below loss.importance_max {high:g}; the usual"
            f" bounds of {self.importance} are the defaults",
        )
        alone = (
            f"loss.importance {self.importance} weighs recomputed old logprobs over recorded ones,"
            " which are the same with loss.logprobs reuse"
        )
        require(
            self.importance == "none" or self.logprobs == "recompute",
            f"{alone}; set --loss.logprobs recompute, which costs nothing where a batch has one"
            " update",
        )

    @property
    def importance_bounds(self) -> tuple[float, float]:
        """Of weights, with the usual ones in place of 0."""
        low, high = USUAL_BOUNDS[self.importance]
        return self.importance_min or low, self.importance_max or high


USUAL_BOUNDS = {
    "none": (0.0, 1.0),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
}
"""Least and most importance weight, by correction."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig(Checked, prefix="dynamic_sampling."):
    """Batches of groups whose answers differ in reward, before any is taken for length: in all
    others advantages against the group are 0."""

    max_batches: Natural = 0
    """Rollouts that may fill a batch, at most; the policy then learns from the groups that it has.
    0: the batch is one rollout, whatever its rewards."""
    surplus: Literal["drop", "carry"] = "drop"
    """Groups of the last rollout that a full batch has no place for: they are dropped, or carried
    over to the next batch, by whose policy they were not sampled."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(Checked, prefix="overlong."):
    """Answers that are cut at rollout.max_new_tokens, or come near it."""

    filter: bool = False
    """Whether the policy learns nothing from an answer that was cut; it still counts in its group's
    baseline."""
    buffer: Annotated[float, Range(least=0, most=1)] = 0.0
    """Last part of rollout.max_new_tokens (0.2: its last fifth) in which an answer loses reward,
    along a line; 0: none does."""
    penalty: Positive = 1.0
    """What an answer of the full length loses."""


@dataclass(frozen=True, kw_only=True)
class KlConfig(Checked, prefix="kl."):
    """A penalty for leaving the policy that the run began with; under LoRA, the one without
    adapters."""

    beta: Annotated[float, Range(least=0, remedy="a penalty, not a reward, for leaving it")] = 0.0
    """Weight of the KL divergence; 0: no reference policy is kept or read."""
    estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """Of x = reference - policy logprob: -x, x^2 / 2, or exp(x) - 1 - x; auto: k3 in the loss, k1
    in rewards. x is clamped at -20 and 20."""
    where: Literal["loss", "reward", "reward_to_go"] = "loss"
    """Added to the loss at each token, summed over an answer and taken from its reward, or taken
    from the reward of each token, summed from there on (REINFORCE++)."""
    importance: bool = False
    """Whether a token in the loss weighs its probability by the policy over the recorded one."""

    def check(self) -> None:
        idle = self.beta > 0 and self.where == "loss" and self.estimator == "k1"
        told = (
            f"kl.estimator k1 with kl.where loss and kl.beta {self.beta:g}: the gradient of k1 is 0"
            " on average, so that nothing keeps the policy near the reference"
        )
        require(not idle, f"{told}; set --kl.estimator k2 or k3, or --kl.where reward")

    @property
    def chosen_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator, by its place if it is `auto`."""
        if self.estimator == "auto":
            return "k3" if self.where == "loss" else "k1"
        return self.estimator
