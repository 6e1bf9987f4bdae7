"""What one micro-batch adds to a batch: one forward pass of the policy, and from the same logits
its own loss and the draft's."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.inputs.spec import ModelSpec
from jaxspec.kernels.chunks import map_in_chunks
from jaxspec.kernels.order import enforce_order, order_after, signal_ready
from jaxspec.mesh import ROWS
from jaxspec.models.decoder import Decoder, DecoderOutput, cast_head, extract_head
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.models.moe import Traffic
from jaxspec.rl.draft_objective import Compared, Objective, compared, drafted, predicts
from jaxspec.rl.fsdp import Shards
from jaxspec.rl.logprobs import label_logprobs
from jaxspec.rl.loss_terms import Gap, LossInputs, bounded, inside, k3, no_gap
from jaxspec.rl.losses import Aggregation, PolicyLoss
from jaxspec.rl.train_batch import Pack, TrainBatch, learnt_before, read_lengths
from jaxspec.sampling import Processing
from jaxspec.state import PyTree


class Sums(NamedTuple):
    """What a pass adds up over the labels to learn, on all shards; A depths of the draft (none
    without one)."""

    policy_loss: Float[Array, ""]
    """Each label with its weight: the loss of the batch."""
    entropy: Float[Array, ""]
    gap: Gap
    measured: dict[str, Float[Array, ""]]
    """What the policy's loss measures."""
    largest: dict[str, Float[Array, ""]]
    """Not a sum: the largest of `NAME/max`, and of the negative of `NAME/min`."""
    experts: Traffic | None
    """Of the policy, if it has experts and learns."""
    draft: Compared

    def plus(self, other: "Sums") -> "Sums":
        """Both together."""
        largest = jax.tree.map(jnp.maximum, self.largest, other.largest)
        sums = jax.tree.map(jnp.add, self, other)
        return sums._replace(gap=self.gap.plus(other.gap), largest=largest)

    def over_shards(self) -> "Sums":
        """Of all data shards together, from one of them."""
        of_gap, largest = lax.pmax((self.gap.largest, self.largest), ROWS)
        sums = lax.psum(self, ROWS)
        return sums._replace(gap=sums.gap._replace(largest=of_gap), largest=largest)

    @property
    def extremes(self) -> dict[str, Float[Array, ""]]:
        """The largest and least values by name."""
        return {
            name: -value if name.endswith("/min") else value for name, value in self.largest.items()
        }


class Counts(NamedTuple):
    """What sums are divided by: known of the whole batch before the first micro-batch is read, so
    that means are of the batch."""

    tokens: Float[Array, ""]
    """Labels to learn."""
    texts: Float[Array, ""]
    """Rows that have some."""
    by_depth: Float[Array, " A"]
    """Labels that each depth of the draft predicts."""
    read: Float[Array, ""]
    """Positions that hold a text."""


MEASURES = ("advantage/zero", "ratio/kl")
"""Measured whatever the policy's loss is."""
EXTREMES = ("advantage/max", "advantage/min", "ratio/max", "ratio/min")


def _log_ratio(inputs: LossInputs) -> Float[Array, "B T"]:
    """Of policy to old policy, within bounds; 0 outside the labels to learn."""
    log_ratio = inside(inputs, inputs.policy_logprobs - inputs.old_logprobs)
    return lax.stop_gradient(bounded(log_ratio))


def _measures(inputs: LossInputs) -> dict[str, Float[Array, "B T"]]:
    """Labels that teach nothing, and the divergence of the old policy from this one."""
    nothing = (inputs.advantages == 0).astype(inputs.advantages.dtype)
    return {"advantage/zero": nothing, "ratio/kl": k3(_log_ratio(inputs))}


