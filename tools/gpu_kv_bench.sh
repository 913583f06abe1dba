#!/usr/bin/env bash
# Measure the quantised caches end to end on a machine with an NVIDIA GPU, in commands of at most ten minutes.
#
#   tools/gpu_kv_bench.sh OUT SITE STEP...
#     OUT: folder for the results; SITE: folder with vLLM's packages, "" if installed, none: no vLLM
#
#   long      decode of 16 sequences of 2k to 32k tokens, vLLM in bf16 and fp8 before and after     8 minutes
#   vllm4     decode of 64 x 1k and 16 x 32k compared with vLLM's own 4-bit cache                   9 minutes
#   vllm4-prefill   prompts of 1k and 32k, the same two caches                                      6 minutes
#   short     decode of 1 to 256 sequences: bf16, and what the rotation costs                       4 minutes
#   ttft      one prompt of 8k and 32k                                                              2 minutes
#   load      64 requests of 16k that do not fit: how many run at once, throughput                  4 minutes
#   quality   answers and perplexity of the lab's model and its outlier twins                       8 minutes
#             (QUALITY: options of kvasir_lab/studies/kv_quality.py)
#
# Steps share LIMIT seconds (default 570); one that is cut off keeps the result of earlier rounds. REPEATS overrides a
# case's. KVASIR_COMMIT names the commit where there is no repository.
set -uo pipefail
out=$1 site=$2
shift 2
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD/packages/lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python3 -m tools.checkout
limit=${LIMIT:-570}
peer=(--peer-python-path "$site")
[[ $site ]] || peer=()
[[ $site == none ]] && peer=(--no-peer)
mkdir -p "$out"

within() {  # a command in what is left of the time
  local left=$((limit - SECONDS))
  if ((left < 30)); then
    echo "== no time left for: $*" >&2
    return 1
  fi
  echo "== $left s left: $*" >&2
  timeout -k 20 "$left" "$@" | tail -c 2000
}

run() {  # CASE OPTIONS...
  within python3 -m kvasir.cli.main bench run "bench/cases/$1.toml" --json "$out/$1.json" ${REPEATS:+--repeats "$REPEATS"} "${@:2}"
}

for step in "$@"; do
  case $step in
    long) run llama-8b-kv-long "${peer[@]}" ;;
    vllm4) run llama-8b-kv-vllm4 "${peer[@]}" ;;
    vllm4-prefill) run llama-8b-kv-vllm4-prefill "${peer[@]}" ;;
    short) run llama-8b-kv ;;
    ttft) run llama-8b-kv-ttft ;;
    load) run llama-8b-kv-load ;;
    quality) within python3 -m kvasir_lab.studies kv_quality "$out/kv-codecs-base.json" --device cuda --seconds $((limit - SECONDS - 20)) ${QUALITY:-} ;;
    *) echo "no step named $step" >&2; exit 2 ;;
  esac
done
