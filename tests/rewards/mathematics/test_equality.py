"""Verdicts on answers: kinds of right and wrong that a verifier meets, each by several cases."""

# ruff: noqa: RUF001 - answers hold characters that look like others

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from jaxspec.rewards.extract import Style
from jaxspec.rewards.mathematics.equality import math_equal
from jaxspec.rewards.outcome import Outcome
from jaxspec.rewards.pool import RewardPool
from jaxspec.rewards.scorer import RewardInputs, Scorer

RIGHT = [
    # powers
    ("3^{12}", "3**12"),
    ("9", "3**2"),
    ("y^2-1", "y**2 - 1"),
    ("x^{-2}", "x**-2"),
    ("\\sqrt{7}", "7**(1/2)"),
    # units
    ("7\\text{ inches}", "7 in"),
    ("12\\text{ cm}^2", "12\\text{ square centimeters}"),
    ("60\\text{ km/h}", "60 \\text{ kilometers per hour}"),
    ("18", "18\\text{ m}"),
    ("25\\text{ minutes}", "25"),
    ("\\$9", "9 dollars"),
    ("40", "40m"),
    ("30^{\\circ}", "30\\text{ degrees}"),
    # words
    ("\\text{odd}", "Odd"),
    ("4", "\\text{four}"),
    ("\\text{(C)}", "C"),
    ("6\\text{ ways}", "6 \\text{ different ways}"),
    ("\\emptyset", "\\text{no real solutions}"),
    ("\\text{Tuesday}", "tuesday"),
    # bases
    ("2104_5", "2104_{5}"),
    ("110_{\\text{two}}", "110_2"),
    ("57", "57_{10}"),
    # times
    ("4\\text{:}30\\text{ p.m.}", "4:30 PM"),
    ("7\\text{ a.m.}", "7:00 am"),
    ("2:15 \\text{ p.m.}", "14:15"),
    # ratios
    ("2:3", "4:6"),
    ("1:2:3", "2:4:6"),
    ("S_1:S_2=5:7", "5:7"),
    ("5:8", "\\frac{5}{8}"),
    # chains
    ("20", "4\\cdot5=20"),
    ("20", "x = 4\\cdot5 = 20"),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{\\sqrt{2}}{2} \\approx 0.7071"),
    ("I_{\\max}=\\frac{U}{R}", "\\frac{U}{R}"),
    # numbers
    ("1234567", "1\\,234\\,567"),
    ("45000", "45\u2009000"),
    ("45000", "45\u202f000"),
    ("32500", "32{,}500"),
    ("8100", "8,\\!100"),
    ("0,25", "0.25"),
    ("\\frac{5}{6}", "0.8\\overline{3}"),
    ("\\frac{1}{7}", "0.142857142857"),
    ("\\frac{19}{5}", "3 4/5"),
    ("6.5\\times10^{-9}", "0.0000000065"),
    # Unicode
    ("60^\\circ", "60°"),
    ("5\\sqrt{2}", "5√2"),
    ("\\sqrt{x+1}", "√(x+1)"),
    ("-\\frac{3}{4}", "−¾"),
    ("x^3", "x³"),
    ("a_1", "a₁"),
    ("\\frac{\\pi}{3}", "π/3"),
    ("x\\le 4", "x ≤ 4"),
    ("(-\\infty,2)", "(−∞, 2)"),
    # intervals
    ("(-3,5]", "-3 < t \\le 5"),
    ("[4,\\infty)", "x \\ge 4"),
    ("(-\\infty,1)\\cup(2,\\infty)", "x<1 \\text{ or } x>2"),
    ("(0,1)", "x \\in (0,1)"),
    ("1<x<9", "(1,9)"),
    ("(1,9)", "9 > x > 1"),
    # wrappers
    ("15", "\\text{15}"),
    ("15", "**15**"),
    ("15", "$15$."),
    ("\\left(\\frac12,3\\right)", "\\( (\\dfrac{1}{2}, 3) \\)"),
    ("n+1", "\\mathrm{n+1}"),
    # lists
    ("3,-3", "\\pm 3"),
    ("2\\pm\\sqrt{5}", "2-\\sqrt{5}, 2+\\sqrt{5}"),
    ("x=1,y=2", "y=2 \\text{ and } x=1"),
    ("p=5,q=2;p=7,q=3", "p=7,q=3;p=5,q=2"),
    ("\\{1,2,3\\}", "3, 1, 2"),
    ("(1,2),(3,4)", "(3,4) \\text{ and } (1,2)"),
    ("(5,6)", "x=5, y=6"),
]
WRONG = [
    # equations that are not solved
    ("12", "2x=12"),
    ("12", r"\sqrt{x}=12"),
    ("9", "x^2=9"),
    ("4", "2x+2=4"),
    ("0", "x^2-5x+6=0"),
    ("5", "-x=5"),
    # powers
    ("6", "3**2"),
    ("2x", "x**2"),
    ("x^3", "x**2"),
    # units
    ("7\\text{ inches}", "7\\text{ feet}"),
    ("12\\text{ cm}^2", "12\\text{ cm}"),
    ("60\\text{ km/h}", "60\\text{ m/s}"),
    ("\\$9", "9\\text{ cents}"),
    ("4t", "4"),
    ("30^\\circ\\text{C}", "30^\\circ\\text{F}"),
    # words
    ("8", "8 million"),
    ("8", "not 8"),
    ("8", "at least 8"),
    ("8", "8 \\text{ or more}"),
    ("listen", "silent"),
    ("\\text{May } 3", "\\text{June } 3"),
    ("8", "-8 \\text{ is wrong}"),
    # bases
    ("2104_5", "2104_6"),
    ("110_2", "110"),
    ("110_2", "111_2"),
    # times
    ("4:30\\text{ p.m.}", "4:30\\text{ a.m.}"),
    ("7\\text{ a.m.}", "7\\text{ p.m.}"),
    ("3:30", "1:10"),
    # ratios
    ("2:3", "3:2"),
    ("1:2:3", "1:6"),
    ("1:2:3", "\\frac{1}{6}"),
    ("1:2:3", "1:2:4"),
    # chains
    ("20", "19=20"),
    ("20", "x=18=19=20"),
    ("20", "3\\cdot6=20"),
    ("x=1", "y=1"),
    ("x+2y=5", "5"),
    # tails
    ("17", "17 \\# 18"),
    ("17", "17 ? 18"),
    ("17", "16 17"),
    ("17", "17 \\ldots 20"),
    ("17", "17 | 3"),
    ("17", "$16$ maybe $17$"),
    ("17", "17!"),
    ("f(x)", "f'(x)"),
    ("x\\equiv 3\\pmod 7", "x\\equiv 3\\pmod 5"),
    # small and large numbers
    ("\\frac{1}{1000!}", "\\frac{1}{1001!}"),
    ("\\frac{1}{2004!}", "\\frac{1}{2006!}"),
    ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
    ("\\frac{2^{2005}+1}{3\\cdot2^{2006}}", "\\frac{1}{3\\cdot2^{2006}}"),
    ("10^{-9}", "2\\cdot10^{-9}"),
    ("1.5\\times10^{-8}", "1.6\\times10^{-8}"),
    ("\\sqrt{10^{40}+1}", "10^{20}"),
    ("\\frac14", "0.2500001"),
    ("\\frac13", "0.333"),
    ("x", "x+10^{-20}"),
    # numbers and lists
    ("1234", "1, 234"),
    ("1,234", "1, 234"),
    ("12", "1 2"),
    ("5,6", "5"),
    ("5", "5,6"),
    ("3", "\\pm 3"),
    ("(1,2)", "(2,1)"),
    ("p=5,q=2;p=7,q=3", "p=5,q=3;p=7,q=2"),
    ("x=1,y=2", "x=2,y=1"),
    # intervals
    ("(1,9)", "1 \\le x < 9"),
    ("[1,9]", "1 < x < 9"),
    ("[4,\\infty)", "x > 4"),
    ("(4,\\infty)", "x < 4"),
    ("(1,9)", "[1,9]"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(1, 30.0) as made:
        yield made


def outcomes(
    pool: RewardPool, pairs: list[tuple[str, str]], style: Style = "boxed"
) -> list[Outcome]:
    """As a training run scores responses, of which each pair has one after its reference."""
    references, responses = zip(*pairs, strict=True)
    scorer = Scorer(style, pool=pool, verifier="math")
    scores = scorer(RewardInputs([""] * len(pairs), responses, references, [{}] * len(pairs)))
    return [Outcome(outcome) for outcome in scores.outcomes.tolist()]


def test_the_table_is_varied() -> None:
    assert len(RIGHT) + len(WRONG) >= 130
    assert len(set(RIGHT + WRONG)) == len(RIGHT + WRONG)


@pytest.mark.parametrize(("pairs", "verdict"), [(RIGHT, Outcome.CORRECT), (WRONG, Outcome.WRONG)])
def test_verdicts(pool: RewardPool, pairs: list[tuple[str, str]], verdict: Outcome) -> None:
    boxed = [(reference, f"so \\boxed{{{answer}}}") for reference, answer in pairs]
    found = outcomes(pool, boxed)
    assert [pair for pair, one in zip(pairs, found, strict=True) if one != verdict] == []


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("1,2", r"\boxed{1} and \boxed{2}"),
        ("2,1", r"\boxed{1},\boxed{2}"),
        ("(2, 2), (6, 2)", r"$\boxed{(6, 2)} \quad \text{and} \quad \boxed{(2, 2)}$"),
        ("k = 45, n = 2", r"\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}"),
        ("5", r"First, \boxed{3}. So the answer is \boxed{5}."),
        ("5", r"\boxed{4}. Wait, that is wrong: \boxed{5}"),
        ("5", r"\boxed{5} Final answer: \boxed{5}"),
        ("\\frac{639}{40}", r"\boxed{15\frac{39}{40}}, or \boxed{\frac{639}{40}} inches"),
    ],
)
def test_final_boxes_are_one_list(pool: RewardPool, reference: str, response: str) -> None:
    assert outcomes(pool, [(reference, response)]) == [Outcome.CORRECT]


