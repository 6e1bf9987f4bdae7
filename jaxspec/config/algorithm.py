"""Settings of learning: advantages, losses, penalties, the optimizer and the draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from jaxspec.inputs.checked import CheckedConfig, Range, require
from jaxspec.inputs.spec import Count, Natural, Positive

Weight = Annotated[float, Range(min=0)]
Rate = Positive | Literal["auto"]
"""Learning rate. `auto` = the usual rate for the trained weights."""


class UsualRate(NamedTuple):
    """Usual learning rate, and the range around it."""

    rate: float
    lowest: float
    highest: float


# Adapters start from zero, and need larger steps than trained weights.
FULL_RATE, ADAPTER_RATE = UsualRate(1e-6, 1e-7, 1e-5), UsualRate(2e-5, 5e-6, 2e-4)
"""Rates for a loaded policy: for all its weights, and for adapters."""
DRAFT_RATE = UsualRate(1e-4, 1e-5, 1e-3)
"""Rates for the draft of a loaded policy, offline and online."""


class LearningRates(NamedTuple):
    """Learning rates of a run.

    They are for the policy, for the draft during the run, and for the draft before the run.
    """

    policy: float
    draft: float
    offline: float


# Models built here have about half a million weights. Rates this large would ruin a model of usual
# size.
SMALL_MODEL_RATES = LearningRates(2e-4, 4e-4, 1e-2)
"""Rates for models that are built without a checkpoint."""


def resolve_learning_rates(
    rate_settings: Iterable[Rate], has_checkpoint: bool, has_adapters: bool
) -> LearningRates:
    """Replaces `auto` by the usual learning rates.

    The order is that of `LearningRates`.
    """
    policy_rate = ADAPTER_RATE if has_adapters else FULL_RATE
    usual_rates = (
        LearningRates(policy_rate.rate, DRAFT_RATE.rate, DRAFT_RATE.rate)
        if has_checkpoint
        else SMALL_MODEL_RATES
    )
    # Strict, since a missing rate would shift the others to the wrong weights.
    pairs = zip(rate_settings, usual_rates, strict=True)
    return LearningRates(*(usual if rate == "auto" else rate for rate, usual in pairs))


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(CheckedConfig, prefix="advantage."):
    """Advantages: rewards relative to the expectation for the prompt."""

    baseline: Literal["none", "group", "leave_one_out"] = "group"
    """Value subtracted from each reward: nothing (REINFORCE), the mean of its group (GRPO), or the
    mean of the other rewards in its group (RLOO)."""
    std: Literal["none", "population", "sample", "leave_one_out", "batch", "whiten"] = "sample"
    """Standard deviation that divides the advantages. `none`: not divided (Dr. GRPO, RLOO).
    `population` and `sample`: that of the group, with squares over G or over G - 1. The default is
    the same as in TRL, verl and NeMo RL. `leave_one_out`: that of the group's other rewards, as in
    NeMo RL with the same baseline. `batch`: that of all rewards in the batch. `whiten`: mean 0 and
    variance 1 over all tokens (REINFORCE++)."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(CheckedConfig, prefix="loss."):
    """Policy loss per token, and weights of tokens."""

    kind: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    """Surrogate loss: clipped ratios of tokens (`clip`, for PPO, GRPO and DAPO), clipped ratios of
    whole answers (`gspo`), clipped weights that keep their gradient (`cispo`), or no ratio
    (`reinforce`)."""
    function: str = ""
    """Your own loss, which replaces `kind`, as package.module:name or file.py:name. It takes the
    LossInputs of `rl/loss_terms.py`, and returns an array with the loss at each token, or a
    Loss."""
    clip_low: Weight | Literal["auto"] = "auto"
    """Distance below 1 at which ratios are clipped. 1 or more = no lower bound. `auto` = 0.2 for
    clip, 3e-4 for gspo, 1 for cispo, as published."""
    clip_high: Weight | Literal["auto"] = "auto"
    """Distance above 1 at which ratios are clipped. `auto` = 0.28 for clip, 4e-4 for gspo, 4 for
    cispo, as published."""
    dual_clip: Annotated[float, Range(above=1, or_zero=True)] = 0.0
    """Bound of the loss for negative advantages, as a multiple of their size (arXiv 1912.09729). 0
    = no bound."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Average of token losses: the mean over all tokens of the batch (`token`, DAPO), the mean over
    answers of their means (`sequence`, GRPO), or sums over answers divided by the longest possible
    answer (`constant`, Dr. GRPO)."""
    entropy: Weight = 0.0
    """Weight of the entropy bonus."""
    logprobs: Literal["reuse", "recompute"] = "reuse"
    """Source of the old log-probabilities, for several updates per batch or older rows. `reuse`
    takes those recorded by generation, which saves a forward pass. `recompute` runs a forward pass
    before the first update."""
    reuse_below: Annotated[float, Range(above=1)] = 1.05
    """Factor between recorded and recomputed token probabilities, on average, up to which recorded
    ones are reused. From then on they are recomputed."""
    importance: Literal["auto", "none", "tis", "icepop", "sequence_mask"] = "auto"
    """Importance correction by weights exp(old - recorded log-probability). `tis` truncates them at
    importance_max. `icepop` zeros weights outside importance_min and importance_max.
    `sequence_mask` zeros answers whose geometric mean is outside. `auto` = none if no row lags
    behind (schedule.lag), or if ratios to recorded log-probabilities correct for it. Else tis with
    recomputed ones."""
    importance_min: Weight = 0.0
    """Lower bound of importance weights. 0 = the usual one (icepop 0.5, sequence_mask 0.999)."""
    importance_max: Weight = 0.0
    """Upper bound of importance weights. 0 = the usual one (tis 2, icepop 5, sequence_mask
    1.002)."""

    def check(self) -> None:
        # Compares resolved bounds, since 0 stands for a usual bound.
        low, high = self.importance_bounds
        require(
            low < high,
            f"loss.importance_min {low:g} is not below loss.importance_max {high:g}; the usual"
            f" bounds of {self.importance} are the defaults",
        )
        cause = (
            # With one set of log-probabilities, all weights would be 1.
            f"loss.importance {self.importance} weighs recomputed old logprobs over recorded ones,"
            " which are the same with loss.logprobs reuse"
        )
        require(
            self.importance in ("auto", "none") or self.logprobs == "recompute",
            f"{cause}; set --loss.logprobs recompute, which costs nothing where a batch has one"
            " update",
        )

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Bounds of ratios below and above 1, with `auto` resolved."""
        low, high = USUAL_CLIPS[self.kind]
        return (
            low if self.clip_low == "auto" else self.clip_low,
            high if self.clip_high == "auto" else self.clip_high,
        )

    @property
    def importance_bounds(self) -> tuple[float, float]:
        """Bounds of importance weights, with 0 replaced by the usual ones."""
        # 0 can stand for the usual bound: a lower bound of 0 excludes nothing, an upper bound of 0
        # excludes all.
        low, high = USUAL_IMPORTANCE_BOUNDS[self.importance]
        return self.importance_min or low, self.importance_max or high


RATIOS_FOR_A_LAG = ("clip", "cispo")
"""Kinds of loss whose ratios to recorded log-probabilities correct for a lag. The narrow bounds of
gspo are meant for updates within a batch."""


def resolve_importance(
    lag: int, kind: str, function: str, logprobs: str
) -> tuple[Literal["none", "tis"], str]:
    """Resolves `loss.importance auto`. Returns the correction, and the source of logprobs.

    Args:
      lag: updates by which rows lag behind.
      kind: `loss.kind`.
      function: `loss.function`.
      logprobs: `loss.logprobs`.
    """
    has_ratio = kind in RATIOS_FOR_A_LAG and not function and logprobs == "reuse"
    if not lag or has_ratio:
        return "none", logprobs
    # The weights compare recomputed with recorded log-probabilities.
    return "tis", "recompute"


USUAL_CLIPS = {
    # The larger upper bound is DAPO's (arXiv 2503.14476).
    "clip": (0.2, 0.28),
    # The ratio of a whole answer hardly leaves 1.
    "gspo": (3e-4, 4e-4),
    # These bound weights, from 0 to 5, and not ratios near 1.
    "cispo": (1.0, 4.0),
    # This loss has no ratio to bound.
    "reinforce": (0.0, 0.0),
}
"""Bounds of ratios below and above 1, by kind of loss."""
USUAL_IMPORTANCE_BOUNDS = {
    # Without effect, but `check` needs the lower bound below the upper one.
    "none": (0.0, 1.0),
    "auto": (0.0, 2.0),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    # Bounds of a geometric mean over an answer, which hardly leaves 1.
    "sequence_mask": (0.999, 1.002),
}
"""Lower and upper bound of importance weights, by correction."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig(CheckedConfig, prefix="dynamic_sampling."):
    """Dynamic sampling: batches of groups whose answers differ in reward.

    Rewards are compared before the overlong penalty. In other groups, advantages relative to the
    group are 0.
    """

    max_batches: Natural = 0
    """Maximum number of rollouts that fill a batch. The policy then learns from the groups
    collected so far. 0 = each batch is one rollout, whatever its rewards."""
    surplus: Literal["drop", "carry"] = "drop"
    """Use of groups that a full batch has no room for. `drop` discards them, so that training stays
    on-policy. `carry` moves them to the next batch, which is then partly off-policy."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(CheckedConfig, prefix="overlong."):
    """Treatment of answers near or at rollout.max_new_tokens."""

    filter: bool = False
    """Whether truncated answers are excluded from the loss. They still count in the baseline of
    their group."""
    buffer: Annotated[float, Range(min=0, max=1)] = 0.0
    """Last share of rollout.max_new_tokens in which reward falls linearly with length. 0.2 = its
    last fifth, 0 = no penalty."""
    penalty: Positive = 1.0
    """Reward that an answer of the full length loses."""


@dataclass(frozen=True, kw_only=True)
class KlConfig(CheckedConfig, prefix="kl."):
    """KL penalty for leaving a reference policy.

    The reference is the policy at the start of the run. With LoRA it is the policy without
    adapters.
    """

    beta: Annotated[float, Range(min=0, remedy="a penalty, not a reward, for leaving it")] = 0.0
    """Weight of the KL divergence. 0 = no reference policy is stored or evaluated."""
    estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """Estimator of the divergence. With x = reference - policy log-probability, k1 = -x, k2 = x^2 /
    2, k3 = exp(x) - 1 - x. x is clamped to [-20, 20]. `auto` = k3 in the loss, k1 in rewards, whose
    gradients are those of a divergence."""
    where: Literal["loss", "reward", "reward_to_go"] = "loss"
    """Place of the penalty. `loss` adds it at each token. `reward` sums it over an answer and
    subtracts it from the reward. `reward_to_go` subtracts from each token the sum from there on
    (REINFORCE++)."""
    importance: bool = False
    """Whether the penalty in the loss is weighted, per token, by the ratio of policy to recorded
    probability."""

    def check(self) -> None:
        # The gradient of k1 is that of a log-probability, whose mean under the policy is 0.
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
        """Estimator in use, with `auto` resolved."""
        if self.estimator == "auto":
            # In rewards, only k1 has the gradient of the divergence.
            return "k3" if self.where == "loss" else "k1"
        return self.estimator


@dataclass(frozen=True, kw_only=True)
class AdamConfig(CheckedConfig, prefix="optimizer.adam."):
    """Constants of AdamW, for the policy.

    They also apply next to Muon. Drafts keep betas 0.9 and 0.95, as EAGLE trains them.
    """

    betas: tuple[Annotated[float, Range(min=0, below=1)], ...] = (0.9, 0.999)
    """Decay rates per update: of the mean gradient, and of the mean squared gradient. Defaults as
    in NeMo RL, verl and TRL."""
    eps: Positive = 1e-8
    """Constant added to the root of the mean squared gradient."""
    decay: Literal["matrices", "all"] = "matrices"
    """Weights that weight decay shrinks: only matrices, without norms, biases and embeddings, or
    `all`."""
    schedule_floor: Annotated[float, Range(min=0, max=1)] = 0.0
    """Final learning rate of `linear` and `cosine`, as a share of the learning rate."""

    def check(self) -> None:
        require(
            # The type of the field allows a tuple of any length.
            len(self.betas) == 2,
            f"optimizer.adam.betas has {len(self.betas)} numbers; give two, such as 0.9 0.999",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedConfig, prefix="optimizer."):
    """Optimizer of the policy."""

    kind: Literal["adamw", "muon"] = "adamw"
    """Optimizer. `muon` orthogonalizes the updates of the layers' matrices and of adapters.
    Embedding, head, norms and biases then use AdamW."""
    learning_rate: Rate = "auto"
    """Learning rate after warm-up (auto: 1e-6 for all weights of a loaded policy, 2e-5 for
    adapters, 2e-4 for a small model built here). It serves AdamW and Muon alike, whose updates have
    the same size."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up. `linear` and `cosine` reach adam.schedule_floor after `steps`
    batches."""
    warmup_steps: Natural = 10
    """Updates of linear warm-up of the learning rate."""
    weight_decay: Annotated[float, Range(min=0)] = 0.0
    """Decoupled weight decay."""
    grad_clip: Positive = 1.0
    """Maximum global norm of the policy's gradient."""
    freeze_router: bool = False
    """Whether the routers of experts are not trained."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Storage type of the moments of policy and draft. `bfloat16` halves their memory. With float64
    models, `float32` stands for float64."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    offload: bool = False
    """Whether the policy's moments stay in host memory between updates. This frees device memory,
    but each update moves them to the device and back. Several updates per batch are unrolled in
    the program, which takes longer to compile."""


@dataclass(frozen=True, kw_only=True)
class DraftTrainingConfig(CheckedConfig, prefix="draft_training."):
    """Training of a learned draft, before and during the run."""

    loss: Literal["ce", "kl", "lk", "lambda", "tv"] = "ce"
    """Loss: soft cross-entropy (ce), KL divergence (kl), or the acceptance a = sum min(target,
    draft) itself, by -log a (lk), 1 - a (tv), or from KL to tv as acceptance grows (lambda)."""
    ttt_steps: Count = 3
    """Depths of the training-time-test unroll (EAGLE-3, MTP). Deeper ones train on the draft's own
    states."""
    decay: Annotated[float, Range(above=0, max=1)] = 0.8
    """Base of the depth weights in the draft loss: depth i has weight `decay**i`."""
    online: bool = True
    """Whether the draft is trained during the run, on detached hidden states of the learner."""
    every: Count | Literal["auto"] = 1
    """Batches between online updates. `auto` = as long as acceptance rises, or is behind its
    best."""
    alarm: Annotated[float, Range(min=0, max=1)] = 0.3
    """Relative drop of acceptance_length between batches that triggers a warning. 1 = never."""
    learning_rate: Rate = "auto"
    """AdamW learning rate of online updates (auto: 1e-4 if the policy is loaded, else 4e-4)."""
    grad_clip: Positive = 0.5
    """Maximum global norm of the draft's gradient, apart from the policy's."""
