"""Name and version of the distribution, and the namesake that must not lie over it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.config.cli import load_config, take_option
from jaxspec.inputs.checked import ConfigError
from jaxspec.system import version as versions
from jaxspec.system.version import DISTRIBUTION, package_version, refuse_namesake

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_the_version_is_that_of_the_distribution_or_else_of_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        versions,
        "metadata",
        SimpleNamespace(version=lambda name: f"7 of {name}", PackageNotFoundError=LookupError),
    )
    assert package_version() == "7 of jaxspec-rl"
    monkeypatch.setattr(
        versions,
        "metadata",
        SimpleNamespace(version=missing, PackageNotFoundError=metadata.PackageNotFoundError),
    )
    assert package_version() == PROJECT["version"]
    monkeypatch.setattr(versions, "_PACKAGE", tmp_path / "jaxspec")
    assert package_version() == "unknown"


@pytest.mark.parametrize("argv", [["--version"], ["--config", "rl_think.py", "--version"]])
def test_every_program_says_its_version(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for say in (
        lambda: load_config(argv, "train", ""),
        lambda: take_option(argv, "other", "checkpoint", "RUN"),
        lambda: bench.main(argv[-1:]),
        lambda: bench.main(["generate", "--model", "x", *argv]),
    ):
        with pytest.raises(SystemExit) as ended:
            say()
        assert ended.value.code == 0
        assert capsys.readouterr().out == f"jaxspec-rl {package_version()}\n"


def test_the_project_says_who_it_is() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["urls"].keys() == {"Homepage", "Source", "Issues", "Changelog"}
    assert "hub" not in PROJECT["optional-dependencies"]
    assert any("Python :: 3.11" in line for line in PROJECT["classifiers"])


@pytest.mark.parametrize("over", [True, False])
def test_a_namesake_in_the_same_folder_is_refused(
    over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lies elsewhere does no harm."""
    info = tmp_path / "jaxspec-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: jaxspec\nVersion: 0.3\nSummary: X-ray spectra\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    if not over:
        refuse_namesake()
        return
    monkeypatch.setattr(versions, "_PACKAGE", (tmp_path / "jaxspec").resolve())
    with pytest.raises(
        ConfigError,
        match=r"X-ray spectra\) is installed over jaxspec-rl .*pip uninstall jaxspec jaxspec-rl",
    ):
        refuse_namesake()


def test_a_namesake_is_named_before_its_modules_are_imported(
    repository: Path, tmp_path: Path
) -> None:
    """It has a package `data`, too, which takes the place of ours."""
    shutil.copytree(
        repository / "jaxspec", tmp_path / "jaxspec", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "jaxspec/data/__init__.py").write_text("raise ImportError")
    (tmp_path / "jaxspec-0.3.dist-info").mkdir()
    (tmp_path / "jaxspec-0.3.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: jaxspec\nVersion: 0.3\n"
    )
    command = [sys.executable, "-m", "jaxspec.train"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(
        r"error: the distribution jaxspec .*give each an environment of its own\n", run.stderr
    ), run.stderr


def test_an_old_installation_is_replaced(repository: Path, tmp_path: Path) -> None:
    """`launch/venv.sh` removes what is called jaxspec after installing jaxspec-rl, and only where
    it is there."""
    for folder in ("launch", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("launch/venv.sh", "launch/constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((repository / name).read_bytes())
    python, log = tmp_path / ".venv/bin/python", tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in *" show "*) test -f {tmp_path}/old;; esac\n'
    )
    python.chmod(0o755)

    def calls() -> list[str]:
        log.write_text("")
        subprocess.run(
            ["bash", str(tmp_path / "launch/venv.sh"), "test"], check=True, capture_output=True
        )
        return [
            line.split()[2] for line in log.read_text().splitlines() if line.startswith("-m pip")
        ]

    def named(words: list[str]) -> list[str]:
        return [
            word
            for line in log.read_text().splitlines()
            for word in words
            if f" {word} " in f" {line} "
        ]

    (tmp_path / "old").touch()
    calls()
    assert named(["install", "uninstall"]) == ["install", "uninstall"]
    assert calls() == [], "the second time nothing is done"
    (tmp_path / "old").unlink()
    (tmp_path / "launch/constraints.txt").write_text("# other\n")
    calls()
    assert named(["install", "uninstall"]) == ["install"]
