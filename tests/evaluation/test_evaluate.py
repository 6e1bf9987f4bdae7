"""What `jaxspec.evaluate` makes of its command line and of a run, without answering anything."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.check import check_config
from jaxspec.config.cli import load_config
from jaxspec.config.settings import (
    Config,
    DataConfig,
    DraftConfig,
    EvalConfig,
    LossConfig,
    ResolvedConfig,
    RewardConfig,
    RolloutConfig,
    ScheduleConfig,
    SetConfig,
    SftConfig,
)
from jaxspec.data.problems import ProblemSets, load_sets
from jaxspec.evaluate import claim_folder, load_evaluation_config, require_draft_weights
from jaxspec.evaluation import program
from jaxspec.evaluation.records import RecordFile
from jaxspec.host.job import Job, make_job
from jaxspec.host.loaded_run import SavedRun
from jaxspec.inputs.checked import ConfigError
from jaxspec.rewards.scorer import Scorer, SetScorers
from jaxspec.step import Step
from jaxspec.tokens.stop_strings import NO_STOP_STRINGS
from tests.conftest import small_mesh, tiny_config, tiny_model

CONFIGS = Path(__file__).parents[2] / "configs"


def run_of(**changes: Any) -> SavedRun:
    config = ResolvedConfig(**{"rollout": RolloutConfig(temperature=0.7), **changes})
    return SavedRun(Path("runs/mine"), 12, config)


def test_a_checkpoint_is_evaluated_as_its_run_generates() -> None:
    run = run_of(data=DataConfig(digits=3))
    config = load_evaluation_config([], run)
    assert config.rollout == run.config.rollout
    assert config.data == run.config.data
    assert config.workdir == "runs/mine-eval-12"
    words = ["--rollout.draft.kind", "ngram", "--eval.samples", "4"]
    changed = load_evaluation_config(words, run)
    assert (changed.rollout.draft.kind, changed.eval.samples) == ("ngram", 4)
    for words, told in (
        (["--rollout.draft.kind", "mtp"], "the run's draft is eagle3, so there are no weights"),
        (["--rollout.draft.eagle3.ffn", "8"], "draft was trained with 0"),
        (["--eval.every", "3"], "no use for --eval.every"),
        (["--model.layers", "3"], "no use for --model.layers"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_evaluation_config(words, run)


def test_a_config_beside_a_checkpoint_says_what_is_measured_and_how() -> None:
    run = run_of(data=DataConfig(max_prompt_length=2048))
    config = load_evaluation_config(["--config", f"{CONFIGS}/eval_aime.py:qwen3_8b"], run)
    assert [each.name for each in config.eval.sets] == ["aime24", "aime25", "math500"]
    assert (config.eval.temperature, config.eval.max_new_tokens) == (0.6, 32_768)
    assert config.rollout == run.config.rollout
    assert config.data.max_prompt_length == 2048


def test_workers_are_of_use_where_a_set_has_a_verifier() -> None:
    words = ["--config", f"{CONFIGS}/eval_aime.py:qwen3_8b", "--reward.workers", "4"]
    config, _ = load_config(words, "train", "")
    assert config.reward.workers == 4
    with pytest.raises(ConfigError, match=r"no use for --reward\.workers"):
        load_config([words[0], f"{CONFIGS}/eval_aime.py", *words[2:]], "train", "")


class Enough(Exception):
    """Nothing is compiled."""


def compile_for(job: Job, sets: ProblemSets) -> None:
    program.compile_evaluator(
        job.config, job.step, job.tokenizer, sets, SetScorers((Scorer(),)), job.say
    )


def asking(job: Job, monkeypatch: pytest.MonkeyPatch) -> Step:
    """The step by which evaluations of a job would be answered."""
    found: list[Step] = []

    def enough(step: Step, *_: object) -> None:
        found.append(step)
        raise Enough

    monkeypatch.setattr(program, "fit_step", enough)
    sets = load_sets(job.config, job.tokenizer)
    with pytest.raises(Enough):
        compile_for(job, sets)
    return found[0]


def test_evaluations_end_at_the_runs_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(
        tiny_model(vocab=24, dtype="float32"),
        sft=SftConfig(steps=0),
        eval=EvalConfig(samples=3, temperature=0.5),
    )
    job = make_job(
        dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, stop=("#1",))),
        small_mesh(),
    )
    step = asking(job, monkeypatch)
    assert step.generator.settings.stop == job.step.generator.settings.stop != NO_STOP_STRINGS
    assert step.generator.settings.processing.temperature == 0.5
    assert step.learner is job.step.learner


def test_settings_of_evaluations_are_judged_like_those_of_runs() -> None:
    config = tiny_config(tiny_model(vocab=24), eval=EvalConfig(max_new_tokens=2))
    job = make_job(config, small_mesh())
    assert config.rollout.draft.max_draft_length >= 2
    sets = load_sets(config, job.tokenizer)
    with pytest.raises(ConfigError, match=r"evaluations: .*max_new_tokens 2: a draft must be sh"):
        compile_for(job, sets)


def test_sets_that_do_not_go_together_are_refused() -> None:
    first = SetConfig(name="one", data=DataConfig(path="a.jsonl"))
    with pytest.raises(ConfigError, match="the names one, one"):
        Config(mixture=(first, first))
    with pytest.raises(ConfigError, match=r"a set is called 'a/b'"):
        SetConfig(name="a/b")
    with pytest.raises(ConfigError, match=r"eval\.sets have weights"):
        EvalConfig(sets=(dataclasses.replace(first, weight=2.0),))
    for changes, told in (
        ({"data": DataConfig(path="a", tokenizer="other")}, r"mixture\.0\.data\.tokenizer is"),
        ({"reward": RewardConfig(workers=3)}, r"mixture\.0\.reward\.workers is 3"),
        ({"data": DataConfig(task="programs")}, r"data\.task programs, and the run"),
    ):
        config = tiny_config(tiny_model(vocab=24), mixture=(dataclasses.replace(first, **changes),))
        with pytest.raises(ConfigError, match=told):
            check_config(config, 1)


def test_what_a_run_was_trained_on_is_not_needed_for_other_sets() -> None:
    """Its files and functions may be elsewhere."""
    run = run_of(
        data=DataConfig(path="gone.jsonl", answer_style="boxed", prompt_format="raw"),
        reward=RewardConfig(function="gone.py:reward", workers=2),
        loss=LossConfig(function="gone.py:loss"),
    )
    alone = load_evaluation_config([], run)
    assert alone.data.path == "gone.jsonl", "held-out problems are in that file"
    config = load_evaluation_config(["--config", f"{CONFIGS}/eval_aime.py:qwen3_8b"], run)
    assert (config.data.path, config.data.prompt_format) == ("", "raw")
    assert config.reward == RewardConfig(), "workers are the config's"
    assert {each.reward.verifier for each in config.eval.sets} == {"math"}


def test_a_learned_draft_needs_weights() -> None:
    config = ResolvedConfig()
    with pytest.raises(ConfigError, match=r"kind eagle3 needs weights, .* ngram or none"):
        require_draft_weights(config, None)
    require_draft_weights(config, run_of())
    require_draft_weights(
        ResolvedConfig(rollout=RolloutConfig(draft=DraftConfig(kind="ngram"))), None
    )


def test_a_folder_belongs_to_what_has_answered_there(tmp_path: Path) -> None:
    def claimed(**changes: Any) -> None:
        config = tiny_config(tiny_model(vocab=24, dtype="float32"), **changes)
        claim_folder(config, small_mesh(), tmp_path, None)

    claimed(seed=1)
    claimed(seed=2)  # the first has answered nothing
    RecordFile(tmp_path, 0).append_records(0, [{"set": "a", "problem": 0}])
    claimed(seed=2, schedule=ScheduleConfig(kind="staged"))
    with pytest.raises(ConfigError, match=r"another evaluation: config\.seed: 2 -> 3\."):
        claimed(seed=3)
