"""Prompts to devices and rewards back, on a mesh of eight devices."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    LookupConfig,
    MeshConfig,
    OverlongConfig,
    ResolvedConfig,
    RolloutConfig,
)
from jaxspec.data.problem_source import Problem, Problems
from jaxspec.data.problems import load_problems, load_sets
from jaxspec.host.job import Job, make_job
from jaxspec.host.scoring import ScoringResult, outcome_metric
from jaxspec.inputs.spec import ModelSpec
from jaxspec.rewards.outcome import Outcome, Scores
from jaxspec.rewards.scorer import PendingScores, RewardInputs, Scorer, SetScorers
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import EOS, FAILED, LENGTH, RUNNING, Prompts, Rollout
from tests.conftest import small_mesh
from tests.host.batches import Batches, batches_of

PROMPTS, GROUP, NEW = 8, 2, 12
CONFIG = ResolvedConfig(
    model=ModelSpec(vocab=24, layers=4, embed=8, heads=2, kv_heads=2, head_size=4, ffn=8),
    rollout=RolloutConfig(max_new_tokens=NEW),
    batch=BatchConfig(prompts=PROMPTS, group_size=GROUP),
    data=DataConfig(digits=2, eval_prompts=10),
    mesh=MeshConfig(tensor=2),
)


@pytest.fixture
def job() -> Job:
    return make_job(CONFIG, small_mesh(4, 2))


@pytest.fixture
def batches(job: Job) -> Batches:
    return batches_of(job, load_sets(CONFIG, job.tokenizer))


def answered(job: Job, batches: Batches, responses: list[str], status: list[int]) -> Rollout:
    """A rollout of the first training batch in which row i says `responses[i]`."""
    prompts = batches.source.place_training(0)
    like = job.step.empty_scored_rollout(PROMPTS * GROUP).rollout
    tokens = np.zeros(like.tokens.shape, np.int32)
    starts = np.repeat(np.asarray(prompts.lengths), GROUP)
    ends = []
    for row, response in enumerate(responses):
        ids = [
            *np.asarray(prompts.tokens)[row // GROUP, : starts[row]],
            *job.tokenizer.encode(response),
            job.tokenizer.stop_ids[0],
        ]
        tokens[row, : len(ids)] = ids
        ends.append(len(ids))
    return dataclasses.replace(
        like,
        tokens=jnp.asarray(tokens),
        prompt_lengths=jnp.asarray(starts, jnp.int32),
        lengths=jnp.asarray(ends, jnp.int32),
        status=jnp.asarray(status, jnp.int32),
    )


def questions(job: Job, prompts: Prompts) -> list[str]:
    rows = zip(
        np.asarray(prompts.tokens),
        np.asarray(prompts.lengths),
        np.asarray(prompts.live),
        strict=True,
    )
    return [job.tokenizer.decode(row[:length]) for row, length, live in rows if live]


def test_right_answers_pay_and_failed_rows_have_no_reward(job: Job, batches: Batches) -> None:
    sums = [
        sum(map(int, text.rstrip("=").split("+")))
        for text in questions(job, batches.source.place_training(0))
    ]
    responses = [f"#{total}" if row == 0 else "no #" for total in sums for row in range(GROUP)]
    responses[1] = "12"  # no mark: no answer
    status = [EOS] * len(responses)
    status[2] = FAILED  # would have been right
    scored = batches.scorer.score_training(0, answered(job, batches, responses, status))
    wanted = np.array([response.startswith("#") for response in responses], np.float32)
    wanted[2] = 0
    # the second group has one row with a reward, so no difference
    assert scored.differing_groups.tolist() == [True, False, *[True] * 6]
    np.testing.assert_array_equal(scored.scored.rewards, wanted)
    np.testing.assert_array_equal(scored.scored.valid, np.array(status) != FAILED)
    assert scored.metrics["reward/mean"] == pytest.approx(7 / 15)
    assert scored.metrics["reward/std"] == pytest.approx((7 / 15 * 8 / 15) ** 0.5)
    assert scored.metrics["reward/correct"] == pytest.approx(7 / 15)
    assert sum(shares(scored)) == pytest.approx(1)
    assert bool(batches.planner.plan(scored.scored).learn)


def shares(scored: ScoringResult) -> list[float]:
    """Shares of the outcomes."""
    return [scored.metrics[outcome_metric(outcome)] for outcome in Outcome]


class Fails(Scorer):
    """It knows nothing of some rows."""

    def __init__(self, rows: set[int]) -> None:
        super().__init__()
        self._unknown = rows

    def collect_scores(self, pending: PendingScores) -> Scores:
        known = np.array([row not in self._unknown for row in range(len(pending.rows.responses))])
        outcomes = np.where(known, Outcome.CORRECT, Outcome.ERROR).astype(np.int8)
        return Scores(known.astype(np.float32), outcomes, known, "asked to" * (not known.all()))


def test_rows_that_nothing_is_known_of_are_left_out_and_counted(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are no zeros, and too many of them end the run."""
    sets = load_sets(CONFIG, job.tokenizer)
    responses, status = ["#1"] * PROMPTS * GROUP, [EOS] * PROMPTS * GROUP
    batches = batches_of(job, sets, SetScorers((Fails({3}),)))
    scored = batches.scorer.score_training(0, answered(job, batches, responses, status))
    valid = np.arange(len(responses)) != 3
    np.testing.assert_array_equal(scored.scored.valid, valid)
    np.testing.assert_array_equal(scored.scored.rewards, valid.astype(np.float32))
    assert scored.metrics["reward/mean"] == 1
    assert scored.metrics["reward/error"] == pytest.approx(1 / 16)
    assert sum(shares(scored)) == pytest.approx(1)
    assert (
        "reward is known of 1 of 16 responses, which are left out: asked to"
        in capsys.readouterr().out
    )
    batches = batches_of(job, sets, SetScorers((Fails({3, 4}),)))
    with pytest.raises(Diverged, match=r"2 of 16 responses, and .* is 0\.1: asked to"):
        batches.scorer.score_training(0, answered(job, batches, responses, status))


