"""A hostile user's tour of every surface: each bad input ends in one line that names the remedy's
place, with status 2, and harms nothing.

All run in one process, through the programs' own entries, with a model so small that what is wrong
is met within a second.
"""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import export, sample, train
from jaxspec.bench import roofline
from jaxspec.bench.__main__ import main as bench_main
from jaxspec.config.as_json import to_json
from jaxspec.config.cli import load_config
from jaxspec.config.unused import OF_DRAFT, OF_POLICY
from jaxspec.data.tokenizer import character_tokenizer
from jaxspec.hf.from_checkpoint import resolved
from jaxspec.host import loaded_run
from jaxspec.host.job import reported, run
from jaxspec.host.workdir import prepare_workdir
from jaxspec.system.interrupt import Interrupt
from tests.conftest import answering_config, save_policy, tiny_model

MODEL = tiny_model(vocab=24, dtype="float32")
SIZES = {"vocab": 24, "layers": 1, "embed": 8, "heads": 2, "kv_heads": 1, "head_size": 4, "ffn": 8}
TINY = [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]
ALONE = "--sft.steps 0 --rollout.draft.kind none --rollout.engine.no_tail".split()  # noqa: SIM905
QUICK = [*TINY, *ALONE]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has been started; what is written by default goes where nothing else is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "kept")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))


