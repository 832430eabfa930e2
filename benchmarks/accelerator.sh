#!/usr/bin/env bash
# Everything worth knowing on one NVIDIA GPU, unattended: installs requirements-gpu.txt into .venv (minutes, once), then
# less than five minutes of benchmarks/accelerator.py, to which arguments go. On a TPU: ACCELERATOR=tpu.
# The table is printed, and appended to benchmarks/results/accelerator.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh "${ACCELERATOR:-gpu}"
unset JAX_PLATFORMS # parity needs the CPU's backend beside the accelerator's
exec .venv/bin/python -m benchmarks.accelerator "$@"
