"""Check the fused kernels and products of few rows, time them, and show what they make of a decode step.

Weights rotate over copies that the L2 cache cannot hold. The table that the part "gemv" prints at its end is the one
that ``kernels/gemv.py`` holds as ``MEASURED``.
"""

# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from kvasir.attention.backend import Site
from kvasir.attention.backends.triton import TritonBackend
from kvasir.bench.workloads import SHAPES
from kvasir.engine.ways.batch import pack
from kvasir.kernels import activation, fused_qkv, gemv, norm
from kvasir.kernels.activation import ACTIVATIONS
from kvasir.kernels.gemv import Config
from kvasir.kernels.store_kv import store_kv_triton
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers.formats import plain
from kvasir.layers.weights import Placement
from kvasir.models import decoder
from kvasir.models.families import build_spec
from kvasir.models.loader import fill_random
from kvasir.types import Request, SamplingParams, Sequence, Span
from kvasir_lab.kernels.frame import BF16, COLD_BYTES, Grid, Report, check_grids, each, graph_of, timed, tried
from kvasir_lab.kernels.pages import Spans
from tests.kernels.check_fused import CHECKS

PARTS = ("checks", "gemv", "kernels", "steps")
Table = dict[tuple[int, int, int], Config | None]  # (rows, N, K) -> the fastest shape, None: cuBLAS
# Shapes of the product that are tried: for one row, for 2 to 16, and for more.
ONE = [
    Config(n, k, warps)
    for n, k, warps in (
        (1, 4096, 4),
        (1, 2048, 4),
        (1, 1024, 4),
        (2, 2048, 4),
        (2, 1024, 4),
        (2, 512, 2),
        (4, 1024, 4),
        (4, 512, 4),
        (4, 1024, 8),
        (8, 512, 4),
        (8, 512, 8),
        (8, 256, 4),
    )
]
FEW = [
    Config(16, 256, 1, 4),
    Config(16, 256, 2, 4),
    Config(16, 512, 2, 3),
    Config(32, 256, 4, 3),
    Config(32, 128, 2, 5),
    Config(64, 128, 4, 4),
    Config(64, 256, 4, 3),
    Config(128, 64, 8, 4),
    Config(16, 256, 1, 4, 4),
    Config(32, 128, 4, 4, 4),
    Config(64, 128, 4, 4, 4),
]
MANY = [
    Config(64, 128, 4, 3),
    Config(64, 128, 4, 4),
    Config(64, 256, 8, 3),
    Config(64, 64, 4, 5),
    Config(128, 64, 4, 4),
    Config(128, 64, 8, 4),
    Config(128, 128, 8, 3),
    Config(64, 128, 4, 3, 2),
    Config(64, 128, 4, 3, 4),
    Config(64, 64, 4, 4, 4),
    Config(128, 64, 8, 4, 2),
    Config(32, 128, 4, 4, 4),
]
ROWS = (1, 2, 4, 8, 16, 32, 64)
STEPS: dict[str, Spans] = {
    **{f"decode {b} x 128": [(127, 1)] * b for b in (1, 2, 4, 8, 16, 64)},
    "prefill 1 x 8k": [(0, 8192)],
}
GRIDS = {name: Grid(cases, check, {BF16: 1, torch.float32: 1}) for name, (cases, check) in CHECKS.items()}


def matrices() -> list[tuple[str, int, int, dict]]:
    """(name, N, K, what is fused) of every product of the two models."""
    found = []
    for name, s in SHAPES.items():
        if name not in ("llama-8b", "qwen3-0.6b"):
            continue
        e, f, d = s["hidden_size"], s["intermediate_size"], s["head_dim"]
        heads, groups = s["num_attention_heads"], s["num_key_value_heads"]
        found += [
            (f"{name} qkv", (heads + 2 * groups) * d, e, {"norm": True}),
            (f"{name} o", e, heads * d, {"residual": True}),
            (f"{name} gate_up", 2 * f, e, {"norm": True, "activation": "silu"}),
            (f"{name} down", e, f, {"residual": True}),
            (f"{name} head", s["vocab_size"], e, {"norm": True}),
        ]
    return found


