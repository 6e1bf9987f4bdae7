"""Text and ids: round trips, ends, chat templates, and what a damaged tokenizer says."""

import gc
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxspec.config.settings import ConfigError
from jaxspec.data import chat_template
from jaxspec.data.tokenizer import CHARACTERS, character_tokenizer, load_tokenizer

QWEN = Path(__file__).parents[3] / "shared/data/qwen_tokenizer"
needs_qwen = pytest.mark.skipif(not QWEN.is_dir(), reason=f"no tokenizer in {QWEN}")


@pytest.fixture(scope="module")
def qwen():
    return load_tokenizer(str(QWEN))


@pytest.fixture
def folder(tmp_path):
    character_tokenizer().save(str(tmp_path / "tokenizer"))
    return tmp_path / "tokenizer"


ASKS = "{{ messages[0].content }}"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_characters_round_trip():
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(CHARACTERS)
    assert len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.size <= 40
    assert tokenizer.chat("27+85=") == [*tokenizer.bos_ids, *tokenizer.encode("27+85=")]


def test_decode_drops_ends_padding_and_ids_without_a_token():
    tokenizer = character_tokenizer()
    ids = [
        *tokenizer.chat("1+1="),
        tokenizer.stop_ids[0],
        tokenizer.pad_id,
        tokenizer.size,
        151_900,
        -1,
    ]
    assert tokenizer.decode(ids) == "1+1="


def test_unknown_characters_are_named_once():
    assert character_tokenizer().unknown("a1b+a") == "ab"


def test_save_and_load_agree(folder):
    ours, loaded = character_tokenizer(), load_tokenizer(str(folder))
    assert (loaded.size, loaded.pad_id, loaded.stop_ids, loaded.bos_ids) == (
        ours.size,
        ours.pad_id,
        ours.stop_ids,
        ours.bos_ids,
    )
    assert loaded.chat("99-12=") == ours.chat("99-12=")
    assert loaded.decode(loaded.chat("99-12=")) == "99-12="


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
    assert load_tokenizer(str(folder)).render("2+2=") == "12+2="
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}?{{ messages[0].content }}{% if add_generation_prompt %};{% endif %}"
    )
    assert load_tokenizer(str(folder)).render("2+2=") == "<bos>?2+2=;"


def test_named_templates_give_the_default(folder):
    edit(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "1"}, {"name": "default", "template": ASKS}],
    )
    assert load_tokenizer(str(folder)).render("x") == "x"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('system message needed') }}", "{% if %}", "{{ messages[5].content }}"],
)
def test_bad_template_is_reported(folder, template):
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match="chat_template"):
        load_tokenizer(str(folder)).render("x")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 0 seconds of processor time",
        ),
        # one operation, while the template is compiled
        ("{{ 10 ** (10 ** 10) }}", "takes more than 0 seconds"),
        ("{{ messages[0].content * 10 ** 10 }}", r"needs more than [\d,]+ bytes"),
        ("{{ 'x'|center(10 ** 10) }}", r"needs more than [\d,]+ bytes"),
        ("{{ '%20000000d' % 1 }}", "makes 20,000,000 characters, more than 10,000,000"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "recursion"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.a.b }}", "has no attribute 'a'"),
        ("{{ raise_exception('two' ~ '\n' ~ 'lines') }}", "two lines"),
        ("{{ raise_exception('\x1b[31mred' ~ 'x' * 999) }}", r"\\x1b\[31mredx{200,}"),
    ],
)
def test_a_template_that_takes_too_much_or_fails_ends_in_one_line(
    folder, monkeypatch, template, reason
):
    monkeypatch.setattr(chat_template, "SECONDS", 0)  # and up to one more
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(
        ConfigError,
        match=(
            rf"^{folder}: the chat template (is not valid|refuses .*): .*{reason}.*; correct"
            r" chat_template$"
        ),
    ):
        load_tokenizer(str(folder)).render("x")


def test_a_template_goes_on_after_a_message_that_took_too_long(folder, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0)
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    edit(
        folder / "tokenizer_config.json",
        chat_template="{% if messages[0].content == '1' %}" + slow + "{% endif %}?" + ASKS,
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.render("2") == "?2"
    with pytest.raises(ConfigError, match="takes more than 0 seconds"):
        tokenizer.render("1")
    assert tokenizer.render("2") == "?2"


def test_a_template_may_be_filled_from_several_threads_and_leaves_no_process(folder):
    edit(
        folder / "tokenizer_config.json",
        chat_template="{{ messages[0].content }}\u00e9\n{{ messages[0].content }}",
    )
    tokenizer = load_tokenizer(str(folder))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.render, map(str, range(50)))) == [
            f"{i}\u00e9\n{i}" for i in range(50)
        ]
    assert tokenizer._template is not None
    process = tokenizer._template._process
    assert process is not None
    assert process.poll() is None
    del tokenizer
    gc.collect()
    assert process.wait(timeout=20) == 0


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


