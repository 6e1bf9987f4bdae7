"""The shape of the settings, the checks of each class, and what is saved of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass

import pytest

from jaxspec.config.as_json import (
    flatten_settings,
    from_json,
    list_changed_settings,
    rename_settings,
    to_json,
)
from jaxspec.config.settings import (
    BatchConfig,
    Config,
    DraftConfig,
    DraftKind,
    DraftTrainingConfig,
    EvalConfig,
    LookupConfig,
    MeshConfig,
    OfflineConfig,
    ResolvedConfig,
    RolloutConfig,
    ScheduleConfig,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.model.settings import DraftModelConfig
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import FamilySpec, HeadConfig, ModelConfig, RopeSpec


class TestSettings:
    def classes(self, value: object, depth: int = 1) -> list[tuple[type, int, int]]:
        """(class, its settings, nesting) of a config and its sections, but those that mirror a
        checkpoint's own config."""
        assert is_dataclass(value)
        sections = [
            getattr(value, item.name)
            for item in fields(value)
            if is_dataclass(getattr(value, item.name))
        ]
        here = (type(value), len(fields(value)) - len(sections), depth)
        mirrors = ModelConfig, RopeSpec, FamilySpec, HeadConfig
        inner = [found for section in sections for found in self.classes(section, depth + 1)]
        return inner if isinstance(value, mirrors) else [here, *inner]

    def test_sizes(self) -> None:
        found = self.classes(Config())
        assert {kind.__name__: count for kind, count, _ in found if count > 12} == {}
        assert sum(count for _, count, _ in found) <= 147
        # A kind of draft has a section of its own, below that of all drafts.
        assert max(depth for _, _, depth in found) <= 4

    def test_local_checks_name_key_and_number(self) -> None:
        with pytest.raises(
            ConfigError,
            match=(r"batch\.mini_batches 3 does not divide batch\.prompts 16; 1, 2, 4, 8, 16 do"),
        ):
            BatchConfig(mini_batches=3)

    @pytest.mark.parametrize(
        ("make", "parts"),
        [
            (lambda: DraftConfig(draft_length=-1), ["draft.draft_length is -1", "kind none"]),
            (lambda: DraftConfig(draft_length=0), ["draft.draft_length is 0"]),
            (
                lambda: RolloutConfig(stop=("A:", "")),
                ["rollout.stop has ''", "a character or more"],
            ),
            (lambda: RolloutConfig(stop=("\udc80",)), ["rollout.stop has '\\udc80'", "UTF-8"]),
            (lambda: DraftConfig(temperature=-0.5), ["draft.temperature is -0.5"]),
            (lambda: RolloutConfig(top_p=0.0), ["rollout.top_p is 0.0", "above 0 and at most 1"]),
            (lambda: RolloutConfig(top_p=1.5), ["rollout.top_p is 1.5"]),
            (lambda: RolloutConfig(top_p=float("nan")), ["rollout.top_p is nan"]),
            (lambda: RolloutConfig(top_k=-1), ["rollout.top_k is -1"]),
            (lambda: RolloutConfig(temperature=-1.0), ["rollout.temperature is -1.0"]),
            (
                lambda: RolloutConfig(max_new_tokens=5, min_new_tokens=5),
                ["min_new_tokens 5", "max_new_tokens 5"],
            ),
            (
                lambda: LookupConfig(min_match=6),
                ["rollout.lookup.min_match 6", "rollout.lookup.max_match 5"],
            ),
            (lambda: LookupConfig(past=-1), ["lookup.past is -1"]),
            (lambda: DraftTrainingConfig(ttt_steps=0), ["draft_training.ttt_steps is 0"]),
            (
                lambda: OfflineConfig(samples=64, rows=64),
                ["offline.samples 64", "offline.rows 64", "at least 65"],
            ),
            (
                lambda: OfflineConfig(samples=0, rows=64, text="generic"),
                ["offline.samples is 0", "at least 1"],
            ),
        ],
    )
    def test_bad_numbers_are_refused(self, make: Callable[[], object], parts: list[str]) -> None:
        with pytest.raises(ConfigError) as caught:
            make()
        assert [part for part in parts if part not in str(caught.value)] == []

    @pytest.mark.parametrize(("samples", "text"), [(65, ""), (64, "generic"), (1, "generic")])
    def test_samples_need_a_batch_to_hold_out_and_one_to_train_on_unless_there_is_text(
        self, samples: int, text: str
    ) -> None:
        assert OfflineConfig(samples=samples, rows=64, text=text).samples == samples


