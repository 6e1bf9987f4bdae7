"""Settings of generation: what proposes tokens, how they are verified, and in what memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxspec.drafts.kinds import DraftKind, LookupKind, get_kind
from jaxspec.inputs.checked import CheckedConfig, Range, require
from jaxspec.inputs.json_keys import format_value, is_valid_utf8
from jaxspec.inputs.spec import Count, LayerCount, Natural

DraftSampling = Literal["argmax", "sample", "auto"]
VerifyRule = Literal["block", "token", "coupled"]
Temperature = Annotated[float, Range(min=1e-3, max=1000, or_zero=True)]
"""Below, what logits are divided by leaves no finite number; at 0 nothing is divided."""
DraftLength = Annotated[int, Range(min=1, remedy="rollout.draft.kind none is plain decoding")]
LARGE_VOCAB, PUBLISHED_VOCAB = 32_768, 32_000
"""Tokens of a policy beyond which `auto` gives its draft fewer, and the most that it gives.

Published heads have as many (SpecForge). A head is read whole for each draft."""
AUTO_LENGTHS = (0, 1, 3, 5)
"""Draft lengths that `auto` compiles; 0 is plain decoding."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig(CheckedConfig, prefix="rollout.draft."):
    """What proposes tokens, and how they are drawn."""

    kind: DraftKind = "eagle3"
    """`eagle3`: a small head on some of the policy's hidden states; `mtp`: multi-token-prediction
    layers; `model`: a small decoder; `ngram`, `history`: look-up alone (see rollout.lookup);
    `none`: plain decoding through the same code."""
    draft_length: DraftLength | Literal["auto"] = 3
    """Tokens drafted a round (K); a round keeps 1 to K+1 tokens. `auto`: each round drafts 0, 1, 3
    or 5 (0, 3 or 5 on accelerators), whichever promises most tokens a second by what was accepted
    so far and by what rounds cost on this machine."""
    sampling: DraftSampling = "auto"
    """How a learned draft's tokens are taken: the most likely; drawn at `temperature`; drawn at the
    temperature that the run itself measures to be best for each depth."""
    temperature: Temperature = 1.0
    """With `sample`: the draft's temperature as a multiple of rollout.temperature."""
    vocab: Natural | Literal["auto"] = "auto"
    """EAGLE-3: size of the draft's own vocabulary, chosen by offline training from the policy's
    samples; 0: the policy's. `auto`: 0, but with offline training a quarter of a vocabulary of more
    than 32,768 tokens, at most 32,000."""
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
        message = (
            f"rollout.draft.draft_length auto weighs drafts that every round has, and {self.kind}"
            " finds them in some only"
        )
        require(
            not self.length_choices or self.is_learned or not self.is_enabled,
            f"{message}; give a number, such as 5",
        )

    @property
    def length_choices(self) -> tuple[int, ...]:
        """Draft lengths among which each round chooses; empty: it is always the same."""
        return AUTO_LENGTHS if self.draft_length == "auto" else ()

    @property
    def max_draft_length(self) -> int:
        """The most tokens that a round drafts."""
        return AUTO_LENGTHS[-1] if isinstance(self.draft_length, str) else self.draft_length

    @property
    def draft_vocab(self) -> int:
        """Size of the draft's own vocabulary; 0: it has the policy's. `auto` counts as 0 until it
        is resolved."""
        return 0 if isinstance(self.vocab, str) else self.vocab

    @property
    def is_enabled(self) -> bool:
        """Whether anything is proposed; False: plain decoding."""
        return self.kind != "none"

    @property
    def is_learned(self) -> bool:
        """Whether the draft has weights."""
        return get_kind(self.kind).learned is not None


@dataclass(frozen=True, kw_only=True)
class LookupConfig(CheckedConfig, prefix="rollout.lookup."):
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
        message = (
            f"rollout.lookup.min_match {self.min_match} is above rollout.lookup.max_match"
            f" {self.max_match}"
        )
        require(self.min_match <= self.max_match, f"{message}; lower the first or raise the second")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(CheckedConfig, prefix="rollout.engine."):
    """Memory and loops of generation; nothing here changes a token's distribution, and in coupled
    mode no token."""

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
    slots, on accelerators to one of an eighth."""
    stack_layers: bool = False
    """Whether the policy's layers share one body, which a loop runs for each. It compiles in about
    half the time, for deep models or many draft lengths; rounds are slower, on NVIDIA GPUs by 7 to
    15 % as counted, since the loop stays out of CUDA graphs."""
    command_buffers: bool = False
    """Whether programs that generate run as CUDA graphs with their loops inside, so that the host
    reads no condition back between rounds (learning's loops too, in one program with it); for
    NVIDIA GPUs, and not yet measured on one."""

    def check(self) -> None:
        remedy = "give a page size too, 64 for example, or leave pages 0"
        message = f"rollout.engine.pages is {self.pages}"
        require(
            self.pages == 0 or self.page_size != 0,
            f"{message}, but page_size 0 makes a page of every row; {remedy}",
        )
        require(
            self.pages == 0 or self.page_size != "auto",
            f"{message}, and of what size is left to page_size auto; {remedy}",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(CheckedConfig, prefix="rollout."):
    """How responses are generated; the policy's distribution is what `temperature`, `top_k`,
    `top_p`, `min_p`, `min_new_tokens` and `banned` leave of it, truncated in this order."""

    max_new_tokens: Count = 28
    """Longest response, in tokens."""
    min_new_tokens: Natural = 0
    """Tokens before an end token may be sampled."""
    temperature: Temperature = 1.0
    """Sampling temperature; rollout and learner divide the logits by it alike. 0: the most likely
    token (not for training)."""
    top_k: Natural = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: Annotated[float, Range(above=0, max=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities reach this sum; 1:
    from all."""
    min_p: Annotated[float, Range(min=0, max=1)] = 0.0
    """Sample from tokens at least this share as likely as the most likely one; 0: from all."""
    banned: tuple[Natural, ...] = ()
    """Token ids that are never sampled."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, with the token in which its text first contains one of them
    (before min_new_tokens they are passed over). They are taken as they are: in bash a line break
    is $'\\n'. The name of a special token stands for that token."""
    stop_ids: tuple[Natural, ...] = ()
    """Token ids that end a response, beside those that the tokenizer's files name."""
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
        require_stop_strings("rollout.stop", self.stop)
        message = (
            f"rollout.min_new_tokens {self.min_new_tokens} is not below rollout.max_new_tokens"
            f" {self.max_new_tokens}"
        )
        require(
            self.min_new_tokens < self.max_new_tokens,
            f"{message}; lower the first or raise the second",
        )

    @property
    def lookup_kind(self) -> str:
        """The look-up in use, alone or beside a learned draft."""
        sole_lookup = get_kind(self.draft.kind).lookup_name
        return sole_lookup if sole_lookup != "none" else self.lookup.beside

    @property
    def past_answers(self) -> int:
        """Earlier answers that a prompt brings along."""
        return self.lookup.past if get_kind(self.lookup_kind).reads_history else 0


def require_stop_strings(name: str, strings: Iterable[str]) -> None:
    """Refuses stop strings that no response can contain."""
    for text in strings:
        require(
            bool(text) and is_valid_utf8(text),
            f"{name} has {format_value(text)}; each must be a text in UTF-8 of a character or more",
        )
