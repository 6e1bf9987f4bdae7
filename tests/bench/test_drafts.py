"""The benchmark of drafts: a table, and one line of JSON whose numbers agree with one another."""

import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jaxspec.bench import drafts as bench
from jaxspec.bench.__main__ import main
from jaxspec.bench.variants import VARIANTS, DraftVariant, apply_variant
from jaxspec.config.settings import (
    OfflineConfig,
)
from jaxspec.data.problems import load_sets
from jaxspec.host.job import make_job
from jaxspec.host.prompts import PromptSource
from jaxspec.inputs.checked import ConfigError
from jaxspec.state import Prompts
from jaxspec.system.interrupt import Interrupt
from tests.bench.compared import CONFIG, head
from tests.conftest import small_mesh
from tests.runs import printed

SMALL = {
    "model.layers": 4,
    "model.embed": 16,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.head_size": 8,
    "model.ffn": 24,
    "model.vocab": 24,
    "sft.steps": 30,
    "sft.rows": 16,
    "offline.steps": 5,
    "offline.samples": 64,
    "offline.rows": 16,
    "data.digits": 1,
    "data.max_prompt_length": 6,
    "rollout.max_new_tokens": 13,
    "rollout.engine.slots": 8,
    "batch.prompts": 4,
    "batch.group_size": 4,
}
LAYERS = (
    "--rollout.draft.temperature",
    "0.8",
    "--rollout.lookup.past",
    "4",
    "--rollout.draft.mtp.layers",
)
ROWS = [
    "draft",
    "sampling",
    "verify",
    "K",
    "lengths",
    "acceptance_length",
    "tokens_per_target_pass",
    "coverage",
    "conditional_rate",
    "expected_acceptance",
    "draft_temperature",
    "round_cost",
    "tokens_per_s",
    "speed_up",
]


@pytest.mark.slow
def test_history_gets_other_answers_to_the_same_prompts() -> None:
    jobs = [
        make_job(apply_variant(variant, CONFIG), small_mesh(2))
        for variant in (DraftVariant("none", "none"), DraftVariant("history", "history"))
    ]
    batches = [
        PromptSource(
            load_sets(CONFIG, job.tokenizer),
            job.step.generator,
            CONFIG.batch.prompts,
            job.tokenizer.pad_id,
        )
        for job in jobs
    ]
    with Interrupt() as interrupt:
        job = jobs[0]
        policy = bench.load_policy(job.config, job.step, job.tokenizer, interrupt, job.say)
        plain = bench.prepare_bench(
            VARIANTS[0],
            job.config,
            job.step,
            job.tokenizer,
            policy,
            batches[0].place_training(0),
            interrupt,
            job.say,
        )
    bench._fill_history([plain], batches, 1)
    asked: Prompts = batches[1].place_training(0)
    answered = plain.generate(batches[0].place_training(0))
    assert (np.asarray(asked.history_lengths) > np.asarray(asked.lengths)[:, None]).all()
    for prompt in range(CONFIG.batch.prompts):
        start = int(asked.lengths[prompt])
        for text in np.asarray(asked.history[prompt]):
            np.testing.assert_array_equal(text[:start], np.asarray(asked.tokens[prompt, :start]))
    own = {tuple(row) for row in np.asarray(answered.tokens).tolist()}
    assert not own & {tuple(text) for texts in np.asarray(asked.history).tolist() for text in texts}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["drafts", "--rows", "0", "--config", "rl_think.py"], ["--rows is '0'"]),
        (["drafts", "--rows", "many"], ["--rows is 'many'"]),
        (["drafts"], ["no --config", "python -m jaxspec.bench drafts --config rl_think.py"]),
        (
            ["drafts", "--config", "rl_think.py", "--offline.steps", "0"],
            ["offline.steps is 0", "--offline.steps 300"],
        ),
        (
            ["drafts", "--config", "rl_think.py", "--rollout.verify", "token"],
            ["by itself", "--rollout.verify", "leave it out"],
        ),
        (
            ["drafts", "--config", "rl_think.py", "--rollout.draft.kind=mtp"],
            ["by itself", "--rollout.draft.kind"],
        ),
        (
            ["drafts", "--config", "rl_think.py", "--rollout.draft.sampling", "argmax"],
            ["by itself", "--rollout.draft.sampling"],
        ),
        (
            ["drafts", "--config", "rl_think.py", "--rollout.lookup.beside", "ngram"],
            ["by itself", "--rollout.lookup.beside"],
        ),
        (
            ["drafts", "--config", "rl_think.py", "--drafts", "ngram,eagle4,"],
            ["'', 'eagle4'", "eagle3-generic, mtp", "separated by commas"],
        ),
        (
            ["drafts", "--config", "rl_think.py", "--drafts", "mtp", "--generic", "chat.jsonl"],
            ["--generic is chat.jsonl", "--drafts leaves out"],
        ),
        # Settings of some rows are taken, and judged for these rows.
        (
            ["drafts", "--config", "rl_think.py", "--rollout.lookup.max_match", "6", *LAYERS, "4"],
            ["ttt_steps 3", "layers 4"],
        ),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "kept")
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []


