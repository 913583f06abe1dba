#!/usr/bin/env bash
# compute-sanitizer over every own kernel: the kernel tests, on the GPU, with each tensor in an allocation of its own.
#
#   tools/gpu_sanitize.sh OUT [TOOL] [FILE...]    TOOL: memcheck (default), racecheck, synccheck or initcheck
#
# FILE: of tests/kernels/triton (default: all). Writes OUT/sanitize-TOOL.json: per file whether it passed, and the errors
# counted. Compiled kernels are cached, so a run of the tests before this one shortens it. Exit status 1 when anything was found.
set -uo pipefail
out=$1 tool=${2:-memcheck}
cd "$(dirname "$0")/.."
[ $# -gt 2 ] && files=("${@:3}") || files=($(cd tests/kernels/triton && ls test_*.py))
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NO_CUDA_MEMORY_CACHING=1
PATH=$PATH:/usr/local/cuda/bin
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: it comes with the CUDA toolkit" >&2; exit 2; }
mkdir -p "$out"
found=0 lines=()
for file in "${files[@]}"; do
  log=$out/sanitize-$tool-${file%.py}.txt
  timeout "${LIMIT:-300}" compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit 20 \
    python3 -m pytest -x -q -p no:cacheprovider "tests/kernels/triton/$file" >"$log" 2>&1
  status=$?
  errors=$(sed -n 's/^========= ERROR SUMMARY: \([0-9]*\).*/\1/p; s/^========= RACECHECK SUMMARY: \([0-9]*\).*/\1/p' "$log" | tail -1)
  echo "$file: exit $status, ${errors:-no summary} errors, $(grep -E 'passed|failed' "$log" | tail -1)"
  lines+=("{\"file\": \"$file\", \"exit\": $status, \"errors\": ${errors:-null}, \"tests\": \"$(grep -E 'passed|failed' "$log" | tail -1 | tr -d '"')\"}")
  [ "$status" -eq 0 ] && rm "$log" || found=1
done
(IFS=,; echo "{\"tool\": \"$tool\", \"files\": [${lines[*]}]}") >"$out/sanitize-$tool.json"
exit $found
