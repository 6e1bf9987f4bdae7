"""Stop strings against plain Python, which looks for them in the text after every token."""

from collections.abc import Sequence
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.stop_strings import (
    NO_STOP_STRINGS,
    StopStrings,
    StopTable,
    build_stop_table,
    decode_pieces,
)
from jaxspec.tokens.tokenizer import Tokenizer, character_tokenizer
from tests.tokens.folders import needs_qwen


def closed(strings: Sequence[str], tokens: Sequence[bytes]) -> list[bool]:
    """Whether one of the strings ends inside each token."""
    text, found = b"", []
    for token in tokens:
        ends = range(len(text) + 1, len(text) + len(token) + 1)
        text += token
        found.append(any(text[:end].endswith(s.encode()) for s in strings for end in ends))
    return found


def of_rows(table: StopStrings, rows: Sequence[Sequence[int]]) -> np.ndarray:
    assert isinstance(table, StopTable)
    tokens = jnp.asarray(np.array(rows), jnp.int32)
    return np.asarray(table(jnp.zeros(len(tokens), jnp.int32), tokens)[0])


CASES = {
    "straddling and overlapping": (
        ("ab", "ba", "abab"),
        [b"", b"a", b"b", b"ab", b"ba", b"aab", b"c"],
    ),
    "one inside another": (("abcab", "bc"), [b"a", b"b", b"c", b"ab", b"bcab", b"cabab"]),
    "falling back": (("aabaaab", "aaaa"), [b"", b"a", b"aa", b"b", b"ba", b"aab"]),
    "characters in pieces": (
        ("é!", "\n\n", "é!"),
        [b"\xc3", b"\xa9", b"\xa9!", b"!", b"\n", b"a\n\xc3", b"\xc3\xa9"],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_row_of_six_tokens_ends_where_its_text_says(
    case: tuple[tuple[str, ...], list[bytes]],
) -> None:
    """Also beyond the first string: what ends before the shortest response is passed over."""
    strings, tokens = case
    rows = list(product(range(len(tokens)), repeat=6))[:: 1 if len(tokens) < 7 else 5]
    wanted = [closed(strings, [tokens[place] for place in row]) for row in rows]
    np.testing.assert_array_equal(of_rows(build_stop_table(strings, tokens, "its"), rows), wanted)


def test_a_row_goes_on_in_the_state_that_it_had() -> None:
    """The states after each token are those from which the rest of the row is found alike."""
    strings, tokens = CASES["straddling and overlapping"]
    table = build_stop_table(strings, tokens, "its")
    assert isinstance(table, StopTable)
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 7, (500, 8)), jnp.int32)
    ends, states = table(jnp.zeros(500, jnp.int32), rows)
    assert states.shape == (500, 9)
    for cut in (1, 4):
        more, last = table(states[:, cut], rows[:, cut:])
        np.testing.assert_array_equal(more, ends[:, cut:])
        np.testing.assert_array_equal(last, states[:, cut:])


def test_without_strings_there_is_no_table() -> None:
    assert build_stop_table((), [b"a"], "its") == NO_STOP_STRINGS
    assert character_tokenizer().build_stop_table(()) == NO_STOP_STRINGS


def test_built_in_characters() -> None:
    tokenizer = character_tokenizer()
    table = tokenizer.build_stop_table(("#4", "12"))
    ids = [*tokenizer.encode("1#"), *tokenizer.bos_ids, *tokenizer.encode("412")]
    assert tokenizer.decode(ids) == "1#412"
    assert of_rows(table, [ids]).tolist() == [[False, False, False, True, False, True]]


def test_what_no_token_can_write_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.stop has 'A:', which no tokens of the .*built-in"
    ):
        character_tokenizer().build_stop_table(("12", "A:"))


def test_too_many_are_refused_with_their_number() -> None:
    tokens, most = [bytes([byte]) for byte in range(128)], "".join(map(chr, range(127)))
    found = of_rows(build_stop_table((most, most[:50]), tokens, "its"), [range(127)])
    assert found[0].nonzero()[0].tolist() == [49, 126]
    with pytest.raises(ConfigError, match=r"rollout\.stop has 2 strings with 128 .* at most 127 "):
        build_stop_table((most, most[:50] + "\0"), tokens, "its")


