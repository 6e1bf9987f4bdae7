"""Settings of rewards: what a response is paid for, and the processes that find out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxspec.inputs.checked import Checked, Range, require
from jaxspec.inputs.spec import Count, Natural, Positive

RewardPart = Literal["answer", "stated", "thought", "function"]
Weight = Annotated[float, Range()]


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Checked, prefix="reward."):
    """What a response is paid for."""

    verifier: Literal["exact", "math"] = "exact"
    """When an answer equals the reference: as text and number; or also as mathematics, by
    math-verify (extra `math`), in processes whose time is bounded."""
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