# ------------------------------------------------------------------------------------------------------------ products


def compile_gemv(rows: int, n: int, k: int, fused: dict[str, Any], config: Config) -> None:
    """Into Triton's cache on disk. What does not compile is seen again where it is timed."""
    tried(config, lambda: run_gemv(rows, torch.empty(n, k, dtype=BF16, device="cuda"), fused, config)())
    torch.cuda.empty_cache()


def to_compile(all_rows: list[int]) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Kernels that `time_gemv` times; 2 to 16 rows share kernels."""
    return [
        (compile_gemv, (rows, n, k, fused, config))
        for _, n, k, fused in matrices()
        for rows in {min(r, 2) if r <= 16 else r for r in all_rows}
        for config in configs(rows)
    ]


def run_gemv(rows: int, w: torch.Tensor, fused: dict[str, Any], config: Config | None) -> Callable[[], torch.Tensor]:
    """A call of the product with all that is fused; ``config`` None: cuBLAS, and kernels of their own around it."""
    n, k = w.shape
    x = torch.randn(rows, k, dtype=BF16, device=w.device)
    scale = (torch.ones(k, dtype=BF16, device=w.device), 1e-5)
    residual = torch.zeros(rows, n, dtype=BF16, device=w.device) if fused.get("residual") else None
    kind = fused.get("activation")
    if config is not None:
        return lambda: gemv.gemv(
            x, w, config, norm=scale if fused.get("norm") else None, activation=kind, residual_TO=residual
        )

    def plain() -> torch.Tensor:
        y = norm.rms_norm(x, *scale) if fused.get("norm") else x
        y = torch.mm(y, w.t()) if residual is None else residual.addmm_(y, w.t())
        return y if kind is None else activation.gated(y, ACTIVATIONS[kind])

    return plain


def configs(rows: int) -> list[Config]:
    """Shapes that are tried for this many rows."""
    return [*ONE, *FEW] if rows == 1 else FEW if rows <= 16 else MANY


def copies_of(n: int, k: int, cold: int = COLD_BYTES, most: int = 64) -> list[torch.Tensor]:
    """Weights of one shape that take ``cold`` bytes together, at most ``most`` of them."""
    count = min(most, -(-cold // (2 * n * k)))
    return [torch.empty(n, k, dtype=BF16, device="cuda").normal_() for _ in range(count)]


def time_gemv(report: Report, all_rows: list[int]) -> Table:
    table: Table = {}
    for name, n, k, fused in matrices():
        copies = copies_of(n, k)
        copies = copies * (1 if len(copies) > 3 else 3)
        for rows in all_rows:
            table[rows, n, k] = time_product(report, name, rows, copies, fused)
    print("MEASURED: dict[tuple[int, int, int], Config | None] = {")
    for key, config in table.items():
        fields = config and (config.block_n, config.block_k, config.warps, config.stages, config.splits)
        print(f"    {key}: {None if fields is None else f'Config{fields}'},")
    print("}", flush=True)
    return table


def time_product(
    report: Report, name: str, rows: int, copies: list[torch.Tensor], fused: dict[str, Any]
) -> Config | None:
    """Time cuBLAS and every shape of our product. Returns the fastest shape, or None where cuBLAS is faster."""
    n, k = copies[0].shape
    x = torch.randn(rows, k, dtype=BF16, device="cuda")
    blas = each([lambda w=w: x @ w.t() for w in copies])
    plain = each([run_gemv(rows, w, fused, None) for w in copies])
    own: dict[Config, float] = {}
    for config in configs(rows):
        spent = tried((name, rows, config), lambda: each([run_gemv(rows, w, fused, config) for w in copies]))
        if spent is not None:
            own[config] = spent
    ranked = sorted(own, key=own.__getitem__)
    size, best = 2 * n * k, own[ranked[0]] if ranked else float("inf")
    metrics = {
        "blas_us": round(blas * 1e6, 2),
        "plain_us": round(plain * 1e6, 2),
        "own_us": {str(c): round(own[c] * 1e6, 2) for c in ranked},
        "TB_per_s": {
            what: round(size / spent / 1e12, 2) for what, spent in (("blas", blas), ("plain", plain), ("own", best))
        },
    }
    report.add(f"gemv {name}", {"rows": rows, "N": n, "K": k, **fused}, metrics)
    return ranked[0] if best < plain else None


# ------------------------------------------------------------------------------------------------------- small kernels


def time_kernels(report: Report) -> None:
    """The small kernels at Llama-8B's widths, against the torch calls that they stand for."""
    e, f, heads, groups, d = 4096, 14336, 32, 8, 128

    def note(name: str, rows: int, moved: int, own: Callable[[], Any], torch_calls: Callable[[], Any]) -> None:
        count = max(4, min(64, COLD_BYTES // max(1, moved)))
        mine, theirs = each([own] * count), each([torch_calls] * count)
        metrics = {
            "us": round(mine * 1e6, 2),
            "us_torch": round(theirs * 1e6, 2),
            "GB_per_s": round(moved / mine / 1e9),
        }
        report.add(name, {"rows": rows}, metrics)

    weight = torch.ones(e, dtype=BF16, device="cuda")
    table = torch.randn(16384, d, device="cuda")
    for rows in (1, 16, 64, 256, 2048, 8192):
        x, h = torch.randn(2, rows, e, dtype=BF16, device="cuda")
        rms = torch.nn.functional.rms_norm
        note(
            "rms_norm",
            rows,
            4 * rows * e,
            lambda: norm.rms_norm(x, weight, 1e-5),
            lambda: rms(x, weight.shape, weight, 1e-5),
        )
        note(
            "add_rms_norm",
            rows,
            8 * rows * e,
            lambda: norm.add_rms_norm(x, h, weight, 1e-5),
            lambda: rms(h.add_(x), weight.shape, weight, 1e-5),
        )
        gate_up = torch.randn(rows, 2 * f, dtype=BF16, device="cuda")
        silu = ACTIVATIONS["silu"]
        note(
            "silu_mul",
            rows,
            6 * rows * f,
            lambda: activation.gated(gate_up, silu),
            lambda: activation.gated_reference(gate_up, silu),
        )
        qkv = torch.randn(rows, heads + 2 * groups, d, dtype=BF16, device="cuda")
        pages = torch.zeros(2, -(-rows // 16), groups, 16, d, dtype=BF16, device="cuda")
        at = torch.arange(rows, device="cuda")
        scale = torch.ones(heads + groups, d, dtype=BF16, device="cuda")
        for name, qk_norm in (("rope + write", None), ("qk norm + rope + write", (scale, 1e-6))):
            ops = fused_qkv.HeadOps(heads, table, at, qk_norm)

            def plain(ops=ops) -> None:
                with mock.patch.object(fused_qkv, "store_kv_ref", store_kv_triton):
                    fused_qkv.fused_qkv_reference(qkv, ops, pages[0], pages[1], at)

            note(
                name,
                rows,
                4 * qkv.numel(),
                lambda ops=ops: fused_qkv.fused_qkv(qkv, ops, pages[0], pages[1], at),
                plain,
            )


# --------------------------------------------------------------------------------------------------------------- steps


class Model:
    """A model with random weights, and steps of sequences in the middle of decoding."""

    def __init__(self, shape: str) -> None:
        self.spec = build_spec(SHAPES[shape])
        self.model = decoder.Decoder(self.spec, Placement(torch.device("cuda"), BF16), 8192)
        fill_random(self.model, 0)
        site = Site("cuda", BF16, "plain", 16, tuple({layer.mixer.attention() for layer in self.spec.layers}))
        self.backend = TritonBackend()
        self.backend.prepare(site)

    def step(self, spans: Spans) -> Callable[[], torch.Tensor]:
        """A call that computes the logits of the last row of each (start, length)."""
        pages = [-(-(start + length) // 16) for start, length in spans]
        pool = KVPool(self.spec.cache_groups(), PlainCodec(), [1 + sum(pages)], 16, "cuda", BF16)
        caches = [pool.layer(i) for i in range(len(self.spec.layers))]
        first, made = itertools.accumulate(pages, initial=1), []
        for i, ((start, length), count, at) in enumerate(zip(spans, pages, first)):
            ids = [(7 * i + j) % 1000 for j in range(start + length)]
            seq = Sequence(Request(id=str(i), prompt_ids=ids, params=SamplingParams(), seed=0, max_tokens=1))
            seq.tables = [list(range(at, at + count))]
            made.append(Span(seq, start, length, want={"sample": range(length - 1, length)}))
        batch = pack(made, 16, "cuda", 1)
        self.backend.plan(batch)

        @torch.inference_mode()
        def run() -> torch.Tensor:
            hidden = self.model.forward(batch, caches, self.backend)
            return self.model.logits(hidden if len(hidden) == len(spans) else hidden.index_select(0, batch.logit_rows))

        return run


def variants(table: Table) -> dict[str, list[Any]]:
    """Patches that make each variant of a step: torch with our attention, then one more part of ours each."""
    blas = [mock.patch.object(plain, "choose", lambda *_: None)]
    no_triton = [mock.patch.object(m, "use_triton", lambda *_: False) for m in (norm, activation, fused_qkv)]
    measured = mock.patch.object(gemv, "MEASURED", {**gemv.MEASURED, **table})
    no_overlap = [mock.patch.object(m, "pdl", lambda *_: False) for m in (norm, activation, fused_qkv, gemv)]
    return {
        "torch": [*blas, *no_triton],
        "fused": blas,
        "fused + gemv, no overlap": [measured, *no_overlap],
        "fused + gemv": [measured],
    }


def patched(patches: list[Any]) -> ExitStack:
    """All of ``patches``, for a `with`."""
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def time_steps(report: Report, table: Table) -> None:
    for shape in ("llama-8b", "qwen3-0.6b"):
        made = Model(shape)
        slots = made.model.slots().items()
        weights = 2 * sum(s.target.numel() for name, s in slots if name != "embed.weight" or made.spec.tied)
        for name, spans in STEPS.items():
            for variant, metrics in step_metrics(made.step(spans), spans, table):
                tokens = metrics.pop("seconds")
                metrics |= {
                    "us": round(tokens * 1e6, 1),
                    "tokens_per_s": round(sum(n for _, n in spans) / tokens, 1),
                    "weights_TB_per_s": round(weights / tokens / 1e12, 2),
                }
                report.add(f"{shape} {name}", {"variant": variant}, metrics)
        del made, slots
        torch.cuda.empty_cache()


def step_metrics(run: Callable[[], torch.Tensor], spans: Spans, table: Table) -> Iterator[tuple[str, dict[str, Any]]]:
    """Variants of a step: seconds, largest difference of logits to torch's, and whether replays give the same bits."""
    decodes, logits = all(length == 1 for _, length in spans), {}
    for variant, patches in variants(table).items():
        with patched(patches):
            graph = graph_of(run)
            with torch.inference_mode():
                logits[variant] = run().float()
            spent = timed(graph.replay, 15 if decodes else 5)
            # A kernel that starts early must not read what is not there yet: the bits must be those without overlap.
            same = variant != "fused + gemv" or not decodes or same_bits(run, logits["fused + gemv, no overlap"])
        gap = float((logits[variant] - logits["torch"]).abs().max() / logits["torch"].abs().max())
        yield variant, {"seconds": spent, "gap_to_torch": round(gap, 4), "failed": int(not same or not gap < 0.15)}


def same_bits(run: Callable[[], torch.Tensor], want: torch.Tensor, replays: int = 20) -> bool:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(replays):
        graph.replay()
        if not torch.equal(out.float(), want):
            return False
    return True


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these, with commas")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows of the part gemv")


def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    report, parts, table = Report("gpu_fused", options.output), set(options.parts.split(",")), {}
    rows = [int(r) for r in options.rows.split(",")]
    check_grids(report, __name__, GRIDS if "checks" in parts else {}, to_compile(rows) if "gemv" in parts else ())
    if "gemv" in parts:
        table = time_gemv(report, rows)
        report.save()
    if "kernels" in parts:
        time_kernels(report)
        report.save()
    if "steps" in parts:
        time_steps(report, table)
    return report.end()
