"""The kinds of draft, and what is built from each: a new kind is a file of its own and its name
here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxspec.drafts.base import Draft, Kind, Learned
    from jaxspec.inputs.spec import DraftSpec, ModelSpec

DraftKind = Literal["eagle3", "mtp", "model", "ngram", "history", "none"]
LookupKind = Literal["none", "ngram", "history"]
"""Kinds that find drafts in text that is there already, and may stand beside a learned one."""


def get_kind(name: str) -> Kind:
    """The kind of this name. A kind's file is imported when it is first asked for, since settings
    know the names, and reading them must not wait for networks.

    Raises:
      ValueError: the name has no file here.
    """
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
            from jaxspec.drafts.base import PLAIN as kind
        case _:
            raise ValueError(f"{name} is no kind of draft that get_kind knows")
    return kind


def get_learned(name: str) -> Learned:
    """What a kind with weights has beside the others.

    Raises:
      ValueError: it has none.
    """
    learned = get_kind(name).learned
    if learned is None:
        raise ValueError(f"a draft of kind {name} has no weights")
    return learned


def build_draft(spec: DraftSpec, stop_ids: tuple[int, ...]) -> Draft | None:
    """The draft of a run; None is plain decoding."""
    kind = get_kind(spec.kind)
    draft, lookup_kind = kind.build(spec, stop_ids), get_kind(spec.lookup)
    if draft is None or kind.learned is None or lookup_kind.lookup_name == "none":
        return draft
    from jaxspec.drafts.lookup import prefer_lookup

    lookup = lookup_kind.build(spec, stop_ids)
    assert lookup is not None, "a look-up proposes"
    return prefer_lookup(lookup, draft)


def build_network(spec: DraftSpec, key: Any) -> Any:
    """The draft's network with fresh weights; None when the kind has nothing to learn."""
    learned = get_kind(spec.kind).learned
    return None if learned is None else learned.init_network(spec, key)


def check_fits(kind: str, network: Any, target: ModelSpec) -> None:
    """Whether a draft's network can draft for a target: it reads the target's hidden states and
    embedding, and speaks its vocabulary.

    Raises:
      ConfigError: names what differs, with both numbers.
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
