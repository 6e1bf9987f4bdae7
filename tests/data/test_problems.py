"""Problems by number: the same on every reader, every row once an epoch, and files that say what is
wrong with them."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxspec.config.settings import BatchConfig, DataConfig, ResolvedConfig
from jaxspec.data.json_lines import extract_reference
from jaxspec.data.problem_source import SkippedLines
from jaxspec.data.problems import (
    PromptStream,
    describe_problems,
    load_problems,
    load_sets,
    pad_prompts,
)
from jaxspec.inputs.checked import ConfigError
from jaxspec.rewards.extract import is_number
from jaxspec.tokens.tokenizer import character_tokenizer, load_tokenizer

SHARED = Path(__file__).parents[3] / "shared/data"
TOKENIZER = character_tokenizer()


@pytest.fixture
def write(tmp_path):
    def write_lines(*rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        )
        return str(path)

    return write_lines


def rows(n, start=0):
    return [{"question": f"{i}+1=", "answer": f"so #### {i + 1}"} for i in range(start, start + n)]


def load(path, **changes):
    return load_problems(DataConfig(path=path, **changes), TOKENIZER)


def told(data, prompts=1):
    """What is said of a run's problems, of which a batch takes so many."""
    config = ResolvedConfig(data=data, batch=BatchConfig(prompts=prompts))
    return describe_problems(config, load_sets(config, TOKENIZER))


def test_generated_problems():
    train, held_out = load_problems(DataConfig(task="mixed", eval_prompts=20), TOKENIZER)
    assert len(held_out) == 20
    assert len({problem.prompt for problem in held_out}) == 20
    assert not {problem.prompt for problem in held_out} & {problem.prompt for problem in train}
    problem = train[5]
    assert problem == train[5]
    assert problem.index == 5
    assert list(problem.ids) == TOKENIZER.encode(problem.prompt)
    assert int(problem.answer) == eval(TOKENIZER.decode(problem.ids)[:-1])


def test_small_task_holds_out_what_it_has():
    train, held_out = load_problems(DataConfig(digits=1, eval_prompts=64), TOKENIZER)
    assert 0 < len(held_out) < 64
    assert len(train) + len(held_out) == 55


def test_generated_prompts_too_long():
    with pytest.raises(
        ConfigError, match=r"max_prompt_length is 6.*set --data.max_prompt_length 11"
    ):
        load_problems(DataConfig(digits=4, max_prompt_length=6), TOKENIZER)


def test_file_holds_out_its_last_rows(write):
    train, held_out = load(write(*rows(5), "", *rows(5, 5)), eval_prompts=3)
    assert [problem.answer for problem in train] == [str(i + 1) for i in range(7)]
    assert [problem.answer for problem in held_out] == ["8", "9", "10"]
    assert [problem.index for problem in held_out] == [8, 9, 10]


def test_held_out_file(write):
    train, held_out = load(
        write(*rows(5)), eval_path=write(*rows(9, 100), name="eval.jsonl"), eval_prompts=4
    )
    assert (len(train), len(held_out)) == (5, 4)
    assert held_out[0].answer == "101"


def test_long_repeated_and_unanswered_problems_are_counted(write):
    """Each by its reason, like empty problems and blank lines."""
    long = {"question": "1" * 40 + "+1=", "answer": "2"}
    unanswered = {"question": "1+1=", "answer": "$"}
    nothing = [{"question": " \n", "answer": "2"}, {"question": "", "answer": "3"}]
    lines = [
        long,
        *rows(4),
        "",
        "  ",
        rows(1)[0],
        rows(1)[0],
        unanswered,
        *nothing,
        "",
        *rows(4, 4),
    ]
    config = DataConfig(path=write(*lines), eval_prompts=2)
    train, _ = load_problems(config, TOKENIZER)
    assert len(train) == 6
    assert train.skipped_lines == SkippedLines(
        too_long=1, repeated=2, unanswered=1, empty=2, blank=3
    )
    assert told(config) == [
        f"data.path {config.path}: 6 problems left out (1 too long, 2 repeated, 1 without an"
        " answer, 2 with an empty problem) and 3 blank lines passed over; 6 to train on"
    ]


