"""Settings of generation: sampling, drafts, verification, memory and its schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxspec.drafts.kinds import DraftKind, KindSettings, LookupKind, get_kind
from jaxspec.drafts.lookup.settings import SearchConfig
from jaxspec.inputs.checked import CheckedConfig, Range, require
from jaxspec.inputs.json_keys import format_value, is_valid_utf8
from jaxspec.inputs.spec import Count, Natural

DraftSampling = Literal["argmax", "sample", "auto"]
VerifyRule = Literal["block", "token", "coupled"]
# Logits over a smaller temperature would not be finite.
Temperature = Annotated[float, Range(min=1e-3, max=1000, or_zero=True)]
"""Temperature that divides the logits. 0 = the most likely token."""
# Plain decoding is a kind of its own, not length 0.
DraftLength = Annotated[int, Range(min=1, remedy="rollout.draft.kind none is plain decoding")]
ScheduleKind = Literal["fused", "staged", "pipelined"]
AUTO_LENGTHS = (0, 1, 3, 5)
"""Draft lengths that `auto` compiles. 0 = plain decoding."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig(KindSettings, prefix="rollout.draft."):
    """Draft model or rule, and sampling from it.

    Each section is read by the kind of its name alone.
    """

    kind: DraftKind = "eagle3"
    """Kind of draft: a small head on some of the policy's hidden states (eagle3),
    multi-token-prediction layers (mtp), a small decoder (model), look-up in existing text without a
    learned draft (ngram, history), or plain decoding through the same code (none)."""
    draft_length: DraftLength | Literal["auto"] = 3
    """Tokens drafted per round (K), of which a round commits 1 to K+1. `auto` drafts 0, 1, 3 or 5
    tokens in each round (0, 3 or 5 on accelerators). It takes the length that promises most tokens
    per second, by the acceptance so far and by the cost of rounds on this machine."""
    sampling: DraftSampling = "auto"
    """Sampling of draft tokens: the most likely one (argmax), or by chance at `temperature`
    (sample). `auto` measures the best temperature for each depth during the run, and accepts more
    than argmax."""
    temperature: Temperature = 1.0
    """Draft temperature for `sample`, as a multiple of rollout.temperature."""
    path: str = ""
    """Folder or hub id of a trained draft: an EAGLE-3 head, MTP layers or a small model. Its
    config.json sets sizes and form."""

    def check(self) -> None:
        message = (
            f"rollout.draft.draft_length auto weighs drafts that every round has, and {self.kind}"
            " finds them in some only"
        )
        require(
            # Plain decoding is exempt: it has no length, so `auto` has no effect there.
            not self.length_choices or self.is_learned or not self.is_enabled,
            f"{message}; give a number, such as 5",
        )

    @property
    def length_choices(self) -> tuple[int, ...]:
        """Draft lengths that each round chooses from. Empty if the length is fixed."""
        return AUTO_LENGTHS if self.draft_length == "auto" else ()

    @property
    def max_draft_length(self) -> int:
        """Maximum number of tokens drafted per round."""
        # Buffers must have room for the longest choice.
        return AUTO_LENGTHS[-1] if isinstance(self.draft_length, str) else self.draft_length

    @property
    def is_enabled(self) -> bool:
        """Whether tokens are drafted. False = plain decoding."""
        return self.kind != "none"

    @property
    def is_learned(self) -> bool:
        """Whether the draft has weights."""
        return get_kind(self.kind).learned is not None


