"""Look-up as draft kinds, in the row's own text or also in other answers."""

from jaxspec.drafts.base import Draft, Kind
from jaxspec.drafts.lookup.drafting import history_draft, ngram_draft
from jaxspec.drafts.lookup.settings import HistorySpec, NgramSpec


def _build_ngram(spec: NgramSpec, stop_ids: tuple[int, ...]) -> Draft:
    search = spec.settings
    return ngram_draft(spec.max_length, search.rule, search.min_match, search.max_match, stop_ids)


def _build_history(spec: HistorySpec, stop_ids: tuple[int, ...]) -> Draft:
    search = spec.settings
    return history_draft(spec.max_length, spec.group_size, search.min_match, search.max_match)


_MATCH_SETTINGS = frozenset({"rollout.lookup.min_match", "rollout.lookup.max_match"})
NGRAM = Kind(
    make_spec=NgramSpec.from_run,
    build=_build_ngram,
    shared_settings=_MATCH_SETTINGS | {"rollout.lookup.rule"},
    lookup_name="ngram",
)
HISTORY = Kind(
    make_spec=HistorySpec.from_run,
    build=_build_history,
    shared_settings=_MATCH_SETTINGS | {"rollout.lookup.past"},
    lookup_name="history",
    reads_history=True,
    single_row_kind="ngram",
)