class Watched(Scorer):
    """It notes what it begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.has_workers = True
        self.begun: list[Sequence[str]] = []

    def submit_rows(self, rows: RewardInputs) -> PendingScores:
        self.begun.append(rows.responses)
        return super().submit_rows(rows)


def test_rows_that_ended_are_judged_while_others_still_generate(job: Job) -> None:
    """Each once, and the scores are those of judging all at the end."""
    sets = load_sets(CONFIG, job.tokenizer)
    sums = [
        sum(map(int, text.rstrip("=").split("+")))
        for text in questions(job, batches_of(job, sets).source.place_training(0))
    ]
    responses = [f"#{total + row % 2}" for row, total in enumerate(np.repeat(sums, GROUP).tolist())]
    status = [EOS] * len(responses)
    whole = batches_of(job, sets)
    wanted = whole.scorer.score_training(0, answered(job, whole, responses, status))
    scorer = Watched()
    batches = batches_of(job, sets, SetScorers((scorer,)))
    for running in ({0, 2, 5, 15}, {0, 2, 5, 15}, {5}):
        now = [RUNNING if row in running else EOS for row in range(len(responses))]
        batches.scorer.begin_scoring(0, answered(job, batches, responses, now))
    scored = batches.scorer.score_training(0, answered(job, batches, responses, status))
    early = [row for row in range(len(responses)) if row not in (0, 2, 5, 15)]
    assert scorer.begun == [[responses[row] for row in rows] for rows in (early, [0, 2, 15], [5])]
    np.testing.assert_array_equal(scored.scored.rewards, wanted.scored.rewards)
    assert scored.metrics == wanted.metrics
    assert scored.samples == wanted.samples
    again = batches.scorer.score_training(0, answered(job, batches, responses, status))
    assert len(scorer.begun[-1]) == len(responses), "the next rollout begins anew"
    assert again.metrics == wanted.metrics


def test_long_answers_lose_reward_and_cut_ones_are_not_read(job: Job) -> None:
    """Of 12 tokens the last half costs: 8 and an end token lose half; an answer that was cut is
    scored, and so is in its group's baseline, but read by nobody."""
    config = dataclasses.replace(CONFIG, overlong=OverlongConfig(filter=True, buffer=0.5))
    job = make_job(config, small_mesh(4, 2))
    batches = batches_of(job, load_sets(CONFIG, job.tokenizer))
    responses = ["1"] * PROMPTS * GROUP
    responses[3], responses[5] = "1" * 8, "1" * 11
    status = [EOS] * len(responses)
    status[5] = LENGTH
    rollout = answered(job, batches, responses, status)
    scored = batches.scorer.score_training(0, rollout)
    wanted = np.zeros(len(responses))
    wanted[[3, 5]] = [-0.5, -1]
    np.testing.assert_allclose(scored.scored.rewards, wanted, atol=1e-6)
    assert scored.metrics["reward/mean"] == 0
    assert scored.metrics["reward/overlong"] == pytest.approx(-1.5 / 16)
    assert np.asarray(scored.scored.valid).all()
    plan = batches.planner.plan(scored.scored).plan
    read = np.asarray(plan.row_order)[(np.asarray(plan.micro_batch) >= 0).any(0)]
    assert sorted(read.tolist()) == [row for row in range(len(responses)) if row != 5]


