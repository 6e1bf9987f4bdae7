"""The rows of `bench drafts`: which drafts are compared, and on what each of them was trained."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.config.from_checkpoint import resolved
from jaxspec.config.settings import DraftKind, DraftSampling, LookupKind, ResolvedConfig, VerifyRule
from jaxspec.drafts.kinds import kind_of

VARIED = ("rollout.draft.kind", "rollout.draft.sampling", "rollout.verify", "rollout.lookup.beside")
"""What the rows of the table set."""


class Variant(NamedTuple):
    """A row of the table: the config's draft settings with these in their place."""

    name: str
    kind: DraftKind
    sampling: DraftSampling = "auto"
    verify: VerifyRule = "block"
    beside: LookupKind = "none"
    generic: bool = False
    """Trained on text that the policy did not write, or loaded: what `--generic` says."""
    chosen: bool = False
    """Each round chooses its draft length, instead of the config's."""


VARIANTS = (
    Variant("none", "none"),
    Variant("eagle3", "eagle3", "argmax"),
    Variant("eagle3", "eagle3", "sample"),
    Variant("eagle3", "eagle3"),
    Variant("eagle3", "eagle3", verify="token"),
    Variant("eagle3", "eagle3", verify="coupled"),
    Variant("eagle3-generic", "eagle3", generic=True),
    Variant("eagle3", "eagle3", chosen=True),
    Variant("mtp", "mtp"),
    Variant("mtp", "mtp", chosen=True),
    Variant("model", "model"),
    Variant("ngram", "ngram"),
    Variant("history", "history"),
    Variant("eagle3+history", "eagle3", beside="history"),
    Variant("eagle3+ngram", "eagle3", beside="ngram"),
)


def config_of(
    variant: Variant,
    config: ResolvedConfig,
    generic: str = "generic",
    say: Callable[[str], Any] = print,
) -> ResolvedConfig:
    """The config with a variant's draft, which keeps what both know: K, temperature, ffn, layers,
    lookup rules.

    `generic` is the text that a generic draft is trained on, as in `offline.text`, or the folder of
    one that is ready, whose own files say its sizes, and whose reading `say` is told of.
    Raises `ConfigError` where that folder holds no such draft.
    """
    draft = config.rollout.draft
    draft = replace(
        draft,
        kind=variant.kind,
        sampling=variant.sampling,
        vocab=draft.vocab if "rollout.draft.vocab" in kind_of(variant.kind).settings else 0,
    )
    draft = replace(draft, draft_length="auto") if variant.chosen else draft
    lookup = replace(config.rollout.lookup, beside=variant.beside)
    rollout = replace(config.rollout, draft=draft, lookup=lookup, verify=variant.verify)
    if not variant.generic:
        return replace(config, rollout=rollout)
    if Path(generic).expanduser().is_dir():
        rollout = replace(rollout, draft=replace(draft, path=generic))
        offline = replace(config.offline, steps=0)
        return resolved(replace(config, rollout=rollout, offline=offline), say)
    return replace(config, rollout=rollout, offline=replace(config.offline, text=generic))
