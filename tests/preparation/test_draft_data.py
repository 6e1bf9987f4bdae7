"""What a draft is trained on: whose responses, which text, in which order, and the vocabulary
counted from them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxspec.config.settings import DraftConfig, EngineConfig, OfflineConfig
from jaxspec.data.arithmetic import SftBatch
from jaxspec.data.problems import load_sets
from jaxspec.host.job import Job, make_job
from jaxspec.inputs.checked import ConfigError
from jaxspec.models.decoder import Decoder
from jaxspec.preparation.draft_data import (
    Responder,
    TextRows,
    batch_rows,
    coverage,
    hold_out_batches,
    join_rows,
    make_responder,
    rows_from_sft,
    select_batch,
    select_usable_rows,
    select_vocabulary,
)
from tests.conftest import small_mesh, tiny_network, with_weights
from tests.host.training_jobs import END, TOKENIZER, a_config
from tests.twins import numpy_decoder

SEVEN = TOKENIZER.encode("7")[0]


def a_job(**changes: Any) -> Job:
    return make_job(a_config(**changes), small_mesh())


def poisoned(job: Job) -> Decoder:
    """A policy that fails where it reads a seven."""
    policy = tiny_network(Decoder, job.config.model)
    return with_weights(policy, embedding=policy.embedding[...].at[SEVEN].set(np.nan))


def some_rows(*rows: tuple[list[int], list[int]]) -> TextRows:
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
    return rows_from_sft(
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
        ours, theirs = hold_out_batches(OfflineConfig(samples=samples, rows=rows))
        assert [*ours, *theirs] == list(range(trained + held_out))
        assert (len(ours), len(theirs)) == (trained, held_out)

    def test_fewer_samples_than_two_batches_are_refused_with_numbers(self) -> None:
        with pytest.raises(ConfigError, match=r"offline.samples 64.*offline.rows 64.*at least 65"):
            OfflineConfig(samples=64, rows=64)


def responder_of(job: Job, policy: Decoder) -> Responder:
    return make_responder(job.config, job.step.generator, job.tokenizer, policy)


class TestResponder:
    def test_the_training_prompts_are_answered_once_each_as_the_policy_would(self) -> None:
        job = a_job(rollout={"temperature": 0.0, "banned": (5, 6), "min_new_tokens": 2})
        policy = tiny_network(Decoder, job.config.model, scale=2.0)
        stream = load_sets(job.config, job.tokenizer).make_stream(job.config.seed)
        respond = responder_of(job, policy)
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
            pytest.param(
                {
                    "draft": DraftConfig(draft_length="auto"),
                    "engine": EngineConfig(page_size=2, pages=52),
                },
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_a_batch_depends_on_its_number_and_is_drawn_anew_for_each(
        self, rollout: dict[str, Any]
    ) -> None:
        """Whatever lengths and pool are those of the run."""
        job = a_job(rollout=rollout)
        policy = tiny_network(Decoder, job.config.model)
        respond = responder_of(job, policy)
        first, second = respond(1), respond(2)
        again = responder_of(job, policy)(1)
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
        assert not np.array_equal(first.tokens[:, 6:], second.tokens[:, 6:])

    def test_a_response_that_failed_is_an_empty_one(self) -> None:
        """Rows whose prompt has a token with an embedding of NaN, which no response may have."""
        job = a_job(rollout={"banned": (SEVEN,)}, rows=8)
        batch = responder_of(job, poisoned(job))(0)
        hit = np.array(
            [
                SEVEN in tokens[:start]
                for tokens, start in zip(batch.tokens, batch.prompt_lengths, strict=True)
            ]
        )
        assert 0 < hit.sum() < 8
        np.testing.assert_array_equal(batch.lengths == batch.prompt_lengths, hit)
        np.testing.assert_array_equal(rows_from_sft(batch).mask.any(1), ~hit)


class TestInUse:
    ROWS = some_rows(([9, 4], []), ([9], [7, 3]), ([2, 2], [5]), ([8], []), ([6], [1, 1]))

    def test_rows_that_failed_are_left_out_and_the_others_keep_their_order(self) -> None:
        rows = select_usable_rows([self.ROWS, self.ROWS])
        np.testing.assert_array_equal(rows.tokens, self.ROWS.tokens[[1, 2, 4, 1, 2, 4]])
        np.testing.assert_array_equal(rows.mask, self.ROWS.mask[[1, 2, 4, 1, 2, 4]])

    def test_a_last_batch_is_filled_up_with_what_counts_nowhere(self) -> None:
        rows = select_usable_rows([self.ROWS])
        first, second = batch_rows(rows, 2)
        assert (first.tokens.tolist(), first.mask.tolist()) == (
            rows.tokens[:2].tolist(),
            rows.mask[:2].tolist(),
        )
        assert second.tokens[0].tolist() == rows.tokens[2].tolist()
        assert second.mask.tolist() == [rows.mask[2].tolist(), [False] * len(rows.mask[2])]
        assert second.tokens[1].tolist() in rows.tokens.tolist()
        assert [len(batch.tokens) for batch in batch_rows(rows, 7)] == [7]
        assert len(batch_rows(rows, 3)) == 1

    def test_where_all_failed_it_is_said_how_many(self) -> None:
        failed = some_rows(([9, 4], []), ([8], []))
        with pytest.raises(
            ConfigError,
            match=(
                r"all 4 responses of the policy failed \(logits that are not"
                r" finite\).*--model.dtype"
            ),
        ):
            select_usable_rows([failed, failed])


class TestBatchOf:
    def rows(self, count: int) -> TextRows:
        return some_rows(*(([place], [place, place]) for place in range(count)))

    def test_every_epoch_has_each_row_once_in_an_order_of_its_own(self) -> None:
        rows = self.rows(6)
        # six epochs
        drawn = [select_batch(rows, number, 4, seed=1).tokens[:, 0].tolist() for number in range(9)]
        epochs = np.reshape(drawn, (6, 6))
        assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 3
        assert drawn[5] == select_batch(rows, 5, 4, seed=1).tokens[:, 0].tolist()
        assert drawn != [
            select_batch(rows, number, 4, seed=2).tokens[:, 0].tolist() for number in range(9)
        ]

    def test_parts_of_a_row_stay_together(self) -> None:
        rows = some_rows(([1], [2]), ([3, 4], [5, 6, 7]), ([8], [9, 9]))
        batch = select_batch(rows, 0, 3, seed=0)
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
            Counter(select_batch(self.rows(3), 0, 7, seed=0).tokens[:, 0].tolist()).most_common()[
                -1
            ][1]
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
        ids = select_vocabulary(self.ROWS, size, 16, stops)
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
        ids = select_vocabulary(rows, 12, 50, (0,))
        assert ids.tolist() == sorted([0, *best])
        assert coverage(rows, ids) == pytest.approx(
            sum(counts[token] for token in best) / sum(counts.values())
        )

    def test_response_tokens_are_those_between_prompt_and_end(self) -> None:
        assert self.ROWS.tokens[self.ROWS.mask].tolist() == [3, 3, 3, 7, 7, 12, 7, 3, 5, 5]


def test_joined_batches_keep_all_rows_in_order() -> None:
    batches = [
        TextRows(np.full((2, 5), value, np.int32), np.full((2, 5), value == 2)) for value in (1, 2)
    ]
    whole = join_rows(batches)
    assert whole.tokens.shape == (4, 5)
    assert whole.tokens[:, 0].tolist() == [1, 1, 2, 2]
    assert whole.mask[:, 0].tolist() == [False, False, True, True]
