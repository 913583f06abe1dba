#!/usr/bin/env bash
# Runs on a machine with an NVIDIA GPU: kernels against their references, then the engine at the Llama-8B shape.
# Results go to the folder $1.
set -uo pipefail
out=$1
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

python3 -m kvasir.cli.main doctor
timeout 120 python3 -m kvasir.cli.main bench startup --shape llama-8b --max-model-len 8192 --repeats 2 --json "$out/startup-llama-8b.json" | tail -1
timeout 100 python3 -m kvasir.cli.main bench offline --shape llama-8b --max-model-len 40000 --repeats 2 --json "$out/offline-llama-8b.json" \
  -w decode1:1:128:128 -w decode8:8:1024:128 -w decode64:64:1024:128 -w prefill8k:1:8192:2 | tail -1
timeout 260 python3 -m kvasir.cli.main bench offline --shape llama-8b --max-model-len 40000 --repeats 1 --json "$out/offline-llama-8b-large.json" \
  -w decode256:256:1024:64 -w long16x32k:16:32768:128 | tail -1
timeout 100 python3 -m kvasir.cli.main bench offline --shape qwen3-0.6b --max-model-len 8192 --repeats 2 --json "$out/offline-qwen3-0.6b.json" \
  -w decode1:1:128:128 -w decode8:8:1024:128 -w decode64:64:1024:128 | tail -1