@dataclass(frozen=True, kw_only=True)
class LookupConfig(SearchConfig, prefix="rollout.lookup."):
    """Drafts from existing text.

    The text is the row's own, or other answers to its prompt.
    """

    beside: LookupKind = "none"
    """Look-up in addition to a learned draft. A row uses it if it offers a full block, and the
    learned draft otherwise."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(CheckedConfig, prefix="rollout.engine."):
    """Memory and loops of generation.

    Nothing here changes the distribution of tokens. In coupled mode no token changes.
    """

    slots: Count | Literal["auto"] = "auto"
    """Rows that a data shard generates at the same time. Further rows wait until a slot is free.
    `auto` = 256, or fewer if an accelerator's memory holds fewer."""
    page_size: Natural | Literal["auto"] = "auto"
    """Positions per page of the key-value cache. 0 = one page per row, which needs no gathering.
    Smaller pages let the rows of a group share their prompt. `auto` = 64 on accelerators, and 0 on
    CPUs, where that is the fastest."""
    pages: Natural = 0
    """Pages per data shard, if page_size is set. 0 = as many as prompts and slots can need, limited
    on accelerators by their memory. With fewer, rows may be preempted and recomputed later."""
    tail: bool = True
    """Whether the last rows of a batch move to smaller loops, so that a round costs only as much as
    they need. These have a quarter and a sixteenth of the slots, on accelerators an eighth. Without
    them the program compiles faster."""
    stack_layers: bool = False
    """Whether the policy's layers share one compiled body in a loop. This halves compile time,
    which helps deep models and several draft lengths. Rounds are slower: on NVIDIA GPUs by an
    estimated 7 to 15 %, since the loop stays outside CUDA graphs."""
    command_buffers: bool = False
    """Whether programs that generate run as CUDA graphs that contain their loops, so that the host
    reads no condition between rounds. In a fused step this includes the learner's loops. For NVIDIA
    GPUs. Off, because one H200 gave the same tokens and no gain (13.14 and 13.10 ms a round)."""

    def check(self) -> None:
        remedy = "give a page size too, 64 for example, or leave pages 0"
        message = f"rollout.engine.pages is {self.pages}"
        require(
            self.pages == 0 or self.page_size != 0,
            f"{message}, but page_size 0 makes a page of every row; {remedy}",
        )
        require(
            # The size that `auto` resolves to differs between accelerators and CPUs.
            self.pages == 0 or self.page_size != "auto",
            f"{message}, and of what size is left to page_size auto; {remedy}",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(CheckedConfig, prefix="rollout."):
    """Generation of responses.

    `temperature`, `top_k`, `top_p`, `min_p`, `min_new_tokens` and `banned` define the policy's
    distribution, truncated in this order.
    """

    max_new_tokens: Count = 28
    """Longest response, in tokens."""
    min_new_tokens: Natural = 0
    """Tokens before an end token can be sampled."""
    temperature: Temperature = 1.0
    """Sampling temperature, which divides the logits in rollout and learner alike. 0 = the most
    likely token, which is not for training."""
    top_k: Natural = 0
    """Number of most likely tokens to sample from. 0 = all."""
    top_p: Annotated[float, Range(above=0, max=1)] = 1.0
    """Probability that the smallest set of most likely tokens to sample from must reach. 1 = all
    tokens."""
    min_p: Annotated[float, Range(min=0, max=1)] = 0.0
    """Lowest probability to sample, relative to the most likely token (arXiv 2407.01082). 0 = all
    tokens."""
    banned: tuple[Natural, ...] = ()
    """Token ids that are never sampled."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, together with the token that completes one of them. Before
    min_new_tokens they are ignored. Texts have no escapes: in bash a line break is $'\\n'. The name
    of a special token stands for that token."""
    stop_ids: tuple[Natural, ...] = ()
    """Token ids that end a response, in addition to those in the tokenizer's files."""
    enable_thinking: bool = True
    """Value of `enable_thinking` in the chat template. False asks models such as Qwen3 to answer
    without thinking first."""
    verify: VerifyRule = "block"
    """Lossless rule of verification. `block` accepts most drafts. `token` verifies them one by one.
    `coupled` yields exactly the tokens of plain decoding."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)

    def check(self) -> None:
        require_valid_stop_strings("rollout.stop", self.stop)
        message = (
            f"rollout.min_new_tokens {self.min_new_tokens} is not below rollout.max_new_tokens"
            f" {self.max_new_tokens}"
        )
        require(
            # Otherwise the length limit would cut every response before its end token.
            self.min_new_tokens < self.max_new_tokens,
            f"{message}; lower the first or raise the second",
        )

    @property
    def lookup_kind(self) -> str:
        """Look-up in use, alone or next to a draft."""
        # A kind that is a look-up itself takes precedence over `beside`.
        sole_lookup = get_kind(self.draft.kind).lookup_name
        return sole_lookup if sole_lookup != "none" else self.lookup.beside

    def settings_of(self, kind: str) -> Any:
        """Returns the section that a kind of draft reads. None without one."""
        # Look-up kinds share a section, since they can be combined with a learned draft.
        is_lookup = get_kind(kind).lookup_name != "none"
        return self.lookup if is_lookup else getattr(self.draft, kind, None)

    @property
    def past_answers(self) -> int:
        """Number of earlier answers stored per prompt. 0 unless the look-up reads them."""
        # N-grams search the row alone. Storing answers for them would waste memory.
        return self.lookup.past if get_kind(self.lookup_kind).reads_history else 0


def require_valid_stop_strings(name: str, strings: Iterable[str]) -> None:
    """Raises ConfigError for a stop string that is empty or not valid UTF-8."""
    for text in strings:
        require(
            # Responses are matched as bytes of UTF-8. An empty text would end each at once.
            bool(text) and is_valid_utf8(text),
            f"{name} has {format_value(text)}; each must be a text in UTF-8 of a character or more",
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(CheckedConfig, prefix="schedule."):
    """How learning and generation share the devices."""

    kind: ScheduleKind = "fused"
    """`fused` runs a step as one program. `staged` runs each phase as a program of its own, and
    gives its seconds. Same numbers. On accelerators, draft_length `auto` always runs phase by
    phase. `pipelined` generates batches while it learns from earlier ones."""
    lag: Natural = 1
    """Updates by which the weights that sample a batch are behind those that learn from it, with
    `pipelined`. Always exactly as many. 0 = the same numbers as `fused`."""
    slice_rounds: Count = 8
    """Rounds between two checks for signals, with `staged` and `pipelined`."""

    @property
    def active_lag(self) -> int:
        """Lag of the run: 0 for all kinds but `pipelined`."""
        return self.lag if self.kind == "pipelined" else 0


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(CheckedConfig, prefix="generation."):
    """Devices that only generate, with `schedule.kind pipelined`.

    They are the last ones of the job. `mesh.*` shapes the others, which learn.
    """

    devices: Natural = 0
    """Number of devices. 0 = learning and generation take turns on all devices."""
    data: Natural = 0
    """Shards of the rows. 0 = as many as fit the devices."""
    expert: Count = 1
    """Members of a data shard, which split its rows and the model's experts."""
    tensor: Count = 1
    """Shards of heads, feed-forward width and vocabulary."""
