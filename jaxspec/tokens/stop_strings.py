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
from jaxspec.inputs.json_keys import format_value

MAX_STATES = 128
"""States whose numbers, or the complements of these, are in an int8."""
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTE_BY_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + offset): byte for offset, byte in enumerate(_UNPRINTABLE)
}
"""What byte-level tokens write their bytes as, since GPT-2: those that show nothing, from 256
on."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte, in a vocabulary of characters."""


@dataclass(frozen=True, eq=False)
class StopTable:
    """Where rows of tokens contain one of some strings: a part of the programs that generate, of a
    byte or two for each token, because tokens that do the same to every state share a line.

    A state says how much of which string a text ends with; 0 is that of an empty one.
    """

    token_classes: Shaped[np.ndarray, " V"]
    """The line of each token."""
    transitions: Int[np.ndarray, "N S"]
    """The state after such a token, from each state; its complement (`~`) where a string ends
    inside the token."""

    def __call__(
        self, states: Int[Array, " B"], tokens: Int[Array, "B T"]
    ) -> tuple[Bool[Array, "B T"], Int[Array, "B T1"]]:
        """Returns whether a string ends inside each of the tokens, and the states before them and
        after each."""
        token_classes, transitions = jnp.asarray(self.token_classes), jnp.asarray(self.transitions)
        matches, history = [], [states]
        for token_class in jnp.moveaxis(token_classes[tokens], 1, 0):
            next_state = transitions[token_class, history[-1]].astype(jnp.int32)
            matches.append(next_state < 0)
            history.append(jnp.where(next_state < 0, ~next_state, next_state))
        return jnp.stack(matches, axis=1), jnp.stack(history, axis=1)


def build_stop_table(
    strings: Sequence[str], pieces: Sequence[bytes], source: str
) -> StopTable | None:
    """Returns the table of some strings for tokens of which these are the bytes; None where there
    are no strings. `source` names the tokenizer in messages.

    Raises:
      ConfigError: the strings take too many states, or one has a byte that no token has.
    """
    if not strings:
        return None
    encoded_strings, known_bytes = [string.encode() for string in strings], {*b"".join(pieces)}
    for string, encoded in zip(strings, encoded_strings, strict=True):
        require(
            known_bytes.issuperset(encoded),
            f"rollout.stop has {format_value(string)}, which no tokens of the tokenizer {source}"
            " can write; leave it out",
        )
    state_count = len(
        {encoded[:length] for encoded in encoded_strings for length in range(len(encoded) + 1)}
    )
    require(
        state_count <= MAX_STATES,
        f"rollout.stop has {len(strings)} strings with {state_count - 1} beginnings in bytes, and"
        f" at most {MAX_STATES - 1} are followed; give fewer, or only the first characters of each",
    )
    next_states, is_final = _build_automaton(encoded_strings)
    sizes = np.array([len(piece) for piece in pieces])
    joined_bytes, offsets = np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(sizes) - sizes
    longest_first = np.argsort(-sizes, kind="stable")
    states = np.tile(np.arange(state_count, dtype=np.int8), (len(pieces), 1))
    has_match = np.zeros(states.shape, bool)
    for position in range(sizes.max()):
        longer_pieces = longest_first[: np.count_nonzero(sizes > position)]
        current_bytes = joined_bytes[offsets[longer_pieces] + position]
        states[longer_pieces] = next_states[states[longer_pieces], current_bytes[:, None]]
        has_match[longer_pieces] |= is_final[states[longer_pieces]]
    class_by_row: dict[bytes, int] = {}
    token_classes = [
        class_by_row.setdefault(row.tobytes(), len(class_by_row))
        for row in np.where(has_match, ~states, states)
    ]
    return StopTable(
        token_classes=np.array(token_classes, np.min_scalar_type(len(class_by_row) - 1)),
        transitions=np.frombuffer(b"".join(class_by_row), np.int8).reshape(-1, state_count),
    )


def _build_automaton(
    texts: Sequence[bytes],
) -> tuple[Int[np.ndarray, "S 256"], Bool[np.ndarray, " S"]]:
    """The state after each byte from each state, and whether a text has just ended in a state (Aho
    and Corasick, 1975): the longest beginning of one of the texts that what was read ends with."""
    prefix_set = {text[:length] for text in texts for length in range(len(text) + 1)}
    prefixes = sorted(prefix_set, key=lambda prefix: (len(prefix), prefix))
    state_ids = {prefix: state for state, prefix in enumerate(prefixes)}
    next_states = np.zeros((len(prefixes), 256), np.int8)
    for prefix, byte in product(prefixes, {*b"".join(texts)}):
        extended = prefix + bytes([byte])
        suffixes = (extended[offset:] for offset in range(len(extended) + 1))
        next_states[state_ids[prefix], byte] = next(
            state_ids[suffix] for suffix in suffixes if suffix in state_ids
        )
    return next_states, np.array([prefix.endswith(tuple(texts)) for prefix in prefixes])


def decode_pieces(
    backend: tokenizers.Tokenizer, vocab_size: int, excluded_ids: set[int]
) -> list[bytes]:
    """Returns what each id below `vocab_size` adds to a text that it continues; nothing for
    `excluded_ids`, and for ids without a token.

    A token of a byte-level vocabulary, or one that stands for a byte, may be part of a character.
    """
    decoder: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    step_types = {step.get("type") for step in (decoder, *decoder.get("decoders", ()))}
    tokens_by_id = {
        token_id: backend.id_to_token(token_id)
        for token_id in range(vocab_size)
        if token_id not in excluded_ids
    }
    known_tokens = {
        token_id: token for token_id, token in tokens_by_id.items() if token is not None
    }
    if "ByteLevel" in step_types:
        pieces = {token_id: _characters_to_bytes(token) for token_id, token in known_tokens.items()}
    else:
        # a decoder may treat the first token of a text in a way of its own
        single_texts, double_texts = (
            backend.decode_batch(
                [[token_id] * repeats for token_id in known_tokens], skip_special_tokens=False
            )
            for repeats in (1, 2)
        )
        pieces = {
            token_id: double[len(single) :].encode()
            for token_id, single, double in zip(
                known_tokens, single_texts, double_texts, strict=True
            )
        }
    if "ByteFallback" in step_types:
        byte_matches = {
            token_id: _BYTE_TOKEN.fullmatch(token) for token_id, token in known_tokens.items()
        }
        pieces |= {
            token_id: bytes.fromhex(match[1]) for token_id, match in byte_matches.items() if match
        }
    return [pieces.get(token_id, b"") for token_id in range(vocab_size)]


def _characters_to_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with other characters, which was added to the
    vocabulary, stands for itself."""
    if all(character in _BYTE_BY_CHARACTER for character in token):
        return bytes(_BYTE_BY_CHARACTER[character] for character in token)
    return token.encode()
