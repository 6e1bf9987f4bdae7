"""Draft lengths on accelerators: the first rollout times its own rounds, and the choice is right
soon, whatever costs it began with."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
    RolloutConfig,
)
from jaxspec.host import round_cost
from jaxspec.host.programs import compile_for_generator
from jaxspec.host.round_cost import predict_chooser
from jaxspec.inputs.streams import Stream
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.feedback.cost_table import TIMINGS_PER_COST, TimedCosts
from jaxspec.rollout.generator import Generator
from jaxspec.run import round_timer
from jaxspec.run.round_timer import TIMED_ROUNDS, RoundTimer
from jaxspec.run.schedules import (
    StepSchedule,
    compile_staged_schedule,
    compile_timing_schedule,
    uniform_slices,
)
from jaxspec.state import EOS, RUNNING, LengthChooser, Prompts, RolloutWeights, TrainState
from jaxspec.step import Step
from jaxspec.storage.tables import load_table
from tests.conftest import (
    eagle3,
    no_history,
    small_mesh,
    tiny_config,
    tiny_model,
    tiny_network,
    tiny_prompts,
)
from tests.whole_step import load_weights, nothing_finished, place

MODEL = tiny_model(vocab=16, dtype="float32")
PROMPTS, GROUP, WIDTH, LONG, SHORT = 4, 2, 5, 300, 48
SOON = 30
"""Rounds within which the choice is to be right."""
OVERHEAD = 0.5
"""Seconds that a call takes by itself, on the false clock."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    return tmp_path / "costs"


def step_of(new: int, seed: int = 0, shards: int = 1) -> Step:
    """Rows that end by length alone; the draft of long ones is a model like the policy."""
    config = tiny_config(
        MODEL,
        rollout=RolloutConfig(
            max_new_tokens=new,
            verify="coupled",
            draft=DraftConfig(kind="model" if new == LONG else "eagle3", draft_length="auto"),
            engine=EngineConfig(tail=False),
        ),
        batch=BatchConfig(prompts=PROMPTS, group_size=GROUP),
        data=DataConfig(max_prompt_length=WIDTH),
        draft_model=MODEL if new == LONG else None,
        seed=seed,
    )
    return build_step(config, small_mesh(shards), (), MODEL.vocab)


def planted(ready: RolloutWeights, table: np.ndarray) -> RolloutWeights:
    chooser = ready.drafter.chooser
    assert isinstance(chooser, LengthChooser)
    chooser = chooser.replace(round_cost=jnp.asarray(table, jnp.float32))
    return ready.replace(drafter=ready.drafter.replace(chooser=chooser))


class Engine(NamedTuple):
    generator: Generator
    begin: Callable[..., DecodeState]
    advance: Callable[..., DecodeState]
    prompts: Prompts


@functools.cache
def engine() -> Engine:
    """The programs of generation, whose drafts are kept or not as the weights are alike."""
    generator, prompts = step_of(LONG).generator, tiny_prompts(PROMPTS, WIDTH, MODEL.vocab)
    ready = weights(generator, alike=True)
    begin, running = compile_for_generator(generator, generator.begin, ready, prompts)
    same = jax.tree.map(lambda leaf: leaf.sharding, running)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    advance, _ = compile_for_generator(
        generator, generator.advance, ready, running, rounds, out_shardings=same
    )
    return Engine(generator, begin, advance, prompts)


def weights(generator: Generator, alike: bool) -> RolloutWeights:
    policy = tiny_network(Decoder, MODEL, 1, scale=3.0)
    draft = tiny_network(Decoder, MODEL, 1 if alike else 2, scale=3.0)
    ready = load_weights(generator, policy, draft)
    chooser = predict_chooser(generator, ready)
    return ready.replace(drafter=ready.drafter.replace(chooser=chooser))


def made(running: DecodeState, lengths: tuple[int, ...]) -> np.ndarray:
    """Rounds of each length so far, by a row that is still running."""
    statistics = jax.tree.map(np.asarray, running.rollout.statistics)
    row = int(np.argmax(np.asarray(running.rollout.status) == RUNNING))
    drafted = [
        statistics.draft_rounds[row, length - 1] if length else statistics.rounds[row]
        for length in lengths
    ]
    return np.asarray(drafted) - np.asarray([*drafted[1:], 0])


class Seen(NamedTuple):
    rounds: list[tuple[int, int]]
    """Of each call: asked for, and made before it."""
    choices: np.ndarray
    """Rounds of each length after the timing."""
    cost: np.ndarray


