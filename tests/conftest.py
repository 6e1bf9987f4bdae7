"""Eight virtual CPU devices, strict promotion, checked shapes; tiny models, configs and prompts."""

import dataclasses
import functools
import gc
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the tests' time is spent in compiling programs that run once: without optimisation and
# with XLA's older emitters, which newer versions may not know any more, that takes a third of the
# time, and in one piece a program (for two workers on two cores) a quarter less.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false" * metadata.version(
    "jaxlib"
).startswith("0.10.")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import install_import_hook
from scipy import stats

# settings check their types themselves, and their tests see what users see
import jaxspec.config.settings  # noqa: F401

# Before anything else of jaxspec is imported: every shape annotation is checked, also while
# tracing.
install_import_hook("jaxspec", "beartype.beartype")

from jax.sharding import Mesh  # noqa: E402

from jaxspec.config.settings import (  # noqa: E402
    BatchConfig,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    EngineConfig,
    MeshConfig,
    OfflineConfig,
    ResolvedConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.drafts.model.settings import DraftModelConfig  # noqa: E402
from jaxspec.hf.names import policy_mappings  # noqa: E402
from jaxspec.hf.policy_config import policy_config_json  # noqa: E402
from jaxspec.hf.pretrained import stream_tensors  # noqa: E402
from jaxspec.hf.tensor_files import write_tensors  # noqa: E402
from jaxspec.inputs.spec import HeadSpec, ModelSpec  # noqa: E402
from jaxspec.mesh import make_mesh  # noqa: E402
from jaxspec.models.decoder import Decoder  # noqa: E402
from jaxspec.models.eagle3 import Eagle3, llama_head_spec  # noqa: E402
from jaxspec.rl import optimizers  # noqa: E402
from jaxspec.state import Prompts  # noqa: E402
from tests.compile_cache import drop_torn_entries, keep_programs  # noqa: E402

# Traced programs are many objects. Looking through them for garbage would be a tenth of the time.
gc.set_threshold(200_000, 20, 100)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_debug_key_reuse", True)


FOR_LONG_RUNS: dict[str, Any] = {"xla_backend_optimization_level": 3} | (
    {"xla_cpu_use_fusion_emitters": True} if "emitters" in os.environ["XLA_FLAGS"] else {}
)
"""Compiler options of what runs for longer than it compiles."""


def _lenient(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments, **named)

    return call


def _chain(*parts: Any, chain: Callable = optax.chain) -> optax.GradientTransformation:
    chained = chain(*parts)
    return optax.GradientTransformation(chained.init, _lenient(chained.update))


def _schedule(*sizes: Any, schedule: Callable = optax.warmup_cosine_decay_schedule) -> Callable:
    return _lenient(schedule(*sizes))


optax.warmup_cosine_decay_schedule = _schedule  # pyright: ignore[reportAttributeAccessIssue]
optax.chain = _chain  # pyright: ignore[reportAttributeAccessIssue]  # optax promotes inside; the strict rule is for jaxspec


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pytest_configure() -> None:
    keep_programs()


@pytest.fixture(scope="module", autouse=True)
def whole_cache() -> None:
    """Without what a test before has killed."""
    drop_torn_entries()


LONGEST = (
    "test_train_far.py",
    "test_mutants.py",
    "test_train.py",
    "test_documents.py",
    "test_slots.py",
    "test_draft_state.py",
    "test_lossless.py",
    "test_sampled_rounds.py",
    "test_train_draft.py",
    "test_memory.py",
    "test_memory_engine.py",
    "test_step.py",
    "test_learner.py",
    "test_step_loop.py",
    "test_generate_and_step.py",
    "test_drafts.py",
    "test_gpu.py",
    "test_verify.py",
    "test_sampling_noise.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: a worker takes a file at a time, and at the end none should
    wait for the other."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="module")
def x64() -> Iterator[None]:
    """Float64 for a whole module: identities are tested where no near-tie can flip."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests run in the background of a shell that has them ignore
    it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


def tiny_model(**changes: Any) -> ModelSpec:
    """A decoder small enough for oracles: 4 layers, grouped queries, untied head, float64."""
    sizes: dict[str, Any] = {
        "vocab": 11,
        "layers": 4,
        "embed": 16,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 4,
        "ffn": 24,
        "rope_theta": 100.0,
    }
    return ModelSpec(**{**sizes, "tied": False, "dtype": "float64", "remat": False, **changes})


def answering_config(**rollout: Any) -> ResolvedConfig:
    """A run that answers prompts of the built-in characters, with a small model for a draft, on any
    mesh; nothing is trained before it."""
    draft = DraftConfig(kind="model", model=DraftModelConfig(layers=4), draft_length=3)
    return ResolvedConfig(
        model=ModelSpec(
            vocab=24,
            layers=4,
            embed=16,
            heads=4,
            kv_heads=2,
            head_size=4,
            ffn=24,
            tied=False,
            remat=False,
        ),
        rollout=RolloutConfig(max_new_tokens=24, draft=draft, **rollout),
        batch=BatchConfig(prompts=8, group_size=2),
        data=DataConfig(max_prompt_length=6),
        mesh=MeshConfig(shard_above=0),
        sft=SftConfig(steps=0),
        offline=OfflineConfig(steps=0),
    )


def tiny_config(
    model: ModelSpec | None = None, draft: DraftConfig | None = None, **changes: Any
) -> ResolvedConfig:
    """A run on a tiny model: coupled rule, 8 prompts of 2 rows, up to 6 new tokens, and one loop
    for them, which compiles faster."""
    drafted = draft or DraftConfig(draft_length=2, sampling="sample")
    rollout = RolloutConfig(
        max_new_tokens=6, verify="coupled", draft=drafted, engine=EngineConfig(tail=False)
    )
    parts: dict[str, Any] = {
        "model": model or tiny_model(),
        "rollout": rollout,
        "batch": BatchConfig(prompts=8, group_size=2),
        "mesh": MeshConfig(),
        "draft_training": DraftTrainingConfig(ttt_steps=2),
    }
    return ResolvedConfig(**{**parts, **changes})


def weight_name(path: Any) -> str:
    """The attribute that holds a leaf: `query` for `.layers.query.value`."""
    return [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-2]


def tiny_network(
    kind: Callable[..., Any], config: ModelSpec, seed: int = 0, scale: float = 1.0
) -> Any:
    """A `Decoder` or `Eagle3` with numpy's random weights (no compile) and uneven norms; `scale`
    above 1 sharpens its laws."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: kind(config, jax.random.key(0)))

    def fill(path: Any, leaf: Any) -> jax.Array:
        name = weight_name(path)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.arange(leaf.size, dtype=leaf.dtype)  # a vocabulary map
        normal = random.normal(size=leaf.shape)
        if "norm" in name:
            return jnp.asarray(1 + 0.2 * normal, leaf.dtype)
        stacked = leaf.shape[1:] if leaf.ndim > 2 else leaf.shape
        fan_in = {"embedding": leaf.shape[-1], "output": stacked[0] * stacked[-2]}.get(
            name, stacked[0]
        )
        return jnp.asarray(scale * normal / np.sqrt(fan_in), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def eagle3(
    model: ModelSpec,
    key: Any,
    vocab: int = 0,
    ffn: int = 0,
    sizes: dict[str, Any] | None = None,
    **flags: Any,
) -> Eagle3:
    """An EAGLE-3 head that is made for a policy, with some `sizes` of its own and flags of
    `HeadConfig`."""
    return Eagle3(
        dataclasses.replace(llama_head_spec(model, ffn), **(sizes or {})),
        HeadSpec(**flags),
        model,
        key,
        vocab,
    )


def value_and_grad(
    loss_of: Callable[[Any], Any], network: Any, has_aux: bool = False
) -> tuple[Any, Any]:
    """`loss_of` at the whole network, and its gradient with respect to the trained leaves, as
    `optimizers.apply_update` takes it."""
    read = functools.partial(optimizers.replace_parameters, network)
    return jax.value_and_grad(lambda weights: loss_of(read(weights)), has_aux=has_aux)(
        optimizers.trainable_parameters(network)
    )


def with_weights(network: Any, **changes: Any) -> Any:
    """The network with some weights, by attribute name, replaced by arrays or filled with
    numbers."""

    def one(path: Any, leaf: Any) -> jax.Array:
        name = weight_name(path)
        return (
            jnp.broadcast_to(jnp.asarray(changes[name], leaf.dtype), leaf.shape)
            if name in changes
            else leaf
        )

    return jax.tree_util.tree_map_with_path(one, network)


def tiny_prompts(
    count: int, width: int = 5, vocab: int = 11, seed: int = 0, live: bool = True
) -> Prompts:
    """Random prompts of 2 to `width` tokens, never token 0 or 1; what lies beyond a prompt is junk
    that nothing may read."""
    random = np.random.default_rng(seed)
    return Prompts(
        tokens=jnp.asarray(random.integers(2, vocab, (count, width)), jnp.int32),
        lengths=jnp.asarray(random.integers(2, width + 1, count), jnp.int32),
        live=jnp.full((count,), live),
        stream=jnp.int32(0),
        batch=jnp.int32(seed),
        **no_history(count),
    )


def no_history(prompts: int, size: int = 0) -> dict[str, Any]:
    """The fields of `Prompts` for prompts without earlier answers."""
    return {
        "history": jnp.zeros((prompts, 0, size), jnp.int32),
        "history_lengths": jnp.zeros((prompts, 0), jnp.int32),
    }


def small_mesh(data: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """A mesh over the first devices."""
    return make_mesh(data, tensor, expert)


def trimmed(spec: Any) -> tuple[Any, ...]:
    """A partition without trailing Nones."""
    axes = list(spec)
    while axes and axes[-1] is None:
        axes.pop()
    return tuple(axes)


def bisect(
    holds: Callable[[np.ndarray], np.ndarray],
    low: float,
    high: float,
    shape: tuple[int, ...],
    steps: int = 80,
) -> np.ndarray:
    """For each entry, the threshold in [low, high] below which a monotone `holds` is true."""
    lower, upper = np.full(shape, low), np.full(shape, high)
    for _ in range(steps):
        middle = (lower + upper) / 2
        true = holds(middle)
        lower, upper = np.where(true, middle, lower), np.where(true, upper, middle)
    return (lower + upper) / 2


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of counts against expected numbers; bins below 5 are merged, and a count where
    nothing is expected is refused."""
    assert counts[expected == 0].sum() == 0, "an impossible outcome occurred"
    often, rare = expected >= 5, (expected > 0) & (expected < 5)
    merged = [
        np.append(bins[often], bins[rare].sum()) if rare.any() else bins[often]
        for bins in (counts, expected)
    ]
    return float(
        stats.chi2.sf(((merged[0] - merged[1]) ** 2 / merged[1]).sum(), len(merged[0]) - 1)
    )


def save_policy(folder: Path, model: ModelSpec, seed: int = 0) -> Path:
    """A folder with the checkpoint of `tiny_network(Decoder, model, seed)` in one file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(policy_config_json(model, "float32", {})))
    list(
        write_tensors(
            folder,
            stream_tensors(policy_mappings(model), tiny_network(Decoder, model, seed), np.float32),
        )
    )
    return folder
