"""Every setting, typed and frozen; `load_config` (files, scales, overrides); and `check`, for what crosses classes."""

from __future__ import annotations

import argparse
import difflib
import math
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro


class ConfigError(ValueError):
    """Bad input that the user can mend; programs print it without a traceback and exit with code 2."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Qwen3-architecture decoder."""

    vocab: int = 40
    """Rows of the embedding table; at least the tokenizer's size (published models pad it)."""
    layers: int = 12
    """Decoder layers; EAGLE-3 reads three of them, so at least 4."""
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
            _require(getattr(self, name) > 0, f"model.{name} is {getattr(self, name)}; it must be positive")
        _require(self.layers >= 4, f"model.layers is {self.layers}; EAGLE-3 taps need at least 4")
        _require(self.heads % self.kv_heads == 0, f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}")
        _require(self.head_size % 2 == 0, f"model.head_size is {self.head_size}; rotary positions need an even size")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The draft, and how it learns beside the policy."""

    kind: Literal["eagle3", "none"] = "eagle3"
    """`eagle3` drafts with a one-layer EAGLE-3 head; `none` is plain decoding through the same code."""
    draft_length: int = 3
    """Tokens drafted a round (K); a round keeps 1 to K+1 tokens."""
    online: bool = True
    """Whether the draft is trained during the run, on the learner's own detached hidden states."""
    ttt_steps: int = 3
    """Depths of the training-time-test unroll (EAGLE-3): step i trains on the draft's own states."""
    decay: float = 0.8
    """Weight of depth i in the draft loss is `decay**i`."""
    learning_rate: float = 4e-4
    """AdamW learning rate of the online draft update."""
    grad_clip: float = 0.5
    """Global-norm clip of the draft's gradient, apart from the policy's."""

    def __post_init__(self) -> None:
        remedy = "at least 1 (use --rollout.draft.kind none for plain decoding)"
        _require(self.draft_length >= 1, f"rollout.draft.draft_length is {self.draft_length}; {remedy}")
        _require(self.ttt_steps >= 1, f"rollout.draft.ttt_steps is {self.ttt_steps}; at least 1")
        _require(0 < self.decay <= 1, f"rollout.draft.decay is {self.decay}; it must be in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are generated."""

    max_new_tokens: int = 28
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; rollout and learner divide the logits by it alike."""
    verify: Literal["token", "coupled"] = "token"
    """Lossless rule: `token` keeps the most drafts; `coupled` gives exactly the tokens of plain decoding."""
    slice_rounds: int = 8
    """With --staged, rounds between two looks at signals."""
    draft: DraftConfig = field(default_factory=DraftConfig)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "slice_rounds"):
            _require(getattr(self, name) >= 1, f"rollout.{name} is {getattr(self, name)}; at least 1")
        _require(self.temperature > 0, f"rollout.temperature is {self.temperature}; it must be above 0")


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
        _require(self.prompts >= 1, f"grpo.prompts is {self.prompts}; at least 1")
        _require(self.group_size >= 2, f"grpo.group_size is {self.group_size}; a group advantage needs at least 2 responses")
        _require(self.learning_rate > 0, f"grpo.learning_rate is {self.learning_rate}; it must be positive")


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
        _require(1 <= self.digits <= 4, f"data.digits is {self.digits}; 1 to 4")
        _require(self.max_prompt_length >= 2, f"data.max_prompt_length is {self.max_prompt_length}; at least 2")
        _require(self.eval_prompts >= 1, f"data.eval_prompts is {self.eval_prompts}; at least 1")


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
            _require(getattr(self, name) >= least, f"mesh.{name} is {getattr(self, name)}; at least {least}")


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
        _require(self.steps >= 0, f"sft.steps is {self.steps}; 0 or more")
        _require(self.rows >= 1, f"sft.rows is {self.rows}; at least 1")
        _require(0 <= self.wrong_steps < 1, f"sft.wrong_steps is {self.wrong_steps}; it must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Offline training of the draft on the policy's own responses (`train_draft`)."""

    samples: int = 2048
    """Responses sampled from the policy on the training prompts."""
    steps: int = 300
    """Updates; 0 keeps random weights."""
    rows: int = 64
    """Sequences a batch."""
    learning_rate: float = 3e-3
    """Peak AdamW learning rate; cosine decay to a tenth."""

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("steps", 0), ("rows", 1)):
            _require(getattr(self, name) >= least, f"offline.{name} is {getattr(self, name)}; at least {least}")


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
    offline: OfflineConfig = field(default_factory=OfflineConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "eval_every"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; at least 1")


_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), _PACKAGE / "configs")
"""The configs that come with jaxspec: inside an installed package, beside the package in a checkout."""

