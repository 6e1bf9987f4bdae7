"""Start of a program, from its config to its exit status."""

import contextlib
import dataclasses
import datetime
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.build import build_step
from jaxspec.compiled.compiler import GPU_OPTIONS, set_xla_flags
from jaxspec.compiled.hardware import has_cuda_plugin
from jaxspec.config.as_json import flatten_settings, to_json
from jaxspec.config.check import check_config
from jaxspec.config.cli import load_config
from jaxspec.config.from_checkpoint import check_folders, resolve_config
from jaxspec.config.settings import GenerationConfig, ResolvedConfig, ScheduleConfig
from jaxspec.config.split import check_meshes
from jaxspec.inputs.checked import ConfigError, first_line, require, translate_settings
from jaxspec.inputs.json_keys import parse_json
from jaxspec.inputs.spec import ModelSpec
from jaxspec.processes import peers, roles
from jaxspec.processes.devices import configure_cpu_devices, core_count, count_devices
from jaxspec.processes.joining import join_job
from jaxspec.processes.process_0 import broadcast_number
from jaxspec.rl.optimizers import Diverged
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder, read_sources
from jaxspec.system.errors import describe_expected_error
from jaxspec.system.files import expand_user_path, hash_file
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.terminal import print_line
from jaxspec.system.version import package_version
from jaxspec.tokens.tokenizer import TOKENIZER_FILES, Tokenizer, character_tokenizer, load_tokenizer

_DAY_KEYS = {"config.json": "today", "evaluation.json": "config.today"}
"""Files that record the day of a folder's prompts, with the key that holds it."""
_PROGRAM_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAXSPEC_LOCAL_DEVICES")
"""Environment variables that affect a process's programs or its number of devices."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A config with its tokenizer, mesh and step."""

    config: ResolvedConfig
    tokenizer: Tokenizer
    mesh: Mesh
    step: Step

    def with_sizes(self, **sizes: int) -> "Job":
        """Returns a job with some fields of `step.Sizes` replaced.

        Both its step and its config have the new values.
        """
        config = self.config
        step = self.step.with_sizes(self.config.batch.prompts, self.step.sizes._replace(**sizes))
        batch = dataclasses.replace(
            config.batch, micro_tokens=sizes.pop("tokens", config.batch.micro_tokens)
        )
        rollout = dataclasses.replace(
            config.rollout, engine=dataclasses.replace(config.rollout.engine, **sizes)
        )
        return dataclasses.replace(
            self, config=dataclasses.replace(config, batch=batch, rollout=rollout), step=step
        )

    def say(self, message: str) -> None:
        """Prints a line, in the first of the processes that work together."""
        if roles.is_first_member():
            print_line(message)


def run_program(
    program: str,
    description: str,
    body: Callable[[Job, Interrupt], int],
    argv: Sequence[str] | None = None,
    swept_settings: Sequence[str] = (),
    used_settings: str = "",
    splits_devices: bool = False,
) -> int:
    """Runs `body` with the job of the command line.

    `swept_settings` and `used_settings` are passed to `load_config`, and `splits_devices` to
    `open_job`. Returns the exit status of `body`, or that of an error (`run_and_report_errors`).
    """

    def load_and_run() -> int:
        config, _ = load_config(
            sys.argv[1:] if argv is None else argv,
            program,
            description,
            swept_settings,
            used_settings,
        )
        return run_config(lambda say: resolve_config(config, say), body, splits_devices)

    return run_and_report_errors(load_and_run)


def run_config(
    read_config: Callable[[Callable[[str], Any]], ResolvedConfig],
    body: Callable[[Job, Interrupt], int],
    splits_devices: bool = False,
) -> int:
    """Opens the job of a config and runs `body`. `read_config` gets a function to print with."""
    with Interrupt(on_exit=peers.leave_job) as interrupt:
        # Only process 0 prints, and processes have no numbers before the job is open.
        messages: list[str] = []
        with interrupt.exit_on_signal("starting"):
            job = open_job(read_config(messages.append), splits_devices)
        for line in messages:
            job.say(line)
        return body(job, interrupt)


def run_and_report_errors(work: Callable[[], int]) -> int:
    """Runs `work` and returns its exit status. Prints expected errors as one line.

    The status is 2 for errors that the user can fix: `ConfigError`, an unusable file, too little
    memory. It is 1 for `Diverged` and for a job that lost another process. Unexpected errors are
    raised again, or end the process if the job has several.
    """
    try:
        status, message = work(), ""
    except (ConfigError, Diverged, MemoryError, OSError, jax.errors.JaxRuntimeError) as error:
        message = describe_expected_error(error)
        if not message:
            _report_unexpected_error(error)
            raise
        if isinstance(error, jax.errors.JaxRuntimeError):
            # Lets a peer that failed first end this process, with the reason.
            peers.wait_for_peer_failure()
        # stderr may be a file on the disk that is full.
        with contextlib.suppress(OSError):
            print(f"error: {message}", file=sys.stderr, flush=True)
        status = 1 if isinstance(error, Diverged | jax.errors.JaxRuntimeError) else 2
    except Exception as error:
        _report_unexpected_error(error)
        raise
    # The other processes would wait for this one in their next collective.
    peers.leave_job(status, message)
    return status


