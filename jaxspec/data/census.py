"""A census of reference answers before training: their kinds, with examples, and repeats."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.problems import ProblemSets
from jaxspec.inputs.json_keys import listed, shown
from jaxspec.rewards.extract import is_number
from jaxspec.rewards.mathematics.spelling import respell, split_list

MOST = 100_000
"""References that are counted, at most: those of the first problems."""
LONGEST = 4096
"""Characters of a reference that is looked into; a longer one is a text."""
SENTENCE = 5
"""Words of a reference, from which on it is a sentence."""
COMMON = 0.1
"""Share of the references that are one and the same, from which on a remark says so."""
_LEAST = 10
"""References of which a share says something."""
_COMMANDS = re.compile(r"\\text\s*|\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_WORDS_ALONE = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*[.!]?")
KINDS = "numbers", "formulas", "lists", "words", "sentences"


def take_census(config: ResolvedConfig, sets: ProblemSets) -> Iterator[str]:
    """Say of each set of problems in a file which kinds of references it has; `sets` is of
    `config`."""
    named = [*config.judged_sets.items()]
    for number, problems in sets.with_judges():
        where, each = named[number]
        judged = "answer" in each.reward.all_parts and each.data.answer_style != "code"
        if judged and each.data.path and len(problems):
            found = itertools.islice(problems.references(), MOST)
            yield from describe_references(found, f"{where}data.answer_column")


def describe_references(references: Iterable[tuple[str, str]], column: str) -> Iterator[str]:
    """Describe references, each with its place: a line of their kinds, and remarks on those that
    nothing, or anything, may equal.

    Args:
      references: places, and references.
      column: the setting that names their column.
    """
    kinds, examples, texts = Counter[str](), dict[str, tuple[str, str]](), Counter[str]()
    for place, reference in references:
        kind = kind_of(reference)
        kinds[kind] += 1
        examples.setdefault(kind, (place, reference))
        texts[reference] += 1
    total = kinds.total()
    if not total:
        return
    shares = listed(
        f"{_percent(kinds[kind], total)} {kind} ({shown(examples[kind][1])})"
        for kind in KINDS
        if kinds[kind]
    )
    [(most, count)] = texts.most_common(1)
    first = next(iter(examples.values()))[0].rpartition(", ")[0] or column
    yield f"{first}: {total} references: {shares}; {len(texts)} differ"
    if kinds["sentences"]:
        place, text = examples["sentences"]
        yield (
            f"warning: {kinds['sentences']} of {total} references are whole sentences, which no"
            f" short answer equals, such as {place}: {shown(text)}; set {column} to a column of"
            " final answers, or mark these in the text by #### or \\boxed{}"
        )
    if kinds["words"]:
        words = [
            f"{shown(text)} ({n} times)"
            for text, n in texts.most_common()
            if kind_of(text) == "words"
        ]
        yield (
            f"warning: {kinds['words']} of {total} references are words: {listed(words[:3])}"
            f"{' and others' * (len(words) > 3)}. A response that states the word is right; remove"
            " rows whose word says that there is no answer"
        )
    if count > 1 and total >= _LEAST and count >= COMMON * total:
        yield (
            f"warning: {count} of {total} references are {shown(most)}: whoever always answers"
            f" that is right {_percent(count, total)} of the time"
        )


def kind_of(reference: str) -> str:
    """Return the kind of a reference, one of `KINDS`."""
    if is_number(reference):
        return "numbers"
    if len(reference) > LONGEST:
        return "sentences"
    text = respell(reference)
    if is_number(text):
        return "numbers"
    plain = _COMMANDS.sub(" ", text).replace("{", " ").replace("}", " ").replace("$", " ").strip()
    if len(_WORD.findall(plain)) >= SENTENCE:
        return "sentences"
    if len(split_list(text.removeprefix("\\{").removesuffix("\\}"))) > 1:
        return "lists"
    return "words" if _WORDS_ALONE.fullmatch(plain) else "formulas"


def _percent(count: int, total: int) -> str:
    """A share as a percentage, of which a small one is not 0."""
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 1 else f"{share:.1g} %"
