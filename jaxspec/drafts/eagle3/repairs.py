"""Repairs of EAGLE-3 heads whose files were read wrong."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxspec.drafts.base import Repair
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.eagle3 import Eagle3, with_vocabulary


def list_repairs(network: Eagle3, taps: tuple[int, ...], policy: ModelSpec) -> Iterator[Repair]:
    """Yields variants of a head, each with one likely loading mistake undone."""
    yield from _repair_taps(network, taps, policy.layers)
    # Each of these can be wrong in a file without any error, and only lowers acceptance.
    for flag in ("norm_before_residual", "norm_output"):
        opposite = not getattr(network.form, flag)
        variant = _copy_with(network, form=replace(network.form, **{flag: opposite}))
        remedy = f'"{flag}": {str(opposite).lower()} in the draft\'s config.json'
        yield Repair(f"{flag} is {opposite}", remedy, variant, taps)
    yield from _repair_vocabulary(network, taps)
    for owner, theta in {"the policy's": policy.rope_theta, "the default": 1e4}.items():
        if theta != network.config.rope_theta:
            variant = _copy_with(network, config=replace(network.config, rope_theta=theta))
            remedy = f'"rope_theta": {theta:g} in the draft\'s config.json'
            yield Repair(f"rope_theta is {owner} {theta:g}", remedy, variant, taps)


def _repair_taps(network: Eagle3, taps: tuple[int, ...], layers: int) -> Iterator[Repair]:
    for shift in (1, -1):
        # Conventions differ by one in whether a tap is before or after the layer it names.
        shifted_taps = tuple(tap + shift for tap in taps)
        if shifted_taps and shifted_taps[0] >= 0 and shifted_taps[-1] <= layers:
            description = (
                f"it reads one layer {'later' if shift > 0 else 'earlier'}, after"
                f" {', '.join(map(str, shifted_taps))}"
            )
            yield Repair(
                description,
                f"--head.taps {' '.join(map(str, shifted_taps))}",
                network,
                shifted_taps,
            )


def _repair_vocabulary(network: Eagle3, taps: tuple[int, ...]) -> Iterator[Repair]:
    if network.vocabulary is None:
        return
    stored_ids = np.asarray(jax.device_get(network.vocabulary[...]))
    token_ids = stored_ids - np.arange(stored_ids.size, dtype=np.int32)
    # `d2t` stores offsets: token id = d2t[i] + i. Some files store the ids themselves.
    if (np.diff(token_ids) > 0).all() and (token_ids != stored_ids).any():
        yield Repair(
            "its d2t holds token ids, not offsets",
            "d2t - arange(len(d2t)) in the draft's file",
            with_vocabulary(network, token_ids),
            taps,
        )


def _copy_with(network: Any, **settings: Any) -> Any:
    """Copies a network with changed settings."""
    # Mapping the identity builds a new module object, so the original keeps its settings.
    copy = jax.tree.map(lambda leaf: leaf, network)
    for name, value in settings.items():
        setattr(copy, name, value)
    return copy
