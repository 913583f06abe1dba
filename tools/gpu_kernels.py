"""On a machine with an NVIDIA GPU: every kernel grid against its reference, a pool past 2^31 elements, and timings.

    python tools/gpu_kernels.py RESULT.json [--skip-checks]

Decode and prefill are timed at Llama-8B's heads (32 query, 8 KV, 128 wide, bf16), as CUDA graphs so that launches do not
hide the kernel, over as many layers as keep the L2 cache from holding the keys. Exit status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.attention.backend import AttentionSpec, Site  # noqa: E402
from kvasir.attention.backends.triton import TritonBackend  # noqa: E402
from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.kernels import paged_attention as paged  # noqa: E402
from kvasir.kernels import store_kv as store  # noqa: E402
from kvasir.kv.codecs.plain import PlainCodec  # noqa: E402
from kvasir.kv.pool import KVPool  # noqa: E402
from kvasir.types import CacheGroup, StepBatch  # noqa: E402
from tests.kernels.check import check_paged_attention, check_store_kv  # noqa: E402

HEADS, GROUPS, DIM, SIZE = 32, 8, 128, 16
SHARES = 5  # of a grid, checked side by side
SPEC = AttentionSpec(HEADS, GROUPS, DIM, DIM**-0.5)
SHAPES = {
    **{f"decode {n} x 1k": [(1023, 1)] * n for n in (1, 8, 64, 256)},
    "decode 16 x 32k": [(32767, 1)] * 16,
    "decode 1 x 32k": [(32767, 1)],
    "verify 8 x 8 x 1k": [(1016, 8)] * 8,
    "prefill 1 x 8k": [(0, 8192)],
    "chunk 2k at 30k": [(30720, 2048)],
    "mixed 64 x 1k + 2k": [(1023, 1)] * 64 + [(0, 2048)],
}


def check_share(dtype: torch.dtype, op: str, share: int) -> tuple[int, float, list[str]]:
    """Every ``SHARES``-th case of a grid."""
    cases, check = {"paged_attention": (paged.grid, check_paged_attention), "store_kv": (store.grid, check_store_kv)}[
        op
    ]
    return check_cases(
        op, dtype, list(cases())[share::SHARES], lambda case: (check(case, dtype, "cuda") or {}).get("kernel", 0.0)
    )


def check_cases(op: str, dtype: torch.dtype, cases: list, error) -> tuple[int, float, list[str]]:
    """How many, the worst ``error(case)``, and what failed."""
    worst, failed = 0.0, []
    for case in cases:
        try:
            worst = max(worst, error(case))
        except Exception as e:  # a failed compile or launch is a result, too
            failed.append(f"{op} {dtype} {case}: {type(e).__name__}: {str(e)[:400]}")
    return len(cases), worst, failed


def check_grids() -> list[dict]:
    """Each share in a process of its own: most of the time goes into compiling."""
    with ProcessPoolExecutor(3 * SHARES, mp_context=multiprocessing.get_context("spawn")) as processes:
        work = {
            (dtype, op): [processes.submit(check_share, dtype, op, share) for share in range(SHARES)]
            for op in ("paged_attention", "store_kv")
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        }
        return [
            grid_arm(f"{op} grid", dtype, [share.result() for share in shares]) for (dtype, op), shares in work.items()
        ]


def grid_arm(name: str, dtype: torch.dtype, shares: list[tuple[int, float, list[str]]]) -> dict:
    """Of what ``check_cases`` found in each share; printed, too."""
    counts, worst, failed = zip(*shares)
    lines = [line for part in failed for line in part]
    made = arm(name, {"dtype": str(dtype)}, {"cases": sum(counts), "failed": len(lines), "worst_error": max(worst)})
    print(name, dtype, made["metrics"], *lines, sep="\n  ", flush=True)
    return made


def make_batch(spans: list[tuple[int, int]], tables: torch.Tensor, size: int = SIZE) -> StepBatch:
    starts, lengths = [s for s, _ in spans], [n for _, n in spans]
    positions = torch.cat([torch.arange(s, s + n) for s, n in spans]).cuda()
    row_start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    span_of = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(lengths)).cuda()
    slots = tables[span_of, positions // size].long() * size + positions % size
    return StepBatch(
        input_ids=positions,
        positions=positions,
        row_start=row_start,
        context=torch.tensor(starts, dtype=torch.int32).cuda(),
        tables=(tables,),
        slots=(slots,),
        logit_rows=positions[:0],
        starts=starts,
        lengths=lengths,
    )


def make_pool(spans: list[tuple[int, int]], layers: int, extra: int = 0) -> tuple[KVPool, StepBatch]:
    """Random pages in random order. ``extra`` pages stand before those in use."""
    counts = [-(-(s + n) // SIZE) for s, n in spans]
    group = CacheGroup("full", tuple(range(layers)), GROUPS, DIM)
    pool = KVPool([group], PlainCodec(), [1 + extra + sum(counts)], SIZE, "cuda", torch.bfloat16)
    for page in pool.pages[0].split(1024):
        page.view(torch.bfloat16).normal_()
    order = (1 + extra + torch.randperm(sum(counts))).to(torch.int32)
    tables = torch.nn.utils.rnn.pad_sequence(list(order.split(counts)), batch_first=True)
    return pool, make_batch(spans, tables.contiguous().cuda())


def backend() -> TritonBackend:
    chosen, site = TritonBackend(), Site("cuda", torch.bfloat16, "plain", SIZE, (SPEC,))
    assert not chosen.why_not(site), chosen.why_not(site)
    chosen.prepare(site)
    return chosen


def check_large_pool() -> dict:
    """Sequences whose pages all lie past 2^31 elements of a 32-layer pool."""
    spans = [(1000, 1), (37, 300)]
    pool, batch = make_pool(spans, 32, extra=(1 << 31) // (32 * 2 * GROUPS * SIZE * DIM) + 1)
    chosen, cache = backend(), pool.layer(31)
    rows = batch.input_ids.shape[0]
    k, v = torch.randn(2, rows, GROUPS, DIM, device="cuda", dtype=torch.bfloat16)
    store.store_kv_triton(k, v, cache.planes["k"], cache.planes["v"], batch.slots[0])
    page, offset = batch.slots[0] // SIZE, batch.slots[0] % SIZE
    stored = torch.equal(cache.planes["k"][page, :, offset], k) and torch.equal(cache.planes["v"][page, :, offset], v)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    chosen.plan(batch)
    out = chosen.run(q, cache, SPEC, batch)
    want, _ = paged.paged_attention_ref(
        q.float(), cache.planes["k"], cache.planes["v"], batch.tables[0], batch.starts, batch.lengths, SPEC.scale
    )
    error = float((out.float() - want).abs().max())
    elements = pool.pages[0].numel() // 2
    return arm(
        "pool past 2^31 elements",
        {"elements": elements},
        {"failed": int(not stored or not error < 2e-2), "worst_error": error},
    )


def graph_of(run) -> torch.cuda.CUDAGraph:
    """``run()``, captured after it has run once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def graph_seconds(run, repeats: int) -> tuple[float, float]:
    """Median seconds of ``run()`` replayed as a CUDA graph, and of calling it."""
    return timed(graph_of(run).replay, repeats), timed(run, repeats)


