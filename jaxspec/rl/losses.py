"""Policy losses and weights of labels.

The learner sums the losses of all labels in the loss mask, each with its weight.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.own_code import describe_error, import_function
from jaxspec.rl.loss_terms import (
    Correction,
    Loss,
    LossInputs,
    LossTerm,
    PerLabel,
    keep_weights,
    mask_labels,
    ratio_of,
    text_means,
)

PolicyLoss = Callable[[LossInputs], Loss]
"""Computes the loss of each label."""


def policy_gradient_loss(
    inputs: LossInputs,
    surrogate: "Surrogate",
    correction: Correction = keep_weights,
    terms: tuple[LossTerm, ...] = (),
) -> Loss:
    """Computes correction * surrogate plus the sum of `terms`, with the metrics of all."""
    loss, metrics = surrogate(inputs)
    weights, weight_metrics = correction(inputs)
    loss, metrics = loss * weights, metrics | weight_metrics
    for term in terms:
        added_loss, term_metrics = term(inputs)
        loss, metrics = loss + added_loss, metrics | term_metrics
    return Loss(loss, metrics)


def negative_log_likelihood(inputs: LossInputs) -> Loss:
    """Computes the supervised loss, in nats."""
    return Loss(-inputs.policy_logprobs)


# ---- surrogates, whose gradient is the policy gradient

Surrogate = Callable[[LossInputs], Loss]
"""Computes a surrogate loss per label."""


def ppo_surrogate(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 0.0
) -> Loss:
    """Computes -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    The ratio is policy over old policy. If `dual_clip` is not 0, the loss for A < 0 is at most
    -`dual_clip` * A.

    Source: arXiv 2402.03300, equation 3 without the KL term. Asymmetric clip: DAPO, arXiv
    2503.14476. Dual clip: arXiv 1912.09729, equation 5.
    """
    # The ratio is 1 in the first update on a batch of the current policy. The clip has an effect
    # only with several updates, or on rows of an older policy.
    ratio = ratio_of(_old_log_ratio(inputs))
    return _clip_ratio_loss(inputs, ratio, clip_low, clip_high, dual_clip)


def gspo_surrogate(
    inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float = 0.0
) -> Loss:
    """Computes the PPO surrogate with one ratio per response.

    The ratio is the geometric mean of the tokens' ratios.

    Source: GSPO, arXiv 2507.18071, equations 5 to 7.
    """
    ratio = ratio_of(text_means(_old_log_ratio(inputs), inputs))
    return _clip_ratio_loss(inputs, ratio, clip_low, clip_high, dual_clip)


def _clip_ratio_loss(
    inputs: LossInputs, ratio: PerLabel, clip_low: float, clip_high: float, dual_clip: float
) -> Loss:
    advantages = inputs.advantages
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    is_clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    is_clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    # The minimum does not bound a large ratio where A < 0, so the dual clip does.
    if dual_clip:
        is_clipped_high |= (advantages < 0) & (ratio > dual_clip)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)
    return Loss(loss, _ratio_metrics(ratio, is_clipped_low, is_clipped_high))


def cispo_surrogate(inputs: LossInputs, clip_low: float = 1.0, clip_high: float = 4.0) -> Loss:
    """Computes -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob.

    Labels with a clipped ratio still have a gradient.

    Source: CISPO (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.
    """
    ratio = lax.stop_gradient(ratio_of(_old_log_ratio(inputs)))
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -clipped_ratio * inputs.advantages * mask_labels(inputs, inputs.policy_logprobs)
    return Loss(loss, _ratio_metrics(ratio, ratio < 1 - clip_low, ratio > 1 + clip_high))


def reinforce_surrogate(inputs: LossInputs) -> Loss:
    """Computes -A * logprob."""
    # Without a ratio, nothing bounds the distance to the old policy.
    return Loss(-inputs.advantages * mask_labels(inputs, inputs.policy_logprobs))


def _old_log_ratio(inputs: LossInputs) -> PerLabel:
    return mask_labels(inputs, inputs.policy_logprobs - inputs.old_logprobs)


def _ratio_metrics(
    ratio: PerLabel, is_clipped_low: Bool[Array, "B T"], is_clipped_high: Bool[Array, "B T"]
) -> dict[str, PerLabel]:
    """Returns metrics of ratios and clipping."""
    ratio = lax.stop_gradient(ratio)
    return {
        "ratio/mean": ratio,
        "ratio/mean_square": ratio * ratio,
        "ratio/clipped_low": is_clipped_low.astype(ratio.dtype),
        "ratio/clipped_high": is_clipped_high.astype(ratio.dtype),
    }


def import_surrogate(name: str) -> Surrogate:
    """Imports `loss.function`, and traces it once.

    Raises:
      ConfigError: it cannot be imported, fails, or does not return one loss per token.
    """
    try:
        function = import_function(name)

        def evaluate_on_zeros() -> Any:
            # Rows and tokens differ in number, so that swapped axes are noticed.
            zeros = jnp.zeros((2, 3), jnp.float32)
            inputs = dict.fromkeys(LossInputs._fields, zeros)
            inputs |= {"loss_mask": zeros == 0, "text_start": zeros.astype(jnp.int32)}
            loss = function(LossInputs(**inputs))
            return loss.by_label if isinstance(loss, Loss) else jnp.asarray(loss)

        # Only shapes are computed. Otherwise an error would appear after minutes of compilation.
        shape = jax.eval_shape(evaluate_on_zeros).shape
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"loss.function {name}: {describe_error(error)}") from error
    require(
        shape == (2, 3),
        f"loss.function {name} gives an array of shape {shape} for tokens of shape (2, 3); give the"
        " loss at each token, and leave their mean to loss.aggregation",
    )

    def surrogate(inputs: LossInputs) -> Loss:
        loss = function(inputs)
        return loss if isinstance(loss, Loss) else Loss(loss)

    return surrogate


# ---- how labels are weighed in a batch

Aggregation = Callable[[Float[Array, "B T"], Float[Array, ""], Float[Array, ""]], PerLabel]
"""(labels of each label's text, labels of the batch, texts of the batch) -> label weights.

Only labels in the loss mask are counted, and only texts that have some.
"""


def token_mean(
    label_counts: Float[Array, "B T"], token_count: Float[Array, ""], text_count: Float[Array, ""]
) -> PerLabel:
    """Averages over all labels.

    Long responses weigh more. Source: DAPO, arXiv 2503.14476.
    """
    del text_count
    return jnp.ones_like(label_counts) / token_count


def sequence_mean(
    label_counts: Float[Array, "B T"], token_count: Float[Array, ""], text_count: Float[Array, ""]
) -> PerLabel:
    """Averages over responses.

    Tokens of long responses weigh less. Source: GRPO, arXiv 2402.03300.
    """
    del token_count
    # Texts without a label have no loss either. The bound only avoids a division by 0.
    return 1 / (jnp.maximum(label_counts, 1) * text_count)


class ConstantDivisor(NamedTuple):
    """Sum over labels with a constant divisor.

    The divisor is the maximum length times the number of requested rows. Source: Dr. GRPO, arXiv
    2503.20783.
    """

    max_length: int
    row_count: int
    """Rows of a mini-batch, including rows without labels."""

    def __call__(
        self,
        label_counts: Float[Array, "B T"],
        token_count: Float[Array, ""],
        text_count: Float[Array, ""],
    ) -> PerLabel:
        """Returns 1 / (max_length * row_count) for every label."""
        # A constant, so that a token's weight does not depend on the other samples.
        del token_count, text_count
        return jnp.ones_like(label_counts) / (self.max_length * self.row_count)
