"""Text and ids: round trips, ends, chat templates, and what a damaged tokenizer says."""

import json
import os

import pytest

from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.tokenizer import ARITHMETIC_CHARACTERS, character_tokenizer, load_tokenizer
from tests.tokens.folders import ASKS, QWEN, edit, needs_qwen


def test_characters_round_trip():
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(ARITHMETIC_CHARACTERS)
    assert len(set(ids)) == len(ARITHMETIC_CHARACTERS)
    assert tokenizer.decode(ids) == ARITHMETIC_CHARACTERS
    assert tokenizer.size <= 40
    assert tokenizer.encode_prompt("27+85=") == [*tokenizer.bos_ids, *tokenizer.encode("27+85=")]


def test_decode_drops_ends_padding_and_ids_without_a_token():
    tokenizer = character_tokenizer()
    ids = [
        *tokenizer.encode_prompt("1+1="),
        tokenizer.stop_ids[0],
        tokenizer.pad_id,
        tokenizer.size,
        151_900,
        -1,
    ]
    assert tokenizer.decode(ids) == "1+1="


def test_unknown_characters_are_named_once():
    assert character_tokenizer().unknown_characters("a1b+a") == "ab"


def test_save_and_load_agree(folder):
    ours, loaded = character_tokenizer(), load_tokenizer(str(folder))
    assert (loaded.size, loaded.pad_id, loaded.stop_ids, loaded.bos_ids) == (
        ours.size,
        ours.pad_id,
        ours.stop_ids,
        ours.bos_ids,
    )
    assert loaded.encode_prompt("99-12=") == ours.encode_prompt("99-12=")
    assert loaded.decode(loaded.encode_prompt("99-12=")) == "99-12="


def test_truncation_and_padding_that_a_file_keeps_are_not_followed(folder):
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    wanted = [load_tokenizer(str(folder)).encode(text) for text in ("1", "12345")]
    edit(folder / "tokenizer.json", truncation=truncation, padding=padding)
    assert [load_tokenizer(str(folder)).encode(text) for text in ("1", "12345")] == wanted


def test_vocabulary_must_hold_every_token():
    tokenizer = character_tokenizer()
    tokenizer.check_vocab(tokenizer.size)
    with pytest.raises(ConfigError, match=r"model\.vocab is 4.*set --model\.vocab \d+"):
        tokenizer.check_vocab(4)


def test_template_file_wins_and_sees_special_tokens(folder):
    edit(folder / "tokenizer_config.json", chat_template="1{{ messages[0].content }}")
    assert load_tokenizer(str(folder)).render_prompt("2+2=") == "12+2="
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}?{{ messages[0].content }}{% if add_generation_prompt %};{% endif %}"
    )
    assert load_tokenizer(str(folder)).render_prompt("2+2=") == "<bos>?2+2=;"


CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %};"


@pytest.mark.parametrize(
    ("prompt_format", "prompt"),
    [
        ("chat", "<bos>[user]1+1=;"),
        ("raw", "<bos>1+1="),
        ("Problem: {problem}\nSolution:", "<bos>Problem: 1+1=\nSolution:"),
    ],
)
def test_a_problem_is_written_in_the_format_that_is_asked_for(folder, prompt_format, prompt):
    """A base model must not get a chat template, also where its tokenizer has one."""
    edit(folder / "tokenizer_config.json", chat_template=CHAT)
    tokenizer = load_tokenizer(str(folder), prompt_format=prompt_format)
    assert tokenizer.render_prompt("1+1=") == prompt
    assert tokenizer.render_prompt([{"role": "user", "content": "1+1="}]) == prompt
    chat = [{"role": "system", "content": "?"}, {"role": "user", "content": "1+1="}]
    if prompt_format == "chat":
        assert tokenizer.render_prompt(chat) == "<bos>[system]?[user]1+1=;"
    else:
        with pytest.raises(ConfigError, match=r"a chat of 2 messages .*data\.prompt_format is"):
            tokenizer.render_prompt(chat)


def test_named_templates_give_the_default(folder):
    edit(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "1"}, {"name": "default", "template": ASKS}],
    )
    assert load_tokenizer(str(folder)).render_prompt("x") == "x"


