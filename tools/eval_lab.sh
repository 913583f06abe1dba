#!/bin/sh
# Measure nano and base through the engine on one GPU, in about 6 minutes: every promise about the lab's models, each with its JSON.
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

measure() { # NAME MODEL [options of kvasir eval]
    case_name=$1 measured=$2
    shift 2
    begin=$(date +%s)
    if PYTHONPATH=src python3 -m kvasir.cli.main eval "$measured" --json "$out/$case_name.json" "$@" >"$out/$case_name.txt" 2>&1; then
        echo "$case_name: $(($(date +%s) - begin)) s"
    else
        echo "$case_name: failed after $(($(date +%s) - begin)) s, see $out/$case_name.txt"
        failed=1
    fi
}

failed=0
hard=chain:modulus=499,max_factor=30,max_steps=10
trained="chain,$hard,long_add,countdown,path,path:form=star,facts,state,state:kind=parity,schema,tool"
harder="countdown:min_numbers=4,path:min_depth=4,path:min_depth=5,facts:min_hops=4,min_facts=24,think=no,state:min_every=3,state:min_every=4"
middle="path:max_depth=4,countdown:min_numbers=4,$hard,state:min_every=4"
unaided="facts:think=no,facts:min_hops=4,min_facts=24,think=no"
needles=""
for length in 512 1024 2048 4064; do
    for depth in 0 0.25 0.5 0.75 1; do needles="$needles,needle:min_length=$length,length=$length,depth=$depth"; done
done
for model in nano base; do
    eval "folder=\$$model"
    measure "lab-$model-tasks" "$folder" --tasks "$trained,$harder" -n 600 "$@"
    # More documents would hold every passage of the held-out prose more than once.
    measure "lab-$model-prose" "$folder" --tasks story:form=prose,length=1024,template -n 11 "$@"
    # At temperature 1 the reply rates are those that `reflect` was written with.
    measure "lab-$model-reflect" "$folder" --tasks reflect -n 500 --temperature 1 "$@"
done
# The pool of replies of the others is in lab-base-own.
measure lab-base-samples "$base" --tasks "$unaided" -n 200 --samples 16 --temperature 1 "$@"
measure lab-base-own "$base" --tasks "$middle" -n 200 --samples 16 --temperature 1 --own --form aggregate,judge_pair,judge_one,refine "$@"
measure lab-base-needle "$base" --tasks "${needles#,}" -n 100 "$@"
measure lab-nano-samples "$nano" --tasks "$middle,$unaided" -n 200 --samples 16 --temperature 1 "$@"
exit $failed