def test_what_is_held_out_is_counted_too_and_compared_with_what_is_trained_on(write):
    plain = DataConfig(path=write(*rows(9)), eval_prompts=2)
    assert told(plain) == []
    config = DataConfig(
        path=plain.path,
        eval_path=write(*rows(4, 6), "", rows(1, 6)[0], name="eval.jsonl"),
        eval_prompts=3,
    )
    assert told(config) == [
        (
            f"data.eval_path {config.eval_path}: 1 problems left out (1 repeated) and 1 blank lines"
            " passed over; 3 held out"
        ),
        "warning: 3 of the 3 held-out problems are among those to train on, too",
    ]


def test_the_held_out_file_must_have_the_same_columns(write):
    """A setting that it called for would be wrong for the other file."""
    other = write({"questions": "1+1=", "answer": "2"}, name="eval.jsonl")
    with pytest.raises(
        ConfigError,
        match=(
            r"no column 'question' among .*; give the file the columns of data\.path, which"
            r" --data\.prompt_c"
        ),
    ):
        load(write(*rows(5)), eval_path=other)


def test_fewer_problems_than_are_asked_for_are_told(write):
    config = DataConfig(
        path=write(*rows(3)), eval_path=write(*rows(2, 50), name="eval.jsonl"), eval_prompts=2
    )
    assert told(config, 3) == []
    assert told(config, 4) == [
        (
            "warning: a batch takes 4 problems, and there are 3 to train on, so that some are in it"
            " repeatedly"
        ),
    ]
    more = dataclasses.replace(config, eval_prompts=3)
    assert told(more) == [
        "2 problems are held out: there are no more, though data.eval_prompts is 3"
    ]


def test_columns_and_instruction(write):
    path = write(*({"problem": f"{i}-1=", "solution": i - 1} for i in range(2, 9)))
    train, _ = load(
        path,
        prompt_column="problem",
        answer_column="solution",
        instruction="?",
        eval_prompts=1,
        tokenizer="set",
    )
    assert train[0].prompt.endswith("2-1=\n?")
    assert train[0].answer == "1"


def test_reads_from_many_threads_agree(write):
    train, _ = load(write(*rows(300)), eval_prompts=1)
    order = np.random.default_rng(0).integers(0, len(train), 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert [problem.answer for problem in pool.map(train.__getitem__, order)] == [
            str(i + 1) for i in order
        ]


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        ([], {}, "data.path .*: the file is empty"),
        (["", " "], {}, "the file is empty"),
        ([*rows(2), "{oops"], {}, "line 3: not JSON"),
        (["[1]"], {}, "line 1: a list instead of an object"),
        (
            [{"questions": "1+1=", "answer": "2"}],
            {},
            (
                "line 1: no column 'question' among 'questions', 'answer'; did you mean"
                " --data.prompt_column"
            ),
        ),
        (
            [{"solution": "1+1=", "answer": "2"}],
            {"prompt_column": "solutio"},
            "among 'solution', 'answer'; set --data.prompt_column$",
        ),
        (
            rows(2),
            {"answer_column": "zzz"},
            "no column 'zzz' among 'question', 'answer'; set --data.answer_column",
        ),
        (
            rows(2),
            {"answer_column": "answers"},
            "'answer'; did you mean --data.answer_column answer\\?",
        ),
        # columns of answers are near, too
        (
            [{"problem": "1+1=", "solution": "2"}],
            {},
            "no column 'question' among 'problem', 'solution'; set --data.prompt_column$",
        ),
        (
            [{"q": "1", "questions": "2"}],
            {"answer_column": "questions"},
            "among 'q', 'questions'; set --data.prompt_column$",
        ),
        (
            [{f"c\n{i}": i for i in range(20_000)}],
            {},
            r"among 'c\\n0', 'c\\n1', .* and 19995 more; set --data.prompt_column$",
        ),
        (
            rows(2),
            {"prompt_column": "answer"},
            "data.prompt_column and data.answer_column are both 'answer', .*; name two columns",
        ),
        (
            rows(2),
            {"instruction": "\udcff"},
            r"^data\.instruction is '\\udcff', which is not valid UTF-8",
        ),
        (
            [{"question": "1+1=", "answer": r"\boxed{}"}],
            {},
            "column 'answer' states no answer in any of 1 lines",
        ),
        ([{"question": ["1+1="], "answer": "2"}], {}, "column 'question' holds a list"),
        (
            [{"question": "1+1="}, {"question": "2+1=", "answers": "3"}],
            {},
            "line 1: no column 'answer' among 'question'; set --data.answer_column",
        ),
        (["[" * 100_000], {}, "line 1: not JSON .nested too deeply"),
        (
            ['{"question": NaN, "answer": "2"}'],
            {},
            "line 1: column 'question' holds a float that is not finite",
        ),
        (
            ['{"question": "1+1=", "answer": 1e999}'],
            {},
            "line 1: column 'answer' holds a float that is not finite",
        ),
        (
            ['{"question": "1\\ud800", "answer": "2"}'],
            {},
            "line 1: column 'question' holds an unpaired surrogate",
        ),
        (
            ['{"question": "1+1=", "answer": "\\udc00"}'],
            {},
            "line 1: column 'answer' holds an unpaired surrogate",
        ),
        (
            [{"question": " ", "answer": "2"}],
            {},
            "column 'question' is empty in all of 1 lines; set data.prompt_column",
        ),
        (
            [{"question": "1+1=", "answer": "####"}],
            {},
            "column 'answer' states no answer in any of 1 lines",
        ),
        (
            [{"question": "What is it?", "answer": "2"}],
            {},
            "built-in tokenizer lacks 'What is'; set data.tokenizer",
        ),
        (
            rows(9),
            {"max_prompt_length": 3},
            "none of 9 prompts fits data.max_prompt_length = 3; the shortest takes 5",
        ),
        ([*rows(2), "[" * 100_000], {}, r"data\.path .*, line 3: not JSON"),
        (
            [*rows(2), '{"question": "1\\ud800", "answer": "2"}'],
            {},
            r"line 3: column 'question' holds an unpaired surrogate",
        ),
        (rows(4), {"eval_prompts": 4}, "4 usable problems, of which data.eval_prompts = 4"),
    ],
)
def test_bad_files(write, lines, changes, message):
    with pytest.raises(ConfigError, match=message):
        load(write(*lines), **changes)


