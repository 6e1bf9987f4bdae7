"""Options of `bench generate` and `bench step`, and their configs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from jaxspec.bench.measure import Budget
from jaxspec.config.algorithms import AlgorithmName, with_algorithm
from jaxspec.config.check import check_config, require_countable
from jaxspec.config.from_checkpoint import resolve_config
from jaxspec.config.settings import (
    BatchConfig,
    Config,
    DataConfig,
    DraftConfig,
    DraftKind,
    DraftLength,
    EngineConfig,
    LookupConfig,
    OfflineConfig,
    OptimizerConfig,
    ResolvedConfig,
    RolloutConfig,
    Seed,
    SftConfig,
    Temperature,
    VerifyRule,
    parse_range,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.kinds import get_kind
from jaxspec.inputs.checked import CheckedConfig, Range, require, translate_settings
from jaxspec.inputs.spec import Count, ModelConfig, Natural
from jaxspec.processes.devices import core_count

LEARNING_RATE = 1e-6
"""Learning rate of measured steps, too low to affect the measurements."""
GroupSize = Annotated[int, Range(min=2, remedy="a group advantage needs two answers")]
LengthSetting = DraftLength | Literal["auto"]
PromptLength = Annotated[int, Range(min=2)]
SYNTHETIC_LENGTH = 3
"""Drafts per round to which `synthetic_acceptance` refers."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CheckedConfig, prefix="--"):
    """Options of `bench generate`."""

    model: str = ""
    """Folder of a Hugging Face checkpoint, or its id on the hub."""
    batch: Count = 8
    """Number of rows."""
    prompt: PromptLength = 64
    """Tokens of each prompt."""
    new: Count = 128
    """Tokens of each answer."""
    temperature: Temperature = 1.0
    """Sampling temperature."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, keys and values."""
    draft: DraftKind = "none"
    """Kind of draft."""
    draft_path: str = ""
    """Folder of a trained draft. Empty: random weights, of which almost nothing is accepted."""
    draft_length: LengthSetting = 3
    """Tokens drafted per round (K). `auto`: each round chooses."""
    draft_vocab: Natural = 0
    """EAGLE-3 with random weights: size of the draft's own vocabulary. 0 = the policy's."""
    verify: VerifyRule = "block"
    """Lossless verification rule."""
    synthetic_acceptance: Annotated[float, Range(min=1, max=SYNTHETIC_LENGTH + 1, or_zero=True)] = (
        0.0
    )
    """Tokens that a round of 3 drafts keeps on average, whatever the draft predicts. 0 = verify the
    drafts."""
    lengths: tuple[DraftLength, ...] = ()
    """Draft lengths of the table of rounds. Empty: draft_length, and for `auto` all lengths that it
    chooses from."""
    live: tuple[Count, ...] = ()
    """Numbers of rows of the table of rounds. Empty: no table."""
    page_size: Natural | Literal["auto"] = "auto"
    """Positions per page of the key-value cache. 0 = one page per row. `auto` = 64 on an
    accelerator, 0 on a CPU."""
    threads: Natural = 0
    """CPU cores to use. 0 = all."""
    repeats: Count = 5
    """Undisturbed calls to time."""
    budget: Budget = 15.0
    """Seconds after which disturbed calls are no longer repeated."""
    seed: Seed = 0
    """Seed of prompts, sampling and random weights."""
    profile: str = ""
    """Calls to trace, as FIRST:END, where END is not traced. The trace for ui.perfetto.dev is
    written to ./trace-generate.json.gz. Empty: none."""

    def check(self) -> None:
        require(
            self.threads <= core_count(),
            f"--threads is {self.threads}, but there are {core_count()} cores; 0 uses all of them",
        )
        rows = max(self.batch, *self.live, 1)
        require_countable(f"--batch {self.batch} (or --live):", rows, self.prompt + self.new)
        call_count, first_call = self.repeats + 2, parse_range("--profile", self.profile).start
        # Disturbed calls are repeated, so there may be more.
        problem = (
            f"--profile is {self.profile!r}, but only calls 0 to {call_count - 1} are certain to"
            " be made"
        )
        require(
            first_call < call_count,
            f"{problem} (two to warm up, then --repeats {self.repeats}); start at one of them",
        )
        remedy = (
            "needs a draft that samples: --draft eagle3, mtp or model, at a --temperature above 0"
        )
        is_learned = get_kind(self.draft).learned is not None
        is_sampled = is_learned and self.temperature > 0
        require(is_sampled or not self.synthetic_acceptance, f"--synthetic_acceptance {remedy}")
        for condition, applies, names in (
            ("--draft none", self.draft == "none", "draft_length draft_path draft_vocab lengths"),
            # Coupled noise affects plain decoding too, so `coupled` is of use even there.
            ("--draft none", self.draft == "none" and self.verify == "token", "verify"),
            (f"--draft {self.draft}", not is_learned, "draft_path"),
            (f"--draft {self.draft}", self.draft != "eagle3", "draft_vocab"),
            ("--draft_path, whose files say it,", bool(self.draft_path), "draft_vocab"),
            ("no --live", not self.live, "lengths"),
        ):
            unused_options = ", ".join(
                f"--{name}"
                for name in names.split()
                if getattr(self, name) != getattr(type(self), name)
            )
            require(
                not (applies and unused_options),
                f"with {condition} there is no use for {unused_options}; leave it out",
            )
        max_length = max(self.lengths, default=0)
        require(
            max_length < self.new,
            f"--lengths has {max_length}, but --new is {self.new}, and a draft must be shorter than"
            " an answer; lower it",
        )


