"""Registry of draft kinds.

To add a kind, define it in a file of its own and add its name here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxspec.drafts.base import Draft, Kind, Learned
    from jaxspec.inputs.spec import DraftSpec, ModelSpec

DraftKind = Literal["eagle3", "mtp", "model", "ngram", "history", "none"]
LookupKind = Literal["none", "ngram", "history"]
"""Kinds that draft from existing text and can be combined with a learned draft."""


def get_kind(name: str) -> Kind:
    """Returns the kind of this name.

    Raises:
      ValueError: The name is not registered.
    """
    # Settings know the names of all kinds. Imports are local so that reading settings does not
    # import networks.
    match name:
        case "eagle3":
            from jaxspec.drafts.eagle3 import EAGLE3 as kind
        case "mtp":
            from jaxspec.drafts.mtp import MTP as kind
        case "model":
            from jaxspec.drafts.model import MODEL as kind
        case "ngram":
            from jaxspec.drafts.lookup import NGRAM as kind
        case "history":
            from jaxspec.drafts.lookup import HISTORY as kind
        case "none":
            from jaxspec.drafts.base import NO_DRAFT as kind
        case _:
            raise ValueError(f"{name} is not a registered kind of draft")
    return kind


def get_learned(name: str) -> Learned:
    """Returns the functions of a kind with weights.

    Raises:
      ValueError: The kind has no weights.
    """
    learned = get_kind(name).learned
    if learned is None:
        raise ValueError(f"a draft of kind {name} has no weights")
    return learned


def build_draft(spec: DraftSpec, stop_ids: tuple[int, ...]) -> Draft:
    """Builds a run's draft."""
    kind = get_kind(spec.kind)
    draft, lookup_kind = kind.build(spec, stop_ids), get_kind(spec.lookup)
    if kind.learned is None or lookup_kind.lookup_name == "none":
        return draft
    # Imported here, so that a run without look-up does not load it.
    from jaxspec.drafts.lookup import prefer_lookup

    return prefer_lookup(lookup_kind.build(spec, stop_ids), draft)


def build_network(spec: DraftSpec, key: Any) -> Any:
    """Initializes the draft's network; None without weights."""
    learned = get_kind(spec.kind).learned
    return None if learned is None else learned.init_network(spec, key)


def check_fits(kind: str, network: Any, target: ModelSpec) -> None:
    """Checks that a draft fits a target.

    Hidden size, embedding and vocabulary must match.

    Raises:
      ConfigError: A size differs. The message has both numbers.
    """
    from jaxspec.inputs.checked import require

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
