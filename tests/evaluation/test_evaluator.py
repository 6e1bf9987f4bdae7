"""Named sets of problems asked of a policy that answers by hand, judged, recorded and compared."""

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ResolvedConfig,
    RewardConfig,
    RolloutConfig,
    SetConfig,
)
from jaxspec.data.problems import load_sets
from jaxspec.data.scoring import make_scorers
from jaxspec.evaluation.evaluator import Evaluator, estimates_to_metrics
from jaxspec.evaluation.program import (
    build_evaluation_step,
    evaluation_config,
    list_differing_settings,
)
from jaxspec.evaluation.records import RecordFile, compare_evaluations
from jaxspec.evaluation.tables import build_results_table
from jaxspec.host.job import Job, make_job
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import ModelSpec
from jaxspec.rollout.settings import Settings
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.start import empty_history
from jaxspec.run.state import BatchRecord, GenerationProgress, QueuedBatch, RunState
from jaxspec.state import EOS, FAILED, Prompts, Rollout
from jaxspec.tokens.stop_strings import NO_STOP_STRINGS, StopTable
from tests.conftest import small_mesh
from tests.host.batches import batches_of

PROMPTS, GROUP = 8, 2
SETS = (
    SetConfig(name="sums", data=DataConfig(digits=1, eval_prompts=6)),
    SetConfig(
        name="differences",
        data=DataConfig(task="subtract", digits=1, eval_prompts=3),
        reward=RewardConfig(parts=("answer", "stated"), weights=(1.0, 0.5)),
    ),
)
CONFIG = ResolvedConfig(
    model=ModelSpec(vocab=24, layers=4, embed=8, heads=2, kv_heads=2, head_size=4, ffn=8),
    rollout=RolloutConfig(max_new_tokens=12),
    batch=BatchConfig(prompts=PROMPTS, group_size=GROUP),
    eval=EvalConfig(samples=2 * GROUP, sets=SETS),
    mesh=MeshConfig(tensor=2),
)


@dataclasses.dataclass
class Policy:
    """Answers by the text of the prompt: right, unless the first operand is odd; then the second
    answer of each call is. A first operand of 4 fails. It counts its calls."""

    job: Job
    calls: int = 0

    def __call__(self, prompts: Prompts) -> Rollout:
        self.calls += 1
        rows = PROMPTS * GROUP
        like = self.job.step.empty_scored_rollout(rows).rollout
        tokens = np.zeros(like.tokens.shape, np.int32)
        starts, ends, status = np.zeros(rows, int), np.ones(rows, int), np.zeros(rows, int)
        tokenizer = self.job.tokenizer
        for place in np.flatnonzero(np.asarray(prompts.live)):
            asked = np.asarray(prompts.tokens)[place, : int(prompts.lengths[place])]
            for member in range(GROUP):
                row, said = place * GROUP + member, self.answer(tokenizer.decode(asked), member)
                ids = [*asked, *tokenizer.encode(said or "0"), tokenizer.stop_ids[0]]
                tokens[row, : len(ids)] = ids
                starts[row], ends[row] = len(asked), len(ids)
                status[row] = FAILED if said is None else EOS
        arrays = {"tokens": tokens, "prompt_lengths": starts, "lengths": ends, "status": status}
        return dataclasses.replace(
            like, **{name: jnp.asarray(value, jnp.int32) for name, value in arrays.items()}
        )

    @staticmethod
    def answer(question: str, member: int) -> str | None:
        operator = "+" if "+" in question else "-"
        first, second = map(int, question.rstrip("=").split(operator))
        right = first + second if operator == "+" else first - second
        if first == 4:
            return None
        if first % 2 and member == 0:
            return "12" if operator == "-" else f"#{right + 1}"
        return f"#{right}"


@pytest.fixture(scope="module")
def job() -> Job:
    return make_job(CONFIG, small_mesh(4, 2))


@pytest.fixture
def policy(job: Job) -> Policy:
    return Policy(job)


@pytest.fixture
def evaluator(job: Job) -> Evaluator:
    sets = load_sets(CONFIG, job.tokenizer)
    batches = batches_of(job, sets, make_scorers(CONFIG))
    return Evaluator(batches.source, batches.scorer, CONFIG, 2 * GROUP)


def never() -> bool:
    return False


def unasked(_: Any) -> Any:
    raise AssertionError("nothing is answered here")


def firsts(evaluator: Evaluator, name: str, records: list[dict[str, Any]]) -> list[int]:
    """First operands of a set's problems, in their order."""
    prompts = [
        record["prompt"].removeprefix("<bos>") for record in records if record["set"] == name
    ]
    return [int(prompt.replace("-", "+").partition("+")[0]) for prompt in prompts]


