"""The sizes of the engine on accelerators, which follow what their memory allows."""

import dataclasses
import re
from typing import Any, NamedTuple

import pytest

from jaxspec import mesh as meshes
from jaxspec.build import AutomaticSizes, automatic_sizes
from jaxspec.config.settings import (
    DataConfig,
    EngineConfig,
    ResolvedConfig,
)
from jaxspec.host import fit as fitting
from jaxspec.host import memory
from jaxspec.host.fit import FittedStep, fit_step
from jaxspec.inputs.checked import ConfigError
from jaxspec.run.schedules import StepSchedule, compile_fused_schedule
from jaxspec.step import Sizes, Step
from tests.host.fit_parts import PROMPTS, plain_config, sizes, step_of


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices pass for accelerators."""
    monkeypatch.setattr(meshes, "has_accelerators", lambda mesh: True)
    monkeypatch.setattr(fitting, "has_accelerators", lambda mesh: True)


GROUPS = 4


def engine_config(new: int = 56, tokens: int = 0, **engine: Any) -> ResolvedConfig:
    """128 rows of up to 64 tokens, whose keys and values take most of the memory."""
    config = plain_config(tokens)
    rollout = dataclasses.replace(config.rollout, max_new_tokens=new, engine=EngineConfig(**engine))
    batch = dataclasses.replace(config.batch, prompts=GROUPS, group_size=128 // GROUPS)
    return dataclasses.replace(
        config, rollout=rollout, batch=batch, data=DataConfig(max_prompt_length=8)
    )


def engine_step(config: ResolvedConfig) -> Step:
    return step_of(config, data=1)


def test_the_engine_of_a_cpu_is_as_it_was() -> None:
    config = engine_config()
    step = engine_step(config)
    assert step.sizes._replace(tokens=0) == Sizes(tokens=0, slots=256, page_size=0, pages=0)
    assert automatic_sizes(config, step.learner.mesh) == AutomaticSizes(
        tokens=True, slots=False, pages=False
    )


@pytest.mark.usefixtures("accelerator")
def test_the_engine_of_an_accelerator_is_paged_and_what_is_asked_for_stays() -> None:
    config = engine_config()
    step = engine_step(config)
    assert step.sizes[1:] == (256, 64, 0)
    assert automatic_sizes(config, step.learner.mesh) == AutomaticSizes(
        tokens=True, slots=True, pages=True
    )
    for engine, wanted, left in (
        ({"page_size": 0}, (256, 0, 0), (True, False)),
        ({"page_size": 4, "slots": 9}, (9, 4, 0), (False, True)),
        ({"page_size": 4, "pages": 99}, (256, 4, 99), (True, False)),
    ):
        config = engine_config(**engine)
        assert engine_step(config).sizes[1:] == wanted
        assert automatic_sizes(config, step.learner.mesh)[1:] == left


class Program(NamedTuple):
    """A compiled program that takes so many bytes beside its arguments."""

    temp_size_in_bytes: int
    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0

    def memory_analysis(self) -> "Program":
        return self


class Machine:
    """What compiled programs would take of an accelerator, without compiling: so much a token of a
    micro-batch, so much a slot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token: int, slot: int) -> None:
        self.token, self.slot, self.compiled, self.alone = token, slot, [], 0
        monkeypatch.setattr(fitting, "compile_generation_alone", self.generation_alone)

    def generation(self, step: Step) -> int:
        pool, weights = (
            part.size
            for part in memory.list_memory_uses(step, GROUPS, {})
            if part.name in ("the pool of keys and values", WEIGHTS)
        )
        return pool + weights + self.slot * step.generator.settings.slots

    def generation_alone(self, step: Step, prompts: int) -> Program:
        self.alone += 1
        return Program(self.generation(step))

    def __call__(self, step: Step) -> StepSchedule:
        self.compiled.append(step.sizes)
        return StepSchedule(
            lambda *_: pytest.fail("nothing runs here"),
            {"step": Program(max(self.generation(step), self.token * step.learner.micro_tokens))},
        )

    def fit(
        self, monkeypatch: pytest.MonkeyPatch, config: ResolvedConfig, limit: int
    ) -> FittedStep:
        monkeypatch.setattr(fitting, "device_memory", lambda: limit)
        step = engine_step(config)
        fit = fit_step(step, GROUPS, self, automatic_sizes(config, step.learner.mesh))
        assert sum(part.size for part in fit.memory_uses) <= limit
        return fit

    def total(self, config: ResolvedConfig) -> int:
        step = engine_step(config)
        return sum(sizes_of_engine(step, self(step).programs).values())


WEIGHTS = "weights as generation reads them"


def sizes_of_engine(step: Step, programs: Any) -> dict[str, int]:
    return {part.name: part.size for part in memory.list_memory_uses(step, GROUPS, programs)}


