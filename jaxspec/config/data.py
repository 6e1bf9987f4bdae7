"""Settings of data, rewards and evaluation: what is asked, what a response is paid for, and how the
policy is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxspec.config.rollout import Temperature, require_stop_strings
from jaxspec.inputs.checked import CheckedConfig, Range, require
from jaxspec.inputs.spec import Count, Natural, Positive
from jaxspec.rewards.extract import Style

RewardPart = Literal["answer", "stated", "thought", "function"]
Weight = Annotated[float, Range()]


@dataclass(frozen=True, kw_only=True)
class DataConfig(CheckedConfig, prefix="data."):
    """Prompts with checkable answers: generated tasks, or rows of a file."""

    path: str = ""
    """Training problems: JSON lines, or parquet (extra `parquet`), in a file; in files of a dataset
    on the Hugging Face hub, OWNER/NAME:GLOB (OWNER/NAME where it has one); or of a folder,
    FOLDER:GLOB. Empty: generated tasks."""
    eval_path: str = ""
    """Held-out problems, in such files, too; empty: the last `eval_prompts` rows of `path`."""
    tokenizer: str = ""
    """Folder with a Hugging Face tokenizer.json (and tokenizer_config.json); empty: that of
    model.path, else the built-in characters."""
    prompt_column: str = "question"
    """Column of the problem: its text, or the messages of a chat, of which those up to the last of
    the user are asked. A dot leads into an object: a.b."""
    answer_column: str = "answer"
    """Column of the reference answer, with dots as well."""
    prompt_format: str = "chat"
    """How a problem becomes a prompt: `chat`: by the tokenizer's chat template; `raw`: as it is,
    for a model that was only taught to go on; or a text of your own with {problem} in it."""
    answer_style: Style = "hash"
    """Where the final answer stands: after the last `#` (or `####`), in the last \\boxed{}, on the
    last `Answer:` line, in `either` of these two, in the last block of `code`; `number`: the last
    number of the text; `dapo`: DAPO's own rule for that line and what equals it, which is stricter
    (`42.` is not 42)."""
    instruction: str = ""
    """Text appended to each problem of `path`, such as how to mark the final answer. With
    answer_style code, {test} in it stands for the first of a row's asserts, which names the
    function."""
    max_prompt_length: Annotated[int, Range(min=2)] = 8
    """Longest prompt, in tokens; longer problems are left out and counted."""
    task: Literal["add", "subtract", "mixed", "programs"] = "add"
    """Family of the generated tasks: arithmetic, or `programs`: functions to write from a list of
    steps, in answer_style code."""
    digits: Annotated[int, Range(min=1, max=4)] = 2
    """Difficulty of the generated tasks: digits of the operands, or steps of a program, 1 to
    4."""
    eval_prompts: Count = 64
    """Held-out problems, at most."""

    def check(self) -> None:
        require(
            self.prompt_format in ("chat", "raw") or "{problem}" in self.prompt_format,
            f"data.prompt_format is {self.prompt_format!r}; it must be chat, raw, or a text with"
            " {problem} in it",
        )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(CheckedConfig, prefix="reward."):
    """What a response is paid for."""

    verifier: Literal["exact", "math", "code"] = "exact"
    """When an answer is right: `exact`: it equals the reference as text or number; `math`: or as
    mathematics, by math-verify (extra `math`); `code`: as a program, the reference's tests pass."""
    run_code: bool = False
    """Run programs that the policy writes, which `code` needs."""
    function: str = ""
    """A function of your own, as package.module:name or file.py:name: function(prompts, responses,
    answers, rows), lists of one length, returns a number for each, or (number, outcome); may be
    async. Functions with the parameters of verl's compute_score or of TRL's are called as there."""
    parts: tuple[RewardPart, ...] = ()
    """What is added up: `answer` is 1 where the verifier accepts it, `stated` where there is one in
    data.answer_style, `thought` where <think>...</think> comes first, once, and something after it;
    `function`. Empty: the function if there is one, else the answer."""
    weights: tuple[Weight, ...] = ()
    """Of each of the parts; empty: 1."""
    workers: Natural = 0
    """Processes of each process of the run, at most 4 for each core and one for each 512 MiB of
    memory; 0: a core less than there are, at most 8."""
    deadline: Positive = 3.0
    """Seconds for one answer, or one call of the function. An answer that the verifier is late with
    counts as wrong, as `timeout`; rows that the function is late with are left out."""
    rows: Count = 32
    """Responses that the function is called with, at most."""
    max_failed: Annotated[float, Range(min=0, max=1)] = 0.1
    """Share of a rollout's responses that nothing may be known of before the run ends: the function
    failed on them, or others of the batch took all its time."""

    def check(self) -> None:
        require(
            self.verifier != "code" or self.run_code,
            "reward.verifier code runs programs that the policy writes, in processes that are"
            " contained as far as this system can (docs/rewards.md); say so with"
            " --reward.run_code",
        )
        has_function, has_parts = bool(self.function), bool(self.parts)
        require(
            not has_parts or has_function == ("function" in self.parts),
            f"reward.parts is {', '.join(self.parts)} and reward.function {self.function!r}; name"
            " a function and the part `function`, or neither",
        )
        require(
            len(set(self.parts)) == len(self.parts),
            f"reward.parts is {', '.join(self.parts)}; name each part once",
        )
        require(
            len(self.weights) in (0, len(self.all_parts)),
            f"reward.weights has {len(self.weights)} numbers for the parts"
            f" {', '.join(self.all_parts)}; give one for each, or none",
        )

    @property
    def all_parts(self) -> tuple[RewardPart, ...]:
        """What is added up, by default too."""
        return self.parts or (("function",) if self.function else ("answer",))

    @property
    def all_weights(self) -> tuple[float, ...]:
        """Of each of them."""
        return self.weights or (1.0,) * len(self.all_parts)