_MESH = ("mesh.data", "mesh.tensor", "mesh.shard_above")
FREE_ON_RESUME = frozenset({"steps", "workdir", "staged", "save_every", "eval_every", "rollout.slice_rounds", *_MESH})
"""Keys that may differ when a run is resumed: they change where and how long it runs, not what it computes."""


def load_config(argv: Sequence[str], program: str, description: str) -> tuple[Config, str]:
    """Reads `--config NAME.py[:SCALE]` and the overrides beside it, for `python -m jaxspec.<program>`.

    Returns the config and the run's name such as `rl_think-tiny`; an empty `workdir` becomes `runs/` and that name.

    Raises:
      ConfigError: no config, an unknown config or scale, or a draft setting where there is no draft.
      SystemExit: 0 after `--help`; 2 after a message, for a setting or value that does not exist.
    """
    command = f"python -m jaxspec.{program}"
    parser = argparse.ArgumentParser(prog=command, usage="%(prog)s --config NAME.py[:SCALE] ...", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    known, overrides = parser.parse_known_args(argv)
    if known.config:
        file, _, scale = known.config.partition(":")
        default, name = read_config(_find(file), scale)
    else:
        found = f"configs found: {', '.join(_found())}"
        _require(bool({"-h", "--help"} & set(overrides)), f"no --config; {found}; try {command} --config rl_think.py, or {command} --help")
        default, name = Config(), ""
    prog = f"{command} --config {known.config or 'NAME.py[:SCALE]'}"
    about, flat = f"{description}\n\n{_guide(command)}", (tyro.conf.AvoidSubcommands,)
    config = tyro.cli(Config, prog=prog, description=about, args=overrides, default=default, config=flat, use_underscores=True)
    named = {word.partition("=")[0] for word in overrides} - {"--rollout.draft.kind"}
    foreign = ", ".join(sorted(word for word in named if word.startswith("--rollout.draft.")))
    idle = config.rollout.draft.kind == "none" and foreign
    _require(not idle, f"rollout.draft.kind is none, which has no use for {foreign}; leave it out, or choose --rollout.draft.kind eagle3")
    return (config if config.workdir else replace(config, workdir=f"runs/{name}")), name


def read_config(path: Path, scale: str = "") -> tuple[Config, str]:
    """Runs a config file and returns its config at `scale` (empty: the first of its SCALES) with the run's name.

    Raises:
      ConfigError: the file is not Python, lacks SCALES or get_config, or does not list the scale.
    """
    try:
        names = runpy.run_path(str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path} is not a Python file: {error}") from error
    scales = names.get("SCALES", ())
    _require(bool(scales) and "get_config" in names, f"{path} must define SCALES and get_config(scale), as rl_think.py does")
    scale = scale or scales[0]
    _require(scale in scales, f"{path} has no scale {scale!r}; {_nearest(scale, scales)}it has {', '.join(scales)}")
    config = names["get_config"](scale)
    _require(isinstance(config, Config), f"{path}: get_config({scale!r}) returns a {type(config).__name__}, not a jaxspec.config.Config")
    return config, f"{path.stem}-{scale}"


def _find(file: str) -> Path:
    for folder in (Path(), Path("configs"), _SHIPPED):
        if (folder / file).is_file():
            return folder / file
    hint = _nearest(Path(file).name, _found())
    raise ConfigError(f"--config {file}: no such file here, in configs/ or in {_SHIPPED}; {hint}configs found: {', '.join(_found())}")


def _found() -> list[str]:
    return sorted({path.name for folder in (Path("configs"), _SHIPPED) for path in folder.glob("[!_]*.py")})


def _nearest(word: str, words: Sequence[str]) -> str:
    return "".join(f"did you mean {match}? " for match in difflib.get_close_matches(word, words, n=1))


def _guide(command: str) -> str:
    return f"""A config file names every setting for some scales (the first is the default); options after it change single settings.
NAME.py is looked up as given, then in configs/, then in {_SHIPPED}.
Configs found: {", ".join(_found())}. Examples:
  {command} --config rl_think.py --rollout.draft.draft_length 5 --grpo.group_size 32
  {command} --config rl_think.py --rollout.draft.kind none    (plain decoding)
  {command} --config rl_think.py:qwen3_0.6b --data.path train.jsonl --data.tokenizer FOLDER
  {command} --config rl_think.py:qwen3_8b --help    (the defaults of that config and scale)"""


def check(config: Config, devices: int, processes: int = 1) -> tuple[int, int]:
    """Checks what crosses classes and resolves the mesh for `devices` in all, over `processes`.

    Returns the mesh's (data, tensor); `mesh.data` 0 becomes the most shards that fit the devices and every batch.

    Raises:
      ConfigError: names the numbers that do not go together, and some that do.
    """
    _require(devices % processes == 0, f"{processes} processes do not divide {devices} devices; give each process the same number")
    tensor = config.mesh.tensor
    meshes = ", ".join(f"{devices // size} x {size}" for size in _divisors(devices))
    fits = f"meshes (data x tensor) that fit {devices} devices: {meshes}"
    _require(devices % tensor == 0, f"mesh.tensor {tensor} does not divide {devices} devices; {fits}")
    for name in ("heads", "kv_heads", "ffn", "vocab"):
        size = getattr(config.model, name)
        _require(size % tensor == 0, f"model.{name} {size} does not split over mesh.tensor {tensor}; change one of the two")
    shards = devices // tensor
    rows, prompts = _rows(config), config.grpo.prompts
    automatic = shards if processes > 1 else max(size for size in _divisors(math.gcd(*rows.values())) if size <= shards)
    data = config.mesh.data or automatic
    asked = f"mesh.data {data} x mesh.tensor {tensor} = {data * tensor} devices, but there are {devices}"
    _require(config.mesh.data in (0, shards), f"{asked}; {fits}, and --mesh.data 0 chooses by itself")
    groups = "a group lives whole on one shard"
    _require(
        prompts >= data, f"grpo.prompts {prompts} is fewer than {data} data shards ({groups}); raise it to {data} or use fewer devices"
    )
    for key, count in rows.items():
        near = max(count // data, 1) * data
        _require(count % data == 0, f"{key} {count} is not a multiple of {data} data shards; {near} or {near + data} would fit")
    rollout, draft, source = config.rollout, config.rollout.draft, config.data
    lengths = f"rollout.draft.draft_length {draft.draft_length} and rollout.max_new_tokens {rollout.max_new_tokens}"
    shorter = draft.kind == "none" or draft.draft_length < rollout.max_new_tokens
    _require(shorter, f"{lengths}: a draft must be shorter than a response; lower the first or raise the second")
    remedy = "generated tasks answer after `#`: give --data.path FILE.jsonl and --data.tokenizer FOLDER, or --data.answer_style hash"
    _require(bool(source.path) or source.answer_style == "hash", f"data.answer_style {source.answer_style} without data.path; {remedy}")
    return data, tensor


def _rows(config: Config) -> dict[str, int]:
    """What every batch of the run divides over the data shards; 0 where nothing is trained."""
    trained = config.offline.steps and config.rollout.draft.kind != "none"
    sft, offline = config.sft.steps and config.sft.rows, trained and config.offline.rows
    return {"grpo.prompts": config.grpo.prompts, "sft.rows": sft, "offline.rows": offline}


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def to_json(config: Config) -> dict[str, Any]:
    """Returns the config as nested plain values, for `config.json`."""
    return asdict(config)


def differing_keys(saved: Mapping[str, Any], config: Config, free: frozenset[str] = FREE_ON_RESUME) -> list[str]:
    """Lists the settings outside `free` that differ from a saved `to_json`, each as `key: saved -> now`."""
    before, now = _flat(saved), _flat(to_json(config))
    pairs = {key: (before.get(key, "(absent)"), now.get(key, "(absent)")) for key in before | now if key not in free}
    return [f"{key}: {was} -> {value}" for key, (was, value) in pairs.items() if was != value]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    nested = [_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value} for key, value in tree.items()]
    return {key: value for part in nested for key, value in part.items()}
