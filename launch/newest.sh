#!/usr/bin/env bash
# Some tests with the newest Python here, the newest JAX that launch/constraints.txt names, tokamax, and JAX's CUDA plugin, which compiles for
# GPUs without one. Set-up of .venv-newest included: bash launch/newest.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base=none
for minor in 14 13 12; do
  # What is on the path may be a stand-in that only says how to get a Python; pyenv keeps those that it has beside it.
  for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor."*/bin/python; do
    if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      base=$candidate
      break 2
    fi
  done
done
if [[ $base == none ]]; then
  echo "no Python 3.12 or newer here, which tokamax and the newest JAX need: nothing is tested with them" >&2
  exit 0
fi

python=.venv-newest/bin/python
if [[ $("$python" --version 2>/dev/null) != $("$base" --version) ]]; then "$base" -m venv --clear .venv-newest; fi
install=("$python" -m pip install --quiet --disable-pip-version-check)
# With the compiler for GPUs alone: what runs programs on one is some gigabytes more.
"${install[@]}" --constraint launch/constraints.txt --editable '.[test,check]'
jax=$("$python" -c 'import jaxlib; print(jaxlib.__version__)')
echo "$("$python" --version), jax $jax" >&2

tests=("$@")
if (($# == 0)); then
  tests=(
    tests/test_cuda.py
    tests/test_check_cuda.py
    tests/test_cuda_head.py
    tests/test_rounds_cuda.py
    tests/rollout/test_fused_on_gpus.py
    tests/bench/test_gpu_cuda.py
    tests/kernels
    tests/rl/test_learner.py::test_packing_accumulation_and_mesh_leave_the_gradients_of_plain_rows
    tests/rollout/test_lossless.py::test_sequences_have_exactly_the_law_of_plain_decoding
  )
fi
exec "$python" -m pytest -m "not slow and not sweep" -n 2 --dist loadfile "${tests[@]}"
