"""Interfaces of a draft.

`Draft` holds the functions that the engine calls to get tokens. `Kind` holds the functions that
build, load, train and export a draft.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec.inputs.checked import CheckedConfig, Unused
from jaxspec.inputs.spec import DraftSpec, HeadSpec, LearnedSpec, ModelSpec, RunFacts
from jaxspec.models.cache import KVCache
from jaxspec.state import PyTree

Sampler = Callable[..., Int[Array, " B"]]
"""Draws one token per row.

Arguments: draft logits [B W], offset in the block, the target's ids of the logits' tokens [W]. Ids
of None (the default) mean that the logits cover the target's vocabulary.
"""


class PointProposal(NamedTuple):
    """Draft tokens that are deterministic given the prefix."""

    tokens: Int[Array, "B K"]
    """Ids of the target's vocabulary."""
    # Lengths may depend on the prefix only. A length that depended on a drawn token would bias
    # which drafts reach verification, and sampling would no longer be exact.
    lengths: Int[Array, " B"]
    """Number of valid draft tokens, 0..K. The tokens after them are ignored."""


class DrawnProposal(NamedTuple):
    """Draft tokens that were drawn from logits."""

    tokens: Int[Array, "B K"]
    """Ids of the target's vocabulary."""
    logits: Float[Array, "B K W"]
    """Logits that the tokens were drawn from. A deterministic token has the only finite logit."""
    lengths: Int[Array, " B"]
    """As in `PointProposal`."""
    ids: Int[Array, " W"] | None = None
    """The target's ids of the logits' tokens, ascending. None for the target's vocabulary."""


Proposal = PointProposal | DrawnProposal
"""Draft tokens of a round."""


