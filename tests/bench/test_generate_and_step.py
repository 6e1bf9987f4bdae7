"""Generation and steps of a checkpoint are measured and traced, and what cannot be measured is
refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.__main__ import main
from jaxspec.bench.loaded import LoadedCheckpoint
from jaxspec.bench.workload import GenerateOptions
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.conftest import save_policy, tiny_model


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["everything"], 2), (["--help"], 0)])
def test_the_first_word_names_the_benchmark(
    capsys: pytest.CaptureFixture[str], argv: list[str], status: int
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == status
    printed = capsys.readouterr()
    assert "drafts" in printed.out + printed.err


@pytest.mark.sweep
def test_a_step_and_a_generation_are_measured_and_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a folder of random weights; both have the keys that the comparison with other programs
    reads."""
    folder = save_policy(tmp_path / "model", tiny_model(vocab=32, dtype="float32"))
    character_tokenizer().save(str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    shared = [
        "--model",
        str(folder),
        "--prompt",
        "6",
        "--new",
        "16",
        "--repeats",
        "2",
        "--budget",
        "0",
    ]
    needed = {
        "peer",
        "kind",
        "model",
        "batch",
        "prompt",
        "new",
        "threads",
        "tokens",
        "wall_s",
        "tokens_per_s",
        "phases_s",
        "peak_rss_mib",
    }

    def line_of(*argv: str) -> dict[str, Any]:
        assert main([*argv, *shared]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    step = line_of("step", "--batch", "8", "--group", "4", "--draft", "eagle3", "--profile", "2:3")
    assert step.keys() >= {*needed, "group", "beta", "versions", "compile_s", "check_logprob"}
    assert (step["peer"], step["kind"], step["tokens"]) == ("jaxspec/eagle3", "grpo_step", 8 * 16)
    phases = {
        "import",
        "load",
        "first_call",
        "data",
        "prepare",
        "generate",
        "score",
        "ref",
        "train",
    }
    assert step["phases_s"].keys() == phases
    assert 0 < step["generation_share"] < 1
    assert 0 < step["packing"] <= 1
    assert step["tokens_per_s"] == pytest.approx(8 * 16 / step["wall_s"])
    assert 1 <= step["acceptance_length"] <= 4
    problems = [
        {"question": f"{number}+{number}=", "answer": str(2 * number)} for number in range(6)
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, problems)))
    near = "--algorithm", "dr_grpo", "--beta", "0.1"
    asked = line_of(
        "step", "--batch", "8", "--group", "4", "--draft", "ngram", "--data", "sums.jsonl", *near
    )
    assert (asked["algorithm"], asked["beta"]) == ("dr_grpo", 0.1)
    assert 0 == step["phases_s"]["ref"] < asked["phases_s"]["ref"]
    assert 0 < asked["tokens"] < 8 * 16  # a policy of random weights ends some of its answers
    assert 0 < asked["plain_generation_share"] < 1
    made = line_of(
        "generate",
        "--batch",
        "4",
        "--draft",
        "eagle3",
        "--draft_length",
        "2",
        "--live",
        "1",
        "--profile",
        "1:2",
    )
    assert made.keys() >= {*needed, "versions", "compile_s", "check_logprob", "rounds"}
    assert made["check_logprob"] == step["check_logprob"]
    assert [row["K"] for row in made["rounds"]] == [0, 2]
    plain, drafted = made["rounds"]
    assert (plain["tokens_per_pass"], plain["round_cost"], plain["speedup"]) == (1, 1, 1)
    assert 1 <= drafted["tokens_per_pass"] <= 3
    for name in ("step", "generate"):
        with gzip.open(tmp_path / f"trace-{name}.json.gz", "rt") as file:
            named = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"generate", "draft", "verify", "commit"} <= named
    assert {"learn", "train", "train_draft"} & named == set()


def test_a_draft_vocabulary_larger_than_the_policys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_policy(tmp_path / "model", tiny_model(vocab=32, dtype="float32"))
    character_tokenizer().save(str(folder))
    assert (
        main(["generate", "--model", str(folder), "--draft", "eagle3", "--draft_vocab", "33"]) == 2
    )
    error = " ".join(capsys.readouterr().err.split())
    assert [
        word for word in ("--draft_vocab 33", "model.vocab 32", "at most that") if word not in error
    ] == []


def test_every_call_asks_digits_of_its_own() -> None:
    """So that a draft which learns in the steps is never asked what it has learnt from."""
    nothing: Any = None
    loaded = LoadedCheckpoint(
        nothing, nothing, nothing, GenerateOptions(model="folder", prompt=16, seed=3), None, {}
    )
    first, second = (loaded.prompt_texts(4, call) for call in (0, 1))
    assert not set(first) & set(second)
    assert first == loaded.prompt_texts(4, 0)
    assert [len(text) for text in first] == [16] * 4


def test_problems_that_cannot_be_asked_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_policy(tmp_path / "model", tiny_model(vocab=32, dtype="float32"))
    character_tokenizer().save(str(folder))
    absent, long = tmp_path / "absent.jsonl", tmp_path / "long.jsonl"
    long.write_text('{"question": "1000000+1=", "answer": "1000001"}\n')
    for file, words in (
        (absent, ["--data", "absent.jsonl", "No such file"]),
        (long, ["--data", "none of 1 prompts fits --prompt = 6"]),
    ):
        assert main(["step", "--model", str(folder), "--prompt", "6", "--data", str(file)]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert [word for word in words if word not in error] == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch", "6"], ["--batch is 6", "multiple of --group 8"]),
        (["--group", "1"], ["--group is 1"]),
        (["--beta", "-0.04"], ["--beta is -0.04; it must be at least 0"]),
        (["--profile", "5"], ["--profile is '5'", "10:12"]),
        (["--draft", "ngram", "--no_online"], ["--draft ngram", "no use for --no_online"]),
    ],
)
def test_a_step_that_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    assert main(["step", "--model", "nowhere", *argv]) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []
    assert len(error.splitlines()) == 1
