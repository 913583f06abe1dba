"""On a machine with an NVIDIA GPU: the sampling kernels against the eager sampler, and their times.

    python tools/gpu_sample.py RESULT.json [--tune]

Draws are compared over random parameter mixes up to 128k ids, as a CUDA graph too. Times are of a replayed graph, per call;
logits are cold (a rotation of buffers larger than the L2 cache). ``--tune`` also times the cut with other block sizes.
Exit status 1 when a draw differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.decoding.sampler import Sampler  # noqa: E402
from kvasir.kernels import sample as kernel  # noqa: E402
from tests.decoding.helpers import decode_span, sequence  # noqa: E402
from tests.kernels.sampling import KINDS, logits, parameters  # noqa: E402
from tests.kernels.test_sample import by_the_sampler  # noqa: E402

LLAMA, QWEN = 128_256, 151_936
COLD_BYTES = 200 << 20
# temperature, top_k, top_p, min_p
MIXES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 1000": (1.0, 1000, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}
# Logits of random weights are nearly flat (0.6); a trained model's have long tails (3).
INPUTS = (("fp32_flat", torch.float32, 0.6), ("fp32_tails", torch.float32, 3.0), ("bf16_tails", torch.bfloat16, 3.0))


def check() -> dict:
    """Kernel against eager sampler: how many rows, how many differ."""
    rows = failed = 0
    for seed, (kind, (count, vocab_size, width)) in enumerate(
        (k, s) for k in KINDS for s in ((64, 100, 128), (64, 5000, 5000), (48, LLAMA, LLAMA))
    ):
        draw = torch.Generator().manual_seed(seed)
        x, given = logits(kind, count, width, draw), parameters(count, vocab_size, draw)
        found = kernel.sample_rows(x.cuda(), *(a.cuda() for a in given), vocab_size).cpu()
        differ = (found != by_the_sampler(x, given, vocab_size, "cuda")).any(0).nonzero()[:, 0].tolist()
        rows, failed = rows + count, failed + len(differ)
        for row in differ[:3]:
            print("differs:", kind, vocab_size, [a[row].item() for a in given], found[:, row].tolist(), flush=True)
    return arm("draws against the eager sampler", {}, {"rows": rows, "failed": failed})


def given_of(mix: tuple, rows: int, vocab_size: int) -> tuple[torch.Tensor, ...]:
    temperature, top_k, top_p, min_p = mix
    return (
        torch.full((rows,), temperature, device="cuda"),
        torch.full((rows,), top_k or vocab_size, dtype=torch.int32, device="cuda"),
        torch.full((rows,), top_p, dtype=torch.float64, device="cuda"),
        torch.full((rows,), min_p, device="cuda"),
        torch.arange(rows, device="cuda"),
        torch.arange(rows, device="cuda"),
    )


def graph_us(calls: list) -> float:
    """Median microseconds a call, over replays of one graph that holds all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return round(sorted(times)[4], 2)


def buffers(rows: int, vocab_size: int, dtype: torch.dtype, scale: float) -> list[torch.Tensor]:
    count = max(2, min(64, COLD_BYTES // (rows * vocab_size * dtype.itemsize)))
    return [(torch.randn(rows, vocab_size, device="cuda") * scale).to(dtype) for _ in range(count)]


def kernel_us(mix: tuple, rows: int, vocab_size: int, dtype: torch.dtype, scale: float) -> float:
    given = given_of(mix, rows, vocab_size)
    return graph_us(
        [lambda x=x: kernel.sample_rows(x, *given, vocab_size) for x in buffers(rows, vocab_size, dtype, scale)]
    )


def eager_us(mix: tuple, rows: int, vocab_size: int, scale: float) -> float:
    """The eager sampler on fp32 logits, host work included."""
    temperature, top_k, top_p, min_p = mix
    sampler = Sampler(vocab_size, vocab_size, rows, "cuda", ())
    spans = []
    for row in range(rows):
        seq = sequence(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        sampler.open(seq)
        spans.append(decode_span(seq))
    batch = sampler.pack(spans)
    x = torch.randn(rows, vocab_size, device="cuda") * scale
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        sampler.sample(x, batch)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return round(sorted(times)[2], 2)


def time_mixes() -> list[dict]:
    arms = []
    for name, mix in MIXES.items():
        for rows in (1, 64, 256):
            metrics = {f"us_{label}": kernel_us(mix, rows, LLAMA, dtype, scale) for label, dtype, scale in INPUTS}
            metrics["us_eager_sampler"] = eager_us(mix, rows, LLAMA, 3.0)
            print(f"{name}, {rows} rows x {LLAMA}", metrics, flush=True)
            arms.append(arm(f"{name}, {rows} rows", {"vocab_size": LLAMA}, metrics))
    metrics = {
        f"us_{rows}_rows": kernel_us(MIXES["greedy"], rows, QWEN, torch.bfloat16, 3.0) for rows in (1, 8, 64, 256)
    }
    print("greedy", QWEN, metrics, flush=True)
    return [*arms, arm("greedy", {"vocab_size": QWEN}, metrics)]


def tune() -> None:
    for block, pivots, warps in (
        (2048, 8, 16),
        (2048, 4, 16),
        (1024, 8, 8),
        (1024, 8, 16),
        (2048, 8, 32),
        (4096, 4, 32),
    ):
        with (
            mock.patch.multiple(kernel, CHUNK=block, PIVOTS=pivots, CUT_WARPS=warps),
            mock.patch.object(kernel.sample_rows_triton, "__kwdefaults__", {"block": block}),
        ):
            found = {
                f"{name} x {rows}": kernel_us(MIXES[name], rows, LLAMA, torch.float32, scale)
                for name in ("greedy", "top-p 0.9", "top-k 20, top-p 0.95")
                for rows, scale in ((1, 3.0), (256, 0.6))
            }
        print(dict(block=block, pivots=pivots, warps=warps), found, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    checked = check()
    print(checked["metrics"], flush=True)
    arms = [checked, *time_mixes()]
    options.output.write_text(as_json(result("gpu_sample", arms)))
    if options.tune:
        tune()
    return 1 if checked["metrics"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
