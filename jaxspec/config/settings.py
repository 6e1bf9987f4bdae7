"""Every setting, typed and frozen, with the checks of each class (`rollout.py` has those of
generation, `check.py` what crosses classes), and a run as it is built from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from jaxspec.config.algorithm import (
    AdamConfig,
    AdvantageConfig,
    DynamicSamplingConfig,
    KlConfig,
    LearningRates,
    LossConfig,
    OptimizerConfig,
    OverlongConfig,
    Rate,
    resolve_learning_rates,
)
from jaxspec.config.data import DataConfig, EvalConfig, RewardConfig, SetConfig, require_unique
from jaxspec.config.rollout import (
    AUTO_LENGTHS,
    DraftConfig,
    DraftLength,
    DraftSampling,
    EngineConfig,
    LookupConfig,
    RolloutConfig,
    Temperature,
    VerifyRule,
)
from jaxspec.drafts.kinds import DraftKind, LookupKind
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
    "data": ("tokenizer", "prompt_format", "max_prompt_length"),
    "reward": ("workers", "deadline", "max_failed"),
}
"""Settings that all sets of problems share."""
Seed = Annotated[int, Range(min=0, max=2**32 - 1)]
"""What numpy, JAX and grain all tell apart."""


@dataclass(frozen=True, kw_only=True)
class DraftTrainingConfig(CheckedConfig, prefix="draft_training."):
    """How a learned draft is trained, offline before the run and online during it."""

    loss: Literal["ce", "kl", "lk", "lambda", "tv"] = "ce"
    """Soft cross-entropy, KL divergence, or acceptance itself: `lk` -log sum min(target, draft),
    `tv` one minus that sum, `lambda` from KL to `tv` as acceptance grows."""
    ttt_steps: Count = 3
    """Depths of the training-time-test unroll (EAGLE-3, MTP): step i trains on the draft's own
    states."""
    decay: Annotated[float, Range(above=0, max=1)] = 0.8
    """Weight of depth i in the draft loss is `decay**i`."""
    online: bool = True
    """Whether the draft is trained during the run, on the learner's own detached hidden states."""
    every: Count | Literal["auto"] = 1
    """Batches from one online update of the draft to the next; `auto`: it learns while acceptance
    still rises, or has fallen behind its best."""
    alarm: Annotated[float, Range(min=0, max=1)] = 0.3
    """Where acceptance_length falls by more than this share from one batch to the next, a warning
    says what to look at; 1: never."""
    learning_rate: Rate = "auto"
    """AdamW learning rate of the online update; auto: 1e-4 with a loaded policy, 4e-4 with a small
    one that is made here."""
    grad_clip: Positive = 0.5
    """Global-norm clip of the draft's gradient, apart from the policy's."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(CheckedConfig, prefix="batch."):
    """What is generated and learnt from at once, in groups (GRPO, arXiv 2402.03300)."""

    prompts: Count = 16
    """Prompts a batch."""
    group_size: Count = 8
    """Responses to each prompt (G); rows = prompts x G."""
    mini_batches: Count = 1
    """Parts of the prompts into which a batch is divided, one update for each."""
    epochs: Count = 1
    """How often a batch is learnt from; updates a batch = mini_batches x epochs."""
    micro_tokens: Natural = 0
    """Positions that each data shard reads at once to learn (a micro-batch), at least those of the
    longest row; 0: chosen by what memory allows. It changes nothing but rounding."""

    def check(self) -> None:
        if self.prompts % self.mini_batches:
            raise ConfigError(
                f"batch.mini_batches {self.mini_batches} does not divide batch.prompts"
                f" {self.prompts}; {', '.join(map(str, divisors(self.prompts)))} do"
            )


@dataclass(frozen=True, kw_only=True)
class MeshConfig(CheckedConfig, prefix="mesh."):
    """Devices as `data` x `expert` x `tensor`."""

    data: Natural = 0
    """Shards of the rows (and of the stored weights); 0: as many as fit the devices."""
    expert: Count = 1
    """Members of a data shard, which hold its rows and a model's experts between them. What other
    settings say of a data shard (slots, pages, micro-batches) is then of each."""
    tensor: Count = 1
    """Shards of heads, ffn and vocabulary."""
    shard_above: Annotated[int, Range(min=0, max=2**63 - 1)] = 2**22
    """Weights with at least so many elements are stored sharded over `data` too; gathering smaller
    ones costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(CheckedConfig, prefix="sft."):
    """Supervised warm start of the embedded model (`train_sft`)."""

    steps: Natural = 360
    """Updates; 0 starts from random weights."""
    rows: Count = 64
    """Sequences a batch."""
    learning_rate: Positive = 4e-3
    """Peak AdamW learning rate; cosine decay to a tenth."""
    format: Literal["worked", "text"] = "worked"
    """`worked` solves each prompt step by step (some steps wrong); `text` is a mixed corpus to
    continue."""
    wrong_steps: Annotated[float, Range(min=0, below=1)] = 0.3
    """Share of worked steps that are wrong, so that the start is imperfect."""


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(CheckedConfig, prefix="offline."):
    """Offline training of the draft on the policy's own responses (`train_draft`)."""

    samples: Count = 2048
    """Responses sampled from the policy on the training prompts; the last sixteenth, at least a
    batch, is held out to measure the draft."""
    text: str = ""
    """Train on this file instead: JSON lines or parquet (or a dataset, as `data.path`), each row
    with a column `text`, or with a chat, of which the assistant's turns are learnt: `messages`,
    `conversations`, or `data` (what both say in turn). Or `generic`: the built-in mixed corpus."""
    steps: Natural = 300
    """Updates; 0 keeps the weights as they are: loaded, or random."""
    rows: Count = 64
    """Sequences a batch."""
    learning_rate: Rate = "auto"
    """Peak AdamW learning rate; cosine decay to a tenth. auto: 1e-4 with a loaded policy, 1e-2 with
    a small one that is made here."""

    def check(self) -> None:
        message = (
            f"offline.samples {self.samples} fit one batch of offline.rows {self.rows}, which is"
            " held out"
        )
        require(self.samples > self.rows or bool(self.text), f"{message}; at least {self.rows + 1}")


