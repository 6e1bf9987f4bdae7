"""Compiled programs of the measurements.

They are loaded from a folder, or compiled on threads ahead of their use.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.compiled.compiler import FLAGS_VARIABLE, GPU_OPTIONS, use_mesh_devices
from jaxspec.compiled.serialized import ProgramFolder, UnusableProgramError
from jaxspec.inputs.checked import first_line

CompilerOptions = Mapping[str, str | bool]
# A CPU only serves to try the command. Optimized programs take four times as long to compile.
CPU_OPTIONS: CompilerOptions = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
"""Compiler options of all programs for CPUs."""
_REPORT_SECONDS = 10.0
"""Seconds between two log lines while waiting for a program."""
Log = Callable[[str], Any]


@dataclass(frozen=True)
class Recipe:
    """Function, arguments and options of a program to compile."""

    name: str
    function: Callable
    arguments: Callable[[], tuple[Any, ...]]
    """Returns shapes, dtypes and shardings. Called by the compiling thread."""
    donate: tuple[int, ...] = ()
    """Positions of arguments whose memory is donated."""
    compiler_options: CompilerOptions = field(default_factory=dict)
    """Compiler options in addition to those of the device."""


class ProgramUnavailableError(Exception):
    """A program failed to compile, or was not ready in time.

    The message names the program and the reason.
    """


class ReadyProgram(NamedTuple):
    """Compiled program that is ready to run."""

    program: Any
    is_loaded: bool
    """Whether it was loaded from a folder. Otherwise it was compiled here."""
    seconds: float
    """Seconds of loading or compiling."""
    without_kernels: bool
    """Whether plain code replaces its GPU kernels, because compiling with them failed."""


def device_options(mesh: Mesh) -> CompilerOptions:
    """Returns compiler options for the mesh's device.

    Flags in the user's XLA_FLAGS take precedence. Options that this release of XLA does not have
    are left out.
    """
    defaults, user_flags = (
        GPU_OPTIONS if meshes.has_accelerators(mesh) else CPU_OPTIONS,
        os.environ.get(FLAGS_VARIABLE),
    )
    options = {
        name: value for name, value in defaults.items() if f"--{name}" not in (user_flags or "")
    }
    return {name: value for name, value in options.items() if _is_known_option(mesh, name, value)}


def _is_known_option(mesh: Mesh, name: str, value: str | bool) -> bool:
    """Returns whether this release of XLA has a compiler option."""
    # XLA rejects unknown options while it compiles, so a tiny program is compiled with the option.
    number = jax.ShapeDtypeStruct((), "int32", sharding=meshes.replicated_sharding(mesh))
    try:
        jax.jit(lambda number: number + 1).lower(number).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        # Any other error is not about the option, and would hit every program.
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def compile_recipe(recipe: Recipe, mesh: Mesh, options: CompilerOptions) -> Any:
    """Compiles a recipe for the mesh's device, which may be absent."""
    replicated = meshes.replicated_sharding(mesh)
    # Evaluated outside the context below, since an absent device cannot hold the random keys that
    # arguments are computed from.
    arguments = recipe.arguments()
    # The learner's optimizer relies on JAX's standard promotion.
    with use_mesh_devices(mesh), jax.numpy_dtype_promotion("standard"):
        # A new function each time: JAX caches traces by function, so a second compilation without
        # kernels would reuse the trace with kernels.
        lowered = jax.jit(
            lambda *values: recipe.function(*values),
            donate_argnums=recipe.donate,
            out_shardings=replicated,
        ).lower(*arguments)
        return lowered.compile(compiler_options={**options, **recipe.compiler_options})


