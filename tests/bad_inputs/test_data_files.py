"""Bad files of problems end in one line that names file, line and setting."""

from pathlib import Path

import pytest

from tests.bad_inputs.programs import QUICK, assert_one_line, ended, trained

PROBLEM = '{"question": "1+1=", "answer": "2"}\n'
DATA: dict[str, tuple[bytes | None, list[str]]] = {
    "missing": (None, ["No such file"]),
    "empty": (b"", ["is empty"]),
    "blank lines": (b"\n\n \n", ["empty"]),
    "no JSON": (b"1+1=2\n", ["line 1", "not JSON"]),
    "half a line": (PROBLEM.encode() + b'{"question": "1', ["line 2", "not JSON"]),
    "a list": (b"[1, 2]\n", ["line 1", "list"]),
    "null": (b"null\n", ["line 1"]),
    "another column": (
        b'{"q": "1+1=", "answer": "2"}\n',
        ["line 1", "'question'", "prompt_column"],
    ),
    "no answer": (b'{"question": "1+1="}\n', ["line 1", "'answer'"]),
    "a null answer": (b'{"question": "1+1=", "answer": null}\n', ["'answer'", "no answer"]),
    "a list of answers": (
        b'{"question": "1+1=", "answer": ["2"]}\n',
        ["line 1", "'answer'", "list"],
    ),
    "empty answers": (b'{"question": "1+1=", "answer": ""}\n', ["answer"]),
    "unknown letters": (b'{"question": "what?", "answer": "2"}\n', ["line 1", "tokenizer"]),
    "bytes": (b"\xff\xfe\x00", ["line 1"]),
    "half a letter": (
        b'{"question": "1\\ud800", "answer": "2"}\n',
        ["line 1", "an unpaired surrogate"],
    ),
    "deep": (b"[" * 100_000, ["line 1", "nested too deeply"]),
    "too long": (b'{"question": "' + b"1" * 300 + b'", "answer": "2"}\n', ["max_prompt_length"]),
    "too few": (PROBLEM.encode(), ["eval_prompts"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_data(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = DATA[name]
    file = tmp_path / "train.jsonl"
    if content is not None:
        file.write_bytes(content)
    status, printed = ended(
        lambda: trained(*QUICK, "--data.path", str(file), "--workdir", "run"), capsys
    )
    assert status == 2
    assert_one_line(printed, str(file), *words)
    assert not list(Path("run").glob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "folder"])
def test_data_that_is_no_file(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    words = ["--data.eval_path", "held.jsonl"] if not path else ["--data.path", path]
    status, printed = ended(lambda: trained(*QUICK, *words), capsys)
    assert status == 2
    assert_one_line(printed, words[0].removeprefix("--"))
