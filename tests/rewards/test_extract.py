"""Final answers out of text: each style, nothing where none is stated, and no text that breaks
it."""

import re
import sys
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.rewards.extract import (
    _ANSWER_LINE,
    _BRACE,
    ANSWER_WINDOW,
    MAX_BOX_GAP,
    extract_answer,
    normalize_answer,
    opens_thought,
)

STYLES = ("hash", "boxed", "answer_line", "number")


@pytest.mark.parametrize(
    ("style", "text", "found"),
    [
        ("hash", "7+5+0=12,2+8+1=11,#112", "112"),
        ("hash", "#1\n#### 72\nso there", "72"),
        ("hash", "#### 1,234 dollars", "1,234"),
        ("hash", "so 72 it is", None),
        ("hash", "#72 then #", None),
        ("hash", "####\n72", None),
        ("hash", "#5</think> 6", None),
        ("hash", "#5</think> #6", "6"),
        ("boxed", r"thus \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} or \boxed{2}", "1, 2"),
        ("boxed", r"\boxed{1}\boxed{2}, \boxed{3}", "1, 2, 3"),
        ("boxed", r"\boxed{1}, so \boxed{2}", "2"),
        ("boxed", rf"\boxed{{1}}{'.' * (MAX_BOX_GAP + 1)}\boxed{{2}}", "2"),
        ("boxed", r"\boxed{5} or \boxed{5}", "5"),
        ("boxed", r"\boxed{41, \boxed{42}}", "41, {42}"),
        ("boxed", r"\boxed{{42}}", "42"),
        ("boxed", r"\fbox{42}", "42"),
        ("boxed", r"$\fbox {$42$}$", "$42$"),
        ("boxed", r"\framebox[3cm]{42}", "42"),
        ("boxed", r"\bbox[5px,border:2px solid]{42}", "42"),
        ("boxed", r"\colorbox{yellow}{42}", "42"),
        ("boxed", r"\fcolorbox{red}{white}{42}", "42"),
        ("boxed", "\\boxed\n{42}", "42"),
        ("boxed", r"\\boxed{42}", "42"),
        ("boxed", "\boxed{42}", "42"),
        ("boxed", "boxed{42}", "42"),
        ("boxed", r"\boxed 42.", "42"),
        ("boxed", r"$\boxed 42$", "42"),
        ("boxed", r"unboxed{42}", None),
        ("boxed", r"<think>\boxed{5}", None),
        ("boxed", r"\boxed{4} <think>\boxed{5}", "4"),
        ("boxed", r"<think>\boxed{5}</think> \boxed{6} <think> or \boxed{7}", "6"),
        ("hash", "<think> #5", None),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("boxed", r"\boxed{41} and \boxed{42", "41"),
        ("boxed", r"\boxed {42}", "42"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"{ } } \boxed{3}", "3"),
        ("boxed", r"\boxed{}", None),
        ("boxed", "just a number 42", None),
        ("answer_line", "Answer: 42", "42"),
        ("answer_line", "**Answer:** 42", "42"),
        ("answer_line", "**Answer: 42**", "42"),
        ("answer_line", "Answer: 1\nwait\nfinal answer: 42.", "42."),
        ("answer_line", r"Answer: $\boxed{42}$", "42"),
        ("answer_line", "Answer:\n42", "42"),
        ("answer_line", "Answer:", None),
        ("answer_line", "the answer is 42", None),
        ("number", "4 + 3 = 7.", "7"),
        ("number", "x = -4", "-4"),
        ("number", "10-20", "20"),
        ("number", "(3)-2", "2"),
        ("number", "it costs $1,234.50 now", "1,234.50"),
        ("number", "12, 13 and no more", "13"),
        ("number", "<think>5", None),
        ("number", "<think>5</think> none", None),
        ("number", "no number", None),
    ],
)
def test_extract(style, text, found):
    assert extract_answer(text, style) == found


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("042", "42"),
        ("42.0", "42"),
        ("+42", "42"),
        ("-0", "0"),
        ("-042.50", "-42.5"),
        (".5", "0.5"),
        ("42.", "42"),
        ("$1,234,567.00", "1234567"),
        ("\\$ 18", "18"),
        ("$x = 3$", "x=3"),
        ("1,23", "1,23"),
        ("1,234", "1234"),
        ("1 234", "1234"),
        ("1, 234", "1, 234"),
        ("1 ,234", "1, 234"),
        ("12, 345, 678", "12, 345, 678"),
        ("1,234, 5", "1234,5"),
        ("01, 2.0", "1,2"),
        ("1 2", "1 2"),
        ("4\n2", "4 2"),
        ("0,111", "0,111"),
        ("11,2", "11,2"),
        ("-", "-"),
        ("", ""),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_normalize(answer, normal):
    assert normalize_answer(answer) == normal