def test_every_problem_of_every_set_is_answered_as_often_as_asked(
    evaluator: Evaluator, policy: Policy
) -> None:
    records = evaluator(policy, never)
    assert records is not None
    assert policy.calls == 4  # two calls for each set
    assert [record["set"] for record in records] == ["sums"] * 6 + ["differences"] * 3
    assert [record["problem"] for record in records] == [*range(6), *range(3)]
    for name in ("sums", "differences"):
        own = [record for record in records if record["set"] == name]
        for first, record in zip(firsts(evaluator, name, records), own, strict=True):
            expected: list[Any] = [first % 2 == 0, True] * 2
            assert record["correct"] == ([None] * 4 if first == 4 else expected)
            assert len(record["tokens"]) == len(record["reward"]) == 4
    odd = next(r for r in records if r["set"] == "differences" and r["correct"][0] is False)
    assert odd["outcome"] == ["no_answer", "correct"] * 2
    assert odd["reward"] == [0.0, 1.5] * 2  # the second part pays for stating an answer
    assert odd["stated"][0] is None
    assert odd["stated"][1] == odd["answer"]


def test_what_is_estimated_is_what_the_policy_does(evaluator: Evaluator, policy: Policy) -> None:
    records = evaluator(policy, never)
    assert records is not None
    found = evaluator.estimate_sets(records)
    for name, votes in (("sums", 0.5), ("differences", 1.0)):
        operands = [first for first in firsts(evaluator, name, records) if first != 4]
        odd = sum(first % 2 for first in operands) / len(operands)
        assert found[name]["avg@4"].value == pytest.approx(1 - odd / 2)
        assert found[name]["avg@4"].problems == len(operands)
        assert found[name]["pass@2"].value == pytest.approx(1 - odd / 6)
        assert found[name]["pass@4"].value == 1.0
        # an odd sum has two votes for each of two answers, an odd difference none for the other
        assert found[name]["cons@4"].value == pytest.approx(1 - odd * (1 - votes))
    metrics = estimates_to_metrics(found)
    assert metrics["eval/sums/avg@4"] == found["sums"]["avg@4"].value
    assert metrics["eval/sums/avg@4/low"] <= metrics["eval/sums/avg@4"]


def test_a_set_without_a_judged_answer_has_no_metrics(evaluator: Evaluator, policy: Policy) -> None:
    records = evaluator(policy, never)
    assert records is not None
    for record in records:
        if record["set"] == "differences":
            record["correct"] = record["reward"] = [None] * 4
    found = evaluator.estimate_sets(records)
    metrics = estimates_to_metrics(found)
    assert {name.split("/")[1] for name in metrics} == {"sums"}
    assert all(math.isfinite(value) for value in metrics.values())
    assert found["differences"]["avg@4"].to_record() == {"problems": 0}
    assert found["sums"]["avg@4"].to_record() == found["sums"]["avg@4"]._asdict()
    file = io.StringIO()
    Console(file=file, width=100).print(build_results_table(found))
    shown = [line.split() for line in file.getvalue().splitlines() if "differences" in line]
    assert ["differences", "avg@4", "-", "0"] in shown
    assert "nan" not in file.getvalue()


def test_a_stop_comes_between_calls(evaluator: Evaluator, policy: Policy) -> None:
    assert evaluator(policy, lambda: policy.calls == 3) is None
    assert policy.calls == 3


def test_what_is_left_is_what_has_no_record(evaluator: Evaluator, policy: Policy) -> None:
    records = evaluator(policy, never)
    assert records is not None
    assert evaluator.list_remaining_chunks(records) == []
    assert [part.set_name for part in evaluator.list_remaining_chunks(records[:6])] == [
        "differences"
    ]
    assert [part.set_name for part in evaluator.list_remaining_chunks(records[1:])] == ["sums"]