@pytest.mark.parametrize(
    "template", ["", "   ", "1+1=", "{% if false %}{{ messages[0].content }}{% endif %}"]
)
def test_a_template_that_says_the_same_of_any_problem_is_named_by_its_file(folder, template):
    """Else the data would be blamed, or the policy be trained to answer nothing; a template may
    refuse a user's message without others."""
    edit(folder / "tokenizer_config.json", chat_template=template + "{% set a = 1 %}")
    with pytest.raises(
        ConfigError,
        match=(
            rf"^{folder}/tokenizer_config\.json: the chat template writes '.*' for any problem;"
            r" correct it"
        ),
    ):
        load_tokenizer(str(folder))
    (folder / "chat_template.jinja").write_text(template + "{% set a = 1 %}")
    with pytest.raises(
        ConfigError, match=rf"^{folder}/chat_template\.jinja: the chat template writes"
    ):
        load_tokenizer(str(folder))
    (folder / "chat_template.jinja").write_text(
        "{{ raise_exception('no system message') if messages|length < 2 }}"
    )
    load_tokenizer(str(folder))


def test_ends_of_the_generation_config_are_added(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 1]}')
    assert load_tokenizer(str(folder)).stop_ids == (1, 4)
    (folder / "generation_config.json").write_text('{"eos_token_id": 99}')
    with pytest.raises(ConfigError, match="eos_token_id 99"):
        load_tokenizer(str(folder))


def test_token_objects_are_read(folder):
    edit(
        folder / "tokenizer_config.json",
        eos_token={"content": "<eos>", "lstrip": False},
        add_bos_token=False,
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.stop_ids == (1,)
    assert tokenizer.encode_prompt("7") == tokenizer.encode("7")


def test_missing_and_damaged_files_are_named(folder):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(folder / "absent"))
    edit(folder / "tokenizer_config.json", eos_token="<end>")
    with pytest.raises(ConfigError, match="eos_token '<end>' is not in"):
        load_tokenizer(str(folder))
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="no eos_token"):
        load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no key 'model'"):
        load_tokenizer(str(folder))


TEMPLATE, CONFIG, ENDS = "chat_template", "tokenizer_config.json", "generation_config.json"


@pytest.mark.parametrize(
    ("file", "key", "values"),
    [
        (CONFIG, "eos_token", [3, ["<eos>"], True, {"text": "<eos>"}, {"content": 3}, {}]),
        (
            CONFIG,
            "bos_token",
            ["\ud800", {"content": "<\udfff"}, 3, ["<bos>"], {"content": ["<bos>"]}],
        ),
        (CONFIG, "pad_token", [0.5, ["<pad>"]]),
        (CONFIG, "unk_token", [False, [3]]),
        (CONFIG, "add_bos_token", ["false", 0, []]),
        (
            CONFIG,
            TEMPLATE,
            [
                3,
                True,
                {"default": "x"},
                [3],
                ["x"],
                [[]],
                [{"name": "default"}],
                [{"name": 3, "template": "x"}],
            ],
        ),
        (
            CONFIG,
            TEMPLATE,
            [[{"name": "default", "template": 3}], [{"name": "rag", "template": "x"}], []],
        ),
        (ENDS, "eos_token_id", ["x", 1.5, True, ["1"], [[1]], {"a": 1}]),
        (
            "tokenizer.json",
            "model",
            [
                "x",
                3,
                None,
                [],
                {},
                {"type": "BPE"},
                {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]},
            ],
        ),
        ("tokenizer.json", "added_tokens", [3, [3]]),
        ("tokenizer.json", "pre_tokenizer", ["x", 3]),
    ],
)
def test_values_of_another_type_are_refused_with_their_file(folder, file, key, values):
    before = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    # the Rust library tells a place in the file, no key
    named = "" if file == "tokenizer.json" else f".*{key}"
    for value in values:
        (folder / file).write_text(json.dumps(before | {key: value}))
        with pytest.raises(ConfigError, match=rf"^{folder}/{file}{named}") as error:
            load_tokenizer(str(folder)).render_prompt("1")
        assert "\n" not in str(error.value)


