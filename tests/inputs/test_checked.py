"""Every setting of every command line by its type: what no setting takes is refused by name,
wherever it comes from."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from decimal import Decimal
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from jaxspec.config.settings import (
    Config,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    EngineConfig,
    LoraConfig,
    MeshConfig,
    OfflineConfig,
    OptimizerConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.inputs.checked import ConfigError, divisors, prefix_errors, translate_settings
from jaxspec.inputs.spec import HeadConfig, HeadSpec, ModelConfig, RopeSpec

MODULES = (
    "inputs.spec",
    "config.rollout",
    "config.settings",
    "sample",
    "export",
    "bench.workload",
    "bench.load",
    "bench.roofline",
)


def classes() -> Iterator[type]:
    """The classes of settings and options, found by their names."""
    for name in MODULES:
        module = importlib.import_module(f"jaxspec.{name}")
        for cls in vars(module).values():
            if (
                is_dataclass(cls)
                and isinstance(cls, type)
                and cls.__module__ == module.__name__
                and cls.__name__.endswith(("fig", "Options"))
            ):
                yield cls


def types() -> list[tuple[type, str, Any]]:
    hints = [(cls, get_type_hints(cls, include_extras=True)) for cls in classes()]
    return [(cls, item.name, found[item.name]) for cls, found in hints for item in fields(cls)]


ALL = types()


def make(cls: type, **values: Any) -> Any:
    """An instance; benchmarks have no model by default."""
    needed = (
        {"model": "folder"}
        if "bench" in cls.__module__ and "model" in {item.name for item in fields(cls)}
        else {}
    )
    return cls(**needed | values)


def plain(wanted: Any) -> list[Any]:
    """A type's parts without ranges."""
    if get_origin(wanted) is Annotated:
        return plain(get_args(wanted)[0])
    if get_origin(wanted) in (Union, UnionType):
        return [kind for part in get_args(wanted) for kind in plain(part)]
    return [wanted]


NUMBERS = [math.nan, math.inf, -math.inf, 1e300, 1e-300, -1e-300, 10**400, -(10**400)]
OTHERS = [b"bytes", {}, [], [3], object(), ["a"], Ellipsis]
WRONG: dict[Any, list[Any]] = {
    int: [1.5, 2.0, "4", True, -1, 2**64, *NUMBERS],
    float: ["4", True, *NUMBERS],
    bool: [1, 0, "yes", 1.0],
    str: [3, True, 2.5, ("a",)],
    tuple: ["ab", {1}, (object(),), (None,), ((),), (3.5,), (True,)],
    Literal: ["eagle", "", 3, True, ("none",)],
}
"""What no setting of a type takes; no number of any setting may be negative."""


def wrong(cls: type, wanted: Any) -> list[Any]:
    """Values of no part of a type, None among them where it is none; of options, whose types the
    import hook checks, numbers alone."""
    kinds = [get_origin(part) or part for part in plain(wanted)]
    if cls.__name__.endswith("Options"):
        return [
            value
            for kind in kinds
            for value in WRONG.get(kind, [])
            if kind in (int, float) and type(value) is kind
        ]
    found = [value for kind in kinds for value in WRONG.get(kind, [3, "model", True])]
    if Literal in kinds and {int, float} & set(kinds):
        found = [value for value in found if value != 3]
    return [*found, *OTHERS, *([] if NoneType in kinds else [None])]


@pytest.mark.parametrize(
    ("cls", "name", "wanted"),
    ALL,
    ids=[f"{cls.__module__}.{cls.__name__}.{name}" for cls, name, _ in ALL],
)
def test_values_of_no_use_are_refused_by_name_in_one_line(
    cls: type, name: str, wanted: Any
) -> None:
    for value in wrong(cls, wanted):
        with pytest.raises(ConfigError) as caught:
            make(cls, **{name: value})
        message = str(caught.value)
        assert f"{name} is " in message
        assert len(message.splitlines()) == 1
        assert "must be" in message


