"""Time variants of what a decode step is made of, in turns: attention, products of few rows, and whole steps.

On a Hopper GPU, over pages as the engine lays them out and after the kernel that writes keys. Whole steps include
sampling, with one thing changed at a time; then a step's kernels are timed one after the other, without overlap. A
variant whose result differs from the reference by more than rounding counts as failed.
"""

# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from kvasir.attention import paged as paged_backend
from kvasir.engine.ways.graphs import LOGIT_BYTES
from kvasir.kernels import activation, fused_qkv, gemv, hopper_gemv, moe, moe_routing, norm, paged_attention, sample
from kvasir.kernels import decode_attention as decode
from kvasir.kernels.gemv import Config
from kvasir.kernels.sample import sample_rows
from kvasir.kv.pool import KVPool
from kvasir.types import StepBatch
from kvasir_lab.kernels.frame import BF16, Report, check_grids, graph_of, in_turns, kernel_times, tried
from kvasir_lab.kernels.fused import Model, copies_of, matrices, patched, run_gemv
from kvasir_lab.kernels.pages import DIM, GROUPS, HEADS, SPEC, attention_inputs, key_bytes, make_pool, queries

PARTS = ("steps", "attention", "gemv")
KEYS = 80_000  # of a step: with more, fewer layers are timed, so that the pool stays small
WEIGHT_BYTES = 120 << 20  # of the copies of one matrix that take turns: more than twice the L2 cache
CONTEXTS: dict[str, list[int]] = {f"{n} x 1k": [1087] * n for n in (8, 16, 32, 48, 64, 96, 128, 256)} | {
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


# ----------------------------------------------------------------------------------------------------------- attention


def rows_of(count: int) -> decode.Rows:
    """The plan of ``count`` decodes."""
    return decode.Rows(
        torch.arange(count, dtype=torch.int32, device="cuda"),
        torch.zeros(count, GROUPS, dtype=torch.int32, device="cuda"),
    )


def attention_runs(
    contexts: list[int], pool: KVPool, batch: StepBatch, layers: int
) -> tuple[dict[str, Callable[[], None]], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Calls of every shape, and the queries and outputs of the last layer that each leaves behind."""
    count = len(contexts)
    qkv = torch.randn(count, HEADS + 2 * GROUPS, DIM, dtype=BF16, device="cuda")
    ops = fused_qkv.HeadOps(HEADS, torch.randn(4096, DIM, device="cuda"), batch.positions)
    rows, outs = rows_of(count), {}

    def run(name: str, shape: decode.Shape) -> None:
        for layer in range(layers):
            planes = pool.layer(layer).planes
            q = fused_qkv.fused_qkv(qkv, ops, planes["k"], planes["v"], batch.slots[0])
            out = torch.empty_like(q)
            decode.decode_attention_triton(*attention_inputs(q, pool, layer, batch), rows, SPEC.scale, out, shape=shape)
        outs[name] = q, out

    return {label: functools.partial(run, label, shape) for label, shape in SHAPES.items()}, outs


def time_attention(report: Report) -> None:
    for case, contexts in CONTEXTS.items():
        spans = [(c, 1) for c in contexts]
        layers = 8 if sum(contexts) <= KEYS else 3
        pool, batch = make_pool(spans, layers)
        runs, outs = attention_runs(contexts, pool, batch, layers)
        times = in_turns(runs, 5)
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
                "TB_per_s": round(key_bytes(spans) / us / 1e6, 3),
                "gap": round(gap, 5),
                "failed": int(not gap < 2e-2),
            }
            report.add(f"attention {case}", {"shape": name, "layers": layers}, metrics)
        del pool, batch, runs, outs
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------ products


def label(config: Config | None, chosen: Config | None) -> str:
    if config is None:
        return "plain"
    name = f"{config.block_n}x{config.block_k}w{config.warps}s{config.stages}k{config.splits}"
    return f"{name}{'*' if config == chosen else ''}"


def time_gemv(report: Report) -> None:
    """Products of the step with what is fused into them; the shape that the engine takes has a star."""
    for name, n, k, fused in matrices():
        if name.endswith("head") or (name.startswith("llama") and fused.get("activation")):
            continue
        copies = copies_of(n, k, WEIGHT_BYTES, 16)
        for rows in ROWS:
            chosen = gemv.choose(rows, n, k)
            own = [*([] if chosen is None else [chosen]), *(c for c in CONFIGS if k // c.splits >= c.block_k)]
            calls = {c: [run_gemv(rows, w, fused, c) for w in copies] for c in (None, *dict.fromkeys(own))}
            times = in_turns({c: (lambda made=made: [call() for call in made]) for c, made in calls.items()}, 5)
            us = {
                label(c, chosen): round(times[c] / len(copies) * 1e6, 2) for c in sorted(times, key=times.__getitem__)
            }
            report.add(f"product {name}", {"rows": rows, "N": n, "K": k, **fused}, {"us": us})
        del copies, calls
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------------------- steps


def step_variants() -> dict[str, list[Any]]:
    """Patches that make each variant of a step."""

    def attention(label: str) -> Any:
        return mock.patch.object(
            paged_backend,
            "decode_attention_triton",
            functools.partial(decode.decode_attention_triton, shape=SHAPES[label]),
        )

    def table(splits: int, rows: tuple[int, ...]) -> Any:
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

    def by_hand(**change: int) -> Any:
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
        "no attention": [mock.patch.object(paged_backend, "decode_attention_triton", lambda *_, **__: None)],
        **{label: [attention(label)] for label in SHAPES},
        "4 splits": [table(4, (8, 64))],
        "as it is, again": [],
    }


def time_steps(report: Report, shapes: list[str]) -> None:
    """Save after every number of rows."""
    modules = (norm, activation, fused_qkv, gemv, hopper_gemv, decode, moe, moe_routing, sample)
    no_overlap = [mock.patch.object(module, "pdl", lambda *_: False) for module in modules]
    for shape in shapes:
        made = Model(shape)
        for batch in STEPS[shape]:
            step = Step(made, batch)
            time_variants(report, f"step {shape} {batch} x 1k", step)
            if shape == "qwen3-30b-a3b":  # with overlap, too: its routing kernels wait for one another
                add_kernels(report, f"{shape} {batch} x 1k", step)
            with patched(no_overlap):
                add_kernels(report, f"{shape} {batch} x 1k, no overlap", step)
            del step
            torch.cuda.empty_cache()
            report.save()
        del made
        torch.cuda.empty_cache()


class Step:
    """A decode step of ``batch`` sequences as the engine captures it: logits and draws of some rows at a time."""

    def __init__(self, made: Model, batch: int) -> None:
        vocab = made.spec.vocab_size
        self.batch, self.run, self._model = batch, made.step([(1087, 1)] * batch), made.model
        zeros = torch.zeros(batch, dtype=torch.int64, device="cuda")
        greedy, ones = torch.zeros(batch, device="cuda"), torch.ones(batch, device="cuda")
        everything = torch.full((batch,), vocab, dtype=torch.int32, device="cuda")
        self._given = greedy, everything, ones, greedy, zeros, zeros
        self._vocab, self._rows = vocab, max(1, LOGIT_BYTES // (4 * vocab))
        self._logits = made.model.logits

    def hidden(self) -> torch.Tensor:
        """The step without head and draws."""
        with mock.patch.object(self._model, "logits", lambda h: h), torch.inference_mode():
            return self.run()

    def __call__(self) -> list[torch.Tensor]:
        hidden, drawn = self.hidden(), []
        with torch.inference_mode():
            for a in range(0, self.batch, self._rows):
                some = slice(a, a + self._rows)
                drawn.append(sample_rows(self._logits(hidden[some]), *(g[some] for g in self._given), self._vocab))
        return drawn


def time_variants(report: Report, case: str, step: Step) -> None:
    runs: dict[str, Callable[[], Any]] = {}
    logits: dict[str, torch.Tensor] = {}
    for name, patches in step_variants().items():

        def run(patches: list[Any] = patches) -> list[torch.Tensor]:
            with patched(patches):
                return step()

        runs[name] = run
        if name != "no attention":
            with torch.inference_mode(), patched(patches):
                logits[name] = step.run().float()
    runs["without head and draws"] = step.hidden
    base = logits["as it is"]
    for name, spent in sorted(in_turns(runs).items(), key=lambda item: item[1]):
        gap = float((logits[name] - base).abs().max() / base.abs().max()) if name in logits else 0.0
        metrics = {
            "us": round(spent * 1e6, 1),
            "tokens_per_s": round(step.batch / spent, 1),
            "gap": round(gap, 4),
            "failed": int(not gap < 0.15),
        }
        report.add(case, {"variant": name}, metrics)


def add_kernels(report: Report, case: str, step: Step) -> None:
    """An arm of the step's kernels by time."""
    found = kernel_times(graph_of(step).replay)
    report.add(f"kernels {case}", {}, {"us": found, "sum_us": round(sum(found.values()), 1)})


# ----------------------------------------------------------------------------------------------------------------- run


def warm_attention(name: str, count: int) -> None:
    """Into Triton's cache on disk."""
    spans = [(40, 1)] * count
    pool, batch = make_pool(spans, 1)
    q = queries(spans)
    inputs, out = attention_inputs(q, pool, 0, batch), torch.empty_like(q)
    decode.decode_attention_triton(*inputs, rows_of(count), SPEC.scale, out, shape=SHAPES[name])
    torch.cuda.synchronize()


def warm_gemv(rows: int, n: int, k: int, fused: dict[str, Any], config: Config) -> None:
    """Into Triton's cache on disk. What does not compile is seen again where it is timed."""
    tried(config, lambda: run_gemv(rows, torch.empty(n, k, dtype=BF16, device="cuda"), fused, config)())


def to_compile(parts: set[str]) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    if parts & {"attention", "steps"}:
        jobs += [(warm_attention, (name, count)) for name in SHAPES for count in (8, 32, 64, 128, 256)]
    if "gemv" in parts:
        kinds = [m for m in matrices() if m[0].startswith("qwen") and not m[0].endswith(("head", "down"))]
        jobs += [(warm_gemv, (rows, n, k, fused, c)) for rows in ROWS for _, n, k, fused in kinds for c in CONFIGS]
    return jobs


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these, with commas")
    parser.add_argument("--shapes", default=",".join(STEPS), help="models of the part steps")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report, parts = Report("gpu_decode", options.output), set(options.parts.split(","))
    check_grids(report, __name__, {}, to_compile(parts))
    if "steps" in parts:
        time_steps(report, options.shapes.split(","))
    if "attention" in parts:
        time_attention(report)
        report.save()
    if "gemv" in parts:
        time_gemv(report)
    return report.end()
