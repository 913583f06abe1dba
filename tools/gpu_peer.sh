#!/usr/bin/env bash
# Compare with vLLM on a machine with an NVIDIA GPU: vLLM, kvasir, vLLM again, each alone on the GPU.
#
#   tools/gpu_peer.sh OUT STEP [SITE]
#     OUT: folder for the results; SITE: folder with vLLM's packages unless they are installed, none: no vLLM
#
# STEP is one of those below; most take at most ten minutes. traces-azure and traces-mixed stand for all traces, with
# windows of a minute, some ten minutes each. traces-repeats adds two of every Azure load: 25 minutes (LIMIT=1600).
# traces-full has three windows of at least 1,000 requests of each, in two halves of 25 and 10 minutes (LIMIT=1560
# ONLY="conversation50 conversation80 conversation90", LIMIT=880 ONLY=code80). The steps after them are one full
# window each. Results are on disk after every load or server, so a run that is cut off keeps what it has.
#
# LIMIT: seconds until the run is told to end (default 530; ending a server may take a minute more). CAPACITY:
# requests a second that vLLM completed, from an earlier step's result, so that the traces need not measure it. ONLY:
# loads of a case of traces, e.g. "mooncake recorded"; three with shares of a capacity fill ten minutes. KVASIR_COMMIT
# names the commit where there is no repository. DATA: a folder of traces other than bench/traces.
set -uo pipefail
out=$1 step=$2 site=${3:-}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD/packages/lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python3 -m tools.checkout
data=${DATA:-bench/traces}
peer=(${site:+--peer-python-path "$site"})
beside=(--peer vllm "${peer[@]}")
[[ $site == none ]] && peer=(--no-peer) beside=()
capacity=(${CAPACITY:+--capacity "$CAPACITY"})
only=()
for load in ${ONLY:-}; do only+=(--only "$load"); done

bench() {
  echo "== kvasir bench $*" >&2
  timeout "${LIMIT:-530}" python3 -m kvasir.cli.main bench "$@" --json "$out/$step${REPEAT:+-$REPEAT}.json" | tail -c 2000
}

trace() {  # CASE [LOAD]
  bench run "bench/cases/$1.toml" ${2:+--only "$2"} "${only[@]}" --data "$data" "${peer[@]}" "${capacity[@]}"
}

mkdir -p "$out"
case $step in
  llama-8b | llama-8b-f8 | llama-8b-long | llama-8b-long-prefill | qwen3-0.6b | gemma-3-27b | speculation-ngram | \
    qwen3.5-9b | qwen3.5-9b-long)
    bench run "bench/cases/$step.toml" "${peer[@]}" ;;
  traces-azure | traces-mixed | traces-repeats | traces-full) trace "$step" ;;
  conversation50 | conversation80 | conversation90 | recorded) trace trace-conversation "$step" ;;
  code80) trace trace-code "$step" ;;
  mooncake) trace trace-mooncake "$step" ;;
  startup) bench startup --shape llama-8b --on-disk --max-model-len 8192 --repeats 2 "${beside[@]}" ;;
  constrained)
    bench constrained --shape llama-8b --max-model-len 8192 --max-num-seqs 128 --gpu-memory-utilization 0.85 \
      "${beside[@]}" ;;
  startup-gemma-3-27b) bench startup --shape gemma-3-27b --on-disk --max-model-len 8192 --repeats 1 "${beside[@]}" ;;
  ladder) bench ladder --shape llama-8b --max-model-len 8192 --repeats 6 ;;
  ladder-qwen3-0.6b) bench ladder --shape qwen3-0.6b --max-model-len 8192 --repeats 6 ;;
  turns) bench turns --shape qwen3.5-9b --max-num-seqs 16 --gpu-memory-utilization 0.85 "${beside[@]}" ;;
  qwen3-30b-a3b | qwen3.5-35b-a3b | gpt-oss-20b | batch-invariant | attention-backends) bench run "bench/cases/$step.toml" ;;
  profile) bench profile --shape llama-8b --batch 64 --prompt 1024 --max-model-len 8192 ;;
  profile-qwen3-0.6b) bench profile --shape qwen3-0.6b --batch 64 --prompt 1024 --max-model-len 8192 ;;
  *) echo "no step named $step" >&2; exit 2 ;;
esac
