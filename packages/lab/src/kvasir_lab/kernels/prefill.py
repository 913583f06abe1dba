"""Time attention of long prompts: Triton's kernel, the one whose warps are placed by hand, and cuDNN's over dense keys.

Both of ours also with FlashAttention-4's ideas (``kernels.softmax_block``): sums rescaled only where a maximum has
grown enough (``lazy``), and one power of two in 4 or 8 by a polynomial (``share``).

On a Hopper GPU, at Llama-8B's heads in bf16, as CUDA graphs that take turns. The kernel by hand is first tried in a
process of its own: a barrier that is never passed would hang for good.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch

from kvasir.kernels import dense_attention as dense
from kvasir.kernels.hopper_attention import HopperShape
from kvasir.kv.pool import KVPool
from kvasir.types import StepBatch
from kvasir_lab.kernels.frame import BF16, Report, in_turns, tried
from kvasir_lab.kernels.pages import (
    DIM,
    GROUPS,
    HEADS,
    SPEC,
    Spans,
    attention_flops,
    attention_inputs,
    make_pool,
    queries,
)
from tests.kernels.check import check_dense_attention

PREFILLS: dict[str, Spans] = {"1 x 1k": [(0, 1024)], "1 x 8k": [(0, 8192)], "8k at 24k": [(24576, 8192)]}
TRIAL_SECONDS = 75  # until the kernel by hand counts as hanging: compiling it takes most of a minute
DENSE, BY_HAND = dense.Shape.of(128), HopperShape.of()
IDEAS = ({"lazy": True}, {"share": 8}, {"share": 4}, {"lazy": True, "share": 4})  # of FlashAttention-4
Shape: TypeAlias = dense.Shape | HopperShape


def plan_dense(batch: StepBatch, shape: Shape) -> dense.LongSpans:
    return dense.plan_long(batch.starts, batch.lengths, [0], HEADS // GROUPS, "cuda", shape)


def run_dense(q: torch.Tensor, pool: KVPool, batch: StepBatch, long: dense.LongSpans, out: torch.Tensor) -> None:
    dense.dense_attention_triton(*attention_inputs(q, pool, 0, batch), long, SPEC.scale, out)


def gap_to(base: torch.Tensor, out: torch.Tensor) -> float:
    """The largest difference, relative to the largest value if that is below one; infinite where there is a NaN."""
    most, gap = base.float().abs().max(), (out.float() - base.float()).abs().max()
    return float((gap / most.clamp(max=1)).nan_to_num(torch.inf))


def try_by_hand(told: Connection, by_hand: HopperShape) -> None:
    """Check, in a process of its own, some ragged spans against the reference, and long ones against Triton's
    kernel."""
    try:
        for case in itertools.islice(dense.ragged(), 0, 5, 2):
            check_dense_attention(case, BF16, "cuda", shape=by_hand)
        for spans in PREFILLS.values():
            pool, batch = make_pool(spans, 1)
            q = queries(spans)
            outs = [torch.empty_like(q), torch.full_like(q, torch.nan)]
            for shape, out in zip((DENSE, by_hand), outs):
                run_dense(q, pool, batch, plan_dense(batch, shape), out)
            gap = gap_to(outs[0], outs[1])
            assert gap < 2e-2, f"{spans} {gap}"
        told.send("")
    except Exception as e:
        told.send(f"{type(e).__name__}: {str(e)[:300]}")


def sound(shapes: list[HopperShape]) -> list[HopperShape]:
    """Those kernels by hand that are right and do not hang. They are compiled and tried at the same time."""
    context = multiprocessing.get_context("spawn")
    trials = []
    for shape in shapes:
        told, telling = context.Pipe(duplex=False)
        process = context.Process(target=try_by_hand, args=(telling, shape), daemon=True)
        process.start()
        telling.close()
        trials.append((shape, told, process))
    right, end = [], time.monotonic() + TRIAL_SECONDS
    for shape, told, process in trials:
        what = "hangs"
        if told.poll(max(0.0, end - time.monotonic())):
            try:
                what = told.recv()
            except EOFError:
                what = "died"
        process.kill()
        process.join()
        print("by hand:", shape, what or "right", flush=True)
        if not what:
            right.append(shape)
    return right


def cudnn_call(q: torch.Tensor, spans: Spans) -> Callable[[], Any]:
    """cuDNN's attention over dense keys: of the prompt itself, or of the context alone where there is one."""
    ((start, length),) = spans
    k = torch.randn(1, GROUPS, max(start, length), DIM, device="cuda", dtype=BF16)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    for what, keys in (("", k), (" with another length", k[:, :, :-512])):
        began = time.perf_counter()
        tried("cuDNN", lambda keys=keys: cudnn(q.transpose(0, 1)[None], keys, keys, None, True, 0.0, not start))
        torch.cuda.synchronize()
        print(f"cuDNN's first call{what} {time.perf_counter() - began:.3f} s", flush=True)
    return lambda: cudnn(q.transpose(0, 1)[None], k, k, None, True, 0.0, not start)


def time_case(report: Report, case: str, spans: Spans, shapes: list[Shape]) -> None:
    ((start, length),) = spans
    pool, batch = make_pool(spans, 1)
    q = queries(spans)
    outs = {shape: torch.empty_like(q) for shape in shapes}
    runs: dict[Any, Callable[[], Any]] = {
        shape: functools.partial(run_dense, q, pool, batch, plan_dense(batch, shape), out)
        for shape, out in outs.items()
    }
    runs["cuDNN"] = cudnn_call(q, spans)
    for name, spent in sorted(in_turns(runs, 5).items(), key=lambda item: item[1]):
        if name == "cuDNN" and start:
            flops, gap = 4 * HEADS * DIM * length * start, 0.0
        else:
            flops, gap = attention_flops(spans), 0.0 if name == "cuDNN" else gap_to(outs[DENSE], outs[name])
        metrics = {
            "us": round(spent * 1e6, 1),
            "TFLOP_per_s": round(flops / spent / 1e12, 1),
            "gap": round(gap, 5),
            "failed": int(not gap < 2e-2),
        }
        report.add(f"prefill {case}", {"shape": str(name)}, metrics)
    torch.cuda.empty_cache()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ideas", action="store_true", help="time FlashAttention-4's ideas, too (2 minutes)")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report = Report("gpu_prefill", options.output)
    ideas = IDEAS if options.ideas else ()
    by_hand = [BY_HAND, *(dataclasses.replace(BY_HAND, **idea) for idea in ideas)]
    right = sound(by_hand)
    for shape in by_hand:
        report.add("prefill by hand", {"shape": str(shape)}, {"failed": int(shape not in right)})
    shapes = [DENSE, *(dataclasses.replace(DENSE, **idea) for idea in ideas), *right]
    for case, spans in PREFILLS.items():
        time_case(report, case, spans, shapes)
        report.save()
    return report.end()
