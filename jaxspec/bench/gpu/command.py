"""The command `bench gpu`: sections in order, each printed and kept at once."""

import contextlib
import json
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from jaxspec.bench.gpu.device import DRIVERS
from jaxspec.bench.gpu.options import DEFAULTS, SECTIONS, USUAL_SECONDS, GpuOptions
from jaxspec.bench.gpu.programs import Programs, Recipe, Say, save_all
from jaxspec.bench.gpu.results import Results
from jaxspec.bench.gpu.run import GpuRun, Plan
from jaxspec.bench.gpu.sections.card import CARD
from jaxspec.bench.gpu.sections.profile import PROFILE
from jaxspec.bench.gpu.sections.right import RIGHT
from jaxspec.bench.gpu.sections.rounds import ANSWERS, HEADLINE, VARIANTS
from jaxspec.bench.gpu.sections.steps import LEARNING, STEPS_SECTION
from jaxspec.bench.gpu.starting import (
    begun_folder,
    open_absent,
    open_plan,
    opened_folder,
    target_of,
)
from jaxspec.bench.measure import process_seconds
from jaxspec.compiled.hardware import HARDWARE, HERE
from jaxspec.config.cli import override, take_option
from jaxspec.inputs.checked import first_line, require
from jaxspec.mesh import cores
from jaxspec.system.progress import Screen

COMMAND = "python -m jaxspec.bench gpu"
_LISTED = "\n".join(f"  {number}  {about}" for number, about in SECTIONS.items())
ABOUT = f"""Measures speculation on one GPU within ten minutes, with random weights: no checkpoint,
no network. Every section prints its table at once, and adds it to --out; a second call goes on
where the first one ended. Sections that are out of time are left out, and named.

{_LISTED}

Programs are compiled on threads while others run. To have no compiling at all there, make them
elsewhere first, with the same versions of JAX and its plugin, and carry the folder:
  {COMMAND} --prepare FOLDER --hardware h100     (anywhere; needs the extra `check`, no GPU)
  {COMMAND} --programs FOLDER --out h100.json    (on the card)
--hardware is one of {", ".join(HARDWARE)}, or {HERE}: the device of this machine.
Needs compute capability 8.0 (Ampere) or newer, and a driver from {DRIVERS[12]} (CUDA 12) or
{DRIVERS[13]} (CUDA 13) on. To try all of it on a CPU, in a minute or two:
  {COMMAND} --size tiny
The last line of the output is one JSON object."""
PARTS = dict(
    enumerate((CARD, RIGHT, HEADLINE, VARIANTS, ANSWERS, STEPS_SECTION, LEARNING, PROFILE))
)
"""Sections by number."""


def parsed(argv: Sequence[str]) -> GpuOptions:
    """Reads the command line; the defaults are those of --size."""
    size, _ = take_option(argv, COMMAND, "size", "8b|tiny", "8b")
    return override(DEFAULTS.get(size, DEFAULTS["8b"]), argv, COMMAND, ABOUT)


def recipes_of(plan: Plan, sections: Sequence[int]) -> list[Recipe]:
    """The programs of sections, in their order and once each."""
    listed = [recipe for number in sections for recipe in PARTS[number].recipes(plan)]
    return list({recipe.name: recipe for recipe in listed}.values())


def prepare(options: GpuOptions) -> int:
    """Compiles all programs into a folder; the exit status is 1 if any failed."""
    plan, screen = open_absent(options), Screen()
    folder = begun_folder(plan)
    say = _sayer(screen)
    recipes = recipes_of(plan, options.chosen_sections)
    began = time.monotonic()
    failed = save_all(recipes, plan.mesh, folder, _workers(options), say)
    say(
        f"{len(folder)} programs for {folder.target.card}, {folder.size / 2**20:.1f} MiB, in"
        f" {options.prepare} ({time.monotonic() - began:.0f} s)"
    )
    if failed:
        say(f"{len(failed)} FAILED: {'; '.join(failed)}")
    return 1 if failed else 0


def measure(options: GpuOptions) -> int:
    """Measures the sections; the exit status is 1 if a part of any failed."""
    end = time.monotonic() - process_seconds() + options.budget
    plan, driver = open_plan(options)
    screen = Screen()
    say = _sayer(screen)
    target = target_of(plan)
    results = Results(Path(options.out), target._asdict() | options.measured)
    sections = []
    for number in options.chosen_sections:
        if options.again or not results.has(number):
            sections.append(number)
        else:
            say(f"section {number} is in {options.out} already; --again measures it anew")
    programs = Programs(plan.mesh, opened_folder(plan, say), _workers(options), say)
    run = GpuRun(
        plan=plan, programs=programs, results=results, screen=screen, driver=driver, end=end
    )
    # all at once: threads take them in this order
    programs.expect(recipes_of(plan, sections))
    late, failed = [], False
    with contextlib.closing(programs):
        for number in sections:
            if not _section(run, number):
                late.append(number)
            failed |= bool(run.failed)
    if late:
        say(
            f"not there, or in part: {', '.join(f'section {number}' for number in late)}; the same"
            f" command goes on with these (--budget is {options.budget:g} seconds)"
        )
    print(json.dumps(results.line), flush=True)
    return 1 if failed else 0


def _section(run: GpuRun, number: int) -> bool:
    """Measures a section and keeps it; returns whether it is all there."""
    least = USUAL_SECONDS[number] / 2 if run.plan.on_gpu else 0
    if run.left <= least:
        run.say(f"section {number} is left out: {max(run.left, 0):.0f} s are left")
        return False
    run.screen.rule(f"{number}  {SECTIONS[number]}  ({run.left:.0f} s left)", align="left")
    run.left_out, run.failed, began = [], [], time.monotonic()
    try:
        found = PARTS[number].measure(run)
    except Exception as error:  # noqa: BLE001 - minutes on a card are too few to lose the rest
        traceback.print_exception(error)
        found = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        run.failed.append(f"section {number}")
        run.say(f"section {number} FAILED: {found['failed']}")
    seconds = time.monotonic() - began
    complete = not (run.left_out or run.failed)
    run.results.add(number, found | {"seconds": seconds}, complete)
    run.say(f"section {number} took {seconds:.0f} s, and is in {run.results.file}")
    return complete


def _workers(options: GpuOptions) -> int:
    return options.workers or max(1, min(8, cores() // 2))


def _sayer(screen: Screen) -> Say:
    def say(message: str) -> None:
        screen.print(message, markup=False, highlight=False, soft_wrap=True)

    return say


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark."""
    options = parsed(argv)
    require(bool(options.chosen_sections), "--sections is empty; name some, such as 0,1,2")
    # a batch that is given away has parts without a twin among the results
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    return prepare(options) if options.prepare else measure(options)
