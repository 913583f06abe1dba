#!/usr/bin/env bash
# Measure test-time scaling: tools/solve_study.sh OUT MINUTES
#
# Studies run in order of importance until the time is up. Every step writes OUT/NAME.json whenever a strategy is
# done, so a run that is cut off keeps what it has. At the end it writes OUT/report.md and its pictures.
#
# Steps draw-*
# fill the pools. Steps pool-* choose from them, come last, and need no GPU. With the files of draw-* in OUT,
#   STEPS="pool-countdown pool-path pool-facts" DEVICE=cpu tools/solve_study.sh OUT 30
# finishes the study on any machine, with the same N and POOL.
#
# Environment: N problems of a study (1000), POOL replies
# for each in the shared pools (64), SEEDS ("7 8 9"), DEVICE (auto), PYTHON (python3), AT_ONCE problems under way
# (64), STEPS: the only steps to run, OPTIONS: more options of kvasir solve, e.g. "--gpu-memory-utilization 0.08"
# where several of these run on one GPU.
set -u
OUT=${1:?tools/solve_study.sh OUT MINUTES} MINUTES=${2:?minutes}
N=${N:-1000} POOL=${POOL:-64} SEEDS=${SEEDS:-7 8 9} DEVICE=${DEVICE:-auto} PYTHON=${PYTHON:-python3} AT_ONCE=${AT_ONCE:-64} STEPS=${STEPS:-} OPTIONS=${OPTIONS:-}
case $OUT in /*) ;; *) OUT=$PWD/$OUT ;; esac
cd "$(dirname "$0")/.." && export PYTHONPATH="$PWD/src:$PWD/packages/lab/src${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -m tools.checkout
mkdir -p "$OUT"
END=$(( $(date +%s) + ${MINUTES%.*} * 60 ))
left() { echo $(( END - $(date +%s) )); }

few() { echo $(( $1 > 0 ? $1 : 1 )); }

wanted() { [ -z "$STEPS" ] || [[ " $STEPS " == *" $1 "* ]]; }

# step NAME SECONDS ARGS: at most SECONDS of what is left (0: all of it); a failure ends the step, not the study.
step() {
  local name=$1 most=$2 room began=$(date +%s); shift 2
  wanted "$name" || return 0
  room=$(( $(left) - 20 ))
  [ "$most" -gt 0 ] && [ "$most" -lt "$room" ] && room=$most
  if [ "$room" -lt 30 ]; then echo "$name: no time left" | tee -a "$OUT/steps.txt"; return 0; fi
  timeout -k 15 $(( room + 15 )) "$PYTHON" -m kvasir.cli.main solve --device "$DEVICE" --at-once "$AT_ONCE" --minutes "$(awk "BEGIN {print $room * 0.7 / 60}")" \
    --json "$OUT/$name.json" $OPTIONS "$@" > "$OUT/$name.txt" 2>&1
  echo "$name: exit $?, $(( $(date +%s) - began )) s" | tee -a "$OUT/steps.txt"
}

both=(--model nano --model base)

# 1. Strategies that only choose or stop samples, on one pool a task and model.
pool() {
  local name=$1 most=$2 task=$3 model n args=(); shift 3
  for model in nano base; do
    for n in 1 2 4 8 16 32; do
      [ "$n" -le "$POOL" ] || continue
      args+=(--strategy "majority:n=$n,model=$model")
      [ "$n" -ge 4 ] || continue
      for by in confidence lowest logprob; do args+=(--strategy "best_of_n:n=$n,by=$by,model=$model"); done
      args+=(--strategy "best_of_n:n=$n,weighted=true,model=$model" --strategy "first_finish:n=$n,model=$model"
             --strategy "short_m_at_k:m=$(( n / 2 )),k=$n,model=$model" --strategy "adaptive_consistency:n=$n,model=$model")
    done
  done
  args+=(--strategy "cascade:n=4,agree=3,last=4")
  [ "$POOL" -ge 16 ] && args+=(--strategy "cascade:n=4,agree=3,last=16" --strategy "cascade:n=8,agree=6,last=16")
  if wanted "$name" && [ ! -e "$OUT/$name.base.jsonl.gz" ]; then echo "$name: nothing was drawn" | tee -a "$OUT/steps.txt"; return 0; fi
  step "$name" "$most" "${both[@]}" --task "$task" --n "$(few $(( N / 2 )))" --pool "$POOL" --pool-file "$OUT/$name" "${args[@]}"
}
draw() {
  step "draw-$1" 0 "${both[@]}" --task "$2" --n "$(few $(( N / 2 )))" --pool "$POOL" --pool-file "$OUT/pool-$1" --resamples 1 \
    --strategy "majority:n=8,model=nano" --strategy "majority:n=8,model=base"
}
draw countdown countdown:min_numbers=4
draw path path:max_depth=4
draw facts facts:think=no

# 2. Squeeze Evolve against RSA, with the controls of its router. rsa is one model alone; the vote costs as many replies as its loops.
evolve() {
  local name=$1 task=$2 seed=$3 shape=N=8,K=3,T=4
  step "$name" 0 "${both[@]}" --task "$task" --n "$N" --seed "$seed" \
    --strategy "rsa:$shape,model=base" --strategy "squeeze_evolve:$shape,p=25" --strategy "rsa:$shape,model=nano" \
    --strategy "squeeze_evolve:$shape,p=25,route=random" --strategy "squeeze_evolve:$shape,p=25,fitness=shuffled" \
    --strategy "majority:n=32,model=base" --strategy "majority:n=32,model=nano" --strategy "best_of_n:n=32,model=base" \
    --strategy "squeeze_evolve:$shape,p=0" --strategy "squeeze_evolve:$shape,p=25,fitness=diversity" \
    --strategy "squeeze_evolve:$shape,p=25,lite=agree" --strategy "squeeze_evolve:$shape,p=50"
}
# 3. V1 against pointwise judging and votes that cost as much; on path nano's judge is weak.
judge() {
  local name=$1 task=$2 seed=$3 model args=()
  for model in base nano; do
    args+=(--strategy "majority:n=8,model=$model" --strategy "v1:N=8,model=$model" --strategy "best_of_n:n=8,by=judge,model=$model"
           --strategy "majority:n=40,model=$model" --strategy "best_of_n:n=40,model=$model" --strategy "best_of_n:n=20,by=judge,model=$model")
  done
  step "$name" 0 "${both[@]}" --task "$task" --n "$N" --seed "$seed" "${args[@]}"
}
first=${SEEDS%% *}
evolve evolve-countdown-$first countdown:min_numbers=4 "$first"
judge judge-countdown-$first countdown:min_numbers=4 "$first"
evolve evolve-path-$first path:max_depth=4 "$first"
judge judge-path-$first path:max_depth=4 "$first"

# 4. What the engine's features change: time and tokens, never an answer beyond ties; and the same over HTTP, which has none of them.
small=$(few $(( N / 4 )))
step feature-countdown 420 "${both[@]}" --task countdown:min_numbers=4 --n "$small" --ablate --strategy "squeeze_evolve:N=8,K=3,T=4,p=25" \
  --strategy "short_m_at_k:m=1,k=8,model=base" --strategy "best_of_n:n=8,model=base"

# 5. Step-wise search and routing, on fewer problems.
step steps-countdown 300 "${both[@]}" --task countdown:min_numbers=4 --n "$(few $(( N * 3 / 10 )))" --strategy "majority:n=8,model=base" \
  --strategy "beam:N=8,width=4,model=base" --strategy "particle:N=8,model=base" --strategy "a_star:k=4,expansions=8,model=base" \
  --strategy "specreason" --strategy "self_eval_prune:n=8,model=base" --strategy "cascade:n=4,agree=3,last=8"

# 6. Further seeds.
for seed in ${SEEDS#* }; do
  [ "$seed" = "$first" ] && continue
  evolve "evolve-countdown-$seed" countdown:min_numbers=4 "$seed"
  judge "judge-countdown-$seed" countdown:min_numbers=4 "$seed"
done

# 7. What is chosen from the pools.
pool pool-countdown 0 countdown:min_numbers=4
pool pool-path 0 path:max_depth=4
pool pool-facts 0 facts:think=no

shopt -s nullglob
results=("$OUT"/pool-*.json "$OUT"/evolve-*.json "$OUT"/judge-*.json "$OUT"/feature-*.json "$OUT"/steps-*.json)
[ ${#results[@]} -gt 0 ] && "$PYTHON" -m kvasir.cli.main solve report "${results[@]}" --page "$OUT/report.md"
cat "$OUT/steps.txt"
