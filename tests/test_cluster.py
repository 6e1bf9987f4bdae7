"""The launch files for clusters: what each process gets from them, how they end, and real processes
of them on loopback."""

import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxspec.processes import places
from jaxspec.processes.places import Place
from tests.runs import ROOT, command, environment, lines

yaml = pytest.importorskip("yaml")

SRUN = f"""#!{sys.executable}
import json, os, subprocess, sys
words = sys.argv[1:]
program = words[words.index("python"):]
nodes, each = json.loads(os.environ["STUB_NODES"]), int(os.environ["STUB_TASKS_PER_NODE"])
tasks = []
for number in range(len(nodes) * each):
    place = {{
        "SLURM_NTASKS": len(nodes) * each,
        "SLURM_PROCID": number,
        "SLURM_LOCALID": number % each,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NODELIST": os.environ["STUB_NODELIST"],
    }}
    variables = os.environ | {{name: str(value) for name, value in place.items()}}
    tasks.append(subprocess.Popen(program, env=variables))
sys.exit(max(task.wait() for task in tasks))
"""
"""SLURM's `srun`, as far as it says to each task where it is: all tasks are on this machine."""

SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*"
"""

RECORDER = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
name = os.environ.get("SLURM_PROCID") or os.environ["JAXSPEC_PROCESS_ID"]
told = dict(words=sys.argv[1:], environment=dict(os.environ))
Path(os.environ["STUB_RECORDS"], name).write_text(json.dumps(told))
sys.exit(int(os.environ["STUB_STATUS"]))
"""
"""Python, which only says what it was started with."""

PLAIN = {"PATH": os.environ["PATH"], "HOME": "/root"}


def program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def as_batch(
    folder: Path, python: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the batch script in a checkout whose SLURM and Python are these."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": python}.items():
        program(folder / ".venv/bin" / name, text)
    script = ["bash", str(ROOT / "launch/slurm.sbatch"), *arguments]
    given = PLAIN | {"SLURM_JOB_ID": "4711"} | variables
    return subprocess.run(
        script, cwd=folder, env=given, capture_output=True, text=True, timeout=400, check=False
    )


def records(folder: Path) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    for file in sorted(folder.iterdir(), key=lambda file: int(file.name)):
        told = json.loads(file.read_text())
        yield int(file.name), told["words"], told["environment"]


def wanted(text: str) -> dict[str, str]:
    """What a batch script asks SLURM for."""
    asked = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    words = (word.removeprefix("--").partition("=") for word in asked)
    return {name: value for name, _, value in words}


def test_slurm_gives_each_gpu_a_process_that_knows_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = wanted((ROOT / "launch/slurm.sbatch").read_text())
    nodes, each = int(asked["nodes"]), int(asked["ntasks-per-node"])
    assert each == int(asked["gpus-per-node"]) == 4
    assert nodes % int(asked["segment"]) == 0
    assert int(asked["segment"]) <= 18
    (tmp_path / "records").mkdir()
    ended = as_batch(
        tmp_path,
        RECORDER,
        *("--config", "a name.py", "--steps", "1"),
        STUB_NODES=json.dumps([f"node{number:02}" for number in range(nodes)]),
        STUB_NODELIST=f"node[00-{nodes - 1:02}]",
        STUB_TASKS_PER_NODE=str(each),
        STUB_RECORDS=str(tmp_path / "records"),
        STUB_STATUS="0",
        XLA_FLAGS="--xla_dump_to=/tmp/mine",
    )
    assert ended.returncode == 0, ended.stderr
    found = list(records(tmp_path / "records"))
    assert [number for number, *_ in found] == list(range(nodes * each))
    shell = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    for number, words, variables in found:
        assert words == ["-m", "jaxspec.train", "--config", "a name.py", "--steps", "1"]
        ours = {
            name: value
            for name, value in variables.items()
            if not name.startswith("STUB_") and name not in shell
        }
        assert ours == PLAIN | {
            "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}",
            "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true --xla_dump_to=/tmp/mine",
            "NCCL_DEBUG": "WARN",
            "SLURM_JOB_ID": "4711",
            "SLURM_NTASKS": "32",
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number % 4),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "node[00-07]",
        }
        with monkeypatch.context() as there:
            alone(there, variables)
            assert places.told() is None
            assert places.in_a_job()
            place = places.detected(1)
        assert place is not None
        assert (place.coordinator.partition(":")[0], *place[1:]) == ("node00", 32, number)


