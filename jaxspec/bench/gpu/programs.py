"""Programs of the measurements: loaded from a folder, or compiled on threads ahead of their use."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.compiled.compiler import FLAGS, ON_GPUS, for_devices
from jaxspec.compiled.serialized import ProgramFolder, Unusable
from jaxspec.inputs.checked import first_line

Options = Mapping[str, str | bool]
CPU_OPTIONS: Options = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
"""On CPUs, where the command is only tried: optimized programs take four times as long to
compile."""
_SAID_EVERY = 10.0
"""Seconds between two lines about a program that is waited for."""
Say = Callable[[str], Any]


@dataclass(frozen=True)
class Recipe:
    """A program that is not compiled yet."""

    name: str
    function: Callable
    arguments: Callable[[], tuple[Any, ...]]
    """Gives shapes, types and shardings; called where the program is compiled."""
    donate: tuple[int, ...] = ()
    options: Options = field(default_factory=dict)
    """Of the compiler, beside those of the card."""


class NotMade(Exception):
    """A program could not be compiled, or not in time; the message says which and why."""


class Made(NamedTuple):
    """A program that is ready to run."""

    program: Any
    loaded: bool
    """Whether it comes from a folder; False: compiled here."""
    seconds: float
    plain: bool
    """Whether it runs without GPU kernels, because compiling with them failed."""


def device_options(mesh: Mesh) -> Options:
    """Compiler options for the mesh's device; those that the user's XLA_FLAGS name win."""
    ours, given = ON_GPUS if meshes.accelerated(mesh) else CPU_OPTIONS, os.environ.get(FLAGS)
    wanted = {name: value for name, value in ours.items() if f"--{name}" not in (given or "")}
    return {name: value for name, value in wanted.items() if _is_known(mesh, name, value)}


def _is_known(mesh: Mesh, name: str, value: str | bool) -> bool:
    """Whether this release of XLA has a compiler option."""
    number = jax.ShapeDtypeStruct((), "int32", sharding=meshes.replicated(mesh))
    try:
        jax.jit(lambda number: number + 1).lower(number).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def compile_recipe(recipe: Recipe, mesh: Mesh, options: Options) -> Any:
    """Compiles a program for the mesh's device."""
    whole = meshes.replicated(mesh)
    # outside the context below: a device that is not there cannot hold the keys of random numbers
    arguments = recipe.arguments()
    # the learner's optimizer relies on JAX's usual promotion
    with for_devices(mesh), jax.numpy_dtype_promotion("standard"):
        # a fresh function, since JAX keeps traces by function
        lowered = jax.jit(
            lambda *given: recipe.function(*given),
            donate_argnums=recipe.donate,
            out_shardings=whole,
        ).lower(*arguments)
        return lowered.compile(compiler_options={**options, **recipe.options})


