"""Metrics survive kills, resumes and full disks, and rates mean the same in every kind of run."""

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from jaxspec.inputs.checked import ConfigError
from jaxspec.metrics import files
from jaxspec.metrics.files import MetricsWriter


def _events(workdir: Path) -> list:
    """TensorBoard's events, oldest file first, with their checksums checked."""
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            body, data = data[12 : 12 + size], data[12 + size :]
            assert int.from_bytes(data[:4], "little") == masked_crc32c(body)
            data = data[4:]
            events.append(vars(event_pb2)["Event"].FromString(body))
    return events


def test_lines_are_json_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write_record(
            {
                "step": 0,
                "reward/mean": np.float32(0.5),
                "loss/policy": math.nan,
                "entropy": jnp.float32(math.inf),
                "status/eos": jnp.int32(3),
            }
        )
        writer.write_samples(
            0,
            [
                {
                    "prompt": "1+2=",
                    "response": "#3\u2713",
                    "reward": np.float64(1.0),
                    "logprobs": np.array([0.5, -math.inf]),
                }
            ],
        )
    wanted = {"step": 0, "reward/mean": 0.5, "loss/policy": None, "entropy": None, "status/eos": 3}
    assert files.read_metrics(tmp_path) == [wanted]
    samples = [
        json.loads(line) for line in (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()
    ]
    assert samples == [
        {
            "step": 0,
            "prompt": "1+2=",
            "response": "#3\u2713",
            "reward": 1.0,
            "logprobs": [0.5, None],
        }
    ]
    scalars = {
        value.tag: value.simple_value
        for event in _events(tmp_path)
        for value in event.summary.value
    }
    assert scalars == {"reward/mean": 0.5, "status/eos": 3.0}


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 1) as writer:
        writer.write_record({"step": 0})
        writer.write_samples(0, [{"prompt": ""}])
        writer.truncate_from(0)
    assert list(tmp_path.iterdir()) == []


def test_resuming_cuts_back_to_the_restored_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0) as writer:
        for step in range(4):
            writer.write_record({"step": step, "run": 1})
            writer.write_samples(step, [{"run": 1}, {"run": 1}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ru')
    with MetricsWriter(tmp_path, 0) as writer:
        writer.truncate_from(2)
        writer.write_record({"step": 2, "run": 2})
        writer.write_samples(2, [{"run": 2}])
    assert [(line["step"], line["run"]) for line in files.read_metrics(tmp_path)] == [
        (0, 1),
        (1, 1),
        (2, 2),
    ]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "samples.jsonl",
        "tensorboard",
    ]


def test_tensorboard_hides_what_was_cut(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.truncate_from(7)
    writer.write_record({"step": 7, "entropy": 0.5})
    writer.close()
    start, line = _events(tmp_path)[1:]
    assert (start.step, start.session_log.status) == (7, start.session_log.START)
    assert (line.step, line.summary.value[0].simple_value) == (7, 0.5)


def test_torn_last_line_is_dropped_and_a_bad_one_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1')
    assert files.read_metrics(tmp_path) == [{"step": 0}]
    MetricsWriter(tmp_path, 0).write_record({"step": 1})
    assert files.read_metrics(tmp_path) == [{"step": 0}, {"step": 1}]
    path.write_text('{"step": 0}\n{"step": 1}')  # only its newline is lost
    assert files.read_metrics(tmp_path) == [{"step": 0}, {"step": 1}]
    MetricsWriter(tmp_path, 0).write_record({"step": 2})
    assert [line["step"] for line in files.read_metrics(tmp_path)] == [0, 1, 2]
    path.write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2 is not JSON"):
        files.read_metrics(tmp_path)


def test_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.write_record({"step": 0, "entropy": 0.5})
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(
            ConfigError, match=r"metrics.jsonl cannot be written: File too large; free some space"
        ):
            writer.write_record({"step": 1, "entropy": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(files.read_metrics(tmp_path)) == 1


def test_a_program_does_not_import_torch_where_it_is_installed() -> None:
    """TensorBoard's library would, and that is half of the time of a program's imports."""
    pytest.importorskip("torch")
    code = "import sys, jaxspec.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