@pytest.mark.parametrize("style", STYLES)
def test_a_thought_that_begins_in_the_prompt_must_close(style):
    """A template may open it; a response that is cut off inside states nothing."""
    text = "#42\n\\boxed{42}\nAnswer: 42"
    assert opens_thought("user: 6*7\nassistant: <think>\n")
    assert not opens_thought("<think>\n\n</think>\n\n")
    assert not opens_thought("put thoughts into <think> first")
    assert extract_answer(text, style, in_thought=True) is None
    assert extract_answer(f"so</think>{text}", style, in_thought=True) == "42"
    assert extract_answer(text, style) == "42"


@settings(deadline=None, max_examples=60)
@given(st.text() | st.text(alphabet="\\boxed{}#$.,+-0 answer:*\n</think>"), st.sampled_from(STYLES))
def test_any_text_is_accepted(text, style):
    found = extract_answer(text, style)
    assert found is None or found.strip()
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


@given(st.integers())
def test_integers_are_their_own_normal_form(number):
    assert normalize_answer(str(number)) == str(number)


def work(text: str, style: str) -> int:
    """Lines of `extract`'s module that run, and characters that its functions get from one another,
    while an answer is looked for.

    A count, not seconds: it is the same on a machine that is busy.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_globals.get("__name__") != extract_answer.__module__:
            return None
        count += event == "line"
        if event == "call" and frame.f_code.co_name != extract_answer.__name__:
            count += sum(len(value) for value in frame.f_locals.values() if isinstance(value, str))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        extract_answer(text, style)  # pyright: ignore[reportArgumentType]
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "piece", ["#", "{", r"\boxed{", "answer: ", "answer" + "*" * 50, "$" * 9, "</think>"]
)
def test_work_does_not_grow_with_the_text(style, piece):
    """And is no more than some steps for each character of the window, however the text is
    built."""
    long = work(piece * ANSWER_WINDOW, style)
    assert work(piece * 4 * ANSWER_WINDOW, style) == long
    assert 0 < long <= 10 * ANSWER_WINDOW


def endless(parts: Any) -> list[Any]:
    """What a pattern's parts repeat without an end, in whatever they enclose."""
    found = []
    for code, value in parts:
        inner = value if isinstance(value, tuple | list) else ()
        if code in (_parser.MAX_REPEAT, _parser.MIN_REPEAT) and value[1] == _parser.MAXREPEAT:
            found.append(value[2])
        for part in inner:
            for each in part if isinstance(part, list) else [part]:
                found += endless(each) if isinstance(each, _parser.SubPattern) else []
    return found


@pytest.mark.parametrize(
    ("pattern", "repeats"), [(_BRACE, 0), (_ANSWER_LINE, 1), (re.compile("(a|b*c)?d+?"), 2)]
)
def test_a_search_steps_back_over_few_characters(pattern, repeats):
    """What the count above does not see: `re` tries a repetition without an end again from every
    place where it may begin."""
    assert len(endless(_parser.parse(pattern.pattern))) == repeats
    if pattern is _ANSWER_LINE:
        assert pattern.pattern.endswith("[^\\n]*)"), (
            "the rest of the line, which nothing follows, may be of any length"
        )


def test_answers_before_the_window_do_not_count():
    assert extract_answer("#5" + " " * ANSWER_WINDOW, "hash") is None
