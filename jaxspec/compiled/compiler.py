"""Compiling for devices that are not there, and hearing what the compiler says meanwhile."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

QUICK: dict[str, str | bool] = {
    "xla_gpu_disable_gpuasm_optimizations": True,
    "xla_gpu_autotune_level": "0",
}
"""Options under which a program is compiled sooner. The assembler's optimisations change no memory
and no kernel's name; without a device nothing is tuned, and XLA only compiles more candidates."""
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""An option of checks alone, since others look at what is captured. That changes no memory and no
kernel, and takes seconds that grow with the square of the pieces: an unrolled model has
thousands."""
ON_GPUS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
"""Options of all programs for GPUs. Products are left to cuBLAS: tuning those of Triton takes most
of a compile, and untuned they are up to 20 times slower."""
FLAGS = "XLA_FLAGS"


def set_quick() -> None:
    """Sets the options of a check for all programs; must come before JAX starts its backends.

    A program's own options and the user's XLA_FLAGS win.
    """
    set_flags({**QUICK, **NO_GRAPHS})


def set_flags(options: Mapping[str, str | bool]) -> None:
    """Puts options before those of XLA_FLAGS, which win; must come before JAX starts its backends.

    A variable that names a file of flags stays as it is.
    """
    given = os.environ.get(FLAGS, "").split()
    if given and not given[0].startswith("--"):
        return
    ours = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    os.environ[FLAGS] = " ".join([*(flag for flag in ours if flag not in given), *given])


_RESHARDED = re.compile(r"[Ii]nvoluntary full rematerialization[^\n]*")


def for_devices(mesh: Mesh) -> Any:
    """The context in which programs for a mesh are traced: what asks the default device for its
    kind, as kernels do, is told that it is one of these."""
    return jax.default_device(mesh.devices.flat[0])


def compiled(
    function: Callable,
    mesh: Mesh,
    *arguments: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, str] | None = None,
) -> Any:
    """The program for the mesh's devices, of arrays that are only described. The function is
    wrapped anew because traces are kept by function."""
    with for_devices(mesh), jax.numpy_dtype_promotion("standard"):
        lowered = jax.jit(lambda *given: function(*given), donate_argnums=donate).lower(*arguments)
        return lowered.compile(compiler_options=QUICK | ON_GPUS | dict(options or {}))


class Listener(NamedTuple):
    """Hears what is written to standard error, and still writes there itself."""

    terminal: int
    """Where it goes otherwise."""
    heard: Any
    """The file that it goes to meanwhile."""

    def say(self, message: str) -> None:
        """Writes a line for people."""
        with contextlib.suppress(OSError):  # nobody reads any more
            os.write(self.terminal, f"{message}\n".encode())

    @property
    def text(self) -> str:
        """All that was heard."""
        self.heard.seek(0)
        return self.heard.read().decode(errors="replace")

    @property
    def resharded(self) -> list[str]:
        """What the compiler said of arrays that it made whole on every device because it found no
        other way from one layout to the next."""
        return sorted(set(_RESHARDED.findall(self.text)))


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    """Hears what libraries write to standard error, of which nothing is for the user; where the
    compiler ends in an error, it is shown."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as heard:
        terminal = os.dup(2)
        os.dup2(heard.fileno(), 2)
        listener = Listener(terminal, heard)
        try:
            yield listener
        except jax.errors.JaxRuntimeError:
            listener.say(listener.text)
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
