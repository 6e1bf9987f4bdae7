"""Command `bench gpu`.

Measures sections in order. Each is printed and saved as soon as it is measured.
"""

import contextlib
import json
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from jaxspec.bench.gpu.device import MIN_DRIVERS
from jaxspec.bench.gpu.options import DEFAULTS, SECTION_TITLES, USUAL_SECONDS, GpuOptions
from jaxspec.bench.gpu.programs import Log, Programs, Recipe, save_programs
from jaxspec.bench.gpu.results import Results
from jaxspec.bench.gpu.run import GpuPlan, GpuRun
from jaxspec.bench.gpu.sections.card import CARD_SECTION
from jaxspec.bench.gpu.sections.profile import PROFILE_SECTION
from jaxspec.bench.gpu.sections.right import CORRECTNESS_SECTION
from jaxspec.bench.gpu.sections.rounds import ANSWERS_SECTION, HEADLINE_SECTION, VARIANTS_SECTION
from jaxspec.bench.gpu.sections.steps import LEARNING_SECTION, STEPS_SECTION
from jaxspec.bench.gpu.starting import (
    create_program_folder,
    open_compile_plan,
    open_plan,
    open_program_folder,
    program_target,
)
from jaxspec.bench.measure import process_age_seconds
from jaxspec.compiled.hardware import HARDWARE, LOCAL_DEVICES
from jaxspec.config.cli import override_settings, take_option
from jaxspec.inputs.checked import first_line, require
from jaxspec.processes.devices import core_count
from jaxspec.system.progress import Screen

COMMAND = "python -m jaxspec.bench gpu"
_SECTION_LIST = "\n".join(f"  {number}  {title}" for number, title in SECTION_TITLES.items())
ABOUT = f"""Measures speculation on one GPU within ten minutes, with random weights: no checkpoint,
no network. Every section prints its table at once and adds it to --out. A second call measures the
sections that are missing there. Sections for which no time is left are skipped and listed.

{_SECTION_LIST}

Programs are compiled on threads while others run. To compile nothing on the card, compile them on
another machine first, with the same versions of JAX and its plugin, and copy the folder:
  {COMMAND} --prepare FOLDER --hardware h100     (anywhere; needs the extra `check`, no GPU)
  {COMMAND} --programs FOLDER --out h100.json    (on the card)
--hardware is one of {", ".join(HARDWARE)}, or {LOCAL_DEVICES} for the device of this machine.
Needs compute capability 8.0 (Ampere) or newer, and driver {MIN_DRIVERS[12]} or newer for CUDA 12,
or driver {MIN_DRIVERS[13]} or newer for CUDA 13. To try all of it on a CPU, in a minute or two:
  {COMMAND} --size tiny

The last line of the output is one JSON object."""
SECTIONS = dict(
    enumerate(
        (
            CARD_SECTION,
            CORRECTNESS_SECTION,
            HEADLINE_SECTION,
            VARIANTS_SECTION,
            ANSWERS_SECTION,
            STEPS_SECTION,
            LEARNING_SECTION,
            PROFILE_SECTION,
        )
    )
)
"""Sections by number."""


def parse_options(argv: Sequence[str]) -> GpuOptions:
    """Parses the command line."""
    # --size is read first, since it selects the defaults of the other options.
    size, _ = take_option(argv, COMMAND, "size", "8b|tiny", "8b")
    return override_settings(DEFAULTS.get(size, DEFAULTS["8b"]), argv, COMMAND, ABOUT)


def section_recipes(plan: GpuPlan, sections: Sequence[int]) -> list[Recipe]:
    """Lists the programs of sections in order, without duplicates."""
    # Some sections share programs. A dict keeps each name at the place where it came first.
    recipes = [recipe for number in sections for recipe in SECTIONS[number].recipes(plan)]
    return list({recipe.name: recipe for recipe in recipes}.values())


def prepare_programs(options: GpuOptions) -> int:
    """Compiles all programs into a folder.

    Returns the exit status, which is 1 if any program failed.
    """
    plan, screen = open_compile_plan(options), Screen()
    folder = create_program_folder(plan)
    log = _line_printer(screen)
    recipes = section_recipes(plan, options.section_numbers)
    start_time = time.monotonic()
    failed_names = save_programs(recipes, plan.mesh, folder, _worker_count(options), log)
    log(
        f"{len(folder)} programs for {folder.target.card}, {folder.total_bytes / 2**20:.1f} MiB, in"
        f" {options.prepare} ({time.monotonic() - start_time:.0f} s)"
    )
    if failed_names:
        log(f"{len(failed_names)} FAILED: {'; '.join(failed_names)}")
    return 1 if failed_names else 0


