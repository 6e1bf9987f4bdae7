"""Folders of tokenizers."""

import pytest

from jaxspec.tokens.tokenizer import character_tokenizer, load_tokenizer
from tests.tokens.folders import QWEN


@pytest.fixture(scope="module")
def qwen():
    return load_tokenizer(str(QWEN))


@pytest.fixture
def folder(tmp_path):
    character_tokenizer().save(str(tmp_path / "tokenizer"))
    return tmp_path / "tokenizer"
