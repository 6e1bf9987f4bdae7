"""What the generation loop of the compiled step may not do: talk beyond its tensor peers, or copy
the cache."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxspec import build
from jaxspec.compiled.collectives import parse_device_groups
from jaxspec.config.settings import KlConfig, LoraConfig
from jaxspec.kernels import key_chunks
from jaxspec.run.schedules import compile_fused_schedule
from tests.conftest import small_mesh
from tests.whole_step import (
    LENGTH,
    MODEL,
    NEW,
    PROMPTS,
    ROWS,
    STOP,
    TWO_UPDATES,
    WIDTH,
    WITH_EXPERTS,
    config_of,
    nothing_finished,
    program,
    prompts_of,
    start,
)

pytestmark = pytest.mark.usefixtures("x64")


TALKS = re.compile(r" (all-to-all|all-\w+|reduce-scatter|collective-\w+)(-start)?\(")


class Hlo:
    """The text of a compiled program, by computation."""

    def __init__(self, text: str):
        self.lines: dict[str, list[str]] = {}
        self.known: dict[str, bool] = {}
        name = ""
        for line in text.splitlines():
            head = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
            if head:
                name = head.group(1)
                self.lines[name] = []
            elif name:
                self.lines[name].append(line)

    def reached_from(self, is_root: Callable[[str], bool]) -> list[str]:
        """All lines of the computations that the chosen instructions call, however deep."""
        waiting = [
            name
            for lines in self.lines.values()
            for line in lines
            if is_root(line)
            for name in self._called(line)
        ]
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += [called for line in self.lines[name] for called in self._called(line)]
        return [line for name in sorted(seen) for line in self.lines[name]]

    def side_by_side(self) -> list[tuple[str, str]]:
        """Pairs of instructions that talk, neither of which needs the other's result, and one of
        which has a computation of its own."""
        return [pair for lines in self.lines.values() for pair in self._side_by_side(lines)]

    def _side_by_side(self, lines: list[str]) -> list[tuple[str, str]]:
        before: dict[str, set[str]] = {}
        talking: list[tuple[str, str]] = []
        found = []
        for line in lines:
            made = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
            if made is None:
                continue
            needed = {
                name for name in re.findall(r"%([\w.\-]+)", line[made.end() :]) if name in before
            }
            before[made[1]] = needed.union(*(before[name] for name in needed))
            nested = any(self.talks(name) for name in self._called(line))
            if nested or TALKS.search(line):
                beside = [other for name, other in talking if name not in before[made[1]]]
                found += [(other, line) for other in beside if nested or not TALKS.search(other)]
                talking.append((made[1], line))
        return found

    def talks(self, computation: str) -> bool:
        """Whether a computation, or one that it calls, has a collective."""
        if computation not in self.known:
            lines = self.lines[computation]
            self.known[computation] = any(
                TALKS.search(line) or any(map(self.talks, self._called(line))) for line in lines
            )
        return self.known[computation]

    def _called(self, line: str) -> list[str]:
        return [
            name
            for name in re.findall(r"%([\w.\-]+)", line.split(", metadata=")[0])
            if name in self.lines
        ]


@pytest.mark.parametrize("verify", ["coupled", pytest.param("token", marks=pytest.mark.sweep)])
def test_the_generation_loop_talks_over_tensor_only_and_never_copies_the_cache(verify: str) -> None:
    data, tensor = 4, 2
    hlo = compiled(data, tensor, shard_above=0, verify=verify)
    loop = hlo.reached_from(is_loop)
    peers = {tuple(range(first, first + tensor)) for first in range(0, data * tensor, tensor)}
    collectives = [line for line in loop if TALKS.search(line)]
    assert collectives, "tensor shards must talk"
    for line in collectives:
        assert "collective-permute" not in line, line
        assert set(parse_device_groups(line, data * tensor)) <= peers, line
    # Weights are whole over `data` before the loop starts, though the train layout shards them.
    outside = [
        line
        for lines in hlo.lines.values()
        for line in lines
        if " all-gather(" in line and line not in loop
    ]
    assert any(not set(parse_device_groups(line, data * tensor)) <= peers for line in outside)
    slots = -(-(WIDTH + NEW + LENGTH) // key_chunks.ROW_MULTIPLE) * key_chunks.ROW_MULTIPLE
    assert_stays(loop, ROWS // data, MODEL.kv_heads // tensor, slots, slots)


@pytest.mark.slow
def test_where_experts_are_split_the_loop_talks_within_a_data_shard_only() -> None:
    data, expert, tensor = 2, 2, 2
    hlo = compiled(data, tensor, expert=expert, shard_above=0, model=WITH_EXPERTS)
    collectives = [line for line in hlo.reached_from(is_loop) if TALKS.search(line)]
    assert any("all-to-all" in line for line in collectives), "tokens go to their experts"
    for line in collectives:
        shards = [
            {device // (expert * tensor) for device in group}
            for group in parse_device_groups(line, 8)
        ]
        assert all(len(shard) == 1 for shard in shards), line


@pytest.mark.slow
def test_nor_does_the_loop_copy_a_cache_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CHUNK_POSITIONS", 4)
    monkeypatch.setattr(key_chunks, "MIN_CHUNKED_BYTES", 0)
    assert_stays(
        compiled(8, 1).reached_from(is_loop),
        ROWS // 8,
        MODEL.kv_heads,
        -(-(WIDTH + NEW + LENGTH) // 4) * 4,
        4,
    )


@pytest.mark.parametrize(
    ("data", "tensor", "kind", "rank", "algorithm"),
    [
        pytest.param(8, 1, "eagle3", 0, {}, marks=pytest.mark.slow),
        pytest.param(
            4, 1, "model", 2, {"model": WITH_EXPERTS} | TWO_UPDATES, marks=pytest.mark.slow
        ),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                (4, 2, "mtp", 0, TWO_UPDATES),
                (4, 2, "eagle3", 2, {"kl": KlConfig(beta=0.1, where="reward")}),
                (2, 2, "eagle3", 0, {"model": WITH_EXPERTS}),
            )
        ),
    ],
)
def test_no_loop_that_talks_runs_beside_another_that_talks(
    data: int, tensor: int, kind: Any, rank: int, algorithm: dict[str, Any]
) -> None:
    """A CPU's devices would then do both in different orders, and wait for each other until XLA
    ends the process."""
    config = config_of(kind=kind, shard_above=0, **algorithm)
    config = dataclasses.replace(config, lora=LoraConfig(rank=rank))
    expert = 8 // (data * tensor)
    made = build.build_step(config, small_mesh(data, tensor, expert), STOP, MODEL.vocab)
    hlo = Hlo(compile_fused_schedule(made, PROMPTS).programs["step"].as_text())
    assert any(map(hlo.talks, hlo.lines))
    assert not hlo.side_by_side()


def compiled(data: int, tensor: int, expert: int = 1, **options: Any) -> Hlo:
    """The training step."""
    # the cached one is for steps that nothing has changed
    made = program.__wrapped__(data, tensor, expert, **options)
    arguments = start(made.step), nothing_finished(made.step), prompts_of(made.step, 0)
    return Hlo(made.call.lower(*arguments).compile().as_text())


def is_loop(line: str) -> bool:
    return " while(" in line and "generate" in line


def assert_stays(loop: list[str], rows: int, heads: int, slots: int, chunk: int) -> None:
    """Nothing in the loop, whatever its shape, is a copy as large as keys or values of a layer of
    the policy or the draft."""
    for page in (
        f"{heads * slots // chunk},{MODEL.head_size},{chunk}",
        f"{heads},{slots},{MODEL.head_size}",
    ):
        assert any(f"f64[{rows},{page}]" in line for line in loop), (
            "the caches are not where they are expected"
        )
    size = rows * heads * slots * MODEL.head_size
    copies = [(line, re.search(r"= f64\[([\d,]+)\]\S* copy(-start)?\(", line)) for line in loop]
    large = [
        line
        for line, copy in copies
        if copy and np.prod([int(number) for number in copy[1].split(",")]) == size
    ]
    assert not large, large