def alone(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Puts this process where another was."""
    for name in [*os.environ]:
        if name.startswith(("JAX", "SLURM", "OMPI", "JOB_COMPLETION")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("status", "ends", "said"),
    [("0", 0, ""), ("143", 0, "scontrol requeue 4711\n"), ("2", 2, ""), ("1", 1, "")],
)
def test_a_job_that_was_stopped_and_saved_goes_back_to_the_queue(
    tmp_path: Path, status: str, ends: int, said: str
) -> None:
    (tmp_path / "records").mkdir()
    ended = as_batch(
        tmp_path,
        RECORDER,
        STUB_NODES='["here"]',
        STUB_NODELIST="here",
        STUB_TASKS_PER_NODE="1",
        STUB_RECORDS=str(tmp_path / "records"),
        STUB_STATUS=status,
    )
    assert (ended.returncode, ended.stdout) == (ends, said), ended.stderr


def the_jobset() -> tuple[dict[str, Any], dict[str, Any]]:
    domain, jobset = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    return domain, jobset


def pods(jobset: dict[str, Any]) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """The pods that JobSet makes, as its documentation says: host name, command and environment."""
    for replicated in jobset["spec"]["replicatedJobs"]:
        for job in range(replicated["replicas"]):
            spec = replicated["template"]["spec"]
            (container,) = spec["template"]["spec"]["containers"]
            for pod in range(spec["completions"]):
                annotations = {"batch.kubernetes.io/job-completion-index": str(pod)}
                fields = {f"metadata.annotations['{key}']": annotations[key] for key in annotations}
                host = f"{jobset['metadata']['name']}-{replicated['name']}-{job}-{pod}"
                variables = {"JOB_COMPLETION_INDEX": str(pod)} | {
                    each["name"]: each.get("value")
                    or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
                    for each in container["env"]
                }
                yield (
                    f"{host}.{jobset['spec']['network']['subdomain']}",
                    [*container["command"], *container["args"]],
                    variables,
                )


def test_kubernetes_gives_each_node_a_process_that_knows_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain, jobset = the_jobset()
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completions"] == job["parallelism"] == domain["spec"]["numNodes"]
    found = list(pods(jobset))
    first, words, _ = found[0]
    for number, (_, _, variables) in enumerate(found):
        assert variables == {
            "JAXSPEC_COORDINATOR": f"{first}:1234",
            "JAXSPEC_PROCESSES": str(job["completions"]),
            "JAXSPEC_PROCESS_ID": str(number),
            "JAXSPEC_CACHE": "/runs/cache",
            "JAXSPEC_WAIT_SECONDS": "1200",
            "JOB_COMPLETION_INDEX": str(number),
            "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true",
            "NCCL_LAUNCH_MODE": "GROUP",
            "NCCL_DEBUG": "WARN",
        }
        with monkeypatch.context() as there:
            alone(there, variables)
            assert places.told() == Place(f"{first}:1234", job["completions"], number)
    program(tmp_path / "bin/python", RECORDER)
    (tmp_path / "records").mkdir()
    stub = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "STUB_STATUS": "3"}
    variables = found[0][2] | stub | {"STUB_RECORDS": str(tmp_path / "records")}
    ended = subprocess.run(words, env=variables, check=False)
    assert ended.returncode == 3
    ((_, arguments, _),) = records(tmp_path / "records")
    assert arguments == ["-m", "jaxspec.train", *words[4:]]


FIELDS: dict[str, Any] = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {
                    "name": str,
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": str,
                "replicas": int,
                "template": {
                    "spec": {
                        "completionMode": "Indexed",
                        "completions": int,
                        "parallelism": int,
                        "backoffLimit": int,
                        "podFailurePolicy": {"rules": [dict]},
                        "template": {
                            "spec": {
                                "restartPolicy": "Never",
                                "terminationGracePeriodSeconds": int,
                                "affinity": {"podAffinity": dict},
                                "resourceClaims": [{"name": str, "resourceClaimTemplateName": str}],
                                "containers": [
                                    {
                                        "name": "train",
                                        "image": str,
                                        "command": [str],
                                        "args": [str],
                                        "env": [dict],
                                        "resources": {"limits": dict, "claims": [{"name": str}]},
                                        "volumeMounts": [{"name": str, "mountPath": str}],
                                    }
                                ],
                                "volumes": [dict],
                            }
                        },
                    }
                },
            }
        ],
    },
}
"""The fields that the file has, from the published definitions of JobSet (v1alpha2), Job and Pod:
by name and type, or the one value of those allowed that the file means."""


def wrong(found: Any, schema: Any, where: str = "") -> list[str]:
    """Where a document is not as a schema says."""
    if isinstance(schema, dict):
        if not isinstance(found, dict) or found.keys() != schema.keys():
            return [where]
        return [each for key in schema for each in wrong(found[key], schema[key], f"{where}.{key}")]
    if isinstance(schema, list):
        return [
            each for i, item in enumerate(found) for each in wrong(item, schema[0], f"{where}[{i}]")
        ]
    good = type(found) is schema if isinstance(schema, type) else found == schema
    return [] if good else [where]


def test_the_jobset_has_the_fields_that_there_are() -> None:
    domain, jobset = the_jobset()
    assert wrong(jobset, FIELDS) == []
    assert domain["kind"] == "ComputeDomain"
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    claimed = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    assert [claim["resourceClaimTemplateName"] for claim in pod["resourceClaims"]] == [claimed]
    (container,) = pod["containers"]
    assert [each["name"] for each in container["volumeMounts"]] == [
        each["name"] for each in pod["volumes"]
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}


def test_a_field_that_is_not_there_is_found() -> None:
    _, jobset = the_jobset()
    jobset["spec"]["network"]["subDomain"] = jobset["spec"]["network"].pop("subdomain")
    jobset["spec"]["failurePolicy"]["maxRestarts"] = "5"
    assert wrong(jobset, FIELDS) == [".spec.network", ".spec.failurePolicy.maxRestarts"]


def test_scripts_pass_shellcheck() -> None:
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed (extra lint)")
    files = [*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch"), ROOT / ".ci/run"]
    ended = subprocess.run([checker, *map(str, files)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_all_launch_files_end_in_the_same_command() -> None:
    same = 'python -m jaxspec.train "$@"'
    for name in ("slurm.sbatch", "kubernetes.yaml"):
        assert (ROOT / "launch" / name).read_text().count(same) == 1, name
    for name in ("local.sh", "multiprocess_cpu.sh"):
        assert '-m jaxspec.train "$@"' in (ROOT / "launch" / name).read_text(), name


def test_the_compiler_knows_the_flags_of_the_launch_files() -> None:
    """XLA ends a process for a flag that it does not know."""
    _, jobset = the_jobset()
    flags = next(pods(jobset))[2]["XLA_FLAGS"]
    assert flags in (ROOT / "launch/slurm.sbatch").read_text()
    said = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"],
        env=PLAIN | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == "cpu\n", said.stderr


TINY = {
    "model__layers": 1,
    "sft__steps": 0,
    "rollout__draft__kind": "none",
    "no_compare_plain": False,
    "batch__prompts": 2,
    "steps": 1,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both launch files start the same program."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_processes_that_slurm_starts_train_together(cache: Path, tmp_path: Path) -> None:
    arguments = command(tmp_path / "run", **TINY)
    python = f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} "$@"\n'
    ended = as_batch(
        tmp_path,
        python,
        *arguments,
        STUB_NODES='["localhost"]',
        STUB_NODELIST="localhost",
        STUB_TASKS_PER_NODE="2",
        **{**environment(cache, 1), "PATH": os.environ["PATH"]},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(lines(tmp_path / "run")) == 1
    assert "for {'data': 2, 'tensor': 1} devices" in ended.stdout


@pytest.mark.slow
def test_pods_train_together(cache: Path, tmp_path: Path) -> None:
    _, jobset = the_jobset()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{probe.getsockname()[1]}"
    program(
        tmp_path / "bin/python", f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    two = {"JAXSPEC_COORDINATOR": here, "JAXSPEC_PROCESSES": "2"}
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    started = [
        subprocess.Popen(
            [*words[:4], *command(tmp_path / "run", **TINY)],
            env={**variables, **environment(cache, 1), **two, **path},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _, words, variables in list(pods(jobset))[:2]
    ]
    for each in started:
        said, _ = each.communicate(timeout=300)
        assert each.returncode == 0, said
    assert len(lines(tmp_path / "run")) == 1
