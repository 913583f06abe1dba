"""On a Hopper GPU: variants of what a decode step is made of, beside each other in one call.

    python tools/gpu_decode.py RESULT.json [--parts attention,gemv,steps,prefill]

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
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.attention import paged as paged_backend  # noqa: E402
from kvasir.bench.result import arm, result  # noqa: E402
from kvasir.kernels import activation, fused_qkv, gemv, norm, paged_attention  # noqa: E402
from kvasir.kernels import decode_attention as decode  # noqa: E402
from kvasir.kernels import dense_attention as dense  # noqa: E402
from kvasir.kernels.gemv import Config  # noqa: E402
from kvasir.kernels.sample import sample_rows  # noqa: E402
from kvasir.layers import linear  # noqa: E402
from kvasir.models import decoder  # noqa: E402
from tools import gpu_fused  # noqa: E402
from tools.gpu_kernels import DIM, GROUPS, HEADS, SPEC, make_pool  # noqa: E402

BF16, PROCESSES = torch.bfloat16, 14
CONTEXTS = {"8 x 1k": [1087] * 8, "64 x 1k": [1087] * 64, "256 x 1k": [1087] * 256, "64 mixed": [200 + 29 * (i * 37 % 64) for i in range(64)]}
SHAPES = {"64w2s3 x3": decode.Shape(64, 2, 3, 12, 3), "32w2s4 x4": decode.Shape(32, 2, 4, 12, 4), "32w2s5 x3": decode.Shape(32, 2, 5, 12, 3),
          "32w2s3 x5": decode.Shape(32, 2, 3, 12, 5), "64w2s2 x5": decode.Shape(64, 2, 2, 12, 5)}
EARLY = (0, 2, 4)  # blocks of 64 keys
ROWS = (8, 64)
CONFIGS = [Config(64, 128, 4, 3, 4), Config(64, 64, 4, 4, 4), Config(64, 128, 4, 3, 8), Config(32, 128, 4, 4, 4), Config(32, 128, 4, 4, 8),
           Config(64, 128, 4, 3, 2), Config(32, 128, 4, 4, 1), Config(16, 256, 4, 4, 1), Config(128, 64, 4, 4, 2), Config(64, 256, 4, 3, 2)]


# ---------------------------------------------------------------------------------------------------------------- timing


def in_turns(runs: dict, rounds: int = 9) -> dict:
    """Seconds of each captured run, median of rounds in which they take turns."""
    graphs = {}
    for name, run in runs.items():
        try:
            graphs[name] = gpu_fused.graph_of(run)
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


def planned(contexts: list[int], chunk: int | None) -> torch.Tensor:
    """Items of equal chunks, sequence by sequence."""
    items, first = [], 0
    for s, context in enumerate(contexts):
        keys = context + 1
        size = chunk or keys
        parts = -(-keys // size)
        items += [(s, first, parts, s, s, p * size, min(keys, (p + 1) * size), p) for p in range(parts)]
        first += parts
    return torch.tensor(items, dtype=torch.int32, device="cuda")


def cuts(contexts: list[int]) -> dict[str, int | None]:
    longest, total = max(contexts) + 1, sum(contexts) + len(contexts)
    if len(contexts) <= 8:
        return {f"chunk {c}": c for c in (128, 160, 192, 256, 320)}
    found = {"unsplit": None, "halves": -(-longest // 128) * 64, "chunk 384": 384, "chunk 704": 704}
    return found if len(contexts) < 256 else {"unsplit": None, "halves": found["halves"]} if total else {}


def attention_runs(contexts: list[int], pool, batch, layers: int) -> dict:
    count = len(contexts)
    qkv = torch.randn(count, HEADS + 2 * GROUPS, DIM, dtype=BF16, device="cuda")
    ops = fused_qkv.HeadOps(HEADS, torch.randn(4096, DIM, device="cuda"), batch.positions)
    rows = decode.Rows(torch.arange(count, dtype=torch.int32, device="cuda"), torch.zeros(count, GROUPS, dtype=torch.int32, device="cuda"))
    outs = {}

    def run(name: tuple, shape: decode.Shape, items: torch.Tensor | None, early: int) -> None:
        for layer in range(layers):
            planes = pool.layer(layer).planes
            q = fused_qkv.fused_qkv(qkv, ops, planes["k"], planes["v"], batch.slots[0])
            out = torch.empty_like(q)
            decode.decode_attention_triton(q, planes["k"], planes["v"], batch.tables[0], batch.context, batch.row_start, rows, SPEC.scale, out,
                                           shape=shape, items=items, early_blocks=early)
        outs[name] = q, out

    runs = {}
    plans = {name: planned(contexts, chunk) for name, chunk in cuts(contexts).items()}
    for label, shape in SHAPES.items():
        for early in EARLY:
            blocks = early * 64 // shape.block_n
            for how, items in {"on the device": None, **plans}.items():
                if early == 4 and how == "on the device":
                    continue
                name = (label, how, early)
                runs[name] = functools.partial(run, name, shape, items, blocks)
    return runs, outs


def time_attention() -> list[dict]:
    arms = []
    for case, contexts in CONTEXTS.items():
        layers = 8 if len(contexts) <= 64 else 3
        pool, batch = make_pool([(c, 1) for c in contexts], layers)
        runs, outs = attention_runs(contexts, pool, batch, layers)
        times = in_turns(runs, 5)
        moved = 4 * sum(c + 1 for c in contexts) * GROUPS * DIM
        q = next(iter(outs.values()))[0]
        planes = pool.layer(layers - 1).planes
        want, _ = paged_attention.paged_attention_ref(q.float(), planes["k"], planes["v"], batch.tables[0], contexts, [1] * len(contexts), SPEC.scale)
        for name, spent in sorted(times.items(), key=lambda item: item[1]):
            gap = float((outs[name][1].float() - want).abs().max())
            us = spent / layers * 1e6
            metrics = {"us": round(us, 2), "TB_per_s": round(moved / us / 1e6, 3), "gap": round(gap, 5), "failed": int(not gap < 2e-2)}
            arms.append(arm(f"attention {case}", {"shape": name[0], "cut": name[1], "early_keys": 64 * name[2], "layers": layers}, metrics))
            print(f"attention {case:9}", *name, metrics, flush=True)
        del pool, batch, runs, outs
        torch.cuda.empty_cache()
    return arms


# ------------------------------------------------------------------------------------------------------------------ gemv


def product(rows: int, w: torch.Tensor, fused: dict, config: Config | None, joined: bool):
    if config is None:
        return gpu_fused.run_gemv(rows, w, fused, None)
    n, k = w.shape
    x = torch.randn(rows, k, dtype=BF16, device="cuda")
    scale = (torch.ones(k, dtype=BF16, device="cuda"), 1e-5) if fused.get("norm") else None
    residual = torch.zeros(rows, n, dtype=BF16, device="cuda") if fused.get("residual") else None
    return lambda: gemv.gemv(x, w, config, norm=scale, activation=fused.get("activation"), residual_TO=residual, joined=joined)


def check_joined() -> dict:
    from tests.kernels.check_fused import check_gemv

    worst, failed, cases = 0.0, [], [c for c in gemv.grid() if c.config.splits > 1]
    original = gemv.gemv
    with mock.patch.object(gemv, "gemv", lambda *a, **k: original(*a, **k, joined=True)):
        for case, dtype in itertools.product(cases, (BF16, torch.float32)):
            try:
                worst = max(worst, check_gemv(case, dtype, "cuda"))
            except Exception as e:
                failed.append(f"{case} {dtype} {type(e).__name__} {str(e)[:200]}")
    print("joined grid", len(cases), worst, *failed, sep="\n  ", flush=True)
    return arm("joined grid", {}, {"cases": 2 * len(cases), "worst_error": worst, "failed": len(failed)})


def time_gemv() -> list[dict]:
    arms = [check_joined()]
    for name, n, k, fused in gpu_fused.matrices():
        if name.endswith("head") or (name.startswith("llama") and fused.get("activation")):
            continue
        size = 2 * n * k
        copies = [torch.empty(n, k, dtype=BF16, device="cuda").normal_() for _ in range(min(24, -(-(160 << 20) // size)))]
        for rows in ROWS:
            variants = [(None, False)] + [(c, j) for c in CONFIGS for j in ((False, True) if c.splits > 1 else (False,))]
            calls = {v: [product(rows, w, fused, *v) for w in copies] for v in variants}
            times = in_turns({v: (lambda c=c: [call() for call in c]) for v, c in calls.items()}, 5)
            ranked = sorted(times, key=times.get)
            us = {("plain" if c is None else f"{c.block_n}x{c.block_k}w{c.warps}s{c.stages}k{c.splits}{'j' if j else ''}"):
                  round(times[c, j] / len(copies) * 1e6, 2) for c, j in ranked}
            arms.append(arm(f"product {name}", {"rows": rows, "N": n, "K": k, **fused}, {"us": us}))
            print(f"product {name:18} {rows:3}", dict(itertools.islice(us.items(), 7)), "plain", us["plain"], flush=True)
        del copies, calls
        torch.cuda.empty_cache()
    return arms


# ----------------------------------------------------------------------------------------------------------------- steps


def never(*_) -> bool:
    return False


def nothing(*_, **__) -> None:
    return None


def with_table(rows: int, config: Config) -> mock._patch:
    return mock.patch.object(gemv, "MEASURED", {key: config if key[0] == rows and key[1] <= 8192 and value is None else value
                                                for key, value in gemv.MEASURED.items()})


def step_variants(shape: str, batch: int, contexts: list[int]) -> dict[str, list]:
    def attention(label: str, chunk: int | None, early: int) -> mock._patch:
        built = SHAPES[label]
        return mock.patch.object(paged_backend, "decode_attention_triton", functools.partial(
            decode.decode_attention_triton, shape=built, items=None if chunk == -1 else planned(contexts, chunk),
            early_blocks=early * 64 // built.block_n))

    joined = [mock.patch.object(m, "gemv", functools.partial(gemv.gemv, joined=True)) for m in (linear, decoder)]
    found = {"as it is": [], "no attention": [mock.patch.object(paged_backend, "decode_attention_triton", nothing)],
             "early 2": [attention("64w2s3 x3", -1, 2)], "32w2s4 x4": [attention("32w2s4 x4", -1, 0)], "32w2s4 x4 early 2": [attention("32w2s4 x4", -1, 2)]}
    chunks = {8: {"192": 192, "160": 160}}.get(batch, {"unsplit": None, "halves": 576})
    for how, chunk in chunks.items():
        for label in ("64w2s3 x3", "32w2s4 x4"):
            for early in (0, 2):
                found[f"{label} {how} early {early}"] = [attention(label, chunk, early)]
    if batch <= 64:
        best = attention("32w2s4 x4", 192 if batch == 8 else None, 2)
        found |= {"joined": joined, "joined, 32w2s4 x4 planned early 2": [*joined, best]}
        for config in (Config(64, 128, 4, 3, 4), Config(64, 64, 4, 4, 4), Config(64, 128, 4, 3, 2)) if batch == 64 else ():
            found[f"joined, own {config.block_n}x{config.block_k} {config.splits}"] = [*joined, with_table(64, config)]
    else:
        found["one slice"] = ["one slice"]
    return found


def time_steps() -> list[dict]:
    arms = []
    no_overlap = [mock.patch.object(m, "pdl", never) for m in (norm, activation, fused_qkv, gemv, decode)]
    for shape, batches in (("qwen3-0.6b", (8, 64, 256)), ("llama-8b", (8, 64, 256))):
        made = gpu_fused.Model(shape)
        for batch in batches:
            contexts = [1087] * batch
            run = made.step([(1087, 1)] * batch)
            vocab = made.spec.vocab_size
            zeros = torch.zeros(batch, dtype=torch.int64, device="cuda")
            given = (torch.zeros(batch, device="cuda"), torch.full((batch,), vocab, dtype=torch.int32, device="cuda"), torch.ones(batch, device="cuda"),
                     torch.zeros(batch, device="cuda"), zeros, zeros)
            full_logits = made.model.logits

            def step(rows: int, run=run) -> torch.Tensor:
                """As ``engine/graphs.py``: logits and draws of so many rows at a time."""
                with mock.patch.object(made.model, "logits", lambda h: h), torch.inference_mode():
                    hidden = run()
                    return [sample_rows(full_logits(hidden[a:a + rows]), *(g[a:a + rows] for g in given), vocab) for a in range(0, batch, rows)]

            sliced = max(1, (64 << 20) // (4 * vocab))
            runs, logits = {}, {}
            for name, patches in step_variants(shape, batch, contexts).items():
                rows = batch if patches == ["one slice"] else sliced
                patches = [] if patches == ["one slice"] else patches

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
                gap = float((logits[name] - logits["as it is"]).abs().max() / logits["as it is"].abs().max()) if name in logits else 0.0
                metrics = {"us": round(spent * 1e6, 1), "tokens_per_s": round(batch / spent, 1), "gap": round(gap, 4), "failed": int(not gap < 0.15)}
                arms.append(arm(f"step {shape} {batch} x 1k", {"variant": name}, metrics))
                print(f"step {shape:10} {batch:3} {name:40}", metrics, flush=True)
            with ExitStack() as stack:
                for patch in no_overlap:
                    stack.enter_context(patch)
                arms.append(table(f"{shape} {batch} x 1k", gpu_fused.graph_of(lambda: step(sliced))))
            del run, runs, logits
            torch.cuda.empty_cache()
        del made
        torch.cuda.empty_cache()
    return arms


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
    found = {f"{kernel} x{count[kernel] / 3:g}": round(us, 1) for kernel, us in sorted(spent.items(), key=lambda item: -item[1])[:20]}
    print(f"kernels {name}, no overlap:", json.dumps(found, indent=1), flush=True)
    return arm(f"kernels {name}, no overlap", {}, {"us": found, "sum_us": round(sum(spent.values()), 1)})


# --------------------------------------------------------------------------------------------------------------- prefill

PREFILLS = {"1 x 1k": [(0, 1024)], "1 x 8k": [(0, 8192)], "8k at 24k": [(24576, 8192)]}
DENSE = [dense.Shape(m, n, warps, stages, ahead) for m, n, warps, stages in ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4),
                                                                              (128, 64, 8, 2), (128, 64, 8, 3)) for ahead in (False, True)]


def run_dense(q: torch.Tensor, pool, batch, long: dense.LongSpans, shape: dense.Shape, out: torch.Tensor) -> None:
    planes = pool.layer(0).planes
    dense.dense_attention_triton(q, planes["k"], planes["v"], batch.tables[0], batch.context, batch.row_start, long, SPEC.scale, out, shape=shape)


def time_prefill() -> list[dict]:
    arms = []
    for case, spans in PREFILLS.items():
        (start, length), = spans
        pool, batch = make_pool(spans, 1)
        q = torch.randn(length, HEADS, DIM, device="cuda", dtype=BF16)
        flops = 4 * HEADS * DIM * (length * start + length * (length + 1) // 2)
        runs, outs = {}, {}
        for shape in DENSE:
            long = dense.plan_long(batch.starts, batch.lengths, [0], HEADS // GROUPS, "cuda", shape.block_m)
            outs[shape] = torch.empty_like(q)
            runs[shape] = functools.partial(run_dense, q, pool, batch, long, shape, outs[shape])
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
                base = outs[DENSE[0]] if base is None else base
                done, gap = flops, float((outs[name].float() - base.float()).abs().max())
            metrics = {"us": round(spent * 1e6, 1), "TFLOP_per_s": round(done / spent / 1e12, 1), "gap": round(gap, 5), "failed": int(not gap < 2e-2)}
            arms.append(arm(f"prefill {case}", {"shape": str(name)}, metrics))
            print(f"prefill {case:10}", name, metrics, flush=True)
        del pool, batch, runs, outs
        torch.cuda.empty_cache()
    return arms


def warm_prefill(shape: dense.Shape) -> None:
    pool, batch = make_pool([(0, 256)], 1)
    q = torch.zeros(256, HEADS, DIM, device="cuda", dtype=BF16)
    long = dense.plan_long(batch.starts, batch.lengths, [0], HEADS // GROUPS, "cuda", shape.block_m)
    run_dense(q, pool, batch, long, shape, torch.empty_like(q))
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------------ main


def warm_attention(work: list) -> None:
    """Fill the kernel cache on disk."""
    for label, count, with_plan, early in work:
        shape = SHAPES[label]
        pool, batch = make_pool([(40, 1)] * count, 1)
        planes = pool.layer(0).planes
        rows = decode.Rows(torch.arange(count, dtype=torch.int32, device="cuda"), torch.zeros(count, GROUPS, dtype=torch.int32, device="cuda"))
        q = torch.zeros(count, HEADS, DIM, dtype=BF16, device="cuda")
        decode.decode_attention_triton(q, planes["k"], planes["v"], batch.tables[0], batch.context, batch.row_start, rows, SPEC.scale,
                                       torch.empty_like(q), shape=shape, items=planned([40] * count, None) if with_plan else None,
                                       early_blocks=early * 64 // shape.block_n)
    torch.cuda.synchronize()


def warm_gemv(work: list) -> None:
    for rows, n, k, fused, config, joined in work:
        try:
            product(rows, torch.empty(n, k, dtype=BF16, device="cuda"), fused, config, joined)()
            torch.cuda.synchronize()
        except Exception as e:
            print("does not run:", rows, n, k, config, joined, str(e)[:100], flush=True)


def warm(parts: set[str]) -> None:
    attention = [(label, count, plan, early) for label in SHAPES for early in EARLY for count, plan in ((8, False), (64, False), (256, False), (8, True), (64, True),
                 (256, True)) if not (early == 4 and not plan)]
    if "attention" not in parts:
        attention = [work for work in attention if work[0] in ("64w2s3 x3", "32w2s4 x4") and work[3] < 4]
    kinds = [m for m in gpu_fused.matrices() if m[0].startswith("qwen") and not m[0].endswith(("head", "down"))]
    products = [(rows, n, k, fused, c, j) for rows in ROWS for _, n, k, fused in kinds for c in CONFIGS for j in ((False, True) if c.splits > 1 else (False,))]
    if "gemv" not in parts:
        products = []
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as processes:
        jobs = [processes.submit(warm_attention, attention[i::PROCESSES]) for i in range(PROCESSES)]
        jobs += [processes.submit(warm_gemv, products[i::PROCESSES]) for i in range(PROCESSES)]
        jobs += [processes.submit(warm_prefill, shape) for shape in DENSE if "prefill" in parts]
        for job in jobs:
            if job.exception() is not None:
                print("does not compile:", str(job.exception())[:300], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--parts", default="attention,gemv,steps,prefill")
    options = parser.parse_args()
    torch.manual_seed(0)
    parts, arms, started = set(options.parts.split(",")), [], time.monotonic()
    warm(parts)
    print(f"warm after {time.monotonic() - started:.0f} s", flush=True)
    for name, part in (("steps", time_steps), ("attention", time_attention), ("gemv", time_gemv), ("prefill", time_prefill)):
        if name in parts:
            arms += part()
            options.output.write_text(json.dumps(result("gpu_decode", arms), indent=1) + "\n")
            print(f"{name} after {time.monotonic() - started:.0f} s", flush=True)
    failed = sum(a["metrics"].get("failed", 0) for a in arms)
    print("failed checks:", failed)
    return 1 if failed else 0


if __name__ == "__main__":
    assert torch.cuda.is_available(), "needs a GPU"
    sys.exit(main())
