"""Every command of the documents, in the order in which they are read: it runs, and makes what
later ones read."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from tests import fork_server
from tests.test_readme import PAGES, ROOT, Reader

_SMALL_POLICY = {"model.layers": "4", "sft.steps": "2"}
_SMALL_DRAFT = {
    "offline.steps": "2",
    "offline.samples": "128",
    "draft_training.ttt_steps": "1",  # is unrolled, which takes long to compile
}
SHORTER = {
    "train": {
        **_SMALL_POLICY,
        **_SMALL_DRAFT,
        "steps": "2",
        "data.eval_prompts": "8",
        "rollout.engine.no_tail": "",
        "no_compare_plain": "",
    },
    "train_sft": _SMALL_POLICY,
    "evaluate": _SMALL_POLICY | {"eval.samples": "2"},
    "train_draft": _SMALL_POLICY | _SMALL_DRAFT,
    "bench generate": {"prompt": "16", "new": "8", "repeats": "1", "budget": "1"},
    "bench step": {"prompt": "16", "new": "8", "repeats": "1", "budget": "1"},
    "bench gpu": {"sections": "0"},
}
"""By program, the options that make it short."""
REFUSED = {
    "--model.path": ("model.",),
    "--sft.steps": ("sft.",),
    "--checkpoint": ("model.", "sft."),
    "my_run.py": ("data.eval_prompts",),  # it has few problems
    "--compare": ("model.", "sft.", "eval."),
    "--offline.steps": ("offline.",),
    "--rollout.draft.kind none": ("offline.", "draft_training.", "no_compare_plain"),
}
"""Beside a command's own words, beginnings of options that would do nothing, or that it sets."""
NO_DRAFT = ("--algorithm", "--kl.beta", "--schedule.kind", "--reward.function")
"""Of training commands that are about something else than drafts: training one and compiling with
it is most of their time."""
NOT_RUN = ("test.sh", "venv.sh", "newest.sh", "real_model.sh")
"""Scripts of launch/ that install and test, and one that downloads a model and runs for an hour."""


def typed(text: str) -> Iterator[tuple[str, str]]:
    """The commands of the blocks that a shell can run, each with its here-document."""
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines = iter(block.replace("\\\n", " ").splitlines())
        for line in filter(str.strip, lines):
            command, begins, _ = line.partition("<<'END'")
            document = takewhile(lambda each: each != "END", lines) if begins else ()
            yield command, "".join(f"{each}\n" for each in document)


def shorter(program: str, words: list[str]) -> list[str]:
    """The same with the options that make it short, but for those that it says itself."""
    said = " ".join(words)
    if program == "train" and "--rollout.draft" not in said and set(NO_DRAFT) & set(words):
        words, said = [*words, "--rollout.draft.kind", "none"], said + " --rollout.draft.kind none"
    taken = tuple(name for word, names in REFUSED.items() if word in said for name in names)
    return words + [
        word
        for name, value in SHORTER.get(program, {}).items()
        if f"--{name}" not in words and not name.startswith(taken)
        for word in (f"--{name}", value)
        if word
    ]


class Typist(Reader):
    """Runs what it types, in the working folder, once it has been parsed."""

    def __init__(self, variables: dict[str, str]) -> None:
        super().__init__()
        self.variables = variables
        self.ran: set[str] = set()
        self.done: set[str] = set()
        """Commands that need not be run again where a later page repeats them."""

    def needs(self, *paths: str) -> None:
        super().needs(*paths)
        for path in paths:
            assert not path or path.isupper() or Path(path).exists(), path

    def run_for_real(self, command: str, document: str) -> None:
        """Its exit status is 0, and what it is to make is there."""
        made = set(self.made)
        self.type(command)
        words = shlex.split(command, comments=True)
        words = [*self.alias.get(words[0], [words[0]]), *words[1:]]
        if words[0] == "bash" and words[1].removeprefix("launch/") in NOT_RUN:
            return
        if words[0] == "cat":
            Path(words[2]).write_text(document, encoding="utf-8")
        elif words[0] != "alias" and not any(word.isalpha() and word.isupper() for word in words):
            self.execute(words)
        for path in self.made - made:
            assert Path(path).exists() or any(map(str.isupper, words)), f"{path}: {command}"

    def execute(self, words: list[str]) -> None:
        if words[0] == "bash":
            script, words = words[1].removeprefix("launch/"), words[2:]
            if script == "local.sh":  # without the set-up that it begins with
                begin = [sys.executable, "-m", "jaxspec.train"]
            else:
                begin, words = ["bash", str(ROOT / "launch" / script), words[0]], words[1:]
            program = "train"
        else:
            begin, words = [sys.executable, *words[1:3]], words[3:]
            program = begin[2].removeprefix("jaxspec").removeprefix(".")
            if program == "bench":
                begin, words = [*begin, words[0]], words[1:]
                program = f"bench {begin[3]}"
        words = words if "--help" in words else shorter(program, words)
        line = shlex.join([*begin, *words])
        if line in self.done:
            return
        # two devices take longer to compile for; a mesh is what multiprocess_cpu.sh makes
        devices = "2" if program.startswith("bench") else "1"
        # A script is no program of Python.
        run = subprocess.run if begin[0] == "bash" else fork_server.run
        done = run(
            [*begin, *words],
            env=self.variables | {"JAXSPEC_LOCAL_DEVICES": devices},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        self.ran.add(program)
        self.done.add(line)


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(PAGES[:1], id="the README", marks=pytest.mark.slow),
        pytest.param(PAGES, id="all", marks=pytest.mark.sweep),
    ],
)
def test_every_command_of_the_documents_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pages: list[Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    # compiled as in tests: most of the time is spent in compiling what runs for an instant
    variables = {
        **os.environ,
        "JAXSPEC_CACHE": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }
    typist = Typist(variables)
    for command, document in typed("\n".join(page.read_text("utf-8") for page in pages)):
        typist.run_for_real(command, document)
    assert "train" in typist.ran
    if pages != PAGES:
        return
    benches = {f"bench {name}" for name in ("generate", "step", "load", "roofline", "gpu")}
    others = {"train_sft", "train_draft", "evaluate", "sample", "export"}
    assert typist.ran == {"", "train"} | others | benches


def test_options_that_a_command_sets_or_refuses_are_not_added() -> None:
    words = shlex.split("--model.path trained --sft.steps 0 --offline.steps 0 --steps 4")
    assert shorter("train", words)[len(words) :] == [
        "--draft_training.ttt_steps",
        "1",
        "--data.eval_prompts",
        "8",
        "--rollout.engine.no_tail",
        "--no_compare_plain",
    ]
    assert shorter("sample", words) == words
    assert "none" in shorter("train", ["--kl.beta", "0.1"])
    assert "none" not in shorter("train", ["--kl.beta", "0.1", "--rollout.draft.kind", "mtp"])
    plain = shorter("train", ["--rollout.draft.kind", "none"])
    of_drafts = "--offline.", "--draft_training.", "--no_compare_plain"
    assert not [word for word in plain if word.startswith(of_drafts)]
    assert list(typed("```sh\ncat > a <<'END'\n1\n2\nEND\nb \\\n  c\n```\n")) == [
        ("cat > a ", "1\n2\n"),
        ("b    c", ""),
    ]
