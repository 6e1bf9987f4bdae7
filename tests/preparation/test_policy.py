"""A warm start that was killed goes on, and ends in the weights of one that was not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.config.settings import DataConfig, RolloutConfig, SftConfig
from jaxspec.host.job import Job
from jaxspec.models.decoder import Decoder
from jaxspec.preparation import policy as warm_start
from jaxspec.preparation.policy import get_or_train_policy
from jaxspec.system.interrupt import Interrupt
from tests.host.training_jobs import Killed, Seen, a_job, always_kept, same_bits


@pytest.fixture(scope="module")
def job() -> Job:
    rollout, data = RolloutConfig(), DataConfig(digits=1, max_prompt_length=6)
    return a_job(rollout=rollout, data=data, sft=SftConfig(steps=6, rows=4))


def trained(job: Job, progress: Seen, file: Path) -> Decoder:
    return warm_start.train_policy(job.config, job.step, job.tokenizer, progress, file)


@pytest.mark.slow
def test_a_killed_warm_start_goes_on_to_the_same_weights_in_every_bit(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "policy.npz"
    monkeypatch.setattr(warm_start, "KEEP_SECONDS", float("inf"))
    whole = trained(job, Seen(), file)
    assert not file.exists()
    always_kept(monkeypatch)
    with pytest.raises(Killed):
        trained(job, Seen(dies_at=4), file)
    seen = Seen()
    resumed = trained(job, seen, file)
    assert (seen.steps, seen.said) == ([4, 5, 6], ["going on at step 3 of 6"])
    assert same_bits(whole, resumed)
    file.write_bytes(file.read_bytes()[:-100])
    seen = Seen()
    assert same_bits(whole, trained(job, seen, file))
    assert (seen.steps, len(seen.said)) == ([1, 2, 3, 4, 5, 6], 1)
    assert "made anew" in seen.said[0]


@pytest.mark.slow
def test_what_is_kept_on_the_way_is_for_the_same_warm_start_and_gone_at_its_end(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    always_kept(monkeypatch)
    original = warm_start.Progress.update

    def killed(progress: Any, step: int, **numbers: float) -> None:
        original(progress, step, **numbers)
        if step == 4:
            raise Killed

    with Interrupt() as interrupt:
        monkeypatch.setattr(warm_start.Progress, "update", killed)
        with pytest.raises(Killed):
            get_or_train_policy(job.config, job.step, job.tokenizer, interrupt, job.say)
        monkeypatch.setattr(warm_start.Progress, "update", original)
        (partial,) = tmp_path.glob("*.partial.npz")
        capsys.readouterr()
        weights = get_or_train_policy(job.config, job.step, job.tokenizer, interrupt, job.say)
        assert "going on at step 3 of 6" in capsys.readouterr().out
        assert not partial.exists()
        assert np.load(weights).files