def ended(work: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Status of a program, and what it printed; what tyro or argparse refuse ends it."""
    try:
        status = work()
    except SystemExit as stop:
        status = int(stop.code or 0)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def trained(*argv: str, config: str = "rl_think.py") -> int:
    return run("train", "Trains.", train.main, ["--config", config, *argv])


def assert_one_line(printed: str, *words: str) -> None:
    last = printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert last.startswith("error: "), printed
    assert [word for word in words if word not in last] == []


SETTINGS = {
    "grpo.grad_clip": ["-1", "0", "nan", "inf"],
    "grpo.learning_rate": ["-1e-4", "0", "inf", "1e-60"],
    "grpo.weight_decay": ["-0.1", "nan"],
    "grpo.warmup_steps": ["-1", "99999999999"],
    "grpo.prompts": ["0", "-2"],
    "grpo.group_size": ["1", "0"],
    "draft_training.learning_rate": ["-1", "nan"],
    "draft_training.grad_clip": ["0", "-inf"],
    "draft_training.decay": ["0", "1.5"],
    "sft.learning_rate": ["-1", "inf"],
    "sft.wrong_steps": ["1", "-0.1"],
    "offline.learning_rate": ["0", "nan"],
    "model.norm_eps": ["0", "-1e-6"],
    "model.rope_theta": ["0", "-1", "inf"],
    "model.heads": ["0", "3"],
    "model.head_size": ["3"],
    "rollout.temperature": ["-1", "1e-39", "inf", "nan", "1e-4"],
    "rollout.top_p": ["0", "1.1", "nan"],
    "rollout.top_k": ["-1"],
    "rollout.max_new_tokens": ["0"],
    "rollout.min_new_tokens": ["28", "-1"],
    "rollout.banned": ["-1", "40"],
    "rollout.lookup.max_match": ["2147483647"],
    "rollout.lookup.past": ["2147483647"],
    "draft_training.ttt_steps": ["36", "2147483647"],
    "model.layers": ["1001", "2147483647"],
    "rollout.draft.layers": ["2147483647"],
    "sft.rows": ["2000000000"],
    "offline.samples": ["2000000000"],
    "offline.rows": ["1000000000"],
    "workdir": ["a\0b"],
    "rollout.draft.temperature": ["nan", "-1"],
    "rollout.engine.slots": ["0"],
    "rollout.engine.pages": ["3"],
    "seed": ["-1", "4294967296"],
    "steps": ["0", "-5", "3000000000"],
    "save_every": ["0"],
    "profile": ["5", "7:3", "a:b", "81:200", "9" * 5000 + ":2"],
    "lora.alpha": ["0"],
    "mesh.data": ["3", "-1", "100000"],
    "mesh.tensor": ["0", "3"],
}
"""What no run can have; the names and what is wrong stand in the message."""
BESIDE = {
    "lora": ["--lora.rank", "2"],
    "rollout.draft.temperature": ["--rollout.draft.sampling", "sample"],
    "rollout.draft.layers": ["--rollout.draft.kind", "model"],
    "rollout.lookup": ["--rollout.draft.kind", "history"],
    "offline.rows": ["--offline.text", "generic"],
}
"""What gives a setting its use."""


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in SETTINGS.items() for value in values]
)
def test_settings(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    beside = next((words for part, words in BESIDE.items() if name.startswith(part)), [])
    status, printed = ended(lambda: trained(f"--{name}", value, *beside), capsys)
    assert status == 2
    assert_one_line(printed, name)
    assert not Path("runs").exists()


WORDS = [
    *(
        ["--steps", "1.5"],
        ["--steps", "many"],
        ["--rollout.verify", "maybe"],
        ["--rollout.draft.kind", "eagle4"],
    ),
    *(
        ["--grpo.group_sise", "8"],
        ["--model", "qwen"],
        ["--steps"],
        ["8"],
        ["--rollout.banned", "x"],
        ["--no_steps"],
    ),
]


@pytest.mark.parametrize("argv", WORDS, ids=" ".join)
def test_words_that_are_no_settings(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = ended(lambda: trained(*argv), capsys)
    assert status == 2
    assert "Traceback" not in printed
    assert argv[0].removeprefix("--no_").removeprefix("--").partition("_sise")[0] in printed


HEAD = (
    "from jaxspec.config.settings import *\nfrom dataclasses import replace\nSCALES = ('tiny',)\n"
)
FILES = {
    "nothing": ("", ["SCALES"]),
    "no function": ("SCALES = ('tiny',)", ["get_config"]),
    "no scale": ("SCALES = ()\ndef get_config(scale):\n    return 1", ["SCALES"]),
    "half a line": ("def get_config(", ["is not a Python file"]),
    "bytes": ("\0\0", ["bad.py"]),
    "an import of nothing": ("import nowhere_at_all", ["line 1", "nowhere_at_all"]),
    "an error of its own": (
        f"{HEAD}def get_config(scale):\n    return 1 / 0",
        ["line 5", "division by zero"],
    ),
    "an exit": (f"{HEAD}raise SystemExit(0)", ["line 4", "SystemExit"]),
    "another class": (
        f"{HEAD}def get_config(scale):\n    return DataConfig()",
        ["returns a DataConfig"],
    ),
    "a float of steps": (
        f"{HEAD}def get_config(scale):\n    return Config(steps=1.5)",
        ["steps is 1.5", "a whole number"],
    ),
    "text of steps": (
        f"{HEAD}def get_config(scale):\n    return Config(steps='4')",
        ["steps is '4'", "a whole number"],
    ),
    "a flag of steps": (
        f"{HEAD}def get_config(scale):\n    return Config(steps=True)",
        ["steps is True", "a whole number"],
    ),
    "no part": (
        f"{HEAD}def get_config(scale):\n    return Config(model=None)",
        ["model is None", "ModelConfig"],
    ),
    "another part": (
        f"{HEAD}def get_config(scale):\n    return Config(grpo=DataConfig())",
        ["grpo", "GrpoConfig"],
    ),
    "a wrong literal": (
        f"{HEAD}def get_config(scale):\n    return Config(rollout=RolloutConfig(verify='all'))",
        ["rollout.verify", "block"],
    ),
    "a list": (
        f"{HEAD}def get_config(scale):\n    return Config(rollout=RolloutConfig(banned=[1]))",
        ["rollout.banned", "a tuple"],
    ),
    "an unknown name": (
        f"{HEAD}def get_config(scale):\n    return Config(stepz=3)",
        ["line 5", "stepz"],
    ),
    "a path that is none": (
        f"{HEAD}def get_config(scale):\n    return Config(workdir=3)",
        ["workdir is 3", "text"],
    ),
    "a subclass": (
        f"{HEAD}class Mine(Config): ...\ndef get_config(scale):\n    return Mine()",
        ["returns a Mine", "subclass"],
    ),
    "a subclass of a part": (
        (
            f"{HEAD}class Mine(GrpoConfig):\n    def __post_init__(self): ...\n"
            "def get_config(scale):\n    return Config(grpo=Mine(grad_clip=-1))"
        ),
        ["line 7", "grpo", "GrpoConfig itself"],
    ),
    "an array of scales": (
        "import numpy as np\nSCALES = np.array(['a', 'b'])\ndef get_config(scale): ...",
        ["SCALES is array"],
    ),
    "an async function": (
        f"{HEAD}async def get_config(scale):\n    return Config()",
        ["async def"],
    ),
    "an exit of a generator": (f"{HEAD}raise GeneratorExit", ["line 4", "GeneratorExit"]),
    "a cancellation": (
        f"{HEAD}import asyncio\nraise asyncio.CancelledError",
        ["line 5", "CancelledError"],
    ),
    "a base exception": (
        f"{HEAD}raise BaseException('two\\nlines')",
        ["line 4", "BaseException: two lines"],
    ),
    "an error without words": (
        f"{HEAD}class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
        ["line 6", "Mute: (its message cannot be read)"],
    ),
    "too long a number": (
        f"{HEAD}def get_config(scale):\n    return Config(steps=10**5000)",
        ["steps is", "5000 digits"],
    ),
    "a float of numpy": (
        (
            f"{HEAD}import numpy as np\ndef get_config(scale):\n    return"
            " Config(sft=SftConfig(learning_rate=np.float32(1e-3)))"
        ),
        ["sft.learning_rate", "an int or a float"],
    ),
    "a fraction": (
        (
            f"{HEAD}from fractions import Fraction\ndef get_config(scale):\n    return"
            " Config(sft=SftConfig(learning_rate=Fraction(1, 3)))"
        ),
        ["sft.learning_rate", "an int or a float"],
    ),
    "a draft's sizes": (
        (
            f"{HEAD}def get_config(scale):\n    return"
            " Config(draft_model=ModelConfig(family=FamilyConfig(experts=8)))"
        ),
        ["draft_model", "leave it out"],
    ),
    "NUL in text": (
        f"{HEAD}def get_config(scale):\n    return Config(workdir='a\\0b')",
        ["workdir is", "NUL"],
    ),
    "not a number": (
        f"{HEAD}def get_config(scale):\n    return Config(grpo=GrpoConfig(grad_clip=float('nan')))",
        ["grpo.grad_clip is nan"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_config_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = FILES[name]
    (tmp_path / "bad.py").write_text(text)
    status, printed = ended(lambda: trained(config=str(tmp_path / "bad.py")), capsys)
    assert status == 2
    assert_one_line(printed, "bad.py", *words)


@pytest.mark.parametrize(
    "given",
    ["nowhere.py", "rl_think.py:huge", "/", ".", "", "a" * 300 + ".py", "circle.py", "x\ny.py"],
)
def test_names_of_config_files(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "circle.py").symlink_to("circle.py")
    status, printed = ended(lambda: trained(config=given), capsys)
    assert status == 2
    assert_one_line(printed, given.replace("\n", "\\n").rpartition(":")[2] or "no --config")
    assert len(printed.splitlines()) == 1


def test_an_interruption_of_a_config_files_own_is_its_error_and_ctrl_c_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        trained(config="bad.py")
    # as in the programs, where Python never raises it
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status, printed = ended(lambda: trained(config="bad.py"), capsys)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 2
    assert_one_line(printed, "bad.py, line 1: KeyboardInterrupt")


FAMILIES = [
    ("--model.family.model_type llama", "--model.family.no_query_key_norm"),
    ("--model.family.model_type qwen2", "--model.family.attention_bias"),
    (
        "--model.family.model_type mimo --model.family.no_query_key_norm",
        "--model.family.attention_bias",
    ),
    ("--model.family.model_type qwen3_moe", "--model.family.experts 8"),
    ("--model.family.experts 8", "--model.family.experts 0"),
    ("--model.family.attention_bias", "--model.family.output_bias"),
    ("--model.family.no_query_key_norm", "--model.family.query_key_norm"),
]


@pytest.mark.parametrize(("words", "remedy"), FAMILIES)
def test_families_that_could_not_be_read_back(
    words: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = ended(lambda: trained(*words.split()), capsys)
    assert status == 2
    assert_one_line(printed, "model.family.model_type", remedy)


@pytest.mark.parametrize(
    ("name", "value"), [("JAX_NUM_CPU_DEVICES", "100000"), ("JAXSPEC_LOCAL_DEVICES", "513")]
)
def test_devices_beyond_all_sense(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    status, printed = ended(lambda: trained(*QUICK), capsys)
    assert status == 2
    assert_one_line(printed, name, value, "at most 512")


PROBLEM = '{"question": "1+1=", "answer": "2"}\n'
DATA: dict[str, tuple[bytes | None, list[str]]] = {
    "missing": (None, ["No such file"]),
    "empty": (b"", ["is empty"]),
    "blank lines": (b"\n\n \n", ["empty"]),
    "no JSON": (b"1+1=2\n", ["line 1", "not JSON"]),
    "half a line": (PROBLEM.encode() + b'{"question": "1', ["line 2", "not JSON"]),
    "a list": (b"[1, 2]\n", ["line 1", "list"]),
    "null": (b"null\n", ["line 1"]),
    "another column": (
        b'{"q": "1+1=", "answer": "2"}\n',
        ["line 1", "'question'", "prompt_column"],
    ),
    "no answer": (b'{"question": "1+1="}\n', ["line 1", "'answer'"]),
    "a null answer": (b'{"question": "1+1=", "answer": null}\n', ["line 1", "'answer'"]),
    "a list of answers": (
        b'{"question": "1+1=", "answer": ["2"]}\n',
        ["line 1", "'answer'", "list"],
    ),
    "empty answers": (b'{"question": "1+1=", "answer": ""}\n', ["answer"]),
    "unknown letters": (b'{"question": "what?", "answer": "2"}\n', ["line 1", "tokenizer"]),
    "bytes": (b"\xff\xfe\x00", ["line 1"]),
    "half a letter": (
        b'{"question": "1\\ud800", "answer": "2"}\n',
        ["line 1", "half of a character"],
    ),
    "deep": (b"[" * 100_000, ["line 1", "nested too deeply"]),
    "too long": (b'{"question": "' + b"1" * 300 + b'", "answer": "2"}\n', ["max_prompt_length"]),
    "too few": (PROBLEM.encode(), ["eval_prompts"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_data(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = DATA[name]
    file = tmp_path / "train.jsonl"
    if content is not None:
        file.write_bytes(content)
    status, printed = ended(
        lambda: trained(*QUICK, "--data.path", str(file), "--workdir", "run"), capsys
    )
    assert status == 2
    assert_one_line(printed, str(file), *words)
    assert not list(Path("run").glob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "folder"])
def test_data_that_is_no_file(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    words = ["--data.eval_path", "held.jsonl"] if not path else ["--data.path", path]
    status, printed = ended(lambda: trained(*QUICK, *words), capsys)
    assert status == 2
    assert_one_line(printed, words[0].removeprefix("--"))


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Changes what a JSON file of a folder holds."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def put(name: str, content: str | bytes) -> Callable[[Path], Any]:
    """Writes a file of a folder anew."""
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def spoilt(**values: Any) -> Callable[[Path], None]:
    return edited("config.json", lambda content: content.update(values))


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return edit


def _nan(held: dict[str, np.ndarray]) -> None:
    held["model.norm.weight"][0] = np.nan


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "empty config": (put("config.json", ""), ["config.json", "not valid JSON"]),
    "a list of config": (put("config.json", "[]"), ["config.json", "list"]),
    "an unknown architecture": (
        spoilt(architectures=["Mamba"], model_type="mamba"),
        ["config.json"],
    ),
    "text of a size": (spoilt(hidden_size="64"), ["config.json", "hidden_size"]),
    "no size": (
        edited("config.json", lambda content: content.pop("hidden_size")),
        ["config.json", "hidden_size"],
    ),
    "a null size": (spoilt(num_hidden_layers=None), ["config.json", "num_hidden_layers"]),
    "a negative size": (spoilt(vocab_size=-3), ["config.json", "vocab_size"]),
    "a float of a size": (spoilt(num_attention_heads=2.5), ["config.json", "num_attention_heads"]),
    "a list of eps": (spoilt(rms_norm_eps=[1]), ["config.json", "rms_norm_eps"]),
    "text of rope scaling": (spoilt(rope_scaling="yarn"), ["config.json", "rope_scaling"]),
    "an unknown rope scaling": (
        spoilt(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        ["config.json", "spiral"],
    ),
    "text of a flag": (spoilt(tie_word_embeddings="no"), ["config.json", "tie_word_embeddings"]),
    "weights of another shape": (spoilt(intermediate_size=25), ["another shape"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors"]),
    "weights cut short": (_cut, ["model.safetensors", "truncated"]),
    "empty weights": (put("model.safetensors", b""), ["model.safetensors"]),
    "a missing tensor": (
        tensors(lambda held: held.pop("model.norm.weight")),
        ["model.norm.weight"],
    ),
    "a foreign tensor": (
        tensors(lambda held: held.update(extra=np.ones(3, np.float32))),
        ["extra"],
    ),
    "whole numbers": (
        tensors(lambda held: held.update({"model.norm.weight": np.ones(16, np.int32)})),
        ["model.norm.weight"],
    ),
    "an index of a list": (put("model.safetensors.index.json", "[]"), ["index.json"]),
    "an index that leads outside": (
        put(
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}),
        ),
        ["index.json", "../elsewhere"],
    ),
    "an index of numbers": (
        put("model.safetensors.index.json", json.dumps({"weight_map": {"a": 3}})),
        ["index.json"],
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json"]),
    "an empty tokenizer": (put("tokenizer.json", ""), ["tokenizer.json"]),
    "half a tokenizer": (
        lambda folder: put("tokenizer.json", (folder / "tokenizer.json").read_bytes()[:500])(
            folder
        ),
        ["tokenizer.json"],
    ),
    "a tokenizer of text": (
        edited("tokenizer.json", lambda content: content.update(model="words")),
        ["tokenizer.json"],
    ),
    "a number of an end": (
        edited("tokenizer_config.json", lambda content: content.update(eos_token=3)),
        ["eos_token"],
    ),
    "an unknown end": (
        edited("tokenizer_config.json", lambda content: content.update(eos_token="<end>")),
        ["eos_token"],
    ),
    "a number of a template": (
        edited("tokenizer_config.json", lambda content: content.update(chat_template=3)),
        ["chat_template"],
    ),
    "half a template": (
        edited("tokenizer_config.json", lambda content: content.update(chat_template="{% for")),
        ["chat template"],
    ),
    "a template without end": (
        edited(
            "tokenizer_config.json",
            lambda content: content.update(
                chat_template=(
                    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
                )
            ),
        ),
        ["chat template", "seconds"],
    ),
    "an end beyond the vocabulary": (
        put("generation_config.json", '{"eos_token_id": 999}'),
        ["generation_config.json", "999"],
    ),
    "text of an end": (
        put("generation_config.json", '{"eos_token_id": "x"}'),
        ["generation_config.json", "eos_token_id"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_checkpoint_folders(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, words = FOLDERS[name]
    folder = save_policy(tmp_path / "policy", MODEL)
    character_tokenizer().save(str(folder))
    spoil(folder)
    status, printed = ended(
        lambda: trained("--model.path", str(folder), *ALONE, "--workdir", "run"), capsys
    )
    assert status == 2
    assert_one_line(printed, *words)


@pytest.mark.slow
def test_weights_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_policy(tmp_path / "policy", MODEL)
    character_tokenizer().save(str(folder))
    tensors(_nan)(folder)
    status, printed = ended(
        lambda: trained("--model.path", str(folder), *ALONE, "--workdir", "run"), capsys
    )
    assert status == 2
    assert_one_line(printed, "model.norm.weight", "not finite")


PATHS = ["--model.path", "--rollout.draft.path", "--lora.path", "--data.tokenizer"]


@pytest.mark.parametrize("setting", PATHS)
@pytest.mark.parametrize("path", ["nowhere", "file", "~nosuch/x"])
def test_folders_that_are_none(
    setting: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    kind = "eagle3" if "draft" in setting else "none"
    sizes = [] if setting == "--model.path" else TINY
    status, printed = ended(
        lambda: trained(*sizes, "--sft.steps", "0", "--rollout.draft.kind", kind, setting, path),
        capsys,
    )
    assert status == 2
    assert_one_line(printed, setting.removeprefix("--"), path)


@pytest.mark.parametrize("setting", ["--workdir", "--checkpoint", "--out"])
def test_a_home_that_nobody_has(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place = loaded_run.Run(tmp_path, 4, answering_config()), "~nosuch/x"
    work: dict[str, Callable[[], Any]] = {
        "--workdir": lambda: prepare_workdir(place),
        "--checkpoint": lambda: loaded_run.find_run(place),
        "--out": lambda: export.export(run, export.Options(out=place)),
    }
    status, printed = ended(lambda: reported(work[setting]), capsys)
    assert status == 2
    assert_one_line(
        printed, f"{setting} is '{place}', and no home directory of ~nosuch is known here"
    )


def test_a_folder_without_a_config_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    status, printed = ended(lambda: trained("--model.path", "~", "--sft.steps", "0"), capsys)
    assert status == 2
    assert_one_line(printed, "model.path ~: ", str(tmp_path / "config.json"))


def a_run(folder: Path) -> Path:
    """What a run of two batches leaves, by the command that the tests give, with a checkpoint that
    holds nothing."""
    config, _ = load_config(["--config", "rl_think.py", *QUICK], "train", "Trains.")
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_json(resolved(config, print))))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    return folder


RUNS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no folder": (shutil.rmtree, "no such folder", ""),
    "no config": (
        lambda run: (run / "config.json").unlink(),
        "has no config.json",
        "holds checkpoints but no config.json",
    ),
    "an empty config": (
        put("config.json", ""),
        "config.json is not JSON",
        "config.json is not JSON",
    ),
    "a list of config": (
        put("config.json", "[1]"),
        "config.json holds a list",
        "config.json holds a list",
    ),
    "half a config": (
        put("config.json", '{"steps": 3'),
        "config.json is not JSON",
        "config.json is not JSON",
    ),
    "a key too few": (
        edited("config.json", lambda content: content.pop("seed")),
        "it lacks seed",
        "seed: ",
    ),
    "a key too many": (
        edited("config.json", lambda content: content.update(stepz=1)),
        "it has stepz",
        "stepz: 1",
    ),
    "text of a number": (
        edited("config.json", lambda content: content.update(seed="one")),
        "seed is 'one'",
        "seed: one -> 0",
    ),
    "a bad number": (
        edited("config.json", lambda content: content["grpo"].update(grad_clip=-1)),
        "grpo.grad_clip is -1",
        "grpo.grad_clip: -1 -> ",
    ),
    "no checkpoints": (
        lambda run: shutil.rmtree(run / "checkpoints"),
        "has no checkpoint yet",
        "checkpoints is missing",
    ),
    "an empty checkpoint": (
        lambda run: None,
        "checkpoints/4 cannot be read",
        "checkpoints/4 cannot be read",
    ),
    "a file of checkpoints": (
        lambda run: (shutil.rmtree(run / "checkpoints"), put("checkpoints", "x")(run)),
        "checkpoints is not a folder",
        "checkpoints is not a folder",
    ),
    "a file as a checkpoint": (
        put("checkpoints/13", "x"),
        "checkpoints/13 is called like",
        "checkpoints/13 is called like",
    ),
}
"""What is done to a run's folder, and what is said of it to who reads it and to who goes on with
it."""


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("program", ["sample", "export"])
def test_run_folders(
    name: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (spoil, words, _) = a_run(tmp_path / "run"), RUNS[name]
    spoil(folder)

    def work() -> int:
        if program == "sample":
            return reported(lambda: sample.main(["--checkpoint", str(folder), "--prompt", "1+1="]))
        with Interrupt() as interrupt:
            return reported(
                lambda: export.main(["--checkpoint", str(folder), "--out", "out"], interrupt)
            )

    status, printed = ended(work, capsys)
    assert status == 2
    assert_one_line(printed, str(folder), words)
    assert not Path("out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name != "no folder"])
def test_run_folders_that_are_resumed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (spoil, _, words) = a_run(tmp_path / "run"), RUNS[name]
    spoil(folder)
    before = (folder / "metrics.jsonl").read_bytes()
    status, printed = ended(lambda: trained(*QUICK, "--workdir", str(folder)), capsys)
    assert status == 2
    assert_one_line(printed, str(folder), words)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("place", ["/proc/run", "file/run", "/dev/null"])
def test_folders_that_cannot_be_written(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    status, printed = ended(lambda: trained(*QUICK, "--workdir", place), capsys)
    assert status == 2
    assert_one_line(printed, place, "--workdir")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("JAXSPEC_PROCESSES", value) for value in ("two", "0", "-1")),
        *(("JAXSPEC_PROCESS_ID", value) for value in ("2", "-1", "x")),
        *(("JAXSPEC_COORDINATOR", value) for value in ("nowhere", "127.0.0.1:0", "127.0.0.1:port")),
    ],
)
def test_environment(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {
        "JAXSPEC_PROCESSES": "2",
        "JAXSPEC_PROCESS_ID": "0",
        "JAXSPEC_COORDINATOR": "127.0.0.1:1234",
    }
    for variable, text in (good | {name: value}).items():
        monkeypatch.setenv(variable, text)
    status, printed = ended(lambda: trained(*QUICK), capsys)
    assert status == 2
    assert_one_line(printed, name, value)


X = "--model x"
BENCHES = [
    ("generate", "--model"),
    ("generate --model nowhere", "--model nowhere"),
    (f"generate {X} --batch 0", "--batch is 0"),
    (f"generate {X} --budget nan", "--budget is nan"),
    (f"generate {X} --temperature -1", "--temperature is -1"),
    (f"generate {X} --prompt 1", "--prompt is 1"),
    (f"generate {X} --new 2000000000", "2000000064 positions"),
    (f"generate {X} --prompt 2000000000", "2000000128 positions"),
    (f"generate {X} --draft none --draft_length 7", "--draft_length"),
    (f"generate {X} --verify token", "--verify"),
    (f"generate {X} --draft ngram --draft_vocab 5", "--draft_vocab"),
    (f"generate {X} --draft mtp --draft_vocab 5", "--draft_vocab"),
    (f"generate {X} --draft ngram --draft_path y", "--draft_path"),
    (f"generate {X} --draft eagle3 --draft_path y --draft_vocab 5", "--draft_vocab"),
    (f"generate {X} --draft eagle3 --lengths 2", "--lengths"),
    (f"generate {X} --draft eagle3 --live 2 --lengths 200", "--lengths has 200"),
    (f"generate {X} --profile 1000:1001", "--profile is '1000:1001'"),
    (f"generate {X} --threads 2000000000", "--threads is 2000000000"),
    ("generate --model DIR", "--model DIR"),
    ("step", "--model"),
    ("step --model no", "--model no"),
    (f"step {X} --prompt 1", "--prompt is 1"),
    (f"step {X} --batch 2000000000 --group 2", "--batch 2000000000"),
    (f"step {X} --draft none --draft_length 9", "--draft_length"),
    (f"step {X} --draft none --verify token", "--verify"),
    (f"step {X} --profile 1000:1001", "--profile is '1000:1001'"),
    ("load", "--model"),
    ("load --model nowhere", "--model nowhere"),
    ("drafts", "--config"),
    ("drafts --rows 0", "--rows is '0'"),
    ("drafts --config rl_think.py --steps 10", "--offline.steps"),
    ("drafts --config rl_think.py --grpo.learning_rate 1e-4", "--grpo.learning_rate"),
]


@pytest.mark.parametrize(("argv", "word"), BENCHES)
def test_benchmarks(argv: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = ended(lambda: bench_main(argv.split()), capsys)
    assert status == 2
    assert_one_line(printed, word)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("generate --draft ngram --draft_length 500 --new 10", "--draft_length 500 and --new 10"),
        (
            "generate --draft mtp --draft_length auto --new 4",
            "--draft_length 5 (the longest of auto) and --new 4",
        ),
        ("load --tensor 3", "--tensor 3 does not divide"),
        ("load --data 100000", "--data 100000"),
    ],
)
def test_benchmarks_of_a_folder(
    argv: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_policy(tmp_path / "DIR", MODEL)
    character_tokenizer().save(str(folder))
    status, printed = ended(lambda: bench_main([*argv.split(), "--model", "DIR"]), capsys)
    assert status == 2
    assert_one_line(printed, words)


PREPARATIONS = [
    ("--steps 10", "--offline.steps", OF_DRAFT),
    ("--steps 80", "--steps", OF_DRAFT),
    *(
        (f"--{words}", f"--{words.split()[0]}", OF_DRAFT)
        for words in ("workdir a", "profile 1:2", "staged", "save_every 3")
    ),
    *(
        (f"--{words}", f"--{words.split()[0]}", OF_DRAFT)
        for words in ("grpo.group_size 4", "rollout.verify token", "lora.rank 4")
    ),
    ("--draft_training.no_online", "--draft_training.online", OF_DRAFT),
    ("--draft_training.learning_rate 1e-3", "--offline.learning_rate", OF_DRAFT),
    ("--rollout.draft.kind mtp", "--rollout.draft.kind", OF_POLICY),
    ("--offline.steps 3", "--sft.steps", OF_POLICY),
    ("--steps 3", "--sft.steps", OF_POLICY),
]


@pytest.mark.parametrize(("words", "named", "used"), PREPARATIONS)
def test_settings_that_a_preparation_does_not_look_at(
    words: str, named: str, used: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", "rl_think.py", *words.split()]
    status, printed = ended(lambda: run("prepare", "", lambda *_: 0, argv, used=used), capsys)
    assert status == 2
    assert_one_line(printed, "no use for", words.split()[0].replace("no_", ""), named)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"bytes_per_s": {"one": 1}}', '{"bytes_per_s": {"1": "x"}, "flops_per_s": 1}'],
)
def test_a_damaged_roofline(
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    file = roofline._file("float32")
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert roofline.remembered("float32") is None
    assert f"warning: {file} is damaged" in capsys.readouterr().out
