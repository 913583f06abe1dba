#!/usr/bin/env bash
# Measure speculation on a machine with an NVIDIA GPU, in about ten minutes; results go to OUT as they come.
#
#   tools/gpu_spec.sh OUT [DRAFTER...]    DRAFTER: more drafters for base, e.g. eagle:model=FOLDER
#
# Three parts, each alone with ONLY=shape, ONLY=base or ONLY=rollouts:
#   shape     set acceptance at the llama-8b shape: the controller compared with off and with fixed depths. About
#             4 minutes, at most 4.5 a call; a second call with the same OUT and COMMIT measures what the first had no time for.
#   base      what the packaged model accepts by itself, at most 2 minutes
#   rollouts  rollouts of it over five rounds, at most 2 minutes
#
# COMMIT names the commit where there is no repository. CHECKPOINTS: folders of successive checkpoints of base, one a
# round, or `make` to train them first (under a minute) and write their report; without it, weights are frozen.
set -uo pipefail
out=${1:?usage: tools/gpu_spec.sh OUT [DRAFTER...]}
shift
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD/packages/lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python3 -m tools.checkout
more=()
for drafter in "$@"; do more+=(--drafter "$drafter"); done

[ "${ONLY:-shape}" != shape ] || timeout 270 python3 -m kvasir.cli.main bench speculation --shape llama-8b --batch 64 --batch 256 --batch 1 --batch 16 --batch 4 \
  --accept 0 --accept 0.5 --accept 0.9 --prompt 256 --output-tokens 192 --repeats 2 --seconds 220 ${COMMIT:+--commit "$COMMIT"} \
  --json "$out/speculation-llama-8b.json" >"$out/speculation-llama-8b.txt" 2>&1
[ "${ONLY:-base}" != base ] || timeout 120 python3 -m kvasir.cli.main bench speculation base --batch 4 --count 8 --output-tokens 128 --repeats 2 \
  --drafter ngram --drafter suffix --drafter draft_model:model=nano ${more[@]+"${more[@]}"} \
  --json "$out/speculation-base.json" >"$out/speculation-base.txt" 2>&1
if [ "${CHECKPOINTS:-}" = make ] && [ "${ONLY:-rollouts}" = rollouts ]; then
  made=$(mktemp -d)
  timeout 150 python3 -m kvasir_lab.studies successive_checkpoints "$made" ${COMMIT:+--commit "$COMMIT"} ${TRAIN:-} >"$out/checkpoints.txt" 2>&1
  cp "$made/report.json" "$out/checkpoints.json"
  CHECKPOINTS=$(echo "$made"/[0-9])
fi
checkpoints=()
for folder in ${CHECKPOINTS:-}; do checkpoints+=(--checkpoint "$folder"); done
[ "${ONLY:-rollouts}" != rollouts ] || timeout 120 python3 -m kvasir.cli.main bench rollouts --model base --problems 64 --samples 16 --rounds 5 \
  --output-tokens 384 ${COMMIT:+--commit "$COMMIT"} ${checkpoints[@]+"${checkpoints[@]}"} --json "$out/rollouts-base.json" >"$out/rollouts-base.txt" 2>&1
tail -n 40 "$out"/speculation-*.txt "$out"/rollouts-*.txt 2>/dev/null | cut -c 1-160