FORMS = ["@", "@.", r"\text{@}", r"\{@\}", "(@)", "maybe @", "it is @", "x = @", "one of @"]
JOINTS = [", ", " or ", " and ", "; ", r" \text{ or } ", " = ", r"\quad ", " ", r" \lor "]


@pytest.mark.parametrize("style", ["boxed", "answer_line"])
def test_listing_five_candidates_pays_nothing(pool: RewardPool, style: Style) -> None:
    """Whichever of the 81 forms, and wherever the right one stands."""
    responses = []
    for number, (form, joint) in enumerate(itertools.product(FORMS, JOINTS)):
        candidates = ["40", "41", "43", "44"]
        candidates.insert(number % 5, "42")
        listed = form.replace("@", joint.join(candidates))
        responses.append(f"\\boxed{{{listed}}}" if style == "boxed" else f"Answer: {listed}")
    found = outcomes(pool, [("42", response) for response in responses], style)
    assert [r for r, one in zip(responses, found, strict=True) if one == Outcome.CORRECT] == []
    apart = [
        joint.join(rf"\boxed{{{n}}}" for n in (40, 41, 43, 44, 42)) for joint in (*JOINTS, "\n")
    ]
    assert Outcome.CORRECT not in outcomes(pool, [("42", response) for response in apart])


def test_words_alone_are_not_multiplied() -> None:
    assert math_equal("proof", "proof")
    assert not math_equal("proof", "roofp")
