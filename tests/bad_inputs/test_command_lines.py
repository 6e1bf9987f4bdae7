"""Bad settings, words, environments and options of benchmarks end in one line that names them.

Beside its neighbours in this folder it is a hostile user's tour of every surface: each bad input
ends in one line that names the remedy's place, with status 2, and harms nothing.
"""

from pathlib import Path

import pytest

from jaxspec.bench import roofline
from jaxspec.bench.__main__ import main as bench_main
from jaxspec.config.unused import DRAFT_SETTINGS, POLICY_SETTINGS
from jaxspec.host.job import run_program
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.bad_inputs.programs import MODEL, QUICK, assert_one_line, ended, trained
from tests.conftest import save_policy

SETTINGS = {
    "optimizer.grad_clip": ["-1", "0", "nan", "inf"],
    "optimizer.learning_rate": ["-1e-4", "0", "inf", "1e-60"],
    "optimizer.weight_decay": ["-0.1", "nan"],
    "optimizer.warmup_steps": ["-1", "99999999999"],
    "batch.prompts": ["0", "-2"],
    "batch.group_size": ["1", "0"],
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
    "rollout.min_p": ["-0.1", "1.1"],
    "rollout.max_new_tokens": ["0"],
    "rollout.min_new_tokens": ["28", "-1"],
    "rollout.banned": ["-1", "40"],
    "rollout.lookup.max_match": ["2147483647"],
    "rollout.lookup.past": ["2147483647"],
    "draft_training.ttt_steps": ["36", "2147483647"],
    "model.layers": ["1001", "2147483647"],
    "rollout.draft.model.layers": ["2147483647"],
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
    "rollout.draft.model.layers": ["--rollout.draft.kind", "model"],
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
        ["--batch.group_sise", "8"],
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
    ("drafts --synthetic_acceptance 5", "--synthetic_acceptance is '5'"),
    ("gpu --size tiny --sections x", "--sections is 'x'"),
    ("gpu --size tiny --prepare x --hardware nonesuch", "--hardware nonesuch"),
    ("drafts --config rl_think.py --steps 10", "--offline.steps"),
    ("drafts --config rl_think.py --optimizer.learning_rate 1e-4", "--optimizer.learning_rate"),
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
    ("--steps 10", "--offline.steps", DRAFT_SETTINGS),
    ("--steps 80", "--steps", DRAFT_SETTINGS),
    *(
        (f"--{words}", f"--{words.split()[0]}", DRAFT_SETTINGS)
        for words in ("workdir a", "profile 1:2", "schedule.kind staged", "save_every 3")
    ),
    *(
        (f"--{words}", f"--{words.split()[0]}", DRAFT_SETTINGS)
        for words in ("batch.group_size 4", "rollout.verify token", "lora.rank 4")
    ),
    ("--draft_training.no_online", "--draft_training.online", DRAFT_SETTINGS),
    ("--draft_training.learning_rate 1e-3", "--offline.learning_rate", DRAFT_SETTINGS),
    ("--rollout.draft.kind mtp", "--rollout.draft.kind", POLICY_SETTINGS),
    ("--offline.steps 3", "--sft.steps", POLICY_SETTINGS),
    ("--steps 3", "--sft.steps", POLICY_SETTINGS),
]


@pytest.mark.parametrize(("words", "named", "used"), PREPARATIONS)
def test_settings_that_a_preparation_does_not_look_at(
    words: str, named: str, used: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", "rl_think.py", *words.split()]
    status, printed = ended(
        lambda: run_program("prepare", "", lambda *_: 0, argv, used_settings=used), capsys
    )
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
    file = roofline._roofline_file("float32")
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert roofline.read_roofline("float32") is None
    assert f"warning: {file} is damaged" in capsys.readouterr().out
