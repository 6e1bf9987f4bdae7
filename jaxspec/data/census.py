"""Census of the reference answers before training: kinds, examples and repeats."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.problems import ProblemSets
from jaxspec.inputs.json_keys import format_value, join_names
from jaxspec.rewards.extract import is_number
from jaxspec.rewards.mathematics.spelling import normalize_spelling, split_list

MAX_REFERENCES = 100_000
"""Maximum number of references counted, from the first problems of a set."""
MAX_REFERENCE_LENGTH = 4096
"""Maximum characters of a reference that is parsed. A longer one counts as a sentence or number."""
SENTENCE_WORDS = 5
"""Minimum number of words of a sentence."""
COMMON_SHARE = 0.1
"""Minimum share of one reference for a warning that it is common."""
_MIN_REFERENCES = 10
"""Minimum number of references for that warning."""
_COMMANDS = re.compile(r"\\text\s*|\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_WORDS_ALONE = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*[.!]?")
KINDS = "numbers", "formulas", "lists", "words", "sentences"


def take_census(config: ResolvedConfig, sets: ProblemSets) -> Iterator[str]:
    """Yields report lines on the references of all files.

    Sets whose references are not compared with answers, such as tests of code, are left out. `sets`
    must be the sets of `config`.
    """
    # `enumerate_sets` numbers the sets in this order.
    named_sets = [*config.sets_by_prefix.items()]
    for number, problems in sets.enumerate_sets():
        prefix, set_config = named_sets[number]
        is_judged = (
            "answer" in set_config.reward.all_parts and set_config.data.answer_style != "code"
        )
        if is_judged and set_config.data.path and len(problems):
            # The census delays the start of a run, so it must not grow with the file.
            references = itertools.islice(problems.iter_references(), MAX_REFERENCES)
            yield from describe_references(references, f"{prefix}data.answer_column")


def describe_references(references: Iterable[tuple[str, str]], column: str) -> Iterator[str]:
    """Yields report lines on the references of a set.

    The first line has their kinds. The others are warnings: for whole sentences, for words, and for
    one reference that is very common. Without references there are no lines.

    Args:
      references: location and text of each reference.
      column: setting that names their column.
    """
    kinds, examples, texts = Counter[str](), dict[str, tuple[str, str]](), Counter[str]()
    for location, reference in references:
        kind = classify_reference(reference)
        kinds[kind] += 1
        examples.setdefault(kind, (location, reference))
        texts[reference] += 1
    total = kinds.total()
    if not total:
        return
    shares = join_names(
        f"{_format_percent(kinds[kind], total)} {kind} ({format_value(examples[kind][1])})"
        for kind in KINDS
        if kinds[kind]
    )
    [(common_reference, repeats)] = texts.most_common(1)
    # A location is the source, a comma and the line. One without a comma names no source.
    source = next(iter(examples.values()))[0].rpartition(", ")[0] or column
    yield f"{source}: {total} references: {shares}; {len(texts)} differ"
    if kinds["sentences"]:
        location, text = examples["sentences"]
        yield (
            f"warning: {kinds['sentences']} of {total} references are whole sentences, which no"
            f" short answer equals, such as {location}: {format_value(text)}; set {column} to a"
            " column of final answers, or mark these in the text by #### or \\boxed{}"
        )
    if kinds["words"]:
        words = [
            f"{format_value(text)} ({count} times)"
            for text, count in texts.most_common()
            if classify_reference(text) == "words"
        ]
        yield (
            f"warning: {kinds['words']} of {total} references are words: {join_names(words[:3])}"
            f"{' and others' * (len(words) > 3)}. A response that states the word is right; remove"
            " rows whose word says that there is no answer"
        )
    # A policy that learns to guess this reference looks as if it had learned the task.
    if repeats > 1 and total >= _MIN_REFERENCES and repeats >= COMMON_SHARE * total:
        yield (
            f"warning: {repeats} of {total} references are {format_value(common_reference)}:"
            f" whoever always answers that is right {_format_percent(repeats, total)} of the time"
        )


def classify_reference(reference: str) -> str:
    """Classifies a reference as one of `KINDS`."""
    if is_number(reference):
        return "numbers"
    if len(reference) > MAX_REFERENCE_LENGTH:
        return "sentences"
    text = normalize_spelling(reference)
    if is_number(text):
        return "numbers"
    # Names of LaTeX commands would count as words.
    plain = _COMMANDS.sub(" ", text).replace("{", " ").replace("}", " ").replace("$", " ").strip()
    if len(_WORD.findall(plain)) >= SENTENCE_WORDS:
        return "sentences"
    # A set in braces is a list too.
    if len(split_list(text.removeprefix("\\{").removesuffix("\\}"))) > 1:
        return "lists"
    return "words" if _WORDS_ALONE.fullmatch(plain) else "formulas"


def _format_percent(count: int, total: int) -> str:
    """Formats a share as a percentage."""
    # One significant digit keeps a small share from reading as 0 %.
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 1 else f"{share:.1g} %"
