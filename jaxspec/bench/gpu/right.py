"""Section 1: whether fast programs give what plain ones give."""

from typing import Any

import numpy as np

from jaxspec.bench.gpu import greedy
from jaxspec.bench.gpu.alone import executed_alone
from jaxspec.bench.gpu.kernels import check_kernels, kernel_recipes
from jaxspec.bench.gpu.run import NOT_HERE, GpuRun, Section
from jaxspec.compiled.serialized import pack, unpack

BUFFERS = "drafts, command buffers"


def measure_right(run: GpuRun) -> dict[str, Any]:
    """Compares kernels with their twins, and greedy tokens of several programs."""
    found: dict[str, Any] = {"kernels": check_kernels(run)}
    inputs = greedy.greedy_inputs(run.plan)
    tokens: dict[str, np.ndarray] = {}
    made = {}
    for name, variant in greedy.variants(run.plan).items():
        if variant.graphs:
            continue

        def answer(name: str = name, variant: greedy.Variant = variant) -> dict[str, Any]:
            layout, program = run.get(variant.layout), run.get(variant.program)
            tokens[name] = greedy.answers(layout.program, program.program, variant, inputs)
            return {"loaded": program.loaded, "without_kernels": program.plain}

        made[name] = run.attempt(variant.program, answer)
    found["greedy"] = made
    pairs = {
        "drafts and plain decoding": ("drafts", "plain"),
        "stacked and unrolled layers": ("drafts, layers stacked", "drafts"),
    }
    for title, (one, other) in pairs.items():
        if one in tokens and other in tokens:
            found[title] = greedy.difference(tokens[one], tokens[other])
            run.say(f"{title}: {greedy.told(found[title])}")
    if "drafts" in tokens:
        found |= run.attempt("loaded programs", lambda: _loaded(run, inputs, tokens["drafts"]))
        found["alone"] = run.attempt("two executions", lambda: _alone(run, tokens["drafts"]))
    return found


def _loaded(run: GpuRun, inputs: greedy.Inputs, tokens: np.ndarray) -> dict[str, Any]:
    """Compares a program that was compiled here with the same one, written and loaded again, and
    with the one from the folder."""
    drafts = greedy.variants(run.plan)["drafts"]
    layout, given = run.get(drafts.layout), run.get(drafts.program)
    compiled = run.programs.fresh(drafts.program) if given.loaded else given.program
    again = unpack(pack(compiled), run.plan.mesh.devices.flatten())
    ours, theirs = (
        greedy.answers(layout.program, program, drafts, inputs) for program in (again, compiled)
    )
    title = "a program and the same one, written and loaded"
    found = {title: greedy.difference(ours, theirs)}
    if given.loaded:
        found["a program of the folder and a compiled one"] = greedy.difference(tokens, theirs)
    for name, compared in found.items():
        run.say(f"{name}: {greedy.told(compared)}")
    return found


def _alone(run: GpuRun, tokens: np.ndarray) -> dict[str, Any]:
    """Runs a program twice in a process of its own: with command buffers where there are any."""
    name = BUFFERS if run.plan.on_gpu else "drafts"
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


RIGHT = Section(
    lambda plan: [*kernel_recipes(plan), *greedy.greedy_recipes(plan)], measure_right
)