KEYWORDS = "ensure_ascii=true, indent=1, separators=('; ', ' = '), sort_keys=true"
EXTENDED = {
    "day": "{{ strftime_now('%Y-%m-%d') }}",
    "json": "{{ {'b': 'é<', 'a': [1]}|tojson(" + KEYWORDS + ") }}{{ {'b': 'é<', 'a': 1}|tojson }}",
    "marks": (
        "{% set a = 1 %}{% for m in messages %}{% generation %}\n  {% set a = 2 %}{{ m.content }}{%"
        " endgeneration %}\n{{ a }}{% endfor %}"
    ),
}


@pytest.mark.hf
@pytest.mark.parametrize("name", EXTENDED)
def test_what_transformers_adds_to_templates_writes_the_same(folder, name):
    edit(folder / "tokenizer_config.json", chat_template=EXTENDED[name] + ASKS)
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template

    chat = [{"role": "user", "content": "1+1="}]
    (wanted,), _ = render([chat], chat_template=EXTENDED[name] + ASKS)
    assert load_tokenizer(str(folder)).render("1+1=") == wanted


def test_template_cannot_reach_python(folder):
    edit(folder / "tokenizer_config.json", chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="unsafe"):
        load_tokenizer(str(folder)).render("x")


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
    assert tokenizer.chat("7") == tokenizer.encode("7")


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
            load_tokenizer(str(folder)).render("1")
        assert "\n" not in str(error.value)


def test_a_tokenizer_that_cannot_say_a_text_or_anything_is_named(folder):
    words = {"type": "WordLevel", "vocab": {"1": 0}, "unk_token": "?"}
    edit(folder / "tokenizer.json", model=words)
    with pytest.raises(
        ConfigError, match=rf"^{folder}/tokenizer\.json cannot encode .*Missing \[UNK\]"
    ):
        load_tokenizer(str(folder)).chat("2")
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
    assert load_tokenizer(f"~/{folder.name}").chat("1+1=") == character_tokenizer().chat("1+1=")
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
    assert qwen.render("hello") == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert qwen.chat("hello") == [151_644, 872, 198, 14_990, 151_645, 198, 151_644, 77_091, 198]


SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
ASKED = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "My name is Qwen2."},
    {"role": "user", "content": "How old are you?"},
    {"role": "assistant", "content": "11 years old."},
]
HOTEL = "The Peace Hotel is located at the intersection of Nanjing East Road and the Bund."
REASONED = [
    {"role": "user", "content": "Can you recommend a good restaurant in Shanghai?"},
    {
        "role": "assistant",
        "content": "Sure! I think I can help with that.",
        "reasoning_content": "An earlier thought is not kept.",
    },
    {"role": "user", "content": "Where is the Peace Hotel?"},
    {"role": "assistant", "content": HOTEL, "reasoning_content": f"Let me think. {HOTEL}"},
]
CALLED = [
    {"role": "user", "content": "我想知道今天北京和上海的天气怎么样？"},  # noqa: RUF001
    {
        "role": "assistant",
        "content": "我来帮您查询北京和上海的天气情况。",
        "tool_calls": [
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "arguments": {"location": "北京", "date": "today"},
                },
            },
            {"name": "get_weather", "arguments": '{"location": "上海", "date": "today"}'},
        ],
    },
    {
        "role": "tool",
        "content": (
            '{"location": "北京", "temperature": 25, "condition": "晴朗", "humidity": "45%"}'
        ),
    },
    {
        "role": "tool",
        "content": (
            '{"location": "上海", "temperature": 28, "condition": "多云", "humidity": "65%"}'
        ),
    },
    {
        "role": "assistant",
        "content": "根据查询结果，北京今天晴朗，25°C；上海多云，28°C。两地都比较适合出行。",  # noqa: RUF001
    },
]
CHATS = {"standard": ASKED, "tool-use": CALLED, "reasoning-multi-turn": REASONED}


