"""Texts that end a response, found whatever the tokens that they are made of: an automaton over
bytes, turned once into a table over tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Bool, Int, Shaped

from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import shown

MOST_STATES = 128
"""States whose numbers, or the complements of these, are in an int8."""
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {
    chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)
}
"""What byte-level tokens write their bytes as, since GPT-2: those that show nothing, from 256
on."""
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte, in a vocabulary of characters."""


@dataclass(frozen=True, eq=False)
class StopTable:
    """Where rows of tokens contain one of some strings: a part of the programs that generate, of a
    byte or two for each token, because tokens that do the same to every state share a line.

    A state says how much of which string a text ends with; 0 is that of an empty one.
    """

    kinds: Shaped[np.ndarray, " V"]
    """The line of each token."""
    after: Int[np.ndarray, "N S"]
    """The state after such a token, from each state; its complement (`~`) where a string ends
    inside the token."""

    def __call__(
        self, states: Int[Array, " B"], tokens: Int[Array, "B T"]
    ) -> tuple[Bool[Array, "B T"], Int[Array, "B T1"]]:
        """Returns whether a string ends inside each of the tokens, and the states before them and
        after each."""
        kinds, after = jnp.asarray(self.kinds), jnp.asarray(self.after)
        ends, passed = [], [states]
        for kind in jnp.moveaxis(kinds[tokens], 1, 0):
            found = after[kind, passed[-1]].astype(jnp.int32)
            ends.append(found < 0)
            passed.append(jnp.where(found < 0, ~found, found))
        return jnp.stack(ends, axis=1), jnp.stack(passed, axis=1)


def stop_table(strings: Sequence[str], tokens: Sequence[bytes], source: str) -> StopTable | None:
    """Returns the table of some strings for tokens of which these are the bytes; None where there
    are no strings. `source` names the tokenizer in messages.

    Raises:
      ConfigError: the strings take too many states, or one has a byte that no token has.
    """
    if not strings:
        return None
    texts, there = [text.encode() for text in strings], {*b"".join(tokens)}
    for string, text in zip(strings, texts, strict=True):
        require(
            there.issuperset(text),
            f"rollout.stop has {shown(string)}, which no tokens of the tokenizer {source} can"
            " write; leave it out",
        )
    count = len({text[:end] for text in texts for end in range(len(text) + 1)})
    require(
        count <= MOST_STATES,
        f"rollout.stop has {len(strings)} strings with {count - 1} beginnings in bytes, and at most"
        f" {MOST_STATES - 1} are followed; give fewer, or only the first characters of each",
    )
    step, whole = _automaton(texts)
    sizes = np.array([len(token) for token in tokens])
    content, starts = np.frombuffer(b"".join(tokens), np.uint8), np.cumsum(sizes) - sizes
    longest_first = np.argsort(-sizes, kind="stable")
    states = np.tile(np.arange(count, dtype=np.int8), (len(tokens), 1))
    ended = np.zeros(states.shape, bool)
    for place in range(sizes.max()):
        longer = longest_first[: np.count_nonzero(sizes > place)]
        read = content[starts[longer] + place]
        states[longer] = step[states[longer], read[:, None]]
        ended[longer] |= whole[states[longer]]
    lines: dict[bytes, int] = {}
    kinds = [
        lines.setdefault(line.tobytes(), len(lines)) for line in np.where(ended, ~states, states)
    ]
    return StopTable(
        kinds=np.array(kinds, np.min_scalar_type(len(lines) - 1)),
        after=np.frombuffer(b"".join(lines), np.int8).reshape(-1, count),
    )


def _automaton(
    texts: Sequence[bytes],
) -> tuple[Int[np.ndarray, "S 256"], Bool[np.ndarray, " S"]]:
    """The state after each byte from each state, and whether a text has just ended in a state (Aho
    and Corasick, 1975): the longest beginning of one of the texts that what was read ends with."""
    found = {text[:end] for text in texts for end in range(len(text) + 1)}
    beginnings = sorted(found, key=lambda beginning: (len(beginning), beginning))
    number = {beginning: place for place, beginning in enumerate(beginnings)}
    step = np.zeros((len(beginnings), 256), np.int8)
    for beginning, byte in product(beginnings, {*b"".join(texts)}):
        read = beginning + bytes([byte])
        ends = (read[start:] for start in range(len(read) + 1))
        step[number[beginning], byte] = next(number[end] for end in ends if end in number)
    return step, np.array([beginning.endswith(tuple(texts)) for beginning in beginnings])


def token_bytes(backend: tokenizers.Tokenizer, size: int, left_out: set[int]) -> list[bytes]:
    """Returns what each id below `size` adds to a text that it continues; nothing for what is
    `left_out`, and for ids without a token.

    A token of a byte-level vocabulary, or one that stands for a byte, may be part of a character.
    """
    decoder: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = {each.get("type") for each in (decoder, *decoder.get("decoders", ()))}
    named = {place: backend.id_to_token(place) for place in range(size) if place not in left_out}
    texts = {place: token for place, token in named.items() if token is not None}
    if "ByteLevel" in steps:
        found = {place: _of_characters(token) for place, token in texts.items()}
    else:
        # a decoder may treat the first token of a text in a way of its own
        once, twice = (
            backend.decode_batch([[place] * times for place in texts], skip_special_tokens=False)
            for times in (1, 2)
        )
        found = {
            place: both[len(one) :].encode()
            for place, one, both in zip(texts, once, twice, strict=True)
        }
    if "ByteFallback" in steps:
        bare = {place: _FALLBACK.fullmatch(token) for place, token in texts.items()}
        found |= {place: bytes.fromhex(match[1]) for place, match in bare.items() if match}
    return [found.get(place, b"") for place in range(size)]


def _of_characters(token: str) -> bytes:
    """The bytes of a byte-level token; one with other characters, which was added to the
    vocabulary, stands for itself."""
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()
