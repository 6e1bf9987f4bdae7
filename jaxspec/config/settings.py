"""Every setting of a run, with the checks within each class."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from jaxspec.config.algorithm import (
    AdamConfig,
    AdvantageConfig,
    DraftTrainingConfig,
    DynamicSamplingConfig,
    KlConfig,
    LearningRates,
    LossConfig,
    OptimizerConfig,
    OverlongConfig,
    Rate,
    resolve_importance,
    resolve_learning_rates,
)
from jaxspec.config.data import DataConfig, EvalConfig, RewardConfig, SetConfig, require_unique
from jaxspec.config.rollout import (
    AUTO_LENGTHS,
    DraftConfig,
    DraftLength,
    DraftSampling,
    EngineConfig,
    GenerationConfig,
    LookupConfig,
    RolloutConfig,
    ScheduleConfig,
    Temperature,
    VerifyRule,
)
from jaxspec.drafts.kinds import DraftKind, LookupKind, get_kind
from jaxspec.inputs.checked import CheckedConfig, ConfigError, Range, divisors, require
from jaxspec.inputs.spec import (
    Count,
    DraftSpec,
    HeadConfig,
    HeadSpec,
    LoraConfig,
    ModelConfig,
    ModelSpec,
    Natural,
    Positive,
    RunFacts,
)

__all__ = [
    "AUTO_LENGTHS",
    "AdamConfig",
    "AdvantageConfig",
    "BatchConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DraftConfig",
    "DraftKind",
    "DraftLength",
    "DraftSampling",
    "DraftTrainingConfig",
    "DynamicSamplingConfig",
    "EngineConfig",
    "EvalConfig",
    "HeadConfig",
    "KlConfig",
    "LookupConfig",
    "LookupKind",
    "LoraConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OfflineConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "ResolvedConfig",
    "RewardConfig",
    "RolloutConfig",
    "SetConfig",
    "SftConfig",
    "Temperature",
    "VerifyRule",
    "require",
]

SHARED_SETTINGS = {
    # One program, tokenizer and pool of workers serves all sets.
    "data": ("tokenizer", "prompt_format", "max_prompt_length"),
    "reward": ("workers", "deadline", "max_failed"),
}
"""Settings that all sets of problems share."""
Seed = Annotated[int, Range(min=0, max=2**32 - 1)]
"""Seed that numpy, JAX and grain all accept."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(CheckedConfig, prefix="batch."):
    """Groups of a batch (GRPO, arXiv 2402.03300)."""

    prompts: Count = 16
    """Prompts per batch."""
    group_size: Count = 8
    """Responses per prompt (G). A batch has prompts x G rows."""
    mini_batches: Count = 1
    """Mini-batches per batch, each with an equal share of the prompts and one update."""
    epochs: Count = 1
    """Passes over each batch. Updates per batch = mini_batches x epochs."""
    micro_tokens: Natural = 0
    """Tokens per micro-batch on each data shard, at least the longest row. 0 = as many as fit in
    memory. Affects rounding only."""

    def check(self) -> None:
        # Built only on failure, since listing divisors takes a while.
        if self.prompts % self.mini_batches:
            raise ConfigError(
                f"batch.mini_batches {self.mini_batches} does not divide batch.prompts"
                f" {self.prompts}; {', '.join(map(str, divisors(self.prompts)))} do"
            )


@dataclass(frozen=True, kw_only=True)
class MeshConfig(CheckedConfig, prefix="mesh."):
    """Device mesh with axes `data` x `expert` x `tensor`."""

    data: Natural = 0
    """Shards of the rows, and of the stored weights. 0 = as many as fit the devices."""
    expert: Count = 1
    """Members of a data shard, which split its rows and the model's experts. Settings per data
    shard (slots, pages, micro-batches) then apply to each member."""
    tensor: Count = 1
    """Shards of heads, feed-forward width and vocabulary."""
    shard_above: Annotated[int, Range(min=0, max=2**63 - 1)] = 2**22
    """Elements from which a weight is stored sharded over `data` too. Gathering smaller weights
    costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(CheckedConfig, prefix="sft."):
    """Supervised warm start of the built-in model (`train_sft`)."""

    steps: Natural = 360
    """Updates of the warm start. 0 = random weights."""
    rows: Count = 64
    """Sequences per batch."""
    learning_rate: Positive = 4e-3
    """Peak AdamW learning rate, with cosine decay to a tenth."""
    format: Literal["worked", "text"] = "worked"
    """`worked` solves each prompt step by step, `text` is a mixed corpus to continue."""
    wrong_steps: Annotated[float, Range(min=0, below=1)] = 0.3
    """Share of worked steps that are wrong, so that RL has something to improve."""


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(CheckedConfig, prefix="offline."):
    """Offline training of the draft on the policy's own responses (`train_draft`)."""

    samples: Count = 2048
    """Responses that the policy samples on training prompts. The last sixteenth, at least a batch,
    is held out to measure the draft."""
    text: str = ""
    """File to train on instead: JSON lines or parquet (or a dataset, as in `data.path`). Rows have
    a column `text`, or a chat in `messages`, `conversations` or `data` (a list of alternating
    turns), of which the assistant's turns are learned. `generic` = the built-in mixed corpus."""
    steps: Natural = 300
    """Updates of the draft. 0 = it keeps its loaded or random weights."""
    rows: Count = 64
    """Sequences per batch."""
    learning_rate: Rate = "auto"
    """Peak AdamW learning rate, with cosine decay to a tenth (auto: 1e-4 if the policy is loaded,
    else 1e-2)."""

    def check(self) -> None:
        message = (
            f"offline.samples {self.samples} fit one batch of offline.rows {self.rows}, which is"
            " held out"
        )
        # The last batch is held out, so a single one leaves nothing to train on.
        require(self.samples > self.rows or bool(self.text), f"{message}; at least {self.rows + 1}")


