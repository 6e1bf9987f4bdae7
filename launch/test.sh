#!/usr/bin/env bash
# The tests on this machine, set-up included: bash launch/test.sh [--slow | --sweep] [pytest arguments]
# Alone: those that are neither slow nor of a sweep. With --slow or --sweep: only these. The sweeps are more cases of slow tests:
# they take hours, and are for a release and for who changes what they test.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/venv.sh test
marks="not slow and not sweep"
if [[ ${1-} == --slow || ${1-} == --sweep ]]; then
  marks=${1#--}
  shift
fi
# Each of some hundred programs that tests start would translate the package anew.
unset PYTHONDONTWRITEBYTECODE
workers=0
if (($(getconf _NPROCESSORS_ONLN) > 1)); then workers=2; fi
# Fixtures compile programs, so the tests of one file share a worker. The files come in the order that conftest.py gives them,
# the longest first, and not by how many tests they have.
exec .venv/bin/python -m pytest -m "$marks" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