def timed(run, repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times[3:])[repeats // 2]


def copy_bandwidth() -> float:
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a), 10)


def matmul_rate() -> float:
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / timed(lambda: a @ b, 10)


def time_shape(name: str, spans: list[tuple[int, int]], bandwidth: float, rate: float) -> dict:
    rows, keys = sum(n for _, n in spans), sum(s + n for s, n in spans)
    kv_bytes = 2 * keys * GROUPS * DIM * 2
    flops = 4 * HEADS * DIM * sum(n * s + n * (n + 1) // 2 for s, n in spans)
    layers = max(1, min(32, (256 << 20) // kv_bytes))
    pool, batch = make_pool(spans, layers)
    chosen = backend()
    chosen.plan(batch)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for layer in range(layers):
            chosen.run(q, pool.layer(layer), SPEC, batch)

    graph, eager = (x / layers for x in graph_seconds(run, 10))
    moved = kv_bytes + 2 * q.nbytes
    metrics = {
        "us": round(graph * 1e6, 2),
        "us_eager": round(eager * 1e6, 2),
        "GB_per_s": round(moved / graph / 1e9),
        "TFLOP_per_s": round(flops / graph / 1e12, 1),
        "share_of_limit": round(max(moved / bandwidth, flops / rate) / graph, 3),
    }
    if len(spans) == 1 and spans[0][0] == 0:
        q_1HTD = q.transpose(0, 1).unsqueeze(0).contiguous()
        k, v = torch.randn(2, 1, GROUPS, rows, DIM, device="cuda", dtype=torch.bfloat16)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        dense = timed(lambda: sdpa(q_1HTD, k, v, is_causal=True, enable_gqa=True), 10)
        metrics["us_torch_sdpa_dense"] = round(dense * 1e6, 2)
    print(name, metrics, flush=True)
    return arm(name, {"layers": layers, "splits": "auto"}, metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--skip-checks", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    arms = [] if options.skip_checks else [*check_grids(), check_large_pool()]
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    arms += [time_shape(name, spans, bandwidth, rate) for name, spans in SHAPES.items()]
    failed = sum(a["metrics"].get("failed", 0) for a in arms)
    limits = {"copy_GB_per_s": round(bandwidth / 1e9), "bf16_TFLOP_per_s": round(rate / 1e12), "failed_checks": failed}
    options.output.write_text(as_json(result("gpu_kernels", arms, limits=limits)))
    print(limits)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
