"""Every setting, typed and frozen, with the checks of each class; `consistency.py` has those that cross classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

DraftKind = Literal["eagle3", "mtp", "model", "ngram", "history", "none"]
DraftSampling = Literal["argmax", "sample", "auto"]
LookupKind = Literal["none", "ngram", "history"]
VerifyRule = Literal["block", "token", "coupled"]


class ConfigError(ValueError):
    """Bad input that the user can mend; programs print it without a traceback and exit with code 2."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Qwen3-architecture decoder."""

    vocab: int = 40
    """Rows of the embedding table; at least the tokenizer's size (published models pad it)."""
    layers: int = 12
    """Decoder layers; a draft of kind eagle3 reads three of them and needs at least 4."""
    embed: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads (grouped-query attention); divides `heads`."""
    head_size: int = 16
    """Size of one head; even, for rotary positions."""
    ffn: int = 192
    """Width of the SwiGLU layer."""
    rope_theta: float = 1e4
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """Whether the output head is the embedding table."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the matmuls; master weights are float32 (float64 with `float64`)."""
    remat: bool = True
    """Recompute each layer in the backward pass instead of storing what it needs: far less memory, and on a CPU less time."""

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "embed", "heads", "kv_heads", "head_size", "ffn"):
            require(getattr(self, name) > 0, f"model.{name} is {getattr(self, name)}; it must be positive")
        require(self.heads % self.kv_heads == 0, f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}")
        require(self.head_size % 2 == 0, f"model.head_size is {self.head_size}; rotary positions need an even size")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What proposes tokens, and how they are drawn."""

    kind: DraftKind = "eagle3"
    """`eagle3`: a one-layer head on three of the policy's hidden states; `mtp`: multi-token-prediction layers; `model`: a small decoder;
    `ngram`, `history`: look-up alone (see rollout.lookup); `none`: plain decoding through the same code."""
    draft_length: int = 3
    """Tokens drafted a round (K); a round keeps 1 to K+1 tokens."""
    sampling: DraftSampling = "auto"
    """How a learned draft's tokens are taken: the most likely; drawn at `temperature`; drawn at the temperature that the run itself
    measures to be best for each depth."""
    temperature: float = 1.0
    """With `sample`: the draft's temperature as a multiple of rollout.temperature."""
    vocab: int = 0
    """EAGLE-3: size of the draft's own vocabulary, chosen by offline training from the policy's samples; 0: the policy's."""
    ffn: int = 0
    """Width of the draft's SwiGLU layer; 0: the policy's."""
    layers: int = 1
    """Layers of `mtp` (depth i uses layer i mod layers) or of `model`."""
    embedding_first: bool = True
    """MTP: concatenate [embedding, hidden] as DeepSeek does; False: [hidden, embedding] as MiMo does."""

    def __post_init__(self) -> None:
        remedy = "at least 1 (draft.kind none is plain decoding)"
        require(self.draft_length >= 1, f"draft.draft_length is {self.draft_length}; {remedy}")
        require(self.temperature >= 0, f"draft.temperature is {self.temperature}; 0 (the most likely token) or more")
        for name, least in (("vocab", 0), ("ffn", 0), ("layers", 1)):
            require(getattr(self, name) >= least, f"draft.{name} is {getattr(self, name)}; at least {least}")

    @property
    def learned(self) -> bool:
        """Whether the draft has weights."""
        return self.kind in ("eagle3", "mtp", "model")


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """Drafts found in text that is there already: of the row itself, or of other answers to its prompt."""

    beside: LookupKind = "none"
    """Look-up beside a learned draft: a row uses it where it offers a whole block, else the learned draft."""
    rule: Literal["vllm", "hf", "latest"] = "vllm"
    """N-gram: longest match, earliest occurrence (`vllm`); the same, cut at an end token (`hf`); longest match, latest occurrence."""
    min_match: int = 2
    """Shortest run of tokens, at the end of the text, that is looked for."""
    max_match: int = 5
    """Longest run of tokens that is compared."""
    past: int = 2
    """History: answers of the last epoch that are kept for each prompt; 0: only its sibling rows."""

    def __post_init__(self) -> None:
        least = f"lookup.min_match {self.min_match} and max_match {self.max_match}: at least 1, the first not above the second"
        require(1 <= self.min_match <= self.max_match, least)
        require(self.past >= 0, f"lookup.past is {self.past}; at least 0")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are generated; the policy's law is that of `temperature`, `top_k`, `top_p`, `min_new_tokens` and `banned`."""

    max_new_tokens: int = 28
    """Longest response, in tokens."""
    min_new_tokens: int = 0
    """Tokens before an end token may be sampled."""
    temperature: float = 1.0
    """Sampling temperature; rollout and learner divide the logits by it alike. 0: the most likely token (not for training)."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities reach this sum; 1: from all."""
    banned: tuple[int, ...] = ()
    """Token ids that are never sampled."""
    verify: VerifyRule = "block"
    """Lossless rule: `block` keeps the most drafts, `token` verifies them one by one; `coupled` gives the very tokens of plain decoding."""
    slice_rounds: int = 8
    """With --staged, rounds between two looks at signals."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("slice_rounds", 1), ("min_new_tokens", 0), ("top_k", 0), ("temperature", 0)):
            require(getattr(self, name) >= least, f"rollout.{name} is {getattr(self, name)}; at least {least}")
        require(0 < self.top_p <= 1, f"rollout.top_p is {self.top_p}; it must be in (0, 1] (1: no truncation)")
        shorter = self.min_new_tokens < self.max_new_tokens
        require(shorter, f"rollout.min_new_tokens {self.min_new_tokens} is not below rollout.max_new_tokens {self.max_new_tokens}")

    @property
    def lookup_kind(self) -> LookupKind:
        """The look-up in use, alone or beside a learned draft."""
        return self.draft.kind if self.draft.kind in ("ngram", "history") else self.lookup.beside

    @property
    def past(self) -> int:
        """Earlier answers that a prompt brings along."""
        return self.lookup.past if self.lookup_kind == "history" else 0


@dataclass(frozen=True, kw_only=True)
class DraftTrainingConfig:
    """How a learned draft is trained, offline before the run and online during it."""

    loss: Literal["ce", "kl", "lk", "lambda", "tv"] = "ce"
    """Soft cross-entropy, KL divergence, or acceptance itself: `lk` -log sum min(target, draft), `tv` one minus that sum, `lambda` from KL
    to `tv` as acceptance grows."""
    ttt_steps: int = 3
    """Depths of the training-time-test unroll (EAGLE-3, MTP): step i trains on the draft's own states."""
    decay: float = 0.8
    """Weight of depth i in the draft loss is `decay**i`."""
    online: bool = True
    """Whether the draft is trained during the run, on the learner's own detached hidden states."""
    learning_rate: float = 4e-4
    """AdamW learning rate of the online update."""
    grad_clip: float = 0.5
    """Global-norm clip of the draft's gradient, apart from the policy's."""

    def __post_init__(self) -> None:
        require(self.ttt_steps >= 1, f"draft_training.ttt_steps is {self.ttt_steps}; at least 1")
        require(0 < self.decay <= 1, f"draft_training.decay is {self.decay}; it must be in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Group Relative Policy Optimization (arXiv 2402.03300), one update a batch."""

    prompts: int = 16
    """Prompts a batch."""
    group_size: int = 8
    """Responses to each prompt (G); rows = prompts x G."""
    learning_rate: float = 2e-4
    """AdamW learning rate of the policy, after warm-up."""
    warmup_steps: int = 10
    """Linear warm-up of the learning rate, in batches."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    grad_clip: float = 1.0
    """Global-norm clip of the policy's gradient."""

    def __post_init__(self) -> None:
        require(self.prompts >= 1, f"grpo.prompts is {self.prompts}; at least 1")
        require(self.group_size >= 2, f"grpo.group_size is {self.group_size}; a group advantage needs at least 2 responses")
        require(self.learning_rate > 0, f"grpo.learning_rate is {self.learning_rate}; it must be positive")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts with checkable answers: generated tasks, or JSON lines."""

    path: str = ""
    """JSON-lines file of training problems; empty: generated arithmetic tasks."""
    eval_path: str = ""
    """JSON-lines file of held-out problems; empty: the last `eval_prompts` rows of `path` are held out."""
    tokenizer: str = ""
    """Folder with a Hugging Face tokenizer.json (and tokenizer_config.json); empty: the built-in characters."""
    prompt_column: str = "question"
    """Column of the problem text."""
    answer_column: str = "answer"
    """Column of the reference answer."""
    answer_style: Literal["hash", "boxed", "answer_line"] = "hash"
    """Where the final answer stands: after the last `#` (or `####`), in the last \\boxed{}, or on the last `Answer:` line."""
    instruction: str = ""
    """Text appended to each problem of `path`, such as how to mark the final answer."""
    max_prompt_length: int = 8
    """Longest prompt, in tokens; longer problems are left out and counted."""
    task: Literal["add", "subtract", "mixed"] = "add"
    """Family of the generated tasks."""
    digits: int = 2
    """Difficulty of the generated tasks: digits of the operands, 1 to 4."""
    format: Literal["worked", "text"] = "worked"
    """Warm-start data: `worked` solves each prompt step by step (some steps wrong); `text` is a mixed corpus to continue."""
    eval_prompts: int = 64
    """Held-out problems for `eval/exact_match`."""

    def __post_init__(self) -> None:
        require(1 <= self.digits <= 4, f"data.digits is {self.digits}; 1 to 4")
        require(self.max_prompt_length >= 2, f"data.max_prompt_length is {self.max_prompt_length}; at least 2")
        require(self.eval_prompts >= 1, f"data.eval_prompts is {self.eval_prompts}; at least 1")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices as `data` x `tensor`."""

    data: int = 0
    """Shards of the rows (and of the stored weights); 0: as many as fit the devices."""
    tensor: int = 1
    """Shards of heads, ffn and vocabulary."""
    shard_above: int = 2**20
    """Weights with at least so many elements are stored sharded over `data` too; gathering smaller ones costs more than it saves."""

    def __post_init__(self) -> None:
        for name, least in (("data", 0), ("tensor", 1), ("shard_above", 0)):
            require(getattr(self, name) >= least, f"mesh.{name} is {getattr(self, name)}; at least {least}")


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised warm start of the embedded model (`train_sft`)."""

    steps: int = 360
    """Updates; 0 starts from random weights."""
    rows: int = 64
    """Sequences a batch."""
    learning_rate: float = 4e-3
    """Peak AdamW learning rate; cosine decay to a tenth."""
    wrong_steps: float = 0.3
    """Share of worked steps with a wrong digit, so that the start is imperfect."""

    def __post_init__(self) -> None:
        require(self.steps >= 0, f"sft.steps is {self.steps}; 0 or more")
        require(self.rows >= 1, f"sft.rows is {self.rows}; at least 1")
        require(0 <= self.wrong_steps < 1, f"sft.wrong_steps is {self.wrong_steps}; it must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Offline training of the draft on the policy's own responses (`train_draft`)."""

    samples: int = 2048
    """Responses sampled from the policy on the training prompts; the last sixteenth, at least a batch, is held out to measure the draft."""
    text: str = ""
    """Train on this file instead: JSON lines with a column `text`, or `generic` for the built-in mixed corpus."""
    steps: int = 300
    """Updates; 0 keeps random weights."""
    rows: int = 64
    """Sequences a batch."""
    learning_rate: float = 1e-2
    """Peak AdamW learning rate; cosine decay to a tenth."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("rows", 1), ("samples", 1)):
            require(getattr(self, name) >= least, f"offline.{name} is {getattr(self, name)}; at least {least}")
        batch = f"offline.samples {self.samples} fit one batch of offline.rows {self.rows}, which is held out"
        require(self.samples > self.rows or bool(self.text), f"{batch}; at least {self.rows + 1}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run."""

    steps: int = 80
    """Batches to generate and learn from."""
    seed: int = 0
    """Seed of weights, data order and sampling."""
    workdir: str = ""
    """Folder of the run; empty: runs/NAME-SCALE."""
    staged: bool = False
    """Run the phases one by one (seconds for each) instead of as one program; same numbers."""
    save_every: int = 20
    """Batches between checkpoints (the last is always saved)."""
    eval_every: int = 20
    """Batches between held-out evaluations (first and last always)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "eval_every"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; at least 1")


_MESH = ("mesh.data", "mesh.tensor", "mesh.shard_above")
FREE_ON_RESUME = frozenset({"steps", "workdir", "staged", "save_every", "eval_every", "rollout.slice_rounds", *_MESH})
"""Keys that may differ when a run is resumed: they change where and how long it runs, not what it computes."""


def to_json(config: Config) -> dict[str, Any]:
    """Returns the config as nested plain values, for `config.json`."""
    return json.loads(json.dumps(asdict(config)))  # tuples become lists, as they will be when read back


def from_json(saved: Mapping[str, Any]) -> Config:
    """Returns the config that `to_json` gave.

    Raises:
      ConfigError: a key is missing or unknown (another version wrote it), or a value is bad or of another type.
    """
    here, there = _flat(to_json(Config())), _flat(saved)
    missing, unknown = ", ".join(key for key in here if key not in there), ", ".join(key for key in there if key not in here)
    differing = [f"it lacks {missing}" if missing else "", f"it has {unknown}, which is unknown here" if unknown else ""]
    another = f"the config was written by another version of jaxspec: {'; '.join(filter(None, differing))}; use that version"
    require(not missing and not unknown, another)
    return _filled(Config(), saved)


def _filled(default: Any, saved: Mapping[str, Any], prefix: str = "") -> Any:
    types, values = get_type_hints(type(default)), {}
    for key, value in saved.items():
        part, wanted = getattr(default, key), types[key]
        if is_dataclass(part):
            values[key] = _filled(part, value, f"{prefix}{key}.")
        else:
            require(_fits(value, wanted), f"{prefix}{key} is {value!r}; it must be {_named(wanted)}")
            values[key] = float(value) if wanted is float else tuple(value) if isinstance(value, list) else value
    return type(default)(**values)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value of JSON is of a setting's type."""
    if get_origin(wanted) is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(wanted)[0]) for item in value)
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    return type(value) is wanted or (wanted is float and type(value) is int)


def _named(wanted: Any) -> str:
    """A setting's type, in words."""
    if get_origin(wanted) is tuple:
        return f"a list of {get_args(wanted)[0].__name__}"
    return f"one of {', '.join(get_args(wanted))}" if get_origin(wanted) is Literal else f"of type {wanted.__name__}"


def differing_keys(saved: Mapping[str, Any], config: Config, free: frozenset[str] = FREE_ON_RESUME) -> list[str]:
    """Lists the settings outside `free` that differ from a saved `to_json`, each as `key: saved -> now`."""
    before, now = _flat(saved), _flat(to_json(config))
    pairs = {key: (before.get(key, "(absent)"), now.get(key, "(absent)")) for key in before | now if key not in free}
    return [f"{key}: {was} -> {value}" for key, (was, value) in pairs.items() if was != value]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    nested = [_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value} for key, value in tree.items()]
    return {key: value for part in nested for key, value in part.items()}
