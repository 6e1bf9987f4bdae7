"""Whether a run will run: counts against those made by hand, and what is said where it will not."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxspec import check
from jaxspec.compiled import findings, hardware
from jaxspec.compiled.counts import Collective, Cost
from jaxspec.compiled.hardware import HARDWARE
from jaxspec.config.from_checkpoint import resolve_from_local_files
from jaxspec.config.presets import QWEN3_8B, QWEN3_235B_A22B, spec_without_checkpoint
from jaxspec.host import job
from jaxspec.host.check_report import CheckResult
from jaxspec.host.job import run_without_saving
from jaxspec.inputs.checked import ConfigError
from tests.bad_inputs.programs import assert_one_line, ended, trained
from tests.config.command_line import load

LAYERS, EMBED, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 3, 128, 4, 2, 32, 512, 40
DATA, TENSOR, ROWS, PROMPT, NEW = 4, 2, 128, 8, 28
SIZES = {
    "layers": LAYERS,
    "embed": EMBED,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "head_size": HEAD,
    "ffn": FFN,
}
PLAIN = "--sft.steps 0 --rollout.draft.kind none --rollout.engine.no_tail".split()  # noqa: SIM905
SMALL = [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]
MESH = f"--mesh.shard_above 0 --mesh.data {DATA} --mesh.tensor {TENSOR}".split()
RUN = ["--config", "rl_think.py", *PLAIN, *SMALL]


def told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    return ended(lambda: check.run_program(argv), capsys)


@pytest.fixture(scope="module", autouse=True)
def without_plugin() -> Iterator[None]:
    """What is compiled here is for the CPU's devices that there are, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "has_cuda_plugin", lambda: False)
        patch.setenv("JAX_NUM_CPU_DEVICES", "8")
        yield


def checked(argv: list[str]) -> Any:
    """The result of checking a command line."""
    options, words = check.parse_options(argv)
    config, _ = load(*words)
    with check.disable_cache():
        return check.check_run(config, options)


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """What is said of a small model on 8 devices, as JSON."""
    result = checked([*RUN, *MESH, "--devices", "8", "--hardware", "h200"])
    assert isinstance(result, CheckResult)
    return check.result_to_json("small", result)


