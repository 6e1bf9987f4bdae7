"""Every setting, typed and frozen, with the checks of each class; `check.py` has those that cross
classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxspec.config.architecture import (
    Count,
    FamilyConfig,
    HeadConfig,
    LayerCount,
    ModelConfig,
    Natural,
    Positive,
    RopeConfig,
)
from jaxspec.config.checked import Checked, ConfigError, Range, require

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "DraftConfig",
    "DraftKind",
    "DraftSampling",
    "DraftTrainingConfig",
    "EngineConfig",
    "FamilyConfig",
    "GrpoConfig",
    "HeadConfig",
    "LearnerConfig",
    "LookupConfig",
    "LookupKind",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "OfflineConfig",
    "RolloutConfig",
    "RopeConfig",
    "SftConfig",
    "VerifyRule",
    "require",
]

DraftKind = Literal["eagle3", "mtp", "model", "ngram", "history", "none"]
DraftSampling = Literal["argmax", "sample", "auto"]
LookupKind = Literal["none", "ngram", "history"]
VerifyRule = Literal["block", "token", "coupled"]
Temperature = Annotated[float, Range(least=1e-3, most=1000, or_zero=True)]
"""Below, what logits are divided by leaves no finite number; at 0 nothing is divided."""
DraftLength = Annotated[int, Range(least=1, remedy="rollout.draft.kind none is plain decoding")]
GroupSize = Annotated[int, Range(least=2, remedy="a group advantage needs two responses")]
Seed = Annotated[int, Range(least=0, most=2**32 - 1)]
"""What numpy, JAX and grain all tell apart."""
AUTO_LENGTHS = (0, 1, 3, 5)
"""Draft lengths that `auto` compiles; 0 is plain decoding."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Checked, prefix="rollout.draft."):
    """What proposes tokens, and how they are drawn."""

    kind: DraftKind = "eagle3"
    """`eagle3`: a small head on some of the policy's hidden states; `mtp`: multi-token-prediction
    layers; `model`: a small decoder; `ngram`, `history`: look-up alone (see rollout.lookup);
    `none`: plain decoding through the same code."""
    draft_length: DraftLength | Literal["auto"] = 3
    """Tokens drafted a round (K); a round keeps 1 to K+1 tokens. `auto`: each round drafts 0, 1, 3
    or 5, whichever promises most tokens a second by what was accepted so far and by what rounds
    cost on this machine."""
    sampling: DraftSampling = "auto"
    """How a learned draft's tokens are taken: the most likely; drawn at `temperature`; drawn at the
    temperature that the run itself measures to be best for each depth."""
    temperature: Temperature = 1.0
    """With `sample`: the draft's temperature as a multiple of rollout.temperature."""
    vocab: Natural = 0
    """EAGLE-3: size of the draft's own vocabulary, chosen by offline training from the policy's
    samples; 0: the policy's."""
    ffn: Natural = 0
    """Width of the draft's SwiGLU layer; 0: the policy's."""
    layers: LayerCount = 1
    """Layers of `mtp` (depth i uses layer i mod layers) or of `model`."""
    embedding_first: bool = True
    """MTP: concatenate [embedding, hidden] as DeepSeek does; False: [hidden, embedding] as MiMo
    does."""
    path: str = ""
    """Folder (or hub id) of a trained draft, whose config.json sets its sizes and form: an EAGLE-3
    head, MTP layers, or a small model."""
    tap_convention: Literal["auto", "boundary", "output_of"] = "auto"
    """What layer numbers in that folder count: layers applied (vLLM, speculators), or the layer
    whose output is read (SpecForge)."""

    def check(self) -> None:
        looked_up = (
            f"rollout.draft.draft_length auto weighs drafts that every round has, and {self.kind}"
            " finds them in some only"
        )
        require(
            not self.lengths or self.learned or self.kind == "none",
            f"{looked_up}; give a number, such as 5",
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Draft lengths among which each round chooses; empty: it is always the same."""
        return AUTO_LENGTHS if self.draft_length == "auto" else ()

    @property
    def longest(self) -> int:
        """The most tokens that a round drafts."""
        return AUTO_LENGTHS[-1] if isinstance(self.draft_length, str) else self.draft_length

    @property
    def learned(self) -> bool:
        """Whether the draft has weights."""
        return self.kind in ("eagle3", "mtp", "model")


@dataclass(frozen=True, kw_only=True)
class LookupConfig(Checked, prefix="rollout.lookup."):
    """Drafts found in text that is there already: of the row itself, or of other answers to its
    prompt."""

    beside: LookupKind = "none"
    """Look-up beside a learned draft: a row uses it where it offers a whole block, else the learned
    draft."""
    rule: Literal["vllm", "hf", "latest"] = "vllm"
    """N-gram: longest match, earliest occurrence (`vllm`); the same, cut at an end token (`hf`);
    longest match, latest occurrence."""
    min_match: Count = 2
    """Shortest run of tokens, at the end of the text, that is looked for."""
    max_match: Count = 5
    """Longest run of tokens that is compared."""
    past: Natural = 2
    """History: answers of the last epoch that are kept for each prompt; 0: only its sibling
    rows."""

    def check(self) -> None:
        longer = (
            f"rollout.lookup.min_match {self.min_match} is above rollout.lookup.max_match"
            f" {self.max_match}"
        )
        require(self.min_match <= self.max_match, f"{longer}; lower the first or raise the second")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked, prefix="rollout.engine."):
    """Memory and loops of generation; nothing here changes a token's law, and in coupled mode no
    token."""

    slots: Count | Literal["auto"] = "auto"
    """Rows that a data shard generates at once; further ones wait until a slot is free. `auto`:
    256, on an accelerator fewer where its memory holds fewer."""
    page_size: Natural | Literal["auto"] = "auto"
    """Positions of a page of keys and values; 0: a page is as long as a row. Smaller pages let the
    rows of a group share their prompt, at the price of gathering them. `auto`: 64 on an
    accelerator, 0 on a CPU."""
    pages: Natural = 0
    """Pages of a data shard, with page_size; 0: as many as prompts and slots can need, on an
    accelerator as far as its memory holds them. With fewer, a row may lose its pages for a while,
    and reads its text again later."""
    tail: bool = True
    """Whether the last rows of a batch move to smaller loops, of a quarter and a sixteenth of the
    slots."""

    def check(self) -> None:
        remedy = "give a page size too, 64 for example, or leave pages 0"
        given = f"rollout.engine.pages is {self.pages}"
        require(
            self.pages == 0 or self.page_size != 0,
            f"{given}, but page_size 0 makes a page of every row; {remedy}",
        )
        require(
            self.pages == 0 or self.page_size != "auto",
            f"{given}, and of what size is left to page_size auto; {remedy}",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Checked, prefix="rollout."):
    """How responses are generated; the policy's law is that of `temperature`, `top_k`, `top_p`,
    `min_new_tokens` and `banned`."""

    max_new_tokens: Count = 28
    """Longest response, in tokens."""
    min_new_tokens: Natural = 0
    """Tokens before an end token may be sampled."""
    temperature: Temperature = 1.0
    """Sampling temperature; rollout and learner divide the logits by it alike. 0: the most likely
    token (not for training)."""
    top_k: Natural = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities reach this sum; 1:
    from all."""
    banned: tuple[Natural, ...] = ()
    """Token ids that are never sampled."""
    enable_thinking: bool = True
    """What the chat template is told of `enable_thinking`: False asks models that can (Qwen3) to
    answer without thinking first."""
    verify: VerifyRule = "block"
    """Lossless rule: `block` keeps the most drafts, `token` verifies them one by one; `coupled`
    gives the very tokens of plain decoding."""
    slice_rounds: Count = 8
    """With --staged, rounds between two looks at signals."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)

    def check(self) -> None:
        longer = (
            f"rollout.min_new_tokens {self.min_new_tokens} is not below rollout.max_new_tokens"
            f" {self.max_new_tokens}"
        )
        require(
            self.min_new_tokens < self.max_new_tokens,
            f"{longer}; lower the first or raise the second",
        )

    @property
    def lookup_kind(self) -> LookupKind:
        """The look-up in use, alone or beside a learned draft."""
        return self.draft.kind if self.draft.kind in ("ngram", "history") else self.lookup.beside

    @property
    def past(self) -> int:
        """Earlier answers that a prompt brings along."""
        return self.lookup.past if self.lookup_kind == "history" else 0


@dataclass(frozen=True, kw_only=True)
class DraftTrainingConfig(Checked, prefix="draft_training."):
    """How a learned draft is trained, offline before the run and online during it."""

    loss: Literal["ce", "kl", "lk", "lambda", "tv"] = "ce"
    """Soft cross-entropy, KL divergence, or acceptance itself: `lk` -log sum min(target, draft),
    `tv` one minus that sum, `lambda` from KL to `tv` as acceptance grows."""
    ttt_steps: Count = 3
    """Depths of the training-time-test unroll (EAGLE-3, MTP): step i trains on the draft's own
    states."""
    decay: Annotated[float, Range(above=0, most=1)] = 0.8
    """Weight of depth i in the draft loss is `decay**i`."""
    online: bool = True
    """Whether the draft is trained during the run, on the learner's own detached hidden states."""
    learning_rate: Positive = 4e-4
    """AdamW learning rate of the online update."""
    grad_clip: Positive = 0.5
    """Global-norm clip of the draft's gradient, apart from the policy's."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(Checked, prefix="grpo."):
    """Group Relative Policy Optimization (arXiv 2402.03300), one update a batch."""

    prompts: Count = 16
    """Prompts a batch."""
    group_size: GroupSize = 8
    """Responses to each prompt (G); rows = prompts x G."""
    learning_rate: Positive = 2e-4
    """AdamW learning rate of the policy, after warm-up."""
    warmup_steps: Natural = 10
    """Linear warm-up of the learning rate, in batches."""
    weight_decay: Annotated[float, Range(least=0)] = 0.0
    """AdamW weight decay."""
    grad_clip: Positive = 1.0
    """Global-norm clip of the policy's gradient."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Checked, prefix="learner."):
    """How a batch is read to learn from it, and what is kept; nothing here changes what is learnt,
    but for rounding."""

    tokens: Natural = 0
    """Positions that each data shard reads at once (a micro-batch), at least those of the longest
    row; 0: chosen by what memory allows."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type in which AdamW keeps its moments of policy and draft (float64 models: float64 for
    float32); bfloat16 halves them."""
    offload: bool = False
    """Whether the policy's moments lie in the host's memory but for its update; every call moves
    them there and back."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked, prefix="data."):
    """Prompts with checkable answers: generated tasks, or JSON lines."""

    path: str = ""
    """JSON-lines file of training problems; empty: generated arithmetic tasks."""
    eval_path: str = ""
    """JSON-lines file of held-out problems; empty: the last `eval_prompts` rows of `path` are held
    out."""
    tokenizer: str = ""
    """Folder with a Hugging Face tokenizer.json (and tokenizer_config.json); empty: that of
    model.path, else the built-in characters."""
    prompt_column: str = "question"
    """Column of the problem text."""
    answer_column: str = "answer"
    """Column of the reference answer."""
    answer_style: Literal["hash", "boxed", "answer_line"] = "hash"
    """Where the final answer stands: after the last `#` (or `####`), in the last \\boxed{}, or on
    the last `Answer:` line."""
    instruction: str = ""
    """Text appended to each problem of `path`, such as how to mark the final answer."""
    max_prompt_length: Annotated[int, Range(least=2)] = 8
    """Longest prompt, in tokens; longer problems are left out and counted."""
    task: Literal["add", "subtract", "mixed"] = "add"
    """Family of the generated tasks."""
    digits: Annotated[int, Range(least=1, most=4)] = 2
    """Difficulty of the generated tasks: digits of the operands, 1 to 4."""
    format: Literal["worked", "text"] = "worked"
    """Warm-start data: `worked` solves each prompt step by step (some steps wrong); `text` is a
    mixed corpus to continue."""
    eval_prompts: Count = 64
    """Held-out problems for `eval/exact_match`."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Checked, prefix="mesh."):
    """Devices as `data` x `tensor`."""

    data: Natural = 0
    """Shards of the rows (and of the stored weights); 0: as many as fit the devices."""
    tensor: Count = 1
    """Shards of heads, ffn and vocabulary."""
    shard_above: Annotated[int, Range(least=0, most=2**63 - 1)] = 2**22
    """Weights with at least so many elements are stored sharded over `data` too; gathering smaller
    ones costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(Checked, prefix="sft."):
    """Supervised warm start of the embedded model (`train_sft`)."""

    steps: Natural = 360
    """Updates; 0 starts from random weights."""
    rows: Count = 64
    """Sequences a batch."""
    learning_rate: Positive = 4e-3
    """Peak AdamW learning rate; cosine decay to a tenth."""
    wrong_steps: Annotated[float, Range(least=0, below=1)] = 0.3
    """Share of worked steps with a wrong digit, so that the start is imperfect."""


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(Checked, prefix="offline."):
    """Offline training of the draft on the policy's own responses (`train_draft`)."""

    samples: Count = 2048
    """Responses sampled from the policy on the training prompts; the last sixteenth, at least a
    batch, is held out to measure the draft."""
    text: str = ""
    """Train on this file instead: JSON lines, each with a column `text` or `messages` (a chat, of
    which the assistant's turns are learnt), or `generic` for the built-in mixed corpus."""
    steps: Natural = 300
    """Updates; 0 keeps the weights as they are: loaded, or random."""
    rows: Count = 64
    """Sequences a batch."""
    learning_rate: Positive = 1e-2
    """Peak AdamW learning rate; cosine decay to a tenth."""

    def check(self) -> None:
        batch = (
            f"offline.samples {self.samples} fit one batch of offline.rows {self.rows}, which is"
            " held out"
        )
        require(self.samples > self.rows or bool(self.text), f"{batch}; at least {self.rows + 1}")


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Checked, prefix="lora."):
    """Low-rank adapters (LoRA, arXiv 2106.09685) in the form of PEFT."""

    rank: Natural = 0
    """Train adapters of this rank instead of the policy's weights; 0: train the weights."""
    alpha: Positive = 32.0
    """The adapters' product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Weights that get an adapter, by PEFT's names (q_proj, up_proj, ...); empty: all of attention
    and of a feed-forward layer without experts."""
    path: str = ""
    """Folder of PEFT adapters that are merged into the policy's weights when these are loaded."""


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
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
    eval_every: Count = 20
    """Batches between held-out evaluations (first and last always)."""
    profile: str = ""
    """Batches to trace, as FIRST:END without the last (10:12 are two); the trace for
    ui.perfetto.dev goes to `workdir`. Empty: none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    draft_model: ModelConfig | None = None
    """Sizes of a draft that was loaded, from its own config.json; None: the policy's."""

    def check(self) -> None:
        first = numbers_of("profile", self.profile).start
        traced = (
            f"profile is {self.profile!r}, and the last call of a run of steps {self.steps} is"
            f" number {self.steps}"
        )
        require(first <= self.steps, f"{traced}; begin there or before, or raise steps")


def numbers_of(name: str, text: str) -> range:
    """The numbers that FIRST:END stands for, END excluded; none for an empty text.

    Raises:
      ConfigError: it stands for none.
    """
    first, _, end = (text or "0:0").partition(":")
    digits = first.isdecimal() and end.isdecimal() and len(first + end) < 20
    whole = digits and (int(first) < int(end) or not text)
    require(
        whole,
        f"{name} is {text!r}; FIRST:END with END above FIRST, such as 10:12 for the two from 10 on",
    )
    return range(int(first), int(end))
