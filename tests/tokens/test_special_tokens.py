"""Begin and end tokens are those that published folders mean, wherever they name them."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.stop_strings import NO_STOP_STRINGS, StopTable
from jaxspec.tokens.tokenizer import load_tokenizer

TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<eot>", "<turn>")
"""Ids 3 to 8, behind the words 0 to 2; `<turn>` is no special token, though it was added."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = {"bos_token": "<s>", "eos_token": "</s>"}


class Form(NamedTuple):
    """A form of published folders, and what it means."""

    begin: list[int]
    ends: set[int]
    settings: dict[str, Any]
    """tokenizer_config.json."""
    files: Mapping[str, Any] = MappingProxyType({})
    """Other files by name."""
    around: str = "$A"
    """Tokens that tokenizer.json puts around a text."""


def named(**files: Any) -> dict[str, Any]:
    return {f"{name}.json": content for name, content in files.items()}


FORMS = {
    "Llama 2: one end, and a begin token that tokenizer.json adds": Form(
        [3], {4}, LLAMA | {"add_bos_token": True}, around="<s> $A"
    ),
    "Llama 3: another end of a turn in generation_config.json": Form(
        [3],
        {4, 7},
        LLAMA,
        named(generation_config={"eos_token_id": [4, 7]}, config={"eos_token_id": 4}),
        around="<s> $A",
    ),
    "saved without generation_config.json": Form(
        [], {4, 6}, {"eos_token": "</s>"}, named(config={"eos_token_id": [4, 6]})
    ),
    "generation_config.json without ends": Form(
        [],
        {4, 6},
        {"eos_token": "</s>"},
        named(generation_config={"temperature": 0.6}, config={"eos_token_id": [4, 6]}),
    ),
    "ends of a model that sees, in text_config": Form(
        [], {4, 6}, {"eos_token": "</s>"}, named(config={"text_config": {"eos_token_id": [4, 6]}})
    ),
    "a stale end of another vocabulary, which is a word here": Form(
        [],
        {4},
        {"eos_token": "</s>"},
        named(generation_config={"eos_token_id": 4}, config={"eos_token_id": 1}),
    ),
    "a stale end beyond the vocabulary": Form(
        [], {4}, {"eos_token": "</s>"}, named(config={"eos_token_id": [4, 99]})
    ),
    "white space that was added, after an answer": Form(
        [],
        {4},
        {"eos_token": "</s>", "chat_template": CHATML.replace("<|im_end|>", "\t")},
    ),
    "an end in config.json that was added, though not as a special token": Form(
        [], {4, 8}, {"eos_token": "</s>"}, named(config={"eos_token_id": [4, 8]})
    ),
    "a base model whose chat template ends turns with another token": Form(
        [],
        {4, 6},
        {"eos_token": "</s>", "chat_template": CHATML},
        named(generation_config={"eos_token_id": 4}, config={"eos_token_id": 6}),
    ),
    "a template that alone knows the end of a turn": Form(
        [], {4, 6}, {"eos_token": "</s>", "chat_template": CHATML}
    ),
    "turns that end with an added token that is not special": Form(
        [],
        {4, 8},
        {"eos_token": "</s>", "chat_template": CHATML.replace("<|im_end|>", "<turn>")},
    ),
    "a template that refuses whole chats": Form(
        [], {4}, {"eos_token": "</s>", "chat_template": "{{ raise_exception('no') }}"}
    ),
    "GPT-2: a begin token that nothing adds": Form([], {4}, {"bos_token": "</s>", **LLAMA}),
    "GLM: two begin tokens": Form([5, 3], {4}, {"eos_token": "</s>"}, around="<|im_start|> <s> $A"),
    "T5: an end behind each text": Form([], {4}, {"eos_token": "</s>"}, around="$A </s>"),
    "begin and end around each text": Form([3], {4}, LLAMA, around="<s> $A </s>"),
    "Qwen: no begin token": Form(
        [], {4}, {"bos_token": None, "eos_token": "</s>", "add_bos_token": False}
    ),
    "names in special_tokens_map.json alone": Form(
        [3], {4}, {}, named(special_tokens_map={"eos_token": {"content": "</s>"}}), around="<s> $A"
    ),
    "both files, of which the map is read": Form(
        [], {4}, {"eos_token": "<eot>"}, named(special_tokens_map={"eos_token": "</s>"})
    ),
    "both files, of which the map is older": Form(
        [],
        {7},
        {"eos_token": "<eot>", "added_tokens_decoder": {"4": {"content": "</s>", "special": True}}},
        named(special_tokens_map={"eos_token": "</s>"}),
    ),
    "tokenizer.json and config.json alone": Form(
        [3], {4}, {}, named(config={"eos_token_id": 4}), "<s> $A"
    ),
}


