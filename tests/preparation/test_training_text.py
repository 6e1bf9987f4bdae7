"""A file of texts or chats as what a draft is trained on, and the lines that are refused."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest

from jaxspec.config.settings import DataConfig, OfflineConfig, ResolvedConfig
from jaxspec.inputs.checked import ConfigError
from jaxspec.preparation.draft_data import read_training_text
from jaxspec.tokens.tokenizer import Tokenizer, load_tokenizer
from tests.host.training_jobs import END, TOKENIZER, a_config
from tests.tokens.folders import QWEN, needs_qwen

CHAT = QWEN.parent / "chat"


class TestTrainingText:
    def file(self, folder: Path, *lines: Any) -> str:
        path = folder / "corpus.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return str(path)

    def test_each_line_stands_between_the_beginning_and_the_end_token(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, {"text": "1+2=3", "id": 7}, "", {"text": ";,#"})
        rows = read_training_text(a_config(text=path), TOKENIZER, print)
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
            *({"text": " "}, {"text": None}, {"id": 7}, {"messages": []}),
            *({"messages": None}, {"text": "1+2=3", "messages": None}),
            "  ",
            {"text": "1+2=3"},
            {"text": "5"},
        )
        rows = read_training_text(a_config(text=path), TOKENIZER, told.append)
        assert rows is not None
        assert len(rows.tokens) == 4
        what = "2 blank lines passed over, 5 empty texts left out, 2 repeated texts (kept)"
        assert told == [f"offline.text {path}: {what}; 4 to train on"]
        told.clear()
        read_training_text(
            a_config(text=self.file(tmp_path, {"text": "1"}, {"text": "2"})), TOKENIZER, told.append
        )
        assert told == []

    def test_tools_are_written_and_what_is_not_is_said(self, tmp_path: Path) -> None:
        TOKENIZER.save(str(tmp_path / "tokenizer"))
        (tmp_path / "tokenizer/chat_template.jinja").write_text(
            "{% if tools %}{{ tools[0].n }}{% endif %}{% for m in messages %}"
            "{{ '#=' if m.role == 'assistant' else '?' }}{{ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}#={% endif %}"
        )
        tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
        asked = {"role": "user", "content": "1"}
        answer = {"role": "assistant", "content": [{"type": "text", "text": "2"}], "thought": "3"}
        path, told = self.file(tmp_path, {"messages": [asked, answer], "tools": [{"n": "7"}]}), []
        rows = read_training_text(a_config(text=path), tokenizer, told.append)
        assert rows is not None
        assert tokenizer.decode(rows.tokens[0]) == "7?1;#=2;"
        assert told == [
            f"offline.text {path}: the chat template does not write the key 'thought' of messages"
            " of role 'assistant', in 1 chats; 1 to train on"
        ]

    def test_generic_is_the_mixed_corpus_and_nothing_is_the_policys_own(self) -> None:
        config = ResolvedConfig(
            data=DataConfig(), offline=OfflineConfig(text="generic", samples=200, rows=64)
        )
        rows = read_training_text(config, TOKENIZER, print)
        assert rows is not None
        texts = [TOKENIZER.decode(row[mask]) for row, mask in zip(*rows, strict=True)]
        assert len(texts) == 200
        # pages of the solution book, and other documents
        assert {text[0] == "?" for text in texts} == {True, False}
        assert read_training_text(ResolvedConfig(), TOKENIZER, print) is None

    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            ([], ["the file is empty", "column 'text'"]),
            (["", "  "], ["the file is empty"]),
            ([{"text": ""}, "", {"text": "  "}], ["all 2 texts are empty"]),
            ([{"text": "1"}, "{"], ["line 2", "not JSON", "one JSON object a line"]),
            ([[1]], ["line 1", "a list instead of an object"]),
            (
                ["", {"txt": "1"}, {"text": None}],
                ["line 2", "no column 'text' or 'messages' among 'txt'", "rename 'txt' to 'text'"],
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
                ["line 2", "the row has both 'text' and 'messages'", "keep the one"],
            ),
            (
                [{"messages": ["1"]}],
                ["line 1", "column 'messages' is not a list of objects with a role"],
            ),
            (
                [{"messages": [{"role": "user", "content": "1"}]}],
                ["line 1", "column 'messages' has no message of role 'assistant'"],
            ),
            (
                [{"messages": [{"role": "assistant", "content": "1"}]}],
                ["line 1", "built-in: there is no chat template for messages"],
            ),
            ([{"text": 12}], ["line 1", "column 'text' holds a int", "quotes"]),
            (
                [{"conversations": [{"value": "1"}]}, {"text": "1"}],
                ["line 1", "column 'conversations' is not", "(or from and value)"],
            ),
            ([{"data": ["1", 2]}], ["line 1", "column 'data' is not a list of objects"]),
            ([{"data": ["1"]}], ["line 1", "column 'data' has no message of role 'assistant'"]),
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
            read_training_text(a_config(text=path), TOKENIZER, print)
        assert all(word in str(error.value) for word in ["offline.text", path, *words])

    def test_a_missing_file_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"offline.text nowhere.jsonl: No such file.*generic"):
            read_training_text(a_config(text="nowhere.jsonl"), TOKENIZER, print)

    def test_the_longest_text_that_fits_is_taken(self, tmp_path: Path) -> None:
        rows = read_training_text(
            a_config(text=self.file(tmp_path, {"text": "1" * 10})), TOKENIZER, print
        )
        assert rows is not None
        assert rows.mask.tolist() == [[False] + [True] * 11]

    def test_what_is_too_long_is_cut_and_counted(self, tmp_path: Path) -> None:
        told: list[str] = []
        path = self.file(tmp_path, {"text": "1" * 11}, {"text": "2" * 50}, {"text": "3"})
        rows = read_training_text(a_config(text=path), TOKENIZER, told.append)
        assert rows is not None
        assert [TOKENIZER.decode(row) for row in rows.tokens] == ["1" * 11, "2" * 11, "3"]
        assert END not in rows.tokens[:2]  # a text that goes on
        assert rows.mask.sum(1).tolist() == [11, 11, 2]
        assert told == [f"offline.text {path}: 2 cut to 12 tokens; 3 to train on"]

    def test_of_a_file_longer_than_what_is_trained_on_some_lines_are_drawn(
        self, tmp_path: Path
    ) -> None:
        """As many as the updates take, by the seed, in the file's order; no line beside them is
        looked at."""
        told: list[str] = []
        lines = [{"text": f"{number}"} for number in range(100, 900)]
        path = self.file(tmp_path, *lines)

        def drawn(steps: int, path: str = path, seed: int = 0) -> list[str]:
            config = dataclasses.replace(a_config(text=path, steps=steps), seed=seed)
            rows = read_training_text(config, TOKENIZER, told.append)
            assert rows is not None
            return [TOKENIZER.decode(row) for row in rows.tokens]

        every = [line["text"] for line in lines]
        some = drawn(10)
        assert len(some) == 40
        assert some == sorted(set(some) & set(every))
        assert some == drawn(10) != drawn(10, seed=1)
        assert told[0] == (
            f"offline.text {path}: 40 of 800 lines drawn, as many as can be trained on; 40 to train"
            " on"
        )
        assert min(some) < "200" < "800" < max(some)
        assert drawn(200) == drawn(300) == every
        assert len(told) == 3
        others = [line if line["text"] in some else "bad" for line in lines]
        assert drawn(10, self.file(tmp_path, *others)) == some

    def test_a_pipe_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ConfigError, match=r"offline\.text .*pipe is not a regular file; copy"):
            read_training_text(a_config(text=str(tmp_path / "pipe")), TOKENIZER, print)

    def chatting(self, folder: Path) -> Tokenizer:
        """The built-in tokenizer with a template, which writes the names of calls as well."""
        TOKENIZER.save(str(folder))
        template = (
            "{% for m in messages %}{{ '?' if m.role == 'user' else '=' }}{{ m.content or '' }}"
            "{% if m.tool_calls is defined %}{{ m.tool_calls[0].name }}{% endif %};{% endfor %}"
        )
        (folder / "chat_template.jinja").write_text(
            template + "{% if add_generation_prompt %}={% endif %}"
        )
        return load_tokenizer(str(folder))

    def test_a_chat_is_learnt_where_the_assistant_wrote(self, tmp_path: Path) -> None:
        tokenizer = self.chatting(tmp_path / "tokenizer")
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
        rows = read_training_text(config, tokenizer, print)
        assert rows is not None
        assert TOKENIZER.decode(rows.tokens[0]) == "?1+1;=2;?5;=6;"
        assert np.flatnonzero(rows.mask[0]).tolist() == [6, 7, 12, 13]
        assert np.flatnonzero(rows.mask[1]).tolist() == [1, 2]
        told: list[str] = []
        cut = read_training_text(a_config(text=text), tokenizer, told.append)
        assert cut is not None
        assert np.flatnonzero(cut.mask[0]).tolist() == [6, 7]
        assert cut.tokens[0].tolist() == rows.tokens[0, :12].tolist()
        assert told == [f"offline.text {text}: 1 cut to 12 tokens; 2 to train on"]

    @pytest.mark.parametrize("layout", ["conversations", "data", "parquet"])
    def test_other_layouts_of_a_chat_are_the_same_chat(self, tmp_path: Path, layout: str) -> None:
        """Magpie's and ShareGPT's, the first UltraChat's, and UltraChat-200k's, which is parquet:
        keys that some message has, all have there, as nulls."""
        tokenizer = self.chatting(tmp_path / "tokenizer")
        spoken = [("1+1", "2", "5", "6"), ("3", "4")]
        chats = [
            [
                {"role": ("user", "assistant")[turn % 2], "content": text}
                for turn, text in enumerate(texts)
            ]
            for texts in spoken
        ]
        called = {"role": "assistant", "content": None, "tool_calls": [{"name": "8"}]}
        chats.append([{"role": "user", "content": "7"}, called])
        lines = [{"messages": chat, "id": number} for number, chat in enumerate(chats)]
        plain = self.file(tmp_path, *lines)
        wanted = read_training_text(a_config(text=plain), tokenizer, print)
        assert wanted is not None
        assert TOKENIZER.decode(wanted.tokens[2]) == "?7;=8;"
        if layout == "data":
            lines[:2] = [{"data": list(texts)} for texts in spoken]
        if layout == "conversations":
            names = {"user": "human", "assistant": "gpt", "role": "from", "content": "value"}
            lines = [
                {
                    "conversations": [
                        {
                            names.get(key, key): names.get(str(part), part)
                            for key, part in each.items()
                        }
                        for each in chat
                    ]
                }
                for chat in chats[:2]
            ] + [{"conversations": [{"from": "human", "value": "7"}, {"from": "gpt", **called}]}]
        path = self.file(tmp_path, *lines)
        if layout == "parquet":
            from pyarrow import Table, parquet

            path = str(tmp_path / "corpus.parquet")
            parquet.write_table(Table.from_pylist(lines), path)
        rows = read_training_text(a_config(text=path), tokenizer, print)
        assert rows is not None
        np.testing.assert_array_equal(rows.tokens, wanted.tokens)
        np.testing.assert_array_equal(rows.mask, wanted.mask)

    def test_a_chat_cut_before_its_answer_is_left_out(self, tmp_path: Path) -> None:
        tokenizer = self.chatting(tmp_path / "tokenizer")
        told: list[str] = []
        long = {"data": ["1" * 20, "2"]}
        path = self.file(tmp_path, long, {"data": ["1", "2"]}, long)
        rows = read_training_text(a_config(text=path), tokenizer, told.append)
        assert rows is not None
        assert [TOKENIZER.decode(row) for row in rows.tokens] == ["?1;=2;"]
        what = "2 chats left out, whose first 12 tokens have no answer"
        assert told == [f"offline.text {path}: {what}; 1 to train on"]
        with pytest.raises(ConfigError, match=r"none of its 1 chats has an answer .* 12 tokens .*"):
            read_training_text(a_config(text=self.file(tmp_path, long)), tokenizer, print)

    @needs_qwen
    @pytest.mark.skipif(not CHAT.is_dir(), reason=f"no chats in {CHAT}")
    def test_published_chats(self) -> None:
        """564 conversations of Open Assistant and 427 single turns of Self-Instruct, by Qwen's own
        template: what is learnt is what the assistant wrote."""
        config = a_config(rollout={"max_new_tokens": 1018})  # rows of 1,024 tokens
        tokenizer = load_tokenizer(str(QWEN))
        data = dataclasses.replace(config.data, tokenizer=str(QWEN))
        for name, count, left_out in (("oasst_en100", 564, 0), ("self_instruct_427", 427, 1)):
            told: list[str] = []
            offline = dataclasses.replace(config.offline, text=f"{CHAT}:{name}.jsonl")
            given = dataclasses.replace(config, offline=offline, data=data)
            rows = read_training_text(given, tokenizer, told.append)
            assert rows is not None
            assert len(rows.tokens) == count - left_out
            lines = (CHAT / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            chats = [json.loads(line)["messages"] for line in lines]
            chats = [chat for chat in chats if len(tokenizer.encode(chat[0]["content"])) < 1010]
            short = 0
            for chat, ids, mask in zip(chats, *rows, strict=True):
                if ids[-1] == tokenizer.pad_id:
                    short += 1
                    answers = [each["content"] for each in chat if each["role"] == "assistant"]
                    written = re.sub(r"<think>\s*</think>", "", tokenizer.decode(ids[mask]))
                    assert written.split() == normalize("NFC", " ".join(answers)).split()
            parts = {
                "cut to 1024 tokens": count - left_out - short,
                "chats left out, whose first 1024 tokens have no answer": left_out,
            }
            for what, number in parts.items():
                assert (f"{number} {what}" in "".join(told)) == (number > 0)
            assert short > 0.9 * count
