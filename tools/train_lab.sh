#!/bin/sh
# Train a lab model on one GPU: nano in under 6 minutes, base in under 14. Nothing needs to be installed but torch, numpy, tokenizers and safetensors.
# Usage: tools/train_lab.sh NAME FOLDER [options of kvasir.lab.train, such as --stop-after 8m, --resume, --also FOLDER or --continue-from FOLDER]
set -eu
name=${1:?usage: tools/train_lab.sh NAME FOLDER [options]}
out=${2:?usage: tools/train_lab.sh NAME FOLDER [options]}
shift 2
cd "$(dirname "$0")/.."
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 exec python3 -m kvasir.lab.train --recipe "$name" --out "$out" "$@"
