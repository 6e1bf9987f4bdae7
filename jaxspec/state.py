"""Every pytree that crosses a file: prompts, rollouts, what the learner gets, and the state of
training."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, dataclass_transform

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8

_T = TypeVar("_T")

if TYPE_CHECKING:
    AnyArray = Array
else:
    # on the host, before a tree is placed on devices and after it is fetched
    AnyArray = Array | np.ndarray

PyTree = Any
"""A tree of arrays whose structure the type system does not follow (networks, optimizer states,
shardings)."""

RUNNING, EOS, LENGTH, FAILED, IDLE = range(5)
"""Status of a row: still generating, ended by an end token, cut at the length limit, stopped by
logits or a distribution that is not finite, never started."""
PROMPT, READ, UNDRAFTED, CORRECTION, BONUS, DRAFTED = range(6)
"""Origin of a token: prompt or padding, read from an environment, sampled where no draft was
offered, sampled in place of a rejected draft, sampled after all drafts were kept, accepted draft.
An accepted draft of depth d is `DRAFTED + d - 1`."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[_T]) -> type[_T]:
    """Makes a frozen dataclass a pytree of all its fields; those with the metadata `static` are
    part of its structure.

    Unflattening bypasses `__init__`, so that a tree may also hold shapes, shardings or None where
    its annotations say arrays.
    """
    frozen: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(frozen)
    names = [item.name for item in fields if "static" not in item.metadata]
    static = [item.name for item in fields if "static" in item.metadata]

    def flatten(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in names]
        return children, tuple(getattr(node, name) for name in static)

    def unflatten(structure: tuple[Any, ...], children: Any) -> Any:
        node = object.__new__(frozen)
        for name, child in zip((*names, *static), (*children, *structure), strict=True):
            object.__setattr__(node, name, child)
        return node

    jax.tree_util.register_pytree_with_keys(frozen, flatten, unflatten)
    return frozen


class Tree:
    """What every pytree class here can do."""

    def replace(self: _T, **changes: Any) -> _T:
        """Returns a copy with some fields exchanged."""
        node = object.__new__(type(self))
        for item in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            object.__setattr__(node, item.name, changes.pop(item.name, getattr(self, item.name)))
        if changes:
            raise TypeError(f"{type(self).__name__} has no field {sorted(changes)}")
        return node


@pytree
class Prompts(Tree):
    """Prompts of one call, right-padded; each is answered `group_size` times."""

    tokens: Int[AnyArray, "n P"]
    lengths: Int[AnyArray, " n"]
    live: Bool[AnyArray, " n"]
    """False: no response is generated (padding of an evaluation, or the last call of a run)."""
    stream: Int[AnyArray, ""]
    """A `streams.Stream`: two kinds of call never share noise."""
    batch: Int[AnyArray, ""]
    """Number of the batch within its stream; with the run's seed it fixes all noise of the call."""
    history: Int[AnyArray, "n H S"]
    """Earlier texts of the same prompt (prompt and answer), for drafts that look there; H may be
    0."""
    history_lengths: Int[AnyArray, "n H"]
    """0: no text."""


@pytree
class Statistics(Tree):
    """What speculation did for each row; sums over rounds, so that means over any rows follow. K is
    the draft length."""

    rounds: Int[AnyArray, " B"]
    """Target passes the row took part in."""
    draft_rounds: Int[AnyArray, "B K"]
    """Rounds that offered at least 1, 2, ... K drafts."""
    reached: Int[AnyArray, "B K"]
    """Rounds that offered draft 1, ... K and kept every one before it: only there does the draft
    follow a text that the target has accepted."""
    accepted: Int[AnyArray, "B K"]
    """Rounds in which at least 1, 2, ... K drafts were kept; those cut off by the end of the row do
    not count."""
    quarter_tokens: Int[AnyArray, "B 4"]
    """Tokens kept in rounds that offered a draft, by the quarter of the longest response in which
    the round began."""
    quarter_rounds: Int[AnyArray, "B 4"]
    """Rounds that offered a draft, likewise."""
    overlap: Float[AnyArray, "B K"]
    """Expected acceptance sum_v min(target, draft), over the rounds of `offered_in_turn`."""
    overlap_by_factor: Float[AnyArray, "n K F"]
    """Expected acceptance at each draft temperature factor of the grid, in the first row of each
    of the n groups."""
    draft_entropy: Float[AnyArray, "B K"]
    """Over the rounds of `offered_in_turn`, in nats; 0 for drafts that draw nothing."""
    start_round: Int[AnyArray, " B"]
    """Rounds of its shard before the row got a slot."""
    end_round: Int[AnyArray, " B"]
    """Rounds of its shard when the row ended; 0: it has not."""
    target_entropy: Float[AnyArray, " B"]
    """Over the tokens of the response, in nats."""