def test_groups_are_compared_before_the_length_penalty(job: Job) -> None:
    """Two wrong answers of different lengths say nothing of the problem."""
    config = dataclasses.replace(CONFIG, overlong=OverlongConfig(buffer=0.5))
    job = make_job(config, small_mesh(4, 2))
    batches = batches_of(job, load_sets(CONFIG, job.tokenizer))
    responses = ["1"] * PROMPTS * GROUP
    responses[3] = "1" * 8
    scored = batches.scorer.score_training(
        0, answered(job, batches, responses, [EOS] * len(responses))
    )
    assert np.asarray(scored.scored.rewards)[3] < 0
    assert not scored.differing_groups.any()


def test_a_batch_of_cut_answers_alone_is_passed_over(job: Job) -> None:
    config = dataclasses.replace(CONFIG, overlong=OverlongConfig(filter=True))
    job = make_job(config, small_mesh(4, 2))
    batches = batches_of(job, load_sets(CONFIG, job.tokenizer))
    responses = ["1"] * PROMPTS * GROUP
    for status, learn in (([LENGTH] * len(responses), False), ([FAILED] * len(responses), True)):
        # where all failed, an update is skipped and counted
        scored = batches.scorer.score_training(0, answered(job, batches, responses, status))
        assert bool(batches.planner.plan(scored.scored).learn) == learn


def test_a_mini_batch_has_whole_groups(job: Job) -> None:
    config = dataclasses.replace(CONFIG, batch=dataclasses.replace(CONFIG.batch, mini_batches=4))
    job = make_job(config, small_mesh(4, 2))
    batches = batches_of(job, load_sets(CONFIG, job.tokenizer))
    rollout = answered(job, batches, ["1"] * PROMPTS * GROUP, [EOS] * PROMPTS * GROUP)
    plan = batches.planner.plan(batches.scorer.score_training(0, rollout).scored).plan
    order, micro = np.asarray(plan.row_order), np.asarray(plan.micro_batch)
    assert micro.shape == (4, PROMPTS * GROUP)
    for number in range(4):
        assert sorted(order[micro[number] >= 0].tolist()) == list(range(4 * number, 4 * number + 4))


def test_where_every_row_failed_there_is_no_reward_rather_than_one_of_zero(
    job: Job, batches: Batches
) -> None:
    scored = batches.scorer.score_training(
        0, answered(job, batches, ["#1"] * PROMPTS * GROUP, [FAILED] * PROMPTS * GROUP)
    )
    assert [*scored.metrics] == ["reward/frac_zero_std"]
    assert not np.asarray(scored.scored.valid).any()


