#!/usr/bin/env bash
# The main job on this machine, set-up included: bash launch/local.sh --config rl_think.py
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/venv.sh"
exec "$root/.venv/bin/python" -m jaxspec.train "$@"