class Programs:
    """Loads or compiles programs on threads, in the order in which they were queued."""

    def __init__(self, mesh: Mesh, folder: ProgramFolder | None, workers: int, log: Log) -> None:
        """Starts the threads.

        Args:
          mesh: mesh of the device that programs are for.
          folder: folder of programs that need not be compiled, or None.
          workers: number of programs compiled at once.
          log: receives lines about progress and problems.
        """
        self.mesh, self.compiler_options = mesh, device_options(mesh)
        self._folder, self._log = folder, log
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._futures: dict[str, Future[ReadyProgram]] = {}
        self._recipes: dict[str, Recipe] = {}
        self._start_times: dict[str, float] = {}
        self._condition = threading.Condition()
        self._compiling = self._pauses = 0

    def queue_recipes(self, recipes: Sequence[Recipe]) -> None:
        """Queues programs. Names that are queued already are skipped."""
        for recipe in recipes:
            if recipe.name not in self._futures:
                self._recipes[recipe.name] = recipe
                self._futures[recipe.name] = self._pool.submit(self._make_program, recipe)

    def get_program(self, name: str, timeout: float) -> ReadyProgram:
        """Waits up to `timeout` seconds for a queued program.

        Raises:
          ProgramUnavailableError: the program is not ready in time, or failed to compile.
        """
        deadline = time.monotonic() + timeout
        future = self._futures[name]
        while True:
            seconds_left = deadline - time.monotonic()
            # Waits in short spells, so that the log shows progress during minutes of compilation.
            try:
                return future.result(max(0.0, min(seconds_left, _REPORT_SECONDS)))
            except FutureTimeout:
                if seconds_left <= 0:
                    raise ProgramUnavailableError(f"{name}: not compiled in time") from None
                self._log(f"waiting for {name}; compiling {self._progress_text() or 'others'}")

    def compile_again(self, name: str) -> Any:
        """Compiles a queued program again, ignoring the folder."""
        return compile_recipe(self._recipes[name], self.mesh, self.compiler_options)

    @contextlib.contextmanager
    def pause_compiling(self) -> Iterator[None]:
        """Pauses compilation inside the context.

        Waits first for the programs that are being compiled.
        """
        # To choose among kernels, compilers time products on the device that is measured.
        with self._condition:
            # Counted before waiting, so that no thread begins another program.
            self._pauses += 1
            while self._compiling:
                if not self._condition.wait(_REPORT_SECONDS):
                    self._log(f"measuring waits for the compiler: {self._progress_text()}")
        try:
            yield
        finally:
            with self._condition:
                self._pauses -= 1
                self._condition.notify_all()

    def close(self) -> None:
        """Cancels programs that no thread has begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _progress_text(self) -> str:
        """Lists the programs that are being compiled, with seconds so far."""
        current_time = time.monotonic()
        # A copy, since the compiling threads change the dict.
        return ", ".join(
            f"{name} ({current_time - start_time:.0f} s)"
            for name, start_time in list(self._start_times.items())
        )

    def _make_program(self, recipe: Recipe) -> ReadyProgram:
        with self._condition:
            self._condition.wait_for(lambda: not self._pauses)
            self._compiling += 1
        start_time = time.monotonic()
        self._start_times[recipe.name] = start_time
        try:
            return self._load_or_compile(recipe, start_time)
        finally:
            with self._condition:
                self._compiling -= 1
                del self._start_times[recipe.name]
                self._condition.notify_all()

    def _load_or_compile(self, recipe: Recipe, start_time: float) -> ReadyProgram:
        if self._folder is not None:
            if recipe.name in self._folder:
                try:
                    program = self._folder.load_program(recipe.name, [*self.mesh.devices.flat])
                    return ReadyProgram(
                        program, True, time.monotonic() - start_time, without_kernels=False
                    )
                # A damaged program is compiled here like a missing one.
                except UnusableProgramError as error:
                    self._log(f"warning: {error}")
            else:
                self._log(f"{self._folder.folder} has no program {recipe.name}: compiled here")
        without_kernels = False
        try:
            program = compile_recipe(recipe, self.mesh, self.compiler_options)
        # Compilers of kernels raise exceptions of many types.
        except Exception as error:  # noqa: BLE001 - reported by the callee
            program, without_kernels = self._compile_without_kernels(recipe, error), True
        seconds = time.monotonic() - start_time
        self._log(f"compiled {recipe.name} in {seconds:.0f} s")
        return ReadyProgram(program, False, seconds, without_kernels)

    def _compile_without_kernels(self, recipe: Recipe, error: Exception) -> Any:
        """Compiles a program with plain twins of its kernels, after a warning.

        Raises:
          ProgramUnavailableError: there are no kernels to replace, or this fails too.
        """
        reason = f"{recipe.name} cannot be compiled ({type(error).__name__}: {first_line(error)})"
        # On CPUs programs have no GPU kernels, so compiling again would fail the same way.
        if not meshes.has_accelerators(self.mesh):
            raise ProgramUnavailableError(reason) from error
        self._log(f"WARNING: {reason}; it is compiled WITHOUT GPU KERNELS, with plain twins")
        try:
            with meshes.use_plain_kernels():
                return compile_recipe(recipe, self.mesh, self.compiler_options)
        except Exception as second_error:
            second_reason = (
                f"nor without kernels ({type(second_error).__name__}: {first_line(second_error)})"
            )
            raise ProgramUnavailableError(f"{reason}, {second_reason}") from second_error


def save_programs(
    recipes: Sequence[Recipe], mesh: Mesh, folder: ProgramFolder, workers: int, log: Log
) -> list[str]:
    """Compiles programs into a folder.

    Skips programs that the folder already has, unless they are damaged. Returns the names of those
    that failed.
    """
    options, lock, failed_names = device_options(mesh), threading.Lock(), []
    missing_recipes = [recipe for recipe in recipes if not folder.is_intact(recipe.name)]
    log(
        f"{len(recipes) - len(missing_recipes)} of {len(recipes)} programs are in"
        f" {folder.folder} already"
    )
    done_count = 0

    def save_program(recipe: Recipe) -> None:
        nonlocal done_count
        start_time = time.monotonic()
        try:
            program = compile_recipe(recipe, mesh, options)
            size = folder.save_program(recipe.name, program, time.monotonic() - start_time)
            outcome = f"{size / 2**20:.1f} MiB, {time.monotonic() - start_time:.0f} s"
        # One program that fails must not cost the others, which may have taken minutes.
        except Exception as error:  # noqa: BLE001 - logged, and in the result
            failed_names.append(recipe.name)
            outcome = f"FAILED: {type(error).__name__}: {first_line(error)}"
        with lock:
            done_count += 1
            log(f"{done_count} of {len(missing_recipes)}: {recipe.name}: {outcome}")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(save_program, missing_recipes))
    return failed_names
