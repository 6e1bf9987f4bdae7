"""What a job opens once for all programs: the tokenizer as the config wants it, and a step that
knows it."""

import datetime
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config.as_json import to_json
from jaxspec.config.settings import (
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    OfflineConfig,
    ResolvedConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.host.job import collect_job_values, make_job, run_and_report_errors
from jaxspec.inputs.checked import ConfigError
from jaxspec.run.start import describe_random_draft
from jaxspec.storage.cache import read_sources
from jaxspec.system.closing_table import build_closing_table
from jaxspec.system.progress import Progress, Screen
from jaxspec.tokens.stop_strings import NO_STOP_STRINGS, StopTable
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.conftest import small_mesh, tiny_config, tiny_model


def test_what_processes_compare_is_what_shapes_their_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, code, versions, XLA's flags but for what each writes where, and the tokenizer."""
    character_tokenizer().save(str(tmp_path))
    config = tiny_config(
        tiny_model(vocab=32), data=DataConfig(tokenizer=str(tmp_path)), sft=SftConfig(steps=0)
    )

    def changed() -> set[str]:
        now = collect_job_values(config)
        return {name for name in now | first if now.get(name) != first.get(name)}

    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1  --xla_dump_to=/tmp/0")
    first = collect_job_values(config)
    assert first.keys() >= {"jaxspec", "jax", "jaxlib", "JAX_PLATFORMS", "batch.prompts"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1 --xla_dump_to=/tmp/1")
    assert changed() == set()
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=2")
    assert changed() == {"XLA_FLAGS"}
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    config = replace(config, seed=config.seed + 1)
    assert changed() == {"XLA_FLAGS", "seed", "tokenizer's tokenizer.json"}


def test_the_tokenizers_size_ends_and_template_reach_the_step_and_the_prompts(
    tmp_path: Path,
) -> None:
    """A vocabulary of 32 rows for 21 tokens: the other 11 are never sampled."""
    character_tokenizer().save(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ 1 if enable_thinking else 0 }}{{ messages[0].content }}"
    )
    data = DataConfig(tokenizer=str(tmp_path))
    config = tiny_config(
        tiny_model(vocab=32), rollout=RolloutConfig(banned=(7,)), data=data, sft=SftConfig(steps=0)
    )
    job = make_job(config, small_mesh())
    processing = job.step.generator.settings.processing
    assert (processing.vocab_size, processing.stop_ids, processing.banned) == (
        character_tokenizer().size,
        (1,),
        (7,),
    )
    assert job.tokenizer.render_prompt("+2") == "1+2"
    assert job.step.generator.settings.stop == NO_STOP_STRINGS
    told = replace(config, rollout=RolloutConfig(enable_thinking=False))
    assert make_job(told, small_mesh()).tokenizer.render_prompt("+2") == "0+2"


def test_stop_strings_reach_the_generator_of_this_tokenizer() -> None:
    config = tiny_config(tiny_model(vocab=32), sft=SftConfig(steps=0))
    rollout = replace(config.rollout, stop=("=4", "=4"))
    job = make_job(replace(config, rollout=rollout), small_mesh())
    stop = job.step.generator.without_draft().settings.stop
    assert isinstance(stop, StopTable)
    ids = jnp.asarray([job.tokenizer.encode("4=42")], jnp.int32)
    assert stop(jnp.zeros(1, jnp.int32), ids)[0].tolist() == [[False, False, True, False]]
    with pytest.raises(ConfigError, match=r"rollout\.stop has 'Problem:', which no tokens"):
        make_job(replace(config, rollout=replace(rollout, stop=("Problem:",))), small_mesh())


def test_the_day_of_the_chat_template_is_that_of_the_run(tmp_path: Path) -> None:
    """The config.json of the run keeps it, and a run that goes on later has it from there. So has
    an evaluation."""
    character_tokenizer().save(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ strftime_now('%d') }}{{ messages[0].content }}"
    )
    config = tiny_config(
        tiny_model(vocab=32),
        data=DataConfig(tokenizer=str(tmp_path)),
        sft=SftConfig(steps=0),
        workdir=str(tmp_path / "run"),
    )
    begun = make_job(config, small_mesh())
    assert begun.config.today == datetime.date.today().isoformat()
    (tmp_path / "run").mkdir()
    earlier = replace(config, today="2026-03-04")
    (tmp_path / "run/config.json").write_text(json.dumps(to_json(earlier)))
    later = make_job(config, small_mesh())
    assert later.config.today == "2026-03-04"
    assert later.tokenizer.render_prompt("+2") == "04+2"
    (tmp_path / "run/config.json").unlink()
    evaluation = {"config": to_json(replace(config, today="2026-03-05"))}
    (tmp_path / "run/evaluation.json").write_text(json.dumps(evaluation))
    assert make_job(config, small_mesh()).config.today == "2026-03-05"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert make_job(config, small_mesh()).config.today == ""


def test_stop_ids_reach_the_generator() -> None:
    config = tiny_config(tiny_model(vocab=32), sft=SftConfig(steps=0))
    rollout = replace(config.rollout, stop=("<pad>",), stop_ids=(9,))
    job = make_job(replace(config, rollout=rollout), small_mesh())
    settings = job.step.generator.settings
    assert settings.processing.stop_ids == (1, 0, 9)
    assert settings.stop == NO_STOP_STRINGS


def test_a_generated_task_brings_its_characters() -> None:
    data = DataConfig(task="programs", max_prompt_length=21)
    config = tiny_config(tiny_model(vocab=40), data=data)
    assert make_job(config, small_mesh()).tokenizer.unknown_characters("def f(x):\n return x") == ""


