"""The loader, the checks that cross classes, and the shape of the settings themselves."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from jaxspec.config import (
    Config,
    ConfigError,
    DataConfig,
    DraftConfig,
    GrpoConfig,
    MeshConfig,
    OfflineConfig,
    RolloutConfig,
    SftConfig,
    check,
    differing_keys,
    load_config,
    read_config,
    to_json,
)

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = ("draft_offline.py", "rl_think.py", "rl_zero.py")


def load(*argv: str) -> tuple[Config, str]:
    return load_config(argv, "train", "Trains.")


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def exit_message(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    return printed.out + printed.err


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestSettings:
    def classes(self, value: object, depth: int = 1) -> list[tuple[type, int, int]]:
        """(class, its settings, nesting) of a config and its sections."""
        assert is_dataclass(value)
        sections = [getattr(value, item.name) for item in fields(value) if is_dataclass(getattr(value, item.name))]
        here = (type(value), len(fields(value)) - len(sections), depth)
        return [here] + [found for section in sections for found in self.classes(section, depth + 1)]

    def test_sizes(self) -> None:
        found = self.classes(Config())
        assert {kind.__name__: count for kind, count, _ in found if count > 12} == {}
        assert sum(count for _, count, _ in found) <= 90
        assert max(depth for _, _, depth in found) <= 3

    def test_every_setting_is_documented_in_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            load("--config", "rl_think.py", "--help")
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for key in ("--rollout.draft.draft_length", "--staged, --no_staged", "Longest response, in tokens.", "(default: 40)"):
            assert key in text

    def test_local_checks_name_key_and_number(self) -> None:
        with pytest.raises(ConfigError, match=r"grpo\.group_size is 1; .*at least 2"):
            GrpoConfig(group_size=1)


class TestLoad:
    def test_defaults_name_and_workdir(self) -> None:
        config, name = load("--config", "rl_think.py")
        assert name == "rl_think-tiny"
        assert config == replace(read_config(CONFIGS / "rl_think.py")[0], workdir="runs/rl_think-tiny")

    @pytest.mark.parametrize("argv", [["--config", "rl_think.py:qwen3_8b"], ["--config=rl_think.py:qwen3_8b"]])
    def test_scale(self, argv: list[str]) -> None:
        config, name = load(*argv)
        assert (name, config.model.layers, config.model.dtype) == ("rl_think-qwen3_8b", 36, "bfloat16")

    def test_overrides_on_either_side(self) -> None:
        argv = ["--grpo.group_size", "32", "--config", "rl_think.py", "--rollout.draft.draft_length=5", "--workdir", "here"]
        config, _ = load(*argv)
        assert (config.grpo.group_size, config.rollout.draft.draft_length, config.workdir) == (32, 5, "here")

    def test_values_keep_their_text(self) -> None:
        config, _ = load(
            "--config", "rl_think.py", "--data.instruction", "Answer: $X, in \\boxed{}", "--rollout.draft.learning_rate", "1e-5"
        )
        assert config.data.instruction == "Answer: $X, in \\boxed{}"
        assert config.rollout.draft.learning_rate == 1e-5

    @pytest.mark.parametrize(("flag", "staged"), [("--staged", True), ("--no-staged", False), ("--no_staged", False)])
    def test_booleans(self, flag: str, staged: bool) -> None:
        assert load("--config", "rl_think.py", flag)[0].staged is staged

    def test_looked_up_as_given_then_in_configs_then_shipped(self, elsewhere: Path) -> None:
        assert load("--config", "rl_think.py")[0].steps == read_config(CONFIGS / "rl_think.py")[0].steps
        local = "from jaxspec.config import Config\nSCALES = ('one',)\ndef get_config(scale):\n    return Config(steps={})\n"
        (elsewhere / "configs").mkdir()
        (elsewhere / "configs" / "rl_think.py").write_text(local.format(7))
        assert load("--config", "rl_think.py")[0].steps == 7
        (elsewhere / "rl_think.py").write_text(local.format(8))
        config, name = load("--config", "rl_think.py")
        assert (config.steps, name) == (8, "rl_think-one")
        assert load("--config", str(elsewhere / "configs" / "rl_think.py:one"))[0].steps == 7

    def test_configs_travel_together(self, elsewhere: Path) -> None:
        shutil.copytree(CONFIGS, elsewhere / "copied")
        assert load("--config", "copied/draft_offline.py")[1] == "draft_offline-tiny"

    def test_kind_none(self) -> None:
        assert load("--config", "rl_think.py", "--rollout.draft.kind", "none")[0].rollout.draft.kind == "none"

    @pytest.mark.parametrize("kind", [["--rollout.draft.kind", "none"], ["--rollout.draft.kind=none"]])
    @pytest.mark.parametrize("foreign", [["--rollout.draft.draft_length", "5"], ["--rollout.draft.no-online"]])
    def test_settings_foreign_to_the_kind(self, kind: list[str], foreign: list[str]) -> None:
        message = refused("--config", "rl_think.py", *kind, *foreign)
        assert "kind is none" in message
        assert foreign[0] in message


class TestRefusals:
    def test_no_config(self) -> None:
        message = refused("--steps", "3")
        assert all(name in message for name in (*NAMES, "python -m jaxspec.train --config rl_think.py"))

    @pytest.mark.parametrize("given", ["rl_thnk.py", "rl_think", "configs/rl_thin.py:tiny"])
    def test_config_name(self, given: str) -> None:
        assert "did you mean rl_think.py?" in refused("--config", given)

    def test_scale_name(self) -> None:
        message = refused("--config", "rl_think.py:qwen3_0.6")
        assert "did you mean qwen3_0.6b?" in message
        assert "tiny" in message

    def test_key(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--rollout.draft.draft_length" in exit_message(capsys, "--config", "rl_think.py", "--rollout.draft.draf_length", "5")

    def test_value(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "eagle3" in exit_message(capsys, "--config", "rl_think.py", "--rollout.draft.kind", "eagle4")

    def test_local_check_behind_an_override(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "grpo.group_size is 1" in exit_message(capsys, "--config", "rl_think.py", "--grpo.group_size", "1")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("steps: 60, seed: 0", "not a Python file"),
            ("x = 1", "must define SCALES and get_config"),
            ("SCALES = ('a',)\ndef get_config(scale):\n    return 3", "returns a int, not a jaxspec.config.Config"),
        ],
    )
    def test_files_that_are_no_configs(self, elsewhere: Path, text: str, reason: str) -> None:
        (elsewhere / "mine.py").write_text(text)
        assert reason in refused("--config", "mine.py")

    def test_help_without_config_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            load("--help")
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for part in (*NAMES, "Trains.", "Examples:", "--rollout.draft.kind none", "Batches to generate and learn from."):
            assert part in text


@pytest.mark.parametrize("name", NAMES)
def test_config_files(name: str) -> None:
    for scale in ("tiny", "qwen3_0.6b", "qwen3_8b"):
        config, run = read_config(CONFIGS / name, scale)
        assert run == f"{Path(name).stem}-{scale}"
        check(config if scale == "tiny" else replace(config, data=replace(config.data, path="train.jsonl")), devices=1)
        head = (CONFIGS / name).read_text().split('"""')[1]
        assert "python -m jaxspec.train" in head
        assert "Vary:" in head
        assert "Expect (" in head