def test_batches_differ_and_repeat(job: Job, batches: Batches) -> None:
    again = batches_of(job, load_sets(CONFIG, job.tokenizer))
    first, second = batches.source.place_training(0), batches.source.place_training(1)
    np.testing.assert_array_equal(first.tokens, again.source.place_training(0).tokens)
    assert (np.asarray(first.tokens) != np.asarray(second.tokens)).any()
    assert (int(first.stream), int(first.batch), int(second.batch)) == (0, 0, 1)


def test_an_evaluation_asks_what_it_is_given(job: Job, batches: Batches) -> None:
    _, held_out = load_problems(CONFIG.data, job.tokenizer)
    chosen = {place: held_out[8 + place] for place in range(2)}
    prompts = batches.source.place_evaluation(chosen, 3)
    assert (int(prompts.stream), int(prompts.batch)) == (1, 3)
    assert np.asarray(prompts.live).tolist() == [True] * 2 + [False] * 6
    assert questions(job, prompts) == [job.tokenizer.decode(held_out[i].ids) for i in (8, 9)]
    assert not np.asarray(batches.source.place_padding(3).live).any()


def test_a_problem_brings_its_last_answers_along(job: Job) -> None:
    """Batch 0 asked again, as in a next epoch: prompt and the first answers of its group; other
    problems and held-out ones bring none."""
    rollout = dataclasses.replace(
        CONFIG.rollout, draft=DraftConfig(kind="history"), lookup=LookupConfig(past=GROUP)
    )
    job = make_job(dataclasses.replace(CONFIG, rollout=rollout), small_mesh(4, 2))
    batches = batches_of(job, load_sets(CONFIG, job.tokenizer))
    before = batches.source.place_training(0)
    assert not np.asarray(before.history_lengths).any()
    responses = [f"#{row}" for row in range(PROMPTS * GROUP)]
    answers = answered(job, batches, responses, [EOS] * len(responses))
    batches.scorer.score_training(0, answers)
    again = batches.source.place_training(0)
    lengths = np.asarray(again.history_lengths)
    np.testing.assert_array_equal(lengths, np.asarray(answers.lengths).reshape(PROMPTS, GROUP))
    texts = np.asarray(again.history)
    for place in range(PROMPTS):
        for member in range(GROUP):
            length = lengths[place, member]
            np.testing.assert_array_equal(
                texts[place, member, :length],
                np.asarray(answers.tokens)[place * GROUP + member, :length],
            )
    assert not np.asarray(batches.source.place_training(1).history_lengths).any()
    assert not np.asarray(
        batches.source.place_evaluation({0: batches.source.sets.training[0][0]}, 0).history_lengths
    ).any()
    resumed = batches_of(job, load_sets(CONFIG, job.tokenizer))
    resumed.source.history.restore_answers(
        batches.source.history.owners, [batches.source.history.encode_answers()]
    )
    np.testing.assert_array_equal(resumed.source.place_training(0).history, texts)


class Few(Problems):
    """The first three of some problems."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Problem:
        return self._problems[index]


def test_a_problem_that_a_batch_asks_twice_brings_the_answers_of_its_last_place() -> None:
    rollout = dataclasses.replace(
        CONFIG.rollout, draft=DraftConfig(kind="history"), lookup=LookupConfig(past=GROUP)
    )
    job = make_job(dataclasses.replace(CONFIG, rollout=rollout), small_mesh(4, 2))
    sets = load_sets(CONFIG, job.tokenizer)
    batches = batches_of(job, sets._replace(training=(Few(sets.training[0]),)))
    asked = questions(job, batches.source.place_training(0))
    assert len({*asked}) == 3
    last = {question: place for place, question in enumerate(asked)}
    responses = [f"#{row}" for row in range(PROMPTS * GROUP)]
    batches.scorer.score_training(0, answered(job, batches, responses, [EOS] * len(responses)))
    after = batches.source.place_training(1)
    for place, question in enumerate(questions(job, after)):
        for member in range(GROUP):
            length = int(after.history_lengths[place, member])
            text = job.tokenizer.decode(np.asarray(after.history)[place, member, : length - 1])
            assert text == f"{question}#{last[question] * GROUP + member}"
