"""The folder of a run: refused where something would be lost or mean something else, and telling
how it was made."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.as_json import to_json
from jaxspec.config.settings import DataConfig, EngineConfig
from jaxspec.host import starts, workdir
from jaxspec.host.job import Job, make_job
from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.conftest import answering_config, small_mesh
from tests.host.run_folders import Listening, begun, job_of, lock_of, refusal


@pytest.fixture(scope="module")
def job() -> Job:
    return make_job(answering_config(), small_mesh())


def test_prepare_workdir(tmp_path: Path) -> None:
    folder = workdir.prepare_workdir(tmp_path / "runs" / "a")
    assert folder.is_absolute()
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"workdir .*file/run cannot be written to: Not a directory; .*--workdir"
    ):
        workdir.prepare_workdir(tmp_path / "file" / "run")


class TestNothingIsErased:
    """Metrics and samples of a run are cut back to its newest checkpoint: without one, all of
    them."""

    def test_missing_checkpoints(self, job: Job, tmp_path: Path) -> None:
        here = job_of(job, tmp_path)
        begun(tmp_path, here.config, batches=3, checkpoints=None)
        told = refusal(here)
        assert "metrics of 3 batches" in told
        assert f"{tmp_path / 'checkpoints'} is missing" in told
        assert "--workdir" in told

    def test_metrics_without_a_config(self, job: Job, tmp_path: Path) -> None:
        begun(tmp_path, None, batches=3, checkpoints=None)
        assert "metrics of 3 batches" in refusal(job_of(job, tmp_path))

    def test_a_file_instead_of_checkpoints(self, job: Job, tmp_path: Path) -> None:
        here = job_of(job, tmp_path)
        begun(tmp_path, here.config, batches=3, checkpoints=None)
        (tmp_path / "checkpoints").write_text("")
        assert f"{tmp_path / 'checkpoints'} is not a folder" in refusal(here)

    def test_checkpoints_that_were_taken_away(self, job: Job, tmp_path: Path) -> None:
        """However few batches have metrics: a run that is stopped saves at once."""
        here = job_of(job, tmp_path)
        begun(tmp_path, here.config, batches=3, checkpoints=(6,))
        workdir.mark_checkpoint_saved(tmp_path)
        (tmp_path / "checkpoints" / "6").rmdir()
        told = refusal(here)
        assert "metrics of 3 batches" in told
        assert "the checkpoints that were saved" in told

    @pytest.mark.parametrize("name", ["13", "0013", "\u0661\u0663", "\u00b2"])
    def test_what_is_called_like_a_checkpoint_and_is_none(
        self, job: Job, tmp_path: Path, name: str
    ) -> None:
        """A file; or a folder whose name is no number as checkpoints have them."""
        here = job_of(job, tmp_path)
        begun(tmp_path, here.config, batches=6)
        odd = tmp_path / "checkpoints" / name
        odd.write_text("x") if name == "13" else odd.mkdir()
        assert f"{odd} is called like a checkpoint" in refusal(here)

    def test_checkpoints_that_cannot_be_read_as_such(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints" / "12").mkdir(parents=True)
        with pytest.raises(ConfigError, match="has 12, which cannot be read"):
            workdir.require_no_checkpoints(tmp_path)

    @pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/12", "checkpoints/12/more"])
    def test_a_folder_among_the_checkpoints_of_a_run(
        self, job: Job, tmp_path: Path, inside: str
    ) -> None:
        """That run would remove it."""
        begun(tmp_path, job.config)
        with pytest.raises(ConfigError, match="lies among the checkpoints of the run"):
            workdir.prepare_workdir(tmp_path / inside)

    def test_checkpoints_without_a_config(self, job: Job, tmp_path: Path) -> None:
        begun(tmp_path, None, batches=8, checkpoints=(4,))
        assert "holds checkpoints but no config.json" in refusal(job_of(job, tmp_path))

    def test_a_run_that_was_killed_before_its_first_save_starts_over_with_a_word(
        self, job: Job, tmp_path: Path
    ) -> None:
        here = job_of(job, tmp_path)
        begun(tmp_path, here.config, batches=9)
        with lock_of(here):
            assert [
                "starting over" in line and "metrics of 9 batches" in line for line in here.told
            ] == [True]

    def test_nothing_is_said_of_a_new_folder_and_of_one_to_resume(
        self, job: Job, tmp_path: Path
    ) -> None:
        for checkpoints in (None, (4,)):
            here = job_of(job, tmp_path)
            begun(
                tmp_path,
                here.config,
                batches=0 if checkpoints is None else 5,
                checkpoints=checkpoints,
            )
            with lock_of(here):
                assert here.told == []


DAMAGES: list[tuple[str, Callable[[str], str], str]] = [
    ("config.json", lambda text: "", "config.json is not JSON"),
    ("config.json", lambda text: text[:40], "config.json is not JSON"),
    ("config.json", lambda text: "[]", "config.json holds a list"),
    ("config.json", lambda text: "[" * 100_000, "config.json is not JSON"),
    ("config.json", lambda text: text.replace('"seed": 0', '"seed": 8'), "seed: 8 -> 0"),
    ("starts.jsonl", lambda text: text[:15], "starts.jsonl, line 1 is not JSON"),
    ("starts.jsonl", lambda text: "[]\n", "starts.jsonl, line 1 is no JSON object"),
    (
        "metrics.jsonl",
        lambda text: text.replace('"step": 1', '"step": x'),
        "metrics.jsonl, line 2 is not JSON",
    ),
    ("metrics.jsonl", lambda text: "7\n", "metrics.jsonl, line 1 has no `step`"),
    (
        "metrics.jsonl",
        lambda text: '{"step": 0, "reward/mean": NaN}\n',
        "metrics.jsonl, line 1 is not JSON (NaN is no number)",
    ),
    (
        "metrics.jsonl",
        lambda text: '{"step": 0, "reward/mean": "0.5"}\n',
        "line 1 has 'reward/mean' that is no number",
    ),
    (
        "metrics.jsonl",
        lambda text: '{"step": 0, "status/failed": [1]}\n',
        "line 1 has 'status/failed' that is no number",
    ),
    (
        "samples.jsonl",
        lambda text: '{"step": 0, "response": "\\ud800"}\n',
        "samples.jsonl, line 1 is not JSON",
    ),
    (
        "samples.jsonl",
        lambda text: text.replace("step", "stop"),
        "samples.jsonl, line 1 has no `step`",
    ),
]


def started_on(folder: Path, backend: str) -> None:
    """Writes what a start says of its devices."""
    (folder / "starts.jsonl").write_text(
        json.dumps({"time": "then", "data": {}, "machine": {"backend": backend}}) + "\n"
    )


@pytest.mark.parametrize(
    ("saved", "asked", "checkpoints", "found", "backend"),
    [
        (87, 0, (2,), 87, "cpu"),  # chosen when the run began
        (87, 58, (2,), 58, "cpu"),  # who asks gets it
        (87, 0, (), None, "cpu"),  # nothing is saved to go on from: it is chosen anew
        (87, 0, (2,), None, "gpu"),  # that was for other devices
        (3, 0, (2,), None, "cpu"),  # no row of this length would fit
        ("many", 0, (2,), None, "cpu"),
    ],
)
def test_the_micro_batch_that_a_run_chose_is_taken_again(
    job: Job,
    tmp_path: Path,
    saved: Any,
    asked: int,
    checkpoints: tuple[int, ...],
    found: int | None,
    backend: str,
) -> None:
    batch = dataclasses.replace(job.config.batch, micro_tokens=asked)
    resumed = job_of(job, tmp_path, batch=batch)
    begun(tmp_path, resumed.config, 1, checkpoints)
    written = to_json(resumed.config)
    written["batch"]["micro_tokens"] = saved
    (tmp_path / "config.json").write_text(json.dumps(written))
    started_on(tmp_path, backend)
    taken = workdir.restore_sizes(resumed, tmp_path)
    assert taken.config.batch.micro_tokens == (found or 0)
    if found and not asked:
        assert taken.step.learner.micro_tokens == found


@pytest.mark.parametrize(
    ("asked", "saved", "found"),
    [
        ({}, (77, 4, 60), (77, 4, 60)),
        ({}, (77, 0, 0), (77, 0, 0)),
        ({"slots": 5}, (77, 4, 60), (5, 4, 60)),  # who asks gets it
        ({"page_size": 2}, (77, 4, 60), (77, 2, 0)),  # those were pages of another size
        ({"page_size": 4, "pages": 90}, (77, 4, 60), (77, 4, 90)),
        ({}, (77, 4, 3), (77, 4, 0)),  # too few for the prompts of a shard here
        ({}, (0, -1, "many"), (256, 0, 0)),
    ],
)
def test_the_engine_that_a_run_chose_is_taken_again(
    job: Job, tmp_path: Path, asked: dict[str, Any], saved: tuple[Any, ...], found: tuple[int, ...]
) -> None:
    rollout = dataclasses.replace(job.config.rollout, engine=EngineConfig(**asked))
    resumed = job_of(job, tmp_path, rollout=rollout)
    resumed = dataclasses.replace(resumed, step=make_job(resumed.config, resumed.mesh).step)
    begun(tmp_path, resumed.config, 1, (2,))
    written = to_json(resumed.config)
    written["rollout"]["engine"] |= dict(zip(("slots", "page_size", "pages"), saved, strict=True))
    (tmp_path / "config.json").write_text(json.dumps(written))
    started_on(tmp_path, "cpu")
    with lock_of(resumed):  # it is the same run whatever its engine's sizes
        taken = workdir.restore_sizes(resumed, tmp_path)
    assert taken.step.sizes[1:] == found
    engine = taken.config.rollout.engine
    for name, size in zip(("slots", "page_size", "pages"), found, strict=True):
        assert getattr(engine, name) in (size, asked.get(name, "auto"))
    taken_again = dataclasses.replace(taken, step=make_job(taken.config, taken.mesh).step)
    assert taken_again.step.sizes[1:] == found, "the config says what the step does"


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_damaged_files_are_named(
    job: Job, tmp_path: Path, name: str, damage: Callable[[str], str], words: str
) -> None:
    here = job_of(job, tmp_path)
    begun(tmp_path, here.config, batches=3, checkpoints=(2,))
    (tmp_path / "starts.jsonl").write_text(json.dumps({"time": "then", "data": {}}) + "\n")
    (tmp_path / name).write_text(damage((tmp_path / name).read_text()))
    assert words in refusal(here)


class TestWhatItBeganWith:
    @pytest.fixture
    def data(self, tmp_path: Path) -> DataConfig:
        """A file to train on, one to evaluate on, and a tokenizer."""
        for name in ("train", "eval"):
            (tmp_path / f"{name}.jsonl").write_text(
                "".join(f'{{"question": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(9))
            )
        character_tokenizer().save(str(tmp_path / "tokenizer"))
        path, other, folder = (
            str(tmp_path / name) for name in ("train.jsonl", "eval.jsonl", "tokenizer")
        )
        return DataConfig(path=path, eval_path=other, tokenizer=folder, answer_style="hash")

    def started(self, here: Listening, saved: bool = True) -> list[str]:
        """A start that has got as far as its first checkpoint; what it said."""
        with lock_of(here) as folder:
            record = starts.report_start(here.config, here.mesh, folder, here.say)
            starts.record_start(here.config, folder, record)
            if saved:
                (folder / "checkpoints" / "2").mkdir(parents=True, exist_ok=True)
        return here.told

    def test_other_data_is_refused_by_name(
        self, job: Job, data: DataConfig, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        self.started(job_of(job, folder, data=data))
        assert not any("warning" in line for line in self.started(job_of(job, folder, data=data)))
        files = {
            "data.path": data.path,
            "data.eval_path": data.eval_path,
            "data.tokenizer": f"{data.tokenizer}/tokenizer_config.json",
        }
        for setting, name in files.items():
            before = Path(name).read_text()
            Path(name).write_text(before.replace("\n", " \n", 1))
            told = refusal(job_of(job, folder, data=data))
            assert f"{setting} " in told
            assert f"{name} holds other data than the run in {folder} began with" in told
            Path(name).write_text(before)
        Path(data.tokenizer, "chat_template.jinja").write_text("{{ messages[0].content }}")
        assert "chat_template.jinja holds other data" in refusal(job_of(job, folder, data=data))

    def test_other_shards_of_a_dataset_are_refused_by_name(
        self, job: Job, data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is compared is what is read: lines of all files that match, wherever they lie."""
        monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
        shards = f"{tmp_path}:[te]*.jsonl"
        here = job_of(job, tmp_path / "run", data=dataclasses.replace(data, path=shards))
        self.started(here)
        assert not any("warning" in line for line in self.started(here))
        Path(data.eval_path).write_text(Path(data.path).read_text() + "\n")
        told = refusal(here)
        assert f"data.path {shards}" in told
        assert "holds other data than the run" in told

    def test_what_was_not_recorded_is_said(
        self, job: Job, data: DataConfig, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        self.started(job_of(job, folder, data=data))
        start = json.loads((folder / "starts.jsonl").read_text())
        start["data"] = {
            name: value
            for name, value in start["data"].items()
            if not name.startswith("data.eval_path")
        }
        (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
        (told,) = [
            line for line in self.started(job_of(job, folder, data=data)) if "warning" in line
        ]
        assert f"no record of data.eval_path {data.eval_path} from the run's first start" in told

    def test_a_run_that_saved_nothing_may_have_other_data(
        self, job: Job, data: DataConfig, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        self.started(job_of(job, folder, data=data), saved=False)
        Path(data.path).write_text(Path(data.eval_path).read_text() + "\n")
        self.started(job_of(job, folder, data=data))
        assert len((folder / "starts.jsonl").read_text().splitlines()) == 1
        Path(data.path).write_text(Path(data.eval_path).read_text())
        assert "data.path" in refusal(job_of(job, folder, data=data))

    def test_every_start_is_told_and_kept(self, job: Job, tmp_path: Path) -> None:
        for number in (1, 2):
            (line,) = self.started(job_of(job, tmp_path))
            for word in ("jaxspec", "jax ", "jaxlib", "python", "cpu"):
                assert word in line
            starts = [
                json.loads(text) for text in (tmp_path / "starts.jsonl").read_text().splitlines()
            ]
            assert len(starts) == number
        assert starts[0]["versions"].keys() == {"jaxspec", "jax", "jaxlib", "python"}
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", starts[0]["time"])
        assert starts[0]["machine"].keys() >= {
            "host",
            "platform",
            "backend",
            "device",
            "mesh",
            "processes",
        }

    def test_other_versions_and_checkpoints_are_said(self, job: Job, tmp_path: Path) -> None:
        weights = tmp_path / "head"
        weights.mkdir()
        (weights / "config.json").write_text("{}")
        (weights / "model.safetensors").write_bytes(bytes(9999))
        draft = dataclasses.replace(job.config.rollout.draft, path=str(weights))
        changes = {"rollout": dataclasses.replace(job.config.rollout, draft=draft)}
        folder = tmp_path / "run"
        self.started(job_of(job, folder, **changes))
        file = folder / "starts.jsonl"
        file.write_text(re.sub(r'"jax": "[^"]*"', '"jax": "0.0.1"', file.read_text()))
        (weights / "model.safetensors").write_bytes(bytes(9998) + b"x")
        _, version, checkpoint = self.started(job_of(job, folder, **changes))
        assert "warning: since the run's last start, jax has changed: 0.0.1 -> " in version
        assert (
            f"rollout.draft.path {weights} has changed; the run continues with the weights that"
            " it has saved" in checkpoint
        )
        assert len(self.started(job_of(job, folder, **changes))) == 1, "once is enough"