class TestCheck:
    @pytest.mark.parametrize(
        ("mesh", "prompts", "devices", "shape"),
        [
            (MeshConfig(), 16, 1, (1, 1)),
            (MeshConfig(), 16, 8, (8, 1)),
            (MeshConfig(), 12, 8, (6, 1)),
            (MeshConfig(), 7, 6, (1, 1)),
            (MeshConfig(), 2, 8, (2, 1)),
            (MeshConfig(tensor=2), 16, 8, (4, 2)),
            (MeshConfig(data=4, tensor=2), 16, 8, (4, 2)),
        ],
    )
    def test_resolves(self, mesh: MeshConfig, prompts: int, devices: int, shape: tuple[int, int]) -> None:
        warm = {"sft": SftConfig(rows=96), "offline": OfflineConfig(rows=96)}
        assert check(Config(mesh=mesh, grpo=GrpoConfig(prompts=prompts), **warm), devices) == shape

    @pytest.mark.parametrize(
        ("config", "devices", "processes", "parts"),
        [
            (Config(), 6, 4, ["4 processes", "6 devices"]),
            (Config(mesh=MeshConfig(tensor=3)), 8, 1, ["mesh.tensor 3", "8 devices", "8 x 1, 4 x 2, 2 x 4, 1 x 8"]),
            (Config(mesh=MeshConfig(tensor=4)), 8, 1, ["model.kv_heads 2", "mesh.tensor 4"]),
            (Config(mesh=MeshConfig(data=16)), 8, 1, ["mesh.data 16", "16 devices", "there are 8", "8 x 1"]),
            (Config(mesh=MeshConfig(data=4)), 8, 1, ["mesh.data 4", "4 devices", "there are 8", "4 x 2"]),
            (Config(mesh=MeshConfig(data=8), grpo=GrpoConfig(prompts=4)), 8, 1, ["grpo.prompts 4 is fewer than 8 data shards"]),
            (Config(mesh=MeshConfig(data=8), grpo=GrpoConfig(prompts=12)), 8, 1, ["grpo.prompts 12", "8 data shards", "8 or 16 would fit"]),
            (Config(grpo=GrpoConfig(prompts=6)), 4, 2, ["grpo.prompts 6", "4 data shards"]),
            (Config(sft=SftConfig(rows=20), mesh=MeshConfig(data=8)), 8, 1, ["sft.rows 20", "8 data shards", "16 or 24"]),
            (Config(offline=OfflineConfig(rows=4), mesh=MeshConfig(data=8)), 8, 1, ["offline.rows 4", "8 data shards", "8 or 16"]),
            (Config(rollout=RolloutConfig(max_new_tokens=3)), 1, 1, ["draft_length 3", "max_new_tokens 3"]),
            (Config(data=DataConfig(answer_style="boxed")), 1, 1, ["data.answer_style boxed", "--data.path"]),
        ],
    )
    def test_refuses_with_numbers(self, config: Config, devices: int, processes: int, parts: list[str]) -> None:
        with pytest.raises(ConfigError) as caught:
            check(config, devices, processes)
        assert [part for part in parts if part not in str(caught.value)] == []

    def test_rows_that_no_program_uses_are_free(self) -> None:
        plain = RolloutConfig(draft=DraftConfig(kind="none"))
        assert check(Config(rollout=plain, offline=OfflineConfig(rows=3), sft=SftConfig(steps=0, rows=3)), 8) == (8, 1)


class TestSaved:
    def test_json_round_trip_has_no_differences(self) -> None:
        config = load("--config", "rl_think.py:qwen3_0.6b")[0]
        assert differing_keys(json.loads(json.dumps(to_json(config))), config) == []

    def test_differences_are_named(self) -> None:
        now = Config(seed=1, grpo=GrpoConfig(group_size=4))
        assert differing_keys(to_json(Config()), now) == ["seed: 0 -> 1", "grpo.group_size: 8 -> 4"]

    def test_free_keys(self) -> None:
        now = Config(steps=7, workdir="w", staged=True, save_every=3, eval_every=9, mesh=MeshConfig(data=4, tensor=2))
        assert differing_keys(to_json(Config()), replace(now, rollout=RolloutConfig(slice_rounds=2))) == []
        assert differing_keys(to_json(Config()), now, free=frozenset({"workdir"}))[0] == f"steps: {Config().steps} -> 7"

    def test_keys_that_came_or_went(self) -> None:
        saved = to_json(Config())
        saved["grpo"]["entropy"] = saved["grpo"].pop("prompts")
        assert differing_keys(saved, Config()) == ["grpo.entropy: 16 -> (absent)", "grpo.prompts: (absent) -> 16"]
