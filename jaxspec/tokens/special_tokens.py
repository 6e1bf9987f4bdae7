"""Begin and end tokens of a tokenizer, from all places where published folders name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import Keys, is_whole, is_whole_text, shown

NAMES = ("pad_token", "eos_token", "bos_token", "unk_token")
BASE_END = "<|endoftext|>"
"""Base models of the Qwen family end with it, whatever the chat's own end token."""


class SpecialTokens(NamedTuple):
    """What a folder says of its tokens."""

    texts: dict[str, str]
    """The text of each of `NAMES`; empty where there is none."""
    begin: tuple[int, ...]
    """Ids before a text."""
    ends: tuple[int, ...]
    """Ids that end a response; the tokenizer's own first."""
    pad: int | None


def special_tokens(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    source: str,
    generation: Keys,
    model: Keys,
    closing: Callable[[dict[str, str]], str],
) -> SpecialTokens:
    """Returns the special tokens of the folder `source`.

    Args:
      backend: what tokenizer.json holds.
      settings: tokenizer_config.json, with what special_tokens_map.json has beside it.
      generation: generation_config.json; its ends are added to the tokenizer's.
      model: config.json; its ends count if no other file names any, else those among the added
        tokens do.
      closing: gives what the chat template writes after an answer, from the texts of the tokens;
        the first added token in it is an end.

    Raises:
      ConfigError: no end token is known, or one is not in the vocabulary.
    """
    texts = {name: _text(settings, name, source) for name in NAMES}
    ids = {name: _id(backend, texts[name], name, source) for name in NAMES}
    added = backend.get_added_tokens_decoder()
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    ends = [] if ids["eos_token"] is None else [ids["eos_token"]]
    ends += _end_ids(generation, size)
    # a stale one of another vocabulary would be an ordinary word of this one
    within = None if ends else size
    other = _end_ids(model, within) + _end_ids(model.part("text_config"), within)
    ends += [end for end in other if not ends or end in added]
    closed = backend.encode(closing(texts), add_special_tokens=False).ids
    ends += [token for token in closed if token in added and added[token].content.strip()][:1]
    require(
        bool(ends),
        f"{source}/tokenizer_config.json: no eos_token, so no response would ever end; add the key,"
        f" such as {BASE_END!r}",
    )
    base_end = backend.token_to_id(BASE_END)
    ends += [] if base_end is None else [base_end]
    begin = _begin(backend, settings, source, ids["bos_token"], ids["eos_token"])
    return SpecialTokens(texts, begin, tuple(dict.fromkeys(ends)), ids["pad_token"])


def ends_in_strings(strings: Sequence[str], tokens: Mapping[str, int]) -> list[int]:
    """Returns the ids of the special `tokens` that stop strings name.

    Raises:
      ConfigError: a string has a special token in it, and more.
    """
    for string in strings:
        inside = [token for token in tokens if token in string and string not in tokens]
        require(
            not inside,
            f"rollout.stop has {shown(string)}, which has the special token"
            f" {''.join(map(shown, inside[:1]))} in it, and the text of a response has none; give"
            " the token by itself, and a text without it",
        )
    return [tokens[string] for string in strings if string in tokens]


def _begin(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    source: str,
    bos: int | None,
    eos: int | None,
) -> tuple[int, ...]:
    """Ids before a text: by the key add_bos_token, else as tokenizer.json itself adds them."""
    keys = Keys(settings, f"{source}/tokenizer_config.json")
    if keys.has("add_bos_token"):
        return (bos,) if keys.flag("add_bos_token", True) and bos is not None else ()
    around = backend.encode("", add_special_tokens=True).ids
    # some are put behind a text: its end, and whatever comes after that
    count = around.index(eos) if eos in around and eos != bos else len(around)
    return tuple(around[:count])


def _end_ids(file: Keys, size: int | None) -> list[int]:
    """The end tokens of a file, which writes one as a number and several as a list.

    `size`: tokens of the tokenizer, which has to have them; None: it need not.
    """
    found = file.content.get("eos_token_id")
    ends = [] if found is None else found if isinstance(found, list) else [found]
    require(
        all(map(is_whole, ends)),
        f"{file.source}: eos_token_id is {shown(found)}; it must be a whole number or a list of"
        " whole numbers",
    )
    for end in ends:
        require(
            size is None or 0 <= end < size,
            f"{file.source}: eos_token_id {end} is beyond the tokenizer's {size} tokens; correct"
            " the key",
        )
    return ends


def _text(settings: Mapping[str, Any], name: str, source: str) -> str:
    """The text of a named token; published files write it as a string, or as an object with
    `content`."""
    token = settings.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    if (
        not isinstance(text, str | None)
        or (isinstance(token, Mapping) and not text)
        or not is_whole_text(text or "")
    ):
        wanted = "a string of whole characters, an object with such a 'content', or null"
        raise ConfigError(
            f"{source}/tokenizer_config.json: {name} is {shown(token)}; it must be {wanted}"
        )
    return text or ""


def _id(backend: tokenizers.Tokenizer, token: str, name: str, source: str) -> int | None:
    if not token:
        return None
    found = backend.token_to_id(token)
    require(
        found is not None,
        f"{source}/tokenizer_config.json: {name} {shown(token)} is not in tokenizer.json; correct"
        " the key or add the token",
    )
    return found