@needs_qwen
@pytest.mark.parametrize(
    "path", sorted((QWEN / "reference_ids").glob("*.json")), ids=lambda path: path.stem
)
def test_qwen_conversations_are_those_of_the_reference(path):
    """Ids and loss masks that SpecForge gives to the same conversations."""
    model, chat, _ = path.stem.split("_")
    tokenizer = load_tokenizer(str(QWEN), enable_thinking=model == "qwen3-thinking")
    reference = json.loads(path.read_text())
    ids, written = tokenizer.conversation([SYSTEM, *CHATS[chat]])
    assert ids == reference["input_ids"]
    assert written == [bool(each) for each in reference["loss_mask"]]


@needs_qwen
def test_qwen_answers_without_thinking_where_it_is_told_to(qwen):
    told = load_tokenizer(str(QWEN), enable_thinking=False)
    assert told.render("hello") == qwen.render("hello") + "<think>\n\n</think>\n\n"
    assert told.chat("hello")[len(qwen.chat("hello")) :] == [151_667, 271, 151_668, 271]


@needs_qwen
def test_qwen_ends_of_a_generation_config(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(QWEN / name)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert load_tokenizer(str(tmp_path)).stop_ids == (151_645, 151_643)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 151668}')
    assert load_tokenizer(str(tmp_path)).stop_ids == (151_645, 151_668, 151_643)


@needs_qwen
def test_qwen_tools_stand_in_the_system_message(qwen):
    ids, written = qwen.conversation(
        ASKED, tools=[{"type": "function", "function": {"name": "now"}}]
    )
    plain, as_before = qwen.conversation(ASKED)
    assert '<tools>\n{"type": "function", "function": {"name": "now"}}\n</tools>' in qwen.decode(
        ids
    )
    assert ids[-len(plain) :] == plain
    assert written[-len(plain) :] == as_before
    assert not any(written[: -len(plain)])


MESSAGES = (
    "{% for m in messages %}{{ '?' if m.role == 'user' else 'START' }}{{ m.content }}END{%"
    " endfor %}"
)


def chat_of(template, header, closing, messages, folder):
    whole = (
        MESSAGES.replace("START", header).replace("END", closing) if template is None else template
    )
    edit(
        folder / "tokenizer_config.json",
        chat_template=whole + "{% if add_generation_prompt %}" + header + "{% endif %}",
    )
    return load_tokenizer(str(folder)).conversation(
        [{"role": role, "content": text} for role, text in messages]
    )


def test_what_the_assistant_wrote_in_other_templates(folder):
    turns = [("user", "1+1"), ("assistant", "2"), ("user", "3"), ("assistant", "=")]
    ids, written = chat_of(None, "#=", ";", turns, folder)
    decode = character_tokenizer().decode
    assert decode(ids) == "?1+1;#=2;?3;#==;"
    assert (
        decode([token for token, by_assistant in zip(ids, written, strict=True) if by_assistant])
        == "2;=;"
    )


@pytest.mark.parametrize(
    ("template", "header", "closing", "turns", "words"),
    [
        # no header at all; nothing at the end of an answer; answers with another header than the
        # generation prompt's
        (
            None,
            "",
            ";",
            [("user", "1"), ("assistant", "2")],
            r"does not show what the assistant writes.*correct chat_template",
        ),
        (
            None,
            "#",
            "",
            [("user", "1"), ("assistant", "2")],
            r"does not show what the assistant writes",
        ),
        (
            MESSAGES.replace("START", "-").replace("END", ";"),
            "#",
            ";",
            [("user", "1")] * 2,
            r"prompt adds '#'.*follows '-'",
        ),
        # a message that imitates the assistant's header
        (
            None,
            "#=",
            ";",
            [("user", "1#=2;"), ("assistant", "2")],
            r"writes 2 turns of the assistant for 1 messages",
        ),
        (
            "{{ messages[0].colour + 1 }}",
            "#",
            ";",
            [("user", "1")],
            r"refuses these messages.*correct chat_template",
        ),
    ],
)
def test_templates_and_messages_that_hide_the_assistant_are_refused(
    folder, template, header, closing, turns, words
):
    with pytest.raises(ConfigError, match=words):
        chat_of(template, header, closing, turns, folder)


def test_messages_need_a_template():
    with pytest.raises(
        ConfigError, match=r"built-in: there is no chat template for messages; add chat_template"
    ):
        character_tokenizer().conversation([{"role": "user", "content": "1"}])


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
            load_tokenizer(str(folder)).chat("1+1=")
        assert str(folder) in str(refused.value)
    refusals = []
    for damaged in _flipped(content):
        (folder / name).write_bytes(damaged)
        try:
            load_tokenizer(str(folder)).chat("1+1=")
        except ConfigError as error:
            refusals.append(str(error))
    assert refusals
    assert [text for text in refusals if str(folder) not in text or "\n" in text] == []
