"""What leaves a run as Hugging Face folders comes back bit for bit, and transformers reads it; what
cannot be written is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import export as program
from jaxspec.config.as_json import to_json
from jaxspec.config.from_checkpoint import read_draft, resolve_config
from jaxspec.config.settings import DataConfig, DraftConfig, LoraConfig, ResolvedConfig
from jaxspec.drafts import schedule
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.kinds import build_network
from jaxspec.drafts.model.settings import DraftModelConfig
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.export import ExportOptions, export_run, main
from jaxspec.hf.peft import merge_adapters
from jaxspec.hf.pretrained import load_policy_config, open_policy_checkpoint
from jaxspec.hf.tensor_files import WEIGHTS_FILE
from jaxspec.host.job import make_job
from jaxspec.host.loaded_run import find_run
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import FamilySpec, HeadSpec, ModelSpec, RopeSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3, with_vocabulary
from jaxspec.models.layers import cast_floats
from jaxspec.models.lora import AdaptedDecoder, merge_lora
from jaxspec.state import GeneratorState, LearnerState, NetworkState, TrainState
from jaxspec.storage.checkpoint import Checkpoints, SaveError
from jaxspec.system.interrupt import Interrupt
from jaxspec.tokens.tokenizer import character_tokenizer, load_tokenizer
from tests.conftest import answering_config, small_mesh, tiny_network

BASE = answering_config()
MODEL = replace(BASE.model, rope=RopeSpec(context=64))
KINDS: dict[str, tuple[DraftConfig, HeadSpec, FamilySpec]] = {
    "eagle3": (
        DraftConfig(eagle3=Eagle3Config(vocab=12, ffn=40)),
        HeadSpec(taps=(0, 2, 4), norm_output=True, fuse_norms=True),
        FamilySpec(),
    ),
    "mtp": (
        DraftConfig(kind="mtp", mtp=MtpConfig(layers=2, ffn=20)),
        HeadSpec(),
        FamilySpec(experts=3, experts_per_token=2),
    ),
    "mimo": (
        DraftConfig(kind="mtp", mtp=MtpConfig(embedding_first=False)),
        HeadSpec(),
        FamilySpec(model_type="mimo", query_key_norm=False, attention_bias=True),
    ),
    "model": (
        DraftConfig(kind="model", model=DraftModelConfig(layers=2, ffn=20)),
        HeadSpec(),
        FamilySpec(model_type="llama", query_key_norm=False),
    ),
}


OTHERS = [("eagle3", "speculators"), ("mtp", "raw"), ("mimo", "raw"), ("model", "raw")]


@pytest.fixture(autouse=True)
def _started(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has been started, with eight devices."""
    monkeypatch.setattr(program, "configure_jax", lambda config, devices: None)


def config_of(kind: str) -> ResolvedConfig:
    draft, head, family = KINDS[kind]
    if family.experts:
        family = replace(family, model_type="qwen3_moe")
    return replace(
        BASE,
        model=replace(MODEL, family=family),
        head=head,
        rollout=replace(BASE.rollout, draft=replace(draft, draft_length=3)),
    )


def networks(config: ResolvedConfig) -> tuple[Decoder, Any]:
    draft = tiny_network(lambda _, key: build_network(config.draft_spec, key), config.model, 9)
    if isinstance(draft, Eagle3):
        draft = with_vocabulary(draft, np.array([0, 1, 2, 4, 5, 7, 8, 11, 13, 17, 20, 21]))
    return tiny_network(Decoder, config.model, 3), draft


def trained(network: Any) -> NetworkState:
    return NetworkState(
        network=network, optimizer=None, skipped=jnp.int32(0), skipped_in_row=jnp.int32(0)
    )


