#!/usr/bin/env bash
# The tests, from a bare clone: sets itself up, then runs the default profile (<= 10 minutes cold on 2 cores).
# --all adds what is marked slow, faults and pretrained, for which it installs 93 MB more. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=(dev)
profile=(-m 'not slow and not faults and not pretrained')
if [ "${1:-}" = --all ]; then
  extras+=(pretrained)
  profile=()
  shift
fi
./scripts/setup.sh "${extras[@]}"
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
# A worker takes whole files, whose fixtures compile once. Not loadgroup: pytest-xdist 3.8 marks groups where pytest 9.2 no
# longer looks, in silence, and every worker then compiles for itself.
exec .venv/bin/python -m pytest -n auto --dist loadfile ${profile[@]+"${profile[@]}"} "$@"