def test_a_tokenizer_that_cannot_say_a_text_or_anything_is_named(folder):
    words = {"type": "WordLevel", "vocab": {"1": 0}, "unk_token": "?"}
    edit(folder / "tokenizer.json", model=words)
    with pytest.raises(
        ConfigError, match=rf"^{folder}/tokenizer\.json cannot encode .*Missing \[UNK\]"
    ):
        load_tokenizer(str(folder)).encode_prompt("2")
    edit(
        folder / "tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]
    )
    with pytest.raises(ConfigError, match=rf"^{folder}/tokenizer\.json: the vocabulary is empty"):
        load_tokenizer(str(folder))


def test_a_file_that_cannot_be_read_is_not_passed_over(folder):
    """A folder, a link to nothing and a pipe, in place of a file that may as well be absent."""
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        file = folder / name
        file.unlink(missing_ok=True)
        for make in (file.mkdir, lambda file=file: file.symlink_to("nowhere")):
            make()
            with pytest.raises(ConfigError, match=rf"^{file}"):
                load_tokenizer(str(folder))
            file.unlink() if file.is_symlink() else file.rmdir()
    os.mkfifo(folder / "chat_template.jinja")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is no regular file"):
        load_tokenizer(str(folder))


def test_a_home_folder_may_be_written_in_short(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_tokenizer(f"~/{folder.name}").encode_prompt(
        "1+1="
    ) == character_tokenizer().encode_prompt("1+1=")
    with pytest.raises(
        ConfigError, match=r"^data\.tokenizer is '~nobody7/x', and no home directory"
    ):
        load_tokenizer("~nobody7/x")


def test_a_template_file_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=rf"^{folder}/chat_template\.jinja: not a text in UTF-8"):
        load_tokenizer(str(folder))


@needs_qwen
def test_qwen_ids(qwen):
    assert qwen.size == 151_669
    assert qwen.stop_ids == (151_645, 151_643)
    assert qwen.pad_id == 151_643
    assert qwen.bos_ids == ()
    assert qwen.encode("<|im_start|>hello<|im_end|>") == [151_644, 14_990, 151_645]
    assert qwen.decode([151_667, 14_990, 151_645, 151_643, 151_669, 151_935]) == "<think>hello"


@needs_qwen
def test_qwen_chat(qwen):
    prompt = qwen.render_prompt("hello")
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = qwen.encode_prompt("hello")
    assert ids == [151_644, 872, 198, 14_990, 151_645, 198, 151_644, 77_091, 198]


@needs_qwen
def test_qwen_ends_of_a_generation_config(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(QWEN / name)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert load_tokenizer(str(tmp_path)).stop_ids == (151_645, 151_643)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 151668}')
    assert load_tokenizer(str(tmp_path)).stop_ids == (151_645, 151_668, 151_643)


def _flipped(content: bytes) -> list[bytes]:
    """Eight bytes in a row with another bit each, at ten places, and with their highest bit, which
    UTF-8 seldom takes."""
    flips = [bytes(1 << bit for bit in range(8)), bytes([0x80] * 8)]
    places = range(0, len(content), max(1, len(content) // 10))
    return [
        content[:place]
        + bytes(old ^ new for old, new in zip(content[place:], flip, strict=False))
        + content[place + 8 :]
        for place in places
        for flip in flips
    ]


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"],
)
def test_damage_is_named_or_leaves_a_tokenizer(folder, name):
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<bos>{{ message.content }}{% endfor %}"
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    content = (folder / name).read_bytes()
    for damaged in (
        b"",
        content[: len(content) // 2],
        b"\xff" * 9,
        b"{%" if name.endswith("jinja") else b"[" * 100_000,
    ):
        (folder / name).write_bytes(damaged)
        with pytest.raises(ConfigError) as refused:
            load_tokenizer(str(folder)).encode_prompt("1+1=")
        assert str(folder) in str(refused.value)
    refusals = []
    for damaged in _flipped(content):
        (folder / name).write_bytes(damaged)
        try:
            load_tokenizer(str(folder)).encode_prompt("1+1=")
        except ConfigError as error:
            refusals.append(str(error))
    assert refusals
    assert [text for text in refusals if str(folder) not in text or "\n" in text] == []
