"""On a Hopper GPU: variants of what a decode step is made of, beside each other in one call.

    python tools/gpu_decode.py RESULT.json [--parts attention,gemv,steps,prefill,moe] [--shapes qwen3-0.6b]

Attention over pages as the engine lays them out, after the kernel that writes keys; products of few rows; whole steps with
sampling, with one thing changed at a time; and a step's kernels one after the other, without overlap. Everything is timed in
CUDA graphs that take turns. Exit status 1 when a variant's result differs from the reference by more than rounding.
"""

# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.attention import paged as paged_backend  # noqa: E402
from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.engine.graphs import LOGIT_BYTES  # noqa: E402
from kvasir.kernels import activation, fused_qkv, gemv, hopper_gemv, moe, moe_routing, norm, paged_attention, sample  # noqa: E402
from kvasir.kernels import decode_attention as decode  # noqa: E402
from kvasir.kernels import dense_attention as dense  # noqa: E402
from kvasir.kernels.gemv import Config  # noqa: E402
from kvasir.kernels.hopper_attention import HopperShape  # noqa: E402
from kvasir.kernels.sample import sample_rows  # noqa: E402
from tools import gpu_fused  # noqa: E402
from tools.gpu_kernels import DIM, GROUPS, HEADS, SPEC, graph_of, make_pool  # noqa: E402

BF16, PROCESSES = torch.bfloat16, 14
CONTEXTS = {f"{n} x 1k": [1087] * n for n in (8, 16, 32, 48, 64, 96, 128, 256)} | {
    "64 mixed": [200 + 29 * (i * 37 % 64) for i in range(64)],
    "128 mixed": [100 + 15 * (i * 37 % 128) for i in range(128)],
    "32 x 4k": [4095] * 32,
}
SHAPES = {
    "64w2s3 x3": decode.Shape(64, 2, 3, 12, 3),
    "64w2s2 x4": decode.Shape(64, 2, 2, 12, 4),
    "32w2s4 x4": decode.Shape(32, 2, 4, 12, 4),
    "32w1s4 x4": decode.Shape(32, 1, 4, 12, 4),
}
ROWS = (8, 16, 32, 64)
STEPS = {"qwen3-0.6b": (8, 16, 32, 64, 256), "llama-8b": (8, 64, 256), "qwen3-30b-a3b": (1, 8)}
CONFIGS = [
    Config(64, 128, 4, 3, 4),
    Config(64, 64, 4, 4, 4),
    Config(64, 128, 4, 3, 8),
    Config(32, 128, 4, 4, 8),
    Config(64, 128, 4, 3, 16),
    Config(64, 128, 4, 2, 8),
    Config(64, 64, 4, 4, 8),
    Config(32, 128, 4, 3, 4),
    Config(64, 128, 4, 3, 2),
]


# ---------------------------------------------------------------------------------------------------------------- timing


def in_turns(runs: dict, rounds: int = 9) -> dict:
    """Seconds of each captured run, median of rounds in which they take turns."""
    graphs = {}
    for name, run in runs.items():
        try:
            graphs[name] = graph_of(run)
        except Exception as e:
            print("does not run:", name, type(e).__name__, str(e)[:200], flush=True)
            torch.cuda.synchronize()
    times = defaultdict(list)
    for _ in range(rounds + 2):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(t[2:]) for name, t in times.items()}


# ------------------------------------------------------------------------------------------------------------- attention


