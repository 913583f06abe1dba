#!/usr/bin/env bash
# Install kvasir and kvasir-lab into the environment of PYTHON ($1), with what development and the demo need. On a
# machine without an NVIDIA GPU it never installs the gigabytes of CUDA packages by accident. It takes the CPU build of
# torch from the configured package index, else from PyTorch's own, else it stops and says so.
set -euo pipefail
python=$1
cd "$(dirname "$0")/.."
say() { echo "$*" >&2; }
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

if ! "$python" -c 'import torch' 2>/dev/null; then
  say "Installing torch, which takes a minute or two"
  version=$(sed -n 's/^torch==//p' constraints.txt)
  if command -v nvidia-smi >/dev/null 2>&1; then
    pip install -q "torch==$version"
  elif ! pip install -q "torch==$version+cpu" 2>/dev/null; then
    pip install -q "torch==$version+cpu" --extra-index-url https://download.pytorch.org/whl/cpu || {
      echo "No CPU build of torch $version could be found. Install any torch >= 2.11 into .venv yourself, then run make again." >&2
      exit 1
    }
  fi
fi
# The torch that is there stays, whatever the constraints say.
"$python" - <<'PY' >.venv/constraints.txt
import importlib.metadata
for line in open("constraints.txt"):
    if not line.startswith("torch=="):
        print(line, end="")
print("torch==" + importlib.metadata.version("torch"))
PY
say "Installing kvasir, kvasir-lab and what they need, about another minute"
pip install -q -c .venv/constraints.txt -e ".[dev]" -e packages/lab
