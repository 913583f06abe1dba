"""On a machine with an NVIDIA GPU: how fast a real checkpoint loads, and from exec to the first token with and without caches.

    python tools/gpu_load.py RESULT.json [--shape llama-8b] [--folder DIR]

Writes the shape with random weights into DIR (default: the temporary folder) as shards of 5 GB, loads it twice from the page
cache, then starts `kvasir serve` on it: with empty compile caches, and again twice. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])

from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.bench.startup import start_once  # noqa: E402
from kvasir.bench.workloads import SHAPES  # noqa: E402
from kvasir.convert.checkpoint import write_tensors  # noqa: E402
from kvasir.layers.linear import Placement  # noqa: E402
from kvasir.models import checkpoint  # noqa: E402
from kvasir.models.decoder import Decoder  # noqa: E402
from kvasir.models.families import build_spec, find_family  # noqa: E402
from kvasir.models.loader import load_model  # noqa: E402

SHARD_BYTES = 5 << 30


def random_tensors(config: dict, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint of the config stores, in bf16: activations stay of order one."""
    spec = build_spec(config)
    stored_name = find_family(spec.family).stored_name
    for slot, at in Decoder(spec, Placement(torch.device("meta"), torch.bfloat16), num_positions=1).slots().items():
        tensor = torch.empty(at.shape, dtype=torch.bfloat16, device=device)
        bound = (3.0 / at.shape[-1]) ** 0.5
        yield stored_name(slot), (tensor.uniform_(-bound, bound) if tensor.dim() >= 2 else tensor.fill_(float("norm" in slot))).cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--max-model-len", default="8192")
    options = parser.parse_args()
    device, config = "cuda" if torch.cuda.is_available() else "cpu", SHAPES[options.shape]
    arms = []
    with tempfile.TemporaryDirectory(prefix="kvasir-load-", dir=options.folder) as top:
        folder = Path(top) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        started = time.perf_counter()
        total = write_tensors(folder, random_tensors(config, device), SHARD_BYTES)
        print(f"wrote {total / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s", flush=True)
        for turn in ("first", "second"):
            started = time.perf_counter()
            model = load_model(folder, checkpoint.read_config(folder), device=device, dtype=torch.bfloat16, num_positions=8192)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            arms.append(arm(f"load, {turn}", {"shape": options.shape}, {"s": round(seconds, 3), "GB_per_s": round(total / seconds / 1e9, 2)}))
            print(arms[-1], flush=True)
            del model
            if device == "cuda":
                torch.cuda.empty_cache()
        os.environ["TRITON_CACHE_DIR"] = str(Path(top) / "triton")
        flags = ["--tokenizer", str(checkpoint.resolve("")), "--served-model-name", options.shape, "--max-model-len", options.max_model_len]
        for caches in ("empty compile caches", "warm", "warm, again"):
            arms.append(arm(f"start, {caches}", {"max_model_len": options.max_model_len}, start_once(str(folder), flags)))
            print(arms[-1], flush=True)
    options.output.write_text(as_json(result(f"load-{options.shape}", arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
