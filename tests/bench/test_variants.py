"""The drafts that are compared: each fits the config, and the generic one is what it is to be."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxspec.bench import drafts
from jaxspec.bench.variant_bench import VariantBench
from jaxspec.bench.variants import SWEPT_SETTINGS, VARIANTS, DraftVariant, apply_variant
from jaxspec.config.check import check_config
from jaxspec.config.cli import load_config
from jaxspec.config.settings import DraftConfig, OfflineConfig
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.host.job import make_job
from jaxspec.inputs.checked import ConfigError
from jaxspec.state import Prompts
from jaxspec.system.interrupt import Interrupt
from tests.bench.compared import CONFIG, head
from tests.conftest import small_mesh


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "none"])
def test_every_variant_fits_whatever_draft_the_config_has(kind) -> None:
    own = dataclasses.replace(
        CONFIG.rollout,
        draft=DraftConfig(
            kind=kind, draft_length=2, eagle3=Eagle3Config(vocab=16), temperature=0.7
        ),
    )
    for variant in VARIANTS:
        config = apply_variant(
            variant, dataclasses.replace(CONFIG, rollout=own, offline=OfflineConfig())
        )
        check_config(config, devices=1)
        draft = config.rollout.draft
        assert (draft.kind, draft.draft_length, draft.temperature) == (
            variant.kind,
            "auto" if variant.chooses_length else 2,
            0.7,
        )
        assert config.draft_spec.vocab == (16 if draft.kind == "eagle3" else 0)
        assert (config.offline.text == "generic") == (variant.name == "eagle3-generic")
    names = [variant.name for variant in VARIANTS]
    assert names[0] == "none"  # the yardstick of round_cost
    assert set(names) == {
        *(
            "none",
            "eagle3",
            "eagle3-generic",
            "mtp",
            "model",
            "ngram",
            "history",
            "eagle3+history",
            "eagle3+ngram",
        ),
    }


def test_the_generic_draft_is_trained_on_a_text_or_is_a_head_that_is_ready(tmp_path: Path) -> None:
    """All others are the same beside either."""
    config = dataclasses.replace(CONFIG, offline=OfflineConfig())
    folder = head(tmp_path / "head")
    for variant in VARIANTS:
        plain, text, ready = (
            apply_variant(variant, config, generic)
            for generic in ("generic", "chats.jsonl", str(folder))
        )
        check_config(ready, devices=1)
        if not variant.is_generic:
            assert plain == text == ready
            continue
        assert (text.offline.text, text.rollout.draft.path) == ("chats.jsonl", "")
        assert dataclasses.replace(text, offline=plain.offline) == plain
        assert (ready.offline.steps, ready.rollout.draft.path) == (0, str(folder))
        own = ready.draft_model
        assert own is not None
        assert (own.ffn, own.rope_theta, ready.head.taps) == (8, 77.0, (1, 3))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"head/config\.json"):
        apply_variant(
            DraftVariant("eagle3-generic", "eagle3", is_generic=True), config, str(folder)
        )


def test_one_row_at_a_time_can_be_measured() -> None:
    argv = ["--config", "rl_think.py", "--batch.prompts", "1", "--batch.group_size", "1"]
    argv += ["--advantage.baseline", "none"]
    config, _ = load_config(argv, "bench drafts", "", SWEPT_SETTINGS, drafts.USED_SETTINGS)
    assert config.batch.prompts * config.batch.group_size == 1


@pytest.mark.slow
def test_all_drafts_answer_every_batch_in_turn(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answered: list[tuple[str, int]] = []
    measure = VariantBench.measure_batch

    def record(variant_bench: VariantBench, prompts: Prompts) -> None:
        before = variant_bench.seconds
        measure(variant_bench, prompts)
        answered.append((variant_bench.variant.name, int(prompts.batch)))
        assert variant_bench.seconds > before

    monkeypatch.setattr(VariantBench, "measure_batch", record)
    config = dataclasses.replace(CONFIG, offline=OfflineConfig())
    variants = [variant for variant in VARIANTS if variant.name in ("none", "ngram", "history")]
    with Interrupt() as interrupt:
        drafts.compare_drafts(make_job(config, small_mesh()), interrupt, 40, variants=variants)
    batches = range(drafts.TUNING_CALLS, drafts.TUNING_CALLS + 3)
    assert answered == [(name, batch) for batch in batches for name in ("none", "ngram", "history")]
    line = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [row["draft"] for row in line["rows"]] == ["none", "ngram", "history"]
    assert line["answers"] == 48


def test_only_drafts_that_learn_need_training() -> None:
    untrained = dataclasses.replace(CONFIG, offline=OfflineConfig(steps=0))
    for kind in ("none", "ngram", "history"):
        drafts._check_variant(apply_variant(DraftVariant(kind, kind), untrained), 1)
    with pytest.raises(ConfigError, match=r"draft eagle3 would have random weights.*--drafts"):
        drafts._check_variant(apply_variant(DraftVariant("eagle3", "eagle3"), untrained), 1)
