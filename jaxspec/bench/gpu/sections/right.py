"""Section 1: compares fast programs with plain ones."""

from typing import Any, NamedTuple

import numpy as np

from jaxspec.bench.gpu.run import NOT_APPLICABLE, GpuRun, Section
from jaxspec.bench.gpu.sections import greedy
from jaxspec.bench.gpu.sections.alone import execute_in_process
from jaxspec.bench.gpu.sections.kernels import check_kernels, kernel_recipes
from jaxspec.compiled.serialized import deserialize_program, serialize_program

DRAFTS, BUFFERS = "drafts", "drafts, command buffers"
"""Names of variants (`greedy.greedy_variants`)."""


def measure_correctness(run: GpuRun) -> dict[str, Any]:
    """Compares kernels with their plain twins, and the greedy tokens of several programs.

    Prints each comparison.
    """
    results: dict[str, Any] = {"kernels": check_kernels(run)}
    inputs = greedy.make_inputs(run.plan)
    tokens: dict[str, np.ndarray] = {}
    greedy_results = results["greedy"] = {}
    for name, variant in greedy.greedy_variants(run.plan).items():
        # `_compare_alone` runs these in another process, which they may crash.
        if variant.command_buffers:
            continue

        def answer_greedily(
            name: str = name, variant: greedy.GreedyVariant = variant
        ) -> dict[str, Any]:
            layout, program = (
                run.get_program(variant.layout_name),
                run.get_program(variant.program_name),
            )
            # Before the program runs, since a program of a CPU cannot be serialized afterwards.
            program_pair = _make_program_pair(run, variant.program_name) if name == DRAFTS else None
            tokens[name] = greedy.generate_answers(layout.program, program.program, variant, inputs)
            facts = {"loaded": program.is_loaded, "without_kernels": program.without_kernels}
            if program_pair is None:
                return facts
            return facts | _compare_reloaded(run, variant, inputs, program_pair, tokens[name])

        greedy_results[name] = run.attempt_part(variant.program_name, answer_greedily)
    pairs = {
        "drafts and plain decoding": (DRAFTS, "plain"),
        "stacked and unrolled layers": ("drafts, layers stacked", DRAFTS),
    }
    for title, (tested, reference) in pairs.items():
        if tested in tokens and reference in tokens:
            results[title] = greedy.compare_tokens(tokens[tested], tokens[reference])
            run.print_line(f"{title}: {greedy.describe_difference(results[title])}")
    if DRAFTS in tokens:
        results["alone"] = run.attempt_part(
            "two executions", lambda: _compare_alone(run, tokens[DRAFTS])
        )
    return results


class _ProgramPair(NamedTuple):
    """Program compiled here, and its copy after serializing and loading."""

    compiled: Any
    reloaded: Any


def _make_program_pair(run: GpuRun, name: str) -> _ProgramPair:
    """Compiles a program if it was loaded from the folder, and makes its reloaded copy."""
    ready_program = run.get_program(name)
    compiled = (
        run.programs.compile_again(name) if ready_program.is_loaded else ready_program.program
    )
    return _ProgramPair(
        compiled, deserialize_program(serialize_program(compiled), [*run.plan.mesh.devices.flat])
    )


def _compare_reloaded(
    run: GpuRun,
    variant: greedy.GreedyVariant,
    inputs: greedy.GreedyInputs,
    pair: _ProgramPair,
    tokens: np.ndarray,
) -> dict[str, Any]:
    """Compares a program compiled here with its reloaded copy, and with that of the folder.

    Args:
      run: run of the benchmark.
      variant: variant of the program.
      inputs: inputs of all variants.
      pair: compiled program and its reloaded copy.
      tokens: tokens of the program that the run uses, from the folder or compiled.
    """
    layout = run.get_program(variant.layout_name).program
    reloaded_tokens, compiled_tokens = (
        greedy.generate_answers(layout, program, variant, inputs)
        for program in (pair.reloaded, pair.compiled)
    )
    comparisons = {
        "a program and the same one, written and loaded": greedy.compare_tokens(
            reloaded_tokens, compiled_tokens
        )
    }
    if run.get_program(variant.program_name).is_loaded:
        comparisons["a program of the folder and a compiled one"] = greedy.compare_tokens(
            tokens, compiled_tokens
        )
    for name, comparison in comparisons.items():
        run.print_line(f"{name}: {greedy.describe_difference(comparison)}")
    return comparisons


def _compare_alone(run: GpuRun, tokens: np.ndarray) -> dict[str, Any]:
    """Executes a program twice in another process, with command buffers if the device has them.

    Compares its tokens with `tokens`, which the same drafts gave in this process.
    """
    # A CPU has no command buffers. It still checks that another process gives the same tokens.
    name = BUFFERS if run.plan.targets_gpu else DRAFTS
    if not run.plan.targets_gpu:
        run.print_line(
            f"command buffers: {NOT_APPLICABLE}; another process executes a program without, twice"
        )
    outcome = execute_in_process(run.plan, name, run.seconds_left)
    record: dict[str, Any] = {"variant": name}
    if "crashed" in outcome:
        run.print_line(f"{name}: CRASHED in a process of its own: {outcome['crashed']}")
        for line in outcome.get("last_lines", []):
            run.print_line(f"  {line}")
        return record | outcome
    record |= {"executions_equal": outcome["executions_equal"], "loaded": outcome["loaded"]}
    record["beside_drafts"] = greedy.compare_tokens(np.array(outcome["tokens"]), tokens)
    equality = "equal" if outcome["executions_equal"] else "DIFFERENT"
    run.print_line(
        f"{name}, in a process of its own: two executions are {equality}; beside the rounds here:"
        f" {greedy.describe_difference(record['beside_drafts'])}"
    )
    return record


CORRECTNESS_SECTION = Section(
    lambda plan: [*kernel_recipes(plan), *greedy.greedy_recipes(plan)], measure_correctness
)