def test_the_best_checkpoint_is_known_by_its_metric(
    job: Job, evaluator: Evaluator, tmp_path: Path
) -> None:
    def made(metric: str) -> Evaluations:
        config = dataclasses.replace(
            CONFIG, eval=dataclasses.replace(CONFIG.eval, keep_best=metric)
        )
        return Evaluations(config, evaluator, unasked, tmp_path, job.say)

    with pytest.raises(ConfigError, match=r"keep_best is 'sums/avg@8', .* sums/avg@4, sums/pass@2"):
        made("sums/avg@8")
    kept = made("sums/avg@4")
    arrays = {"weight": jnp.ones(3)}
    for number, value, best in ((2, 0.25, True), (4, 0.5, True), (6, 0.5, False), (8, 0.1, False)):
        metrics = {"eval/sums/avg@4": value}
        assert kept.is_best(metrics) == best
        if best:
            kept.save_best(number, arrays, {}, None, metrics)
    assert not kept.is_best({"eval/sums/avg@4": float("nan")})
    kept.close()
    assert [entry.name for entry in (tmp_path / "best").iterdir() if entry.name.isdigit()] == ["4"]
    again = made("sums/avg@4")
    assert not again.is_best({"eval/sums/avg@4": 0.5})
    assert again.is_best({"eval/sums/avg@4": 0.51})
    again.close()
    with pytest.raises(ConfigError, match=r"best was the best by other settings of eval"):
        made("differences/pass@2")
    assert not made("").is_best({"eval/sums/avg@4": 1.0})