def save_run(folder: Path, config: ResolvedConfig, policy: Any, draft: Any) -> Path:
    """A run's folder with one checkpoint, as far as leaving it needs."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    step = make_job(config, small_mesh()).step
    measured = jnp.zeros(
        (step.generator.draft_length, len(step.generator.settings.grid)), jnp.float32
    )
    learner = LearnerState(
        policy=trained(policy),
        draft=trained(draft),
        online=jnp.array(True),
        version=jnp.int32(3),
        recompute=jnp.array(False),
    )
    known = GeneratorState(overlap_by_factor=measured, trend=schedule.init_trend())
    state = TrainState(learner=learner, generator=known)
    save = Checkpoints(folder / "checkpoints")
    save.save(7, (state, None), {"batch": 3})
    save.close()
    return folder


def placed_on(data: int, tensor: int, shapes: Any) -> Any:
    whole = jax.sharding.NamedSharding(small_mesh(data, tensor), jax.sharding.PartitionSpec())
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes
    )


def read_policy(folder: Path) -> Decoder:
    config = load_policy_config(ModelSpec(path=str(folder), remat=False))
    return open_policy_checkpoint(
        config, placed_on(2, 1, jax.eval_shape(lambda: Decoder(config, jax.random.key(0))))
    ).load(lambda _: None)


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("eagle3", "raw"), *(pytest.param(*other, marks=pytest.mark.sweep) for other in OTHERS)],
)
def test_policy_and_draft_come_back(tmp_path: Path, kind: str, form: Any) -> None:
    """Through the folders that the next run names; MiMo's own layers stand in the policy's
    files."""
    config = config_of(kind)
    policy, draft = networks(config)
    out = export_run(
        find_run(str(save_run(tmp_path / "run", config, policy, draft))),
        ExportOptions(out=str(tmp_path / "out"), draft=form),
    )
    native = kind == "mimo"
    assert (out / "draft").is_dir() != native
    assert_same(read_policy(out), policy)
    chosen = DraftConfig(
        kind=config.rollout.draft.kind, draft_length=3, path="" if native else str(out / "draft")
    )
    wanted = replace(
        BASE,
        model=ModelSpec(path=str(out), remat=False),
        rollout=replace(BASE.rollout, draft=chosen),
    )
    again = resolve_config(wanted, print)
    assert replace(again.model, path="") == config.model
    shapes = placed_on(
        1, 2, jax.eval_shape(lambda: build_network(again.draft_spec, jax.random.key(0)))
    )
    assert_same(read_draft(again, shapes), draft)
    if kind == "eagle3":
        assert again.head == config.head
    if form == "speculators":
        said = json.loads((out / "draft" / "config.json").read_text())["speculators_config"]
        assert said["verifier"] == {"name_or_path": str(out), "architectures": ["Qwen3ForCausalLM"]}
        assert said["proposal_methods"][0]["speculative_tokens"] == 3


@pytest.mark.slow
def test_weights_can_be_narrowed_and_the_draft_left_out(tmp_path: Path) -> None:
    config = config_of("eagle3")
    policy, draft = networks(config)
    run = find_run(str(save_run(tmp_path / "run", config, policy, draft)))
    out = export_run(run, ExportOptions(out=str(tmp_path / "out"), dtype="bfloat16", draft="none"))
    assert not (out / "draft").exists()
    assert {str(array.dtype) for array in load_file(out / WEIGHTS_FILE).values()} == {"bfloat16"}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same(
        read_policy(out),
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), policy),
    )


@pytest.mark.slow
def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    """Files of a folder as they are, with its generation_config.json; the built-in one is written,
    and both end alike."""
    config = config_of("eagle3")
    policy, draft = networks(config)
    own = export_run(
        find_run(str(save_run(tmp_path / "one", config, policy, draft))),
        ExportOptions(out=str(tmp_path / "own"), draft="none"),
    )
    source = tmp_path / "tokenizer"
    character_tokenizer().save(str(source))
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 2], "top_k": 20})
    )
    told = replace(config, data=DataConfig(tokenizer=str(source), max_prompt_length=6))
    kept = export_run(
        find_run(str(save_run(tmp_path / "two", told, policy, draft))),
        ExportOptions(out=str(tmp_path / "kept"), draft="none"),
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (kept / name).read_bytes() == (source / name).read_bytes()
    built_in, found = character_tokenizer(), load_tokenizer(str(own))
    assert (found.encode("12+3="), found.stop_ids, found.pad_id) == (
        built_in.encode("12+3="),
        built_in.stop_ids,
        built_in.pad_id,
    )
    written = json.loads((own / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["do_sample"]) == (list(built_in.stop_ids), True)
    source.rename(tmp_path / "moved")
    run = find_run(str(tmp_path / "two"))
    with pytest.raises(
        ConfigError, match=r"not at .*tokenizer\.json; name its folder with --tokenizer"
    ):
        export_run(run, ExportOptions(out=str(tmp_path / "none")))
    export_run(
        run,
        ExportOptions(out=str(tmp_path / "none"), tokenizer=str(tmp_path / "moved"), draft="none"),
    )


@pytest.mark.slow
def test_adapters_leave_by_themselves_and_merged(tmp_path: Path) -> None:
    """PEFT's folder merged into the base gives the weights of the policy's folder."""
    lora = LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "down_proj"))
    config = replace(config_of("eagle3"), lora=lora)
    base, draft = networks(config)
    adapted = AdaptedDecoder(base, lora, jax.random.key(1))
    adapted.adapters = jax.tree.map(lambda leaf: leaf + 0.1, adapted.adapters)
    out = export_run(
        find_run(str(save_run(tmp_path / "run", config, adapted, draft))),
        ExportOptions(out=str(tmp_path / "out"), draft="none"),
    )
    assert sorted(file.name for file in (out / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    # the run started from no checkpoint that could be named
    assert_same(read_policy(out / "base"), base)
    content = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["target_modules"]) == (
        2,
        6,
        ["q_proj", "down_proj"],
    )
    assert content["base_model_name_or_path"] == str(out / "base")
    whole = read_policy(out)
    for one, other in zip(
        jax.tree.leaves(whole), jax.tree.leaves(merge_lora(adapted)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    again = merge_adapters(base, load_file(out / "adapter" / "adapter_model.safetensors"), content)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert np.abs(np.asarray(whole.layers.query[...] - base.layers.query[...])).max() > 0.01


@pytest.mark.slow
def test_young_adapters_of_a_narrow_model_are_merged_in_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16 little would be left of them, which is said; the base stays in its own type."""
    config = config_of("eagle3")
    lora = LoraConfig(rank=2, targets=("q_proj", "down_proj"))
    config = replace(config, lora=lora, model=replace(config.model, dtype="bfloat16"))
    base, draft = networks(config)
    adapted = AdaptedDecoder(base, lora, jax.random.key(1))
    adapted.adapters = jax.tree.map(lambda leaf: leaf + 1e-5, adapted.adapters)
    run = find_run(str(save_run(tmp_path / "run", config, adapted, draft)))
    out = export_run(run, ExportOptions(out=str(tmp_path / "wide"), draft="none"))
    assert "keep" not in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    assert_same(read_policy(out), cast_floats(merge_lora(adapted), jnp.dtype(jnp.float32)))
    kept = load_file(out / "base" / WEIGHTS_FILE).values()
    assert {str(array.dtype) for array in kept} == {"bfloat16"}
    export_run(run, ExportOptions(out=str(tmp_path / "narrow"), dtype="bfloat16", draft="none"))
    said = re.search(r"rounded to bfloat16 keep (\d+)% of the", capsys.readouterr().out)
    assert said is not None
    assert int(said[1]) < 50


