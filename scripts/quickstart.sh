#!/usr/bin/env bash
# The main job on a laptop: trains RoPE and ALiBi at 128 tokens on the State of the Union addresses, sweeps both from
# 0.25x to 32x, and draws the curves. At most 10 minutes on 2 cores. Run it again to go on where it stopped.
# --smoke: the same in a minute, on tiny models; its curves mean nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
python=.venv/bin/python
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
source scripts/allocator.sh

out=runs/quickstart
config=configs/quickstart.py
if [ "${1:-}" = --smoke ]; then
  out=runs/quickstart-smoke
  config=configs/smoke.py
fi

for scheme in rope alibi; do
  echo "== $scheme: training"
  $python train.py --config=$config:$scheme --workdir=$out/$scheme
done
for scheme in rope alibi; do
  echo "== $scheme: sweeping"
  # ALiBi has no frequencies: every method but none would be recorded as unsupported.
  methods=()
  [ $scheme = alibi ] && methods=(--method=none)
  $python eval_extrapolation.py --workdir=$out/$scheme ${methods[@]+"${methods[@]}"}
done
echo
$python -m scripts.compare $out/rope $out/alibi --out=$out
[ "${1:-}" = --smoke ] || $python -m scripts.quickstart_claims $out
echo
echo "picture:     $out/curve.png"
echo "TensorBoard: .venv/bin/tensorboard --logdir=$out"