OPTIONS = {
    "model.path": "--model",
    "batch.prompts": "--batch",
    "batch.group_size": "--group",
    "data.max_prompt_length": "--prompt",
    "data.path": "--data",
    "rollout.max_new_tokens": "--new",
    "rollout.draft.kind": "--draft",
    "rollout.draft.path": "--draft_path",
    "rollout.draft.draft_length": "--draft_length",
    "rollout.draft.eagle3.vocab": "--draft_vocab",
    "rollout.engine.page_size": "--page_size",
}
"""Option for each setting of the config, to name in errors."""


def config_from_options(
    options: GenerateOptions, group: int, log: Callable[[str], Any]
) -> ResolvedConfig:
    """Makes a run's config from options, with `group` answers to each prompt.

    A config cannot have groups of one. With `group` 1, the caller sets the generator's group size.
    """
    draft = DraftConfig(
        kind=options.draft,
        draft_length=options.draft_length,
        eagle3=Eagle3Config(vocab=options.draft_vocab),
        path=options.draft_path,
        # Not `auto`, which would measure temperatures that nothing here uses.
        sampling="sample",
    )
    rollout = RolloutConfig(
        max_new_tokens=options.new,
        temperature=options.temperature,
        verify=options.verify,
        draft=draft,
        lookup=LookupConfig(max_match=min(LookupConfig.max_match, options.prompt + options.new)),
        engine=EngineConfig(
            slots=max(options.batch, *options.live, 1), page_size=options.page_size
        ),
    )
    requested = Config(
        seed=options.seed,
        model=ModelConfig(path=options.model, dtype=options.dtype),
        rollout=rollout,
        # The default baseline refuses a group of one.
        batch=BatchConfig(prompts=options.batch // group, group_size=max(group, 2)),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=0),
        data=DataConfig(max_prompt_length=options.prompt),
        sft=SftConfig(steps=0),
        # Nothing is trained offline, but a draft with a vocabulary of its own needs these settings.
        offline=OfflineConfig(samples=2, rows=1),
    )
    with translate_settings(OPTIONS):
        config = resolve_config(requested, log)
        # One device, because `choose_mesh` makes a mesh that fits afterwards.
        check_config(config, 1)
    return config


@dataclass(frozen=True, kw_only=True)
class StepOptions(CheckedConfig, prefix="--"):
    """Options of `bench step`."""

    model: str = ""
    """Folder of a Hugging Face checkpoint."""
    batch: Count = 32
    """Answers per step."""
    group: GroupSize = 8
    """Answers to each prompt (G)."""
    algorithm: AlgorithmName | Literal["default"] = "default"
    """Advantages and loss that `--algorithm` of a run sets. Every rollout is a batch."""
    beta: Annotated[float, Range(min=0)] = 0.0
    """Weight of a KL term (kl.beta). 0 = that of the algorithm."""
    prompt: PromptLength = 64
    """Prompt tokens per row. With --data, their maximum."""
    new: Count = 128
    """New tokens per row. With --data, their maximum."""
    data: str = ""
    """JSON-lines file of problems to ask in turn (`question`, `answer`). The policy may end its
    answers to them. Empty: random digits, and every answer has --new tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, keys and values in generation."""
    draft: DraftKind = "none"
    """Kind of draft."""
    draft_path: str = ""
    """Folder of a trained draft. Empty: random weights."""
    draft_length: LengthSetting = 3
    """Tokens drafted per round (K). `auto`: each round chooses."""
    verify: VerifyRule = "block"
    """Lossless verification rule."""
    online: bool = True
    """Whether the step also trains a learned draft, as runs do by default. Off: it is frozen."""
    threads: Natural = 0
    """CPU cores to use. 0 = all."""
    remat: bool = False
    """Whether the backward pass recomputes each layer, as runs do by default. Off: as in the
    trainers that it is compared with."""
    micro_batch: Natural = 0
    """Tokens per micro-batch on each data shard (batch.micro_tokens). 0 = as a run chooses."""
    repeats: Count = 5
    """Undisturbed steps to time."""
    budget: Budget = 15.0
    """Seconds after which disturbed steps are no longer repeated."""
    seed: Seed = 0
    """Seed of prompts, sampling and random weights."""
    profile: str = ""
    """Steps to trace, as FIRST:END, where END is not traced. The trace for ui.perfetto.dev is
    written to ./trace-step.json.gz. Empty: none."""

    def check(self) -> None:
        is_multiple = self.batch >= self.group and self.batch % self.group == 0
        require(
            is_multiple,
            f"--batch is {self.batch}; it must be a multiple of --group {self.group}, so that every"
            " prompt has a full group of answers",
        )
        is_learned = get_kind(self.draft).learned is not None
        require(
            is_learned or self.online,
            f"with --draft {self.draft} there is no use for --no_online, since that draft is not"
            " trained; leave it out",
        )

    def adapt_config(self, config: ResolvedConfig) -> ResolvedConfig:
        """Returns a run's config with these options of learning."""
        if self.algorithm != "default":
            config = with_algorithm(config, self.algorithm)
        return replace(
            config,
            kl=replace(config.kl, beta=self.beta or config.kl.beta),
            model=replace(config.model, remat=self.remat),
            batch=replace(config.batch, micro_tokens=self.micro_batch),
            data=replace(config.data, path=self.data),
            draft_training=replace(config.draft_training, online=self.online),
        )

    def generate_options(self) -> GenerateOptions:
        """Returns the options of the step's generation."""
        size_names, call_names = (
            "model batch prompt new dtype threads",
            "repeats budget seed profile",
        )
        shared_names = f"{size_names} draft draft_path draft_length verify {call_names}".split()
        return GenerateOptions(**{name: getattr(self, name) for name in shared_names})
