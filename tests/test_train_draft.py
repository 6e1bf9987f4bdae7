"""The program that trains a draft before a run: what it shows, and that it goes on where it was
stopped."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxspec.config.settings import DataConfig, OfflineConfig
from jaxspec.data.problems import load_problems
from jaxspec.inputs.checked import ConfigError
from jaxspec.system.interrupt import Interrupt
from jaxspec.train_draft import build_acceptance_table, main
from tests import fork_server
from tests.conftest import tiny_model
from tests.fork_server import Program
from tests.host.training_jobs import a_job
from tests.tokens.folders import QWEN, needs_qwen

ROOT = Path(__file__).parents[1]
CHAT = QWEN.parent / "chat"


class TestClosingTable:
    def shown(self, depths: int, **changes: Any) -> str:
        reached = {
            "kind": "eagle3",
            "responses": 128,
            "vocabulary": None,
            "coverage": None,
            "acceptance": [0.9, 0.8, 0.7],
            **changes,
        }
        text = io.StringIO()
        Console(file=text, width=100).print(build_acceptance_table(reached, depths))
        return text.getvalue()

    def test_depths_and_the_tokens_they_would_keep(self) -> None:
        lines = [line.split() for line in self.shown(2).splitlines()]
        assert ["1", "0.900", "1.90"] in lines
        assert ["2", "0.800", "2.62"] in lines
        assert not any(line and line[0] == "3" for line in lines)
        assert "eagle3 on 128 held-out responses" in self.shown(2)

    def test_what_limits_the_numbers_is_said(self) -> None:
        assert "24 tokens are 99.50%" in self.shown(3, vocabulary=24, coverage=0.995)
        assert "true tokens only" in self.shown(3, kind="model", acceptance=[0.9])
        assert "true tokens" not in self.shown(3)


SMALL = [
    *(
        "--config",
        "draft_offline.py",
        "--model.layers",
        "4",
        "--model.embed",
        "16",
        "--model.ffn",
        "16",
        "--model.head_size",
        "4",
    ),
    *(
        "--sft.steps",
        "0",
        "--data.digits",
        "1",
        "--rollout.max_new_tokens",
        "6",
        "--offline.samples",
        "32",
        "--offline.rows",
        "16",
    ),
    *("--mesh.data", "1"),
]


class TestProgram:
    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "jaxspec.train_draft", *SMALL, *options]

    def test_nothing_to_train_is_said_with_what_would_be(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for job in (a_job("ngram"), a_job(offline=OfflineConfig(steps=0))):
            with (
                Interrupt() as interrupt,
                pytest.raises(
                    ConfigError,
                    match=r"nothing to train; set --offline.steps, .*eagle3, mtp, model",
                ),
            ):
                main(job, interrupt)

    @pytest.mark.slow
    @needs_qwen
    @pytest.mark.skipif(not CHAT.is_dir(), reason=f"no prompts in {CHAT}")
    def test_a_draft_is_trained_on_answers_to_prompts_that_have_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The prompts of three published sets, in Qwen's template."""
        monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
        prompts = []
        for name in ("ultra_eval_prompts", "mt_bench_question", "vicuna_bench_question"):
            for line in (CHAT / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                prompts.append({"prompt": row.get("prompt") or row["turns"][0]})
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in prompts), encoding="utf-8")
        data = DataConfig(
            path=str(path), prompt_column="prompt", tokenizer=str(QWEN), max_prompt_length=32
        )
        job = a_job(
            model=tiny_model(vocab=151_936, dtype="float32"),
            data=data,
            offline=OfflineConfig(samples=4, rows=2, steps=2),
        )
        with Interrupt() as interrupt:
            assert main(job, interrupt) == 0
        told = capsys.readouterr().out
        problems, _ = load_problems(data, job.tokenizer, require_answers=False)
        left_out = problems.skipped_lines
        assert len(prompts) == 545 == len(problems) + left_out.problem_count
        assert left_out.unanswered == 0
        assert len(problems) > 300
        count = len(problems)
        assert f"{count} of {count} prompts have no reference answer" in told
        assert "draft 2/2" in told
        assert "eagle3 on 2 held-out responses" in told

    @pytest.mark.sweep
    def test_stopped_it_says_that_it_goes_on_and_does_and_a_cached_draft_shows_the_same_table(
        self, tmp_path: Path
    ) -> None:
        environment = {**os.environ, "JAXSPEC_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        options = {
            "cwd": ROOT,
            "env": environment,
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        command = self.command("--offline.steps", "4000")
        with Program(command, **options) as process:
            deadline = time.monotonic() + 300
            while not list(tmp_path.glob("*.partial/learner.npz")) and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            told = process.communicate(timeout=60)[0]
        assert process.returncode == 143
        assert "stopped while training the draft" in told
        assert "continues from there" in told
        first, second = (
            fork_server.run(command, **options, timeout=600, check=True).stdout for _ in range(2)
        )
        assert "going on at step" in first
        assert "4000/4000" not in second
        start = "eagle3 on 16 held-out responses"
        assert first[first.index(start) :] == second[second.index(start) :]