def llama_like() -> Tokenizer:
    """Words with a mark for the space before them, bytes for characters that are missing, and a
    decoder that drops the first space of a text."""
    words = ["<unk>", "</s>", "▁", "▁a", "b", "▁▁", "a▁b", *(f"<0x{n:02X}>" for n in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(backend, {"eos_token": "</s>"}, "llama-like")


def test_tokens_of_words_and_bytes_add_what_they_add_behind_another() -> None:
    tokenizer = llama_like()
    backend = tokenizer._backend
    pieces = decode_pieces(backend, tokenizer.size, {1})
    assert pieces[:7] == [b"<unk>", b"", b" ", b" a", b"b", b"  ", b"a b"]
    assert pieces[7:-1] == [bytes([byte]) for byte in range(256)]
    assert pieces[-1] == b"<think>"
    first, random = backend.token_to_id("b"), np.random.default_rng(0)
    for _ in range(200):
        ids = [first, *random.integers(2, 7, 6).tolist()]
        assert tokenizer.decode(ids).encode() == b"".join(pieces[i] for i in ids)
    accent = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    table = tokenizer.build_stop_table(("é b",))
    row = [first, *accent, 2, first, 1]
    assert of_rows(table, [row]).tolist() == [[False] * 4 + [True, False]]


@needs_qwen
def test_bytes_of_every_token_of_qwen(qwen: Tokenizer) -> None:
    pieces = decode_pieces(qwen._backend, qwen.size, set(qwen.stop_ids))
    texts = qwen._backend.decode_batch([[i] for i in range(qwen.size)], skip_special_tokens=False)
    assert pieces[151_644] == b"<|im_start|>"
    differ = [i for i, piece in enumerate(pieces) if piece.decode(errors="replace") != texts[i]]
    assert differ == sorted(qwen.stop_ids)
    assert qwen.build_stop_table((" the",)) != NO_STOP_STRINGS


PAGES = (
    "So x = 4.\n\nProblem: what is 3\N{MULTIPLICATION SIGN}4?\n\n\nProblem:\n\nAnswer",
    "\N{CJK UNIFIED IDEOGRAPH-56E0}\N{CJK UNIFIED IDEOGRAPH-6B64}\N{IDEOGRAPHIC FULL STOP}\n"
    "\N{GRINNING FACE}\N{FAMILY}</think>\n\nProblem:",
    "Pro\n\nProblem\n\nProblem :\n\n\n\nProblem:1",
)
STRINGS = ("\n\nProblem:", "\N{IDEOGRAPHIC FULL STOP}\n\N{GRINNING FACE}", "k>\n")


@needs_qwen
def test_qwen_stops_where_the_text_says_however_it_is_cut_into_tokens(qwen: Tokenizer) -> None:
    """Texts in their own tokens, and in tokens that are drawn at random among all that fit, so that
    strings, and characters, lie across their bounds; special tokens between them add nothing."""
    pieces = decode_pieces(qwen._backend, qwen.size, {*range(151_643, 151_657)})
    by_bytes = {piece: i for i, piece in enumerate(pieces) if piece}
    table, random, across = qwen.build_stop_table(STRINGS), np.random.default_rng(0), 0
    for page in PAGES:
        own = qwen.encode(page)
        ends = [any(s in qwen.decode(own[: n + 1]) for s in STRINGS) for n in range(len(own))]
        assert of_rows(table, [own])[0].argmax() == ends.index(True)
    rows, wanted = [], []
    for page in PAGES * 40:
        left, ids = page.encode(), []
        while left:
            sizes = [size for size in range(1, 13) if left[:size] in by_bytes]
            size = min(random.choice(sizes), len(left))
            ids.append(by_bytes[left[:size]])
            if random.random() < 0.1:
                ids.append(int(random.choice([151_644, 151_646])))
            left = left[size:]
        assert qwen.decode(ids) == page
        ends = [any(s in qwen.decode(ids[: n + 1]) for s in STRINGS) for n in range(len(ids))]
        first = ends.index(True)
        across += b"\n\nProblem:" not in pieces[ids[first]]
        rows.append(ids + [151_644] * (100 - len(ids)))
        wanted.append(first)
    found = of_rows(table, rows)
    assert found.argmax(axis=1).tolist() == wanted
    assert found.any(axis=1).all()
    assert across > 100
    assert len({tuple(row) for row in rows}) > 100
