"""What the assistant wrote is found in a chat, or the template is refused."""

import json

import pytest

from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.tokenizer import character_tokenizer, load_tokenizer
from tests.tokens.folders import QWEN, edit, needs_qwen

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
    ids, written = tokenizer.encode_chat([SYSTEM, *CHATS[chat]])
    assert ids == reference["input_ids"]
    assert written == [bool(each) for each in reference["loss_mask"]]


@needs_qwen
def test_qwen_answers_without_thinking_where_it_is_told_to(qwen):
    told = load_tokenizer(str(QWEN), enable_thinking=False)
    assert told.render_prompt("hello") == qwen.render_prompt("hello") + "<think>\n\n</think>\n\n"
    prompt = qwen.encode_prompt("hello")
    assert told.encode_prompt("hello")[len(prompt) :] == [151_667, 271, 151_668, 271]


@needs_qwen
def test_qwen_tools_stand_in_the_system_message(qwen):
    ids, written = qwen.encode_chat(
        ASKED, tools=[{"type": "function", "function": {"name": "now"}}]
    )
    plain, as_before = qwen.encode_chat(ASKED)
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
    return load_tokenizer(str(folder)).encode_chat(
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
        character_tokenizer().encode_chat([{"role": "user", "content": "1"}])
