"""Traces: which calls, and which part of the program each operation is said to belong to."""

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxspec.config.settings import ResolvedConfig, parse_range
from jaxspec.inputs.checked import ConfigError
from jaxspec.system.trace import Profiler, read_scope_paths


@jax.named_scope("generate")
def rounds(x: jax.Array) -> jax.Array:
    def one(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, x = carry
        with jax.named_scope("draft"):
            x = jnp.sin(x @ x)
        with jax.named_scope("not shown"), jax.named_scope("verify"):
            x = jnp.tanh(x @ x.T)
        return number + 1, x

    return lax.while_loop(lambda carry: carry[0] < 5, one, (jnp.int32(0), x))[1]


def program(x: jax.Array) -> jax.Array:
    def loss(x: jax.Array) -> jax.Array:
        with jax.named_scope("train"):
            return jnp.sum(jnp.exp(rounds_once(x)))

    with jax.named_scope("learn"):
        x = jax.grad(loss)(x)
    return rounds(x)


def rounds_once(x: jax.Array) -> jax.Array:
    return jnp.cos(x @ x)


@pytest.fixture(scope="module")
def compiled() -> Any:
    return jax.jit(program).lower(jnp.ones((64, 64))).compile()


def test_every_operation_knows_its_scopes(compiled: Any) -> None:
    found = set(read_scope_paths([compiled]).values())
    assert {("learn", "train"), ("generate", "draft"), ("generate", "verify")} <= found
    assert {name for path in found for name in path} == {
        "learn",
        "train",
        "generate",
        "draft",
        "verify",
    }


def test_a_trace_has_the_calls_of_the_range_and_the_parts_of_each(
    compiled: Any, tmp_path: Path
) -> None:
    said: list[str] = []
    profiler = Profiler(range(2, 4), tmp_path / "new" / "trace.json.gz", [compiled], said.append)
    x = jnp.ones((64, 64)) / 64
    for number in range(6):
        with profiler.trace_call(number):
            jax.block_until_ready(compiled(x))
    assert len(said) == 1, "written once, right after the last call"
    profiler.close()
    assert len(said) == 1
    with gzip.open(tmp_path / "new" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    calls = {
        event["name"]: event
        for event in events
        if event["name"] in {f"call {number}" for number in range(6)}
    }
    assert sorted(calls) == ["call 2", "call 3"]
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    events = [event for event in events if event["ph"] == "X"]
    parts = [
        event for event in events if tracks.get((event["pid"], event["tid"]), "").endswith("parts")
    ]
    assert sum(event["name"] == "draft" for event in parts) >= 10, "five rounds of two calls"
    for inner in parts:
        assert inner["dur"] >= 0
        if inner["name"] in ("draft", "verify"):  # and the phase spans it
            around = [
                event
                for event in parts
                if event["name"] == "generate" and event["tid"] == inner["tid"]
            ]
            assert any(
                each["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= each["ts"] + each["dur"]
                for each in around
            )
    operations = [
        event
        for event in events
        if tracks.get((event["pid"], event["tid"]), "").endswith("operations")
    ]
    assert {event["args"]["part"] for event in operations if "args" in event} >= {
        "learn / train",
        "generate / draft",
        "generate / verify",
    }


def test_a_run_that_ends_within_the_range_keeps_what_was_traced(
    compiled: Any, tmp_path: Path
) -> None:
    profiler = Profiler(range(1, 9), tmp_path / "trace.json.gz", [compiled], lambda _: None)
    with profiler.trace_call(1):
        jax.block_until_ready(compiled(jnp.ones((64, 64))))
    assert not list(tmp_path.iterdir())
    profiler.close()
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json.gz"]


def test_ranges() -> None:
    assert list(parse_range("profile", "10:12")) == [10, 11]
    assert not parse_range("profile", "")
    for text in ("10", "12:10", "3:3", "a:b", "-1:4", ":4", "1:2:3"):
        with pytest.raises(ConfigError, match="FIRST:END"):
            ResolvedConfig(profile=text)
