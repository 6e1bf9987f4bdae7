"""What a process holds of a batch does not grow with the number of processes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import free_port
from tests.fork_server import Program
from tests.runs import ROOT

SCRIPT = """
import json, sys
count, process, port, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
import jax
jax.config.update("jax_num_cpu_devices", 2)
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process, initialization_timeout=60)
import numpy as np
from jaxspec import mesh as meshes
from jaxspec.config.settings import BatchConfig, DataConfig, ResolvedConfig, RolloutConfig
from jaxspec.data.problems import load_sets
from tests.host.batches import Batches, batches_of
from jaxspec.host.job import make_job
from jaxspec.processes import global_arrays
from jaxspec.inputs.spec import ModelSpec
from jaxspec.state import EOS

prompts, group, new = 4 * count, 2, 300
config = ResolvedConfig(
    model=ModelSpec(vocab=24, layers=4, embed=8, heads=2, kv_heads=2, head_size=4, ffn=8),
    rollout=RolloutConfig(max_new_tokens=new),
    batch=BatchConfig(prompts=prompts, group_size=group),
    data=DataConfig(digits=2, max_prompt_length=200),
)
job = make_job(config, meshes.make_mesh(2 * count, 1))
batches = batches_of(job, load_sets(config, job.tokenizer))

# Every array that the host makes room for, and every table that goes between processes.
made, summed = [], []
for name in ("zeros", "full", "ones", "empty"):
    make = getattr(np, name)
    def noted(shape, *rest, make=make, **named):
        made.append(int(np.prod(shape)))
        return make(shape, *rest, **named)
    setattr(np, name, noted)
add = global_arrays.sum_over_processes
global_arrays.sum_over_processes = lambda table: (summed.append(table.size), add(table))[1]

asked = batches.source.place_training(0)
here = np.flatnonzero(batches.source._is_held)
questions = global_arrays.read_local_rows(asked.tokens, here)
placed_problems = batches.source._select_problems(0, batches.source._is_held)
expected = [placed_problems[int(place)].ids for place in here]
assert [tuple(row[:len(ids)]) for row, ids in zip(questions, expected)] == expected
rows = np.flatnonzero(np.repeat(batches.source._is_held, group))
like = job.step.empty_scored_rollout(prompts * group).rollout
like = jax.tree.map(
    lambda leaf: jax.device_put(leaf, meshes.row_sharding(job.mesh)) if leaf.ndim else leaf, like
)
def of(name, value):
    leaf = getattr(like, name)
    return global_arrays.from_local_rows(leaf, rows, value(len(rows), leaf))
lengths = np.repeat([len(ids) for ids in expected], group).astype(np.int32)
rollout = like.replace(
    tokens=of("tokens", lambda n, leaf: np.repeat(
        np.pad(questions, [(0, 0), (0, leaf.shape[1] - questions.shape[1])]), group, axis=0)),
    prompt_lengths=of("prompt_lengths", lambda n, _: lengths),
    lengths=of("lengths", lambda n, _: lengths + 7),
    status=of("status", lambda n, _: np.repeat(np.int32(EOS), n)),
)
scored = batches.scorer.score_training(0, rollout)
told = {
    "made": max(made),
    "summed": max(summed),
    "reward": scored.metrics["reward/mean"],
    "outcomes": scored.metrics,
    "rows": len(rows),
}
total = add(np.arange(5, dtype=np.float32) + process)
assert total.tolist() == [count * i + sum(range(count)) for i in range(5)]
with open(out, "w") as file:
    json.dump(told, file)
"""


def told_by(folder: Path, count: int) -> list[dict]:
    port = str(free_port())
    files = [folder / f"{count}-{process}" for process in range(count)]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(count)]
    runs = [
        Program(
            [*script, str(process), port, str(file)],
            env=variables,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, file in enumerate(files)
    ]
    for run in runs:
        _, error = run.communicate(timeout=200)
        assert run.returncode == 0, error
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_twice_the_rows_on_twice_the_processes_are_no_more_for_each(tmp_path: Path) -> None:
    (alone,) = told_by(tmp_path, 1)
    two = told_by(tmp_path, 2)
    for each in two:
        assert each["rows"] == alone["rows"] == 8
        # Rows of tokens are the process's own. Plans and tables have a few numbers a row of all.
        assert each["made"] <= alone["made"]
        assert each["summed"] <= 2 * alone["summed"]
        assert alone["summed"] < 8 * 8
        assert np.isfinite(each["reward"])
        assert each["outcomes"] == two[0]["outcomes"]
