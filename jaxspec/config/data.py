"""Settings of data, rewards and evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxspec.config.rollout import Temperature, require_valid_stop_strings
from jaxspec.inputs.checked import CheckedConfig, Range, require
from jaxspec.inputs.spec import Count, Natural, Positive
from jaxspec.rewards.extract import Style

RewardPart = Literal["answer", "stated", "thought", "function"]
# Finite, but of any sign: a negative weight is a penalty.
Weight = Annotated[float, Range()]


@dataclass(frozen=True, kw_only=True)
class DataConfig(CheckedConfig, prefix="data."):
    """Prompts with checkable answers.

    They are generated tasks, or rows of a file.
    """

    path: str = ""
    """File with training problems, as JSON lines or parquet (extra `parquet`); empty = generated
    tasks. FOLDER:GLOB names files of a folder, and OWNER/NAME:GLOB files of a dataset on the
    Hugging Face hub. A dataset with one data file needs no GLOB."""
    eval_path: str = ""
    """File with held-out problems, in the same forms. If empty, the last `eval_prompts` rows of
    `path` are held out."""
    tokenizer: str = ""
    """Folder with a Hugging Face tokenizer.json (and tokenizer_config.json). If empty, the
    tokenizer of model.path is used, or without one the built-in characters."""
    prompt_column: str = "question"
    """Column with the problem: text, or chat messages up to the last user turn. A dot leads into an
    object, as in a.b."""
    answer_column: str = "answer"
    """Column with the reference answer. Dots lead into objects, too."""
    prompt_format: str = "chat"
    """Form of a prompt. `chat` applies the tokenizer's chat template. `raw` is the plain problem,
    for base models, which have never seen a template. Any other text must contain {problem}, which
    the problem replaces."""
    answer_style: Style = "hash"
    """Place of the final answer: after the last `#` or `####` (hash), in the last \\boxed{}
    (boxed), on the last `Answer:` line (answer_line), in either of these two (either), in the last
    block of code (code), or the last number of the text (number). `dapo` is DAPO's own rule for
    that line and for equality. It is stricter: `42.` is not 42."""
    instruction: str = ""
    """Text appended to each problem of `path`, for example how to mark the final answer. With
    answer_style code, {test} in it stands for the first assert of the row, which names the
    function."""
    max_prompt_length: Annotated[int, Range(min=2)] = 8
    """Longest prompt, in tokens. Longer problems are left out and counted."""
    task: Literal["add", "subtract", "mixed", "programs"] = "add"
    """Family of generated tasks: arithmetic, or `programs`. The latter are functions to write from
    a list of steps, and need answer_style code."""
    digits: Annotated[int, Range(min=1, max=4)] = 2
    """Difficulty of generated tasks, 1 to 4: digits of the operands, or steps of a program."""
    eval_prompts: Count = 64
    """Maximum number of held-out problems."""

    def check(self) -> None:
        require(
            # A literal type would exclude the user's own texts.
            self.prompt_format in ("chat", "raw") or "{problem}" in self.prompt_format,
            f"data.prompt_format is {self.prompt_format!r}; it must be chat, raw, or a text with"
            " {problem} in it",
        )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(CheckedConfig, prefix="reward."):
    """Rewards of responses."""

    verifier: Literal["exact", "math", "code"] = "exact"
    """Rule for correct answers: equal text or numbers (exact), also mathematical equality by
    math-verify, extra `math` (math), or a program that passes the tests of the reference (code)."""
    run_code: bool = False
    """Permission to run programs that the policy writes. `code` needs it, since such programs are
    contained only as far as the system can."""
    function: str = ""
    """Your own reward function, as package.module:name or file.py:name. It is called as
    function(prompts, responses, answers, rows), with lists of one length. It returns for each
    response a number, or a pair (number, outcome). It may be async. Functions with the parameters
    of verl's compute_score, or of TRL's rewards, are called as in those projects."""
    parts: tuple[RewardPart, ...] = ()
    """Parts of the reward, which are added. `answer` is 1 if the verifier accepts the answer.
    `stated` is 1 if there is an answer in data.answer_style. `thought` is 1 if the response begins
    with one <think>...</think> and continues after it. `function` is the value of your function. If
    empty, the reward is the function's value, or without a function the answer's."""
    weights: tuple[Weight, ...] = ()
    """Weight of each part. If empty, all are 1."""
    workers: Natural = 0
    """Worker processes per process of the run, at most 4 per core and one per 512 MiB of memory. 0
    = one less than there are cores, at most 8."""
    deadline: Positive = 3.0
    """Seconds for one answer, or for one call of the function. An answer that takes longer counts
    as wrong, as `timeout`, since otherwise a hanging verifier would pay. Rows of a late function
    are left out."""
    rows: Count = 32
    """Maximum number of responses per call of the function."""
    max_failed: Annotated[float, Range(min=0, max=1)] = 0.1
    """Share of a rollout's responses that may have no reward before the run ends. They have none if
    the function fails on them, or if other responses of the batch take all its time."""

    def check(self) -> None:
        require(
            # Running foreign programs needs the user's consent, not only a verifier's name.
            self.verifier != "code" or self.run_code,
            "reward.verifier code runs programs that the policy writes, in processes that are"
            " contained as far as this system can (docs/rewards.md); say so with"
            " --reward.run_code",
        )
        # Without parts, the function is the only part.
        has_function, has_parts = bool(self.function), bool(self.parts)
        require(
            # A function without its part would never be called, and a part without function has no
            # value.
            not has_parts or has_function == ("function" in self.parts),
            f"reward.parts is {', '.join(self.parts)} and reward.function {self.function!r}; name"
            " a function and the part `function`, or neither",
        )
        require(
            # A repeated part would count twice. Weights are the way to say so.
            len(set(self.parts)) == len(self.parts),
            f"reward.parts is {', '.join(self.parts)}; name each part once",
        )
        require(
            # Uses the resolved parts, since weights can also be given for the default part.
            len(self.weights) in (0, len(self.all_parts)),
            f"reward.weights has {len(self.weights)} numbers for the parts"
            f" {', '.join(self.all_parts)}; give one for each, or none",
        )

    @property
    def all_parts(self) -> tuple[RewardPart, ...]:
        """Parts of the reward, with the default resolved."""
        return self.parts or (("function",) if self.function else ("answer",))

    @property
    def all_weights(self) -> tuple[float, ...]:
        """Weight of each part, with the default resolved."""
        return self.weights or (1.0,) * len(self.all_parts)


@dataclass(frozen=True, kw_only=True)
class SetConfig(CheckedConfig, prefix="set."):
    """Named set of problems with its own rewards.

    `mixture` and `eval.sets` list such sets.
    """

    name: str
    """Name in metrics and results: letters, digits, `_`, `-` and dots."""
    weight: Positive = 1.0
    """Frequency of its problems, relative to the sum of weights in a mixture."""
    data: DataConfig = field(default_factory=DataConfig)
    """Problems. data.tokenizer, data.prompt_format and data.max_prompt_length are those of the
    run."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rewards. reward.workers, reward.deadline and reward.max_failed are those of the run."""

    def check(self) -> None:
        require(
            # Names become keys of metrics, where a slash separates parts.
            re.fullmatch(r"[\w.-]+", self.name) is not None,
            f"a set is called {self.name!r}; a name has letters, digits, `_`, `-` and dots",
        )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(CheckedConfig, prefix="eval."):
    """Evaluation during a run, and by `jaxspec.evaluate`."""

    every: Count = 20
    """Batches between evaluations. The first and last batch are always evaluated."""
    samples: Natural = 0
    """Answers per problem, the k of avg@k, pass@k and cons@k (0 = batch.group_size). During a run,
    multiples of batch.group_size reuse the program that trains."""
    temperature: Temperature | Literal["same"] = "same"
    """Sampling temperature. `same` = rollout.temperature. During a run, any other value compiles
    one more program, and so does any change of the settings from here to `stop`."""
    top_k: Natural | Literal["same"] = "same"
    """Like rollout.top_k."""
    top_p: Annotated[float, Range(above=0, max=1)] | Literal["same"] = "same"
    """Like rollout.top_p."""
    min_new_tokens: Natural | Literal["same"] = "same"
    """Like rollout.min_new_tokens."""
    max_new_tokens: Natural = 0
    """Longest response, in tokens. 0 = rollout.max_new_tokens."""
    stop: Literal["same"] | tuple[str, ...] = "same"
    """Like rollout.stop. Without texts, responses end only at end tokens."""
    keep_best: str = ""
    """Metric such as held_out/avg@8, whose best checkpoint is kept in the run's folder `best`. If
    empty, none is kept."""
    sets: tuple[SetConfig, ...] = ()
    """Named sets of problems, all of which are asked. A config file lists them, and the command
    line can change them: --eval.sets.0.data.path FILE. If empty, the held-out problems are
    asked."""

    def check(self) -> None:
        # `same` would otherwise be read as a list of four letters.
        if self.stop != "same":
            require_valid_stop_strings("eval.stop", self.stop)
        require_unique(self.sets, "eval.sets")
        require(
            # Every problem of every set is asked, so weights cannot change anything.
            all(dataset.weight == 1 for dataset in self.sets),
            "eval.sets have weights, which only a mixture has a use for; leave them out",
        )


def require_unique(sets: tuple[SetConfig, ...], setting: str) -> None:
    """Raises ConfigError if two sets share a name."""
    # Metrics and results of two sets with one name would overwrite each other.
    names = [dataset.name for dataset in sets]
    require(
        len(set(names)) == len(names),
        f"{setting} has the names {', '.join(names)}; give each a name of its own",
    )
