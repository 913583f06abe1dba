#!/bin/sh
# Train the embedded model on one GPU, about 4 minutes in all; nothing needs to be installed but torch, numpy, tokenizers and safetensors.
# Usage: tools/train_embedded.sh FOLDER [options of kvasir.lab.train, such as --minutes 3 or --seed 1]
set -eu
out=${1:?usage: tools/train_embedded.sh FOLDER [options]}
shift
cd "$(dirname "$0")/.."
PYTHONPATH=src PYTHONUNBUFFERED=1 exec python3 -m kvasir.lab.train --recipe embedded --out "$out" --minutes 3 "$@"