@pytest.mark.usefixtures("accelerator")
class TestFittingTheEngine:
    def test_what_fits_has_all_pages_and_says_how_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config, machine = engine_config(page_size=4), Machine(monkeypatch, 10, 10)
        fit = machine.fit(monkeypatch, config, machine.total(config))
        assert fit.step.sizes == engine_step(config).sizes._replace(pages=GROUPS * 2 + 128 * 16)
        assert machine.alone == 0
        assert "128 slots, 2056 pages of 4 positions" in memory.format_memory_uses(
            fit.step, fit.memory_uses, fit.limit
        )

    def test_the_pool_takes_what_is_left_and_slots_follow_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config, machine = engine_config(page_size=4), Machine(monkeypatch, 10, 1000)
        whole = machine.total(config)
        pool = sizes_of_engine(engine_step(config), {})["the pool of keys and values"]
        limit = whole - pool // 4
        machine.compiled.clear()
        fit = machine.fit(monkeypatch, config, limit)
        assert fit.step.sizes.tokens == engine_step(config).sizes.tokens, (
            "learning takes less than generation"
        )
        assert fit.step.sizes.slots == 128, (
            "what three quarters of the pages hold halfway through the longest answers is every row"
        )
        assert 0.68 * 2056 < fit.step.sizes.pages < 0.75 * 2056
        assert len(machine.compiled) == 2
        fit = machine.fit(monkeypatch, config, whole - 3 * pool // 4)
        pages = fit.step.sizes.pages
        assert fit.step.sizes.slots == (pages - GROUPS * 2) // (8 + 1) < 128, (
            "7 or 8 pages of the answer's half, and one of the prompt"
        )

    def test_micro_batches_shrink_alone_where_learning_takes_most(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config, machine = engine_config(page_size=4), Machine(monkeypatch, 10_000, 10)
        tokens, whole = engine_step(config).sizes.tokens, machine.total(config)
        machine.compiled.clear()
        fit = machine.fit(monkeypatch, config, whole - 1)
        assert [sizes.tokens for sizes in machine.compiled] == [tokens, -(-tokens // 256) * 128]
        assert fit.step.sizes[1:] == (256, 4, 2056)

    @pytest.mark.slow
    def test_both_shrink_where_both_are_too_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config, machine = engine_config(page_size=4), Machine(monkeypatch, 1_000, 10)
        step = engine_step(config)
        limit = machine.total(config) // 8
        machine.compiled.clear()
        fit = machine.fit(monkeypatch, config, limit)
        assert fit.step.sizes.tokens < step.sizes.tokens
        assert fit.step.sizes.pages < machine.compiled[0].pages < 2056, (
            "that all pages are too much is known before anything is compiled"
        )
        assert len(machine.compiled) <= 5

    def test_temporaries_of_many_slots_leave_fewer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config, machine = engine_config(page_size=4), Machine(monkeypatch, 10, 100_000)
        fit = machine.fit(monkeypatch, config, 128 * 100_000 // 2)
        assert fit.step.sizes.slots == 32
        assert fit.step.sizes.pages == GROUPS * 2 + 32 * 16

    def test_rows_of_one_page_are_fitted_by_slots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config, machine = engine_config(page_size=0), Machine(monkeypatch, 10, 1000)
        fit = machine.fit(monkeypatch, config, machine.total(config) // 2)
        assert 32 <= fit.step.sizes.slots < 64
        assert fit.step.sizes.page_size == fit.step.sizes.pages == 0

    @pytest.mark.slow
    def test_what_is_asked_for_is_refused_with_what_fits(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = Machine(monkeypatch, 10, 1000)
        config = engine_config(page_size=4, pages=2000, slots=100)
        limit = machine.total(config) * 3 // 4
        words = (
            r"--rollout.engine.pages, now 2000 and at least 24, --rollout.engine.slots, now 100.*;"
            r" --rollout.engine.pages (\d+) should fit"
        )
        with pytest.raises(ConfigError, match=words) as caught:
            machine.fit(monkeypatch, config, limit)
        enough = int(re.findall(r"pages (\d+) should fit", str(caught.value))[0])
        fit = machine.fit(monkeypatch, engine_config(page_size=4, pages=enough, slots=100), limit)
        assert fit.step.sizes[1:] == (100, 4, enough)
        with pytest.raises(ConfigError, match=r"at least 24.*less with"):
            machine.fit(monkeypatch, engine_config(page_size=4), 200_000)

    @pytest.mark.slow
    def test_real_programs_are_fitted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = engine_config(page_size=4, tokens=63, tail=False)  # one loop compiles faster
        step = engine_step(config)
        seen: list[Sizes] = []

        def compiled(step: Step) -> StepSchedule:
            seen.append(step.sizes)
            return compile_fused_schedule(step, GROUPS)

        monkeypatch.setattr(fitting, "device_memory", lambda: 2**40)
        whole = fit_step(step, GROUPS, compiled, automatic_sizes(config, step.learner.mesh))
        limit = sum(part.size for part in whole.memory_uses) * 3 // 4
        monkeypatch.setattr(fitting, "device_memory", lambda: limit)
        fit = fit_step(step, GROUPS, compiled, automatic_sizes(config, step.learner.mesh))
        assert limit * 2 // 3 < sum(part.size for part in fit.memory_uses) <= limit
        assert fit.step.sizes.pages < whole.step.sizes.pages == 2056
        assert len(seen) == 3


def test_a_program_that_runs_beside_the_state_counts_all_that_it_gets() -> None:
    step = step_of(plain_config(200))
    given = Program(temp_size_in_bytes=10**6, argument_size_in_bytes=10**7)
    kept = sum(
        part.size
        for part in memory.list_memory_uses(step, PROMPTS, {})
        if part.name in ("policy weights", "the policy's optimizer")
    )
    assert sum(sizes(step, {"slice": given}).values()) == kept + 10**6 + 10**7
    assert sum(sizes(step, {"train": given}).values()) == 10**6 + 10**7