class TestByHand:
    """Devices have a quarter of the rows and half of the heads; types are of 4 bytes."""

    layer = 2 * EMBED * HEADS * HEAD + 2 * EMBED * KV_HEADS * HEAD + 3 * EMBED * FFN
    weights = LAYERS * layer + VOCAB * EMBED
    norms = LAYERS * (2 * EMBED + 2 * HEAD) + EMBED
    """Whole on every device."""

    def test_memory(self, small: dict[str, Any]) -> None:
        owners = small["memory"]["owners"]
        kept = 4 * (self.weights / (DATA * TENSOR) + self.norms)
        positions = -(-(PROMPT + NEW) // 8) * 8
        slots = ROWS // DATA
        expected = {
            "policy weights": kept,
            "the policy's optimizer": 2 * kept,
            "weights as generation reads them": 4 * self.weights / TENSOR,
            "the pool of keys and values": (
                slots * positions * LAYERS * 2 * KV_HEADS // TENSOR * HEAD * 4
            ),
        }
        assert {name: owners[name] for name in expected} == pytest.approx(expected, rel=0.02)
        assert small["memory"]["taken"] == sum(owners.values())

    def test_products_of_a_round(self, small: dict[str, Any]) -> None:
        slots, positions = ROWS // DATA, PROMPT + NEW
        products = 2 * self.weights / TENSOR * slots
        attention = 2 * 2 * positions * HEADS // TENSOR * HEAD * slots * LAYERS
        assert small["work"]["a round"]["flops"] == pytest.approx(products + attention, rel=0.02)

    def test_products_of_a_micro_batch(self, small: dict[str, Any]) -> None:
        """Forward, again for the backward pass but for each layer's last product, and backward."""
        tokens = small["sizes"]["tokens"]
        passes = 4 * self.weights - LAYERS * EMBED * FFN
        counted = small["work"]["a micro-batch"]["flops"]
        attention = counted - 2 * passes / TENSOR * tokens
        pairs = 2 * HEADS // TENSOR * HEAD * LAYERS * tokens**2
        # forward and again two products of the pairs that a text sees, backward five, by blocks
        assert 0.5 * 9 * pairs <= attention <= 9 * pairs

    def test_a_sync_moves_each_weight_once_and_a_round_talks_over_tensor_alone(
        self, small: dict[str, Any]
    ) -> None:
        assert small["sync_moves_each_weight"] == pytest.approx(1, rel=0.02)
        gathers = small["work"]["sync"]["collectives"]
        assert [(each["kind"], each["axes"]) for each in gathers] == [("all-gather", ["data"])]
        inside = small["work"]["a round"]["collectives"]
        assert inside
        assert {tuple(each["axes"]) for each in inside} == {("tensor",)}
        assert small["warnings"] == []
        assert small["runs"] is True
        assert small["micro_batches"] == -(
            -ROWS // DATA * (PROMPT + NEW - 1) // small["sizes"]["tokens"]
        )
        json.dumps(small)


# ---- without compiling


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ("--devices",)),
        (["--devices", "-3"], ("--devices -3",)),
        (["--devices", "8", "--hardware", "h300"], ("h300", "h200, b200, gb200, gb300, here")),
        (["--devices", "7", "--mesh.tensor", "2"], ("mesh.tensor 2", "7 devices")),
        (["--devices", "8", "--mesh.tensor", "4"], ("model.kv_heads 2", "mesh.tensor 4")),
        (["--devices", "8", "--mesh.data", "3"], ("mesh.data 3",)),
        (["--devices", "4096"], ("--devices 4096", "extra `check`")),
        (["--devices", "900", "--hardware", "here"], ("--devices 900", "JAX finds")),
        (["--devices", "8", "--rollout.engine.command_buffers"], ("stands for", "extra `check`")),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str],
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, printed = told([*RUN, *argv], capsys)
    assert status == 2
    assert_one_line(printed, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "batch.prompts 128 is fewer than 512 data shards"),
        (
            "--mesh.expert 16 --mesh.tensor 2",
            "batch.prompts 128 is fewer than 16 data shards of 16",
        ),
    ],
)
def test_a_job_of_several_machines_leaves_no_device_idle(
    monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    """One process may use fewer than there are; `train` by several refuses that, and so does
    this."""
    card = hardware.find_card("gb200")
    monkeypatch.setattr(
        check,
        "make_target",
        lambda *_: check.StepTarget("gb200", card, [*range(512)], virtual=False),
    )
    argv = ["--config", "rl_think.py:qwen3_235b_a22b", *words.split(), "--devices", "512"]
    options, settings = check.parse_options(argv)
    with pytest.raises(ConfigError, match=said):
        check.check_run(load(*settings)[0], options)


@pytest.mark.parametrize(
    "words",
    [
        "--mesh.tensor 2",
        "--mesh.data 2",
        "--mesh.expert 3",
        "--batch.group_size 1",
        "--batch.prompts 0",
        "--no.such 1",
        "--rollout.temperature nan",
        "--data.path nowhere.jsonl",
        "--reward.function nowhere.py:f",
        "--reward.verifier code",
        "--data.max_prompt_length 2",
    ],
)
def test_it_refuses_the_words_that_train_refuses(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On three devices, in the same sentence; but files that are not here do not stop `check`."""
    for module in (check, job):
        monkeypatch.setattr(module, "count_devices", lambda: 3)
    argv = ["--workdir", str(tmp_path / "run"), *words.split()]
    of_train, printed = ended(lambda: trained(*argv), capsys)
    refused = printed.splitlines()[-1].partition("error: ")[2]
    base = ["--config", "rl_think.py", "--devices", "3", "--hardware", "here"]
    of_check, printed = told([*base, *argv], capsys)
    assert of_train == of_check == 2
    assert refused
    assert printed.splitlines()[-1].partition("error: ")[2] == refused


def test_all_hardware_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed = told([*RUN, "--devices", "1", "--hardware", "tpu"], capsys)
    assert all(name in printed for name in (*HARDWARE, hardware.LOCAL_DEVICES))


def test_the_usual_hardware() -> None:
    assert [hardware.default_hardware(count) for count in (1, 8, 9, 2048)] == ["h200"] * 2 + [
        "gb200"
    ] * 2


def test_what_is_not_here_stops_nothing_and_is_said() -> None:
    argv = "--config rl_think.py:qwen3_235b_a22b --model.path nowhere --data.path gone.jsonl"
    whole, unseen = resolve_from_local_files(load(*argv.split())[0])
    assert whole.model.family.experts == 128
    assert (whole.model.path, whole.data.path) == ("", "problems.jsonl")
    assert [each.split(",")[0] for each in unseen] == ["model.path nowhere", "data.path gone.jsonl"]


def test_what_is_not_here_can_be_stretched() -> None:
    argv = "--config rl_think.py:qwen3_8b --model.path nowhere --model.rope_factor 4"
    whole, _ = resolve_from_local_files(
        load(*argv.split(), "--rollout.max_new_tokens", "129024")[0]
    )
    assert whole.row_length == 131_072 < whole.model.max_positions


def test_published_models_without_their_checkpoint() -> None:
    """What config.json says beside the sizes, which may be stretched."""
    big = spec_without_checkpoint(
        dataclasses.replace(QWEN3_235B_A22B, dtype="bfloat16", remat=False)
    )
    assert (big.family.experts, big.family.experts_per_token) == (128, 8)
    long = spec_without_checkpoint(dataclasses.replace(QWEN3_8B, rope_factor=4.0))
    assert (long.family.experts, long.max_positions) == (0, 163_840)
    few = spec_without_checkpoint(dataclasses.replace(QWEN3_235B_A22B, layers=2))
    assert (few.layers, few.family.experts) == (2, 128)
    own = spec_without_checkpoint(dataclasses.replace(QWEN3_8B, ffn=1024))
    assert (own.max_positions, own.family.experts) == (0, 0)
    with pytest.raises(ConfigError, match="rope_factor"):
        spec_without_checkpoint(dataclasses.replace(QWEN3_8B, ffn=1024, rope_factor=2.0))


# ---- what should not be there

EXPECTED = findings.StepExpectation(
    mesh={"data": 4, "tensor": 2},
    row_axes=("data",),
    vocab_size=1000,
    row_count=64,
    row_length=36,
    layer_cache_bytes=4096,
    sync_bytes=0,
    is_paged=True,
    micro_batch_flops=0.0,
    has_experts=False,
    trains_draft=False,
    uses_command_buffers=False,
    key_blocks=1.0,
)
LOOP = """
%body (carry: (f32[64])) -> (f32[64]) {{
  %carry = (f32[64]{{0}}) parameter(0)
  %x = f32[64]{{0}} get-tuple-element(%carry), index=0
{inside}
  ROOT %next = (f32[64]{{0}}) tuple(%x)
}}

ENTRY %main (x: f32[64]) -> f32[64] {{
  %x.1 = f32[64]{{0}} parameter(0)
{outside}
  %in = (f32[64]{{0}}) tuple(%x.1)
  %loop = (f32[64]) while(%in), body=%body, metadata={{op_name="jit(step)/generate/rounds/while"}}
  ROOT %out = f32[64]{{0}} get-tuple-element(%loop), index=0
}}
"""
OF_GENERATION = 'metadata={op_name="jit(step)/generate/generate/rounds/while/body/verify"}'
OF_LEARNING = 'metadata={op_name="jit(step)/train/while"}'


def warnings(inside: str = "", outside: str = "", **changes: Any) -> list[str]:
    text = LOOP.format(inside=f"  {inside}", outside=f"  {outside}")
    expected = EXPECTED._replace(**{"is_paged": False, **changes})
    return findings.analyze_step(text, expected, HARDWARE["h200"]).warnings


@pytest.mark.parametrize(
    ("inside", "outside", "changes", "words"),
    [
        (f"%c = f32[16,64] copy(%x), {OF_GENERATION}", "", {}, "copies as much as a layer's keys"),
        (
            "%s = f32[8] all-reduce(%x), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add",
            "",
            {},
            "a round waits for other data shards: 1 all-reduce over data",
        ),
        (
            "",
            "%g = f32[35,1000] all-gather(%x.1), replica_groups={{0,1}}, dimensions={1}, "
            + OF_LEARNING,
            {},
            "all-gather of the whole vocabulary: f32[35, 1000]",
        ),
        ("", f"%r = s32[64,35] add(%x.1, %x.1), {OF_LEARNING}", {}, "rows are replicated"),
        ("", "", {"is_paged": True}, "no kernel reads pages"),
        ("", "", {"mesh": {"data": 4, "tensor": 16}}, "tensor 16 leaves the NVLink domain"),
        ("", "", {"mesh": {"data": 4, "expert": 3, "tensor": 2}}, "expert x tensor 6 stays inside"),
    ],
)
def test_warnings(inside: str, outside: str, changes: dict[str, Any], words: str) -> None:
    found = warnings(inside, outside, **changes)
    assert len(found) == 1, found
    assert words in found[0]


def test_there_are_none_without_a_reason() -> None:
    fine = f"%c = f32[8] copy(%x), {OF_GENERATION}"
    among_peers = "%s = f32[8] all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    assert warnings(f"{fine}\n  {among_peers}") == []


def test_experts_that_are_multiplied_densely_are_told_by_their_products() -> None:
    text = LOOP.replace("/generate/rounds/while", "/train/while").format(
        inside="  %w = f32[64,64] parameter(1)\n  %d = f32[64,64] dot(%w, %w),"
        " lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        outside="",
    )
    needed = 2 * 64**3 / 4
    for share, told_so in ((1.0, False), (1 / 8, True)):
        expected = EXPECTED._replace(
            is_paged=False, has_experts=True, micro_batch_flops=needed * share
        )
        found = findings.analyze_step(text, expected, HARDWARE["h200"]).warnings
        assert any("8 times the products" in each for each in found) == told_so


def test_a_sync_that_moves_weights_twice_is_told() -> None:
    gather = (
        "%g = f32[4096] all-gather(%x.1), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0},"
        ' metadata={op_name="jit(step)/prepare/sync"}'
    )
    assert warnings(outside=gather, sync_bytes=4096 * 4) == []
    (found,) = warnings(outside=gather, sync_bytes=4096 * 2)
    assert "2.00 times the bytes" in found


def test_the_parts_of_a_step_have_rows() -> None:
    gather = 'metadata={op_name="jit(step)/prepare/sync"}'
    text = LOOP.format(inside="", outside=f"  %g = f32[8] all-gather(%x.1), {gather}")
    rows = findings.analyze_step(text, EXPECTED, None).cost_rows
    assert rows["sync"].collectives == {Collective("all-gather", ("data", "tensor")): 1}
    assert rows["a micro-batch"] == Cost()


def test_it_ends_at_once_on_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = ended(
        lambda: run_without_saving("checking", lambda _: check.main(["--nonsense"])), capsys
    )
    assert status == 2
    assert "no --config" in printed
