#!/bin/sh
# Train I-DLM for a lab model on one GPU, from one set of its replies: adapters with each objective, then the whole
# model, and compare the whole model's task scores with the first one's. Writes OUT/idlm.json (what training measured)
# and OUT/scores.json.
#
#   tools/train_idlm.sh OUT MODEL [ADAPTER_MINUTES CONVERTED_MINUTES OTHER_MINUTES]
# For base about 22 minutes: 5 for the adapter (kl), 2 each for ce and tv, 8 for the whole model, and sampling. A run
# that was cut off continues. PARTS="kl converted" trains only these (kl ce tv converted scores), REPLIES is the number
# of replies to sample, DEVICE=cpu trains on a CPU, N is the number of problems a task.
set -eu
usage="usage: tools/train_idlm.sh OUT MODEL [ADAPTER_MINUTES CONVERTED_MINUTES OTHER_MINUTES]"
out=${1:?$usage} model=${2:?$usage}
adapter=${3:-5} converted=${4:-8} other=${5:-2}
case $out in /*) ;; *) out=$PWD/$out ;; esac
if [ -d "$model" ]; then model=$(cd "$model" && pwd); fi
cd "$(dirname "$0")/.."
mkdir -p "$out"
PYTHONPATH="$PWD/src:$PWD/packages/lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED
python3 -m tools.checkout

train() { # NAME MINUTES kind and options of kvasir train
    name=$1 minutes=$2
    shift 2
    if [ -f "$out/$name/training.json" ]; then return; fi # finished before a run that was cut off
    resume=""
    if [ -f "$out/$name/state.safetensors" ]; then resume=--resume; fi
    # shellcheck disable=SC2086 (one word or none)
    python3 -m kvasir.cli.main train "$@" --target "$model" --out "$out/$name" --minutes "$minutes" \
        --samples "$out/samples.safetensors" $resume ${DEVICE:+--device "$DEVICE"} ${REPLIES:+--replies "$REPLIES"}
}

done=""
for part in ${PARTS:-kl converted ce tv scores}; do
    begin=$(date +%s)
    case $part in
    kl) train kl "$adapter" drafter idlm ;;
    ce | tv) train "$part" "$other" drafter "idlm:objective=$part" ;;
    converted) train converted "$converted" idlm ;;
    scores)
        python3 -m kvasir.cli.main eval "$model" --against "--model $out/converted" --n "${N:-600}" \
            --tasks chain,path,countdown,facts,state,schema --max-num-seqs 512 --json "$out/scores.json" ${DEVICE:+--device "$DEVICE"}
        ;;
    *)
        echo "no part '$part'; there are kl, ce, tv, converted and scores" >&2
        exit 2
        ;;
    esac
    if [ "$part" != scores ]; then done="$done $out/$part"; fi
    echo "$part: $(($(date +%s) - begin)) s"
done
if [ -n "$done" ]; then
    # shellcheck disable=SC2086 (folders, none of which holds a space that was not given)
    python3 -m kvasir_lab.studies training_result "$out/idlm.json" train-idlm $done
fi
