"""Every command line that a help shows as an example is taken by its program."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from jaxspec import check, evaluate, export, sample, train, train_draft
from jaxspec.bench import drafts, generate, load, roofline, step
from jaxspec.bench.gpu import command as gpu
from jaxspec.config.as_json import to_json
from jaxspec.config.cli import EXAMPLES, load_config, override_settings, read_config, take_option
from jaxspec.config.settings import ResolvedConfig
from jaxspec.config.unused import DRAFT_SETTINGS, POLICY_SETTINGS
from jaxspec.evaluation.records import RecordFile, compare_evaluations
from jaxspec.host import job as jobs
from jaxspec.host.job import Job, make_job
from jaxspec.host.loaded_run import find_run
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.config.command_line import CONFIGS
from tests.conftest import small_mesh

PROGRAMS = train, train_draft, evaluate, sample, export, check
BENCHES = drafts, generate, load, roofline, step, gpu
ABOUTS = [module.ABOUT for module in (*PROGRAMS, *BENCHES)]
FOUND = [
    found
    for about in ABOUTS
    for found in re.findall(r"^ +python -m jaxspec\.((?:.*\\\n)*.*)", about, re.MULTILINE)
]
SHOWN = [
    *(f"{program} {words}" for program, lines in EXAMPLES.items() for words in lines),
    *FOUND,
]
USED = {"train": "", "train_sft": POLICY_SETTINGS, "train_draft": DRAFT_SETTINGS}


def opens(config: ResolvedConfig) -> Job:
    """The job, whose checkpoints and tokenizers are not here."""
    folder = config.data.tokenizer or config.model.path
    data = dataclasses.replace(config.data, tokenizer=folder)
    # the axes of a mesh are for the machine that it is meant for
    mesh = dataclasses.replace(config.mesh, data=1, tensor=1)
    return make_job(dataclasses.replace(config, data=data, mesh=mesh), small_mesh(1))


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs and evaluations that examples name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "load_tokenizer", lambda *_: character_tokenizer())
    for scale in ("tiny", "qwen3_8b"):
        folder = tmp_path / "runs" / f"rl_think-{scale}"
        (folder / "checkpoints" / "2").mkdir(parents=True)
        config = ResolvedConfig.from_config(read_config(CONFIGS / "rl_think.py", scale)[0])
        (folder / "config.json").write_text(json.dumps(to_json(config)))
    for name in ("before", "after"):
        (tmp_path / "runs" / name).mkdir()
        line = {"set": "sums", "problem": 0, "prompt": "1+1=", "correct": [True]}
        RecordFile(tmp_path / "runs" / name, 0).append_records(0, [line])


def test_there_are_examples_of_every_program() -> None:
    programs = {shown.split()[0] for shown in SHOWN}
    assert programs == {*USED, "evaluate", "sample", "export", "check", "bench"}
    assert len(SHOWN) >= 20


@pytest.mark.parametrize("shown", SHOWN)
def test_examples_are_taken(shown: str) -> None:
    line = re.sub(r"    \(.*\)$", "", shown.replace("\\\n", " "))
    program, *words = shlex.split(line)
    if "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            load_config(words, program, "", used_settings=USED[program])
    elif program in USED:
        config, _ = load_config(words, program, "", used_settings=USED[program])
        opens(ResolvedConfig.from_config(config))
    elif program == "evaluate":
        options, words = evaluate.parse_options(words)
        if options.compare:
            assert compare_evaluations(*options.compare)
            return
        run = find_run(options.checkpoint) if options.checkpoint else None
        config = evaluate.load_evaluation_config(words, run)
        whole = evaluate.use_run_sizes(config, run) if run else ResolvedConfig.from_config(config)
        evaluate.require_draft_weights(whole, run)
        opens(whole)
    elif program == "sample":
        path, words = take_option(words, "", "checkpoint", "RUN")
        run = find_run(path)
        options = override_settings(sample.options_from_config(run.config), words, "", "")
        opens(sample.sampling_config(run.config, options, words))
    elif program == "export":
        path, words = take_option(words, "", "checkpoint", "RUN")
        assert find_run(path).number == 2
        assert override_settings(export.ExportOptions(), words, "", "").out
    elif program == "check":
        options, words = check.parse_options(words)
        config, _ = load_config(words, "check", "")
        opens(ResolvedConfig.from_config(config))
        assert options.devices
    else:
        assert words.pop(0) == "gpu"
        gpu.parse_options(words)
