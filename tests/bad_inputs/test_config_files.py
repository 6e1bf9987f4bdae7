"""Bad files of configs, and bad names of them, end in one line."""

import signal
from pathlib import Path

import pytest

from tests.bad_inputs.programs import assert_one_line, ended, trained

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
        f"{HEAD}def get_config(scale):\n    return Config(optimizer=DataConfig())",
        ["optimizer", "OptimizerConfig"],
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
            f"{HEAD}class Mine(OptimizerConfig):\n    def __post_init__(self): ...\n"
            "def get_config(scale):\n    return Config(optimizer=Mine(grad_clip=-1))"
        ),
        ["line 7", "optimizer", "OptimizerConfig itself"],
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
        (f"{HEAD}def get_config(scale):\n    return Config(draft_model=ModelConfig())"),
        ["bad.py, line ", "draft_model"],
    ),
    "NUL in text": (
        f"{HEAD}def get_config(scale):\n    return Config(workdir='a\\0b')",
        ["workdir is", "NUL"],
    ),
    "not a number": (
        f"{HEAD}def get_config(scale):\n    return"
        " Config(optimizer=OptimizerConfig(grad_clip=float('nan')))",
        ["optimizer.grad_clip is nan"],
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


@pytest.mark.usefixtures("ctrl_c")
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
