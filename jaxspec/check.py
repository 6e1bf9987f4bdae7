"""Checks whether a run will work, without its devices.

`python -m jaxspec.check --config rl_think.py:qwen3_8b --devices 32`
"""

import sys

# Runs before the slow imports, so that a signal ends them at once. Nothing needs saving yet.
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

import argparse
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxspec import mesh as meshes
from jaxspec.build import automatic_sizes
from jaxspec.compiled import findings, hardware
from jaxspec.compiled.compiler import (
    StderrCapture,
    capture_stderr,
    set_check_options,
    use_mesh_devices,
)
from jaxspec.compiled.hardware import LOCAL_DEVICES
from jaxspec.config.cli import load_config
from jaxspec.config.from_checkpoint import check_folders, resolve_from_local_files
from jaxspec.config.settings import Config, ResolvedConfig
from jaxspec.config.split import check_meshes
from jaxspec.data.problems import load_sets
from jaxspec.data.scoring import make_scorers, try_scorers
from jaxspec.drafts.kinds import get_kind
from jaxspec.host import memory
from jaxspec.host.check_report import (
    CheckResult,
    SidesResult,
    StepTarget,
    format_gib,
    print_report,
    print_sides,
    result_to_json,
    sides_to_json,
)
from jaxspec.host.fit import DoesNotFit, FittedStep, fit_step
from jaxspec.host.job import configure_jax, make_job, run_without_saving
from jaxspec.host.programs import abstract_arguments, times_real_rounds
from jaxspec.inputs.checked import require
from jaxspec.models.attention import BLOCK
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder
from jaxspec.processes.devices import count_devices
from jaxspec.run.pipelined.programs import SidePrograms, compile_side_programs
from jaxspec.run.schedules import StepSchedule, compile_fused_schedule
from jaxspec.step import Step
from jaxspec.system.progress import Heartbeat, Screen

COMMAND = "python -m jaxspec.check"
ABOUT = f"""Checks whether a run will work on N devices, without having them.

It reads the config with the local files that it names, and tries the tokenizer and the rewards.
Then it compiles the step for the mesh, and reports memory of a device, work, collectives, and
faults of the compiled program.

--devices N        devices of the whole job; may be left out with --hardware {LOCAL_DEVICES}
--hardware NAME    {", ".join(hardware.HARDWARE)},
                   or {LOCAL_DEVICES} for the devices that JAX finds;
                   default: h200 for up to 8 devices, gb200 for more
--json             print one JSON object instead of tables

Files and folders that are missing here are reported, and do not stop the check. Compiling for GPUs
without one needs the extra `check`. Without the extra, the step is compiled for virtual devices of
the CPU. The exit status is 0 if the run should work, 1 if it will not, and 2 for bad input.
Examples:
  {COMMAND} --config rl_think.py:qwen3_8b --devices 32
  {COMMAND} --config rl_think.py:qwen3_0.6b --devices 1 --hardware rtx4090 --json"""
_MOST_VIRTUAL = 512
"""Maximum number of devices that a CPU is split into, as in `processes.devices`."""


