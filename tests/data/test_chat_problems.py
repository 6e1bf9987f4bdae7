"""Problems that are chats, and answers inside objects, as published sets of problems have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.settings import DataConfig
from jaxspec.data.problem_source import Problems
from jaxspec.data.problems import load_problems
from jaxspec.data.tokenizer import character_tokenizer, load_tokenizer
from jaxspec.inputs.checked import ConfigError
from jaxspec.rewards.extract import is_number

SHARED = Path(__file__).parents[3] / "shared/data"
TOKENIZER = character_tokenizer()


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path: str, **changes: Any) -> tuple[Problems, Problems]:
    return load_problems(DataConfig(path=path, **changes), TOKENIZER)


@pytest.mark.parametrize("layout", [("role", "content", "user"), ("from", "value", "human")])
def test_a_problem_may_be_a_chat_and_its_answer_inside_an_object(
    tmp_path: Path, layout: tuple[str, str, str]
) -> None:
    """In either of the usual layouts; what comes after the last question is not asked."""
    role, content, user = layout
    lines = [
        {
            "chat": [{role: user, content: f"{i}+1="}, {role: "gpt", content: "so it is"}],
            "scored": {"by": {"truth": i + 1}},
        }
        for i in range(4)
    ]
    train, _ = load(
        write(tmp_path, *lines),
        prompt_column="chat",
        answer_column="scored.by.truth",
        eval_prompts=1,
    )
    assert [problem.prompt for problem in train] == ["<bos>0+1=", "<bos>1+1=", "<bos>2+1="]
    assert [problem.answer for problem in train] == ["1", "2", "3"]
    assert train[1].columns == lines[1]


@pytest.mark.parametrize(
    ("chat", "told"),
    [
        ([], "holds a list that is no chat"),
        (["1+1="], "holds a list that is no chat"),
        ([{"role": "user"}], "holds a list that is no chat"),
        ([{"role": "assistant", "content": "2"}], "the user must ask something"),
        (
            [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}],
            "chat of 2 messages",
        ),
    ],
)
def test_a_list_that_is_no_chat_is_refused(tmp_path: Path, chat: list[Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 2: .*{told}|{told}"):
        load(
            write(tmp_path, {"question": "1+1=", "answer": "2"}, {"question": chat, "answer": "2"})
        )


def test_a_place_inside_an_object_that_is_not_there_is_named(tmp_path: Path) -> None:
    lines = [{"question": "1+1=", "answer": {"a": 1}}]
    with pytest.raises(ConfigError, match=r"no column 'answer\.b' among 'question', 'answer'"):
        load(write(tmp_path, *lines), answer_column="answer.b")


@pytest.mark.skipif(
    not (SHARED / "dapo_like").is_dir() or not (SHARED / "qwen_tokenizer").is_dir(),
    reason=f"no data in {SHARED}",
)
def test_the_schema_of_dapo_math() -> None:
    """Prompts are messages, and answers lie in an object."""
    folder = str(SHARED / "qwen_tokenizer")
    config = DataConfig(
        path=str(SHARED / "dapo_like/train.jsonl"),
        tokenizer=folder,
        prompt_column="prompt",
        answer_column="reward_model.ground_truth",
        answer_style="dapo",
        max_prompt_length=512,
        eval_prompts=8,
    )
    train, held_out = load_problems(config, load_tokenizer(folder))
    assert len(train) + len(held_out) + train.left_out.problems == 2000
    assert train[0].answer == "157"
    assert train[0].prompt.startswith("<|im_start|>user\nSolve the following math problem")
    assert train[0].prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert all(is_number(problem.answer) for problem in train)