def test_every_number_states_its_range() -> None:
    """A field that is added later is refused here until it says what numbers it takes."""
    from jaxspec.inputs.checked import CheckedConfig, Range

    def bare(wanted: Any) -> bool:
        if get_origin(wanted) is Annotated:
            kind, *more = get_args(wanted)
            return kind not in (int, float) or not any(isinstance(item, Range) for item in more)
        return wanted in (int, float) or any(bare(part) for part in get_args(wanted))

    assert [f"{cls.__name__}.{name}" for cls, name, wanted in ALL if bare(wanted)] == []
    assert [cls.__name__ for cls in classes() if not issubclass(cls, CheckedConfig)] == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: OptimizerConfig(grad_clip=-1.0),
            "optimizer.grad_clip is -1.0; it must be above 0",
        ),
        (lambda: OptimizerConfig(grad_clip=0.0), "optimizer.grad_clip is 0.0; it must be above 0"),
        (
            lambda: OptimizerConfig(weight_decay=-0.1),
            "optimizer.weight_decay is -0.1; it must be at least 0",
        ),
        (
            lambda: OptimizerConfig(warmup_steps=-1),
            "optimizer.warmup_steps is -1; it must be at least 0",
        ),
        (
            lambda: OptimizerConfig(learning_rate=0.0),
            "optimizer.learning_rate is 0.0; it must be above 0",
        ),
        (
            lambda: DraftTrainingConfig(learning_rate=-1e-3),
            "draft_training.learning_rate is -0.001; it must be above 0",
        ),
        (
            lambda: DraftTrainingConfig(grad_clip=0),
            "draft_training.grad_clip is 0; it must be above 0",
        ),
        (
            lambda: DraftTrainingConfig(decay=0),
            "draft_training.decay is 0; it must be above 0 and at most 1",
        ),
        (
            lambda: SftConfig(learning_rate=math.inf),
            "sft.learning_rate is inf; it must be a number that float32 can hold",
        ),
        (
            lambda: SftConfig(wrong_steps=1),
            "sft.wrong_steps is 1; it must be at least 0 and below 1",
        ),
        (
            lambda: OfflineConfig(learning_rate=-1),
            "offline.learning_rate is -1; it must be above 0",
        ),
        (lambda: ModelConfig(norm_eps=0.0), "model.norm_eps is 0.0; it must be above 0"),
        (lambda: ModelConfig(rope_theta=1.0), "model.rope_theta is 1.0; it must be above 1"),
        (lambda: RopeSpec(beta_slow=-1.0), "model.rope.beta_slow is -1.0; it must be above 0"),
        (lambda: HeadSpec(logit_scale=0.0), "head.logit_scale is 0.0; it must be above 0"),
        (
            lambda: RolloutConfig(temperature=1e-39),
            "rollout.temperature is 1e-39; it must be a number that float32 can hold",
        ),
        (
            lambda: RolloutConfig(temperature=9e-4),
            "rollout.temperature is 0.0009; it must be 0, or at least 0.001 and at most 1000",
        ),
        (
            lambda: DraftConfig(temperature=1e9),
            "rollout.draft.temperature is 1000000000.0; it must be 0, or at least 0.001",
        ),
        (
            lambda: Config(seed=2**32),
            "seed is 4294967296; it must be at least 0 and at most 4294967295",
        ),
        (lambda: Config(steps=2**31), "steps is 2147483648; it must be at most 2147483647"),
        (lambda: DataConfig(digits=5), "data.digits is 5; it must be at least 1 and at most 4"),
        (lambda: MeshConfig(tensor=0), "mesh.tensor is 0; it must be at least 1"),
        (lambda: EngineConfig(slots=0), "rollout.engine.slots is 0; it must be at least 1"),
        (lambda: LoraConfig(alpha=0.0), "lora.alpha is 0.0; it must be above 0"),
        (
            lambda: RolloutConfig(banned=(3, -1)),
            "rollout.banned is (3, -1); it must be a tuple, each item at least 0",
        ),
        (
            lambda: SftConfig(learning_rate=Decimal(1)),  # pyright: ignore[reportArgumentType]
            "sft.learning_rate is Decimal('1'); it must be a number, as an int or a float",
        ),
        (
            lambda: Config(steps=10**5000),
            "steps is a whole number of about 5000 digits; it must be at most 2147483647",
        ),
        (
            lambda: Config(workdir="a\0b"),
            "workdir is 'a\\x00b'; it must be text without the character NUL",
        ),
        (
            lambda: LoraConfig(targets=("a\0b",)),
            "it must be a tuple, each item text without the character NUL",
        ),
        (
            lambda: ModelConfig(layers=1001),
            "model.layers is 1001; it must be at least 1 and at most 1000",
        ),
        (
            lambda: ModelConfig(heads=6, kv_heads=4),
            "model.kv_heads 4 does not divide model.heads 6; give one of 1, 2, 3, 6",
        ),
        (
            lambda: ModelConfig(head_size=3),
            "model.head_size is 3; rotary positions need an even size, such as 4",
        ),
        (
            lambda: HeadConfig(taps=(3, 2, 2)),
            "head.taps [3, 2, 2] must ascend, without repetition: give [2, 3]",
        ),
        (
            lambda: HeadConfig(use_taps=False, taps=(2,)),
            "leave out head.taps, head.norm_before_fuse and head.fuse_norms, or turn",
        ),
        (
            lambda: RolloutConfig(min_new_tokens=28),
            "is not below rollout.max_new_tokens 28; lower the first or raise the second",
        ),
        (
            lambda: Config(steps=5, profile="6:8"),
            "profile is '6:8', but with steps 5 the last call is 5",
        ),
        (lambda: Config(model=None), "model is None; it must be of type ModelConfig"),  # pyright: ignore[reportArgumentType]
        (lambda: DraftConfig(kind="eagle"), "kind is 'eagle'; it must be one of eagle3, mtp"),  # pyright: ignore[reportArgumentType]
        (
            lambda: DraftConfig(draft_length="many"),  # pyright: ignore[reportArgumentType]
            "'many'; it must be a whole number or one of auto",
        ),
    ],
)
def test_messages_name_the_setting_the_value_and_what_is_taken(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_a_subclass_may_leave_out_the_checks_and_is_refused() -> None:
    class Unchecked(OptimizerConfig):
        def __post_init__(self) -> None: ...

    with pytest.raises(
        ConfigError,
        match=r"optimizer is .*; it must be of type OptimizerConfig itself, not of a subclass",
    ):
        Config(optimizer=Unchecked(grad_clip=-1))


def test_what_a_file_says_is_told_with_its_name_and_keys() -> None:
    class Worse(ConfigError):
        pass

    with (
        pytest.raises(ConfigError, match=r"^file: number 3 is above --model\.layers 2$"),
        prefix_errors("file"),
        translate_settings({"model.heads": "number"}),
    ):
        raise Worse("model.heads 3 is above --model.layers 2")
    for enter in (prefix_errors("file"), translate_settings({"model.heads": "number"})):
        with pytest.raises(Worse) as caught, enter:
            raise Worse("what is said of file needs nothing")
        assert caught.value.__cause__ is None


def test_numbers_at_the_edges_are_taken() -> None:
    assert Config(seed=2**32 - 1, steps=2**31 - 1).seed == 2**32 - 1
    assert Config(steps=5, profile="5:8").profile == "5:8"
    assert MeshConfig(shard_above=2**40).shard_above == 2**40
    for temperature in (0.0, 1e-3, 1000.0):
        assert RolloutConfig(temperature=temperature).temperature == temperature


def test_whole_numbers_are_kept_as_floats_where_floats_are_wanted() -> None:
    kept = RolloutConfig(temperature=2).temperature
    assert (kept, type(kept)) == (2.0, float)


def test_divisors_are_found_without_counting_up() -> None:
    for number in (1, 2, 12, 16, 97, 360):
        assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]
    # counting to it would take minutes
    assert len(divisors(2_000_000_000)) == 110
