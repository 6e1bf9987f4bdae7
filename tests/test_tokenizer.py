"""Text and ids: round trips, ends, chat templates, and what a damaged tokenizer says."""

import json
from pathlib import Path

import pytest

from jaxspec.config import ConfigError
from jaxspec.tokenizer import CHARACTERS, character_tokenizer, load_tokenizer

QWEN = Path(__file__).parents[2] / "shared/data/qwen_tokenizer"
needs_qwen = pytest.mark.skipif(not QWEN.is_dir(), reason=f"no tokenizer in {QWEN}")


@pytest.fixture(scope="module")
def qwen():
    return load_tokenizer(str(QWEN))


@pytest.fixture
def folder(tmp_path):
    character_tokenizer().save(str(tmp_path / "tokenizer"))
    return tmp_path / "tokenizer"


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
    ids = [*tokenizer.chat("1+1="), tokenizer.stop_ids[0], tokenizer.pad_id, tokenizer.size, 151_900, -1]
    assert tokenizer.decode(ids) == "1+1="


def test_unknown_characters_are_named_once():
    assert character_tokenizer().unknown("a1b+a") == "ab"


def test_save_and_load_agree(folder):
    ours, loaded = character_tokenizer(), load_tokenizer(str(folder))
    assert (loaded.size, loaded.pad_id, loaded.stop_ids, loaded.bos_ids) == (ours.size, ours.pad_id, ours.stop_ids, ours.bos_ids)
    assert loaded.chat("99-12=") == ours.chat("99-12=")
    assert loaded.decode(loaded.chat("99-12=")) == "99-12="


def test_vocabulary_must_hold_every_token():
    tokenizer = character_tokenizer()
    tokenizer.check_vocab(tokenizer.size)
    with pytest.raises(ConfigError, match=r"model\.vocab is 4.*set --model\.vocab \d+"):
        tokenizer.check_vocab(4)


def test_template_file_wins_and_sees_special_tokens(folder):
    edit(folder / "tokenizer_config.json", chat_template="1")
    assert load_tokenizer(str(folder)).render("2+2=") == "1"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}?{{ messages[0].content }}{% if add_generation_prompt %};{% endif %}")
    assert load_tokenizer(str(folder)).render("2+2=") == "<bos>?2+2=;"


def test_named_templates_give_the_default(folder):
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "tool", "template": "1"}, {"name": "default", "template": "2"}])
    assert load_tokenizer(str(folder)).render("x") == "2"


@pytest.mark.parametrize("template", ["{{ raise_exception('system message needed') }}", "{% if %}", "{{ messages[5].content }}"])
def test_bad_template_is_reported(folder, template):
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match="chat_template"):
        load_tokenizer(str(folder)).render("x")


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
    edit(folder / "tokenizer_config.json", eos_token={"content": "<eos>", "lstrip": False}, add_bos_token=False)
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


@needs_qwen
@pytest.mark.parametrize("path", sorted((QWEN / "reference_ids").glob("*.json")), ids=lambda path: path.stem)
def test_qwen_reference_ids(qwen, path):
    ids = json.loads(path.read_text())["input_ids"]
    text = qwen._backend.decode(ids, skip_special_tokens=False)
    assert qwen.encode(text) == ids
