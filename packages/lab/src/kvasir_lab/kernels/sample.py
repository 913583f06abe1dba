"""Compare the sampling kernels with the eager sampler, and time them.

Draws are compared over random mixes of parameters, up to 128k ids. Times are of a replayed CUDA graph, a call; logits
are cold (buffers larger than the L2 cache take turns).
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

from kvasir.decoding.sampler import Sampler
from kvasir.kernels import sample as kernel
from kvasir_lab.kernels.frame import COLD_BYTES, Report, each, timed
from tests.decoding.helpers import decode_span, sequence
from tests.kernels.sampling import KINDS, logits, parameters
from tests.kernels.test_sample import by_the_sampler

Mix = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
LLAMA, QWEN = 128_256, 151_936
MIXES: dict[str, Mix] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 1000": (1.0, 1000, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}
# Logits of random weights are nearly flat (0.6); a trained model's have long tails (3).
INPUTS = (("fp32_flat", torch.float32, 0.6), ("fp32_tails", torch.float32, 3.0), ("bf16_tails", torch.bfloat16, 3.0))


def check(report: Report) -> None:
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
    report.add("draws against the eager sampler", {}, {"rows": rows, "failed": failed})


def given_of(mix: Mix, rows: int, vocab_size: int) -> tuple[torch.Tensor, ...]:
    temperature, top_k, top_p, min_p = mix
    return (
        torch.full((rows,), temperature, device="cuda"),
        torch.full((rows,), top_k or vocab_size, dtype=torch.int32, device="cuda"),
        torch.full((rows,), top_p, dtype=torch.float64, device="cuda"),
        torch.full((rows,), min_p, device="cuda"),
        torch.arange(rows, device="cuda"),
        torch.arange(rows, device="cuda"),
    )


def buffers(rows: int, vocab_size: int, dtype: torch.dtype, scale: float) -> list[torch.Tensor]:
    count = max(2, min(64, COLD_BYTES // (rows * vocab_size * dtype.itemsize)))
    return [(torch.randn(rows, vocab_size, device="cuda") * scale).to(dtype) for _ in range(count)]


def kernel_us(mix: Mix, rows: int, vocab_size: int, dtype: torch.dtype, scale: float) -> float:
    given = given_of(mix, rows, vocab_size)
    calls = [lambda x=x: kernel.sample_rows(x, *given, vocab_size) for x in buffers(rows, vocab_size, dtype, scale)]
    return round(each(calls, 8) * 1e6, 2)


def eager_us(mix: Mix, rows: int, vocab_size: int, scale: float) -> float:
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
    return round(timed(lambda: sampler.sample(x, batch), 5) * 1e6, 2)


def time_mixes(report: Report) -> None:
    for name, mix in MIXES.items():
        for rows in (1, 64, 256):
            metrics = {f"us_{label}": kernel_us(mix, rows, LLAMA, dtype, scale) for label, dtype, scale in INPUTS}
            metrics["us_eager_sampler"] = eager_us(mix, rows, LLAMA, 3.0)
            report.add(f"{name}, {rows} rows", {"vocab_size": LLAMA}, metrics)
    greedy = {rows: kernel_us(MIXES["greedy"], rows, QWEN, torch.bfloat16, 3.0) for rows in (1, 8, 64, 256)}
    report.add("greedy", {"vocab_size": QWEN}, {f"us_{rows}_rows": us for rows, us in greedy.items()})


def tune(report: Report) -> None:
    """The cut with other block sizes."""
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
        report.add("cut", {"block": block, "pivots": pivots, "warps": warps}, {"us": found})


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tune", action="store_true", help="also time the cut with other block sizes")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_sample", options.output)
    check(report)
    time_mixes(report)
    if options.tune:
        tune(report)
    return report.end()
