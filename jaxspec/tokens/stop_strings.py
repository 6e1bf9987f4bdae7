"""Stop strings: texts that end a response.

They are found however the text is split into tokens. An automaton over bytes is compiled once into
a table over tokens.
"""

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
"""Maximum number of states.

An int8 holds each number and its complement.
"""
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTE_BY_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + offset): byte for offset, byte in enumerate(_UNPRINTABLE)
}
"""Byte that each character of a byte-level token stands for, as in GPT-2.

Bytes without a printable character are written as characters from 256 on.
"""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""Token that stands for one byte, in a vocabulary of characters."""


@dataclass(frozen=True)
class NoStopStrings:
    """In place of a `StopTable` if only end tokens end a response."""


@dataclass(frozen=True, eq=False)
class StopTable:
    """Transition table that finds stop strings in rows of tokens.

    It is a constant of the compiled generation programs. A state is the longest prefix of a stop
    string that the text ends with. State 0 is the empty prefix.
    """

    token_classes: Shaped[np.ndarray, " V"]
    """Row of `transitions` for each token."""
    transitions: Int[np.ndarray, "N S"]
    """Next state for each class of tokens and each state.

    If a string ends inside the token, the entry is the complement (`~`) of the state.
    """

    def __call__(
        self, states: Int[Array, " B"], tokens: Int[Array, "B T"]
    ) -> tuple[Bool[Array, "B T"], Int[Array, "B T1"]]:
        """Finds stop strings in rows of tokens.

        Args:
          states: state of each row before its tokens.
          tokens: token ids.

        Returns:
          Whether a string ends inside each token, and the states before the first and after each.
        """
        token_classes, transitions = jnp.asarray(self.token_classes), jnp.asarray(self.transitions)
        matches, history = [], [states]
        for token_class in jnp.moveaxis(token_classes[tokens], 1, 0):
            next_state = transitions[token_class, history[-1]].astype(jnp.int32)
            matches.append(next_state < 0)
            history.append(jnp.where(next_state < 0, ~next_state, next_state))
        return jnp.stack(matches, axis=1), jnp.stack(history, axis=1)


StopStrings = StopTable | NoStopStrings
NO_STOP_STRINGS = NoStopStrings()


def build_stop_table(strings: Sequence[str], pieces: Sequence[bytes], source: str) -> StopStrings:
    """Builds the table of stop strings.

    Args:
      strings: stop strings.
      pieces: bytes that each token adds to a text.
      source: tokenizer, named in error messages.

    Returns:
      The table, or `NoStopStrings` without strings.

    Raises:
      ConfigError: the strings need too many states, or one has a byte that no token has.
    """
    if not strings:
        return NO_STOP_STRINGS
    encoded_strings, known_bytes = [string.encode() for string in strings], {*b"".join(pieces)}
    for string, encoded in zip(strings, encoded_strings, strict=True):
        require(
            known_bytes.issuperset(encoded),
            f"rollout.stop has {format_value(string)}, which no tokens of the tokenizer {source}"
            " can write; leave it out",
        )
    # Each distinct prefix is a state, the empty one included.
    state_count = len(
        {encoded[:length] for encoded in encoded_strings for length in range(len(encoded) + 1)}
    )
    require(
        state_count <= MAX_STATES,
        f"rollout.stop has {len(strings)} strings with {state_count - 1} distinct prefixes in"
        f" bytes, and at most {MAX_STATES - 1} are possible; give fewer strings, or only the first"
        " characters of each",
    )
    next_states, is_final = _build_automaton(encoded_strings)
    sizes = np.array([len(piece) for piece in pieces])
    joined_bytes, offsets = np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(sizes) - sizes
    # Tokens that still have a byte at a position then form a prefix of this order.
    longest_first = np.argsort(-sizes, kind="stable")
    states = np.tile(np.arange(state_count, dtype=np.int8), (len(pieces), 1))
    has_match = np.zeros(states.shape, bool)
    # All tokens from all states at once, byte by byte: vocabularies have over 100,000 tokens.
    for position in range(sizes.max()):
        longer_pieces = longest_first[: np.count_nonzero(sizes > position)]
        current_bytes = joined_bytes[offsets[longer_pieces] + position]
        states[longer_pieces] = next_states[states[longer_pieces], current_bytes[:, None]]
        has_match[longer_pieces] |= is_final[states[longer_pieces]]
    # Tokens that act alike on every state share a row, so that a token costs a byte or two.
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
    """Builds the automaton of Aho and Corasick (1975).

    A state is the longest prefix of one of the texts that the bytes read so far end with.

    Returns:
      The next state for each state and byte, and whether one of the texts ends in each state.
    """
    prefix_set = {text[:length] for text in texts for length in range(len(text) + 1)}
    # Sorted by length, so that the empty prefix is state 0.
    prefixes = sorted(prefix_set, key=lambda prefix: (len(prefix), prefix))
    state_ids = {prefix: state for state, prefix in enumerate(prefixes)}
    next_states = np.zeros((len(prefixes), 256), np.int8)
    # Any other byte leads to state 0, with which the table is filled.
    for prefix, byte in product(prefixes, {*b"".join(texts)}):
        extended = prefix + bytes([byte])
        # From the longest on, so that the first match is the longest one.
        suffixes = (extended[offset:] for offset in range(len(extended) + 1))
        next_states[state_ids[prefix], byte] = next(
            state_ids[suffix] for suffix in suffixes if suffix in state_ids
        )
    return next_states, np.array([prefix.endswith(tuple(texts)) for prefix in prefixes])


def decode_pieces(
    backend: tokenizers.Tokenizer, vocab_size: int, excluded_ids: set[int]
) -> list[bytes]:
    """Returns the bytes that each id adds to a text.

    They may be part of a character in a byte-level vocabulary, or for a token that stands for a
    byte. Ids in `excluded_ids` and ids without a token add nothing.
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
        # A decoder may treat the first token of a text differently, for example drop its space. So
        # the token is decoded once and twice, and the second occurrence counts.
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
    """Returns the bytes of a byte-level token."""
    # A token with other characters was added to the vocabulary, and stands for its own text.
    if all(character in _BYTE_BY_CHARACTER for character in token):
        return bytes(_BYTE_BY_CHARACTER[character] for character in token)
    return token.encode()
