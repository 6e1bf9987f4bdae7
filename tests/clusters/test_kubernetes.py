"""The JobSet: what each process gets from it, its fields, and real processes of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxspec.processes import places
from jaxspec.processes.places import JobMember
from tests.clusters.stand_ins import PLAIN, PYTHON, RECORDER, TINY, alone, program, records
from tests.compile_cache import compiled_programs
from tests.conftest import free_port
from tests.runs import ROOT, command, environment, lines


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
            assert places.member_from_variables() == JobMember(
                f"{first}:1234", job["completions"], number
            )
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


@pytest.mark.sweep
def test_pods_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled_programs()))
    _, jobset = the_jobset()
    here = f"127.0.0.1:{free_port()}"
    program(tmp_path / "bin/python", PYTHON)
    two = {"JAXSPEC_COORDINATOR": here, "JAXSPEC_PROCESSES": "2"}
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    started = [
        subprocess.Popen(
            [*words[:4], *command(tmp_path / "run", **TINY)],
            env={**variables, **environment(tmp_path / "cache", 1), **two, **path},
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
