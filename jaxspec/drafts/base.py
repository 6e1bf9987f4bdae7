"""What a kind of draft is: the `Draft` that the engine asks for tokens, and the `Kind` that says
how it is built, loaded, trained and exported."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec.inputs.checked import Unused
from jaxspec.inputs.spec import DraftSpec, ModelSpec
from jaxspec.models.cache import KVCache
from jaxspec.state import PyTree

Sampler = Callable[..., Int[Array, " B"]]
"""(draft logits [B W], offset in the block, the target's ids of their tokens [W] or None) ->
tokens. None, the default: the logits are over the target's vocabulary."""


class Proposal(NamedTuple):
    """Tokens for each row, and the logits they were drawn from."""

    tokens: Int[Array, "B K"]
    """Ids of the target's vocabulary."""
    logits: Float[Array, "B K W"] | None
    """None: nothing was drawn, the tokens follow from the prefix alone; a single row says so with
    one finite logit a position."""
    lengths: Int[Array, " B"]
    """How many of them are offered, 0..K: a function of the prefix, never of a token that was
    drawn; the rest is not looked at."""
    ids: Int[Array, " W"] | None = None
    """The target's ids of the logits' tokens, ascending; None: they are over its vocabulary."""


class Context(NamedTuple):
    """What is committed: all that a draft may depend on. R rows, of which B are in slots; rows of a
    group are adjacent."""

    tokens: Int[Array, "R S"]
    """Prompt and response so far of every row; zeros beyond its end."""
    lengths: Int[Array, " B"]
    """Tokens of each slot's row that it may look at; 0 where no row is running."""
    slot_rows: slice | Int[Array, " B"] = slice(None)
    """The row in each slot; a slice: slot b has row b."""
    row_lengths: Int[Array, " R"] | None = None
    """Tokens of every row; None: `lengths`."""

    def row_indices(self) -> Int[Array, " B"]:
        """The row in each slot; for an empty slot, the last one."""
        if isinstance(self.slot_rows, slice):
            return jnp.arange(len(self.lengths), dtype=jnp.int32)
        return jnp.minimum(self.slot_rows, len(self.tokens) - 1)

    def tokens_at(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Tokens at some positions of each slot's row; beyond its buffer, the last one there."""
        if isinstance(self.slot_rows, slice):
            return jnp.take_along_axis(self.tokens, positions, axis=1, mode="clip")
        return self.tokens[
            self.row_indices()[:, None], jnp.clip(positions, 0, self.tokens.shape[1] - 1)
        ]

    def slot_tokens(self) -> Int[Array, "B S"]:
        """The whole row of each slot."""
        return self.tokens if isinstance(self.slot_rows, slice) else self.tokens[self.row_indices()]


class Committed(NamedTuple):
    """What a round committed: the verified block, of which each row keeps the first `lengths`
    positions."""

    tokens: Int[Array, "B K1"]
    """Token following each block position (the drafts kept, then next_token)."""
    features: Float[Array, "B K1 C"]
    """What the target's own pass gives at each block position: its taps for a draft that has
    `taps`, else its final-norm hidden states."""
    positions: Int[Array, "B K1"]
    lengths: Int[Array, " B"]


class Draft(NamedTuple):
    """Pure functions over an explicit state; `network` is whatever the draft learns, `target` lends
    its embedding and head.

    The first axis of everything in a state is rows, which may be repeated, moved and exchanged.
    A draft's keys and values are not in its state: they lie beside the target's, in the same
    layout.

    What it proposes is a function of the committed text alone (its own row's, and for look-up that
    of other answers to the prompt): rounds of other lengths, or of none, leave no trace in it.
    """

    max_length: int
    """The most tokens a round (K)."""
    taps: tuple[int, ...]
    """Boundaries at which it reads the target's residual stream; none: it reads the final-norm
    hidden states."""
    is_stochastic: bool
    """Whether some of its tokens are drawn from logits."""
    empty_cache: Callable[[PyTree, int, int], KVCache | None]
    """(network, rows, positions) -> a cache for the draft's own layers; None: it has none."""
    init_state: Callable[..., PyTree]
    """(network, target, prompts of n groups) -> state of n rows, of which nothing is read yet."""
    prefill: Callable[..., tuple[PyTree, KVCache | None]]
    """(network, target, state of H texts, cache with a table for N pieces, pieces, features
    [N T C]) -> (state, cache): reads known text along with the target, whose features are given.
    The target reads up to the last token but one; of the position before a piece it is known
    what `state` or the piece before says."""
    catch_up: Callable[..., tuple[PyTree, KVCache | None]]
    """(network, target, state, cache, context) -> (state, cache), before a round that proposes
    nothing."""
    propose: Callable[..., tuple[PyTree, KVCache | None, Proposal]]
    """(network, target, state, cache, context, sample, length) -> (state, cache, Proposal of
    `length` tokens, 1 to K)."""
    commit: Callable[[PyTree, Committed], PyTree]
    """(state, committed) -> state; a block of one position is that of a round that proposed
    nothing."""


def block_positions(first: Int[Array, " B"], count: int) -> Int[Array, "B T"]:
    """Consecutive positions from each row's first."""
    return first[:, None] + jnp.arange(count, dtype=first.dtype)


# ---- kinds

Log = Callable[[str], Any]
"""Tells the user how something ambiguous was read."""
SizePairs = dict[str, tuple[int, int]]
"""What a draft and its policy must have alike, by name: the draft's number, and the policy's."""


class Unroll(NamedTuple):
    """How a learned draft is run over whole texts, to be trained and measured; pure functions."""

    depth_count: Callable[[int], int]
    """Depths at which it is trained, where so many are asked for (`draft_training.ttt_steps`)."""
    min_context: Callable[[int], Int[Array, " A"]]
    """For each of so many depths, the tokens of a text that must stand before the one whose label
    it predicts."""
    hidden_states: Callable[..., Float[Array, "B T A D"]]
    """(network, target, forward, pack, depths) -> what its head reads, by depth, at the position
    whose label it then predicts. It is zero where a text is too short, and may be where no label is
    learnt. `forward` is the policy's own pass over the pack, with taps where the draft reads
    them."""
    logits: Callable[[PyTree, PyTree, Float[Array, "B T D"]], Float[Array, "B T W"]]
    """(network, target, that of one depth) -> logits over its own vocabulary."""
    vocabulary: Callable[[PyTree], Int[Array, " W"] | None]
    """The target's ids of its tokens, ascending; None: it has the target's vocabulary."""


class Repair(NamedTuple):
    """A draft's weights wired in another way: a likely mistake of a loader, undone."""

    description: str
    remedy: str
    network: PyTree
    taps: tuple[int, ...]


class ExportSpec(NamedTuple):
    """What a draft's published files say of the run."""

    policy: ModelSpec
    """Its path is the exported policy's folder."""
    format: str
    """`raw` or `speculators`."""
    dtype: np.dtype
    draft_length: int
    """Tokens drafted a round."""
    special_tokens: dict[str, int]
    """Special tokens."""


class DraftFiles(NamedTuple):
    """A draft as it is published."""

    config: dict[str, Any]
    """Of config.json."""
    tensors: list[tuple[str, int, Callable[[], np.ndarray]]]
    """Name, bytes, and what makes it."""
    needs_tokenizer: bool = False
    """Whether the folder has the tokenizer too, like any policy's."""
    merge_with_policy: bool = False
    """Whether its tensors stand among the policy's, whose config.json then says what is in
    `config`."""


class Learned(NamedTuple):
    """What a kind of draft with weights has beside what every kind has."""

    decoder_spec: Callable[[DraftSpec], ModelSpec]
    """Its own decoder."""
    init_network: Callable[[DraftSpec, Key[Array, ""]], PyTree]
    """The network with fresh weights."""
    check_spec: Callable[[DraftSpec], None]
    """Refuses what does not go together: raises ConfigError."""
    size_pairs: Callable[[PyTree, ModelSpec], SizePairs]
    """What its network and a policy must have alike."""
    block_size: Callable[[int], int]
    """Tokens of a row that it reads at once before it drafts so many."""
    unroll: Unroll
    resolve_spec: Callable[[DraftSpec, Path, Log], DraftSpec]
    """(spec, folder, log) -> the spec with what a trained draft's files say."""
    check_files: Callable[[DraftSpec, Path, int], None]
    """(resolved spec, folder, tokens of the tokenizer) -> nothing. Raises ConfigError for tensors
    that `load_network` would refuse, by their headers alone."""
    load_network: Callable[[DraftSpec, Path, PyTree], PyTree]
    """(resolved spec, folder, shapes with shardings) -> its network."""
    export_files: Callable[[PyTree, ExportSpec], DraftFiles]
    export_formats: tuple[str, ...] = ("raw",)
    """Forms in which it can be exported."""
    list_repairs: Callable[[PyTree, tuple[int, ...], ModelSpec], Iterator[Repair]] = (
        lambda network, taps, policy: iter(())
    )
    """(network, taps, policy) -> likely mistakes of a loader, undone one at a time."""
    count_native_layers: Callable[[list[str], int], int] = lambda names, layers: 0
    """(tensor names, layers of the policy) -> how many layers of this kind the policy's own
    checkpoint has; a draft without a folder of its own takes them."""
    with_vocabulary: Callable[[PyTree, np.ndarray], PyTree] | None = None
    """(network, ids) -> the network for these tokens of the policy's vocabulary alone."""


class Kind(NamedTuple):
    """A kind of draft. `rollout.draft.kind` names it, and `kinds.py` knows where it is."""

    build: Callable[[DraftSpec, tuple[int, ...]], Draft | None]
    """(spec, end tokens) -> its functions; None: nothing is proposed."""
    settings: frozenset[str] = frozenset()
    """Settings that it has a use for, by name, of those that not every kind has; one that ends in a
    dot stands for all that start with it."""
    file_settings: frozenset[str] = frozenset()
    """Settings that a trained draft's own files say."""
    unused_rules: tuple[Unused, ...] = ()
    """Where settings do nothing, beside what follows from `settings` and `file_settings`."""
    learned: Learned | None = None
    """None: it has no weights."""
    lookup_name: str = "none"
    """Its name where it finds drafts in text, so that it may stand beside a learned one."""
    reads_history: bool = False
    """Whether it looks into earlier answers to the same prompt."""
    single_row_kind: str = ""
    """The kind that proposes the same for a row without siblings or earlier answers; empty: it
    does so itself."""


MULTI_DEPTH_SETTINGS = frozenset({"draft_training.ttt_steps", "draft_training.decay"})
"""Settings of kinds that are trained at several depths."""

PLAIN = Kind(build=lambda spec, stop_ids: None)
"""Plain decoding."""
