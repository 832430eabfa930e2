#!/usr/bin/env bash
# The tests, from a bare clone: sets itself up, then runs the default profile (<= 10 minutes cold on 2 cores).
# --all adds what is marked slow and faults. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh dev
profile=(-m 'not slow and not faults')
if [ "${1:-}" = --all ]; then
  profile=()
  shift
fi
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
exec .venv/bin/python -m pytest -n auto --dist loadgroup ${profile[@]+"${profile[@]}"} "$@"
