"""What the documents tell a reader to type: it parses, names only settings that exist, and uses
only files that an earlier line makes. `test_documents.py` runs it."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from jaxspec import __main__ as programs
from jaxspec import bench, evaluate, export, sample
from jaxspec.bench import drafts, generate, load, roofline, step
from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.config import cli
from jaxspec.config.cli import load_config, override_settings, take_option
from jaxspec.config.settings import Config
from jaxspec.inputs.checked import ConfigError

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *(ROOT / name for name in re.findall(r"\((docs/\w+\.md)\):", README))]
"""The README, and the pages of docs/ in the order in which it tells to read them."""
DOCUMENTS = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
BENCHES: dict[str, Any] = {
    "generate": generate.GenerateOptions(model="DIR"),
    "step": step.StepOptions(model="DIR"),
    "load": load.LoadOptions(),
    "roofline": roofline.RooflineOptions(),
    "gpu": GpuOptions(),
}
PYTHON = r"(?:\.venv/bin/)?python -m jaxspec"


def fenced(text: str) -> list[str]:
    """The commands of the blocks that a shell can run: one line each, with here-documents as `>
    FILE`."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).replace(
        "\\\n", " "
    )
    return [
        line
        for line in re.sub(
            r"<<'END'\n.*?^END$", "", blocks, flags=re.MULTILINE | re.DOTALL
        ).splitlines()
        if line.strip()
    ]


def own_config(words: list[str]) -> str:
    """The config file that a command names."""
    named = words[words.index("--config") + 1] if "--config" in words else ""
    return named.partition(":")[0]


class Reader:
    """Types one command after the other in a clean checkout, and remembers what they make."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        self.alias: dict[str, list[str]] = {}

    def type(self, command: str) -> None:
        words = shlex.split(command, comments=True)
        words = [*self.alias.get(words[0], [words[0]]), *words[1:]]
        if words[0] == "alias":
            name, meaning = words[1].split("=", 1)
            self.alias[name] = meaning.split()
        elif words[:2] == ["cat", ">"]:
            self.made.add(words[2])
        elif words[0] == "bash":
            assert (ROOT / words[1]).is_file(), command
            self.launch(words[1].removeprefix("launch/"), words[2:])
        else:
            assert words[:2] == [".venv/bin/python", "-m"], command
            self.run(words[2], words[3:])

    def launch(self, script: str, words: list[str]) -> None:
        if script in ("local.sh", "multiprocess_cpu.sh"):
            self.run("jaxspec.train", words[1:] if script.startswith("multi") else words)
        elif script == "real_model.sh":
            config = ["--config", "rl_think.py:smollm2_135m", "--model.path", "FOLDER"]
            self.run("jaxspec.train", [*config, "--data.path", "FILE", *words])
        else:
            assert script in ("test.sh", "venv.sh"), script

    def run(self, module: str, words: list[str]) -> None:
        """Parses as the program would; --help ends it."""
        name = module.removeprefix("jaxspec").removeprefix(".")
        if "--help" in words or not name:
            with pytest.raises(SystemExit, match="0"):
                programs.main(["--help"]) if not name else load_config(words, name, "")
        elif own_config(words) in self.made and not Path(own_config(words)).exists():
            self.made.add(words[words.index("--workdir") + 1])  # the reader has written it
        elif name in ("train", "train_sft", "train_draft"):
            config, _ = load_config(words, name, "")
            data, draft = config.data, config.rollout.draft
            text = config.offline.text if config.offline.text != "generic" else ""
            self.needs(
                config.model.path,
                draft.path,
                data.path,
                data.eval_path,
                data.tokenizer,
                config.lora.path,
                text,
            )
            if name == "train":
                self.made.add(config.workdir)
        elif name == "evaluate":
            options, rest = evaluate.parse_options(words)
            given = [options.checkpoint, *(options.compare or ())]
            self.needs(*(path.partition(":")[0] for path in given))
            if not options.compare:
                base = Config() if options.checkpoint else None
                config, _ = load_config(rest, name, "", base=base)
                sets = [each.data.path for each in config.eval.sets]
                self.needs(config.model.path, *sets)
        elif name in ("sample", "export"):
            path, rest = take_option(words, module, "checkpoint", "RUN")
            self.needs(path)
            options = override_settings(
                sample.SampleOptions() if name == "sample" else export.ExportOptions(),
                rest,
                module,
                "",
            )
            if isinstance(options, export.ExportOptions):
                self.made |= {options.out, f"{options.out}/draft"}
        else:
            assert name == "bench", module
            self.measure(words[0], words[1:])

    def measure(self, name: str, words: list[str]) -> None:
        if name == "drafts":
            _, rest = take_option(words, name, "rows", "N", "512")
            names, rest = take_option(rest, name, "drafts", "NAMES", "")
            text, rest = take_option(rest, name, "generic", "FILE", "")
            self.needs(text)
            assert {*filter(None, names.split(","))} <= {*drafts.DRAFT_NAMES}
            load_config(rest, "bench drafts", "", drafts.SWEPT_SETTINGS, drafts.USED_SETTINGS)
        else:
            self.needs(getattr(override_settings(BENCHES[name], words, name, ""), "model", ""))

    def needs(self, *paths: str) -> None:
        """What only a reader has is named in capitals."""
        for path in filter(None, paths):
            assert path in self.made or path.isupper(), (
                f"{path} is made by no earlier command; made so far: {sorted(self.made)}"
            )


def test_the_readme_leads_to_every_page() -> None:
    assert len(PAGES) == len(set(PAGES))
    assert set(PAGES) == {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}


def headings(page: Path) -> set[str]:
    """Of a page, as GitHub names their anchors."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), link
        assert not anchor or anchor in headings(file), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    """Those of the package, its tests, configs and scripts, by their paths."""
    named = re.findall(
        r"(?:jaxspec|tests|configs|launch)/[\w/]+\.(?:py|sh|sbatch|txt)\b",
        page.read_text(encoding="utf-8"),
    )
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_the_readme_is_a_front_door() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 120


