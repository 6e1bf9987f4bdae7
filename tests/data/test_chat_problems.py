"""Problems that are chats, and answers inside objects, as published sets of problems have them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.settings import BatchConfig, DataConfig, ResolvedConfig
from jaxspec.data.problem_source import Problems
from jaxspec.data.problems import describe_problems, load_problems, load_sets
from jaxspec.inputs.checked import ConfigError
from jaxspec.rewards.extract import is_number
from jaxspec.tokens.tokenizer import character_tokenizer, load_tokenizer

SHARED = Path(__file__).parents[3] / "shared/data"
TOKENIZER = character_tokenizer()


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def told_of(data: DataConfig) -> list[str]:
    config = ResolvedConfig(data=data, batch=BatchConfig(prompts=1))
    return describe_problems(config, load_sets(config, TOKENIZER, require_answers=False))


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
        (["1+1="], "holds a list that is not a chat"),
        ([{"role": "user", "content": 3}], "holds a list that is not a chat"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
            "holds a list that is not a chat; .* parts of type 'text'",
        ),
        ([{"role": "assistant", "content": "2"}], "one of them must be the user's"),
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


ANSWERS: list[dict[str, Any]] = [
    *({"answer": "2"}, {}, {"answer": ""}, {"answer": ["2"]}, {"answer": None}, {"answer": "3"}),
    *({"answer": "4"}, {"answer": "#### "}),
]


def test_prompts_without_an_answer_are_asked_where_only_a_draft_learns(tmp_path: Path) -> None:
    """The last problems that have one are held out, as they are where answers are needed."""
    lines = [{"question": f"{i}+1=", **answer} for i, answer in enumerate(ANSWERS)]
    path = write(tmp_path, *lines)
    with pytest.raises(ConfigError, match=r"line 4: column 'answer' holds a list"):
        load(path)
    config = DataConfig(path=path, eval_prompts=2)
    train, held_out = load_problems(config, TOKENIZER, require_answers=False)
    assert [problem.index for problem in train] == [0, 1, 2, 3, 4, 7]
    assert [problem.answer for problem in train] == ["2", "", "", "", "", ""]
    assert [problem.answer for problem in held_out] == ["3", "4"]
    told = f"data.path {path}: 5 of 6 prompts have no reference answer, which is not needed here"
    assert told_of(config) == [told]
    prompts = [problem.prompt for problem in held_out]
    _, strict = load(write(tmp_path, lines[0], *lines[5:7]), eval_prompts=2)
    assert [problem.prompt for problem in strict] == prompts
    few = DataConfig(path=write(tmp_path, *lines[:5]), eval_prompts=2)
    train, held_out = load_problems(few, TOKENIZER, require_answers=False)
    assert (len(train), len(held_out), len(told_of(few))) == (5, 0, 1)


def test_problems_that_all_have_answers_are_the_same_without_need_of_them(tmp_path: Path) -> None:
    lines = [{"question": f"{i}+1=", "answer": f"#### {i + 1}"} for i in range(9)]
    config = DataConfig(path=write(tmp_path, *lines), eval_prompts=3)
    for with_answers, without in zip(
        load_problems(config, TOKENIZER),
        load_problems(config, TOKENIZER, require_answers=False),
        strict=True,
    ):
        assert list(with_answers) == list(without)
    with pytest.raises(ConfigError, match="9 usable problems"):
        load_problems(dataclasses.replace(config, eval_prompts=9), TOKENIZER, require_answers=False)


def test_what_messages_hold_beside_their_text_reaches_the_template(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer"))
    called = "{% if m.tool_calls is defined %}{{ m.tool_calls[0].name }}{% endif %}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{called};{{% endfor %}}="
    (tmp_path / "tokenizer/chat_template.jinja").write_text(template)
    chat = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "tool_calls": [{"name": "3"}]},
        {"role": "user", "content": "4"},
    ]
    config = DataConfig(
        path=write(tmp_path, *[{"question": chat, "answer": "5"}] * 2),
        max_prompt_length=20,
        eval_path=write(tmp_path / "tokenizer", {"question": "6", "answer": "7"}),
    )
    train, _ = load_problems(config, load_tokenizer(str(tmp_path / "tokenizer")))
    assert [problem.prompt for problem in train] == ["1;23;4;="]


CHATML = (
    "{% if tools %}{{ tools[0].function.name }}|{% endif %}{% for m in messages %}"
    "{% if m.role != 'note' %}{{ m.role[0] }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}({{ call.name }}){% endfor %};{% endif %}{% endfor %}="
)
TOOLS = [{"type": "function", "function": {"name": "times", "strict": None}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "times"}]}


def asked(folder: Path, *rows: dict[str, Any], **changes: Any) -> tuple[list[str], list[str]]:
    """The prompts of rows, by a template with tools, and what is said of them."""
    TOKENIZER.save(str(folder / "tokenizer"))
    backend = json.loads((folder / "tokenizer/tokenizer.json").read_text())
    backend["model"]["unk_token"] = "<unk>"
    (folder / "tokenizer/tokenizer.json").write_text(json.dumps(backend))
    (folder / "tokenizer/chat_template.jinja").write_text(CHATML)
    tokenizer, name = load_tokenizer(str(folder / "tokenizer")), str(folder / "tokenizer")
    other = folder / "other"
    other.mkdir()
    config = DataConfig(
        path=write(folder, *rows),
        eval_path=write(other, {"question": "6", "answer": "7"}),
        tokenizer=name,
        max_prompt_length=99,
        eval_prompts=1,
        **changes,
    )
    whole = ResolvedConfig(data=config, batch=BatchConfig(prompts=1))
    sets = load_sets(whole, tokenizer)
    return [problem.prompt for problem in sets.training[0]], describe_problems(whole, sets)


def test_calls_of_tools_their_results_and_the_tools_are_asked(tmp_path: Path) -> None:
    """Tools as objects or as JSON text; the instruction goes to the last message of the user."""
    chat = [{"role": "user", "content": "7*8"}, CALL, {"role": "tool", "content": "56"}]
    told = [*chat, {"role": "assistant", "content": "It is 56."}]
    rows = [
        {"question": chat, "tools": TOOLS, "answer": "56"},
        {"question": told[:3], "tools": json.dumps(TOOLS), "answer": "56"},
        {"question": [*chat[:2], {"role": "tool", "content": "5"}], "tools": TOOLS, "answer": "5"},
        {"question": chat, "tools": "  ", "answer": "56"},
    ]
    prompts, said = asked(tmp_path, *rows, instruction="!")
    assert prompts == [
        "times|u7*8\n!;a(times);t56;=",
        "times|u7*8\n!;a(times);t5;=",
        "u7*8\n!;a(times);t56;=",
    ]
    assert [line for line in said if "hold" in line] == []
    assert "1 repeated" in said[0]


def test_parts_of_a_chat_that_no_prompt_holds_are_counted(tmp_path: Path) -> None:
    ask = {"role": "user", "content": "1+1"}
    answer = {"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}
    note, more = {"role": "note", "content": "x"}, {"role": "user", "content": "2+2", "name": "I"}
    rows = [
        {"question": [ask, answer], "answer": "2"},
        {"question": [ask, answer, more], "answer": "4"},
        {"question": [ask, answer, {**more, "content": "3+3"}], "answer": "6"},
        {"question": [note, more], "answer": "4"},
        {
            "question": [{**ask, "content": [{"type": "text", "text": "5+"}, {"text": "5"}]}],
            "answer": "9",
        },
    ]
    prompts, said = asked(tmp_path, *rows)
    assert prompts == ["u1+1;=", "u1+1;a2;u2+2;=", "u1+1;a2;u3+3;=", "u2+2;=", "u5+5;="]
    path = tmp_path / "train.jsonl"
    assert [line.removeprefix(f"warning: data.path {path}: ") for line in said] == [
        "prompts do not hold the assistant's messages after the last question, in 1 problems",
        "prompts do not hold the key 'name' of messages of role 'user', in 3 problems",
        "prompts do not hold the key 'reasoning_content' of messages of role 'assistant', in 2"
        " problems",
        "prompts do not hold messages of role 'note', in 1 problems",
    ]


def test_tools_that_are_no_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"line 1: column 'tools' holds 'a, b'; give a list of ob"
    ):
        load(write(tmp_path, {"question": "1", "answer": "1", "tools": "a, b"}))


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
    assert len(train) + len(held_out) + train.skipped_lines.problem_count == 2000
    assert train[0].answer == "157"
    assert train[0].prompt.startswith("<|im_start|>user\nSolve the following math problem")
    assert train[0].prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert all(is_number(problem.answer) for problem in train)
