"""Draft variants that `bench drafts` compares."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.config.from_checkpoint import resolve_config
from jaxspec.config.settings import DraftKind, DraftSampling, LookupKind, ResolvedConfig, VerifyRule

SWEPT_SETTINGS = (
    "rollout.draft.kind",
    "rollout.draft.sampling",
    "rollout.verify",
    "rollout.lookup.beside",
)
"""Settings that the variants set."""


class DraftVariant(NamedTuple):
    """Changes to the config's draft settings.

    Each variant is a row of the table.
    """

    name: str
    kind: DraftKind
    sampling: DraftSampling = "auto"
    verify: VerifyRule = "block"
    lookup: LookupKind = "none"
    is_generic: bool = False
    """Whether `--generic` names its origin: a text that the policy did not write, or a folder."""
    chooses_length: bool = False
    """Whether each round chooses its draft length. If not, the config sets it."""


# Plain decoding comes first: it is the baseline of round costs and speed-ups.
VARIANTS = (
    DraftVariant("none", "none"),
    DraftVariant("eagle3", "eagle3", "argmax"),
    DraftVariant("eagle3", "eagle3", "sample"),
    DraftVariant("eagle3", "eagle3"),
    DraftVariant("eagle3", "eagle3", verify="token"),
    DraftVariant("eagle3", "eagle3", verify="coupled"),
    DraftVariant("eagle3-generic", "eagle3", is_generic=True),
    DraftVariant("eagle3", "eagle3", chooses_length=True),
    DraftVariant("mtp", "mtp"),
    DraftVariant("mtp", "mtp", chooses_length=True),
    DraftVariant("model", "model"),
    DraftVariant("ngram", "ngram"),
    DraftVariant("history", "history"),
    DraftVariant("eagle3+history", "eagle3", lookup="history"),
    DraftVariant("eagle3+ngram", "eagle3", lookup="ngram"),
)


def apply_variant(
    variant: DraftVariant,
    config: ResolvedConfig,
    generic: str = "generic",
    log: Callable[[str], Any] = print,
) -> ResolvedConfig:
    """Returns the config with a variant's draft.

    The draft keeps the config's settings that its kind has: K, temperature, sizes, lookup rules.
    `generic` is the text that a generic draft is trained on, as in `offline.text`, or the
    folder of a finished draft. The sizes of a finished draft come from its own files. `log` prints
    a line about them.

    Raises:
      ConfigError: the folder holds no such draft.
    """
    draft = config.rollout.draft
    draft = replace(draft, kind=variant.kind, sampling=variant.sampling)
    draft = replace(draft, draft_length="auto") if variant.chooses_length else draft
    lookup = replace(config.rollout.lookup, beside=variant.lookup)
    rollout = replace(config.rollout, draft=draft, lookup=lookup, verify=variant.verify)
    if not variant.is_generic:
        return replace(config, rollout=rollout)
    if Path(generic).expanduser().is_dir():
        rollout = replace(rollout, draft=replace(draft, path=generic))
        # A finished draft is not trained.
        offline = replace(config.offline, steps=0)
        return resolve_config(replace(config, rollout=rollout, offline=offline), log)
    return replace(config, rollout=rollout, offline=replace(config.offline, text=generic))
