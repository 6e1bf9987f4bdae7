#!/usr/bin/env bash
# Makes .venv in the checkout and installs jaxspec-rl there, with the extras named as arguments: bash launch/venv.sh [test] [lint]
# Installs nothing when neither pyproject.toml, the constraints nor the GPU driver changed since the last time.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$root/.venv/bin/python"

extras=("$@")
if driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) && [[ $driver =~ ^([0-9]+) ]]; then
  if ((BASH_REMATCH[1] >= 580)); then extras+=(cuda13); else extras+=(cuda12); fi
fi
wanted=$(IFS=,; echo "${extras[*]-}")

stamp="$root/.venv/.installed-$wanted"
contents=$(cat "$root/pyproject.toml" "$root/launch/constraints.txt" | cksum)
if [[ -x $python && -f $stamp && $(<"$stamp") == "$contents" ]]; then exit 0; fi

if [[ ! -x $python ]]; then
  for base in python3.14 python3.13 python3.12 python3.11 python3 none; do
    # Debian ships a venv module that fails for want of ensurepip: such a Python is passed over.
    if "$base" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
  done
  if [[ $base == none ]]; then
    echo "jaxspec needs Python 3.11 or newer with its venv and ensurepip modules (Debian, Ubuntu: apt install python3-venv)" >&2
    exit 2
  fi
  echo "making $root/.venv with $("$base" --version)" >&2
  "$base" -m venv "$root/.venv"
fi
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null || {
  echo "$root/.venv has no pip and cannot get one; remove it (rm -r '$root/.venv') and run this again" >&2
  exit 2
}
echo "installing jaxspec-rl${wanted:+[$wanted]} into $root/.venv (the first time takes some minutes)" >&2
"$python" -m pip install --quiet --disable-pip-version-check --constraint "$root/launch/constraints.txt" --editable "$root${wanted:+[$wanted]}"
# Whatever is called jaxspec there (an earlier name of this package, or the library for X-ray spectra) would own the same import.
if "$python" -m pip --disable-pip-version-check show --quiet jaxspec 2>/dev/null; then
  echo "removing the distribution jaxspec from $root/.venv: jaxspec-rl is imported by the same name" >&2
  "$python" -m pip uninstall --quiet --yes --disable-pip-version-check jaxspec
fi
echo "$contents" >"$stamp"