class Context(NamedTuple):
    """All that a draft may depend on: committed text.

    There are R rows, B of them in slots. Rows of a group are adjacent.
    """

    tokens: Int[Array, "R S"]
    """Prompt and response so far of every row, padded with zeros."""
    lengths: Int[Array, " B"]
    """Committed tokens of each slot's row; 0 for a slot without a running row."""
    slot_rows: slice | Int[Array, " B"] = slice(None)
    """Row index of each slot. A slice means that slot b has row b."""
    row_lengths: Int[Array, " R"] | None = None
    """Tokens of every row. None means that `lengths` has them."""

    def row_indices(self) -> Int[Array, " B"]:
        """Returns each slot's row, or the last row for an empty slot."""
        if isinstance(self.slot_rows, slice):
            return jnp.arange(len(self.lengths), dtype=jnp.int32)
        return jnp.minimum(self.slot_rows, len(self.tokens) - 1)

    def tokens_at(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Returns tokens at positions, clipped to the buffer."""
        if isinstance(self.slot_rows, slice):
            return jnp.take_along_axis(self.tokens, positions, axis=1, mode="clip")
        return self.tokens[
            self.row_indices()[:, None], jnp.clip(positions, 0, self.tokens.shape[1] - 1)
        ]

    def slot_tokens(self) -> Int[Array, "B S"]:
        """Returns the token buffer of each slot's row."""
        return self.tokens if isinstance(self.slot_rows, slice) else self.tokens[self.row_indices()]


class Committed(NamedTuple):
    """Verified block of a round.

    Each row keeps its first `lengths` positions.
    """

    tokens: Int[Array, "B K1"]
    """Token after each block position: the accepted drafts, then `next_token`."""
    features: Float[Array, "B K1 C"]
    """Target features at each block position.

    These are the aux hidden states of a draft with `taps`, else the final-norm hidden states.
    """
    positions: Int[Array, "B K1"]
    lengths: Int[Array, " B"]


class Draft(NamedTuple):
    """Pure functions of a draft over an explicit state.

    `network` holds the draft's own weights. `target` provides its embedding and head. The first
    axis of every state leaf is rows, which may be repeated, moved and exchanged. Keys and values of
    the draft are kept outside its state, in a cache laid out like the target's.

    A proposal depends on the committed text only: the row's own, and for look-up that of other
    answers to the prompt. Rounds of another length, or without drafts, do not change it.
    """

    max_length: int
    """Maximum number of draft tokens per round (K)."""
    taps: tuple[int, ...]
    """Layer boundaries whose residual stream it reads. Empty for the final-norm hidden states."""
    is_stochastic: bool
    """Whether it draws tokens from logits."""
    empty_cache: Callable[[PyTree, int, int], KVCache | None]
    """(network, rows, positions) -> empty cache of the draft's layers, or None without layers."""
    init_state: Callable[..., PyTree]
    """(network, target, prompts of n groups) -> initial state of n rows."""
    prefill: Callable[..., tuple[PyTree, KVCache | None]]
    """(network, target, state of H texts, cache, pieces, features [N T C]) -> (state, cache).

    Reads known text along with the target, whose `features` are given. The cache has a table for N
    pieces. The target stops one token before the last. For the position before a piece, the draft
    uses the piece before it, or `state`.
    """
    catch_up: Callable[..., tuple[PyTree, KVCache | None]]
    """(network, target, state, cache, context) -> (state, cache).

    Runs before a round that proposes nothing.
    """
    propose: Callable[..., tuple[PyTree, KVCache | None, Proposal]]
    """(network, target, state, cache, context, sample, length) -> (state, cache, proposal).

    Proposes `length` tokens, 1 to K.
    """
    commit: Callable[[PyTree, Committed], PyTree]
    """(state, committed) -> state.

    A block of one position comes from a round that proposed nothing.
    """


def block_positions(first: Int[Array, " B"], count: int) -> Int[Array, "B T"]:
    """Returns `count` consecutive positions from each row's first."""
    return first[:, None] + jnp.arange(count, dtype=first.dtype)


def empty_proposal(context: Context) -> PointProposal:
    """Returns a proposal without tokens."""
    zeros = jnp.zeros_like(context.lengths)
    return PointProposal(jnp.zeros((len(zeros), 0), jnp.int32), zeros)


PLAIN = Draft(
    max_length=0,
    taps=(),
    is_stochastic=False,
    empty_cache=lambda network, rows, positions: None,
    init_state=lambda network, target, prompts: (),
    prefill=lambda network, target, state, cache, pieces, features: (state, cache),
    catch_up=lambda network, target, state, cache, context: (state, cache),
    propose=lambda network, target, state, cache, context, sample, length: (
        state,
        cache,
        empty_proposal(context),
    ),
    commit=lambda state, committed: state,
)
"""Draft of plain decoding, which proposes nothing."""


# ---- kinds

Log = Callable[[str], Any]
"""Reports to the user how an ambiguous file was interpreted."""
SizePairs = dict[str, tuple[int, int]]
"""Sizes in which a draft must match its policy: name -> (draft's size, policy's size)."""
_Spec = TypeVar("_Spec", bound=DraftSpec)
_LearnedSpec = TypeVar("_LearnedSpec", bound=LearnedSpec)


class Unroll(NamedTuple):
    """Pure functions to train and evaluate a draft.

    They run it over full texts.
    """

    depth_count: Callable[[int], int]
    """Requested depths (`draft_training.ttt_steps`) -> depths that are trained."""
    min_context: Callable[[int], Int[Array, " A"]]
    """Depths -> tokens of context that each depth needs before the label it predicts."""
    hidden_states: Callable[..., Float[Array, "B T A D"]]
    """(network, target, forward, pack, depths) -> inputs of the draft's head, by depth.

    Each is stored at the position of the label it predicts. It is zero where the context is too
    short, and may be zero outside the loss mask. `forward` is the policy's pass over the pack, with
    aux hidden states if the draft uses them.
    """
    logits: Callable[[PyTree, PyTree, Float[Array, "B T D"]], Float[Array, "B T W"]]
    """(network, target, hidden states of one depth) -> logits over the draft's vocabulary."""
    vocabulary: Callable[[PyTree], Int[Array, " W"] | None]
    """The target's ids of the draft's tokens, ascending. None for the target's vocabulary."""


class Repair(NamedTuple):
    """Draft with a likely loading mistake undone."""

    description: str
    remedy: str
    network: PyTree
    taps: tuple[int, ...]


class ExportSpec(NamedTuple):
    """Run facts written to a draft's published files."""

    policy: ModelSpec
    """Spec of the policy, whose path is the exported policy's folder."""
    format: str
    """Export format, `raw` or `speculators`."""
    dtype: np.dtype
    draft_length: int
    """Draft tokens per round."""
    special_tokens: dict[str, int]
    """Ids of the special tokens, by config.json key."""


class DraftFiles(NamedTuple):
    """Published files of a draft."""

    config: dict[str, Any]
    """Content of config.json."""
    tensors: list[tuple[str, int, Callable[[], np.ndarray]]]
    """Name, size in bytes and reader of each tensor."""
    needs_tokenizer: bool = False
    """Whether the folder also contains the tokenizer."""
    merge_with_policy: bool = False
    """Whether tensors and config are merged into the policy's own files."""


class FileFacts(NamedTuple):
    """Facts of a trained draft's files."""

    settings: CheckedConfig | None
    """The kind's own settings, with the values of the files. None if it has none."""
    decoder: ModelSpec | None
    """Spec of its decoder. None = that of a draft made for the policy."""
    head: HeadSpec | None = None
    """Form of an EAGLE-3 head."""


@dataclass(frozen=True)
class Learned(Generic[_LearnedSpec]):
    """Functions of a draft kind that has weights."""

    decoder_spec: Callable[[_LearnedSpec], ModelSpec]
    """Returns the spec of the draft's decoder."""
    init_network: Callable[[_LearnedSpec, Key[Array, ""]], PyTree]
    """Initializes the network."""
    check_spec: Callable[[_LearnedSpec], None]
    """Raises ConfigError if settings of the draft contradict each other or the policy."""
    size_pairs: Callable[[PyTree, ModelSpec], SizePairs]
    """Returns the sizes in which network and policy must match."""
    block_size: Callable[[int], int]
    """Draft length -> tokens of a row that the draft reads at once before it drafts."""
    unroll: Unroll
    read_facts: Callable[[_LearnedSpec, Path, Log], FileFacts]
    """(spec, folder, log) -> facts of a trained draft's files."""
    check_files: Callable[[_LearnedSpec, Path, int], None]
    """(resolved spec, folder, tokens of the tokenizer) -> None.

    Raises ConfigError for tensors that `load_network` would reject. Reads headers only.
    """
    load_network: Callable[[_LearnedSpec, Path, PyTree], PyTree]
    """(resolved spec, folder, shapes with shardings) -> loaded network."""
    export_files: Callable[[PyTree, ExportSpec], DraftFiles]
    resolve_settings: Callable[[_LearnedSpec], CheckedConfig] | None = None
    """spec -> the kind's own settings, with `auto` resolved. None if no setting can be `auto`.

    A draft with a folder of its own has its settings from there instead.
    """
    export_formats: tuple[str, ...] = ("raw",)
    """Supported export formats."""
    list_repairs: Callable[[PyTree, tuple[int, ...], ModelSpec], Iterator[Repair]] = (
        lambda network, taps, policy: iter(())
    )
    """(network, taps, policy) -> variants with one likely loader mistake undone each."""
    count_native_layers: Callable[[list[str], int], int] = lambda names, layers: 0
    """(tensor names, layers of the policy) -> draft layers in the policy's own checkpoint.

    A draft without a folder of its own loads these.
    """
    with_vocabulary: Callable[[PyTree, np.ndarray], PyTree] | None = None
    """(network, ids) -> network restricted to these tokens of the policy's vocabulary."""


@dataclass(frozen=True)
class Kind(Generic[_Spec]):
    """Definition of a draft kind.

    `kinds.py` registers it under its `rollout.draft.kind`.
    """

    make_spec: Callable[[Any, RunFacts], _Spec]
    """(settings, facts of the run) -> the draft's spec.

    The settings are the kind's section of `rollout.draft`, `rollout.lookup` for look-up, or None.
    """
    build: Callable[[_Spec, tuple[int, ...]], Draft]
    """(spec, stop tokens) -> the draft's functions."""
    shared_settings: frozenset[str] = frozenset()
    """Settings outside the kind's own section that only some kinds read, this one among them.

    A name ending in a dot covers a prefix.
    """
    file_settings: frozenset[str] = frozenset()
    """Settings that are read from a trained draft's files, in the same notation."""
    unused_rules: tuple[Unused, ...] = ()
    """Further conditions under which a setting has no effect."""
    learned: Learned[Any] | None = None
    """Functions of a kind with weights, else None."""
    lookup_name: str = "none"
    """Name of a look-up kind, which can be combined with a learned draft. Else `none`."""
    reads_history: bool = False
    """Whether it uses earlier answers to the same prompt."""
    single_row_kind: str = ""
    """Kind with the same proposals for a row without siblings or earlier answers.

    Empty if that is the kind itself.
    """


MULTI_DEPTH_SETTINGS = frozenset({"draft_training.ttt_steps", "draft_training.decay"})
"""Settings of kinds that are trained at several depths."""


@dataclass(frozen=True, kw_only=True)
class PlainSpec(DraftSpec):
    """Specification of plain decoding."""

    kind: ClassVar[str] = "none"


NO_DRAFT = Kind(
    make_spec=lambda settings, run: PlainSpec(),
    build=lambda spec, stop_ids: PLAIN,
)
"""Plain decoding, without a draft."""
