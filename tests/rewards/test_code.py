"""Programs that a policy writes: right ones pass, and whatever else one tries, it does not, leaves
nothing behind and holds nothing up."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.data import RewardConfig
from jaxspec.config.settings import DataConfig
from jaxspec.data.json_lines import RowParser, join_tests
from jaxspec.inputs.checked import ConfigError
from jaxspec.rewards import code
from jaxspec.rewards.code import is_test_program
from jaxspec.rewards.extract import extract_answer
from jaxspec.rewards.outcome import Outcome
from jaxspec.rewards.pool import RewardPool
from jaxspec.rewards.scorer import RewardInputs, Scorer
from jaxspec.rewards.worker import check_program
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.rewards.test_pool import SHARED, SLACK, needs_data

TESTS = "assert f(1) == 2\nassert abs(f(3) - 4) < 1e-6"
RIGHT = "def f(x):\n    return x + 1"
DEADLINE = 2.0
ATTACKS = {
    "nothing": "",
    "no program": "def f(:",
    "a wrong value": "def f(x): return x",
    "an end with status 0": "import os; os._exit(0)",
    "a polite end with status 0": "import sys; sys.exit(0)",
    "an end within a call": "import os\ndef f(x): os._exit(0)",
    "an object that is like anything": (
        "class E:\n def __eq__(s, o): return True\n def __sub__(s, o): return s\n"
        " def __abs__(s): return s\n def __lt__(s, o): return True\ndef f(x): return E()"
    ),
    "a number that is like anything": (
        "class E(int):\n def __eq__(s, o): return True\n def __sub__(s, o): return 0\n"
        "def f(x): return E(7)"
    ),
    "another abs": "def abs(x): return 0\ndef f(x): return 2",
    "another assertion error": (
        "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return 5"
    ),
    "an assertion error of its own": "def f(x): raise AssertionError",
    "much memory": f"x = ' ' * (3 * 2**30)\n{RIGHT}",
    "a large file": f"open('big', 'wb').write(b'0' * 50_000_000)\n{RIGHT}",
    "a very nested value": ("def f(x):\n a = []\n for i in range(10**5): a = [a]\n return a"),
    "a very large value": "def f(x): return 'x' * 10**8",
}
LATE = {
    "a loop": "while True: pass",
    "a sleep": "import time; time.sleep(100)",
    "a loop in a call": "def f(x):\n    while True: pass",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(2, DEADLINE) as made:
        made([])
        yield made


@pytest.fixture(scope="module")
def patient() -> Iterator[RewardPool]:
    """For verdicts that take seconds on a busy machine, and are none of its deadline."""
    with RewardPool(2, 5 * DEADLINE) as made:
        made([])
        yield made


def passes(pool: RewardPool, program: str, tests: str = TESTS) -> Any:
    return pool([["code", tests, program]])[0]


def test_right_programs_pass(pool: RewardPool) -> None:
    assert passes(pool, RIGHT) is True
    assert passes(pool, f"print('x' * 10**6)\n{RIGHT}") is True, "what it prints goes nowhere"


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_not_right_does_not_pass(patient: RewardPool, attack: str) -> None:
    assert passes(patient, ATTACKS[attack]) is False


@pytest.mark.parametrize("late", LATE)
def test_what_is_late_is_ended_in_time(pool: RewardPool, late: str) -> None:
    before = time.monotonic()
    assert passes(pool, LATE[late]) in (False, {"timeout": True})  # by its processor time, too
    assert time.monotonic() - before < DEADLINE + SLACK
    assert passes(pool, RIGHT) is True


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def sum(a, b): return a + b + 1", "assert sum(1, 2) == 4"),  # Python's name, and no other
        ("def f(x): return (i for i in range(x))", "assert list(f(3)) == [0, 1, 2]"),
        (
            "def f(x): return {1: (x, {2.5}), None: b'a'}",
            "assert f(1) == {1: (1, {2.5}), None: b'a'}",
        ),
        (
            "from collections import Counter as C\ndef f(x): return C(x)",
            "assert f('aa') == {'a': 2}",
        ),
        (
            "class P:\n def __init__(self, a): self.a = a\n def b(self): return self.a + 1\n"
            "def f(ps): return [p.b() for p in ps]",
            "p = P(2)\np.a = 5\nassert f([P(1), p]) == [2, 6] and p.b() == 6",
        ),
        ("def f(x, kind): return isinstance(x, kind)", "assert f(1, int) and not f(1, kind=str)"),
        ("def f(x): raise KeyError(x)", "try:\n    f(1)\nexcept KeyError as e:\n    assert e"),
        ("def f(x, to, do): return x + to + do", "assert f(1, to=2, do=3) == 6"),
        ("import math\ndef f(x): return x * math.pi", "assert math.isclose(f(2), 2 * math.pi)"),
    ],
)
def test_values_go_in_and_out(pool: RewardPool, program: str, tests: str) -> None:
    assert passes(pool, program, tests) is True


def test_the_last_whole_block_is_the_program(pool: RewardPool) -> None:
    wrong = "def f(x): return 0"
    responses = [
        f"First\n```python\n{wrong}\n```\nthen\n```python\n{RIGHT}\n```\ndone.",
        f"```\n{RIGHT}\n```",
        f"<think>```python\n{RIGHT}\n```</think> I do not know",
        f"```python\n{RIGHT}",
        f"```bash\n{RIGHT}\n```",
        f"```python\n{wrong}\n```",
    ]
    rows = RewardInputs(responses, responses, [TESTS] * 6, [{}] * 6)
    outcomes = Scorer("code", pool=pool, verifier="code")(rows).outcomes.tolist()
    wanted = [Outcome.CORRECT] * 2 + [Outcome.NO_ANSWER] * 3 + [Outcome.WRONG]
    assert outcomes == wanted


USES = f"```python\n{RIGHT}\n```\n"


@pytest.mark.parametrize(
    "response",
    [
        f"{USES}Usage:\n```python\nprint(f(1))\n```",
        f"{USES}Usage:\n```python\nx = f(1)\nassert x == 3\n```",
        f"{USES}Output:\n```\n2\n```",
        f"{USES}Run it:\n```bash\npython f.py\n```\n",
        f"{USES}```python\ndef main():\n    print(f(1))\n\nmain()\n```",
        "```python\ndef g(x): return x + 1\n```\n```python\ndef f(x): return g(x)\n```",
        f"~~~\n{RIGHT}\n~~~",
        f"~~~python\n{RIGHT}\n~~~",
        f"````python\n{RIGHT}\n````",
        f"```{{python}}\n{RIGHT}\n```",
        f"```{{.python .numberLines}}\n{RIGHT}\n```",
        f'```Python title="f.py"\n{RIGHT}\n```',
        f"``` python\n{RIGHT}\n```",
        "1. So:\n   ```python\n   def f(x):\n       return x + 1\n   ```",
        f"```python\n{RIGHT}\n# ~~~\n```",
        f"Here: ```python\n{RIGHT}\n```",
        f"The call ```f(1)``` gives 2.\n\n```python\n{RIGHT}\n```\n",
        f"```python\n{RIGHT}```\n",
    ],
)
def test_forms_of_a_program(response: str) -> None:
    """What follows the program, and how its block is marked, does not make it wrong."""
    program = extract_answer(response, "code")
    assert program is not None
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["f"](1) == 2


def test_references_must_assert_something(pool: RewardPool) -> None:
    scorer = Scorer("code", pool=pool, verifier="code")
    references = {
        TESTS: True,
        "def check(f):\n    assert f(1)\ncheck(f)": True,
        "for x in [1]:\n    assert f(x)": True,
        "f(1)": False,
        "assert (": False,
        "def check(f):\n    assert f(1)": False,  # nobody calls it
        "class T:\n    def test(self):\n        assert f(1)": False,
    }
    wanted = [number for number, good in enumerate(references.values()) if not good]
    assert scorer.find_unreadable_answers(list(references)) == wanted


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): return []", "for each in f(1):\n    assert each"),
        (
            "def f(x): raise StopIteration",
            "assert all(map(f, [1, 2]))\nassert list(map(f, [1])) == []",
        ),
        (
            "def sorted(x): return [1, 2]\ndef max(x): return 0",
            "assert sorted(max([3, 1])) == [1, 2]",
        ),
        (
            "import json, sys\nw = open(int(sys.argv[2]), 'w', closefd=False)\n"
            "def f():\n    w.write(json.dumps({'value': ['type', 'eval']}) + '\\n'); w.flush()",
            "assert f()('1 + 1') == 2",
        ),
    ],
)
def test_tests_that_the_program_leads_astray_do_not_pass(
    pool: RewardPool, program: str, tests: str
) -> None:
    assert passes(pool, program, tests) is False


def test_what_fails_here_says_nothing_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither right nor wrong: the row is left out, by name."""

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(12, "x")

    monkeypatch.setattr(code.subprocess, "Popen", fails)
    answer = check_program(TESTS, RIGHT, "", seconds=2.0, folder=str(tmp_path / "own"))
    assert isinstance(answer, dict)
    assert "OSError: [Errno 12] x" in answer["error"]


