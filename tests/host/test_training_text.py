"""A file of texts or chats as what a draft is trained on, and the lines that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.config.settings import DataConfig, OfflineConfig, ResolvedConfig
from jaxspec.data.tokenizer import load_tokenizer
from jaxspec.host.draft_data import training_text
from jaxspec.inputs.checked import ConfigError
from tests.host.training_jobs import END, TOKENIZER, a_config


class TestTrainingText:
    def file(self, folder: Path, *lines: Any) -> str:
        path = folder / "corpus.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return str(path)

    def test_each_line_stands_between_the_beginning_and_the_end_token(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, {"text": "1+2=3", "id": 7}, "", {"text": ";,#"})
        rows = training_text(a_config(text=path), TOKENIZER, print)
        assert rows is not None
        assert rows.tokens.shape == (2, 12)
        for text, row, mask in zip(("1+2=3", ";,#"), *rows, strict=True):
            ids = [*TOKENIZER.encode(text), END]
            assert row.tolist() == [*TOKENIZER.bos_ids, *ids] + [TOKENIZER.pad_id] * (11 - len(ids))
            assert mask.tolist() == [False] + [True] * len(ids) + [False] * (11 - len(ids))

    def test_what_a_file_repeats_or_leaves_empty_is_counted_and_said(self, tmp_path: Path) -> None:
        told: list[str] = []
        path = self.file(
            tmp_path,
            {"text": "1+2=3"},
            "",
            {"text": " "},
            {"text": "1+2=3"},
            "  ",
            {"text": "1+2=3"},
            {"text": "5"},
        )
        rows = training_text(a_config(text=path), TOKENIZER, told.append)
        assert rows is not None
        assert len(rows.tokens) == 4
        what = "2 blank lines passed over, 1 empty texts left out, 2 repeated texts (kept)"
        assert told == [f"offline.text {path}: {what}; 4 to train on"]
        told.clear()
        training_text(
            a_config(text=self.file(tmp_path, {"text": "1"}, {"text": "2"})), TOKENIZER, told.append
        )
        assert told == []

    def test_generic_is_the_mixed_corpus_and_nothing_is_the_policys_own(self) -> None:
        config = ResolvedConfig(
            data=DataConfig(), offline=OfflineConfig(text="generic", samples=200, rows=64)
        )
        rows = training_text(config, TOKENIZER, print)
        assert rows is not None
        texts = [TOKENIZER.decode(row[mask]) for row, mask in zip(*rows, strict=True)]
        assert len(texts) == 200
        # pages of the solution book, and other documents
        assert {text[0] == "?" for text in texts} == {True, False}
        assert training_text(ResolvedConfig(), TOKENIZER, print) is None

    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            ([], ["the file is empty", "column 'text'"]),
            (["", "  "], ["the file is empty"]),
            ([{"text": ""}, "", {"text": "  "}], ["all 2 texts are empty"]),
            ([{"text": "1"}, "{"], ["line 2", "not JSON", "one JSON object a line"]),
            ([[1]], ["line 1", "a list instead of an object"]),
            (
                [{"text": "1"}, "", {"txt": "1"}],
                ["line 3", "no column 'text' or 'messages' among 'txt'", "rename 'txt' to 'text'"],
            ),
            (
                [{"message": [], "id": 1}],
                ["line 1", "'messages' among 'message', 'id'", "rename 'message' to 'messages'"],
            ),
            (
                [{f"c\n{i}": i for i in range(9999)}],
                ["line 1", "among 'c\\n0', ", "and 9994 more; give the row one"],
            ),
            (
                [{"question": "1"}],
                ["line 1", "no column 'text' or 'messages' among 'question'", "give the row one"],
            ),
            (
                [{"text": "1"}, {"text": "1", "messages": []}],
                ["line 2", "columns 'text' and 'messages' both", "keep the one"],
            ),
            (
                [{"messages": ["1"]}],
                ["line 1", "column 'messages' is not a list of objects with a role"],
            ),
            (
                [{"messages": [{"role": "user", "content": "1"}]}],
                ["line 1", "column 'messages' has none of role 'assistant'"],
            ),
            (
                [{"messages": [{"role": "assistant", "content": "1"}]}],
                ["line 1", "built-in: there is no chat template for messages"],
            ),
            ([{"text": 12}], ["line 1", "column 'text' holds a int", "quotes"]),
            (
                [{"text": "1+1"}, {"text": "1" * 11}],
                ["line 2", "column 'text' takes 13 tokens", "= 12", "--rollout.max_new_tokens"],
            ),
            (['{"text": "1+\\ud800"}'], ["line 1", "cannot encode", "correct the text"]),
            (["[" * 100_000], ["line 1", "not JSON", "nested too deeply"]),
            ([{"text": "1+x"}], ["line 1", "lacks 'x' of column 'text'", "--data.tokenizer"]),
        ],
    )
    def test_bad_lines_are_named_with_file_line_column_and_remedy(
        self, tmp_path: Path, lines, words
    ) -> None:
        path = self.file(tmp_path, *lines)
        with pytest.raises(ConfigError) as error:
            training_text(a_config(text=path), TOKENIZER, print)
        assert all(word in str(error.value) for word in ["offline.text", path, *words])

    def test_a_missing_file_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"offline.text nowhere.jsonl: No such file.*generic"):
            training_text(a_config(text="nowhere.jsonl"), TOKENIZER, print)

    def test_the_longest_text_that_fits_is_taken(self, tmp_path: Path) -> None:
        rows = training_text(
            a_config(text=self.file(tmp_path, {"text": "1" * 10})), TOKENIZER, print
        )
        assert rows is not None
        assert rows.mask.tolist() == [[False] + [True] * 11]

    def test_a_chat_is_learnt_where_the_assistant_wrote(self, tmp_path: Path) -> None:
        folder = tmp_path / "tokenizer"
        TOKENIZER.save(str(folder))
        template = (
            "{% for m in messages %}{{ '?' if m.role == 'user' else '=' }}{{ m.content }};{%"
            " endfor %}"
        )
        (folder / "chat_template.jinja").write_text(
            template + "{% if add_generation_prompt %}={% endif %}"
        )
        chat = [
            {"role": role, "content": text}
            for role, text in (
                ("user", "1+1"),
                ("assistant", "2"),
                ("user", "5"),
                ("assistant", "6"),
            )
        ]
        text = self.file(tmp_path, {"messages": chat}, {"text": "7"})
        config = a_config(text=text, rollout={"max_new_tokens": 9})
        rows = training_text(config, load_tokenizer(str(folder)), print)
        assert rows is not None
        assert TOKENIZER.decode(rows.tokens[0]) == "?1+1;=2;?5;=6;"
        assert np.flatnonzero(rows.mask[0]).tolist() == [6, 7, 12, 13]
        assert np.flatnonzero(rows.mask[1]).tolist() == [1, 2]
        with pytest.raises(ConfigError, match=r"line 1: column 'messages' takes 14 tokens .* = 12"):
            training_text(a_config(text=text), load_tokenizer(str(folder)), print)
