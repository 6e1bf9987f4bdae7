"""Settings of learning: advantages, the policy's loss, the penalty for leaving a reference policy,
and the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from jaxspec.inputs.checked import CheckedConfig, Range, require
from jaxspec.inputs.spec import Natural, Positive

Weight = Annotated[float, Range(min=0)]
Rate = Positive | Literal["auto"]
"""A learning rate; auto: the usual one of what is trained."""


class UsualRate(NamedTuple):
    """A usual learning rate, and the range in which it usually is."""

    rate: float
    lowest: float
    highest: float


FULL_RATE, ADAPTER_RATE = UsualRate(1e-6, 1e-7, 1e-5), UsualRate(2e-5, 5e-6, 2e-4)
"""Of a loaded policy: all its weights, or adapters, which start from zero and need more."""
DRAFT_RATE = UsualRate(1e-4, 1e-5, 1e-3)
"""Of a draft of a loaded policy, offline and online."""


class LearningRates(NamedTuple):
    """Learning rates of the policy, of the draft during the run, and of the draft before it."""

    policy: float
    draft: float
    offline: float


SMALL_MODEL_RATES = LearningRates(2e-4, 4e-4, 1e-2)
"""Of models that are made here, without a checkpoint: so small that large steps pay."""


def resolve_learning_rates(
    rate_settings: Iterable[Rate], has_checkpoint: bool, has_adapters: bool
) -> LearningRates:
    """Fills in the usual learning rates for `auto`, of policy, draft and its offline training."""
    policy_rate = ADAPTER_RATE if has_adapters else FULL_RATE
    usual_rates = (
        LearningRates(policy_rate.rate, DRAFT_RATE.rate, DRAFT_RATE.rate)
        if has_checkpoint
        else SMALL_MODEL_RATES
    )
    pairs = zip(rate_settings, usual_rates, strict=True)
    return LearningRates(*(usual if rate == "auto" else rate for rate, usual in pairs))


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(CheckedConfig, prefix="advantage."):
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
class LossConfig(CheckedConfig, prefix="loss."):
    """The policy's loss at each token, and how tokens are weighed."""

    kind: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    """Clipped ratios of tokens (PPO, GRPO, DAPO), of whole answers (gspo), clipped weights that
    keep their gradient (cispo), or no ratio at all (reinforce)."""
    function: str = ""
    """A loss of your own in place of `kind`, as package.module:name or file.py:name: from the
    LossInputs of `rl/loss_terms.py`, an array of the loss at each token, or a Loss."""
    clip_low: Weight | Literal["auto"] = "auto"
    """Ratios below 1 - clip_low are clipped; at least 1: none. auto: by kind, clip 0.2, gspo 3e-4,
    cispo 1."""
    clip_high: Weight | Literal["auto"] = "auto"
    """Ratios above 1 + clip_high are clipped; auto: by kind, clip 0.28, gspo 4e-4, cispo 4."""
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
        cause = (
            f"loss.importance {self.importance} weighs recomputed old logprobs over recorded ones,"
            " which are the same with loss.logprobs reuse"
        )
        require(
            self.importance == "none" or self.logprobs == "recompute",
            f"{cause}; set --loss.logprobs recompute, which costs nothing where a batch has one"
            " update",
        )

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Bounds of ratios below and above 1, with the usual ones of the kind for `auto`."""
        low, high = USUAL_CLIPS[self.kind]
        return (
            low if self.clip_low == "auto" else self.clip_low,
            high if self.clip_high == "auto" else self.clip_high,
        )

    @property
    def importance_bounds(self) -> tuple[float, float]:
        """Of weights, with the usual ones in place of 0."""
        low, high = USUAL_IMPORTANCE_BOUNDS[self.importance]
        return self.importance_min or low, self.importance_max or high


USUAL_CLIPS = {
    "clip": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "reinforce": (0.0, 0.0),
}
"""Bounds of ratios below and above 1, by kind of loss; reinforce has no ratio."""
USUAL_IMPORTANCE_BOUNDS = {
    "none": (0.0, 1.0),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
}
"""Least and most importance weight, by correction."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig(CheckedConfig, prefix="dynamic_sampling."):
    """Batches of groups whose answers differ in reward, before any is taken for length: in all
    others advantages against the group are 0."""

    max_batches: Natural = 0
    """Rollouts that may fill a batch, at most; the policy then learns from the groups that it has.
    0: the batch is one rollout, whatever its rewards."""
    surplus: Literal["drop", "carry"] = "drop"
    """Groups of the last rollout that a full batch has no place for: they are dropped, or carried
    over to the next batch, by whose policy they were not sampled."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(CheckedConfig, prefix="overlong."):
    """Answers that are cut at rollout.max_new_tokens, or come near it."""

    filter: bool = False
    """Whether the policy learns nothing from an answer that was cut; it still counts in its group's
    baseline."""
    buffer: Annotated[float, Range(min=0, max=1)] = 0.0
    """Last part of rollout.max_new_tokens (0.2: its last fifth) in which an answer loses reward,
    along a line; 0: none does."""
    penalty: Positive = 1.0
    """What an answer of the full length loses."""


@dataclass(frozen=True, kw_only=True)
class KlConfig(CheckedConfig, prefix="kl."):
    """A penalty for leaving the policy that the run began with; under LoRA, the one without
    adapters."""

    beta: Annotated[float, Range(min=0, remedy="a penalty, not a reward, for leaving it")] = 0.0
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
        has_zero_gradient = self.beta > 0 and self.where == "loss" and self.estimator == "k1"
        cause = (
            f"kl.estimator k1 with kl.where loss and kl.beta {self.beta:g}: the gradient of k1 is 0"
            " on average, so that nothing keeps the policy near the reference"
        )
        require(
            not has_zero_gradient, f"{cause}; set --kl.estimator k2 or k3, or --kl.where reward"
        )

    @property
    def active_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator, by its place if it is `auto`."""
        if self.estimator == "auto":
            return "k3" if self.where == "loss" else "k1"
        return self.estimator