def test_every_example_of_the_documents_can_be_typed_from_a_clean_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    reader, commands = Reader(), fenced(DOCUMENTS)
    assert len(commands) >= 15
    for command in commands:
        reader.type(command)
    assert {"runs/rl_think-tiny", "trained", "trained/draft", "sums.jsonl"} <= reader.made


def test_an_example_with_a_folder_that_nothing_makes_is_noticed() -> None:
    start = "```sh\n.venv/bin/python -m jaxspec.train --config rl_think.py {}\n```\n"
    for words in (
        "--model.path small",
        "--data.path a.jsonl",
        "--rollout.draft.path trained/draft",
    ):
        with pytest.raises(AssertionError, match="is made by no earlier command"):
            Reader().type(fenced(start.format(words))[0])
    with pytest.raises(ConfigError, match="did you mean --rollout"):
        Reader().type(fenced(start.format("--rollout.draft.lenght 3"))[0])


def shown(text: str) -> list[str]:
    """The indented commands of a text; one that goes on in the next line ends in a backslash."""
    return re.findall(rf"^  {PYTHON}\.(.+)$", re.sub(r" \\\n *", " ", text), re.MULTILINE)


INLINE = re.findall(rf"`{PYTHON}\.([^`]+)`", DOCUMENTS)
HEADERS = [
    match for file in sorted((ROOT / "configs").glob("*.py")) for match in shown(file.read_text())
]
EXAMPLES = shown(f"{cli._usage_guide('python -m jaxspec.train')}\n{export.ABOUT}\n{sample.ABOUT}")


