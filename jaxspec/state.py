"""Pytrees that cross files: prompts, rollouts, scored rollouts and the state of training."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, dataclass_transform

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8

_T = TypeVar("_T")

if TYPE_CHECKING:
    AnyArray = Array
else:
    # On the host, trees hold NumPy arrays until they are placed, and again after they are fetched.
    AnyArray = Array | np.ndarray

PyTree = Any
"""Tree whose structure has no static type, such as networks, optimizer states or shardings."""

RUNNING, EOS, LENGTH, FAILED, IDLE = range(5)
"""Status of a row: still generating, ended by an end token, cut at the length limit, stopped by
logits or a distribution that is not finite, never started."""
PROMPT, READ, UNDRAFTED, CORRECTION, BONUS, DRAFTED = range(6)
"""Origin of a token: prompt or padding, read from an environment, sampled without a draft, sampled
in place of a rejected draft, sampled after all drafts were kept, accepted draft. An accepted draft
of depth d is `DRAFTED + d - 1`. Nothing writes `READ` yet: prompts have a single turn."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[_T]) -> type[_T]:
    """Makes a class a frozen dataclass and pytree.

    All fields are children, except those with the metadata `static`, which are structure.
    """
    frozen: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(frozen)
    names = [item.name for item in fields if "static" not in item.metadata]
    static = [item.name for item in fields if "static" in item.metadata]

    def flatten(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        # Optimizers and files find a leaf by the attribute names on its path.
        children = [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in names]
        return children, tuple(getattr(node, name) for name in static)

    def unflatten(structure: tuple[Any, ...], children: Any) -> Any:
        # Not by `__init__`: JAX also unflattens with shapes, shardings or None for arrays, which
        # jaxtyping would refuse.
        node = object.__new__(frozen)
        for name, child in zip((*names, *static), (*children, *structure), strict=True):
            object.__setattr__(node, name, child)
        return node

    jax.tree_util.register_pytree_with_keys(frozen, flatten, unflatten)
    return frozen


class Tree:
    """Base class of pytrees, with a method to replace fields."""

    def replace(self: _T, **changes: Any) -> _T:
        """Returns a copy with some fields replaced.

        Raises:
          TypeError: there is no field of that name.
        """
        # `dataclasses.replace` would call `__init__`. See `unflatten`.
        node = object.__new__(type(self))
        for item in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            object.__setattr__(node, item.name, changes.pop(item.name, getattr(self, item.name)))
        if changes:
            raise TypeError(f"{type(self).__name__} has no field {sorted(changes)}")
        return node


@pytree
class Prompts(Tree):
    """Right-padded prompts of one call. Each is answered `group_size` times."""

    tokens: Int[AnyArray, "n P"]
    lengths: Int[AnyArray, " n"]
    live: Bool[AnyArray, " n"]
    """Whether to generate responses. False for padding, and in the last call of a run."""
    stream: Int[AnyArray, ""]
    """Kind of call, a `streams.Stream`. Different kinds share no noise."""
    batch: Int[AnyArray, ""]
    """Number of the rollout within its stream. With the seed it fixes all noise of the call."""
    history: Int[AnyArray, "n H S"]
    """Earlier texts of each prompt, with the prompt, for drafts that look them up. H may be 0."""
    history_lengths: Int[AnyArray, "n H"]
    """Tokens of each earlier text, 0 if there is none."""


# Sums rather than means, so that any set of rows can be averaged later.
@pytree
class Statistics(Tree):
    """Statistics of speculation: sums over the rounds of each row. K is the draft length."""

    rounds: Int[AnyArray, " B"]
    """Rounds that the row took part in, which is its number of target passes."""
    draft_rounds: Int[AnyArray, "B K"]
    """Rounds that offered at least 1, 2, ... K drafts."""
    # A draft after a rejected one follows a text that the target did not produce.
    reached: Int[AnyArray, "B K"]
    """Rounds that offered draft 1, 2, ... K and kept every draft before it."""
    accepted: Int[AnyArray, "B K"]
    """Rounds that kept at least 1, 2, ... K drafts, without those that the end of the row cut."""
    quarter_tokens: Int[AnyArray, "B 4"]
    """Tokens kept in rounds that offered a draft, by quarter of the maximum response length. A
    round counts for the quarter that it began in."""
    quarter_rounds: Int[AnyArray, "B 4"]
    """Rounds that offered a draft, by the same quarters."""
    overlap: Float[AnyArray, "B K"]
    """Expected acceptance sum_v min(target, draft), over the rounds in `reached`."""
    # Each factor takes a pass over the vocabulary, so one row of a group has to do.
    overlap_by_factor: Float[AnyArray, "n K F"]
    """Expected acceptance at each of the F draft temperature factors, in the first row of each of
    the n groups."""
    draft_entropy: Float[AnyArray, "B K"]
    """Entropy of the draft in nats, over the rounds in `reached`. 0 for deterministic drafts."""
    start_round: Int[AnyArray, " B"]
    """Rounds of the row's shard before it got a slot."""
    end_round: Int[AnyArray, " B"]
    """Rounds of the row's shard until it ended, 0 if it has not."""
    target_entropy: Float[AnyArray, " B"]
    """Entropy of the target in nats, over the tokens of the response."""


@pytree
class Rollout(Tree):
    """Generated rows: each prompt, directly followed by its response.

    `S` is the maximum length of a prompt plus that of a response.
    """

    tokens: Int[AnyArray, "B S"]
    prompt_lengths: Int[AnyArray, " B"]
    lengths: Int[AnyArray, " B"]
    """Tokens of prompt and response together."""
    logprobs: Float[AnyArray, "B S"]
    """Log-probability of each response token under the sampling distribution, and 0 elsewhere."""
    origin: Int8[AnyArray, "B S"]
    """Origin of each token, one of the constants `PROMPT` to `DRAFTED`, or more. The policy sampled
    those from `UNDRAFTED` on."""
    status: Int[AnyArray, " B"]
    """Status of each row, one of the constants `RUNNING` to `IDLE`."""
    version: Int[AnyArray, " B"]
    """Version of the weights that sampled the row: number of batches learned from."""
    statistics: Statistics


@pytree
class PackingPlan(Tree):
    """Assignment of rows to micro-batches.

    In each micro-batch, a data shard has one pack of `batch.micro_tokens` positions.
    """

    # The order gives all data shards about the same number of tokens.
    row_order: Int[AnyArray, " B"]
    """Row that is moved to each place. A data shard has as many places as rows."""
    micro_batch: Int[AnyArray, "U B"]
    """Micro-batch that reads the row at each place, in each of U mini-batches. -1 if none does."""
    text_start: Int[AnyArray, "U B"]
    """Position in the pack at which the row's text starts."""
    micro_batch_count: Int[AnyArray, " U"]
    """Number of micro-batches in each mini-batch."""


class Pack(NamedTuple):
    """Packed sequences: B sequences of T positions, each with several texts.

    A position reads a token and predicts its label, the next token of the same text. Positions
    after the last text are texts of one token without a label.
    """

    tokens: Int[Array, "B T"]
    labels: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    """Whether the label is learned from."""
    positions: Int[Array, "B T"]
    """Position of each token in its own text."""
    text_start: Int[Array, "B T"]
    """Position in the sequence at which the token's text starts."""


@pytree
class ScoredRollout(Tree):
    """A rollout with its rewards."""

    rollout: Rollout
    rewards: Float[AnyArray, " B"]
    valid: Bool[AnyArray, " B"]
    """Whether the row has a reward. If not, generation or scoring failed, and the loss masks it."""
    plan: PackingPlan
    """Assignment of rows to micro-batches."""
    # Data rather than structure, so that evaluations and the first call share the program of
    # training.
    learn: Bool[AnyArray, ""]
    """Whether to learn from it in this call. False in the first call, in evaluations, and if a
    filter has left no token to read."""


@pytree
class NetworkState(Tree):
    """A network in training, with its optimizer."""

    network: PyTree
    """Master weights."""
    optimizer: PyTree
    """State of the optimizer."""
    skipped: Int[Array, ""]
    """Updates skipped because loss or gradient were not finite, or the batch had no labels."""
    skipped_in_row: Int[Array, ""]
    """Updates skipped since the last one that was not."""


@pytree
class AbsentNetwork(Tree):
    """State of a draft that has no weights.

    It has no leaves.
    """

    network: None = None
    """The empty tree."""


@pytree
class AcceptanceEstimate(Tree):
    """Acceptance of drafts by depth, as decayed sums over calls."""

    # The draft learns and the policy moves, so earlier calls count less.
    reached: Float[Array, "*n K"]
    """Drafts offered after all before them were accepted."""
    accepted: Float[Array, "*n K"]
    """Drafts in `reached` that were accepted."""
    seconds_to_lose: Float[Array, "*n"]
    """Budget in seconds, by the cost table, for trying a longer draft."""


@pytree
class LengthChooser(Tree):
    """Data by which rounds choose their draft length."""

    acceptance: AcceptanceEstimate
    """Acceptance before the call."""
    round_cost: Float[Array, "A S C"]
    """Seconds of a round by draft length, number of slots (descending) and context length. 0 if not
    measured."""


@pytree
class NoChooser(Tree):
    """Absence of a `LengthChooser`: all rounds have the same draft length."""


@pytree
class Drafter(Tree):
    """The draft in the rollout layout, with its temperatures and lengths."""

    network: PyTree
    factor_index: Int[Array, " K"]
    """Index in the grid of the temperature factor at each depth."""
    chooser: LengthChooser | NoChooser = NoChooser()


@pytree
class ExportedWeights(Tree):
    """Policy and draft as the learner gives them away: merged and cast, in its own layout."""

    policy: PyTree
    draft: PyTree
    """None if the draft has no weights."""
    version: Int[Array, ""]
    """Version of the policy: number of batches learned from."""


@pytree
class RolloutWeights(Tree):
    """Policy and draft in the rollout layout."""

    target: PyTree
    drafter: Drafter
    version: Int[Array, ""]
    """Version of the policy: number of batches learned from."""


@pytree
class LearnerState(Tree):
    """State of the learner between batches."""

    policy: NetworkState
    draft: NetworkState | AbsentNetwork
    # Data rather than structure, so that a frozen and a learning draft share one program.
    online: Bool[Array, ""]
    """Whether the draft learns during the run."""
    version: Int[Array, ""]
    """Version of the policy: number of batches learned from."""
    recompute: Bool[Array, ""]
    """Whether to recompute old log-probabilities.

    If not, those of generation are used. With one update per batch, rows of the current version
    take those of the learning pass.
    """
    # It is only read, so it has the dtype of matrix products, which often takes half the memory.
    reference: PyTree = None
    """Reference policy of the KL penalty. None without a penalty, or if it is the policy without
    its adapters."""


@pytree
class AcceptanceTrend(Tree):
    """Trend of the acceptance length over rollouts."""

    length: Float[AnyArray, ""]
    """Acceptance length of the last rollout."""
    best: Float[AnyArray, ""]
    """Acceptance length at its last clear rise."""
    stale: Int[AnyArray, ""]
    """Rollouts since `best` rose."""


@pytree
class GeneratorState(Tree):
    """State of the generator between rollouts: measurements, no weights."""

    overlap_by_factor: Float[AnyArray, "K F"]
    """Decayed sums of expected acceptance, by which `drafts.draft_temperature` chooses."""
    trend: AcceptanceTrend
    """Trend by which `drafts.schedule` decides whether the draft learns."""
    chooser: LengthChooser | NoChooser = NoChooser()


@pytree
class TrainState(Tree):
    """State of training between calls."""

    learner: LearnerState
    generator: GeneratorState