def _report_unexpected_error(error: Exception) -> None:
    """Prints an unexpected error and ends this process, if the job has several processes."""
    # The traceback is printed here, because `leave_job` exits without one.
    if peers.has_peers():
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
        peers.leave_job(1, f"{type(error).__name__}: {first_line(error)}")


def run_without_saving(activity: str, work: Callable[[Interrupt], int]) -> int:
    """Runs `work` as `run_and_report_errors` does. A signal during `activity` ends it at once."""
    with Interrupt(on_exit=peers.leave_job) as interrupt, interrupt.exit_on_signal(activity):
        return run_and_report_errors(lambda: work(interrupt))


def open_job(config: ResolvedConfig, splits_devices: bool = False) -> Job:
    """Starts JAX, joins the processes of the job, and builds the step.

    If `splits_devices` is not set, all devices both learn and generate.
    """
    if not splits_devices and config.schedule.kind == "pipelined":
        config = dataclasses.replace(
            config, schedule=ScheduleConfig(), generation=GenerationConfig()
        )
    # A CPU runs one data shard per core, unless weights would be split over the shards. Its cores
    # share one memory, so splitting saves none, and many collectives can starve its few threads.
    split = largest_weight_size(config.model) >= config.mesh.shard_above
    members = config.mesh.expert * config.mesh.tensor
    shards = config.mesh.data or (1 if split else max(1, core_count() // members))
    configure_jax(config, shards * members + config.generation.devices)
    join_job(collect_job_values(config))
    shapes = check_meshes(config, count_devices(), jax.process_count())
    mesh = meshes.make_mesh(*shapes.learner)
    generator_mesh = mesh
    if shapes.generator_devices:
        devices = jax.devices()[-shapes.generator_devices :]
        generator_mesh = meshes.make_mesh(*shapes.generator, devices)
    job = make_job(config, mesh, generator_mesh)
    # Errors in the input folders are reported before any long work.
    check_folders(config, jax.eval_shape(job.step.init_policy), job.tokenizer.size)
    used_devices = mesh.size + (0 if generator_mesh is mesh else generator_mesh.size)
    if used_devices < jax.device_count():
        job.say(
            f"using {used_devices} of {jax.device_count()} devices: more data shards would not"
            " divide every batch (batch.prompts, rows)"
        )
    return job


def collect_job_values(config: ResolvedConfig) -> dict[str, Any]:
    """Collects the values that must be equal in all processes of a job, by name.

    These are settings, code, versions, tokenizer files and environment variables.
    """
    # Equal values give equal programs. To compare the programs themselves would take minutes.
    environment = {name: os.environ.get(name, "") for name in _PROGRAM_VARIABLES}
    environment["XLA_FLAGS"] = " ".join(
        word
        for word in environment["XLA_FLAGS"].split()
        if not word.startswith("--xla_dump")  # processes may dump to different folders
    )
    folder = config.data.tokenizer
    tokenizer_files = {
        f"tokenizer's {name}": hash_file(Path(folder) / name) for name in TOKENIZER_FILES if folder
    }
    versions = {
        "jaxspec": code_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
    }
    return versions | environment | tokenizer_files | flatten_settings(to_json(config))


def code_version() -> str:
    """Returns the package version with a code digest."""
    # During development the code changes more often than the version.
    return f"{package_version()} ({code_digest()})"


def code_digest() -> str:
    """Returns a digest of this package's code."""
    return hashlib.sha256(read_sources("**/*.py").encode()).hexdigest()[:8]


def configure_jax(config: ResolvedConfig, devices: int, threads: int = 0) -> None:
    """Configures JAX: 64-bit types, compilation cache, GPU options and devices.

    Must run before any use of a device. `devices` and `threads` are those of
    `devices.configure_cpu_devices`.
    """
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    # JAX's default leaves a quarter of the GPU unused, but this program has it to itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if has_cuda_plugin():
        set_xla_flags(GPU_OPTIONS)
    configure_cpu_devices(devices, threads)


def largest_weight_size(model: ModelSpec) -> int:
    """Returns the number of elements of the policy's largest array."""
    heads = max(model.heads, model.kv_heads) * model.head_size
    layer = model.embed * max(heads, model.ffn * max(1, model.family.experts))
    # Layers are stacked into one array, and so are the experts of a layer.
    return max(model.vocab * model.embed, model.layers * layer)


def make_job(config: ResolvedConfig, mesh: Mesh, generator_mesh: Mesh | None = None) -> Job:
    """Builds a job from a config and a mesh.

    The generator has `generator_mesh`, or the same mesh if that is None.

    Raises:
      ConfigError: The tokenizer is missing or damaged, has no end token, or has more tokens than
        the model's vocabulary. Or banned tokens leave too few to sample. Or stop strings are too
        many or cannot be encoded. Or a warm start is set for data that it cannot train on.
    """
    thinking, folder = config.rollout.enable_thinking, config.data.tokenizer
    tokenizer = (
        load_tokenizer(folder, thinking, config.data.prompt_format)
        if folder
        else character_tokenizer(config.data.task)
    )
    config, tokenizer = _pin_day(config, tokenizer)
    tokenizer = tokenizer.with_stops(config.rollout.stop, config.rollout.stop_ids)
    tokenizer.check_vocab(config.model.vocab, config.model.path)
    _check_banned_tokens(config, tokenizer)
    if config.sft.steps and (config.data.path or config.data.tokenizer):
        conflicting_setting = "model.path" if config.model.path else "data.path or data.tokenizer"
        raise ConfigError(
            "the warm start trains a fresh model on the built-in tasks; with"
            f" {conflicting_setting} set --sft.steps 0"
        )
    # Evaluations build this table much later, so its errors are found now.
    if config.eval.stop != "same":
        with translate_settings({"rollout.stop": "eval.stop"}):
            tokenizer.with_stops(config.eval.stop, ()).build_stop_table(config.eval.stop)
    step = _build_step(config, mesh, tokenizer)
    if generator_mesh is not None and generator_mesh != mesh:
        generator = _build_step(config, generator_mesh, tokenizer).generator
        step = dataclasses.replace(step, generator=generator)
    return Job(config=config, tokenizer=tokenizer, mesh=mesh, step=step)


def _pin_day(config: ResolvedConfig, tokenizer: Tokenizer) -> tuple[ResolvedConfig, Tokenizer]:
    """Pins the date for chat templates.

    The date is that of the config, else of the workdir, else today. It is cleared if templates do
    not read the clock.
    """
    # Otherwise prompts would change at midnight, and a resumed run would see other prompts.
    if not tokenizer.reads_clock:
        return dataclasses.replace(config, today=""), tokenizer
    day = config.today or _read_day(config.workdir)
    return dataclasses.replace(config, today=day), tokenizer.with_date(day)


def _read_day(workdir: str) -> str:
    """Returns the day recorded in a folder, else today. Process 0 decides for all."""
    day, folder = datetime.date.today(), expand_user_path(workdir, "--workdir")
    for name, key in _DAY_KEYS.items() if jax.process_index() == 0 else ():
        # A damaged file is reported later, when the folder is checked.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
            saved = flatten_settings(parse_json((folder / name).read_bytes()))
            day = datetime.date.fromisoformat(saved[key])
    return datetime.date.fromordinal(broadcast_number(day.toordinal())).isoformat()


def _check_banned_tokens(config: ResolvedConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError unless `rollout.banned` leaves two tokens besides the end tokens."""
    rollout = config.rollout
    allowed_ids = set(range(min(tokenizer.size, config.model.vocab))) - set(rollout.banned)
    require(
        bool(allowed_ids),
        f"rollout.banned has all {tokenizer.size} tokens of the tokenizer, so that none could be"
        " sampled; leave some out",
    )
    words = sorted(allowed_ids - set(tokenizer.stop_ids))
    too_few = (
        f"of the {tokenizer.size} tokens only {words} and end tokens are not in rollout.banned:"
        " answers could differ in length alone"
    )
    require(len(words) >= 2, f"{too_few}; ban fewer")


def to_local_step(config: ResolvedConfig, step: Step, tokenizer: Tokenizer) -> Step:
    """Builds a step on this process's devices. In a job of one process, that is `step` itself."""
    if jax.process_count() == 1:
        return step
    local_config = dataclasses.replace(
        with_full_pool(config), mesh=dataclasses.replace(config.mesh, data=0, expert=1, tensor=1)
    )
    data_shards = check_config(local_config, jax.local_device_count()).data
    mesh = meshes.make_mesh(data_shards, devices=jax.local_devices())
    return _build_step(config, mesh, tokenizer)


def build_learner_step(job: Job) -> Step:
    """Builds a step whose generator has the learner's devices too.

    Returns the job's own step if it has one mesh.
    """
    if job.step.shares_devices:
        return job.step
    return _build_step(with_full_pool(job.config), job.mesh, job.tokenizer)


def _build_step(config: ResolvedConfig, mesh: Mesh, tokenizer: Tokenizer) -> Step:
    stop_table = tokenizer.build_stop_table(config.rollout.stop)
    return build_step(config, mesh, tokenizer.stop_ids, tokenizer.size, stop_table)


def with_full_pool(config: ResolvedConfig) -> ResolvedConfig:
    """Returns the config without its own number of pages, which leaves the pool at full size."""
    # That number is meant for the config's own data shards, not for another mesh.
    engine = dataclasses.replace(config.rollout.engine, pages=0)
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine=engine))