def test_there_are_other_commands() -> None:
    """What finds them may find nothing once their form changes, and the next test would be
    content."""
    assert [len(found) >= least for found, least in ((INLINE, 5), (HEADERS, 5), (EXAMPLES, 5))] == [
        True
    ] * 3


@pytest.mark.parametrize("command", [*INLINE, *HEADERS, *EXAMPLES])
def test_other_commands_parse_with_names_in_capitals_for_what_a_reader_has(command: str) -> None:
    name, *words = shlex.split(re.split(r"  +\(", command)[0])
    if not words:
        assert name.split(".")[0] in programs.PROGRAMS
        return

    class Given(Reader):
        def needs(self, *paths: str) -> None:
            assert all(
                path.isupper() or path.split("/")[0] in ("trained", "runs", "qwen3-8b-grpo")
                for path in filter(None, paths)
            ), command

    Given().run(f"jaxspec.{name}", words)


def settings(cls: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of a class's fields, and of the classes among them."""
    for item in fields(cls):
        yield f"{prefix}{item.name}"
        inner = get_type_hints(cls)[item.name]
        if is_dataclass(inner):
            yield from settings(inner, f"{prefix}{item.name}.")
        elif get_origin(inner) is tuple and is_dataclass(get_args(inner)[0]):
            yield from settings(get_args(inner)[0], f"{prefix}{item.name}.0.")


def test_every_option_that_the_documents_name_exists() -> None:
    # the last three are SLURM's
    others = {
        "devices",
        "hardware",
        "json",
        "config",
        "checkpoint",
        "compare",
        "help",
        "version",
        "rows",
        "generic",
        "drafts",
        "slow",
        "sweep",
        "signal",
        "nodes",
        "segment",
    }
    known = {*settings(Config), *others}
    for options in (
        sample.SampleOptions,
        export.ExportOptions,
        *(type(each) for each in BENCHES.values()),
    ):
        known |= set(settings(options))
    named = set(re.findall(r"(?<![\w-])--(?!xla_)([a-z][\w.]*\w)", DOCUMENTS))
    unknown = {
        name
        for name in named
        if name not in known and re.sub(r"(^|\.)no_(?=\w+$)", r"\1", name) not in known
    }
    assert len(named) > 30
    assert not unknown - {"model.rope"}, unknown


def test_the_programs_that_are_listed_are_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = ROOT / "jaxspec"
    runnable = {
        file.stem
        for file in package.glob("*.py")
        if 'if __name__ == "__main__":\n    sys.exit' in file.read_text()
    } - {"__main__"}
    assert programs.PROGRAMS.keys() == runnable | {Path(str(bench.__file__)).parent.name}
    assert programs.main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"python -m jaxspec.{name} " in printed for name in programs.PROGRAMS)


def test_nothing_tells_users_to_install_the_namesake() -> None:
    """Which on the package index is a library for X-ray spectra."""
    files = [
        *PAGES,
        ROOT / "CHANGELOG.md",
        *filter(Path.is_file, (ROOT / "launch").iterdir()),
        *(ROOT / "jaxspec").rglob("*.py"),
        *(ROOT / "configs").glob("*.py"),
    ]
    for file in files:
        assert not re.search(
            r"pip install[^\n`]*\bjaxspec\b|\bjaxspec\[", file.read_text(encoding="utf-8")
        ), file


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/architecture.md"], ids=str)
def test_the_tree_goes_down_as_the_imports_do(page: Path) -> None:
    """Packages and modules stand in the order of import-linter's contract, and none is left out."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    floor = {name: number for number, row in enumerate(layers) for name in row.split(" | ")}
    tree = page.read_text(encoding="utf-8").partition("\njaxspec/\n")[2].partition("```")[0]
    named = re.findall(r"(?:^  |  )(\w+)(?:\.py|/)(?=\s)", tree, re.MULTILINE)
    assert set(named) | {"__main__"} == set(floor)
    assert [floor[name] for name in named] == sorted(floor[name] for name in named)
