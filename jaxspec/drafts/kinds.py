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


def kind_of(name: str) -> Kind:
    """The kind of this name. A kind's file is imported when it is first asked for, since settings
    know the names, and reading them must not wait for networks.

    Raises:
      ValueError: the name has no file here.
    """
    match name:
        case "eagle3":
            from jaxspec.drafts.eagle3 import EAGLE3 as found
        case "mtp":
            from jaxspec.drafts.mtp import MTP as found
        case "model":
            from jaxspec.drafts.model import MODEL as found
        case "ngram":
            from jaxspec.drafts.lookup import NGRAM as found
        case "history":
            from jaxspec.drafts.lookup import HISTORY as found
        case "none":
            from jaxspec.drafts.base import PLAIN as found
        case _:
            raise ValueError(f"{name} is no kind of draft that kind_of knows")
    return found


def learned(name: str) -> Learned:
    """What a kind with weights has beside the others.

    Raises:
      ValueError: it has none.
    """
    found = kind_of(name).learned
    if found is None:
        raise ValueError(f"a draft of kind {name} has no weights")
    return found


def build_draft(spec: DraftSpec, stop_ids: tuple[int, ...]) -> Draft | None:
    """The draft of a run; None is plain decoding."""
    kind = kind_of(spec.kind)
    draft, beside = kind.build(spec, stop_ids), kind_of(spec.lookup)
    if draft is None or kind.learned is None or beside.lookup == "none":
        return draft
    from jaxspec.drafts.lookup import preferring

    lookup = beside.build(spec, stop_ids)
    assert lookup is not None, "a look-up proposes"
    return preferring(lookup, draft)


def build_network(spec: DraftSpec, key: Any) -> Any:
    """The draft's network with fresh weights; None when the kind has nothing to learn."""
    own = kind_of(spec.kind).learned
    return None if own is None else own.network(spec, key)


def check_fits(kind: str, network: Any, target: ModelSpec) -> None:
    """Whether a draft's network can draft for a target: it reads the target's hidden states and
    embedding, and speaks its vocabulary.

    Raises:
      ConfigError: names what differs, with both numbers.
    """
    from jaxspec.inputs.checked import require

    sizes = learned(kind).sizes(network, target)
    wrong = [
        f"its {name} is {own}, the policy's {wanted}"
        for name, (own, wanted) in sizes.items()
        if own != wanted
    ]
    require(
        not wrong,
        f"the {type(network).__name__} draft does not fit the policy: {'; '.join(wrong)}. Train or"
        " load one that was made for this policy",
    )