@pytree
class Rollout(Tree):
    """Generated rows. A row's prompt is followed at once by its response; `S` is the longest prompt
    plus the longest response."""

    tokens: Int[AnyArray, "B S"]
    prompt_lengths: Int[AnyArray, " B"]
    lengths: Int[AnyArray, " B"]
    """Prompt and response together."""
    logprobs: Float[AnyArray, "B S"]
    """The target's log-probability of each response token under the sampling distribution; 0
    elsewhere."""
    origin: Int8[AnyArray, "B S"]
    """Origin of each token: `PROMPT`, `READ`, `UNDRAFTED`, `CORRECTION`, `BONUS` or `DRAFTED` and
    more. The policy sampled those from `UNDRAFTED` on."""
    status: Int[AnyArray, " B"]
    version: Int[AnyArray, " B"]
    """Batches that the weights had learnt from which sampled the row."""
    statistics: Statistics


@pytree
class PackingPlan(Tree):
    """Which row is read where. A data shard has one pack a micro-batch: texts side by side in
    `batch.micro_tokens` positions."""

    row_order: Int[AnyArray, " B"]
    """The row that comes to each place; a data shard has as many places as it has rows, and its
    rows have about as much text as others'."""
    micro_batch: Int[AnyArray, "U B"]
    """The micro-batch that reads the row of each place, for each of U mini-batches; -1: none."""
    text_start: Int[AnyArray, "U B"]
    """Where in the pack its text starts."""
    micro_batch_count: Int[AnyArray, " U"]
    """Micro-batches of each mini-batch."""


class Pack(NamedTuple):
    """Texts side by side: sequences of B, T positions each. A position reads a token and predicts
    its label, the next token of its text.

    Positions beyond the last text are texts of a single token without a label.
    """

    tokens: Int[Array, "B T"]
    labels: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    """Whether the label is one to learn."""
    positions: Int[Array, "B T"]
    """Places in their own text."""
    text_start: Int[Array, "B T"]
    """Where in the sequence that text starts."""


@pytree
class ScoredRollout(Tree):
    """A rollout with its rewards, ready to be learnt from."""

    rollout: Rollout
    rewards: Float[AnyArray, " B"]
    valid: Bool[AnyArray, " B"]
    """False: the row has no reward (generation or checking failed) and takes no part in the
    loss."""
    plan: PackingPlan
    """Which row is read in which micro-batch."""
    learn: Bool[AnyArray, ""]
    """False: nothing to learn in this call (the first one, and evaluations)."""


@pytree
class NetworkState(Tree):
    """A network under training: master weights, optimizer state, and how often a non-finite update
    was skipped."""

    network: PyTree
    optimizer: PyTree
    skipped: Int[Array, ""]
    skipped_in_row: Int[Array, ""]


@pytree
class AcceptanceEstimate(Tree):
    """How much of a draft was accepted, by depth."""

    reached: Float[Array, "*n K"]
    """Drafts offered after all before them were accepted; earlier calls count less."""
    accepted: Float[Array, "*n K"]
    """Those of them that were accepted."""
    seconds_to_lose: Float[Array, "*n"]
    """Seconds, by the cost table, that may be lost on trying a longer draft."""


@pytree
class LengthChooser(Tree):
    """What draft lengths are chosen by."""

    acceptance: AcceptanceEstimate
    """Before the call."""
    round_cost: Float[Array, "A S C"]
    """Seconds of a round by draft length, number of slots (most first) and context; zeros: not
    measured yet."""


@pytree
class Drafter(Tree):
    """The draft in the rollout layout, at which temperature of the grid it samples each depth, and
    what its lengths are chosen by."""

    network: PyTree
    factor_index: Int[Array, " K"]
    chooser: LengthChooser | None = None
    """None: all rounds draft alike."""


@pytree
class RolloutWeights(Tree):
    """Policy and draft as generation reads them."""

    target: PyTree
    drafter: Drafter
    version: Int[Array, ""]
    """Batches that the policy has learnt from."""


@pytree
class LearnerState(Tree):
    """What learning carries from batch to batch."""

    policy: NetworkState
    draft: NetworkState | None
    online: Bool[Array, ""]
    """Whether the draft learns: data, not structure, so that a frozen and a learning draft share
    one program."""
    version: Int[Array, ""]
    """Batches that the policy has learnt from."""
    recompute: Bool[Array, ""]
    """Whether old logprobs are computed anew; else they are those that the rollout recorded."""
    reference: PyTree = None
    """The policy that is not to be left too far, in the type of products; None: no loss asks for
    one, or it is the policy without its adapters."""


@pytree
class AcceptanceTrend(Tree):
    """How acceptance lengths went, from rollout to rollout."""

    length: Float[AnyArray, ""]
    """Of the last one."""
    best: Float[AnyArray, ""]
    stale: Int[AnyArray, ""]
    """Rollouts since `best` rose."""


@pytree
class GeneratorState(Tree):
    """What generation has learnt about itself; it belongs to neither side's weights."""

    overlap_by_factor: Float[AnyArray, "K F"]
    """Decayed sums from which the draft's temperature is chosen; see
    `drafts/draft_temperature.py`."""
    trend: AcceptanceTrend
    """Whether the draft is worth training; see `drafts/schedule.py`."""
    chooser: LengthChooser | None = None
    """None: all rounds draft alike."""


@pytree
class TrainState(Tree):
    """What training carries from call to call."""

    learner: LearnerState
    generator: GeneratorState
