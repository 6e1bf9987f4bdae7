"""Optimizers, and the update that refuses non-finite gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxspec.state import Learner, PyTree


def adamw(learning_rate: optax.ScalarOrSchedule, grad_clip: float, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW (betas 0.9, 0.95)."""
    return optax.chain(optax.clip_by_global_norm(grad_clip), optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay))


def warmup(peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up to `peak`, constant from then on."""
    return lambda count: peak * jnp.minimum(1.0, (count + 1) / max(steps, 1))


def cosine(peak: float, steps: int) -> optax.Schedule:
    """A twentieth of the steps of warm-up, then cosine decay to a tenth of `peak`."""
    return optax.warmup_cosine_decay_schedule(peak / 20, peak, max(1, steps // 20), max(2, steps), peak / 10)


def start(network: PyTree, optimizer: optax.GradientTransformation) -> Learner:
    """A learner that has learnt nothing yet."""
    zero = jnp.zeros((), jnp.int32)
    return Learner(network=network, optimizer=optimizer.init(network), skipped=zero, skipped_in_row=zero)


def update(
    learner: Learner, gradients: PyTree, loss: Float[Array, ""], optimizer: optax.GradientTransformation
) -> tuple[Learner, Float[Array, ""]]:
    """Applies one update and returns the gradient's norm; a non-finite loss or gradient changes only the count of skipped updates."""
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def apply(learner: Learner) -> Learner:
        changes, state = optimizer.update(gradients, learner.optimizer, learner.network)
        network: Any = optax.apply_updates(learner.network, changes)
        return learner.replace(network=network, optimizer=state, skipped_in_row=jnp.zeros((), jnp.int32))

    def skip(learner: Learner) -> Learner:
        return learner.replace(skipped=learner.skipped + 1, skipped_in_row=learner.skipped_in_row + 1)

    return jax.lax.cond(finite, apply, skip, learner), norm
