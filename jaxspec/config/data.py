"""Settings of data and rewards: what is asked, and what a response is paid for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxspec.inputs.checked import Checked, Range, require
from jaxspec.inputs.spec import Count, Natural, Positive
from jaxspec.rewards.extract import Style

RewardPart = Literal["answer", "stated", "thought", "function"]
Weight = Annotated[float, Range()]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked, prefix="data."):
    """Prompts with checkable answers: generated tasks, or rows of a file."""

    path: str = ""
    """Training problems: JSON lines, or parquet (extra `parquet`); empty: generated tasks."""
    eval_path: str = ""
    """Held-out problems, in such a file, too; empty: the last `eval_prompts` rows of `path`."""
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
    last `Answer:` line, in `either` of these two, in the last block of `code`; `dapo`: DAPO's own
    rule for that line and what equals it, which is stricter (`42.` is not 42)."""
    instruction: str = ""
    """Text appended to each problem of `path`, such as how to mark the final answer. With
    answer_style code, {test} in it stands for the first of a row's asserts, which names the
    function."""
    max_prompt_length: Annotated[int, Range(least=2)] = 8
    """Longest prompt, in tokens; longer problems are left out and counted."""
    task: Literal["add", "subtract", "mixed", "programs"] = "add"
    """Family of the generated tasks: arithmetic, or `programs`: functions to write from a list of
    steps, in answer_style code."""
    digits: Annotated[int, Range(least=1, most=4)] = 2
    """Difficulty of the generated tasks: digits of the operands, or steps of a program, 1 to
    4."""
    eval_prompts: Count = 64
    """Held-out problems for `eval/exact_match`."""

    def check(self) -> None:
        require(
            self.prompt_format in ("chat", "raw") or "{problem}" in self.prompt_format,
            f"data.prompt_format is {self.prompt_format!r}; it must be chat, raw, or a text with"
            " {problem} in it",
        )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Checked, prefix="reward."):
    """What a response is paid for."""

    verifier: Literal["exact", "math", "code"] = "exact"
    """When an answer is right: `exact`: it equals the reference as text or number; `math`: or as
    mathematics, by math-verify (extra `math`); `code`: as a program, the reference's tests pass."""
    run_code: bool = False
    """Run programs that the policy writes, which `code` needs."""
    function: str = ""
    """A function of your own, as package.module:name or file.py:name: function(prompts, responses,
    answers, rows), lists of one length, returns a number for each, or (number, outcome); may be
    async."""
    parts: tuple[RewardPart, ...] = ()
    """What is added up: `answer` is 1 where the verifier accepts it, `stated` where there is one in
    data.answer_style, `thought` where <think>...</think> comes first, once, and something after it;
    `function`. Empty: the function if there is one, else the answer."""
    weights: tuple[Weight, ...] = ()
    """Of each of the parts; empty: 1."""
    workers: Natural = 0
    """Processes of each process of the run; 0: a core less than there are, at most 8."""
    deadline: Positive = 3.0
    """Seconds for one answer, or one call of the function. An answer that the verifier is late with
    counts as wrong, as `timeout`; rows that the function is late with are left out."""
    rows: Count = 32
    """Responses that the function is called with, at most."""
    max_failed: Annotated[float, Range(least=0, most=1)] = 0.1
    """Share of a rollout's responses that the function may fail on before the run ends."""

    def check(self) -> None:
        require(
            self.verifier != "code" or self.run_code,
            "reward.verifier code runs programs that the policy writes, in processes that are"
            " contained as far as this system can (docs/rewards.md); say so with"
            " --reward.run_code",
        )
        named, given = bool(self.function), bool(self.parts)
        require(
            not given or named == ("function" in self.parts),
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