@dataclass(frozen=True, kw_only=True)
class SetConfig(CheckedConfig, prefix="set."):
    """A named set of problems with rewards of its own, for `mixture` and `eval.sets`."""

    name: str
    """What metrics and results call it: letters, digits, `_`, `-` and dots."""
    weight: Positive = 1.0
    """How often its problems are asked, as a share of the sum of the weights of a mixture."""
    data: DataConfig = field(default_factory=DataConfig)
    """Its problems; data.tokenizer, data.prompt_format and data.max_prompt_length are the run's."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What its responses are paid for; reward.workers, reward.deadline and reward.max_failed are
    the run's."""

    def check(self) -> None:
        require(
            re.fullmatch(r"[\w.-]+", self.name) is not None,
            f"a set is called {self.name!r}; a name has letters, digits, `_`, `-` and dots",
        )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(CheckedConfig, prefix="eval."):
    """How the policy is measured: in a run every so often, and by `jaxspec.evaluate`."""

    every: Count = 20
    """Batches between evaluations (first and last always)."""
    samples: Natural = 0
    """Answers to each problem (k of avg@k, pass@k and cons@k); 0: batch.group_size. In a run,
    multiples of that take no other program."""
    temperature: Temperature | Literal["same"] = "same"
    """Sampling temperature; `same`: rollout.temperature. In a run, another one is one more program
    to compile, and so are all settings down to `stop`."""
    top_k: Natural | Literal["same"] = "same"
    """As rollout.top_k."""
    top_p: Annotated[float, Range(above=0, max=1)] | Literal["same"] = "same"
    """As rollout.top_p."""
    min_new_tokens: Natural | Literal["same"] = "same"
    """As rollout.min_new_tokens."""
    max_new_tokens: Natural = 0
    """Longest response, in tokens; 0: rollout.max_new_tokens."""
    stop: Literal["same"] | tuple[str, ...] = "same"
    """As rollout.stop; without a text: responses end by their end tokens alone."""
    keep_best: str = ""
    """A metric, such as held_out/avg@8: the checkpoint that has most of it is kept in the folder
    `best` of the run. Empty: none is."""
    sets: tuple[SetConfig, ...] = ()
    """Named sets of problems, of which all are asked; a config file lists them, and the command
    line may change them: --eval.sets.0.data.path FILE. Empty: the held-out problems."""

    def check(self) -> None:
        if self.stop != "same":
            require_stop_strings("eval.stop", self.stop)
        require_unique(self.sets, "eval.sets")
        require(
            all(dataset.weight == 1 for dataset in self.sets),
            "eval.sets have weights, which only a mixture has a use for; leave them out",
        )


def require_unique(sets: tuple[SetConfig, ...], setting: str) -> None:
    """Refuses sets of the same name."""
    names = [dataset.name for dataset in sets]
    require(
        len(set(names)) == len(names),
        f"{setting} has the names {', '.join(names)}; give each a name of its own",
    )
