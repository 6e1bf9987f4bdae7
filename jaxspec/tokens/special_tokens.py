"""Begin and end tokens of a tokenizer.

Published folders name them in several files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import JsonObject, format_value, is_integer, is_valid_utf8

TOKEN_NAMES = ("pad_token", "eos_token", "bos_token", "unk_token")
BASE_EOS = "<|endoftext|>"
"""End token of base models of the Qwen family, besides that of their chat template."""


class SpecialTokens(NamedTuple):
    """Special tokens of a tokenizer folder."""

    texts: dict[str, str]
    """Text of each of `TOKEN_NAMES`, empty for an absent token."""
    bos_ids: tuple[int, ...]
    """Ids to put before a text."""
    stop_ids: tuple[int, ...]
    """Ids that end a response, with the tokenizer's own first."""
    pad_id: int | None
    """Id of the padding token, None if there is none."""


def find_special_tokens(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    source: str,
    generation_config: JsonObject,
    model_config: JsonObject,
    render_closing: Callable[[dict[str, str]], str],
) -> SpecialTokens:
    """Returns the special tokens of the folder `source`.

    Args:
      backend: tokenizer of tokenizer.json.
      settings: keys of tokenizer_config.json and special_tokens_map.json.
      source: folder, named in error messages.
      generation_config: generation_config.json. Its end tokens are added to the tokenizer's.
      model_config: config.json. If no other file names an end token, all of its end tokens count.
        Otherwise only those count that are added tokens.
      render_closing: returns the text that the chat template writes after an answer. Its argument
        is `SpecialTokens.texts`. The first added token in that text is an end token.

    Raises:
      ConfigError: no end token is known, or a special token is invalid or not in the vocabulary.
    """
    texts = {name: _token_text(settings, name, source) for name in TOKEN_NAMES}
    ids = {name: _token_id(backend, texts[name], name, source) for name in TOKEN_NAMES}
    added_tokens = backend.get_added_tokens_decoder()
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    stop_ids = [] if ids["eos_token"] is None else [ids["eos_token"]]
    stop_ids += _read_stop_ids(generation_config, vocab_size)
    # A stale id in config.json, from another vocabulary, would be an ordinary word of this one. So
    # the file is trusted and checked only if no other names an end token.
    id_limit = None if stop_ids else vocab_size
    model_stop_ids = _read_stop_ids(model_config, id_limit) + _read_stop_ids(
        model_config.get_object("text_config"), id_limit
    )
    stop_ids += [stop_id for stop_id in model_stop_ids if not stop_ids or stop_id in added_tokens]
    # Some chat templates end a turn with a token that no file names.
    closing_ids = backend.encode(render_closing(texts), add_special_tokens=False).ids
    stop_ids += [
        token_id
        for token_id in closing_ids
        # An added token of white space is ordinary text.
        if token_id in added_tokens and added_tokens[token_id].content.strip()
    ][:1]
    require(
        bool(stop_ids),
        f"{source}/tokenizer_config.json: no eos_token, so no response would ever end; add the key,"
        f" such as {BASE_EOS!r}",
    )
    # A base model ends a text with this token, even if its files name only that of the chat.
    base_eos_id = backend.token_to_id(BASE_EOS)
    stop_ids += [] if base_eos_id is None else [base_eos_id]
    bos_ids = _find_bos_ids(backend, settings, source, ids["bos_token"], ids["eos_token"])
    # `dict.fromkeys` removes duplicates and keeps the order. The first id is the tokenizer's own.
    return SpecialTokens(texts, bos_ids, tuple(dict.fromkeys(stop_ids)), ids["pad_token"])


def stop_ids_in_strings(strings: Sequence[str], special_ids: Mapping[str, int]) -> list[int]:
    """Returns the ids of the special tokens among stop strings.

    `special_ids` maps the text of each special token to its id.

    Raises:
      ConfigError: a string contains a special token and other text.
    """
    for string in strings:
        # Special tokens are dropped from a response's text, so such a string would never match.
        contained = [
            token for token in special_ids if token in string and string not in special_ids
        ]
        require(
            not contained,
            f"rollout.stop has {format_value(string)}, which has the special token"
            f" {''.join(map(format_value, contained[:1]))} in it; the text of a response never has"
            " one, so give the token as a stop string by itself, and the other text without it",
        )
    return [special_ids[string] for string in strings if string in special_ids]


def _find_bos_ids(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    source: str,
    bos_id: int | None,
    eos_id: int | None,
) -> tuple[int, ...]:
    """Returns the ids to put before a text.

    The key add_bos_token decides. If it is absent, these are the ids that tokenizer.json adds.
    """
    config = JsonObject(settings, f"{source}/tokenizer_config.json")
    if config.has_key("add_bos_token"):
        return (bos_id,) if config.get_bool("add_bos_token", True) and bos_id is not None else ()
    # The ids around an empty text. Those from the end token on belong after a text.
    added_ids = backend.encode("", add_special_tokens=True).ids
    prefix_length = (
        added_ids.index(eos_id) if eos_id in added_ids and eos_id != bos_id else len(added_ids)
    )
    return tuple(added_ids[:prefix_length])


def _read_stop_ids(config: JsonObject, vocab_size: int | None) -> list[int]:
    """Reads the end tokens of a config file.

    If `vocab_size` is not None, every id must be below it.

    Raises:
      ConfigError: the key holds something else, or an id is out of range.
    """
    value = config.content.get("eos_token_id")
    # Files write one token as a number, and several as a list.
    stop_ids = [] if value is None else value if isinstance(value, list) else [value]
    require(
        all(map(is_integer, stop_ids)),
        f"{config.source}: eos_token_id is {format_value(value)}; it must be a whole number or a"
        " list of whole numbers",
    )
    for stop_id in stop_ids:
        require(
            vocab_size is None or 0 <= stop_id < vocab_size,
            f"{config.source}: eos_token_id {stop_id} is beyond the tokenizer's {vocab_size}"
            " tokens; correct the key",
        )
    return stop_ids


def _token_text(settings: Mapping[str, Any], name: str, source: str) -> str:
    """Returns the text of a named token, empty if absent.

    Raises:
      ConfigError: the key holds something else.
    """
    # Published files write a token as a string, or as an object with `content`.
    token = settings.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    if (
        not isinstance(text, str | None)
        or (isinstance(token, Mapping) and not text)
        or not is_valid_utf8(text or "")
    ):
        expected = "a string of whole characters, an object with such a 'content', or null"
        raise ConfigError(
            f"{source}/tokenizer_config.json: {name} is {format_value(token)}; it must be"
            f" {expected}"
        )
    return text or ""


def _token_id(backend: tokenizers.Tokenizer, token: str, name: str, source: str) -> int | None:
    if not token:
        return None
    token_id = backend.token_to_id(token)
    require(
        token_id is not None,
        f"{source}/tokenizer_config.json: {name} {format_value(token)} is not in tokenizer.json;"
        " correct the key or add the token",
    )
    return token_id