def test_programs_are_run_only_where_that_is_said() -> None:
    with pytest.raises(ConfigError, match=r"say so with --reward\.run_code"):
        RewardConfig(verifier="code")
    RewardConfig(verifier="code", run_code=True)


def test_assertions_of_published_layouts() -> None:
    mbpp = {"test_setup_code": "import math", "test_list": ["assert f(1)", "assert f(2)"]}
    parser = RowParser(
        DataConfig(prompt_column="text", answer_column="test_list", answer_style="code"),
        character_tokenizer(),
        "data.path",
        "file",
    )
    line = json.dumps(mbpp).encode()
    assert parser.parse_answer(line, 0) == "import math\nassert f(1)\nassert f(2)"
    shown = replace(
        parser.config, tokenizer="folder", instruction="Pass {test}", max_prompt_length=64
    )
    problem = replace(parser, config=shown).parse_problem(
        json.dumps(mbpp | {"text": "One."}).encode(), 0
    )
    assert problem.prompt.endswith("One.\nPass assert f(1)")
    humaneval = {"test": "def check(g):\n    assert g(1)", "entry_point": "f"}
    assert join_tests(humaneval, humaneval["test"]) == f"{humaneval['test']}\ncheck(f)"
    assert is_test_program(f"{humaneval['test']}\ncheck(f)")


@needs_data
@pytest.mark.slow
def test_reference_solutions_pass(pool: RewardPool) -> None:
    """Every tenth of MBPP (all of it takes 45 s of a core), and HumanEval."""

    def lines(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    mbpp = lines(SHARED / "mbpp/mbpp.jsonl")[::10]
    humaneval = lines(next((SHARED / "humaneval").glob("*.jsonl")))
    pairs = [(join_tests(row, row["test_list"]), row["code"]) for row in mbpp]
    pairs += [
        (join_tests(row, row["test"]), row["prompt"] + row["canonical_solution"])
        for row in humaneval
    ]
    found = pool([["code", *pair] for pair in pairs])
    assert len(found) == 88 + 120
    assert [verdict for verdict in found if verdict is not True] == []
