"""Compilation for absent devices."""

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
    # Optimizations of ptxas change neither memory use nor the names of kernels.
    "xla_gpu_disable_gpuasm_optimizations": True,
    # Without a device no candidate can be timed, and autotuning only compiles more of them.
    "xla_gpu_autotune_level": "0",
}
"""Compiler options that shorten compilation for absent devices."""
# Capture into command buffers changes neither memory nor kernels. Its time grows with the square of
# the number of captured operations, of which an unrolled model has thousands. The option is not in
# CHECK_OPTIONS, since tests that use `compile_for_mesh` inspect command buffers.
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
"""Compiler option of `check` that turns command buffers off."""
GPU_OPTIONS = {
    # Leaves matrix products to cuBLAS: tuning Triton's products takes most of a compilation, and
    # without tuning they are up to 20 times slower.
    "xla_gpu_enable_triton_gemm": False,
    # Tuning fusions takes about half of the compilation of a small step.
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
"""Compiler options of all programs for GPUs."""
FLAGS_VARIABLE = "XLA_FLAGS"


def set_check_options() -> None:
    """Sets compiler options of `check` for all programs.

    Must be called before JAX starts its backends. A program's own options and the user's XLA_FLAGS
    take precedence.
    """
    set_xla_flags({**CHECK_OPTIONS, **NO_COMMAND_BUFFERS})


def set_xla_flags(options: Mapping[str, str | bool]) -> None:
    """Adds compiler options to XLA_FLAGS.

    Must be called before JAX starts its backends. Flags that the user has set take precedence. A
    variable that names a file of flags is left unchanged.
    """
    user_flags = os.environ.get(FLAGS_VARIABLE, "").split()
    # XLA takes a value that does not begin with "--" for the name of a file.
    if user_flags and not user_flags[0].startswith("--"):
        return
    package_flags = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    # The last of two values of a flag counts, so the user's flags come last.
    os.environ[FLAGS_VARIABLE] = " ".join(
        [*(flag for flag in package_flags if flag not in user_flags), *user_flags]
    )


# Warning of XLA's SPMD partitioner.
_REMATERIALIZATION = re.compile(r"[Ii]nvoluntary full rematerialization[^\n]*")


def use_mesh_devices(mesh: Mesh) -> Any:
    """Returns a context for tracing programs for a mesh."""
    # Kernels choose their code by the kind of the default device while they are traced.
    return jax.default_device(mesh.devices.flat[0])


def compile_for_mesh(
    function: Callable,
    mesh: Mesh,
    *arguments: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, str] | None = None,
) -> Any:
    """Compiles a function for a mesh's devices.

    Args:
      function: the function to compile.
      mesh: devices to compile for. They may be absent.
      *arguments: shapes, dtypes and shardings of the function's arguments.
      donate: positions of arguments whose memory is donated.
      options: additional compiler options.
    """
    # The learner's optimizer relies on JAX's standard type promotion.
    with use_mesh_devices(mesh), jax.numpy_dtype_promotion("standard"):
        # JAX caches traces by function. A fresh lambda avoids a trace for another device.
        lowered = jax.jit(lambda *inputs: function(*inputs), donate_argnums=donate).lower(
            *arguments
        )
        return lowered.compile(compiler_options=CHECK_OPTIONS | GPU_OPTIONS | dict(options or {}))


class StderrCapture(NamedTuple):
    """Captured standard error of the process."""

    terminal_descriptor: int
    """Duplicate of the original standard error."""
    capture_file: Any
    """Temporary file that receives the captured text."""

    def print_line(self, message: str) -> None:
        """Writes a line to the original standard error."""
        with contextlib.suppress(OSError):  # The reader may be gone.
            os.write(self.terminal_descriptor, f"{message}\n".encode())

    @property
    def text(self) -> str:
        """Text captured so far."""
        self.capture_file.seek(0)
        return self.capture_file.read().decode(errors="replace")

    @property
    def resharding_messages(self) -> list[str]:
        """Compiler warnings about resharding by full replication.

        XLA replicates an array on every device if it finds no other way from one sharding to the
        next.
        """
        return sorted(set(_REMATERIALIZATION.findall(self.text)))


@contextlib.contextmanager
def capture_stderr() -> Iterator[StderrCapture]:
    """Captures standard error within the context.

    If a JaxRuntimeError leaves the context, the captured text is shown first.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as capture_file:
        # XLA writes to the file descriptor from C++, past `sys.stderr`.
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