def test_a_head_in_the_config_is_referred_to_the_option() -> None:
    job = make_job(dataclasses.replace(CONFIG, offline=OfflineConfig()), small_mesh())
    draft = dataclasses.replace(CONFIG.rollout.draft, path="head")
    rollout = dataclasses.replace(CONFIG.rollout, draft=draft)
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, rollout=rollout))
    with Interrupt() as interrupt, pytest.raises(ConfigError, match="give --generic head instead"):
        bench.compare_drafts(job, interrupt, 16)


@pytest.mark.parametrize(
    ("changes", "is_prescribed"),
    [
        ({}, True),
        ({"verify": "token"}, True),
        ({"verify": "coupled"}, False),
        ({"sampling": "argmax"}, False),
        ({"kind": "ngram"}, False),
        ({"kind": "none"}, False),
    ],
)
def test_an_acceptance_is_prescribed_to_what_draws_drafts(
    changes: dict[str, Any], is_prescribed: bool
) -> None:
    settings: dict[str, Any] = {"kind": "eagle3"} | changes
    variant = DraftVariant("it", **settings)
    config = dataclasses.replace(apply_variant(variant, CONFIG), offline=OfflineConfig())
    step = make_job(config, small_mesh()).step
    assert bench._with_acceptance(step, 0.0) is step
    made = bench._with_acceptance(step, 3.3)
    assert (made.generator.settings.mode is not step.generator.settings.mode) == is_prescribed


def test_the_config_is_judged_and_the_problems_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, job = [], make_job(dataclasses.replace(CONFIG, offline=OfflineConfig()), small_mesh(2))

    class Enough(Exception):
        pass

    def enough(*_: object) -> None:
        raise Enough

    monkeypatch.setattr(
        bench,
        "load_sets",
        lambda *given, **how: read.append(given) or load_sets(*given, **how),
    )
    monkeypatch.setattr(bench, "load_policy", enough)
    with Interrupt() as interrupt, pytest.raises(Enough):
        bench.compare_drafts(job, interrupt, 16)
    assert len(read) == 1


@pytest.mark.parametrize("depths", [3, 7])
@pytest.mark.parametrize("width", [80, 160])
def test_nothing_is_cut_off(width: int, depths: int) -> None:
    numbers = {
        "acceptance_length": 3.41,
        "tokens_per_target_pass": 3.2,
        "coverage": 0.987,
        "round_cost": 1.33,
        "tokens_per_s": 123456.7,
        "speed_up": 2.17,
    }
    lists = {
        name: [0.75] * depths
        for name in ("conditional_rate", "expected_acceptance", "draft_temperature")
    }
    rows = [
        {
            "draft": each.name,
            "sampling": each.sampling,
            "verify": each.verify,
            "K": depths,
            "lengths": {},
            **numbers,
            **lists,
        }
        for each in VARIANTS
    ]
    file = io.StringIO()
    Console(file=file, width=width).print(*bench.build_tables(rows))
    words = file.getvalue().split()
    titles = (
        "draft sampling verify K acceptance length tokens a pass round cost tokens/s speed-up"
        " conditional rate expected acceptance T"
    )
    assert set(titles.split()) <= set(words)
    assert not [word for word in words if "…" in word]
    assert [words.count(text) for text in ("3.41", "123,457", "2.17", "0.75")] == [
        len(rows),
        len(rows),
        len(rows),
        3 * depths * len(rows),
    ]
    assert all(words.count(each.name) >= 2 for each in VARIANTS)
    assert max(map(len, file.getvalue().splitlines())) <= width


@pytest.mark.parametrize("lengths", [{}, {"0": 0.5, "1": 0.25, "3": 0.25}])
def test_depths_that_nothing_reached_are_dashes(lengths: dict[str, float]) -> None:
    numbers = dict.fromkeys(
        ("acceptance_length", "tokens_per_target_pass", "round_cost", "tokens_per_s", "speed_up"), 1
    )
    row = {
        "draft": "eagle3",
        "sampling": "auto",
        "verify": "block",
        "K": "auto" if lengths else 3,
        "lengths": lengths,
        "conditional_rate": [0.5],
        "expected_acceptance": [],
        "draft_temperature": [1.0, 1.0, 1.0],
        **numbers,
    }
    file = io.StringIO()
    Console(file=file, width=120).print(bench.build_tables([row])[1])
    assert file.getvalue().splitlines()[-1].split()[4:] == [
        *["0.50", "-", "-", "-", "1.00", "1.00", "1.00"]
    ]


