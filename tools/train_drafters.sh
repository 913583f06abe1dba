#!/bin/sh
# Train the drafters of a lab model on one GPU, from one set of its replies: eagle, medusa, ppd, then idlm. For base,
# eagle and medusa take under 4 minutes.
#
#   tools/train_drafters.sh OUT MODEL [EAGLE_MINUTES MEDUSA_MINUTES PPD_MINUTES IDLM_MINUTES]
# MODEL is a folder or a name (base). Writes OUT/eagle, OUT/medusa, OUT/ppd and OUT/idlm. KINDS="ppd" trains only that
# one, DEVICE=cpu trains on a CPU, REPLIES is the number of replies to sample.
set -eu
out=${1:?usage: tools/train_drafters.sh OUT MODEL [EAGLE_MINUTES MEDUSA_MINUTES PPD_MINUTES IDLM_MINUTES]}
model=${2:?usage: tools/train_drafters.sh OUT MODEL [EAGLE_MINUTES MEDUSA_MINUTES PPD_MINUTES IDLM_MINUTES]}
eagle=${3:-1.3} medusa=${4:-0.5} ppd=${5:-2} idlm=${6:-5}
case $out in /*) ;; *) out=$PWD/$out ;; esac
if [ -d "$model" ]; then model=$(cd "$model" && pwd); fi
cd "$(dirname "$0")/.."
mkdir -p "$out"
PYTHONPATH="$PWD/src:$PWD/packages/lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED
python3 -m tools.checkout
for kind in ${KINDS:-eagle medusa ppd idlm}; do
    begin=$(date +%s)
    if [ -f "$out/$kind/training.json" ]; then continue; fi # finished before a run that was cut off
    resume=""
    if [ -f "$out/$kind/state.safetensors" ]; then resume=--resume; fi
    eval "minutes=\$$kind"
    # shellcheck disable=SC2086 (one word or none)
    python3 -m kvasir.cli.main train drafter "$kind" --target "$model" --out "$out/$kind" --minutes "$minutes" --samples "$out/samples.safetensors" $resume \
        ${DEVICE:+--device "$DEVICE"} ${REPLIES:+--replies "$REPLIES"}
    echo "$kind: $(($(date +%s) - begin)) s"
done
rm -f "$out/samples.safetensors"