def test_a_resumed_run_keeps_the_records_that_it_will_not_make_again(
    job: Job, evaluator: Evaluator, tmp_path: Path
) -> None:
    """The batch that is pending: its evaluation is in its line, or is made once more."""
    evaluations = Evaluations(job.config, evaluator, unasked, tmp_path, job.say)
    state, finished = (
        jax.eval_shape(job.step.init_random_state),
        job.step.empty_scored_rollout(PROMPTS * GROUP),
    )
    for metrics, kept in (({"eval/sums/avg@4": 0.5}, [0, 4]), ({}, [0])):
        lines = [{"step": step, "set": "sums"} for step in (0, 4, 8)]
        (tmp_path / "evaluations.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in lines))
        queue = [QueuedBatch(finished, BatchRecord(4, metrics, []))]
        run = RunState(state, empty_history(CONFIG), queue, 4, GenerationProgress(5))
        evaluations.truncate_records(run)
        assert [record["step"] for record in RecordFile(tmp_path, 0).load_records()] == kept


def test_evaluations_with_settings_of_their_own_have_a_config_of_their_own() -> None:
    assert list_differing_settings(CONFIG) == []
    cases: list[tuple[dict[str, Any], str]] = [
        ({"samples": 3}, "eval.samples 3, no multiple of batch.group_size 2"),
        ({"temperature": 0.0}, "eval.temperature 0.0"),
        ({"top_p": 0.9}, "eval.top_p 0.9"),
        ({"max_new_tokens": 20}, "eval.max_new_tokens 20"),
        ({"top_k": 20}, "eval.top_k 20"),
        ({"min_new_tokens": 2}, "eval.min_new_tokens 2"),
        ({"stop": ("#", "=")}, "eval.stop ['#', '=']"),
    ]
    for settings, told in cases:
        config = dataclasses.replace(CONFIG, eval=EvalConfig(**settings))
        assert list_differing_settings(config) == [told]
    made = evaluation_config(
        dataclasses.replace(CONFIG, eval=EvalConfig(samples=5, top_p=0.9)), shards=4
    )
    assert (made.batch.prompts, made.batch.group_size) == (4, 5)  # at least a prompt a shard
    assert (made.rollout.top_p, made.rollout.temperature) == (0.9, 1.0)
    nothing = EvalConfig(top_k=0, min_new_tokens=0, stop=())
    assert list_differing_settings(dataclasses.replace(CONFIG, eval=nothing)) == []
    alone = evaluation_config(dataclasses.replace(CONFIG, eval=EvalConfig(samples=1)), shards=4)
    assert (alone.batch.prompts, alone.batch.group_size) == (16, 1)


def evaluation_settings(job: Job, config: ResolvedConfig) -> Settings:
    step = build_evaluation_step(
        evaluation_config(config, 1), job.config.rollout.stop, job.step, job.tokenizer
    )
    return step.generator.settings


def test_an_evaluation_samples_as_it_says(job: Job) -> None:
    """The recipe of a model card beside a run that samples otherwise, and back."""
    recipe = EvalConfig(temperature=0.6, top_k=20, top_p=0.95, min_new_tokens=2, stop=("#",))
    trained = dataclasses.replace(CONFIG.rollout, top_k=5, min_new_tokens=4, stop=("=",))
    config = dataclasses.replace(CONFIG, rollout=trained, eval=recipe)
    settings = evaluation_settings(job, config)
    processing = settings.processing
    assert (processing.temperature, processing.top_k, processing.top_p) == (0.6, 20, 0.95)
    assert processing.min_new_tokens == 2
    hash_, equals = job.tokenizer.build_stop_table(("#",)), job.tokenizer.build_stop_table(("=",))
    block = jnp.asarray([job.tokenizer.encode("#"), job.tokenizer.encode("=")])
    for table, stops in (
        (settings.stop, [[True], [False]]),
        (hash_, [[True], [False]]),
        (equals, [[False], [True]]),
    ):
        assert isinstance(table, StopTable)
        assert table(jnp.zeros(2, jnp.int32), block)[0].tolist() == stops
    freed = dataclasses.replace(config, eval=EvalConfig(top_k=0, min_new_tokens=0, stop=()))
    settings = evaluation_settings(job, freed)
    assert (settings.processing.top_k, settings.processing.min_new_tokens) == (0, 0)
    assert settings.stop == NO_STOP_STRINGS


def test_an_evaluation_ends_with_the_special_tokens_that_it_names(job: Job) -> None:
    """Not with those that training names."""
    trained = dataclasses.replace(CONFIG.rollout, stop=("<pad>",))
    tokenizer = job.tokenizer.with_stops(trained.stop, ())
    assert tokenizer.stop_ids == (1, 0)
    config = dataclasses.replace(CONFIG, rollout=trained, eval=EvalConfig(stop=("<unk>",)))
    run = dataclasses.replace(job, config=config, tokenizer=tokenizer)
    settings = evaluation_settings(run, config)
    assert settings.processing.stop_ids == (1, 3)
    assert settings.stop == NO_STOP_STRINGS


def lines_of(folder: Path, step: int, shares: dict[str, list[bool | None]], **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    lines = [
        {"set": "sums", "problem": i, "prompt": prompt, "correct": correct} | changes
        for i, (prompt, correct) in enumerate(shares.items())
    ]
    RecordFile(folder, 0).append_records(step, lines)


def test_two_evaluations_are_compared_by_problem(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    lines_of(first, 0, {"1+1=": [True, False], "2+1=": [None, None], "3+1=": [False, False]})
    lines_of(second, 0, {"1+1=": [False, False], "2+1=": [True, True], "3+1=": [False, False]})
    lines_of(second, 20, {"1+1=": [True, True], "2+1=": [True, True], "3+1=": [None, True]})
    found = compare_evaluations(str(first), str(second))["sums"]
    assert (found.estimate.value, found.estimate.problems) == (pytest.approx(0.75), 2)
    assert compare_evaluations(str(first), f"{second}:0")["sums"].estimate.value == pytest.approx(
        -0.25
    )
    RecordFile(second, 0).truncate_from(20)
    assert compare_evaluations(str(first), str(second))["sums"].estimate.value == pytest.approx(
        -0.25
    )


def test_evaluations_are_compared_by_their_problems_not_by_their_prompts(tmp_path: Path) -> None:
    """Also where another prompt leaves out other problems, and in other white space."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, prompts in ((first, "What is {}?"), (second, "<user>{}<assistant>")):
        lines_of(folder, 0, {prompts.format("1+1="): [True]}, question="1+1=", problem=4)
        lines_of(folder, 0, {prompts.format("2+1="): [folder == second]}, question="2+1= ")
    lines = second / "evaluations.jsonl"
    lines.write_text(lines.read_text().replace("2+1= ", " 2+1="))
    found = compare_evaluations(str(first), str(second))["sums"].estimate
    assert (found.value, found.problems) == (pytest.approx(0.5), 2)


def test_an_evaluation_without_questions_is_compared_by_its_prompts(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    first, second = tmp_path / "first", tmp_path / "second"
    lines_of(first, 0, {"user: 1+1=": [True]})
    lines_of(second, 0, {"user: 1+1=": [False]}, question="1+1=")
    found = compare_evaluations(str(first), str(second))["sums"].estimate
    assert (found.value, found.problems) == (pytest.approx(-1), 1)


def test_evaluations_that_cannot_be_compared(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    lines_of(first, 0, {"1+1=": [True]})
    lines_of(second, 0, {"2+1=": [True]})  # another problem in the same place
    lines_of(third, 0, {"1+1=": [True]}, correct=None)
    for other, told in (
        (second, "no problem is in the same set of both"),
        (tmp_path, r"has no evaluations\.jsonl"),
        (f"{first}:7", "no evaluation at step 7; there are 0"),
        (third, r"evaluations\.jsonl, line 1 has no correct"),
    ):
        with pytest.raises(ConfigError, match=told):
            compare_evaluations(str(first), str(other))


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    lines_of(tmp_path, 0, {"1+1=": [True], "2+1=": [True]})
    records = RecordFile(tmp_path, 0)
    records.file.write_text(records.file.read_text()[:-9])
    records.truncate_from(float("inf"))
    assert [json.loads(line)["problem"] for line in records.file.read_text().splitlines()] == [0]
