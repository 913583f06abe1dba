#!/bin/sh
# Train a lab model on one GPU: nano in under 6 minutes, base in under 14. It needs torch, numpy, tokenizers and
# safetensors only, and no installed kvasir. Usage:
#   tools/train_lab.sh NAME FOLDER [options of kvasir_lab.train, e.g. --stop-after 8m, --resume, --also FOLDER]
set -eu
name=${1:?usage: tools/train_lab.sh NAME FOLDER [options]}
out=${2:?usage: tools/train_lab.sh NAME FOLDER [options]}
shift 2
cd "$(dirname "$0")/.."
PYTHONPATH="src:packages/lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 exec python3 -m kvasir_lab.train --recipe "$name" --out "$out" "$@"