def _largest(inputs: LossInputs) -> dict[str, Float[Array, ""]]:
    """The largest of each of `EXTREMES` over the labels to learn."""
    values = {"advantage": inputs.advantages, "ratio": jnp.exp(_log_ratio(inputs))}

    def largest(values: Float[Array, "B T"]) -> Float[Array, ""]:
        return jnp.max(jnp.where(inputs.chosen, values, -jnp.inf))

    return {
        f"{name}/{end}": largest(sign * value)
        for name, value in values.items()
        for end, sign in (("max", 1), ("min", -1))
    }


def count_labels(chosen: Bool[Array, "B S"], dtype: np.dtype) -> Float[Array, " B"]:
    """Labels to learn from of each row. Nothing predicts a row's first token."""
    return jnp.sum(chosen[:, 1:], axis=1, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of policy and draft; None for one that does not learn."""

    policy: PolicyLoss | None
    aggregation: Aggregation
    draft: Objective | None
    processing: Processing
    taps: tuple[int, ...]
    """Layer boundaries whose hidden states the draft reads."""
    wide: np.dtype
    """Type of losses and of what is added up."""
    ordered: bool
    """Whether collectives need an order by data, as on several CPU devices."""

    @property
    def depths(self) -> int:
        """Depths of the draft that learn."""
        return 0 if self.draft is None else self.draft.depths

    def counts(self, batch: TrainBatch, mini: Int[Array, ""]) -> Counts:
        """Counts of a mini-batch over all shards, from one of them."""
        wide = self.wide
        is_read = batch.plan.micro[mini] >= 0
        labels = count_labels(batch.chosen, wide)
        here = batch.chosen[:, 1:] & is_read[:, None]
        by_depth = jnp.zeros((0,), wide)
        if self.draft is not None:
            positions = jnp.broadcast_to(jnp.arange(here.shape[1], dtype=jnp.int32), here.shape)
            inside = predicts(self.draft, here, positions, self.depths)
            by_depth = jnp.sum(inside, axis=(0, 1), dtype=wide)
        read = jnp.sum(jnp.where(is_read, read_lengths(batch.chosen), 0), dtype=wide)
        tokens = jnp.sum(jnp.where(is_read, labels, 0))
        texts = jnp.sum(is_read & (labels > 0), dtype=wide)
        return lax.psum(Counts(tokens, texts, by_depth, read), ROWS)

    def nothing(self, counts: Counts, config: ModelSpec) -> Sums:
        """The sums before the first micro-batch; `config` is the policy's."""
        zero = jnp.zeros_like(counts.tokens)
        by_layer, experts = jnp.zeros((config.layers,), zero.dtype), config.family.experts
        by_expert = jnp.zeros((config.layers, experts), zero.dtype)
        return Sums(
            policy_loss=zero,
            entropy=zero,
            gap=no_gap(zero.dtype),
            measured=dict.fromkeys(self.measures, zero),
            largest=dict.fromkeys(EXTREMES if self.policy else (), zero - jnp.inf),
            experts=Traffic(by_expert, by_layer) if experts and self.policy else None,
            draft=Compared(*[jnp.zeros_like(counts.by_depth)] * 3),
        )

    @property
    def measures(self) -> list[str]:
        """Names of what the policy's loss measures."""
        if self.policy is None:
            return []
        inputs: dict[str, Any] = dict.fromkeys(LossInputs._fields, np.zeros((1, 1), self.wide))
        inputs |= {"chosen": np.zeros((1, 1), bool), "first": np.zeros((1, 1), np.int32)}
        return sorted([*jax.eval_shape(self.policy, LossInputs(**inputs)).measured, *MEASURES])

    def total(self, sums: Sums, counts: Counts) -> Float[Array, ""]:
        """The sums' part of the batch's loss, the draft's beside the policy's: neither has a
        gradient in the other's weights."""
        loss = jnp.zeros((), sums.policy_loss.dtype)
        if self.policy is not None:
            loss = loss + sums.policy_loss
        if self.draft is not None:
            loss = loss + self.of_draft(sums.draft.loss, counts)
        return loss

    def of_draft(self, by_depth: Float[Array, " A"], counts: Counts) -> Float[Array, ""]:
        """The weighted sum of the depths' means."""
        assert self.draft is not None, "only a draft with an objective has a loss"
        weights = jnp.asarray(self.draft.weights(len(by_depth)), by_depth.dtype)
        return jnp.sum(weights * by_depth / jnp.maximum(counts.by_depth, 1))

    def sums(
        self,
        policy: Decoder | AdaptedDecoder,
        draft: PyTree,
        shards: Shards,
        online: Bool[Array, ""],
        pack: Pack,
        row: Int[Array, "1 T"],
        batch: TrainBatch,
        counts: Counts,
    ) -> Sums:
        """What one micro-batch adds to the sums; the draft is read where it is `online`.

        `row` says of which row of the batch each position of the pack is.
        """
        target, wide, depths = attach_lora(policy), self.wide, self.depths
        if batch.states is None:
            forward = target(
                pack.tokens,
                pack.positions,
                taps=self.taps,
                first=pack.first,
                prepare_layer=shards.layer_whole,
                traffic_mask=pack.chosen if self.policy else None,
            )
        else:
            assert self.policy is None, "layers that are not run would learn nothing"
            kept = jax.tree.map(lambda by_row: by_row[row, pack.positions], batch.states)
            forward = DecoderOutput(kept.hidden, kept.taps, cache=None, traffic=None)
        network, hidden = draft, jnp.zeros((*pack.tokens.shape, depths, 0), wide)
        if self.draft is not None:
            last, network = shards.draft_first(forward.hidden, draft)
            forward = forward._replace(hidden=last)
            hidden = self._drafted(network, online, target, forward, pack, depths)
            if self.ordered:
                (hidden,), last = enforce_order((hidden,), last)
                forward = forward._replace(hidden=last)
        # Once, not in every chunk: a chunk would cast the whole head forward and backward.
        dtype = target.config.dtype
        target, network = cast_head(target, dtype), cast_head(network, dtype)

        def chunk(
            networks: Any, hidden_target: Any, hidden: Any, labels: Any, produced: Any
        ) -> tuple[Any, Any, Compared]:
            target, network = networks
            logits = target.logits(hidden_target)
            logprobs, entropy = self._of_labels(logits, labels, produced)
            nothing = Compared(*[jnp.zeros(hidden.shape[:3], wide)] * 3)
            if self.draft is None:
                return logprobs, entropy, nothing
            if self.ordered:
                (logprobs, entropy), hidden = enforce_order((logprobs, entropy), hidden)
            run = partial(compared, network, lax.stop_gradient(target), objective=self.draft)
            # The draft's loss reads the policy's logits and must have no gradient in its weights.
            logits = lax.stop_gradient(logits)
            return logprobs, entropy, lax.cond(online, run, lambda *_: nothing, logits, hidden)

        elements = len(pack.tokens) * target.config.vocab * (1 + depths)
        parts = forward.hidden, hidden, pack.labels, learnt_before(pack)
        heads = extract_head(target), network
        logprobs, entropy, found = map_in_chunks(chunk, heads, elements, *parts, mask=pack.chosen)

        def over_labels(values: Float[Array, "1 T"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(pack.chosen, values, 0))

        inputs = self._inputs(logprobs, entropy, pack, row, batch)
        # older rows differ by what was learnt since, which is no fault of what was recorded
        current = pack.chosen if batch.current is None else pack.chosen & batch.current[row]
        loss, measured, largest = jnp.zeros((), wide), {}, {}
        if self.policy is not None:
            labels = count_labels(batch.chosen, wide)[row]
            least = jnp.maximum(counts.tokens, 1), jnp.maximum(counts.texts, 1)
            by_label, measures = self.policy(inputs)
            loss = over_labels(self.aggregation(labels, *least) * by_label)
            measures = measures | _measures(inputs)
            measured = {name: over_labels(value) for name, value in measures.items()}
            largest = _largest(inputs)
        inside = jnp.zeros(found.loss.shape, bool)
        if self.draft is not None:
            inside = predicts(self.draft, pack.chosen, pack.positions, depths)
        return Sums(
            policy_loss=loss,
            entropy=over_labels(lax.stop_gradient(entropy)),
            gap=Gap.of(lax.stop_gradient(logprobs), inputs.sampled_logprobs, current),
            measured=measured,
            largest=largest,
            experts=forward.traffic,
            draft=Compared(*(jnp.sum(jnp.where(inside, part, 0), axis=(0, 1)) for part in found)),
        )

    def _of_labels(self, logits: Any, labels: Any, produced: Any) -> tuple[Any, Any]:
        """Log-probabilities of labels, and the entropy of their distributions; zeros where the
        policy does not learn, and nothing looks at them."""
        if self.policy is None:
            nothing = jnp.zeros(labels.shape, self.wide)
            return nothing, nothing
        return label_logprobs(logits, labels, produced, self.processing)

    def _inputs(
        self,
        logprobs: Float[Array, "1 T"],
        entropy: Float[Array, "1 T"],
        pack: Pack,
        row: Int[Array, "1 T"],
        batch: TrainBatch,
    ) -> LossInputs:
        """What the policy's loss reads at the labels of a pack."""
        # A position predicts the next one's token, and what was recorded stands with the token.
        following = jnp.minimum(pack.positions + 1, batch.tokens.shape[1] - 1)

        def recorded(by_row: Float[Array, "B S"] | None) -> Float[Array, "1 T"]:
            return (
                jnp.zeros_like(logprobs)
                if by_row is None
                else by_row[row, following].astype(self.wide)
            )

        sampled, own = recorded(batch.sampled_logprobs), lax.stop_gradient(logprobs)
        old = own if batch.old_logprobs is None else recorded(batch.old_logprobs)
        advantages = batch.advantages
        by_row = advantages.ndim == 1
        if batch.on_policy is not None:
            old = jnp.where(batch.on_policy[row], own, old)
        return LossInputs(
            policy_logprobs=logprobs,
            old_logprobs=old,
            sampled_logprobs=sampled,
            reference_logprobs=recorded(batch.reference_logprobs),
            entropy=entropy,
            advantages=advantages[row].astype(self.wide) if by_row else recorded(advantages),
            chosen=pack.chosen,
            first=pack.first,
        )

    def logprobs(self, policy: Decoder | AdaptedDecoder, shards: Shards, pack: Pack) -> Array:
        """Log-probabilities of a pack's labels [1 T], by a forward pass alone."""
        target = attach_lora(policy)
        forward = target(
            pack.tokens, pack.positions, first=pack.first, prepare_layer=shards.layer_whole
        )
        target = cast_head(target, target.config.dtype)

        def chunk(target: Any, hidden: Any, labels: Any, produced: Any) -> Float[Array, "B T"]:
            return label_logprobs(target.logits(hidden), labels, produced, self.processing)[0]

        elements = len(pack.tokens) * target.config.vocab
        parts = forward.hidden, pack.labels, learnt_before(pack)
        return map_in_chunks(chunk, extract_head(target), elements, *parts, mask=pack.chosen)

    def _drafted(
        self,
        network: PyTree,
        online: Bool[Array, ""],
        target: Decoder,
        forward: DecoderOutput,
        pack: Pack,
        depths: int,
    ) -> Float[Array, "1 T A D"]:
        """What the draft's head reads; zeros where it does not learn."""
        detached, objective = lax.stop_gradient((target, forward)), self.draft
        assert objective is not None, "only a draft with an objective is read"
        if self.ordered:
            pack = pack._replace(tokens=order_after(pack.tokens, [signal_ready(forward.hidden)]))

        def unroll(network: PyTree) -> Float[Array, "1 T A D"]:
            return drafted(network, *detached, pack, depths, objective)

        shape = jax.eval_shape(unroll, network)
        return lax.cond(online, unroll, lambda _: jnp.zeros(shape.shape, shape.dtype), network)
