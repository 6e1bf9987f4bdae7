"""Whether a draft that was loaded fits its policy: agreement and acceptance on a few prompts, and
what is wired wrongly if they are poor.

A wrong layer, flag or base of the positions raises no error anywhere; it only makes a draft useless
(drafters.md 1.3: acceptance of 45 % becomes 10 %, 59 % becomes 1 %).
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import mesh as meshes
from jaxspec.config.settings import ModelConfig
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.eagle3 import Eagle3, with_vocabulary
from jaxspec.models.layers import cast
from jaxspec.models.mtp import Mtp
from jaxspec.rl.draft_objective import Objective, draft_loss, total_variation
from jaxspec.rl.train_batch import Pack, whole_rows
from jaxspec.rollout.generator import Generator
from jaxspec.state import PyTree

POOR, CHANCE = 0.5, 0.2
"""Agreement below which repairs are tried, and below which a draft for which none helps is taken to
be made for other weights: published heads agree with their policy in more than half of all tokens,
miswired ones in 1 to 15 % (drafters.md 1.3), weak ones in between."""
BETTER, TIMES = 0.15, 1.5
"""A repair must agree in so much more of the tokens, and so many times as often, to be named."""
LEAST = 64
"""Predicted tokens without which nothing is concluded."""


class Reading(NamedTuple):
    """What a draft does on text, by depth (1, 2, ...), after true tokens."""

    agreement: list[float]
    """Share of tokens where the draft's likeliest is the policy's."""
    acceptance: list[float]
    """Mean of sum_v min(policy, draft) at the rollouts' temperature."""
    tokens: int
    """Predicted at depth 1."""
    warning: str = ""
    """What is wired wrongly, and what mends it; or that the draft is useless; empty: neither."""


class Repair(NamedTuple):
    """The same weights, wired in another way."""

    says: str
    mend: str
    network: PyTree
    taps: tuple[int, ...]


def probe(
    generator: Generator,
    policy: Decoder,
    network: PyTree,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
) -> Reading:
    """Compares a draft with its policy on texts of `lengths` tokens, and looks for the wrong wire
    where they do not agree.

    `tokens` are the same in all processes: a few dozen prompts, or whole texts.
    """
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    texts = whole_rows(
        *jax.device_put((np.asarray(tokens, np.int32), inside), meshes.replicated(generator.mesh))
    )
    dtype, taps = jnp.dtype(generator.dtype), generator.taps

    def read(
        network: PyTree, taps: tuple[int, ...], depths: int
    ) -> tuple[Float[Array, " A"], Float[Array, " A"]]:
        objective = Objective(
            total_variation, depths, 1.0, generator.settings.processing.temperature
        )
        return _read(policy, network, _pass(policy, texts, taps, dtype), texts, objective, dtype)

    agreement, acceptance = jax.device_get(read(network, taps, max(2, generator.draft_length)))
    skipped = 1 if isinstance(network, Decoder) else 2  # tokens before the first that is predicted
    reading = Reading(
        agreement.tolist(), acceptance.tolist(), int(np.maximum(lengths - skipped, 0).sum())
    )
    poor = next((depth for depth, share in enumerate(reading.agreement[:2]) if share < POOR), None)
    if poor is None or reading.tokens < LEAST:
        return reading
    readings = {}
    for repair in repairs(network, taps, policy.config):
        agreement, _ = read(repair.network, repair.taps, poor + 1)
        readings[repair[:2]] = float(agreement[poor])
    return reading._replace(warning=_diagnosis(reading.agreement[poor], poor + 1, readings))


def report(reading: Reading) -> str:
    """What `probe` found, in one line."""
    if not reading.tokens:
        return "the draft could not be compared with the policy: no prompt has three tokens"
    shares = ", ".join(f"{share:.0%}" for share in reading.agreement)
    overlaps = ", ".join(f"{share:.2f}" for share in reading.acceptance)
    kept = 1 + np.cumprod(reading.acceptance).sum()
    agrees = (
        f"the draft's likeliest token is the policy's in {shares} of {reading.tokens} prompt tokens"
    )
    return f"{agrees} (by depth); expected acceptance {overlaps}, hence {kept:.2f} tokens a round"