def attention_runs(contexts: list[int], pool, batch, layers: int) -> dict:
    count = len(contexts)
    qkv = torch.randn(count, HEADS + 2 * GROUPS, DIM, dtype=BF16, device="cuda")
    ops = fused_qkv.HeadOps(HEADS, torch.randn(4096, DIM, device="cuda"), batch.positions)
    rows = decode.Rows(
        torch.arange(count, dtype=torch.int32, device="cuda"),
        torch.zeros(count, GROUPS, dtype=torch.int32, device="cuda"),
    )
    outs = {}

    def run(name: str, shape: decode.Shape) -> None:
        for layer in range(layers):
            planes = pool.layer(layer).planes
            q = fused_qkv.fused_qkv(qkv, ops, planes["k"], planes["v"], batch.slots[0])
            out = torch.empty_like(q)
            decode.decode_attention_triton(
                q,
                planes["k"],
                planes["v"],
                batch.tables[0],
                batch.context,
                batch.row_start,
                rows,
                SPEC.scale,
                out,
                shape=shape,
            )
        outs[name] = q, out

    return {label: functools.partial(run, label, shape) for label, shape in SHAPES.items()}, outs


def time_attention() -> list[dict]:
    arms = []
    for case, contexts in CONTEXTS.items():
        layers = 8 if sum(contexts) <= 80000 else 3
        pool, batch = make_pool([(c, 1) for c in contexts], layers)
        runs, outs = attention_runs(contexts, pool, batch, layers)
        times = in_turns(runs, 5)
        moved = 4 * sum(c + 1 for c in contexts) * GROUPS * DIM
        q = next(iter(outs.values()))[0]
        planes = pool.layer(layers - 1).planes
        want, _ = paged_attention.paged_attention_ref(
            q.float(), planes["k"], planes["v"], batch.tables[0], contexts, [1] * len(contexts), SPEC.scale
        )
        for name, spent in sorted(times.items(), key=lambda item: item[1]):
            gap = float((outs[name][1].float() - want).abs().max())
            us = spent / layers * 1e6
            metrics = {
                "us": round(us, 2),
                "TB_per_s": round(moved / us / 1e6, 3),
                "gap": round(gap, 5),
                "failed": int(not gap < 2e-2),
            }
            arms.append(arm(f"attention {case}", {"shape": name, "layers": layers}, metrics))
            print(f"attention {case:9}", name, metrics, flush=True)
        del pool, batch, runs, outs
        torch.cuda.empty_cache()
    return arms


# ------------------------------------------------------------------------------------------------------------------ gemv


def product(rows: int, w: torch.Tensor, fused: dict, config: Config | None):
    if config is None:
        return gpu_fused.run_gemv(rows, w, fused, None)
    n, k = w.shape
    x = torch.randn(rows, k, dtype=BF16, device="cuda")
    scale = (torch.ones(k, dtype=BF16, device="cuda"), 1e-5) if fused.get("norm") else None
    residual = torch.zeros(rows, n, dtype=BF16, device="cuda") if fused.get("residual") else None
    return lambda: gemv.gemv(x, w, config, norm=scale, activation=fused.get("activation"), residual_TO=residual)


