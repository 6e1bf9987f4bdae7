"""Begin and end tokens of a tokenizer, from all places where published folders name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import JsonObject, format_value, is_integer, is_valid_utf8

TOKEN_NAMES = ("pad_token", "eos_token", "bos_token", "unk_token")
BASE_EOS = "<|endoftext|>"
"""Base models of the Qwen family end with it, whatever the chat's own end token."""


class SpecialTokens(NamedTuple):
    """What a folder says of its tokens."""

    texts: dict[str, str]
    """The text of each of `TOKEN_NAMES`; empty where there is none."""
    bos_ids: tuple[int, ...]
    """Ids before a text."""
    stop_ids: tuple[int, ...]
    """Ids that end a response; the tokenizer's own first."""
    pad_id: int | None


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
      backend: what tokenizer.json holds.
      settings: tokenizer_config.json, with what special_tokens_map.json has beside it.
      generation_config: generation_config.json; its ends are added to the tokenizer's.
      model_config: config.json; its ends count if no other file names any, else those among the
        added tokens do.
      render_closing: gives what the chat template writes after an answer, from the texts of the
        tokens; the first added token in it is an end.

    Raises:
      ConfigError: no end token is known, or one is not in the vocabulary.
    """
    texts = {name: _token_text(settings, name, source) for name in TOKEN_NAMES}
    ids = {name: _token_id(backend, texts[name], name, source) for name in TOKEN_NAMES}
    added_tokens = backend.get_added_tokens_decoder()
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    stop_ids = [] if ids["eos_token"] is None else [ids["eos_token"]]
    stop_ids += _read_stop_ids(generation_config, vocab_size)
    # a stale one of another vocabulary would be an ordinary word of this one
    id_limit = None if stop_ids else vocab_size
    model_stop_ids = _read_stop_ids(model_config, id_limit) + _read_stop_ids(
        model_config.get_object("text_config"), id_limit
    )
    stop_ids += [stop_id for stop_id in model_stop_ids if not stop_ids or stop_id in added_tokens]
    closing_ids = backend.encode(render_closing(texts), add_special_tokens=False).ids
    stop_ids += [
        token_id
        for token_id in closing_ids
        if token_id in added_tokens and added_tokens[token_id].content.strip()
    ][:1]
    require(
        bool(stop_ids),
        f"{source}/tokenizer_config.json: no eos_token, so no response would ever end; add the key,"
        f" such as {BASE_EOS!r}",
    )
    base_eos_id = backend.token_to_id(BASE_EOS)
    stop_ids += [] if base_eos_id is None else [base_eos_id]
    bos_ids = _find_bos_ids(backend, settings, source, ids["bos_token"], ids["eos_token"])
    return SpecialTokens(texts, bos_ids, tuple(dict.fromkeys(stop_ids)), ids["pad_token"])


def stop_ids_in_strings(strings: Sequence[str], special_ids: Mapping[str, int]) -> list[int]:
    """Returns the ids of the special tokens (`special_ids`) that stop strings name.

    Raises:
      ConfigError: a string has a special token in it, and more.
    """
    for string in strings:
        contained = [
            token for token in special_ids if token in string and string not in special_ids
        ]
        require(
            not contained,
            f"rollout.stop has {format_value(string)}, which has the special token"
            f" {''.join(map(format_value, contained[:1]))} in it, and the text of a response has"
            " none; give the token by itself, and a text without it",
        )
    return [special_ids[string] for string in strings if string in special_ids]


def _find_bos_ids(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    source: str,
    bos_id: int | None,
    eos_id: int | None,
) -> tuple[int, ...]:
    """Ids before a text: by the key add_bos_token, else as tokenizer.json itself adds them."""
    config = JsonObject(settings, f"{source}/tokenizer_config.json")
    if config.has_key("add_bos_token"):
        return (bos_id,) if config.get_bool("add_bos_token", True) and bos_id is not None else ()
    added_ids = backend.encode("", add_special_tokens=True).ids
    # some are put behind a text: its end, and whatever comes after that
    prefix_length = (
        added_ids.index(eos_id) if eos_id in added_ids and eos_id != bos_id else len(added_ids)
    )
    return tuple(added_ids[:prefix_length])


def _read_stop_ids(config: JsonObject, vocab_size: int | None) -> list[int]:
    """The end tokens of a file, which writes one as a number and several as a list.

    `vocab_size`: tokens of the tokenizer, which has to have them; None: it need not.
    """
    value = config.content.get("eos_token_id")
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
    """The text of a named token; published files write it as a string, or as an object with
    `content`."""
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