@pytest.mark.slow
@pytest.mark.hf
def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    """The same logits, and the same ids of a text."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = config_of("eagle3")
    policy, draft = networks(config)
    out = export_run(
        find_run(str(save_run(tmp_path / "run", config, policy, draft))),
        ExportOptions(out=str(tmp_path / "out")),
    )
    tokens = np.random.default_rng(0).integers(0, 24, (2, 9)).astype(np.int32)
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))
    ours = jax.jit(lambda made, tokens: made.logits(made(tokens, positions).hidden))(
        policy, jnp.asarray(tokens)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(
            ours, model(torch.tensor(tokens)).logits.numpy(), rtol=0, atol=1e-5
        )
    assert model.generation_config.eos_token_id == list(character_tokenizer().stop_ids)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("12+34=", add_special_tokens=False) == character_tokenizer().encode(
        "12+34="
    )


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("eagle3")
    run = save_run(tmp_path / "run", config, *networks(config))
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=r"--out .*there exists already"):
        export_run(find_run(str(run)), ExportOptions(out=str(tmp_path / "there")))
    with pytest.raises(ConfigError, match="no --out"):
        export_run(find_run(str(run)), ExportOptions())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program, "write_tensors", full)
    with pytest.raises(
        SaveError, match=r"out cannot be written: No space left on device; free some space"
    ):
        export_run(find_run(str(run)), ExportOptions(out=str(tmp_path / "out")))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "there"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("eagle3")
    run = save_run(tmp_path / "run", config, *networks(config))
    with Interrupt() as interrupt:
        assert (
            main(
                ["--checkpoint", str(run), "--out", str(tmp_path / "out"), "--draft", "none"],
                interrupt,
            )
            == 0
        )
    printed = capsys.readouterr().out
    assert "policy 1/" in printed
    assert f"checkpoint 7 of {run} is in {tmp_path / 'out'}" in printed
    with pytest.raises(ConfigError, match="no --checkpoint"):
        main(["--out", "x"], Interrupt())
    with pytest.raises(SystemExit):
        main(["--help"], Interrupt())
    assert "speculators" in capsys.readouterr().out
