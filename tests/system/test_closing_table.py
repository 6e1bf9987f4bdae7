"""The closing table says what was measured, and what was not."""

import io
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from rich.console import Console

from jaxspec.system.closing_table import build_closing_table, describe_missing_batches


def _printed(table: object) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=100).print(table)
    return [
        re.sub(r"  +", " | ", line.strip())
        for line in screen.getvalue().splitlines()
        if line.strip()
    ]


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
    lines[0]["eval/held_out/avg@8"], lines[39]["eval/held_out/avg@8"] = 0.5, 0.84
    summary = {
        "plain/passes": 22.0,
        "spec/passes": 8.0,
        "plain/seconds": 0.5,
        "spec/seconds": 0.6,
        "round_cost": 1.8,
        "rows": 128,
    }
    assert _printed(build_closing_table(lines, summary)) == [
        "40 batches",
        "reward | 0.01 -> 0.38 (first and last 4 of 40)",
        "acceptance_length | 3.20 -> 3.20 (first and last 4 of 40)",
        "held_out/avg@8 | 0.50 -> 0.84",
        "tokens/s | 4,020 (over the whole step, median batch)",
        "tokens/s | 8,020 (over generation alone, median batch)",
        "seconds by phase | generate 10.0, step 20.0",
        "target passes a sequence | plain 22, speculative 8: 2.75 times fewer",
        "seconds for 128 rows | plain 0.5, speculative 0.6: speed-up 0.83",
        "round_cost | 1.8 (a round over a plain step, in seconds)",
    ]


@pytest.mark.parametrize(
    ("in_turn", "without"),
    [(False, "step 1.2 s, exposed generation 0.2"), (True, "step 2.2 s, exposed generation 1.2")],
)
def test_closing_table_of_a_pipelined_run_has_both_sides(in_turn: bool, without: str) -> None:
    """Generation takes 0.6 s of the generator's 0.8 s, and 1 s without drafts."""
    lines = [
        {
            "step": step,
            "reward/mean": 0.5,
            "time/step": 1.01,
            "time/exposed_generation": 0.01,
            "time/idle_generate": 0.2,
            "time/generator_step": 1.0,
            "time/generate": 0.6,
        }
        for step in range(3)
    ]
    summary = {"plain/seconds": 5.0, "spec/seconds": 3.0, "in_turn": in_turn}
    text = " ".join(_printed(build_closing_table(lines, summary)))
    assert (
        "pipeline | step 1.01 s: learner busy 1, exposed generation 0.01; generator busy 0.8, idle"
        f" 0.2 (median batch) without drafts | {without} (predicted by the speed-up of generation)"
    ) in text
    assert not any("without drafts" in row for row in _printed(build_closing_table(lines, {})))


def test_closing_table_leaves_out_what_was_not_measured() -> None:
    assert _printed(build_closing_table([{"step": 0, "reward/mean": 0.25}], {})) == [
        "1 batches",
        "reward | 0.25 -> 0.25 (first and last 1 of 1)",
    ]
    assert _printed(build_closing_table([], {})) == ["0 batches"]


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
        lines[step]["eval/held_out/avg@8"] = value
    assert _printed(build_closing_table(lines, {})) == [
        "20 batches",
        "reward | 0.38 -> none (first and last 2 of 20, 3 without a number)",
        "failed rows | 386 of 2,560, in 4 of 20 batches (logits that are not finite)",
        "held_out/avg@8 | 0.38 -> none (3 evaluations, 2 without a number)",
    ]


def test_batches_without_a_line_are_named() -> None:
    lines = [{"step": step} for step in (0, 1, 4)]
    assert (
        describe_missing_batches(lines, 5)
        == "metrics.jsonl has no line for batch 2, 3: the closing table covers the other batches"
    )
    assert "batch 2, 3, 5, 6, 7 and 2 more" in describe_missing_batches(lines, 10)
    assert describe_missing_batches(lines[:2], 2) == ""


def test_closing_table_prints_in_ascii() -> None:
    script = """
        from rich.console import Console
        from jaxspec.system.closing_table import build_closing_table
        Console().print(build_closing_table([{"step": 0, "reward/mean": 0.25}], {}))
    """
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", textwrap.dedent(script)],
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert b"0.25 -> 0.25" in done.stdout
    assert b"\x1b" not in done.stdout
