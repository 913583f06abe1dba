#!/bin/sh
# Measure nano and base through the engine on one GPU, in about 6 minutes, with a JSON file for each part. It measures
# every promise about the lab's models, those that were missed before first. Two engines share the GPU, since small
# models leave most of it idle. Each gets a pool of a set size (8 GiB for base): a share of the memory would count
# what the other engine holds.
# Usage: tools/eval_lab.sh OUT [NANO BASE] [engine switches]; models are folders or names (default: nano base).
set -eu
out=${1:?usage: tools/eval_lab.sh OUT [NANO BASE] [engine switches]}
shift
nano=nano base=base
case ${1:-} in "" | -*) ;; *)
    nano=$1 base=${2:?usage: tools/eval_lab.sh OUT [NANO BASE] [engine switches]}
    shift 2 ;;
esac
case $out in /*) ;; *) out=$PWD/$out ;; esac
for model in nano base; do eval "folder=\$$model"; if [ -d "$folder" ]; then eval "$model=\$(cd \"\$folder\" && pwd)"; fi; done
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH="src:packages/lab/src${PYTHONPATH:+:$PYTHONPATH}"
python3 -m tools.checkout

measure() { # NAME MODEL [options of kvasir eval]
    case_name=$1 measured=$2
    shift 2
    begin=$(date +%s)
    if python3 -m kvasir.cli.main eval "$measured" --max-num-seqs 512 --num-gpu-blocks-override 65536 --json "$out/$case_name.json" "$@" \
        >"$out/$case_name.txt" 2>&1; then
        echo "$case_name: $(($(date +%s) - begin)) s"
    else
        echo "$case_name: failed after $(($(date +%s) - begin)) s, see $out/$case_name.txt"
        failed=1
    fi
}

hard=chain:modulus=499,max_factor=30,max_steps=10
trained="chain,$hard,long_add,countdown,path,path:form=star,path:max_depth=4,facts,state,state:kind=parity,schema,tool"
harder="countdown:min_numbers=4,path:min_depth=4,path:min_depth=5,facts:min_hops=4,min_facts=24,think=no,state:min_every=3,state:min_every=4"
unaided="facts:think=no,facts:min_hops=4,min_facts=24,think=no"
needles=""
for length in 512 1024 2048 4064; do
    for depth in 0 0.25 0.5 0.75 1; do needles="$needles,needle:min_length=$length,length=$length,depth=$depth"; done
done
own="--samples 16 --own --form aggregate,judge_pair,judge_one,refine"

judged() { # The model's own replies; where it hardly errs, more problems or a warmer temperature give wrong ones.
    failed=0
    # shellcheck disable=SC2086
    measure lab-base-own "$base" --tasks countdown:min_numbers=4,path:max_depth=4 -n 500 --temperature 1 $own "$@"
    measure lab-base-own-state "$base" --tasks state:min_every=4 -n 1200 --temperature 1 $own "$@"
    measure lab-base-own-chain "$base" --tasks "$hard" -n 1000 --temperature 1.3 $own "$@"
    measure lab-nano-own "$nano" --tasks path:max_depth=4,countdown:min_numbers=4 -n 300 --temperature 1 $own "$@"
    measure lab-nano-samples "$nano" --tasks "state:min_every=4,$hard,$unaided" -n 300 --samples 16 --temperature 1 "$@"
    return $failed
}

solved() {
    failed=0
    # More documents would hold every passage of the held-out prose more than once.
    for model in base nano; do
        eval "folder=\$$model"
        measure "lab-$model-prose" "$folder" --tasks story:form=prose,length=1024,template -n 11 "$@"
        measure "lab-$model-tasks" "$folder" --tasks "$trained,$harder" -n 600 "$@"
    done
    measure lab-base-needle "$base" --tasks "${needles#,}" -n 40 "$@"
    measure lab-base-samples "$base" --tasks "$unaided" -n 300 --samples 16 --temperature 1 "$@"
    # At temperature 1 the reply rates are those that `reflect` was written with.
    measure lab-base-reflect "$base" --tasks reflect -n 300 --temperature 1 "$@"
    measure lab-nano-reflect "$nano" --tasks reflect -n 300 --temperature 1 "$@"
    measure lab-nano-needle "$nano" --tasks "${needles#,}" -n 10 "$@"
    return $failed
}

judged "$@" &
first=$!
all=0
solved "$@" || all=1
wait $first || all=1
exit $all
