"""Published algorithms as groups of settings.

A command line can change each setting of the group.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple, TypeVar

from jaxspec.config.algorithm import ADAPTER_RATE, DRAFT_RATE, FULL_RATE, UsualRate
from jaxspec.config.settings import (
    AdvantageConfig,
    Config,
    DynamicSamplingConfig,
    KlConfig,
    LossConfig,
    OverlongConfig,
)
from jaxspec.inputs.checked import require

_C = TypeVar("_C", bound=Config)


class Algorithm(NamedTuple):
    """Settings of an algorithm.

    It sets these sections completely: a field that it does not name gets its default. All other
    sections keep the values of the config.
    """

    citation: str
    advantage: AdvantageConfig
    loss: LossConfig
    kl: KlConfig = KlConfig()
    overlong: OverlongConfig = OverlongConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    @property
    def config_sections(self) -> dict[str, Any]:
        """Sections that the algorithm sets, by name."""
        sections = self._asdict()
        # The only field that is not a section.
        del sections["citation"]
        return sections


AlgorithmName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp"]
ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "grpo": Algorithm(
        "arXiv 2402.03300",
        AdvantageConfig(baseline="group", std="sample"),
        LossConfig(clip_low=0.2, clip_high=0.2, aggregation="sequence"),
        # The paper's weight. By default there is no penalty.
        KlConfig(beta=0.04),
    ),
    "dapo": Algorithm(
        "arXiv 2503.14476",
        AdvantageConfig(baseline="group", std="sample"),
        LossConfig(clip_low=0.2, clip_high=0.28, aggregation="token"),
        # DAPO's penalty is 1 for rewards of 1 and -1. Rewards here differ by 1, half as much.
        overlong=OverlongConfig(buffer=0.2, penalty=0.5),
        dynamic_sampling=DynamicSamplingConfig(max_batches=10),
    ),
    "dr_grpo": Algorithm(
        "arXiv 2503.20783",
        AdvantageConfig(baseline="group", std="none"),
        # A constant divisor removes the bias toward long wrong answers.
        LossConfig(clip_low=0.2, clip_high=0.2, aggregation="constant"),
    ),
    "gspo": Algorithm(
        "arXiv 2507.18071",
        AdvantageConfig(baseline="group", std="sample"),
        LossConfig(kind="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence"),
    ),
    "cispo": Algorithm(
        "arXiv 2506.13585",
        AdvantageConfig(baseline="group", std="sample"),
        LossConfig(kind="cispo", clip_low=1.0, clip_high=4.0, aggregation="token"),
    ),
    "rloo": Algorithm(
        "arXiv 2402.14740",
        AdvantageConfig(baseline="leave_one_out", std="none"),
        LossConfig(kind="reinforce", aggregation="token"),
    ),
    "reinforce_pp": Algorithm(
        "arXiv 2501.03262, with a --kl.beta of yours; with --advantage.baseline group, --kl.where"
        " loss and --kl.estimator k2, its baseline form",
        AdvantageConfig(baseline="none", std="whiten"),
        LossConfig(clip_low=0.2, clip_high=0.2, aggregation="token"),
        KlConfig(where="reward_to_go"),
    ),
}
"""Algorithms by the name that `--algorithm` accepts."""
# A larger bound was probably meant for ratios of tokens.
LARGEST_SEQUENCE_CLIP = 0.01
"""Largest plausible bound of the ratio of a whole answer."""
# A smaller bound was probably meant for ratios of tokens.
LEAST_WEIGHT_CLIP = 1.0
"""Smallest plausible bound of weights that keep their gradient."""


def with_algorithm(config: _C, name: str) -> _C:
    """Applies the settings of an algorithm.

    Raises:
      ConfigError: There is no algorithm of that name.
    """
    # Keyed by any text, since the name comes from a command line.
    algorithms: dict[str, Algorithm] = {**ALGORITHMS}
    require(
        name in algorithms, f"--algorithm {name!r} is none of {', '.join(algorithms)}; choose one"
    )
    return replace(config, **algorithms[name].config_sections)


def describe_algorithms() -> str:
    """Lists for each algorithm the settings that are not defaults."""
    lines = []
    for name, algorithm in ALGORITHMS.items():
        changes = [
            f"{section.prefix}{key} {value}"
            for section in algorithm.config_sections.values()
            for key, value in asdict(section).items()
            if value != getattr(type(section)(), key)
        ]
        lines.append(f"  {name}: {', '.join(changes) or 'the defaults'} ({algorithm.citation})")
    return "\n".join(lines)


def collect_warnings(config: Config) -> list[str]:
    """Returns warnings of valid settings that are rarely intended."""
    # Adapters need larger rates than full weights.
    usual = FULL_RATE if config.lora.rank == 0 else ADAPTER_RATE
    warnings = [_clip_warning(config.loss), _kl_warning(config.kl)]
    warnings += [*_off_policy_warnings(config), *_dynamic_sampling_warnings(config)]
    warnings.append(_lag_warning(config))
    warnings += [_rate_warning(config, "optimizer", config.learning_rates.policy, usual)]
    return [f"warning: {warning}" for warning in warnings if warning] + collect_draft_warnings(
        config
    )


LARGE_LAG = 8
"""Largest lag of a pipelined schedule without a warning."""


def _lag_warning(config: Config) -> str:
    lag = config.schedule.active_lag
    return (
        f"schedule.lag is {lag}: importance weights cannot correct for much older weights, and"
        f" {lag} batches wait in memory; 1 or 2 hide generation if it takes less time than learning"
        if lag > LARGE_LAG
        else ""
    )


def collect_draft_warnings(config: Config) -> list[str]:
    """Returns warnings of rarely intended settings of draft training."""
    if not config.rollout.draft.is_learned:
        return []
    rates, warnings = config.learning_rates, []
    if config.draft_training.online:
        warnings.append(_rate_warning(config, "draft_training", rates.draft, DRAFT_RATE))
    if config.offline.steps:
        warnings.append(_rate_warning(config, "offline", rates.offline, DRAFT_RATE))
    return [f"warning: {warning}" for warning in warnings if warning]


def _rate_warning(config: Config, section: str, rate: float, usual: UsualRate) -> str:
    """Returns a warning of an unusual learning rate for a loaded checkpoint, or no text."""
    # The usual ranges are those of loaded checkpoints.
    if not config.model.path or usual.lowest <= rate <= usual.highest:
        return ""
    trained_part = {
        FULL_RATE: "all weights of a loaded policy",
        ADAPTER_RATE: "adapters",
        DRAFT_RATE: "a draft",
    }[usual]
    return (
        f"{section}.learning_rate {rate:g} is outside {usual.lowest:g} to {usual.highest:g}, which"
        f" is usual for {trained_part}; --{section}.learning_rate auto is {usual.rate:g}"
    )


def _clip_warning(loss: LossConfig) -> str:
    """Returns a warning of clip bounds that suit another kind of loss, or no text."""
    # A user's loss replaces the kind, and has no bounds.
    low, high = loss.clip_bounds
    bounds = f"loss.kind {loss.kind} with loss.clip_low {low:g} and loss.clip_high {high:g}"
    if loss.kind == "gspo" and not loss.function and max(low, high) > LARGEST_SEQUENCE_CLIP:
        return (
            f"{bounds}: the ratio of a whole answer hardly leaves 1, so that nothing is ever"
            " clipped; usual are --loss.clip_low 3e-4 --loss.clip_high 4e-4"
        )
    if loss.kind == "cispo" and not loss.function and min(low, high) < LEAST_WEIGHT_CLIP:
        return (
            f"{bounds}: weights are kept in {1 - low:g} to {1 + high:g}, as bounds of token ratios"
            " are, and these are bounds of weights; usual are --loss.clip_low 1 --loss.clip_high 4"
        )
    return ""


def _kl_warning(kl: KlConfig) -> str:
    """Returns a warning of an estimator whose gradient is not that of the KL divergence."""
    # In rewards only k1 has the gradient of the divergence. Estimators in the loss are checked by
    # `KlConfig`.
    if kl.beta and kl.where != "loss" and kl.active_estimator != "k1":
        return (
            f"kl.estimator {kl.estimator} with kl.where {kl.where}: a reward less {kl.estimator}"
            " does not have the gradient of the KL divergence, a reward less k1 has; set"
            " --kl.estimator k1, or --kl.where loss"
        )
    return ""


def _off_policy_warnings(config: Config) -> list[str]:
    """Returns a warning of a loss without ratio on rows of older policies, if any."""
    loss = config.loss
    # A user's loss may correct for older policies itself.
    if loss.kind != "reinforce" or loss.function or config.is_on_policy:
        return []
    # Importance weights correct for older rows, but not for an update within the batch.
    has_one_update = config.batch.mini_batches * config.batch.epochs == 1
    if has_one_update and config.resolved_loss.importance != "none":
        return []
    return [
        "loss.kind reinforce has no ratio of policy to old policy, and a batch has several updates"
        " or older rows: nothing corrects for what the policy learned in between; set"
        " --loss.kind clip, or --batch.mini_batches 1 --batch.epochs 1"
    ]


def _dynamic_sampling_warnings(config: Config) -> list[str]:
    """Returns a warning if groups with advantages are left out."""
    if not config.dynamic_sampling.max_batches:
        return []
    # In each of these cases, equal rewards do not mean that advantages are 0.
    causes = {
        "advantage.baseline none": config.advantage.baseline == "none",
        "advantage.std whiten": config.advantage.std == "whiten",
        f"kl.where {config.kl.where}": config.kl.beta > 0 and config.kl.where != "loss",
    }
    active_causes = " and ".join(cause for cause, is_active in causes.items() if is_active)
    max_batches = config.dynamic_sampling.max_batches
    return [
        f"dynamic_sampling.max_batches {max_batches} with {active_causes}: groups whose answers"
        " earn the same have an advantage too, and are left out; set"
        " --dynamic_sampling.max_batches 0, or"
        " --advantage.baseline group with --advantage.std sample and --kl.where loss"
    ] * bool(active_causes)