def backend(around: str) -> tokenizers.Tokenizer:
    words = models.WordLevel({"a": 0, "assistant": 1, "<unk>": 2}, unk_token="<unk>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in TOKENS[:-1]])
    made.add_tokens([AddedToken(TOKENS[-1], normalized=False)])
    if around != "$A":
        ids = [(token, 3 + place) for place, token in enumerate(TOKENS) if token in around]
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    return made


def write(folder: Path, form: Form) -> str:
    backend(form.around).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **form.settings}
    for name, content in {"tokenizer_config.json": settings, **form.files}.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_published_forms(tmp_path: Path, form: Form) -> None:
    tokenizer = load_tokenizer(write(tmp_path, form))
    assert list(tokenizer.bos_ids) == form.begin
    assert set(tokenizer.stop_ids) == form.ends
    if "chat_template" not in form.settings:
        assert tokenizer.encode_prompt("a") == [*form.begin, 0]


@pytest.mark.hf
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_published_forms_are_read_as_transformers_reads_them(tmp_path: Path, form: Form) -> None:
    """The tokenizer's end and those of the generation config are ends, but for tokens that it does
    not have; a text begins alike."""
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, form)
    tokenizer, ends = transformers.AutoTokenizer.from_pretrained(folder), set[int]()
    assert tokenizer("a").input_ids[: len(form.begin) + 1] == [*form.begin, 0]
    if "generation_config.json" in form.files:
        found = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        found = form.files.get("config.json", {}).get("eos_token_id")
    ends |= set(found if isinstance(found, list) else [] if found is None else [found])
    ends |= set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    ends &= set(range(len(tokenizer)))
    assert ends <= form.ends
    assert form.ends - ends <= {6, 8}  # of the chat template, and where generation would not end


def test_ends_are_checked_in_every_file(tmp_path: Path) -> None:
    for name, value, told in (
        (
            "generation_config.json",
            {"eos_token_id": 99},
            "eos_token_id 99 is beyond the tokenizer'",
        ),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id is 'x'; it must be a whole number"),
        ("special_tokens_map.json", {"eos_token": 3}, "eos_token is 3; it must be a string"),
    ):
        folder = write(tmp_path, Form([], set(), {}, {name: value}))
        with pytest.raises(ConfigError, match=told):
            load_tokenizer(folder)
        (tmp_path / name).unlink()


def test_the_only_end_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    folder = write(tmp_path, Form([], set(), {}, named(config={"eos_token_id": 99})))
    with pytest.raises(ConfigError, match="eos_token_id 99 is beyond the tokenizer's 9"):
        load_tokenizer(folder)


def test_a_stop_string_that_names_a_special_token_is_one_more_end(tmp_path: Path) -> None:
    """Also as an id. Its text is no part of a response, and ordinary strings are looked for."""
    plain = load_tokenizer(write(tmp_path, FORMS["Qwen: no begin token"]))
    told = plain.with_stops(("<eot>", "<turn>", "a"), (5,))
    assert told.stop_ids == (4, 7, 5)
    assert told.with_stops((), ()).stop_ids == (4,)
    assert plain.stop_ids == (4,)
    assert told.decode([0, 7, 5, 0]) == "a a"
    table = told.build_stop_table(("<eot>", "<turn>", "a"))
    assert isinstance(table, StopTable)
    row = jnp.asarray([[7, 8, 0]], jnp.int32)
    ends, _ = table(jnp.zeros(1, jnp.int32), row)
    assert ends.tolist() == [[False, True, True]]
    assert told.build_stop_table(("<eot>",)) == NO_STOP_STRINGS


@pytest.mark.parametrize("string", ["a<eot>", "<eot>\n", "x<|im_end|>y"])
def test_a_stop_string_with_a_special_token_in_it_is_refused(tmp_path: Path, string: str) -> None:
    """And the remedy of the message works."""
    tokenizer = load_tokenizer(write(tmp_path, FORMS["Qwen: no begin token"]))
    with pytest.raises(ConfigError, match=r"rollout\.stop has .*, which has the special token '<"):
        tokenizer.with_stops((string,), ())
    name = "turns that end with an added token that is not special"
    with pytest.raises(ConfigError, match=r"'a<turn>', which has the special token '<turn>' in it"):
        load_tokenizer(write(tmp_path, FORMS[name])).with_stops(("a<turn>",), ())
    token = next(token for token in TOKENS if token in string)
    assert tokenizer.with_stops((token,), ()).stop_ids == (4, 3 + TOKENS.index(token))


def test_a_stop_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, FORMS["Qwen: no begin token"]))
    with pytest.raises(ConfigError, match=r"rollout\.stop_ids has 9, .* has ids from 0 to 8;"):
        tokenizer.with_stops((), (9,))
    assert tokenizer.with_stops((), (8,)).stop_ids == (4, 8)
