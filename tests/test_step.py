"""The whole step in float64: the same numbers phase by phase, on every mesh, with and without a
draft."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.draft_temperature import DECAY, GRID
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.state import NetworkState, ScoredRollout
from jaxspec.step import Step
from tests.whole_step import (
    GROUP,
    LENGTH,
    MODEL,
    NEW,
    POISON,
    PROMPTS,
    ROWS,
    STOP,
    TWO_UPDATES,
    assert_bitwise,
    assert_close,
    assert_same_rollout,
    drive,
    finish,
    host,
    moved,
    nothing_finished,
    place,
    poisoned,
    program,
    prompts_of,
    score,
    start,
    twenty,
    with_a_failed_row,
)

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="coupled"),
        pytest.param({"verify": "token", "temperature": 0.7}, id="token"),
    ],
)
def test_one_program_equals_its_phases_one_by_one(options: dict[str, Any]) -> None:
    made = program(**options)
    step = made.step
    learn, sync = jax.jit(step.learn), jax.jit(step.sync)
    begin, advance = jax.jit(step.generator.begin), jax.jit(step.generator.advance)
    whole = drive(made, 3)
    state, finished = start(step), None
    for batch in range(3):
        if finished is not None:
            state, learnt = learn(state, finished)
            for name, value in metrics_to_host(learnt).items():
                wanted = pytest.approx(whole.learnt[batch][name], rel=1e-11, abs=1e-12)
                assert float(value) == wanted, name
        ready = sync(state)
        running = begin(ready, prompts_of(step, batch))
        for _ in range(NEW):
            running = advance(ready, running, jnp.int32(1))
        rollout = step.generator.collect(ready, running)
        assert_same_rollout(rollout, whole.rollouts[batch])
        assert_close(host(state), whole.states[batch], 1e-12)
        finished = score(step, rollout, batch)
    # also at another temperature
    assert max(learnt["rollout/logprob_gap_max"] for learnt in whole.learnt[1:]) < 1e-9
    assert moved(whole.states[2].learner.policy.network, whole.states[0].learner.policy.network)


MESHES = [
    (4, 2, 0),  # the mesh of test_step_loop, so that one finds the compiled program of the other
    *(
        pytest.param(*shape, marks=pytest.mark.sweep)
        for shape in [(8, 1, 0), (2, 4, 0), (8, 1, 2**20), (4, 2, 2**20), (2, 4, 2**20), (1, 1, 0)]
    ),
]


@pytest.mark.parametrize(("data", "tensor", "shard_above"), MESHES)
def test_every_mesh_gives_the_same_tokens_rewards_and_parameters(
    data: int, tensor: int, shard_above: int
) -> None:
    spread = drive(program(data, tensor, shard_above=shard_above), 4)
    for batch in range(4):
        one = twenty(True)
        assert_same_rollout(spread.rollouts[batch], one.rollouts[batch])
        np.testing.assert_array_equal(spread.rewards[batch], one.rewards[batch])
        assert_close(spread.states[batch], one.states[batch], 1e-9)
    assert moved(spread.states[3].learner.policy.network, spread.states[0].learner.policy.network)


def test_twenty_steps_are_one_trace_and_one_compile() -> None:
    made = program()
    runs = [twenty(online) for online in (True, False)]
    assert made.traces == [0]
    assert made.call._cache_size() == 1
    # the data did change
    assert len({run.rollouts[batch].tokens.tobytes() for run in runs for batch in range(20)}) == 20


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one update"),
        pytest.param(TWO_UPDATES, id="two updates", marks=pytest.mark.sweep),
    ],
)
def test_the_draft_never_touches_the_policy_over_twenty_steps(options: dict[str, Any]) -> None:
    online, frozen = twenty(True, **options), twenty(False, **options)
    plain = drive(program(kind="none", **options), 20)
    for batch in range(20):
        assert_bitwise(online.states[batch].learner.policy, frozen.states[batch].learner.policy)
        assert_bitwise(frozen.states[batch].learner.draft, frozen.states[0].learner.draft)
        np.testing.assert_array_equal(online.rollouts[batch].tokens, frozen.rollouts[batch].tokens)
        np.testing.assert_array_equal(online.rollouts[batch].tokens, plain.rollouts[batch].tokens)
        np.testing.assert_array_equal(online.rewards[batch], plain.rewards[batch])
        assert_close(
            plain.states[batch].learner.policy.network,
            online.states[batch].learner.policy.network,
            1e-9,
        )
        assert "loss/draft" not in frozen.learnt[batch]
        # the first call learns nothing
        for name in ("loss/policy", "grad_norm/policy", "entropy") if batch else ():
            wanted = online.learnt[batch][name]
            assert plain.learnt[batch][name] == pytest.approx(wanted, rel=1e-9)
    assert moved(online.states[19].learner.policy.network, online.states[0].learner.policy.network)
    assert moved(online.states[19].learner.draft.network, online.states[0].learner.draft.network)
    # The learner's own logprobs are those that the verify pass recorded.
    assert 0 < max(learnt["rollout/logprob_gap_max"] for learnt in online.learnt[1:]) < 1e-9
    assert max(learnt["learner/micro_batches"] for learnt in online.learnt[1:]) >= 3, (
        "several micro-batches, each of several texts"
    )
    losses = [learnt["loss/draft"] for learnt in online.learnt[1:]]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.mark.slow
def test_the_policy_update_is_bitwise_the_same_with_and_without_draft_training() -> None:
    """For the same rollouts, under the token rule, where a different draft would give different
    rollouts later."""
    made = program(verify="token", temperature=0.7)
    run = drive(made, 2)
    finished, prompts = score(made.step, run.rollouts[0]), prompts_of(made.step, 1)
    states = [
        host(made.call(start(made.step, online), finished, prompts)[0]) for online in (True, False)
    ]
    assert_bitwise(states[0].learner.policy, states[1].learner.policy)
    assert moved(states[0].learner.draft.network, states[1].learner.draft.network)
    assert moved(states[0].learner.policy.network, host(start(made.step)).learner.policy.network)


@pytest.mark.slow
def test_a_draft_that_learns_from_every_second_batch_rests_between() -> None:
    """The first call learns nothing; batches 0, 1, 2, ... are learnt from after it."""
    run = drive(program(every=2), 6)
    moves = [
        moved(later.learner.draft, earlier.learner.draft)
        for earlier, later in itertools.pairwise(run.states)
    ]
    assert moves == [True, False, True, False, True]
    assert ["loss/draft" in learnt for learnt in run.learnt] == [False, *moves]
    assert all(bool(state.learner.online) for state in run.states)
    for batch in range(6):
        found, wanted = (each.states[batch].learner.policy for each in (run, twenty(True)))
        assert_close(found, wanted, 1e-9)


def test_every_call_has_noise_of_its_own() -> None:
    step = program().step
    like = prompts_of(step, 0)
    keys = [
        step.generator.call_key(like.replace(stream=jnp.int32(stream), batch=jnp.int32(batch)))
        for stream, batch in itertools.product(range(3), range(3))
    ]
    assert len({np.asarray(jax.random.key_data(key)).tobytes() for key in keys}) == 9


def test_nothing_to_learn_leaves_the_state_untouched() -> None:
    made = program()
    state, run = start(made.step), twenty(True)
    before = host(state)
    finished = score(made.step, run.rollouts[0]).replace(learn=place(made.step, np.asarray(False)))
    after, rollout, learnt, generated = made.call(state, finished, prompts_of(made.step, 0))
    assert_bitwise(host(after), before)
    np.testing.assert_array_equal(rollout.tokens, run.rollouts[0].tokens)
    assert "loss/policy" not in metrics_to_host(learnt)
    assert (
        float(generated["rollout/tokens"])
        == (run.rollouts[0].lengths - run.rollouts[0].prompt_lengths).sum()
    )


def with_reward(scored: Any, step: Step, row: int, reward: float, valid: bool) -> ScoredRollout:
    rewards, mask = np.array(scored.rewards), np.array(scored.valid)
    rewards[row], mask[row] = reward, valid
    return finish(step, host(scored.rollout), rewards, mask)


def test_a_non_finite_loss_skips_the_update_and_counts() -> None:
    made = program()
    step, run = made.step, twenty(True)
    good = score(step, run.rollouts[0])
    bad = with_reward(good, step, 3, np.nan, True)
    state = start(step)
    wanted = host(state.learner.policy)
    for times in (1, 2):
        state, _, learnt, _ = made.call(state, bad, prompts_of(step, 1))
        policy = host(state.learner.policy)
        assert_bitwise((policy.network, policy.optimizer), (wanted.network, wanted.optimizer))
        assert (policy.skipped, policy.skipped_in_row) == (times, times)
        metrics = metrics_to_host(learnt)
        assert (metrics["skipped/policy"], metrics["skipped_in_row/policy"]) == (times, times)
        assert np.isnan(metrics["loss/policy"])
        assert int(state.learner.draft.skipped) == 0
    # The draft learns from the weights that sampled, so it does not notice whether the policy's
    # update went through.
    assert_bitwise(
        *(
            host(made.call(start(step), finished, prompts_of(step, 1))[0].learner.draft)
            for finished in (bad, good)
        )
    )
    state, _, learnt, _ = made.call(state, good, prompts_of(step, 1))
    assert (int(state.learner.policy.skipped), int(state.learner.policy.skipped_in_row)) == (2, 0)
    assert moved(host(state.learner.policy.network), wanted.network)
    assert np.isfinite(metrics_to_host(learnt)["loss/policy"])
    # a batch of nothing to learn has no metrics, counts among them
    assert metrics_to_host(made.call(state, nothing_finished(step), prompts_of(step, 1))[2]) == {}


def test_a_broken_draft_is_skipped_and_changes_nothing_for_the_policy() -> None:
    made = program()
    step, run = made.step, twenty(True)
    state = start(step)
    assert isinstance(state.learner.draft, NetworkState)
    broken = state.learner.draft.replace(
        network=jax.tree.map(lambda leaf: leaf * jnp.nan, state.learner.draft.network)
    )
    after, rollout, learnt, _ = made.call(
        state.replace(learner=state.learner.replace(draft=broken)),
        score(step, run.rollouts[0]),
        prompts_of(step, 1),
    )
    assert_bitwise(host(after.learner.policy), run.states[1].learner.policy)
    np.testing.assert_array_equal(rollout.tokens, run.rollouts[1].tokens)
    assert int(after.learner.draft.skipped) == metrics_to_host(learnt)["skipped_in_row/draft"] == 1


def test_rows_without_a_reward_have_no_influence() -> None:
    made = program()
    step, run = made.step, twenty(True)
    row, rollout = 5, run.rollouts[0]
    tokens, lengths = rollout.tokens.copy(), rollout.lengths.copy()
    tokens[row], lengths[row] = (tokens[row] + 1) % MODEL.vocab, rollout.prompt_lengths[row] + 1
    assert lengths[row] != rollout.lengths[row]
    other_text = score(step, rollout.replace(tokens=tokens, lengths=lengths))
    same_text = score(step, rollout)
    states = []
    for finished, reward, valid in (
        (same_text, 0.25, False),
        (same_text, 1e6, False),
        (same_text, np.nan, False),
        (other_text, 0.25, False),
        (same_text, 0.25, True),
    ):
        state, *_ = made.call(
            start(step), with_reward(finished, step, row, reward, valid), prompts_of(step, 1)
        )
        states.append(host(state))
    for state in states[1:4]:
        assert_bitwise(state, states[0])
    assert moved(states[4].learner.policy, states[0].learner.policy)
    assert moved(states[4].learner.draft, states[0].learner.draft)


@pytest.mark.parametrize(("data", "tensor", "options"), [(1, 1, {}), (4, 2, {"shard_above": 0})])
def test_a_failed_row_that_overflows_changes_nothing(
    data: int, tensor: int, options: dict[str, Any]
) -> None:
    """Policy, draft and all metrics of learning are those of a batch in which the row says
    something harmless."""
    made = program(data, tensor, **options)
    step, rollout = made.step, twenty(True).rollouts[0]
    state, *_ = made.call(
        poisoned(start(step)), with_a_failed_row(step, rollout, POISON), prompts_of(step, 1)
    )
    other, _, learnt, _ = made.call(
        poisoned(start(step)), with_a_failed_row(step, rollout, POISON + 1), prompts_of(step, 1)
    )
    assert_bitwise(host(state), host(other))
    assert isinstance(state.learner.draft, NetworkState)
    assert (int(state.learner.policy.skipped), int(state.learner.draft.skipped)) == (0, 0)
    assert moved(
        host(state.learner.policy.network.layers), host(start(step)).learner.policy.network.layers
    )
    assert moved(host(state.learner.draft.network), host(start(step)).learner.draft.network)
    assert metrics_to_host(learnt)["grad_norm/policy"] > 1e-3


def test_where_no_row_has_a_reward_nothing_is_updated_and_it_counts_as_skipped() -> None:
    made = program()
    step, run = made.step, twenty(True)
    good = score(step, run.rollouts[0])
    nothing = finish(step, host(good.rollout), np.asarray(good.rewards), np.zeros(ROWS, bool))
    # with momentum, which alone would move weights
    trained = made.call(start(step), good, prompts_of(step, 1))[0]
    before = host(trained)
    after, _, learnt, _ = made.call(trained, nothing, prompts_of(step, 1))
    for name in ("policy", "draft"):
        found, wanted = host(getattr(after.learner, name)), getattr(before.learner, name)
        assert_bitwise((found.network, found.optimizer), (wanted.network, wanted.optimizer))
        assert (int(found.skipped), int(found.skipped_in_row)) == (1, 1)
        assert f"loss/{name}" not in metrics_to_host(learnt)


@pytest.mark.slow
def test_auto_drafts_at_the_temperatures_that_its_own_rollouts_found_best() -> None:
    """What each batch measured, decayed and added up in numpy, says at which temperature each depth
    of the next batch is drafted."""
    made = program(sampling="auto", data=2)
    step, sums = made.step, np.zeros((LENGTH, len(GRID)))
    state, finished = start(step), nothing_finished(step)
    chosen = []
    for batch in range(5):
        state, rollout, _, generated = made.call(state, finished, prompts_of(step, batch))
        best = [GRID[place] for place in sums.argmax(-1)] if batch else [1.0] * LENGTH
        assert [
            float(generated[f"rollout/draft_temperature_{depth}"]) for depth in range(1, LENGTH + 1)
        ] == pytest.approx(best)
        chosen.append(best)
        statistics = host(rollout).statistics
        by_factor, first = statistics.overlap_by_factor, slice(None, None, GROUP)
        assert by_factor.shape == (PROMPTS, LENGTH, len(GRID))
        at_chosen = by_factor[:, np.arange(LENGTH), [GRID.index(factor) for factor in best]]
        np.testing.assert_allclose(at_chosen, statistics.overlap[first], rtol=0, atol=1e-10)
        np.testing.assert_allclose(state.generator.overlap_by_factor, sums, rtol=1e-5)
        sums = DECAY * sums + by_factor.sum(0)
        finished = score(step, rollout, batch)
    assert len(set(map(tuple, chosen))) > 1, "a grid on which nothing ever changes tests nothing"


def test_metrics_are_those_of_the_rollout() -> None:
    made = program()
    given = start(made.step), nothing_finished(made.step), prompts_of(made.step, 0)
    _, rollout, _, generated = made.call(*given)
    rows = host(rollout)
    assert_bitwise(rows.tokens, twenty(True).rollouts[0].tokens)
    counts = rows.statistics
    lengths = rows.lengths - rows.prompt_lengths
    ended = rows.tokens[np.arange(ROWS), rows.lengths - 1] == STOP[0]
    assert 0 < ended.sum() < ROWS, "some rows end by themselves, others at the limit"
    tokens, rounds = lengths.sum(), counts.rounds.sum()
    assert counts.draft_rounds[:, 0].sum() == rounds, "EAGLE-3 always has a draft"
    assert (counts.quarter_tokens.sum(), counts.quarter_rounds.sum()) == (tokens, rounds)
    total = counts.quarter_rounds.sum(0)
    by_depth = {
        "acceptance_rate": counts.accepted.sum(0) / rounds,
        "conditional_rate": counts.accepted.sum(0) / counts.reached.sum(0),
        "expected_acceptance": counts.overlap.sum(0) / counts.reached.sum(0),
        "draft_entropy": counts.draft_entropy.sum(0) / counts.reached.sum(0),
        "draft_temperature": np.ones(LENGTH),
        "acceptance_length_quarter": counts.quarter_tokens.sum(0) / np.maximum(total, 1),
    }
    expected = {
        "rollout/tokens": tokens,
        "rollout/rounds": rounds / ROWS,
        "rollout/length_mean": tokens / ROWS,
        "rollout/length_min": lengths.min(),
        "rollout/length_max": lengths.max(),
        "rollout/length_ended": lengths[ended].mean(),
        "rollout/prompt_length": rows.prompt_lengths.mean(),
        "rollout/tokens_per_target_pass": tokens / rounds,
        "rollout/acceptance_length": tokens / rounds,
        "rollout/acceptance_rate": counts.accepted.sum() / (rounds * LENGTH),
        "rollout/coverage": 1,
        "rollout/target_entropy": counts.target_entropy.sum() / tokens,
        **{
            f"rollout/{name}_{depth}": value
            for name, values in by_depth.items()
            for depth, value in enumerate(values, 1)
        },
        "status/eos": ended.sum(),
        "status/length": (~ended).sum(),
        "status/failed": 0,
    }
    for quarter in np.flatnonzero(total == 0) + 1:
        del expected[f"rollout/acceptance_length_quarter_{quarter}"]
    assert metrics_to_host(generated) == pytest.approx(expected)