def measure_sections(options: GpuOptions) -> int:
    """Measures the sections that the file of results lacks.

    Returns the exit status, which is 1 if any part of a section failed.
    """
    # --budget also covers Python's start and imports, which ended before this line.
    deadline = time.monotonic() - process_age_seconds() + options.budget
    plan, driver = open_plan(options)
    screen = Screen()
    log = _line_printer(screen)
    target = program_target(plan)
    # The file may have runs of other cards, versions and sizes. Target and sizes identify a run.
    results = Results(Path(options.out), target._asdict() | options.table_sizes)
    sections = []
    for number in options.section_numbers:
        if options.again or not results.has_section(number):
            sections.append(number)
        else:
            log(f"section {number} is in {options.out} already; --again measures it again")
    programs = Programs(plan.mesh, open_program_folder(plan, log), _worker_count(options), log)
    run = GpuRun(
        plan=plan,
        programs=programs,
        results=results,
        screen=screen,
        driver=driver,
        deadline=deadline,
    )
    # Threads compile in this order, so later programs are compiled while earlier sections run.
    programs.queue_recipes(section_recipes(plan, sections))
    incomplete_sections, has_failures = [], False
    # Closed after the last section, so that programs that nothing waits for are not compiled.
    with contextlib.closing(programs):
        for number in sections:
            if not _measure_section(run, number):
                incomplete_sections.append(number)
            has_failures |= bool(run.failed_parts)
    if incomplete_sections:
        log(
            "missing or incomplete:"
            f" {', '.join(f'section {number}' for number in incomplete_sections)}; run the same"
            f" command again to measure these (--budget is {options.budget:g} seconds)"
        )
    print(json.dumps(results.record), flush=True)
    return 1 if has_failures else 0


def _measure_section(run: GpuRun, number: int) -> bool:
    """Measures a section and saves it, if there is time. Returns whether it is complete."""
    # A section saves the parts that it has time for, so it may start with less than its usual
    # time. USUAL_SECONDS are those of a GPU.
    min_seconds = USUAL_SECONDS[number] / 2 if run.plan.targets_gpu else 0
    if run.seconds_left <= min_seconds:
        run.print_line(f"section {number} is left out: {max(run.seconds_left, 0):.0f} s are left")
        return False
    run.screen.rule(
        f"{number}  {SECTION_TITLES[number]}  ({run.seconds_left:.0f} s left)", align="left"
    )
    run.skipped_parts, run.failed_parts, start_time = [], [], time.monotonic()
    try:
        numbers = SECTIONS[number].measure(run)
    # Time on a card is short, so no error of one section may cost the others.
    except Exception as error:  # noqa: BLE001 - reported with its traceback
        traceback.print_exception(error)
        numbers = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        run.failed_parts.append(f"section {number}")
        run.print_line(f"section {number} FAILED: {numbers['failed']}")
    seconds = time.monotonic() - start_time
    # A section with a skipped or failed part is saved, but the next call measures it again.
    complete = not (run.skipped_parts or run.failed_parts)
    run.results.add_section(number, numbers | {"seconds": seconds}, complete)
    run.print_line(f"section {number} took {seconds:.0f} s, and is in {run.results.file}")
    return complete


def _worker_count(options: GpuOptions) -> int:
    return options.workers or max(1, min(8, core_count() // 2))


def _line_printer(screen: Screen) -> Log:
    def print_line(message: str) -> None:
        # Brackets in messages are no markup, and a line is not wrapped at the terminal's width.
        screen.print(message, markup=False, highlight=False, soft_wrap=True)

    return print_line


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark. Returns the exit status."""
    options = parse_options(argv)
    require(bool(options.section_numbers), "--sections is empty; name some, such as 0,1,2")
    # Some leaves of a donated batch have no result of their shape, which JAX would warn of.
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    return prepare_programs(options) if options.prepare else measure_sections(options)