def test_missing_files(write, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path .*absent\.jsonl: No such file"):
        load(str(tmp_path / "absent.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data\.eval_path .*: no file of .*/empty matches"):
        load(write(*rows(3)), eval_path=str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3+4=7\n#### 1,007", "1,007"),
        (r"we get $\boxed{042}$.", "042"),
        (r"\sqrt x + 1 ", r"\sqrt x + 1"),
        ("$", ""),
        (" 42 ", "42"),
        (r"\frac{3}{7}", r"\frac{3}{7}"),
        ("#### 5\nend", "5"),
        (r"so \boxed{} it is", ""),
        (r"\boxed{ } \boxed{7}", "7"),
    ],
)
def test_reference_answers(text, answer):
    assert extract_reference(text) == answer


def test_stream_shuffles_every_epoch_and_depends_on_position_alone():
    problems, _ = load_problems(DataConfig(digits=1), TOKENIZER)
    n = len(problems)
    stream, other = PromptStream((problems,), 3), PromptStream((problems,), 3)
    epochs = [[stream[position].index for position in range(k * n, (k + 1) * n)] for k in range(3)]
    assert [stream.problem_number(position) for position in range(n)] == epochs[0]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [other[position].index for position in reversed(range(n, 2 * n))] == epochs[1][::-1]
    assert [PromptStream((problems,), 4)[position].index for position in range(n)] != epochs[0]


def test_padded_prompts():
    problems = [load_problems(DataConfig(digits=digits), TOKENIZER)[0][0] for digits in (1, 2)]
    tokens, lengths = pad_prompts(problems, 9, TOKENIZER.pad_id)
    assert tokens.dtype == lengths.dtype == np.int32
    assert lengths.tolist() == [5, 7]
    assert tokens[0].tolist() == [*problems[0].ids, *[TOKENIZER.pad_id] * 4]
    with pytest.raises(ValueError, match="7 tokens does not fit rows of 6"):
        pad_prompts(problems, 6, TOKENIZER.pad_id)


@pytest.mark.skipif(
    not (SHARED / "gsm8k").is_dir() or not (SHARED / "qwen_tokenizer").is_dir(),
    reason=f"no data in {SHARED}",
)
def test_real_text():
    folder = str(SHARED / "qwen_tokenizer")
    config = DataConfig(
        path=str(SHARED / "gsm8k/test_first1119.jsonl"),
        tokenizer=folder,
        max_prompt_length=128,
        eval_prompts=8,
    )
    train, held_out = load_problems(config, load_tokenizer(folder))
    assert len(train) + len(held_out) + train.skipped_lines.problem_count == 1119
    assert 0 < train.skipped_lines.problem_count < 200
    assert train[0].answer == "18"
    assert train[0].prompt.startswith("<|im_start|>user\nJanet")
    assert all(is_number(problem.answer) for problem in train)