@dataclass(frozen=True, kw_only=True)
class AdamConfig(CheckedConfig, prefix="optimizer.adam."):
    """AdamW of the policy, also beside Muon. Drafts keep 0.9 and 0.95, as EAGLE trains them."""

    betas: tuple[Annotated[float, Range(min=0, below=1)], ...] = (0.9, 0.999)
    """Decay of the mean of gradients, and of that of their squares, per update."""
    eps: Positive = 1e-8
    """Added to the root of the mean square."""
    decay: Literal["matrices", "all"] = "matrices"
    """What weight decay shrinks: matrices, but no norms, biases and embeddings, or all weights."""
    schedule_floor: Annotated[float, Range(min=0, max=1)] = 0.0
    """Share of the learning rate at which `linear` and `cosine` end."""

    def check(self) -> None:
        require(
            len(self.betas) == 2,
            f"optimizer.adam.betas has {len(self.betas)} numbers; give two, such as 0.9 0.999",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedConfig, prefix="optimizer."):
    """The policy's optimizer."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the updates of the layers' matrices, and of adapters; embedding, head,
    norms and biases have AdamW beside it."""
    learning_rate: Rate = "auto"
    """Learning rate, after warm-up; Muon's updates are as large as AdamW's. auto: 1e-6 for all
    weights of a loaded policy, 2e-5 for adapters, 2e-4 for a small model that is made here."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after warm-up: `linear` and `cosine` end after `steps` batches, at
    adam.schedule_floor."""
    warmup_steps: Natural = 10
    """Linear warm-up of the learning rate, in updates."""
    weight_decay: Annotated[float, Range(min=0)] = 0.0
    """Decoupled weight decay."""
    grad_clip: Positive = 1.0
    """Global-norm clip of the policy's gradient."""
    freeze_router: bool = False
    """Whether routers of experts stay as they are."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type in which the moments of policy and draft are kept (float64 models: float64 for float32);
    bfloat16 halves them."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    offload: bool = False
    """Whether the policy's moments lie in the host's memory but for its update; every update moves
    them there and back, and is compiled by itself."""
