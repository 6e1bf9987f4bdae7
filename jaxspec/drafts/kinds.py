"""Registry of draft kinds.

To add a kind, define it in a folder of its own and register it here: its name in `DraftKind`, its
section in `KindSettings` if it has settings, and its import in `get_kind`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

# Modules of settings import no networks, so that configs are read without them.
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.model.settings import DraftModelConfig
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.inputs.checked import CheckedConfig, require

if TYPE_CHECKING:
    from jaxspec.drafts.base import Draft, Kind, Learned
    from jaxspec.inputs.spec import DraftSpec, ModelSpec

DraftKind = Literal["eagle3", "mtp", "model", "ngram", "history", "none"]
LookupKind = Literal["none", "ngram", "history"]
"""Kinds that draft from existing text and can be combined with a learned draft."""


@dataclass(frozen=True, kw_only=True)
class KindSettings(CheckedConfig, prefix="rollout.draft."):
    """Settings that belong to one kind of draft. Each section is named after its kind."""

    eagle3: Eagle3Config = field(default_factory=Eagle3Config)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    model: DraftModelConfig = field(default_factory=DraftModelConfig)


SECTIONS = tuple(item.name for item in fields(KindSettings))
"""Kinds with a section of settings."""


def get_kind(name: str) -> Kind[Any]:
    """Returns the kind of this name.

    Raises:
      ValueError: The name is not registered.
    """
    # Settings know the names of all kinds. Imports are local so that reading settings does not
    # import networks.
    match name:
        case "eagle3":
            from jaxspec.drafts.eagle3.kind import EAGLE3 as kind
        case "mtp":
            from jaxspec.drafts.mtp.kind import MTP as kind
        case "model":
            from jaxspec.drafts.model.kind import MODEL as kind
        case "ngram":
            from jaxspec.drafts.lookup.kind import NGRAM as kind
        case "history":
            from jaxspec.drafts.lookup.kind import HISTORY as kind
        case "none":
            from jaxspec.drafts.base import NO_DRAFT as kind
        case _:
            raise ValueError(f"{name} is not a registered kind of draft")
    return kind


def get_learned(name: str) -> Learned[Any]:
    """Returns the functions of a kind with weights.

    Raises:
      ValueError: The kind has no weights.
    """
    learned = get_kind(name).learned
    if learned is None:
        raise ValueError(f"a draft of kind {name} has no weights")
    return learned


def build_draft(
    spec: DraftSpec, stop_ids: tuple[int, ...], lookup_spec: DraftSpec | None = None
) -> Draft:
    """Builds a run's draft.

    It is combined with the look-up of `lookup_spec`, unless that is None.
    """
    draft = get_kind(spec.kind).build(spec, stop_ids)
    if lookup_spec is None:
        return draft
    # Imported here, so that a run without look-up does not load it.
    from jaxspec.drafts.lookup.drafting import prefer_lookup

    return prefer_lookup(get_kind(lookup_spec.kind).build(lookup_spec, stop_ids), draft)


def build_network(spec: DraftSpec, key: Any) -> Any:
    """Initializes the draft's network. Returns None for a draft without weights."""
    learned = get_kind(spec.kind).learned
    return None if learned is None else learned.init_network(spec, key)


def check_fits(kind: str, network: Any, target: ModelSpec) -> None:
    """Checks that a draft fits a target.

    The sizes that its kind names, such as the vocabulary's, must match.

    Raises:
      ConfigError: A size differs. The message has both numbers.
      ValueError: The kind has no weights.
    """
    sizes = get_learned(kind).size_pairs(network, target)
    mismatches = [
        f"its {name} is {draft_size}, the policy's {policy_size}"
        for name, (draft_size, policy_size) in sizes.items()
        if draft_size != policy_size
    ]
    require(
        not mismatches,
        f"the {type(network).__name__} draft does not fit the policy: {'; '.join(mismatches)}."
        " Train or load one that was made for this policy",
    )
