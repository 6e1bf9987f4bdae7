"""Tokenizers for tests: a published one, and files to change."""

import json
from pathlib import Path

import pytest

QWEN = Path(__file__).parents[3] / "shared/data/qwen_tokenizer"
needs_qwen = pytest.mark.skipif(not QWEN.is_dir(), reason=f"no tokenizer in {QWEN}")
ASKS = "{{ messages[0].content }}"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
