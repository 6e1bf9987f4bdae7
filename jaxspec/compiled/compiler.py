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

CHECK_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_disable_gpuasm_optimizations": True,
    "xla_gpu_autotune_level": "0",
}
"""Options under which a program is compiled sooner. The assembler's optimisations change no memory
and no kernel's name; without a device nothing is tuned, and XLA only compiles more candidates."""
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
"""An option of checks alone, since others look at what is captured. That changes no memory and no
kernel, and takes seconds that grow with the square of the pieces: an unrolled model has
thousands."""
GPU_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
"""Options of all programs for GPUs. Products are left to cuBLAS: tuning those of Triton takes most
of a compile, and untuned they are up to 20 times slower."""
FLAGS_VARIABLE = "XLA_FLAGS"


def set_check_options() -> None:
    """Sets the options of a check for all programs; must come before JAX starts its backends.

    A program's own options and the user's XLA_FLAGS win.
    """
    set_xla_flags({**CHECK_OPTIONS, **NO_COMMAND_BUFFERS})


def set_xla_flags(options: Mapping[str, str | bool]) -> None:
    """Puts options before those of XLA_FLAGS, which win; must come before JAX starts its backends.

    A variable that names a file of flags stays as it is.
    """
    user_flags = os.environ.get(FLAGS_VARIABLE, "").split()
    if user_flags and not user_flags[0].startswith("--"):
        return
    package_flags = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    os.environ[FLAGS_VARIABLE] = " ".join(
        [*(flag for flag in package_flags if flag not in user_flags), *user_flags]
    )


_REMATERIALIZATION = re.compile(r"[Ii]nvoluntary full rematerialization[^\n]*")


def use_mesh_devices(mesh: Mesh) -> Any:
    """The context in which programs for a mesh are traced: what asks the default device for its
    kind, as kernels do, is told that it is one of these."""
    return jax.default_device(mesh.devices.flat[0])


def compile_for_mesh(
    function: Callable,
    mesh: Mesh,
    *arguments: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, str] | None = None,
) -> Any:
    """The program for the mesh's devices, of arrays that are only described. The function is
    wrapped anew because traces are kept by function."""
    with use_mesh_devices(mesh), jax.numpy_dtype_promotion("standard"):
        lowered = jax.jit(lambda *inputs: function(*inputs), donate_argnums=donate).lower(
            *arguments
        )
        return lowered.compile(compiler_options=CHECK_OPTIONS | GPU_OPTIONS | dict(options or {}))


class StderrCapture(NamedTuple):
    """Hears what is written to standard error, and still writes there itself."""

    terminal_descriptor: int
    """Where it goes otherwise."""
    capture_file: Any
    """The file that it goes to meanwhile."""

    def print_line(self, message: str) -> None:
        """Writes a line for people."""
        with contextlib.suppress(OSError):  # nobody reads any more
            os.write(self.terminal_descriptor, f"{message}\n".encode())

    @property
    def text(self) -> str:
        """All that was heard."""
        self.capture_file.seek(0)
        return self.capture_file.read().decode(errors="replace")

    @property
    def resharding_messages(self) -> list[str]:
        """What the compiler said of arrays that it made whole on every device because it found no
        other way from one layout to the next."""
        return sorted(set(_REMATERIALIZATION.findall(self.text)))


@contextlib.contextmanager
def capture_stderr() -> Iterator[StderrCapture]:
    """Hears what libraries write to standard error, of which nothing is for the user; where the
    compiler ends in an error, it is shown."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as capture_file:
        terminal_descriptor = os.dup(2)
        os.dup2(capture_file.fileno(), 2)
        capture = StderrCapture(terminal_descriptor, capture_file)
        try:
            yield capture
        except jax.errors.JaxRuntimeError:
            capture.print_line(capture.text)
            raise
        finally:
            os.dup2(terminal_descriptor, 2)
            os.close(terminal_descriptor)