def repairs(network: PyTree, taps: tuple[int, ...], target: ModelConfig) -> Iterator[Repair]:
    """The likely mistakes of a loader, undone one at a time."""
    if isinstance(network, Mtp):
        order, name = (
            ("[hidden, embedding]", "MiMo's")
            if network.embedding_first
            else ("[embedding, hidden]", "DeepSeek's")
        )
        mend = f"{name} names for its tensors, from which the order follows"
        yield Repair(
            f"its layers read {order}",
            mend,
            _with(network, embedding_first=not network.embedding_first),
            taps,
        )
    if isinstance(network, Eagle3):
        yield from _shifted(network, taps, target.layers)
        for flag in ("norm_before_residual", "norm_output"):
            value = not getattr(network.form, flag)
            changed = _with(network, form=dataclasses.replace(network.form, **{flag: value}))
            yield Repair(
                f"{flag} is {value}",
                f'"{flag}": {str(value).lower()} in the draft\'s config.json',
                changed,
                taps,
            )
        yield from _ids(network, taps)
        bases = {"the policy's": target.rope_theta, "the default": 1e4}
        for whose, theta in bases.items():
            if theta != network.config.rope_theta:
                changed = _with(
                    network, config=dataclasses.replace(network.config, rope_theta=theta)
                )
                yield Repair(
                    f"rope_theta is {whose} {theta:g}",
                    f'"rope_theta": {theta:g} in the draft\'s config.json',
                    changed,
                    taps,
                )


def _shifted(network: Eagle3, taps: tuple[int, ...], layers: int) -> Iterator[Repair]:
    for by in (1, -1):
        moved = tuple(tap + by for tap in taps)
        if moved and moved[0] >= 0 and moved[-1] <= layers:
            said = (
                f"it reads one layer {'later' if by > 0 else 'earlier'}, after"
                f" {', '.join(map(str, moved))}"
            )
            yield Repair(said, f"--head.taps {' '.join(map(str, moved))}", network, moved)


def _ids(network: Eagle3, taps: tuple[int, ...]) -> Iterator[Repair]:
    if network.vocabulary is None:
        return
    stored = np.asarray(jax.device_get(network.vocabulary[...]))
    ids = stored - np.arange(stored.size, dtype=np.int32)
    if (np.diff(ids) > 0).all() and (ids != stored).any():
        yield Repair(
            "its d2t holds token ids, not offsets",
            "d2t - arange(len(d2t)) in the draft's file",
            with_vocabulary(network, ids),
            taps,
        )


def _with(network: Any, **settings: Any) -> Any:
    """The same weights in a network with other settings."""
    other = jax.tree.map(lambda leaf: leaf, network)
    for name, value in settings.items():
        setattr(other, name, value)
    return other


def _diagnosis(share: float, depth: int, readings: dict[tuple[str, str], float]) -> str:
    poor = f"the draft agrees with the policy in {share:.0%} of the tokens at depth {depth}"
    best = max(readings, key=lambda repair: readings[repair], default=None)
    if best is not None and readings[best] >= max(share + BETTER, share * TIMES):
        says, mend = best
        return f"{poor}, but in {readings[best]:.0%} if {says}: set {mend}"
    if share >= CHANCE:
        return ""
    tried = (
        f"; none of these mends it: {', '.join(says for says, _ in readings)}" if readings else ""
    )
    return (
        f"{poor}{tried}. Most likely it was trained for other weights; train it further"
        " (--offline.steps), or leave it out"
    )


@partial(jax.jit, static_argnames=("taps", "dtype"))
def _pass(policy: Decoder, texts: Pack, taps: tuple[int, ...], dtype: Any) -> Forward:
    return cast(policy, dtype)(texts.tokens, texts.positions, taps=taps)


@partial(jax.jit, static_argnames=("objective", "dtype"))
def _read(
    policy: Decoder,
    network: PyTree,
    forward: Forward,
    texts: Pack,
    objective: Objective,
    dtype: Any,
) -> tuple[Float[Array, " A"], Float[Array, " A"]]:
    found = draft_loss(cast(network, dtype), cast(policy, dtype), forward, texts, objective)
    return found.agreement, found.acceptance