# ---- what ends a program


def _read(name: str) -> Callable[[], Any]:
    return lambda: Path(name).read_bytes()


def _refused(number: int) -> Callable[[], Any]:
    def work() -> None:
        raise OSError(number, os.strerror(number), "/somewhere/file")

    return work


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (_refused(errno.EACCES), "/somewhere/file: Permission denied;"),
        (_refused(errno.ELOOP), "/somewhere/file: Too many levels of symbolic links;"),
        (_read("/proc"), "/proc: Is a directory;"),
        (_read("nowhere/file"), "nowhere/file: No such file or directory;"),
        (_read("x" * 1000), f"{'x' * 100}...{'x' * 100}: File name too long;"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    work: Callable[[], Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_and_report_errors(work) == 2
    assert capsys.readouterr().err == f"error: {said} see to that and run the same command again\n"


def test_an_error_of_the_system_without_a_file_has_its_traceback() -> None:
    with pytest.raises(OSError, match="Broken pipe"):
        run_and_report_errors(lambda: os.write(_closed_pipe(), b"x"))


@pytest.mark.parametrize("told", ["Unable to allocate 4.00 PiB for an array", ""])
def test_too_little_memory_is_one_line_that_says_for_what(
    told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(self: Path, **_: Any) -> None:
        raise MemoryError(*filter(None, [told]))

    monkeypatch.setattr(Path, "read_text", too_large)
    assert run_and_report_errors(lambda: len(read_sources("host/job.py"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: this machine has too little memory (")
    assert told in line
    assert re.search(r"cache\.py, line \d+: return .*lower the setting", line)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ("FAILED_PRECONDITION: Gloo all-reduce failed: [pair.cc] Connection closed by peer", True),
        ("INTERNAL: bug", False),
    ],
)
def test_the_end_of_another_process_is_one_line(
    joined: bool,
    told: str,
    lost: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)

    def work() -> int:
        raise jax.errors.JaxRuntimeError(f"{told}\nand a page more")

    if not (joined and lost):
        with pytest.raises(jax.errors.JaxRuntimeError, match=told[:5]):
            run_and_report_errors(work)
        return
    assert run_and_report_errors(work) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: another process of the job has ended")
    assert told in line
    assert line.endswith("the same command goes on from the last checkpoint")


# ---- where nobody reads


def _closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_a_program_goes_on_where_its_output_is_not_taken(
    full: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `| head` has ended, or on a disk that is full."""
    for talk in (
        lambda: make_job(
            tiny_config(tiny_model(vocab=32), sft=SftConfig(steps=0)), small_mesh()
        ).say("a line"),
        lambda: Screen(force_terminal=terminal).print(build_closing_table([], {})),
        lambda: _progress(terminal),
    ):
        with os.fdopen(
            os.open("/dev/full", os.O_WRONLY) if full else _closed_pipe(), "w"
        ) as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            talk()
            assert str(Path(f"/proc/self/fd/{stream.fileno()}").readlink()) == os.devnull
            talk()


def _progress(terminal: bool) -> None:
    with Progress("batch", 2, console=Screen(force_terminal=terminal)) as progress:
        progress.update(1)
        progress.print_line("a line")
        progress.update(2)


# ---- what a step is built from


@pytest.mark.parametrize(
    ("banned", "least", "words"),
    [
        (range(21), 0, "rollout.banned has all 21 tokens"),
        (range(32), 0, "rollout.banned has all 21 tokens"),
        ([0, *range(2, 21)], 0, "only [] and end tokens are not in rollout.banned"),
        (range(20), 1, "only [20] and end tokens are not in rollout.banned"),
        (
            [0, *range(2, 20)],
            0,
            "of the 21 tokens only [20] and end tokens are not in rollout.banned",
        ),
    ],
)
def test_bans_that_leave_nothing_to_sample_are_refused(
    banned: Iterable[int], least: int, words: str
) -> None:
    rollout = RolloutConfig(banned=tuple(banned), min_new_tokens=least)
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_job(tiny_config(tiny_model(vocab=32), rollout=rollout), small_mesh())


@pytest.mark.parametrize(("banned", "least"), [(range(19), 1), ([0, *range(2, 19)], 0)])
def test_bans_that_leave_two_tokens_are_taken(banned: Iterable[int], least: int) -> None:
    rollout = RolloutConfig(banned=tuple(banned), min_new_tokens=least)
    assert (
        make_job(tiny_config(tiny_model(vocab=32), rollout=rollout), small_mesh()).config.rollout
        == rollout
    )


@pytest.mark.parametrize(
    ("draft", "offline", "training", "words"),
    [
        (
            DraftConfig(),
            0,
            DraftTrainingConfig(),
            "the eagle3 draft started from random weights (offline.steps 0, no rollout.draft.path)",
        ),
        (
            DraftConfig(kind="mtp"),
            0,
            DraftTrainingConfig(online=False),
            "the mtp draft started from random weights",
        ),
        (DraftConfig(), 300, DraftTrainingConfig(), ""),
        (DraftConfig(path="folder"), 0, DraftTrainingConfig(), ""),
        (DraftConfig(kind="none"), 0, DraftTrainingConfig(), ""),
    ],
)
def test_a_random_draft_is_told(
    draft: DraftConfig, offline: int, training: DraftTrainingConfig, words: str
) -> None:
    config = ResolvedConfig(
        rollout=RolloutConfig(draft=draft),
        offline=OfflineConfig(steps=offline),
        draft_training=training,
    )
    remark = describe_random_draft(config)
    assert bool(remark) == bool(words)
    assert words in remark
    assert ("never learns" in remark) == (bool(words) and not training.online)