class TestSaved:
    def test_json_round_trip_has_no_differences(self) -> None:
        config = ResolvedConfig(rollout=RolloutConfig(banned=(3, 4)))
        assert list_changed_settings(json.loads(json.dumps(to_json(config))), config) == []

    def test_differences_are_named(self) -> None:
        now = ResolvedConfig(seed=1, batch=BatchConfig(group_size=4))
        assert list_changed_settings(to_json(ResolvedConfig()), now) == [
            "seed: 0 -> 1",
            "batch.group_size: 8 -> 4",
        ]

    def test_free_keys(self) -> None:
        now = ResolvedConfig(
            steps=7,
            workdir="w",
            schedule=ScheduleConfig(kind="staged", slice_rounds=2),
            save_every=3,
            eval=EvalConfig(every=9, samples=3),
            compare_plain=False,
            mesh=MeshConfig(data=4, tensor=2),
        )
        assert list_changed_settings(to_json(ResolvedConfig()), now) == []
        assert (
            list_changed_settings(to_json(ResolvedConfig()), now, ignored=frozenset({"workdir"}))[0]
            == f"steps: {ResolvedConfig().steps} -> 7"
        )

    def test_keys_that_came_or_went(self) -> None:
        saved = to_json(ResolvedConfig())
        saved["batch"]["entropy"] = saved["batch"].pop("prompts")
        assert list_changed_settings(saved, ResolvedConfig()) == [
            "batch.entropy: 16 -> (absent)",
            "batch.prompts: (absent) -> 16",
        ]

    def test_read_back(self) -> None:
        config = ResolvedConfig(
            seed=7,
            rollout=RolloutConfig(
                banned=(3, 4),
                stop=("\n\n", "é\\"),
                draft=DraftConfig(kind="mtp", mtp=MtpConfig(layers=2)),
            ),
            mesh=MeshConfig(tensor=2),
        )
        assert from_json(json.loads(json.dumps(to_json(config)))) == config
        assert isinstance(from_json(to_json(config)).rollout.banned, tuple)

    def test_a_config_of_the_version_before_gets_the_new_names(self) -> None:
        saved = to_json(ResolvedConfig(schedule=ScheduleConfig(kind="staged", slice_rounds=3)))
        del saved["schedule"]
        saved["staged"], saved["rollout"]["slice_rounds"] = True, 3
        config = from_json(rename_settings(saved))
        assert (config.schedule.kind, config.schedule.slice_rounds) == ("staged", 3)
        assert "staged" in saved, "the argument stays"
        current = to_json(config)
        assert rename_settings(current) == current

    @pytest.mark.parametrize("kind", ["eagle3", "mtp", "model", "ngram", "none"])
    def test_settings_of_single_kinds_of_draft_move_to_their_sections(
        self, kind: DraftKind
    ) -> None:
        config = ResolvedConfig(
            rollout=RolloutConfig(
                draft=DraftConfig(
                    kind=kind,
                    eagle3=Eagle3Config(vocab=24, ffn=8, tap_convention="boundary"),
                    mtp=MtpConfig(layers=2, ffn=8, embedding_first=False),
                    model=DraftModelConfig(layers=2, ffn=8),
                )
            )
        )
        saved = to_json(config)
        draft = saved["rollout"]["draft"]
        for section in ("eagle3", "mtp", "model"):
            draft |= draft.pop(section)
        assert "vocab" in draft
        assert from_json(rename_settings(saved)) == config
        assert "vocab" in draft, "the argument stays"
        assert rename_settings(to_json(config)) == to_json(config)

    def test_sections_of_other_kinds_of_draft_may_differ(self) -> None:
        def with_layers(kind: DraftKind, layers: int) -> ResolvedConfig:
            draft = DraftConfig(kind=kind, mtp=MtpConfig(layers=layers))
            return ResolvedConfig(rollout=RolloutConfig(draft=draft))

        saved = to_json(with_layers("mtp", 1))
        assert list_changed_settings(saved, with_layers("mtp", 2)) == [
            "rollout.draft.mtp.layers: 1 -> 2"
        ]
        assert list_changed_settings(saved, with_layers("ngram", 2)) == [
            "rollout.draft.kind: mtp -> ngram"
        ]

    def test_what_another_version_wrote_is_named(self) -> None:
        saved = to_json(ResolvedConfig())
        saved["batch"]["entropy"] = saved["batch"].pop("prompts")
        del saved["seed"]
        with pytest.raises(
            ConfigError,
            match=(
                r"lacks seed, batch\.prompts; it has batch\.entropy, which is unknown here; use"
                r" that version"
            ),
        ):
            from_json(saved)

    def test_a_section_that_is_none_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"mesh is 3; it must be of type MeshConfig"):
            from_json(to_json(ResolvedConfig()) | {"mesh": 3})

    def test_bad_values_are_refused_as_everywhere(self) -> None:
        saved = to_json(ResolvedConfig())
        saved["batch"]["group_size"] = 0
        with pytest.raises(ConfigError, match=r"batch\.group_size is 0"):
            from_json(saved)

    @pytest.mark.parametrize(
        ("section", "key", "value", "words"),
        [
            ("", "steps", "x", "steps is 'x'; it must be a whole number"),
            ("", "steps", True, "steps is True"),
            ("", "compare_plain", 1, "compare_plain is 1; it must be True or False"),
            ("rollout", "temperature", None, "rollout.temperature is None; it must be a number"),
            (
                "rollout",
                "banned",
                [1, "a"],
                "rollout.banned is (1, 'a'); it must be a tuple, each item a whole number",
            ),
            (
                "rollout",
                "verify",
                "greedy",
                "rollout.verify is 'greedy'; it must be one of block, token, coupled",
            ),
            ("rollout", "verify", [], "rollout.verify is []"),
        ],
    )
    def test_types_and_choices(self, section: str, key: str, value: object, words: str) -> None:
        saved = to_json(ResolvedConfig())
        (saved[section] if section else saved)[key] = value
        with pytest.raises(ConfigError) as caught:
            from_json(saved)
        assert words in str(caught.value)

    def test_an_unknown_kind_of_draft(self) -> None:
        saved = to_json(ResolvedConfig())
        saved["rollout"]["draft"]["kind"] = "eagle4"
        with pytest.raises(
            ConfigError,
            match=r"rollout\.draft\.kind is 'eagle4'; it must be one of eagle3, mtp, model",
        ):
            from_json(saved)

    def test_whole_numbers_stand_for_others(self) -> None:
        saved = to_json(ResolvedConfig())
        saved["rollout"]["temperature"] = 2
        assert from_json(saved).rollout.temperature == 2


def test_there_are_no_more_settings_than_the_capabilities_need() -> None:
    """A number that a later capability raises on purpose, by what it brings."""
    named = flatten_settings(to_json(Config()))
    # Two sizes of drafts are settings of each kind that has them.
    assert len(named) <= 168, sorted(named)
    groups = Counter(name.rpartition(".")[0] for name in named)
    assert max(groups.values()) <= 15, groups
    assert max(name.count(".") for name in named) <= 3
