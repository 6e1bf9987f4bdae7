"""Metrics survive kills and resumes, progress fits terminals and files, the closing table says what
was measured."""

import io
import json
import math
import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from jaxspec.config.settings import ConfigError
from jaxspec.system import metrics
from jaxspec.system.metrics import MetricsWriter, Progress, closing_table, missing, token_rates


def _events(workdir: Path) -> list:
    """TensorBoard's events, oldest file first, with their checksums checked."""
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            body, data = data[12 : 12 + size], data[12 + size :]
            assert int.from_bytes(data[:4], "little") == masked_crc32c(body)
            data = data[4:]
            events.append(vars(event_pb2)["Event"].FromString(body))
    return events


def test_lines_are_json_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(
            {
                "step": 0,
                "reward/mean": np.float32(0.5),
                "loss/policy": math.nan,
                "entropy": jnp.float32(math.inf),
                "status/eos": jnp.int32(3),
            }
        )
        writer.write_samples(
            0,
            [
                {
                    "prompt": "1+2=",
                    "response": "#3\u2713",
                    "reward": np.float64(1.0),
                    "logprobs": np.array([0.5, -math.inf]),
                }
            ],
        )
    wanted = {"step": 0, "reward/mean": 0.5, "loss/policy": None, "entropy": None, "status/eos": 3}
    assert metrics.read(tmp_path) == [wanted]
    samples = [
        json.loads(line) for line in (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()
    ]
    assert samples == [
        {
            "step": 0,
            "prompt": "1+2=",
            "response": "#3\u2713",
            "reward": 1.0,
            "logprobs": [0.5, None],
        }
    ]
    scalars = {
        value.tag: value.simple_value
        for event in _events(tmp_path)
        for value in event.summary.value
    }
    assert scalars == {"reward/mean": 0.5, "status/eos": 3.0}


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 1) as writer:
        writer.write({"step": 0})
        writer.write_samples(0, [{"prompt": ""}])
        writer.cut_back(0)
    assert list(tmp_path.iterdir()) == []


def test_resuming_cuts_back_to_the_restored_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        for step in range(4):
            writer.write({"step": step, "run": 1})
            writer.write_samples(step, [{"run": 1}, {"run": 1}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ru')
    with MetricsWriter(tmp_path, 0) as writer:
        writer.cut_back(2)
        writer.write({"step": 2, "run": 2})
        writer.write_samples(2, [{"run": 2}])
    assert [(line["step"], line["run"]) for line in metrics.read(tmp_path)] == [
        (0, 1),
        (1, 1),
        (2, 2),
    ]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "samples.jsonl",
        "tensorboard",
    ]


def test_tensorboard_hides_what_was_cut(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.cut_back(7)
    writer.write({"step": 7, "entropy": 0.5})
    writer.close()
    start, line = _events(tmp_path)[1:]
    assert (start.step, start.session_log.status) == (7, start.session_log.START)
    assert (line.step, line.summary.value[0].simple_value) == (7, 0.5)


def test_torn_last_line_is_dropped_and_a_bad_one_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1')
    assert metrics.read(tmp_path) == [{"step": 0}]
    MetricsWriter(tmp_path, 0).write({"step": 1})
    assert metrics.read(tmp_path) == [{"step": 0}, {"step": 1}]
    path.write_text('{"step": 0}\n{"step": 1}')  # only its newline is lost
    assert metrics.read(tmp_path) == [{"step": 0}, {"step": 1}]
    MetricsWriter(tmp_path, 0).write({"step": 2})
    assert [line["step"] for line in metrics.read(tmp_path)] == [0, 1, 2]
    path.write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2 is not JSON"):
        metrics.read(tmp_path)


def test_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.write({"step": 0, "entropy": 0.5})
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(
            ConfigError, match=r"metrics.jsonl cannot be written: File too large; free some space"
        ):
            writer.write({"step": 1, "entropy": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(metrics.read(tmp_path)) == 1


def test_plain_progress_prints_some_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("RL", 100) as progress:
        progress.say("resuming [not markup] from step 3 " + "x" * 100)
        for step in range(1, 101):
            progress.update(
                step, reward=0.51234, acceptance_length=3.2, tokens_per_s=12345.6, entropy=None
            )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resuming [not markup] from step 3 " + "x" * 100
    assert lines[1].startswith("RL 1/100  reward 0.512  acceptance_length 3.2  tokens/s 12,346")
    assert lines[2].startswith("RL 5/100")
    assert lines[2].endswith(" s left")
    assert lines[-1] == "RL 100/100  reward 0.512  acceptance_length 3.2  tokens/s 12,346"
    assert len(lines) == 22


def test_plain_progress_prints_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 4000, 4))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: float(next(clock)))
    with Progress("draft", 1000) as progress:
        for step in range(1, 11):
            progress.update(step)
    assert capsys.readouterr().out.splitlines() == [
        "draft 1/1000",
        "draft 4/1000  66 min 24 s left",
        "draft 7/1000  66 min 12 s left",
        "draft 10/1000  66 min 00 s left",
    ]


def test_terminal_shows_a_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with Progress("RL", 60, console=console) as progress:
        progress.update(30, reward=0.5, tokens_per_s=1234.0)
        progress.say("saved")
    progress.stop()
    text = screen.getvalue()
    assert "30/60" in text
    assert "tokens/s 1,234" in text
    assert "saved" in text
    assert text.rstrip().endswith("\x1b[?25h")


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("RL", 2, process_index=1) as progress:
        progress.say("hello")
        progress.update(2, reward=1.0)
    assert capsys.readouterr().out == ""


def _printed(table: object) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=100).print(table)
    return [
        re.sub(r"  +", " | ", line.strip())
        for line in screen.getvalue().splitlines()
        if line.strip()
    ]