@dataclass(frozen=True, kw_only=True)
class Config(CheckedConfig):
    """One run."""

    steps: Count = 80
    """Batches to generate and learn from."""
    seed: Seed = 0
    """Seed of weights, data order and sampling."""
    workdir: str = ""
    """Folder of the run; empty: runs/NAME-SCALE."""
    staged: bool = False
    """Run the phases one by one (seconds for each) instead of as one program; same numbers."""
    save_every: Count = 20
    """Batches between checkpoints (the last is always saved)."""
    compare_plain: bool = True
    """At the end, time the last batch with and without the draft: two more programs to compile, and
    a plain rollout."""
    profile: str = ""
    """Calls to trace (one a batch, or a rollout), as FIRST:END without the last (10:12 are two);
    the trace for ui.perfetto.dev goes to `workdir`. Empty: none."""
    model: ModelConfig = field(default_factory=ModelConfig)
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
    """Named sets of problems, instead of `data` and `reward`, each asked as often as its weight
    says; a config file lists them, and the command line may change them: --mixture.0.weight 2."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    head: HeadConfig = field(default_factory=HeadConfig)

    def check(self) -> None:
        first_call = parse_range("profile", self.profile).start
        message = (
            f"profile is {self.profile!r}, and the last call of a run of steps {self.steps} is"
            f" number {self.steps}"
        )
        require(first_call <= self.steps, f"{message}; begin there or before, or raise steps")
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
            not (self.overlong.filter and self.kl.beta and self.kl.where != "loss"),
            f"overlong.filter with kl.beta {self.kl.beta:g} in the reward: answers that were cut"
            " are not read, so their reward would be without it, and their group's baseline wrong;"
            " set --kl.where loss, or --overlong.no_filter",
        )
        require_unique(self.mixture, "mixture")

    @property
    def training_sets(self) -> tuple[SetConfig, ...]:
        """What is trained on: the sets of the mixture, or the run's own data as the only one."""
        run_set = SetConfig(name="held_out", data=self.data, reward=self.reward)
        return tuple(self._share_settings(dataset) for dataset in self.mixture) or (run_set,)

    @property
    def sets_by_prefix(self) -> dict[str, SetConfig]:
        """All sets of problems in the order of their numbers, those to train on first, by what
        comes before the names of their settings."""
        eval_sets = (self._share_settings(dataset) for dataset in self.eval.sets)
        training_prefixes = [f"mixture.{i}." for i in range(len(self.mixture))] or [""]
        prefixes = [*training_prefixes, *(f"eval.sets.{i}." for i in range(len(self.eval.sets)))]
        return dict(zip(prefixes, (*self.training_sets, *eval_sets), strict=True))

    def _share_settings(self, dataset: SetConfig) -> SetConfig:
        """A set with what is the run's: tokenizer, prompts and workers."""
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
        """Learning rates, with the usual ones of what is trained for `auto`."""
        policy, draft = self.optimizer.learning_rate, self.draft_training.learning_rate
        rate_settings = policy, draft, self.offline.learning_rate
        return resolve_learning_rates(rate_settings, bool(self.model.path), self.lora.rank > 0)

    @property
    def is_on_policy(self) -> bool:
        """Whether a batch has one update, and all its rows are of the policy that it updates."""
        dynamic_sampling = self.dynamic_sampling
        has_older_rows = dynamic_sampling.max_batches > 0 and dynamic_sampling.surplus == "carry"
        return self.batch.mini_batches * self.batch.epochs == 1 and not has_older_rows

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether anything in the loss is a ratio of policy to old policy, or weighs it."""
        has_ratio = self.loss.kind != "reinforce" or bool(self.loss.function)
        return has_ratio or self.loss.importance != "none"


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """A run as it is built: its settings, and beside them what its checkpoints say."""

    model: ModelSpec = field(default_factory=ModelSpec)
    head: HeadSpec = field(default_factory=HeadSpec)
    today: str = ""
    """Day on which the run began, as 2026-11-27, where the chat template writes the date."""
    draft_model: ModelSpec | None = None
    """Sizes of a draft that was loaded, from its own config.json; None: the policy's."""

    @classmethod
    def from_config(cls, config: Config) -> ResolvedConfig:
        """A run without checkpoints: its settings say everything."""
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
        """What the run's kind of draft may look at."""
        rollout, draft_model = self.rollout, self.draft_model
        draft, lookup = rollout.draft, rollout.lookup
        if draft_model is not None:
            draft_model = replace(draft_model, dtype=self.model.dtype, remat=self.model.remat)
        is_trained = self.draft_training.online or self.offline.steps > 0
        return DraftSpec(
            kind=draft.kind,
            max_length=draft.max_draft_length,
            policy=self.model,
            decoder=draft_model,
            head=self.head,
            vocab=draft.draft_vocab,
            ffn=draft.ffn,
            layers=draft.layers,
            embedding_first=draft.embedding_first,
            path=draft.path,
            tap_convention=draft.tap_convention,
            lookup=rollout.lookup_kind,
            rule=lookup.rule,
            min_match=lookup.min_match,
            max_match=lookup.max_match,
            group_size=self.batch.group_size,
            row_length=self.row_length,
            depths=self.draft_training.ttt_steps if is_trained else 0,
        )


def parse_range(name: str, text: str) -> range:
    """The numbers that FIRST:END stands for, END excluded; none for an empty text.

    Raises:
      ConfigError: it stands for none.
    """
    first, _, stop = (text or "0:0").partition(":")
    is_numeric = first.isdecimal() and stop.isdecimal() and len(first + stop) < 20
    is_valid = is_numeric and (int(first) < int(stop) or not text)
    require(
        is_valid,
        f"{name} is {text!r}; FIRST:END with END above FIRST, such as 10:12 for the two from 10 on",
    )
    return range(int(first), int(stop))
