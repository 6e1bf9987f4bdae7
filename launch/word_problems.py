"""Writes sums and word problems of one step as JSON lines: word_problems.py FILE [COUNT]

Each line has a question and its answer, a whole number. No two questions are the same, and the file
depends on COUNT alone.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

COUNT = 4096
NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Ivy",
    "Jack",
    "Kate",
    "Liam",
    "Mia",
    "Noah",
    "Olivia",
    "Paul",
]
THINGS = [
    "apples",
    "oranges",
    "pencils",
    "books",
    "marbles",
    "stickers",
    "cookies",
    "coins",
    "shells",
    "stamps",
    "balloons",
    "cards",
    "flowers",
    "buttons",
    "toys",
    "stones",
]

Draw = random.Random


def sum_of_two(draw: Draw) -> tuple[str, int]:
    first, second = draw.randint(2, 20), draw.randint(2, 20)
    return f"What is {first} + {second}?", first + second


def difference(draw: Draw) -> tuple[str, int]:
    first, second = draw.randint(2, 20), draw.randint(2, 20)
    return f"What is {first + second} - {second}?", first


def product(draw: Draw) -> tuple[str, int]:
    first, second = draw.randint(2, 12), draw.randint(2, 12)
    return f"What is {first} * {second}?", first * second


def getting_more(draw: Draw) -> tuple[str, int]:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    had, more = draw.randint(2, 20), draw.randint(2, 20)
    return (
        f"{name} has {had} {things} and buys {more} more. How many {things} does {name} have now?"
    ), had + more


def giving_away(draw: Draw) -> tuple[str, int]:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    given, left = draw.randint(2, 20), draw.randint(2, 20)
    return (
        f"{name} has {given + left} {things} and gives away {given}. How many {things} does {name}"
        " have left?"
    ), left


def two_owners(draw: Draw) -> tuple[str, int]:
    name, other = draw.sample(NAMES, 2)
    things, first, second = draw.choice(THINGS), draw.randint(2, 20), draw.randint(2, 20)
    return (
        f"{name} has {first} {things} and {other} has {second}. How many {things} do they have"
        " together?"
    ), first + second


def price(draw: Draw) -> tuple[str, int]:
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    count, each = draw.randint(2, 12), draw.randint(2, 12)
    return (
        f"{name} buys {count} {things} at {each} dollars each. How many dollars does {name} pay?"
    ), count * each


KINDS: tuple[Callable[[Draw], tuple[str, int]], ...] = (
    sum_of_two,
    difference,
    product,
    getting_more,
    giving_away,
    two_owners,
    price,
)


def make_problems(count: int) -> dict[str, int]:
    """Returns `count` questions with their answers, all different and of all kinds."""
    draw, problems = random.Random(0), {}
    while len(problems) < count:
        question, answer = draw.choice(KINDS)(draw)
        problems.setdefault(question, answer)
    return problems


def main() -> None:
    file, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else COUNT
    lines = (
        json.dumps({"question": question, "answer": str(answer)})
        for question, answer in make_problems(count).items()
    )
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(file)


if __name__ == "__main__":
    main()
