#!/usr/bin/env bash
# The tests on this machine, set-up included: bash launch/test.sh [--slow] [pytest arguments]
# Without --slow: all but the slow ones. With it: the slow ones only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/venv.sh test
marks="not slow"
if [[ ${1-} == --slow ]]; then
  marks=slow
  shift
fi
# Each of some hundred programs that tests start would translate the package anew.
unset PYTHONDONTWRITEBYTECODE
workers=0
if (($(getconf _NPROCESSORS_ONLN) > 1)); then workers=2; fi
# Fixtures compile programs, so the tests of one file share a worker. The files come in the order that conftest.py gives them,
# the longest first, and not by how many tests they have.
exec .venv/bin/python -m pytest -m "$marks" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