@pytest.mark.sweep
def test_table_and_json_agree(repository: Path, tmp_path: Path) -> None:
    wanted = [
        *(("none", False), ("eagle3", True), ("eagle3-generic", False)),
        *(("model", False), ("history", False)),
    ]
    chosen = [
        place
        for place, variant in enumerate(VARIANTS)
        if (variant.name, variant.chooses_length) in wanted
    ]
    script = f"""
import sys
from jaxspec.bench import drafts
from jaxspec.bench.__main__ import main
drafts.VARIANTS = tuple(drafts.VARIANTS[place] for place in {chosen})
sys.exit(main(sys.argv[1:]))
"""
    flags = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    variables = os.environ | {
        "JAXSPEC_CACHE": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(repository),
    }
    variables = variables | {"JAX_NUM_CPU_DEVICES": "2"}
    command = [
        sys.executable,
        "-c",
        script,
        "drafts",
        "--config",
        str(repository / "configs/rl_think.py"),
        "--rows",
        "40",
        "--generic",
        str(head(tmp_path / "head")),
        *flags,
    ]
    told = printed(command, variables, repository, timeout=900)
    *before, last = told.splitlines()
    line = json.loads(last)
    wanted = {"bench", "machine", "versions", "answers", "generic", "synthetic_acceptance", "rows"}
    assert line.keys() == wanted
    assert line["synthetic_acceptance"] == 0
    assert line["generic"] == str(tmp_path / "head")
    assert (line["bench"], line["answers"]) == ("drafts", 48)  # three batches of 16
    assert line["versions"].keys() == {"python", "jaxspec", "jax", "flax"}
    names = ["none", "eagle3-generic", "eagle3", "model", "history"]
    assert [row["draft"] for row in line["rows"]] == names
    assert any(f"read {tmp_path}/head: eagle3 draft" in text for text in before)
    for row in line["rows"]:
        assert list(row) == ROWS
        shown = next(text.split() for text in before if text.split()[:1] == [row["draft"]])
        assert f"{row['acceptance_length']:.2f}" == shown[4]
        assert f"{row['round_cost']:.2f}" == shown[-3]
        assert f"{row['speed_up']:.2f}" == shown[-1]
        speed_up = row["tokens_per_s"] / line["rows"][0]["tokens_per_s"]
        assert row["speed_up"] == pytest.approx(speed_up)
        # A list ends before the first depth that nothing reached.
        depths = 5 if row["K"] == "auto" else row["K"]
        assert len(row["conditional_rate"]) == len(row["expected_acceptance"]) <= depths
        drafts_kept = float(np.sum(np.cumprod(row["conditional_rate"])))
        # A round keeps its accepted drafts and one token more, unless the row ends with a draft.
        assert drafts_kept - 1e-5 <= row["acceptance_length"] <= 1 + drafts_kept + 1e-5
        every = 1 + row["coverage"] * (row["acceptance_length"] - 1)
        assert row["tokens_per_target_pass"] == pytest.approx(every, rel=1e-5)
        assert row["tokens_per_s"] > 0
    none, ready, chosen, model, history = line["rows"]
    assert (ready["K"], ready["coverage"]) == (3, 1)
    assert (chosen["K"], list(chosen["lengths"]), none["lengths"], model["lengths"]) == (
        "auto",
        ["0", "1", "3", "5"],
        {},
        {},
    )
    assert sum(chosen["lengths"].values()) == pytest.approx(1)
    assert 1 - chosen["lengths"]["0"] == pytest.approx(chosen["coverage"])
    assert (
        sum(
            text.startswith("of the rounds that chose their length with eagle3, ")
            for text in before
        )
        == 1
    )
    assert (
        none["K"],
        none["acceptance_length"],
        none["tokens_per_target_pass"],
        none["round_cost"],
    ) == (0, 1, 1, 1)
    assert (none["sampling"], none["verify"], history["sampling"], history["verify"]) == (
        None,
        None,
        None,
        "block",
    )
    assert (model["sampling"], model["verify"], model["coverage"]) == ("auto", "block", 1)
    assert 0 < history["coverage"] < 1
    assert history["draft_temperature"] == []
    assert len(model["draft_temperature"]) == 3
