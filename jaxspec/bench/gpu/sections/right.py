"""Section 1: whether fast programs give what plain ones give."""

from typing import Any, NamedTuple

import numpy as np

from jaxspec.bench.gpu.run import NOT_HERE, GpuRun, Section
from jaxspec.bench.gpu.sections import greedy
from jaxspec.bench.gpu.sections.alone import executed_alone
from jaxspec.bench.gpu.sections.kernels import check_kernels, kernel_recipes
from jaxspec.compiled.serialized import pack, unpack

DRAFTS, BUFFERS = "drafts", "drafts, command buffers"


def measure_right(run: GpuRun) -> dict[str, Any]:
    """Compares kernels with their twins, and greedy tokens of several programs."""
    found: dict[str, Any] = {"kernels": check_kernels(run)}
    inputs = greedy.greedy_inputs(run.plan)
    tokens: dict[str, np.ndarray] = {}
    made = found["greedy"] = {}
    for name, variant in greedy.variants(run.plan).items():
        if variant.graphs:
            continue

        def answer(name: str = name, variant: greedy.Variant = variant) -> dict[str, Any]:
            layout, program = run.get(variant.layout), run.get(variant.program)
            # a program of a CPU cannot be written any more once it has run
            again = _written(run, variant.program) if name == DRAFTS else None
            tokens[name] = greedy.answers(layout.program, program.program, variant, inputs)
            about = {"loaded": program.loaded, "without_kernels": program.plain}
            if again is None:
                return about
            return about | _loaded(run, variant, inputs, again, tokens[name])

        made[name] = run.attempt(variant.program, answer)
    pairs = {
        "drafts and plain decoding": (DRAFTS, "plain"),
        "stacked and unrolled layers": ("drafts, layers stacked", DRAFTS),
    }
    for title, (one, other) in pairs.items():
        if one in tokens and other in tokens:
            found[title] = greedy.difference(tokens[one], tokens[other])
            run.say(f"{title}: {greedy.told(found[title])}")
    if DRAFTS in tokens:
        found["alone"] = run.attempt("two executions", lambda: _alone(run, tokens[DRAFTS]))
    return found


class _Written(NamedTuple):
    """A program that was compiled here, and the same one, written and loaded."""

    compiled: Any
    again: Any


def _written(run: GpuRun, name: str) -> _Written:
    made = run.get(name)
    compiled = run.programs.fresh(name) if made.loaded else made.program
    return _Written(compiled, unpack(pack(compiled), [*run.plan.mesh.devices.flat]))


def _loaded(
    run: GpuRun,
    variant: greedy.Variant,
    inputs: greedy.Inputs,
    written: _Written,
    tokens: np.ndarray,
) -> dict[str, Any]:
    """Compares a program that was compiled here with the same one, written and loaded again, and
    with the one from the folder."""
    layout = run.get(variant.layout).program
    ours, theirs = (
        greedy.answers(layout, program, variant, inputs)
        for program in (written.again, written.compiled)
    )
    found = {"a program and the same one, written and loaded": greedy.difference(ours, theirs)}
    if run.get(variant.program).loaded:
        found["a program of the folder and a compiled one"] = greedy.difference(tokens, theirs)
    for name, compared in found.items():
        run.say(f"{name}: {greedy.told(compared)}")
    return found


def _alone(run: GpuRun, tokens: np.ndarray) -> dict[str, Any]:
    """Runs a program twice in a process of its own: with command buffers where there are any."""
    name = BUFFERS if run.plan.on_gpu else DRAFTS
    if not run.plan.on_gpu:
        run.say(f"command buffers: {NOT_HERE}; another process executes a program without, twice")
    made = executed_alone(run.plan, name, run.left)
    found: dict[str, Any] = {"variant": name}
    if "crashed" in made:
        run.say(f"{name}: CRASHED in a process of its own: {made['crashed']}")
        for line in made.get("last_lines", []):
            run.say(f"  {line}")
        return found | made
    found |= {"executions_equal": made["executions_equal"], "loaded": made["loaded"]}
    found["beside_drafts"] = greedy.difference(np.array(made["tokens"]), tokens)
    twice = "equal" if made["executions_equal"] else "DIFFERENT"
    run.say(
        f"{name}, in a process of its own: two executions are {twice}; beside the rounds here:"
        f" {greedy.told(found['beside_drafts'])}"
    )
    return found


RIGHT = Section(lambda plan: [*kernel_recipes(plan), *greedy.greedy_recipes(plan)], measure_right)