def main(argv: Sequence[str]) -> int:
    """Runs the check. Returns the exit status."""
    options, words = parse_options(argv)
    config, name = load_config(words, "check", ABOUT)
    require(options.devices >= 0, f"--devices {options.devices}: give the number of the whole job")
    with disable_cache():
        result = check_run(config, options)
    if isinstance(result, SidesResult):
        if options.json:
            print(json.dumps(sides_to_json(name, result)))
        else:
            print_sides(name, result, Screen())
    elif options.json:
        print(json.dumps(result_to_json(name, result)))
    else:
        print_report(name, result, Screen())
    return 1 if result.reason else 0


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the program's own options. Also returns the remaining words."""
    parser = argparse.ArgumentParser(prog=COMMAND, add_help=False, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--hardware", default="")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(argv)


@contextlib.contextmanager
def disable_cache() -> Iterator[None]:
    """Disables JAX's compilation cache inside the context."""
    # A cached program brings no messages of the compiler, which are part of the report. Programs
    # for absent devices cannot be cached.
    name = "jax_enable_compilation_cache"
    previous_value = getattr(jax.config, name)
    jax.config.update(name, False)
    reset_cache()  # JAX decides only once whether it uses the cache
    try:
        yield
    finally:
        jax.config.update(name, previous_value)
        reset_cache()


def check_run(config: Config, options: argparse.Namespace) -> CheckResult | SidesResult:
    """Checks a config: settings, data, rewards, then the compiled step."""
    # Cheap checks come first, so that a typo is found before minutes of compilation.
    with capture_stderr() as log, Heartbeat(log.print_line) as heartbeat:
        heartbeat.start_activity("reading the config, and the folders that it names")
        resolved, unchecked = resolve_from_local_files(config)
        target = make_target(resolved, options.hardware, options.devices)
        device_count = len(target.devices)
        # Beyond one machine there are several processes. These may leave no device idle.
        processes = 1 if target.card is None or device_count <= target.card.node else device_count
        shapes = check_meshes(resolved, device_count, processes)
        mesh = generator_mesh = meshes.make_mesh(*shapes.learner, target.devices)
        if shapes.generator_devices:
            devices = target.devices[-shapes.generator_devices :]
            generator_mesh = meshes.make_mesh(*shapes.generator, devices)
        used_devices = dict.fromkeys([*mesh.devices.flat, *generator_mesh.devices.flat])
        used_target = target._replace(devices=[*used_devices])
        job = make_job(resolved, mesh, generator_mesh)
        check_folders(resolved, jax.eval_shape(job.step.init_policy), job.tokenizer.size)
        # The rewards cannot be tried on data that is missing here.
        unread_data = {item for item in unchecked if item.startswith("data.")}
        scorers = make_scorers(resolved)
        if not unread_data and not config.mixture:
            heartbeat.start_activity("reading the problems")
            try_scorers(resolved, load_sets(resolved, job.tokenizer), scorers)
        if times_real_rounds(job.step.generator):
            remark = "the phases, which draft_length auto has compiled one by one, by themselves"
            unchecked.append(remark)
        with use_mesh_devices(mesh):
            if len(used_target.devices) < len(target.devices):
                reason = "more data shards would not divide every batch (batch.prompts, rows)"
                log.print_line(
                    f"using {len(used_target.devices)} of {len(target.devices)} devices: {reason}"
                )
            compile_result = compile_step if job.step.shares_devices else compile_sides
            return compile_result(job.config, job.step, used_target, unchecked, log, heartbeat)


# ---- compiling


def make_target(config: ResolvedConfig, name: str, count: int) -> StepTarget:
    """Returns the devices to compile for.

    Raises:
      ConfigError: the hardware is unknown, or there are too few devices.
    """
    require(
        bool(count) or name == LOCAL_DEVICES,
        f"no --devices: give their number, or --hardware {LOCAL_DEVICES} for those that there are",
    )
    if name == LOCAL_DEVICES:
        configure_jax(config, count)
        available = count_devices()
        require(count <= available, f"--devices {count}: JAX finds {available} here")
        return StepTarget(LOCAL_DEVICES, None, jax.devices()[: count or available], virtual=False)
    name = name or hardware.default_hardware(count)
    card = hardware.find_card(name)
    # XLA compiles for absent GPUs from a description. A GPU of this machine stays unused.
    jax.config.update("jax_platforms", "cpu")
    if hardware.has_cuda_plugin():
        set_check_options()
    configure_jax(config, count)
    if hardware.has_cuda_plugin():
        return StepTarget(name, card, list(hardware.topology_devices(card, count)), virtual=False)
    available = count_devices()
    remedy = "install the extra `check`, which compiles for GPUs without one"
    require(
        count <= available,
        f"--devices {count}: this CPU stands for {available} (at most {_MOST_VIRTUAL}, fewer where"
        f" JAX_NUM_CPU_DEVICES or XLA_FLAGS says so); {remedy}",
    )
    require(
        not config.rollout.engine.command_buffers,
        f"rollout.engine.command_buffers: this CPU, which stands for GPUs here, has none; {remedy}",
    )
    return StepTarget(name, card, jax.devices()[:count], virtual=True)


def compile_step(
    config: ResolvedConfig,
    step: Step,
    target: StepTarget,
    unchecked: list[str],
    log: StderrCapture,
    heartbeat: Heartbeat,
) -> CheckResult:
    """Compiles the step and analyzes the program."""
    prompts = config.batch.prompts
    log.print_line(
        f"compiling the step for {step.learner.mesh.size} x {target.label}; this takes minutes"
    )

    def compile_fused(step: Step) -> StepSchedule:
        return compile_fused_schedule(step, prompts, heartbeat.print_line)

    fit, reason, seconds = _fit_target(config, step, target, compile_fused, log, heartbeat)
    program = fit.compiled.programs["step"]
    result = _analyze_program(config, target, fit, reason, program)
    warnings = [*log.resharding_messages, *result.warnings]
    return result._replace(unchecked=unchecked, warnings=warnings, seconds=seconds)


def compile_sides(
    config: ResolvedConfig,
    step: Step,
    target: StepTarget,
    unchecked: list[str],
    log: StderrCapture,
    heartbeat: Heartbeat,
) -> SidesResult:
    """Compiles a program for each side of a pipelined run, and analyzes both."""
    prompts, sides = config.batch.prompts, (step.learner.mesh, step.generator.mesh)
    log.print_line(
        f"compiling learning for {sides[0].size} and generation for {sides[1].size} x"
        f" {target.label}; this takes minutes"
    )

    def compile_both(step: Step) -> SidePrograms:
        return compile_side_programs(step, prompts, heartbeat.print_line)

    fit, reason, seconds = _fit_target(config, step, target, compile_both, log, heartbeat)
    uses = memory.list_side_uses(fit.step, prompts, fit.compiled.programs)
    results = []
    for mesh, side_uses, program in zip(sides, uses, fit.compiled.programs.values(), strict=True):
        # Facts to compare with are those of a step on this side's devices alone.
        side_step = dataclasses.replace(
            fit.step,
            learner=dataclasses.replace(fit.step.learner, mesh=mesh),
            generator=dataclasses.replace(fit.step.generator, mesh=mesh),
        )
        side_fit = dataclasses.replace(fit, step=side_step, memory_uses=side_uses)
        side_target = target._replace(devices=[*mesh.devices.flat])
        result = _analyze_program(config, side_target, side_fit, reason, program)
        results.append(result._replace(unchecked=unchecked, seconds=seconds))
    learner, generator = results
    # Messages of the compiler do not tell to which program they belong.
    learner = learner._replace(warnings=[*log.resharding_messages, *learner.warnings])
    return SidesResult(learner, generator, fit.compiled.weight_bytes, fit.compiled.batch_bytes)


def _fit_target(
    config: ResolvedConfig,
    step: Step,
    target: StepTarget,
    compile_programs: Callable[[Step], Any],
    log: StderrCapture,
    heartbeat: Heartbeat,
) -> tuple[FittedStep[Any], str, list[float]]:
    """Compiles programs that fit the target.

    Returns the step with its programs, the reason why it does not fit or an empty text, and the
    seconds of each attempt.
    """
    seconds: list[float] = []

    def compile_timed(step: Step) -> Any:
        heartbeat.start_activity("tracing the step")
        start_time = time.perf_counter()
        programs = compile_programs(step)
        seconds.append(time.perf_counter() - start_time)
        heartbeat.start_activity("reading the compiled program")
        log.print_line(f"compiled in {seconds[-1]:.0f} s")
        return programs

    reason, auto = "", automatic_sizes(config, step.generator.mesh)
    # Temporaries of a CPU program differ from those of a GPU, so they cannot exceed a limit here.
    limit = sys.maxsize if target.virtual else target.memory_limit
    try:
        fit = fit_step(step, config.batch.prompts, compile_timed, auto, limit)
    except DoesNotFit as error:
        fit, reason = error.smallest, str(error)
    return dataclasses.replace(fit, limit=target.memory_limit), reason, seconds


def _analyze_program(
    config: ResolvedConfig, target: StepTarget, fit: FittedStep, reason: str, program: Any
) -> CheckResult:
    """Analyzes a compiled program. `reason` is that of `_fit_target`."""
    if target.virtual and not reason:
        reason = _overflow_reason(fit)
    expected = program_expectations(fit, config)
    if target.virtual:  # a CPU program copies keys to another layout, and has no paged kernel
        expected = expected._replace(layer_cache_bytes=0, is_paged=False)
    analysis = findings.analyze_step(program.as_text(), expected, target.card)
    return CheckResult(config, target, [], fit, reason, analysis, analysis.warnings, [])


def _overflow_reason(fit: FittedStep) -> str:
    kept_bytes = sum(owner.size for owner in fit.memory_uses if owner.name != memory.TEMPORARIES)
    reason = f"{format_gib(kept_bytes)} are kept on each device, which has {format_gib(fit.limit)}"
    return reason if kept_bytes > fit.limit else ""


def program_expectations(fit: FittedStep, config: ResolvedConfig) -> findings.StepExpectation:
    """Collects facts to compare the program with."""
    step, prompts = fit.step, config.batch.prompts
    mesh = dict(step.learner.mesh.shape)
    state, _, _ = abstract_arguments(step, prompts)
    networks = state.learner.policy.network, state.learner.draft.network
    size = jax.numpy.dtype(config.model.dtype).itemsize
    # A sync gathers weights over `data`. They stay sharded over `expert` and `tensor`.
    synced = 0
    for leaf in jax.tree.leaves(networks):
        entries = [meshes.entry_axes(entry) for entry in leaf.sharding.spec]
        kept_axes = [entry for entry in entries if meshes.DATA not in entry]
        if len(kept_axes) < len(entries):
            shard_count = math.prod(mesh[axis] for entry in kept_axes for axis in entry)
            synced += leaf.size * size // shard_count
    peers = mesh[meshes.TENSOR]
    pool = sum(owner.size for owner in fit.memory_uses if owner.name == memory.POOL)
    learned = get_kind(config.rollout.draft.kind).learned
    draft_layers = learned.decoder_spec(config.draft_spec).layers if learned else 1
    return findings.StepExpectation(
        mesh=mesh,
        row_axes=meshes.ROWS,
        vocab_size=config.model.vocab,
        row_count=prompts * config.batch.group_size,
        row_length=config.row_length,
        # Keys are half of the pool, and values the other half.
        layer_cache_bytes=pool // (2 * (config.model.layers + draft_layers)),
        sync_bytes=synced,
        is_paged=step.sizes.page_size > 0,
        # A multiplication and an addition for each weight and token.
        micro_batch_flops=2
        * count_active_weights(step, config)
        * step.learner.micro_tokens
        / peers,
        has_experts=config.model.family.experts > 0,
        trains_draft=step.online,
        uses_command_buffers=step.generator.command_buffers,
        key_blocks=config.row_length / BLOCK,
    )


def count_active_weights(step: Step, config: ResolvedConfig) -> int:
    """Counts the policy's weights that a token is multiplied with.

    Excludes the embedding table, norms and biases, and the experts that a token is not sent to.
    """
    network = jax.eval_shape(step.init_policy)
    policy: Decoder = network.base if isinstance(network, AdaptedDecoder) else network
    family, total = config.model.family, config.model.vocab * config.model.embed
    for path, leaf in jax.tree_util.tree_leaves_with_path(policy.layers):
        if leaf.ndim > 2:  # the others are norms and biases
            total += leaf.size
            if ".expert_" in jax.tree_util.keystr(path):
                total -= leaf.size * (family.experts - family.experts_per_token) // family.experts
    return total


def run_program(argv: Sequence[str]) -> int:
    """Runs the check as a program. Returns the exit status."""
    # There is nothing to save, so a signal ends it at once.
    return run_without_saving("checking", lambda _: main(argv))


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:]))