def test_tokens_a_second_mean_the_same_however_a_step_is_run() -> None:
    """Over the whole step, learning included; generation alone has a name of its own, where it is
    timed."""
    whole = {"rollout/tokens": 120.0, "time/step": 3.0, "time/data": 0.5}
    assert token_rates(whole) == {"rollout/tokens_per_s": 40.0}
    staged = whole | {"time/generate": 1.5, "time/train": 1.0}
    assert token_rates(staged) == {
        "rollout/tokens_per_s": 40.0,
        "rollout/generation_tokens_per_s": 80.0,
    }


def test_closing_table() -> None:
    lines = [
        {
            "step": step,
            "reward/mean": step / 100,
            "rollout/acceptance_length": 3.2,
            "rollout/tokens_per_s": 4000.0 + step,
            "rollout/generation_tokens_per_s": 8000.0 + step,
            "time/generate": 0.25,
            "time/train": None,
            "time/step": 0.5,
        }
        for step in range(40)
    ]
    lines[0]["eval/exact_match"], lines[39]["eval/exact_match"] = 0.5, 0.84
    summary = {
        "plain/passes": 22.0,
        "spec/passes": 8.0,
        "plain/seconds": 0.5,
        "spec/seconds": 0.6,
        "round_cost": 1.8,
        "rows": 128,
    }
    assert _printed(closing_table(lines, summary)) == [
        "40 batches",
        "reward | 0.01 -> 0.38 (first and last 4 of 40)",
        "acceptance_length | 3.20 -> 3.20 (first and last 4 of 40)",
        "held-out exact match | 0.50 -> 0.84",
        "tokens/s | 4,020 (over the whole step, median batch)",
        "tokens/s | 8,020 (over generation alone, median batch)",
        "seconds by phase | generate 10.0, step 20.0",
        "target passes a sequence | plain 22, speculative 8: 2.75 times fewer",
        "seconds for 128 rows | plain 0.5, speculative 0.6: speed-up 0.83",
        "round_cost | 1.8 (a round over a plain step, in seconds)",
    ]


def test_closing_table_leaves_out_what_was_not_measured() -> None:
    assert _printed(closing_table([{"step": 0, "reward/mean": 0.25}], {})) == [
        "1 batches",
        "reward | 0.25 -> 0.25 (first and last 1 of 1)",
    ]
    assert _printed(closing_table([], {})) == ["0 batches"]


def test_closing_table_says_what_has_no_number() -> None:
    """The last three of 20 batches have no reward, and two of three evaluations no number; rows
    failed in a fourth batch too."""
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "reward/mean": 0.38,
            "status/eos": 100,
            "status/length": 28,
            "status/failed": 0,
        }
        for step in range(20)
    ]
    lines[3] |= {"status/eos": 98, "status/failed": 2}
    for line in lines[-3:]:
        line |= {"reward/mean": None, "status/eos": 0, "status/length": 0, "status/failed": 128}
    for step, value in ((0, 0.38), (17, None), (19, None)):
        lines[step]["eval/exact_match"] = value
    assert _printed(closing_table(lines, {})) == [
        "20 batches",
        "reward | 0.38 -> none (first and last 2 of 20, 3 without a number)",
        "failed rows | 386 of 2,560, in 4 of 20 batches (logits that are not finite)",
        "held-out exact match | 0.38 -> none (3 evaluations, 2 without a number)",
    ]


def test_batches_without_a_line_are_named() -> None:
    lines = [{"step": step} for step in (0, 1, 4)]
    assert (
        missing(lines, 5)
        == "metrics.jsonl has no line for batch 2, 3, which were made: the closing table is of the"
        " others"
    )
    assert "batch 2, 3, 5, 6, 7 and 2 more" in missing(lines, 10)
    assert missing(lines[:2], 2) == ""


def test_closing_table_prints_in_ascii() -> None:
    script = """
        from rich.console import Console
        from jaxspec.system.metrics import closing_table
        Console().print(closing_table([{"step": 0, "reward/mean": 0.25}], {}))
    """
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", textwrap.dedent(script)],
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert b"0.25 -> 0.25" in done.stdout
    assert b"\x1b" not in done.stdout