def time_gemv() -> list[dict]:
    arms = []
    for name, n, k, fused in gpu_fused.matrices():
        if name.endswith("head") or (name.startswith("llama") and fused.get("activation")):
            continue
        size = 2 * n * k
        copies = [
            torch.empty(n, k, dtype=BF16, device="cuda").normal_() for _ in range(min(16, -(-(120 << 20) // size)))
        ]
        for rows in ROWS:
            chosen = gemv.choose(rows, n, k)
            configs = dict.fromkeys(
                [*([] if chosen is None else [chosen]), *(c for c in CONFIGS if k // c.splits >= c.block_k)]
            )
            variants = [None, *configs]
            calls = {v: [product(rows, w, fused, v) for w in copies] for v in variants}
            times = in_turns({v: (lambda c=c: [call() for call in c]) for v, c in calls.items()}, 5)
            ranked = sorted(times, key=times.get)
            us = {
                (
                    "plain"
                    if c is None
                    else f"{c.block_n}x{c.block_k}w{c.warps}s{c.stages}k{c.splits}{'*' if c == chosen else ''}"
                ): round(times[c] / len(copies) * 1e6, 2)
                for c in ranked
            }
            arms.append(arm(f"product {name}", {"rows": rows, "N": n, "K": k, **fused}, {"us": us}))
            print(
                f"product {name:18} {rows:3}", dict(itertools.islice(us.items(), 7)), "plain", us["plain"], flush=True
            )
        del copies, calls
        torch.cuda.empty_cache()
    return arms


# ----------------------------------------------------------------------------------------------------------------- steps


def never(*_) -> bool:
    return False


def nothing(*_, **__) -> None:
    return None


def step_variants() -> dict[str, list]:
    def attention(label: str) -> mock._patch:
        return mock.patch.object(
            paged_backend,
            "decode_attention_triton",
            functools.partial(decode.decode_attention_triton, shape=SHAPES[label]),
        )

    def table(splits: int, rows: tuple[int, ...]) -> mock._patch:
        """More splits where the outputs are few."""
        return mock.patch.object(
            gemv,
            "MEASURED",
            {
                key: Config(64, 128, 4, 3, splits) if key[0] in rows and key[1] == 1024 else value
                for key, value in gemv.MEASURED.items()
            },
        )

    apart = mock.patch.object(
        gemv,
        "MEASURED",
        {
            **gemv.MEASURED,
            (16, 4096, 1024): Config(64, 256, 4, 3, 1),
            **{(16, 1024, k): Config(32, 128, 4, 4, 4) for k in (2048, 3072)},
        },
    )

    def by_hand(**change: int) -> mock._patch:
        return mock.patch.object(
            hopper_gemv, "MEASURED", {shape: replace(ring, **change) for shape, ring in hopper_gemv.MEASURED.items()}
        )

    return {
        "as it is": [],
        "16 rows, tiles of their own": [apart],
        "products by hand: none": [mock.patch.object(hopper_gemv, "MEASURED", {})],
        "products by hand from 1 row on": [mock.patch.object(hopper_gemv, "MIN_ROWS", 1)],
        "products by hand, two blocks of each at a time": [by_hand(w_blocks=2, x_blocks=2)],
        "products by hand, blocks of 64": [by_hand(block_k=64, w_blocks=16, x_blocks=11)],
        "no attention": [mock.patch.object(paged_backend, "decode_attention_triton", nothing)],
        **{label: [attention(label)] for label in SHAPES},
        "4 splits": [table(4, (8, 64))],
        "as it is, again": [],
    }


def time_steps(shapes: list[str]) -> Iterator[list[dict]]:
    """Of one number of rows after the other: a run that is cut off keeps what it has."""
    no_overlap = [
        mock.patch.object(m, "pdl", never)
        for m in (norm, activation, fused_qkv, gemv, hopper_gemv, decode, moe, moe_routing, sample)
    ]
    for shape, batches in ((shape, STEPS[shape]) for shape in shapes):
        made = gpu_fused.Model(shape)
        for batch in batches:
            arms = []
            run = made.step([(1087, 1)] * batch)
            vocab = made.spec.vocab_size
            zeros = torch.zeros(batch, dtype=torch.int64, device="cuda")
            greedy, ones = torch.zeros(batch, device="cuda"), torch.ones(batch, device="cuda")
            given = greedy, torch.full((batch,), vocab, dtype=torch.int32, device="cuda"), ones, greedy, zeros, zeros
            full_logits = made.model.logits

            def step(rows: int, run=run) -> torch.Tensor:
                """As ``engine/graphs.py``: logits and draws of so many rows at a time."""
                with mock.patch.object(made.model, "logits", lambda h: h), torch.inference_mode():
                    hidden = run()
                    return [
                        sample_rows(full_logits(hidden[a : a + rows]), *(g[a : a + rows] for g in given), vocab)
                        for a in range(0, batch, rows)
                    ]

            sliced = max(1, LOGIT_BYTES // (4 * vocab))
            runs, logits = {}, {}
            for name, patches in step_variants().items():
                rows = sliced

                def patched(patches=patches, rows=rows) -> torch.Tensor:
                    with ExitStack() as stack:
                        for patch in patches:
                            stack.enter_context(patch)
                        return step(rows)

                runs[name] = patched
                if name != "no attention":
                    with torch.inference_mode(), ExitStack() as stack:
                        for patch in patches:
                            stack.enter_context(patch)
                        logits[name] = run().float()
            runs["without head and draws"] = lambda: mock_forward(made, run)
            times = in_turns(runs)
            for name, spent in sorted(times.items(), key=lambda item: item[1]):
                gap = (
                    float((logits[name] - logits["as it is"]).abs().max() / logits["as it is"].abs().max())
                    if name in logits
                    else 0.0
                )
                metrics = {
                    "us": round(spent * 1e6, 1),
                    "tokens_per_s": round(batch / spent, 1),
                    "gap": round(gap, 4),
                    "failed": int(not gap < 0.15),
                }
                arms.append(arm(f"step {shape} {batch} x 1k", {"variant": name}, metrics))
                print(f"step {shape:10} {batch:3} {name:40}", metrics, flush=True)
            if shape == "qwen3-30b-a3b":
                arms.append(table(f"{shape} {batch} x 1k", graph_of(lambda: step(sliced))))
            with ExitStack() as stack:
                for patch in no_overlap:
                    stack.enter_context(patch)
                arms.append(table(f"{shape} {batch} x 1k", graph_of(lambda: step(sliced))))
            run = runs = logits = None
            torch.cuda.empty_cache()
            yield arms
        made = None
        torch.cuda.empty_cache()


def mock_forward(made, run) -> None:
    with mock.patch.object(made.model, "logits", lambda h: h), torch.inference_mode():
        run()


def table(name: str, graph: torch.cuda.CUDAGraph) -> dict:
    """Kernels of one replay by time."""
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    spent, count = defaultdict(float), defaultdict(int)
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            spent[event.name[:70]] += (event.time_range.end - event.time_range.start) / 3
            count[event.name[:70]] += 1
    found = {
        f"{kernel} x{count[kernel] / 3:g}": round(us, 1)
        for kernel, us in sorted(spent.items(), key=lambda item: -item[1])[:20]
    }
    print(f"kernels {name}, no overlap:", json.dumps(found, indent=1), flush=True)
    return arm(f"kernels {name}, no overlap", {}, {"us": found, "sum_us": round(sum(spent.values()), 1)})


# --------------------------------------------------------------------------------------------------------------- prefill

PREFILLS = {"1 x 1k": [(0, 1024)], "1 x 8k": [(0, 8192)], "8k at 24k": [(24576, 8192)]}
TRIAL_SECONDS = 75
DENSE, BY_HAND = dense.Shape.of(128), HopperShape.of()


def plan_dense(batch, shape: dense.Shape | HopperShape) -> dense.LongSpans:
    return dense.plan_long(batch.starts, batch.lengths, [0], HEADS // GROUPS, "cuda", shape)


def run_dense(q: torch.Tensor, pool, batch, long: dense.LongSpans, out: torch.Tensor) -> None:
    planes = pool.layer(0).planes
    dense.dense_attention_triton(
        q, planes["k"], planes["v"], batch.tables[0], batch.context, batch.row_start, long, SPEC.scale, out
    )


def gap_to(base: torch.Tensor, out: torch.Tensor) -> float:
    """The largest difference, for means of many keys relative to the largest of them; infinite where there is no number."""
    most, gap = base.float().abs().max(), (out.float() - base.float()).abs().max()
    return float((gap / most.clamp(max=1)).nan_to_num(torch.inf))


def try_by_hand(told) -> None:
    """In a process of its own: some ragged spans against the reference, and long ones against Triton's kernel."""
    from tests.kernels.check import check_dense_attention

    try:
        for case in itertools.islice(dense.ragged(), 0, 5, 2):
            check_dense_attention(case, BF16, "cuda", shape=BY_HAND)
        for spans in PREFILLS.values():
            pool, batch = make_pool(spans, 1)
            q = torch.randn(spans[0][1], HEADS, DIM, device="cuda", dtype=BF16)
            outs = [torch.empty_like(q), torch.full_like(q, torch.nan)]
            for shape, out in zip((DENSE, BY_HAND), outs):
                run_dense(q, pool, batch, plan_dense(batch, shape), out)
            gap = gap_to(outs[0], outs[1])
            assert gap < 2e-2, f"{spans} {gap}"
        told.send("")
    except Exception as e:
        told.send(f"{type(e).__name__}: {str(e)[:300]}")


def sound() -> bool:
    """Whether the kernel by hand is right. A barrier that is never passed would hang for good, so that it is tried in a process that may be
    killed."""
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe(duplex=False)
    process = context.Process(target=try_by_hand, args=(telling,), daemon=True)
    process.start()
    telling.close()
    what = "hangs"
    if told.poll(TRIAL_SECONDS):
        try:
            what = told.recv()
        except EOFError:
            what = "died"
    process.kill()
    process.join()
    print("by hand", what or "right", flush=True)
    return not what


def time_prefill() -> list[dict]:
    shapes = (DENSE, BY_HAND) if sound() else (DENSE,)
    arms = [arm("prefill by hand", {"shape": str(BY_HAND)}, {"failed": int(BY_HAND not in shapes)})]
    for case, spans in PREFILLS.items():
        ((start, length),) = spans
        pool, batch = make_pool(spans, 1)
        q = torch.randn(length, HEADS, DIM, device="cuda", dtype=BF16)
        flops = 4 * HEADS * DIM * (length * start + length * (length + 1) // 2)
        runs, outs = {}, {}
        for shape in shapes:
            outs[shape] = torch.empty_like(q)
            runs[shape] = functools.partial(run_dense, q, pool, batch, plan_dense(batch, shape), outs[shape])
        k = torch.randn(1, GROUPS, max(start, length), DIM, device="cuda", dtype=BF16)
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        for what, keys in (("", k), (" with another length", k[:, :, :-512])):
            began = time.perf_counter()
            try:
                cudnn(q.transpose(0, 1)[None], keys, keys, None, True, 0.0, not start)
                torch.cuda.synchronize()
            except RuntimeError as e:
                print("cuDNN:", str(e)[:200], flush=True)
            print(f"cuDNN's first call{what} {time.perf_counter() - began:.3f} s", flush=True)
        runs["cuDNN"] = lambda: cudnn(q.transpose(0, 1)[None], k, k, None, True, 0.0, not start)
        base = None
        for name, spent in sorted(in_turns(runs, 5).items(), key=lambda item: item[1]):
            if name == "cuDNN":
                done, gap = 4 * HEADS * DIM * (length * start or length * (length + 1) // 2), 0.0
            else:
                base = outs[DENSE] if base is None else base
                done, gap = flops, gap_to(base, outs[name])
            metrics = {
                "us": round(spent * 1e6, 1),
                "TFLOP_per_s": round(done / spent / 1e12, 1),
                "gap": round(gap, 5),
                "failed": int(not gap < 2e-2),
            }
            arms.append(arm(f"prefill {case}", {"shape": str(name)}, metrics))
            print(f"prefill {case:10}", name, metrics, flush=True)
        del pool, batch, runs, outs
        torch.cuda.empty_cache()
    return arms


def warm_prefill(shape: dense.Shape) -> None:
    pool, batch = make_pool([(0, 256)], 1)
    q = torch.zeros(256, HEADS, DIM, device="cuda", dtype=BF16)
    run_dense(q, pool, batch, plan_dense(batch, shape), torch.empty_like(q))
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------------- moe


def check_moe_share(share: int) -> tuple[int, list[str]]:
    from tests.kernels.check_moe import check_moe

    cases = [*moe.grid(), *(moe.Case(rows=rows, experts=128, top_k=8, dim=2048, width=768) for rows in (1, 2, 8, 64))][
        share::PROCESSES
    ]
    failed = []
    for case in cases:
        try:
            check_moe(case, BF16, "cuda")
        except Exception as e:
            failed.append(f"{case}: {type(e).__name__}: {str(e)[:300]}")
    return len(cases), failed


def time_moe() -> list[dict]:
    from tools import gpu_moe

    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as processes:
        counts, failed = zip(*processes.map(check_moe_share, range(PROCESSES)))
    lines = [line for part in failed for line in part]
    print("moe grid", sum(counts), *lines, sep="\n  ", flush=True)
    arms = [arm("moe grid", {}, {"cases": sum(counts), "failed": len(lines)})]
    with torch.inference_mode():
        layers = gpu_moe.make_layers(gpu_moe.LAYERS)
        return arms + [gpu_moe.time_rows(rows, layers, 4.2e12, 795e12, []) for rows in (1, 2, 8, 64)]


# ------------------------------------------------------------------------------------------------------------------ main


def warm_attention(work: list) -> None:
    """Fill the kernel cache on disk."""
    for label, count in work:
        pool, batch = make_pool([(40, 1)] * count, 1)
        planes = pool.layer(0).planes
        rows = decode.Rows(
            torch.arange(count, dtype=torch.int32, device="cuda"),
            torch.zeros(count, GROUPS, dtype=torch.int32, device="cuda"),
        )
        q = torch.zeros(count, HEADS, DIM, dtype=BF16, device="cuda")
        decode.decode_attention_triton(
            q,
            planes["k"],
            planes["v"],
            batch.tables[0],
            batch.context,
            batch.row_start,
            rows,
            SPEC.scale,
            torch.empty_like(q),
            shape=SHAPES[label],
        )
    torch.cuda.synchronize()


def warm_gemv(work: list) -> None:
    for rows, n, k, fused, config in work:
        try:
            product(rows, torch.empty(n, k, dtype=BF16, device="cuda"), fused, config)()
            torch.cuda.synchronize()
        except Exception as e:
            print("does not run:", rows, n, k, config, str(e)[:100], flush=True)


def warm(parts: set[str]) -> None:
    attention = [(label, count) for label in SHAPES for count in (8, 32, 64, 128, 256)]
    kinds = [m for m in gpu_fused.matrices() if m[0].startswith("qwen") and not m[0].endswith(("head", "down"))]
    products = [(rows, n, k, fused, c) for rows in ROWS for _, n, k, fused in kinds for c in CONFIGS]
    if "gemv" not in parts:
        products = []
    if not parts & {"attention", "steps"}:
        attention = []
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as processes:
        jobs = [processes.submit(warm_attention, attention[i::PROCESSES]) for i in range(PROCESSES) if attention]
        jobs += [processes.submit(warm_gemv, products[i::PROCESSES]) for i in range(PROCESSES) if products]
        jobs += [processes.submit(warm_prefill, DENSE)] if "prefill" in parts else []
        for job in jobs:
            if job.exception() is not None:
                print("does not compile:", str(job.exception())[:300], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--parts", default="attention,gemv,steps,prefill,moe")
    parser.add_argument("--shapes", default=",".join(STEPS), help="whose steps are timed")
    options = parser.parse_args()
    torch.manual_seed(0)
    parts, arms, started = set(options.parts.split(",")), [], time.monotonic()
    warm(parts)
    print(f"warm after {time.monotonic() - started:.0f} s", flush=True)
    steps = functools.partial(time_steps, options.shapes.split(","))
    for name, part in (
        ("steps", steps),
        ("attention", time_attention),
        ("gemv", time_gemv),
        ("prefill", time_prefill),
        ("moe", time_moe),
    ):
        if name in parts:
            for found in part() if part is steps else [part()]:
                arms += found
                options.output.write_text(as_json(result("gpu_decode", arms)))
            print(f"{name} after {time.monotonic() - started:.0f} s", flush=True)
    failed = sum(a["metrics"].get("failed", 0) for a in arms)
    print("failed checks:", failed)
    return 1 if failed else 0


if __name__ == "__main__":
    assert torch.cuda.is_available(), "needs a GPU"
    sys.exit(main())
