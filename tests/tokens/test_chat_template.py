"""Chat templates are filled as their authors' library does, and cannot harm who fills them."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens import chat_template
from jaxspec.tokens.tokenizer import load_tokenizer
from tests.tokens.folders import ASKS, edit


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('system message needed') }}", "{% if %}", "{{ messages[5].content }}"],
)
def test_bad_template_is_reported(folder, template):
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match="chat_template"):
        load_tokenizer(str(folder)).render_prompt("x")


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
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0)  # and up to one more
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(
        ConfigError,
        match=(
            rf"^{folder}: the chat template (is not valid|refuses .*): .*{reason}.*; correct"
            r" chat_template$"
        ),
    ):
        load_tokenizer(str(folder)).render_prompt("x")


def test_a_template_goes_on_after_a_message_that_took_too_long(folder, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0)
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    edit(
        folder / "tokenizer_config.json",
        chat_template="{% if messages[0].content == '1' %}" + slow + "{% endif %}?" + ASKS,
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.render_prompt("2") == "?2"
    with pytest.raises(ConfigError, match="takes more than 0 seconds"):
        tokenizer.render_prompt("1")
    assert tokenizer.render_prompt("2") == "?2"


def test_a_template_may_be_filled_from_several_threads_and_leaves_no_process(folder):
    edit(
        folder / "tokenizer_config.json",
        chat_template="{{ messages[0].content }}\u00e9\n{{ messages[0].content }}",
    )
    tokenizer = load_tokenizer(str(folder))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.render_prompt, map(str, range(50)))) == [
            f"{i}\u00e9\n{i}" for i in range(50)
        ]
    assert tokenizer._template is not None
    process = tokenizer._template._process
    assert process is not None
    assert process.poll() is None
    del tokenizer
    gc.collect()
    assert process.wait(timeout=20) == 0


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
    assert load_tokenizer(str(folder)).render_prompt("1+1=") == wanted


def test_the_day_of_a_template_is_pinned(folder, monkeypatch):
    """Else it is the local time, which differs from prompt to prompt."""
    edit(folder / "tokenizer_config.json", chat_template="{{ strftime_now('%d %b %T') }}" + ASKS)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.reads_clock
    pinned = tokenizer.with_date("2026-03-04")
    assert pinned.render_prompt("1+1=") == "04 Mar 00:00:001+1="
    assert pinned.fingerprint != tokenizer.fingerprint
    assert tokenizer.with_date("2026-03-05").fingerprint != pinned.fingerprint
    edit(folder / "tokenizer_config.json", chat_template=ASKS)
    assert not load_tokenizer(str(folder)).reads_clock


def test_many_prompts_at_once_are_those_of_one_by_one(folder):
    edit(
        folder / "tokenizer_config.json",
        chat_template="{% if tools %}{{ tools[0].n }}{% endif %}" + ASKS,
    )
    tokenizer = load_tokenizer(str(folder))
    asked = [("1+1=", None), ([{"role": "user", "content": "2"}], [{"n": "7"}]), ("3", None)]
    prompts = tokenizer.render_prompts(asked)
    assert prompts == [tokenizer.render_prompt(*each) for each in asked] == ["1+1=", "72", "3"]
    assert tokenizer.count_tokens(prompts) == [len(tokenizer.encode(prompt)) for prompt in prompts]
    with pytest.raises(ConfigError, match=r"refuses one of these problems"):
        tokenizer.render_prompts([("1", None), ([], None)])
    assert tokenizer.render_prompt("1") == "1"


def test_template_cannot_reach_python(folder):
    edit(folder / "tokenizer_config.json", chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="unsafe"):
        load_tokenizer(str(folder)).render_prompt("x")
