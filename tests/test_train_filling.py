"""Batches that several rollouts fill (dynamic sampling), through the training loop with rollouts
made by hand: which groups are learnt from, what is counted, and what a stop leaves."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.config.settings import BatchConfig, DataConfig, DynamicSamplingConfig
from jaxspec.data.problems import load_sets
from jaxspec.evaluation.evaluator import Evaluator
from jaxspec.host.job import Job, make_job
from jaxspec.metrics.files import MetricsWriter, read_metrics
from jaxspec.models.decoder import Decoder
from jaxspec.rl.optimizers import Diverged
from jaxspec.run.batches import BatchMaker
from jaxspec.run.dynamic_batch import BatchFiller
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.loop import BatchSource, Host, Loop
from jaxspec.run.reporting import BatchReporter
from jaxspec.run.schedules import StepResult, StepSchedule
from jaxspec.run.state import CheckpointSaver, GenerationProgress, RunState, restore_run
from jaxspec.state import EOS, Prompts, ScoredRollout, TrainState
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.system.trace import Profiler
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network
from tests.host.batches import batches_of

PROMPTS, GROUP, STEPS = 8, 2, 2
ROWS = PROMPTS * GROUP
MODEL = tiny_model(vocab=24, dtype="float32")


@functools.cache
def job_of(**settings: Any) -> Job:
    config = tiny_config(
        MODEL,
        steps=STEPS,
        save_every=STEPS,
        batch=BatchConfig(prompts=PROMPTS, group_size=GROUP),
        data=DataConfig(digits=2, eval_prompts=8, max_prompt_length=8),
        dynamic_sampling=DynamicSamplingConfig(**{"max_batches": 4, **settings}),
    )
    return make_job(config, small_mesh(2))


@dataclasses.dataclass
class Step:
    """Answers prompts and learns nothing, but keeps what it was to learn from. In rollout n the
    groups of `differing[n]` have one right answer, all others none; every answer holds n."""

    job: Job
    differing: list[list[int]]
    stop_at: int = -1
    learnt: list[list[tuple[int, int, float]]] = dataclasses.field(default_factory=list)
    """Of each batch: rollout, group and reward of each row that is read."""

    def __call__(
        self, state: TrainState, finished: ScoredRollout, prompts: Prompts, stop: Any
    ) -> StepResult:
        if finished.learn:
            self._learn(finished)
        number, live = int(prompts.batch), bool(np.asarray(prompts.live).any())
        if number == self.stop_at and live:
            return StepResult(state, None, self._metrics(), {}, {})
        rollout = self._answered(prompts, number) if live else finished.rollout
        made = {"rollout/tokens": 32.0, "rollout/acceptance_length": 2.0, "status/eos": 16.0}
        return StepResult(state, rollout, self._metrics(), made, {"time/step": 1.0})

    def _metrics(self) -> dict[str, float]:
        return {"skipped_in_row/policy": 0.0, "skipped_in_row/draft": 0.0}

    def _learn(self, finished: ScoredRollout) -> None:
        rollout, plan = jax.tree.map(np.asarray, (finished.rollout, finished.plan))
        read = np.sort(plan.row_order[(plan.micro_batch >= 0).any(0)])
        np.testing.assert_array_equal(np.flatnonzero(finished.valid), read)
        texts = [
            self.job.tokenizer.decode(rollout.tokens[row, : rollout.lengths[row]]) for row in read
        ]
        said = [text.rpartition("=")[2].split("#")[0] for text in texts]
        rewards = np.asarray(finished.rewards)[read]
        self.learnt.append(
            [
                (int(words[:-1]), int(words[-1]), float(r))
                for words, r in zip(said, rewards, strict=True)
            ]
        )

    def _answered(self, prompts: Prompts, number: int) -> Any:
        like = self.job.step.empty_scored_rollout(ROWS).rollout
        tokens, lengths = np.zeros(like.tokens.shape, np.int32), np.zeros(ROWS, np.int32)
        asked, starts = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        for row in range(ROWS):
            group = row // GROUP
            prompt = asked[group, : starts[group]]
            total = sum(map(int, self.job.tokenizer.decode(prompt).rstrip("=").split("+")))
            right = group in self.differing[number] and row % GROUP == 0
            said = f"{number}{group}#{total if right else 0}"
            ids = [*prompt, *self.job.tokenizer.encode(said), self.job.tokenizer.stop_ids[0]]
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        host = {
            "tokens": tokens,
            "lengths": lengths,
            "prompt_lengths": np.repeat(starts, GROUP),
            "status": np.full(ROWS, EOS, np.int32),
            "logprobs": np.full(tokens.shape, -number, np.float32),
        }
        sharding = jax.tree.leaves(prompts.tokens.sharding)[0]
        placed = {name: jax.device_put(leaf, sharding) for name, leaf in host.items()}
        return jax.device_put(like, sharding).replace(**placed)


@functools.cache
def state_of(job: Job) -> TrainState:
    state = jax.jit(job.step.init_state)(
        tiny_network(Decoder, MODEL, 1), tiny_network(eagle3, MODEL, 2)
    )
    return jax.device_put(state, job.step.state_shardings())


@dataclasses.dataclass
class Unasked:
    """Stands for the answers to no problems."""

    state: TrainState

    def __call__(self, prompts: Prompts) -> Any:
        raise AssertionError("nothing is evaluated here")


def run(step: Step, folder: Path) -> bool:
    """From the newest checkpoint in a folder, or from the start; whether it came to its end."""
    job, checkpoints = step.job, Checkpoints(folder / "checkpoints")
    sets = load_sets(job.config, job.tokenizer)._replace(evaluation={})
    source, scorer, planner = batches_of(job, sets)
    filler = None
    if job.step.uses_dynamic_sampling:
        sampling, prompts = job.config.dynamic_sampling, job.config.batch.prompts
        filler = BatchFiller(sampling, job.step, prompts)
    writer, progress = MetricsWriter(folder, 0), Progress("rl", STEPS)
    profiler = Profiler(range(0), folder / "trace", (), print)
    evaluator = Evaluator(source, scorer, job.config, GROUP)
    evaluations = Evaluations(job.config, evaluator, Unasked, folder, job.say)
    saver = CheckpointSaver(job.step, checkpoints, progress.print_line)
    reporter = BatchReporter(job.config, job.step, writer, progress)
    batches = BatchSource(source, scorer, BatchMaker(job.config, scorer, filler), planner)
    host = Host(batches, evaluations, saver, reporter, profiler)
    loop = Loop(job.config, StepSchedule(step, {}), Interrupt(), host)
    run = restore_run(job.step, job.config.batch.prompts, checkpoints, source.history)
    if run is None:
        progress = GenerationProgress(filling=filler and filler.empty_batch())
        run = RunState(state_of(job), source.history, generation=progress)
    for batch in run.queue:
        batch.rollout = planner.plan(batch.rollout)
    writer.truncate_from(run.learned)
    try:
        return loop.run_to_end(run)
    finally:
        checkpoints.close()
        writer.close()


FULL = list(range(PROMPTS))
DIFFERING = [[0, 5], [], [1, 2, 3, 7], [6, 0, 4, 3, 2], [1, 7], FULL, FULL]


def groups_of(learnt: list[tuple[int, int, float]]) -> list[tuple[int, int]]:
    """(rollout, group) in order, each with one right answer."""
    assert [reward for *_, reward in learnt] == [1.0, 0.0] * (len(learnt) // GROUP)
    return [(number, group) for number, group, _ in learnt[::GROUP]]


def counts_of(line: dict[str, Any]) -> list[float]:
    names = "rollouts", "groups", "carried", "dropped"
    return [line[f"dynamic_sampling/{name}"] for name in names]


@pytest.mark.parametrize("surplus", [pytest.param("drop", marks=pytest.mark.slow), "carry"])
def test_a_batch_is_filled_with_groups_whose_rewards_differ(tmp_path: Path, surplus: Any) -> None:
    step = Step(job_of(surplus=surplus), DIFFERING)
    assert run(step, tmp_path)
    first, second = map(groups_of, step.learnt)
    assert first == [(0, 0), (0, 5), (2, 1), (2, 2), (2, 3), (2, 7), (3, 0), (3, 2)]
    left = [(3, 3), (3, 4), (3, 6)] if surplus == "carry" else []
    later = [(4, 1), (4, 7)] + [(5, group) for group in FULL]
    assert second == (left + later)[:PROMPTS]
    lines = read_metrics(tmp_path)
    kept = [3, 0] if surplus == "carry" else [0, 3]
    assert counts_of(lines[0]) == [4, 8, *kept]
    assert counts_of(lines[1]) == [2, 8, *([5, 0] if surplus == "carry" else [0, 2])]
    # over all rows that were generated for it: 11 right ones of 64
    assert lines[0]["reward/mean"] == pytest.approx(11 / 64)
    assert lines[0]["reward/frac_zero_std"] == pytest.approx(1 - 11 / 32)
    assert (lines[0]["rollout/tokens"], lines[0]["status/eos"]) == (128, 64)
    assert lines[0]["time/step"] >= 4
    assert lines[0]["rollout/acceptance_length"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [3, 5])
def test_a_stop_while_a_batch_is_filled_loses_no_group(tmp_path: Path, stop_at: int) -> None:
    """Before each rollout in turn, twice in one batch too: what is learnt is the same."""
    job = job_of(surplus="carry")
    whole, parts = Step(job, DIFFERING), [Step(job, DIFFERING, stop) for stop in (1, stop_at, -1)]
    assert run(whole, tmp_path / "whole")
    assert [run(part, tmp_path / "parts") for part in parts] == [False, False, True]
    assert [batch for part in parts for batch in part.learnt] == whole.learnt
    ours, wanted = (read_metrics(tmp_path / name) for name in ("parts", "whole"))
    assert [counts_of(line) for line in ours] == [counts_of(line) for line in wanted]
    assert [line["reward/mean"] for line in ours] == [line["reward/mean"] for line in wanted]


def test_a_batch_that_stays_short_is_learnt_from_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Step(job_of(max_batches=2), [[3], [1, 2], FULL])
    assert run(step, tmp_path)
    assert groups_of(step.learnt[0]) == [(0, 3), (1, 1), (1, 2)]
    assert counts_of(read_metrics(tmp_path)[0]) == [2, 3, 0, 0]
    told = " ".join(capsys.readouterr().out.split())
    assert "warning: batch 0: 2 rollouts have only 3 groups whose rewards differ, of the 8" in told
    assert "warning: batch 1" not in told


def test_where_no_group_differs_the_run_ends_with_what_it_learnt(tmp_path: Path) -> None:
    step = Step(job_of(max_batches=3), [FULL, [], [], [], [2]])
    with pytest.raises(Diverged, match=r"none of 24 in 3 rollouts.*too easy.*max_batches, now 3"):
        run(step, tmp_path)
    assert len(step.learnt) == 1
    # the same command looks once more
    again = Step(step.job, step.differing)
    assert run(again, tmp_path)
    assert groups_of(again.learnt[0]) == [(4, 2)]


def test_without_dynamic_sampling_every_rollout_is_a_batch(tmp_path: Path) -> None:
    step = Step(job_of(max_batches=0), DIFFERING)
    assert run(step, tmp_path)
    assert [len(batch) for batch in step.learnt] == [ROWS, ROWS]
    assert read_metrics(tmp_path)[0]["reward/frac_zero_std"] == pytest.approx(6 / 8)