class Programs:
    """Makes programs on threads, in the order in which they are expected."""

    def __init__(self, mesh: Mesh, folder: ProgramFolder | None, workers: int, say: Say) -> None:
        """`folder` has programs that need not be compiled."""
        self.mesh, self.options = mesh, device_options(mesh)
        self._folder, self._say = folder, say
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._made: dict[str, Future[Made]] = {}
        self._recipes: dict[str, Recipe] = {}
        self._began: dict[str, float] = {}
        self._quiet = threading.Condition()
        self._running = self._pauses = 0

    def expect(self, recipes: Sequence[Recipe]) -> None:
        """Queues programs that will be needed."""
        for recipe in recipes:
            if recipe.name not in self._made:
                self._recipes[recipe.name] = recipe
                self._made[recipe.name] = self._pool.submit(self._make, recipe)

    def get(self, name: str, seconds: float) -> Made:
        """Waits up to some seconds for a program.

        Raises:
          NotMade: it is not there in time, or could not be compiled.
        """
        end = time.monotonic() + seconds
        future = self._made[name]
        while True:
            left = end - time.monotonic()
            try:
                return future.result(max(0.0, min(left, _SAID_EVERY)))
            except NotYet:
                if left <= 0:
                    raise NotMade(f"{name}: not compiled in time") from None
                self._say(f"waiting for {name}; compiling {self._progress() or 'others'}")

    def fresh(self, name: str) -> Any:
        """Compiles a program once more, whatever the folder has."""
        return compile_recipe(self._recipes[name], self.mesh, self.options)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is compiled meanwhile: compilers tune products on the device that is measured.

        What is being compiled is waited for first.
        """
        with self._quiet:
            self._pauses += 1
            while self._running:
                if not self._quiet.wait(_SAID_EVERY):
                    self._say(f"measuring waits for the compiler: {self._progress()}")
        try:
            yield
        finally:
            with self._quiet:
                self._pauses -= 1
                self._quiet.notify_all()

    def close(self) -> None:
        """Gives up what is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _progress(self) -> str:
        """Programs that are being compiled, with seconds so far."""
        now = time.monotonic()
        return ", ".join(
            f"{name} ({now - began:.0f} s)" for name, began in list(self._began.items())
        )

    def _make(self, recipe: Recipe) -> Made:
        with self._quiet:
            self._quiet.wait_for(lambda: not self._pauses)
            self._running += 1
        began = time.monotonic()
        self._began[recipe.name] = began
        try:
            return self._loaded_or_compiled(recipe, began)
        finally:
            with self._quiet:
                self._running -= 1
                del self._began[recipe.name]
                self._quiet.notify_all()

    def _loaded_or_compiled(self, recipe: Recipe, began: float) -> Made:
        if self._folder is not None:
            if recipe.name in self._folder:
                try:
                    program = self._folder.load(recipe.name, [*self.mesh.devices.flat])
                    return Made(program, True, time.monotonic() - began, plain=False)
                except Unusable as error:
                    self._say(f"warning: {error}")
            else:
                self._say(f"{self._folder.folder} has no program {recipe.name}: compiled here")
        plain = False
        try:
            program = compile_recipe(recipe, self.mesh, self.options)
        except Exception as error:  # noqa: BLE001 - a kernel's compiler raises whatever it likes
            program, plain = self._without_kernels(recipe, error), True
        seconds = time.monotonic() - began
        self._say(f"compiled {recipe.name} in {seconds:.0f} s")
        return Made(program, False, seconds, plain)

    def _without_kernels(self, recipe: Recipe, error: Exception) -> Any:
        """Compiles a program with the plain twins of its kernels, once and loudly."""
        reason = f"{recipe.name} cannot be compiled ({type(error).__name__}: {first_line(error)})"
        if not meshes.accelerated(self.mesh):
            raise NotMade(reason) from error
        self._say(f"WARNING: {reason}; it is compiled WITHOUT GPU KERNELS, by their plain twins")
        try:
            with meshes.plain_twins():
                return compile_recipe(recipe, self.mesh, self.options)
        except Exception as again:
            told = f"nor without kernels ({type(again).__name__}: {first_line(again)})"
            raise NotMade(f"{reason}, {told}") from again


def save_all(
    recipes: Sequence[Recipe], mesh: Mesh, folder: ProgramFolder, workers: int, say: Say
) -> list[str]:
    """Compiles programs into a folder, but those that it has; returns those that failed."""
    options, lock, failed = device_options(mesh), threading.Lock(), []
    missing = [recipe for recipe in recipes if not folder.intact(recipe.name)]
    say(f"{len(recipes) - len(missing)} of {len(recipes)} programs are in {folder.folder} already")
    done = 0

    def save(recipe: Recipe) -> None:
        nonlocal done
        began = time.monotonic()
        try:
            program = compile_recipe(recipe, mesh, options)
            size = folder.save(recipe.name, program, time.monotonic() - began)
            told = f"{size / 2**20:.1f} MiB, {time.monotonic() - began:.0f} s"
        except Exception as error:  # noqa: BLE001 - a kernel's compiler raises whatever it likes
            failed.append(recipe.name)
            told = f"FAILED: {type(error).__name__}: {first_line(error)}"
        with lock:
            done += 1
            say(f"{done} of {len(missing)}: {recipe.name}: {told}")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(save, missing))
    return failed