def rollout_on_a_false_clock(
    ready: RolloutWeights, costs: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, batch: int = 0
) -> Seen:
    """Generates for a while, where rounds cost what is said and nothing else takes time."""
    at = engine()
    lengths, now, asked = at.generator.settings.lengths, [0.0], []

    def advance(ready: RolloutWeights, running: DecodeState, rounds: np.int32) -> DecodeState:
        before = made(running, lengths)
        asked.append((int(rounds), int(before.sum())))
        after = at.advance(ready, running, np.int32(min(rounds, 20)))
        now[0] += OVERHEAD + float((made(after, lengths) - before) @ np.asarray(costs))
        return after

    monkeypatch.setattr(round_timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timer, prompts = RoundTimer(at.generator), at.prompts.replace(batch=jnp.int32(batch))
    running = at.begin(ready, prompts)
    one_slice = timer.prepare_rollout(advance, ready, prompts)
    for _ in lengths if batch == 0 else ():
        running = one_slice(running)
    before = made(running, lengths)
    running = one_slice(running)
    assert np.asarray(running.rollout.status == RUNNING).any()
    choices = made(running, lengths) - before
    cost = timer.finish_rollout()
    return Seen(asked, choices, np.zeros(0) if cost is None else cost)


CASES = {
    # drafts that are all kept, and cost little; the table says that plain rounds cost nothing
    "kept": (True, (1.0, 1.1, 1.3, 1.5), 0, 3),
    # drafts that are hardly kept, and cost much; the table says that the longest cost nothing
    "lost": (False, (1.0, 3.0, 6.0, 10.0), 3, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_false_costs_are_found_out_within_thirty_rounds(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike, costs, flattered, right = CASES[case]
    ready = weights(engine().generator, alike)
    assert isinstance(ready.drafter.chooser, LengthChooser)
    false = np.array(ready.drafter.chooser.round_cost)
    false[flattered] *= 1e-4
    lying = planted(ready, false)
    seen = rollout_on_a_false_clock(lying, costs, monkeypatch)
    *timing, (asked, before) = seen.rounds
    assert [rounds for rounds, _ in timing] == [1, 1, 1 + TIMED_ROUNDS] * 4
    assert before <= SOON
    assert asked == round_timer.CHECK_INTERVAL
    assert seen.choices[right] == seen.choices.sum() == 20
    # what was timed is the cost itself, what was not follows it
    np.testing.assert_allclose(seen.cost[:, 0, 0], costs, rtol=1e-4)
    np.testing.assert_allclose(
        seen.cost / seen.cost[:, :1, :1], false / false[:, :1, :1], rtol=1e-4
    )
    # without the timing, the lie is believed
    believed = rollout_on_a_false_clock(lying, costs, monkeypatch, batch=1)
    assert believed.choices[flattered] == 20
    assert believed.rounds == [(np.iinfo(np.int32).max, 0)]
    # the next run begins with what this one has found, and times nothing
    (file,) = folder.iterdir()
    np.testing.assert_array_equal(load_table(file, seen.cost.shape, ""), seen.cost)
    known = predict_chooser(engine().generator, ready).round_cost
    np.testing.assert_array_equal(known, seen.cost)
    at = engine()
    timer = RoundTimer(at.generator)
    calls = []
    one_slice = timer.prepare_rollout(
        lambda ready, running, rounds: calls.append(int(rounds)) or running, lying, at.prompts
    )
    one_slice(at.begin(ready, at.prompts))
    assert calls == [round_timer.CHECK_INTERVAL]
    np.testing.assert_array_equal(timer.finish_rollout(), seen.cost)


@pytest.mark.slow
def test_rounds_that_were_not_all_run_are_no_measurement() -> None:
    """Where all rows have ended, a call has run less rounds than it was asked for."""
    at = engine()
    ready = weights(at.generator, alike=True)
    costs = TimedCosts(np.asarray(predict_chooser(at.generator, ready).round_cost), final=False)
    timer = RoundTimer(at.generator)
    running = at.begin(ready, at.prompts)
    assert timer._find_cell(running) == (0, 0)

    def ends(ready: RolloutWeights, running: DecodeState, rounds: np.int32) -> DecodeState:
        status = jnp.full_like(running.rollout.status, EOS)
        return running.replace(rollout=running.rollout.replace(status=status))

    before = costs.table.copy()
    timer._advance_slice(costs, ends, ready, running)
    np.testing.assert_array_equal(costs.table, before)
    assert not costs.has_all_lengths


@pytest.mark.slow
def test_a_run_from_another_machine_times_its_next_rollout() -> None:
    at = engine()
    ready, later = weights(at.generator, alike=True), at.prompts.replace(batch=jnp.int32(5))
    timer = RoundTimer(at.generator)

    def times() -> bool:
        timer.prepare_rollout(at.advance, ready, later)
        return timer.finish_rollout() is not None

    assert not times()
    timer.request_timing()
    assert [times(), times()] == [True, False]


def a_state(step: Step) -> TrainState:
    """Before the first batch, with costs that nobody can have measured."""
    state = jax.jit(step.init_state, out_shardings=step.state_shardings())(
        tiny_network(Decoder, MODEL, 1),
        tiny_network(eagle3, MODEL, 2),
    )
    chooser = state.generator.chooser
    assert isinstance(chooser, LengthChooser)
    false = chooser.replace(round_cost=jnp.full_like(chooser.round_cost, 1e3).at[3].set(1e-3))
    false = jax.device_put(false, step.state_shardings().generator.chooser)
    return state.replace(generator=state.generator.replace(chooser=false))


def first(runner: StepSchedule, step: Step, stops: bool = False) -> Any:
    asked = asked_of(step, 0)
    assert int(asked.stream) == Stream.TRAIN
    return runner(a_state(step), nothing(step), asked, lambda _: stops)


def asked_of(step: Step, batch: int) -> Prompts:
    prompts = tiny_prompts(PROMPTS, WIDTH, MODEL.vocab, seed=batch)
    return place(step, prompts.replace(**no_history(PROMPTS, WIDTH + SHORT)))


def nothing(step: Step) -> Any:
    return nothing_finished(step, PROMPTS * GROUP)


@pytest.mark.slow
def test_a_run_times_its_first_rollout_and_no_other_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(SHORT, shards=2)
    monkeypatch.setattr(round_cost, "compile_for_generator", _no_pilot)
    timed, plain = (
        compile_timing_schedule(step, PROMPTS),
        compile_staged_schedule(step, PROMPTS, uniform_slices(8)),
    )
    assert timed.programs.keys() == plain.programs.keys()
    result, wanted = first(timed, step), first(plain, step)
    # the coupled rule gives the same tokens at every length
    for name in ("tokens", "lengths", "status"):
        np.testing.assert_array_equal(getattr(result.rollout, name), getattr(wanted.rollout, name))
    cost = np.asarray(result.state.generator.chooser.round_cost)
    assert (cost > 0).all()
    assert (cost < 100).all()
    assert len(list(folder.iterdir())) == 1
    # what else the state holds is as ever
    same = result.state.generator.chooser.replace(
        round_cost=wanted.state.generator.chooser.round_cost
    )
    restored = result.state.replace(generator=result.state.generator.replace(chooser=same))
    jax.tree.map(np.testing.assert_array_equal, restored, wanted.state)
    # later rollouts choose by the state, and leave it as it is
    again = timed(result.state, nothing(step), asked_of(step, 1), lambda _: False)
    chooser = again.state.generator.chooser
    assert isinstance(chooser, LengthChooser)
    np.testing.assert_array_equal(chooser.round_cost, cost)


@pytest.mark.slow
def test_a_rollout_that_is_stopped_leaves_the_state_as_it_was() -> None:
    step = step_of(SHORT)
    result = first(compile_timing_schedule(step, PROMPTS), step, stops=True)
    assert result.rollout is None
    jax.tree.map(np.testing.assert_array_equal, result.state.generator, a_state(step).generator)


def _no_pilot(*_: Any, **__: Any) -> Any:
    raise AssertionError("a program is compiled to measure with")


def test_nothing_is_compiled_to_predict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = step_of(SHORT)
    monkeypatch.setattr(round_cost, "compile_for_generator", _no_pilot)
    monkeypatch.setattr(round_cost, "times_real_rounds", lambda _: True)
    state = a_state(step)
    monkeypatch.setattr(jax, "jit", _no_pilot)
    found = round_cost.fill_length_chooser(step, state, tiny_prompts(PROMPTS, WIDTH, MODEL.vocab))
    chooser = found.generator.chooser
    assert isinstance(chooser, LengthChooser)
    cost = np.asarray(chooser.round_cost)
    assert (np.diff(cost, axis=0) > 0).all()
    assert not np.asarray(chooser.acceptance.reached).any()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no public figures of cpu are known: until its rounds are timed,")
    assert line.endswith("chosen by those of NVIDIA H100 80GB HBM3")


def test_costs_that_were_not_timed_follow_their_length() -> None:
    table = np.asarray([[[1.0, 2.0], [0.5, 1.0]], [[2.0, 4.0], [1.0, 2.0]]], np.float32)
    costs = TimedCosts(table)
    assert costs.next_length_index(0, 0) == 0
    costs.add_timing((0, 0, 0), short_seconds=1.0, long_seconds=1.0 + 4 * 3.0, rounds=4)
    assert costs.next_length_index(0, 0) == 1
    assert not costs.has_all_lengths
    # the other length was never timed: the ratio to it is all that is known
    np.testing.assert_allclose(costs.table, 3 * table)
    costs.add_timing((1, 0, 0), short_seconds=1.0, long_seconds=1.0 + 4 * 12.0, rounds=4)
    np.testing.assert_allclose(costs.table[0], 3 * table[0])
    np.testing.assert_allclose(costs.table[1], 6 * table[1])
    assert costs.has_all_lengths
    assert costs.next_length_index(0, 0, retime=False) is None
    assert costs.next_length_index(0, 0) == 0
    assert costs.next_length_index(1, 1, retime=False) == 0
    # the first time was disturbed; the fastest of each kind of call counts
    costs.add_timing((1, 0, 0), short_seconds=2.0, long_seconds=1.0 + 4 * 4.0, rounds=4)
    np.testing.assert_allclose(costs.table[1], 2 * table[1])
    for _ in range(TIMINGS_PER_COST - 1):
        costs.add_timing((0, 0, 0), 1.0, 13.0, 4)
    assert costs.next_length_index(0, 0) == 1
    costs.add_timing((1, 0, 0), 1.0, 17.0, 4)
    assert costs.next_length_index(0, 0) is None
    # calls of more and of fewer rounds that take as long
    costs.add_timing((0, 1, 0), 5.0, 5.0, 4)
    assert costs.table[0, 1, 0] == 1
