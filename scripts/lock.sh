#!/usr/bin/env bash
# Resolves requirements*.in for both Python lines (3.11 keeps jax 0.10; 3.12 and newer go on) into the pinned files.
# Needs uv. Run it after editing a .in file; --upgrade moves every pin.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() { uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-header "$@"; }
compile requirements.in -o requirements.txt "$@"
compile requirements-dev.in -o requirements-dev.txt "$@"
compile requirements-pretrained.in -o requirements-pretrained.txt "$@"
