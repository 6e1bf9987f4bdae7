"""What a draft is trained on: whose responses, which text, in which order, and the vocabulary
counted from them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.config.settings import (
    Config,
    ConfigError,
    DataConfig,
    DraftConfig,
    EngineConfig,
    MeshConfig,
    OfflineConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.data.arithmetic import SftBatch
from jaxspec.data.problems import PromptStream, load_problems
from jaxspec.data.tokenizer import character_tokenizer, load_tokenizer
from jaxspec.host.draft_data import (
    Rows,
    answered,
    batch_of,
    coverage,
    in_batches,
    in_use,
    joined,
    responder,
    split,
    training_text,
    vocabulary,
)
from jaxspec.host.job import Job, make_job
from jaxspec.models.decoder import Decoder
from tests.conftest import small_mesh, tiny_model, tiny_network, with_weights
from tests.twins import numpy_decoder

TOKENIZER = character_tokenizer()
END = TOKENIZER.stop_ids[0]
SEVEN = TOKENIZER.encode("7")[0]


def a_config(rollout: dict[str, Any] | None = None, **offline: Any) -> Config:
    """One-digit sums, a random float32 policy, batches of 4 samples."""
    return Config(
        model=tiny_model(vocab=TOKENIZER.size, dtype="float32"),
        rollout=RolloutConfig(
            **{"max_new_tokens": 6, "draft": DraftConfig(draft_length=2), **(rollout or {})}
        ),
        data=DataConfig(digits=1, max_prompt_length=6),
        sft=SftConfig(steps=0),
        offline=OfflineConfig(**{"samples": 16, "rows": 4, **offline}),
        mesh=MeshConfig(data=1),
    )


def a_job(**changes: Any) -> Job:
    return make_job(a_config(**changes), small_mesh())


def poisoned(job: Job) -> Decoder:
    """A policy that fails where it reads a seven."""
    policy = tiny_network(Decoder, job.config.model)
    return with_weights(policy, embedding=policy.embedding[...].at[SEVEN].set(np.nan))


def some_rows(*rows: tuple[list[int], list[int]]) -> Rows:
    """Prompts and responses end to end."""
    size = max(len(prompt) + len(response) for prompt, response in rows) + 1
    tokens = np.array(
        [
            [*prompt, *response] + [0] * (size - len(prompt) - len(response))
            for prompt, response in rows
        ],
        np.int32,
    )
    starts = np.array([len(prompt) for prompt, _ in rows], np.int32)
    return answered(
        SftBatch(
            tokens, starts, starts + np.array([len(response) for _, response in rows], np.int32)
        )
    )


class TestSplit:
    @pytest.mark.parametrize(
        ("samples", "rows", "trained", "held_out"),
        [(2048, 64, 30, 2), (4096, 64, 60, 4), (100, 64, 1, 1), (8, 4, 1, 1), (65, 1, 61, 4)],
    )
    def test_the_last_sixteenth_is_held_out_and_at_least_a_batch(
        self, samples, rows, trained, held_out
    ) -> None:
        ours, theirs = split(OfflineConfig(samples=samples, rows=rows))
        assert [*ours, *theirs] == list(range(trained + held_out))
        assert (len(ours), len(theirs)) == (trained, held_out)

    def test_fewer_samples_than_two_batches_are_refused_with_numbers(self) -> None:
        with pytest.raises(ConfigError, match=r"offline.samples 64.*offline.rows 64.*at least 65"):
            OfflineConfig(samples=64, rows=64)


class TestResponder:
    def test_the_training_prompts_are_answered_once_each_as_the_policy_would(self) -> None:
        job = a_job(rollout={"temperature": 0.0, "banned": (5, 6), "min_new_tokens": 2})
        policy = tiny_network(Decoder, job.config.model, scale=2.0)
        stream = PromptStream(load_problems(job.config.data, job.tokenizer)[0], job.config.seed)
        respond = responder(job, policy)
        for number in (0, 3):
            batch = respond(number)
            for row, (tokens, start, end) in enumerate(zip(*batch, strict=True)):
                assert tuple(tokens[:start]) == stream[number * 4 + row].ids
                text = [int(token) for token in tokens[:start]]
                while len(text) < start + 6 and (len(text) == start or text[-1] != END):
                    logits = numpy_decoder(policy, text)[0][-1]
                    logits[[5, 6, *([END] if len(text) - start < 2 else [])]] = -np.inf
                    text.append(int(logits.argmax()))
                assert text == tokens[:end].tolist()

    @pytest.mark.parametrize(
        "rollout",
        [
            {},
            {
                "draft": DraftConfig(draft_length="auto"),
                "engine": EngineConfig(page_size=2, pages=52),
            },
        ],
    )
    def test_a_batch_depends_on_its_number_and_is_drawn_anew_for_each(
        self, rollout: dict[str, Any]
    ) -> None:
        """Whatever lengths and pool are those of the run."""
        job = a_job(rollout=rollout)
        policy = tiny_network(Decoder, job.config.model)
        respond = responder(job, policy)
        first, second = respond(1), respond(2)
        again = responder(job, policy)(1)
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
        assert not np.array_equal(first.tokens[:, 6:], second.tokens[:, 6:])

    def test_a_response_that_failed_is_an_empty_one(self) -> None:
        """Rows whose prompt has a token with an embedding of NaN, which no response may have."""
        job = a_job(rollout={"banned": (SEVEN,)}, rows=8)
        batch = responder(job, poisoned(job))(0)
        hit = np.array(
            [
                SEVEN in tokens[:start]
                for tokens, start in zip(batch.tokens, batch.prompt_lengths, strict=True)
            ]
        )
        assert 0 < hit.sum() < 8
        np.testing.assert_array_equal(batch.lengths == batch.prompt_lengths, hit)
        np.testing.assert_array_equal(answered(batch).mask.any(1), ~hit)


class TestInUse:
    ROWS = some_rows(([9, 4], []), ([9], [7, 3]), ([2, 2], [5]), ([8], []), ([6], [1, 1]))

    def test_rows_that_failed_are_left_out_and_the_others_keep_their_order(self) -> None:
        rows = in_use([self.ROWS, self.ROWS])
        np.testing.assert_array_equal(rows.tokens, self.ROWS.tokens[[1, 2, 4, 1, 2, 4]])
        np.testing.assert_array_equal(rows.mask, self.ROWS.mask[[1, 2, 4, 1, 2, 4]])

    def test_a_last_batch_is_filled_up_with_what_counts_nowhere(self) -> None:
        rows = in_use([self.ROWS])
        first, second = in_batches(rows, 2)
        assert (first.tokens.tolist(), first.mask.tolist()) == (
            rows.tokens[:2].tolist(),
            rows.mask[:2].tolist(),
        )
        assert second.tokens[0].tolist() == rows.tokens[2].tolist()
        assert second.mask.tolist() == [rows.mask[2].tolist(), [False] * len(rows.mask[2])]
        assert second.tokens[1].tolist() in rows.tokens.tolist()
        assert [len(batch.tokens) for batch in in_batches(rows, 7)] == [7]
        assert len(in_batches(rows, 3)) == 1

    def test_where_all_failed_it_is_said_how_many(self) -> None:
        failed = some_rows(([9, 4], []), ([8], []))
        with pytest.raises(
            ConfigError,
            match=(
                r"all 4 responses of the policy failed \(logits that are not"
                r" finite\).*--model.dtype"
            ),
        ):
            in_use([failed, failed])


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
        config = Config(
            data=DataConfig(), offline=OfflineConfig(text="generic", samples=200, rows=64)
        )
        rows = training_text(config, TOKENIZER, print)
        assert rows is not None
        texts = [TOKENIZER.decode(row[mask]) for row, mask in zip(*rows, strict=True)]
        assert len(texts) == 200
        # pages of the solution book, and other documents
        assert {text[0] == "?" for text in texts} == {True, False}
        assert training_text(Config(), TOKENIZER, print) is None

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


class TestBatchOf:
    def rows(self, count: int) -> Rows:
        return some_rows(*(([place], [place, place]) for place in range(count)))

    def test_every_epoch_has_each_row_once_in_an_order_of_its_own(self) -> None:
        rows = self.rows(6)
        # six epochs
        drawn = [batch_of(rows, number, 4, seed=1).tokens[:, 0].tolist() for number in range(9)]
        epochs = np.reshape(drawn, (6, 6))
        assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 3
        assert drawn[5] == batch_of(rows, 5, 4, seed=1).tokens[:, 0].tolist()
        assert drawn != [
            batch_of(rows, number, 4, seed=2).tokens[:, 0].tolist() for number in range(9)
        ]

    def test_parts_of_a_row_stay_together(self) -> None:
        rows = some_rows(([1], [2]), ([3, 4], [5, 6, 7]), ([8], [9, 9]))
        batch = batch_of(rows, 0, 3, seed=0)
        by_first = {
            int(tokens[0]): (tokens.tolist(), mask.tolist())
            for tokens, mask in zip(*batch, strict=True)
        }
        assert by_first == {
            int(tokens[0]): (tokens.tolist(), mask.tolist())
            for tokens, mask in zip(*rows, strict=True)
        }

    def test_few_rows_fill_a_batch_by_repeating(self) -> None:
        assert (
            Counter(batch_of(self.rows(3), 0, 7, seed=0).tokens[:, 0].tolist()).most_common()[-1][1]
            == 2
        )


class TestVocabulary:
    ROWS = some_rows(([9, 9, 9, 9], [3, 3, 3, 7, 7, 12]), ([9], [7, 3, 5, 5]))

    @pytest.mark.parametrize(
        ("size", "stops", "expected"),
        [
            # the end token never occurs, and is in; the prompts' 9 does not count
            (2, (1,), [1, 3]),
            (4, (1,), [1, 3, 5, 7]),
            (5, (1, 12), [1, 3, 5, 7, 12]),
            (8, (1,), [0, 1, 2, 3, 4, 5, 7, 12]),  # 0, 2 and 4 are the lowest that never occur
        ],
    )
    def test_the_most_frequent_response_tokens_and_the_ends(self, size, stops, expected) -> None:
        ids = vocabulary(self.ROWS, size, 16, stops)
        assert ids.tolist() == expected
        assert ids.dtype == np.int32

    def test_what_an_ordinary_count_gives(self) -> None:
        random = np.random.default_rng(0)
        rows = some_rows(
            *(
                (random.integers(0, 50, 5).tolist(), random.geometric(0.1, 40).clip(2, 49).tolist())
                for _ in range(30)
            )
        )
        counts = Counter(
            token for tokens, mask in zip(*rows, strict=True) for token in tokens[mask].tolist()
        )
        best = sorted(counts, key=lambda token: (-counts[token], token))[:11]
        ids = vocabulary(rows, 12, 50, (0,))
        assert ids.tolist() == sorted([0, *best])
        assert coverage(rows, ids) == pytest.approx(
            sum(counts[token] for token in best) / sum(counts.values())
        )

    def test_response_tokens_are_those_between_prompt_and_end(self) -> None:
        assert self.ROWS.tokens[self.ROWS.mask].tolist() == [3, 3, 3, 7, 7, 12, 7, 3, 5, 5]


def test_joined_batches_keep_all_rows_in_order() -> None:
    batches = [
        Rows(np.full((2, 5), value, np.int32), np.full((2, 5), value == 2)) for value in (1, 2)
    ]
    whole = joined(batches)
    assert whole.tokens.shape == (4, 5)
    assert whole.tokens[:, 0].tolist() == [1, 1, 2, 2]
    assert whole.mask[:, 0].tolist() == [False, False, True, True]