@dataclass(frozen=True, kw_only=True)
class Config(CheckedConfig):
    """Settings of one run."""

    steps: Count = 80
    """Batches to generate and learn from."""
    seed: Seed = 0
    """Seed of weights, data order and sampling."""
    workdir: str = ""
    """Folder of the run (empty = runs/NAME-SCALE)."""
    save_every: Count = 20
    """Batches between checkpoints. The last batch is always saved."""
    compare_plain: bool = True
    """Whether the last batch is timed with and without the draft at the end. This takes a plain
    rollout, and compiles two more programs."""
    profile: str = ""
    """Calls to trace for ui.perfetto.dev, as FIRST:END without END (10:12 = two). A call is a batch
    or rollout. The trace goes to `workdir`. If empty, none is traced."""
    model: ModelConfig = field(default_factory=ModelConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mixture: tuple[SetConfig, ...] = ()
    """Named sets of problems, which replace `data` and `reward`. Each is asked by its weight. A
    config file lists them, and the command line can change them: --mixture.0.weight 2."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    head: HeadConfig = field(default_factory=HeadConfig)

    def check(self) -> None:
        # A run of N batches makes N + 1 calls, numbered from 0.
        first_call = parse_range("profile", self.profile).start
        message = f"profile is {self.profile!r}, but with steps {self.steps} the last call is"
        require(first_call <= self.steps, f"{message} {self.steps}; begin there, or raise steps")
        # The mean of a group of one is its own reward, so all advantages would be 0.
        lacks_baseline = self.batch.group_size == 1 and self.advantage.baseline != "none"
        require(
            not lacks_baseline,
            f"batch.group_size 1 with advantage.baseline {self.advantage.baseline}: an answer"
            " without others is always as good as expected; raise it to 2 or more, or set"
            " --advantage.baseline none (REINFORCE)",
        )
        max_batches = self.dynamic_sampling.max_batches
        require(
            not max_batches or self.batch.group_size > 1,
            f"dynamic_sampling.max_batches {max_batches} with batch.group_size 1: one answer never"
            " differs from itself; raise batch.group_size to 2 or more, or set"
            " --dynamic_sampling.max_batches 0",
        )
        require(
            # Truncated answers are not read, so their KL is unknown.
            not (self.overlong.filter and self.kl.beta and self.kl.where != "loss"),
            f"overlong.filter with kl.beta {self.kl.beta:g} in the reward: answers that were cut"
            " are not read, so their reward would be without it, and their group's baseline wrong;"
            " set --kl.where loss, or --overlong.no_filter",
        )
        require_unique(self.mixture, "mixture")

    @property
    def training_sets(self) -> tuple[SetConfig, ...]:
        """Sets to train on: those of the mixture, or the run's own data."""
        # Metrics of a run without named sets use this name.
        run_set = SetConfig(name="held_out", data=self.data, reward=self.reward)
        return tuple(self._share_settings(dataset) for dataset in self.mixture) or (run_set,)

    @property
    def sets_by_prefix(self) -> dict[str, SetConfig]:
        """All sets of problems by the prefix of their settings, training sets first."""
        eval_sets = (self._share_settings(dataset) for dataset in self.eval.sets)
        training_prefixes = [f"mixture.{i}." for i in range(len(self.mixture))] or [""]
        prefixes = [*training_prefixes, *(f"eval.sets.{i}." for i in range(len(self.eval.sets)))]
        return dict(zip(prefixes, (*self.training_sets, *eval_sets), strict=True))

    def _share_settings(self, dataset: SetConfig) -> SetConfig:
        """Returns a set with the settings that all sets share."""
        data, reward = self.data, self.reward
        return replace(
            dataset,
            data=replace(
                dataset.data, **{name: getattr(data, name) for name in SHARED_SETTINGS["data"]}
            ),
            reward=replace(
                dataset.reward,
                **{name: getattr(reward, name) for name in SHARED_SETTINGS["reward"]},
            ),
        )

    @property
    def learning_rates(self) -> LearningRates:
        """Learning rates, with `auto` resolved."""
        policy, draft = self.optimizer.learning_rate, self.draft_training.learning_rate
        rate_settings = policy, draft, self.offline.learning_rate
        return resolve_learning_rates(rate_settings, bool(self.model.path), self.lora.rank > 0)

    @property
    def is_on_policy(self) -> bool:
        """Whether all updates are on rows of the very policy they update."""
        dynamic_sampling = self.dynamic_sampling
        # Carried groups were sampled before the last update.
        has_older_rows = dynamic_sampling.max_batches > 0 and dynamic_sampling.surplus == "carry"
        has_older_rows |= self.schedule.active_lag > 0
        return self.batch.mini_batches * self.batch.epochs == 1 and not has_older_rows

    @property
    def resolved_loss(self) -> LossConfig:
        """Settings of the loss, with `loss.importance auto` resolved."""
        if self.loss.importance != "auto":
            return self.loss
        loss = self.loss
        importance, logprobs = resolve_importance(
            self.schedule.active_lag, loss.kind, loss.function, loss.logprobs
        )
        return replace(loss, importance=importance, logprobs=logprobs)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the loss reads log-probabilities of the old policy."""
        # A loss of the user may read them.
        has_ratio = self.loss.kind != "reinforce" or bool(self.loss.function)
        return has_ratio or self.resolved_loss.importance != "none"


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """Settings of a run with the facts of its checkpoints."""

    model: ModelSpec = field(default_factory=ModelSpec)
    head: HeadSpec = field(default_factory=HeadSpec)
    today: str = ""
    """Date of the run's start, as 2026-11-27, for chat templates that write it."""
    draft_model: ModelSpec | None = None
    """Sizes of a loaded draft, from its config.json. None = the policy's."""

    @classmethod
    def from_config(cls, config: Config) -> ResolvedConfig:
        """Builds a config from settings alone. A resolved config is returned unchanged."""
        # Building it again would lose the facts of its checkpoints.
        if isinstance(config, ResolvedConfig):
            return config
        specs = {
            "model": ModelSpec.from_config(config.model),
            "head": HeadSpec.from_config(config.head),
        }
        return cls(**{**vars(config), **specs})

    @property
    def row_length(self) -> int:
        """Tokens of the longest row: prompt and response."""
        return self.data.max_prompt_length + self.rollout.max_new_tokens

    @property
    def draft_spec(self) -> DraftSpec:
        """Specification of the draft."""
        return self._make_spec(self.rollout.draft.kind)

    @property
    def lookup_spec(self) -> DraftSpec | None:
        """Specification of the look-up that is combined with the draft. None without one."""
        is_combined = self.rollout.draft.is_learned and self.rollout.lookup.beside != "none"
        return self._make_spec(self.rollout.lookup.beside) if is_combined else None

    def _make_spec(self, kind: str) -> DraftSpec:
        decoder, draft = self.draft_model, self.rollout.draft
        if decoder is not None:
            # These two are choices of the run, not facts of a checkpoint.
            decoder = replace(decoder, dtype=self.model.dtype, remat=self.model.remat)
        is_trained = self.draft_training.online or self.offline.steps > 0
        run = RunFacts(
            max_length=draft.max_draft_length,
            policy=self.model,
            path=draft.path,
            decoder=decoder,
            head=self.head,
            group_size=self.batch.group_size,
            row_length=self.row_length,
            banned=self.rollout.banned,
            trains_offline=self.offline.steps > 0,
            # An untrained draft is not unrolled.
            depths=self.draft_training.ttt_steps if is_trained else 0,
        )
        return get_kind(kind).make_spec(self.rollout.settings_of(kind), run)


def parse_range(name: str, text: str) -> range:
    """Parses FIRST:END. An empty text gives an empty range.

    Raises:
      ConfigError: The text is no range, or an empty one.
    """
    first, _, stop = (text or "0:0").partition(":")
    # Python refuses to convert texts of thousands of digits.
    is_numeric = first.isdecimal() and stop.isdecimal() and len(first + stop) < 20
    is_valid = is_numeric and (int(first) < int(stop) or not text)
    require(
        is_valid,
        f"{name} is {text!r}; FIRST:END with END above FIRST, such as 10:12 for the two from 10 on",
    )
    return range(int(first), int(stop))
