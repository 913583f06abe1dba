"""On a Hopper GPU: the fused kernels against their references, their timings, and what they make of a decode step.

    python tools/gpu_fused.py FOLDER [--skip checks,kernels,gemv,steps]

Writes FOLDER/gpu_fused.json. All timings are of CUDA graphs. Weights rotate over copies that the L2 cache cannot hold. The
last lines of the GEMV part are the table that ``kernels/gemv.py`` holds as ``MEASURED``. Exit status 1 when a check failed.
"""

# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.attention.backend import Site  # noqa: E402
from kvasir.attention.backends.triton import TritonBackend  # noqa: E402
from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.bench.workloads import SHAPES  # noqa: E402
from kvasir.engine.batch import pack  # noqa: E402
from kvasir.kernels import _triton, activation, fused_qkv, gemv, norm  # noqa: E402
from kvasir.kernels.activation import ACTIVATIONS  # noqa: E402
from kvasir.kernels.gemv import Config  # noqa: E402
from kvasir.kv.codecs.plain import PlainCodec  # noqa: E402
from kvasir.kv.pool import KVPool  # noqa: E402
from kvasir.layers import linear  # noqa: E402
from kvasir.layers.weights import Placement  # noqa: E402
from kvasir.models import decoder  # noqa: E402
from kvasir.models.families import build_spec  # noqa: E402
from kvasir.models.loader import fill_random  # noqa: E402
from kvasir.types import Request, SamplingParams, Sequence, Span  # noqa: E402
from tests.kernels.check_fused import CHECKS  # noqa: E402
from tools.gpu_kernels import check_cases, graph_of, grid_arm  # noqa: E402

BF16 = torch.bfloat16
PROCESSES = 14
COLD_BYTES = 256 << 20  # five times the L2 cache
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
STEPS = {
    **{f"decode {b} x 128": [(127, 1)] * b for b in (1, 2, 4, 8, 16, 64)},
    "prefill 1 x 8k": [(0, 8192)],
}  # (start, length) of spans


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


# -------------------------------------------------------------------------------------------------------------- checks


def check_share(op: str, dtype: torch.dtype, share: int, shares: int) -> tuple[int, float, list[str]]:
    cases, check = CHECKS[op]
    return check_cases(op, dtype, list(cases())[share::shares], lambda case: check(case, dtype, "cuda"))


def compile_gemv(shapes: list[tuple[int, int, int, dict, Config]]) -> None:
    """Fill the kernel cache, so that the process that measures only loads."""
    for rows, n, k, fused, config in shapes:
        try:
            run_gemv(rows, torch.empty(n, k, dtype=BF16, device="cuda"), fused, config)()
            torch.cuda.empty_cache()
        except Exception:  # it will be seen where it is timed
            continue


def checks(processes: ProcessPoolExecutor) -> list[dict]:
    shares = 4
    work = {
        (op, dtype): [processes.submit(check_share, op, dtype, i, shares) for i in range(shares)]
        for op in CHECKS
        for dtype in (BF16, torch.float32)
    }
    return [grid_arm(f"check {op}", dtype, [part.result() for part in parts]) for (op, dtype), parts in work.items()]


# ------------------------------------------------------------------------------------------------------------- timings


def seconds(graph: torch.cuda.CUDAGraph, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def each(calls: list) -> float:
    """Seconds of one of these calls, one after the other in a graph."""
    return seconds(graph_of(lambda: [call() for call in calls])) / len(calls)


def run_gemv(rows: int, w: torch.Tensor, fused: dict, config: Config | None):
    """A call of the product with all that is fused; ``config`` None: the BLAS, and kernels of their own around it."""
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
    """What is tried for this many rows."""
    return [*ONE, *FEW] if rows == 1 else FEW if rows <= 16 else MANY


def time_gemv(processes: ProcessPoolExecutor, all_rows: list[int]) -> tuple[list[dict], dict]:
    shapes = [
        (rows, n, k, fused, config)
        for _, n, k, fused in matrices()
        for rows in {min(r, 2) if r <= 16 else r for r in all_rows}
        for config in configs(rows)
    ]
    list(processes.map(compile_gemv, [shapes[i::PROCESSES] for i in range(PROCESSES)]))
    arms, table = [], {}
    for name, n, k, fused in matrices():
        size = 2 * n * k
        copies = [
            torch.empty(n, k, dtype=BF16, device="cuda").normal_() for _ in range(min(64, -(-COLD_BYTES // size)))
        ]
        copies = copies * (1 if len(copies) > 3 else 3)
        for rows in all_rows:
            x = torch.randn(rows, k, dtype=BF16, device="cuda")
            times = {
                "blas": each([lambda w=w: x @ w.t() for w in copies]),
                "plain": each([run_gemv(rows, w, fused, None) for w in copies]),
            }
            own: dict[Config, float] = {}
            for config in configs(rows):
                try:
                    own[config] = each([run_gemv(rows, w, fused, config) for w in copies])
                except Exception as e:
                    print(f"  {name} {rows} {config}: {type(e).__name__}: {str(e)[:120]}", flush=True)
                    torch.cuda.synchronize()
            ranked = sorted(own, key=own.get)
            best = ranked[0] if ranked else None
            table[rows, n, k] = best if best is not None and own[best] < times["plain"] else None
            metrics = {
                "blas_us": round(times["blas"] * 1e6, 2),
                "plain_us": round(times["plain"] * 1e6, 2),
                "own_us": {str(c): round(own[c] * 1e6, 2) for c in ranked},
                "TB_per_s": {
                    "blas": round(size / times["blas"] / 1e12, 2),
                    "plain": round(size / times["plain"] / 1e12, 2),
                    "own": round(size / own[best] / 1e12, 2) if best else 0.0,
                },
            }
            arms.append(arm(f"gemv {name}", {"rows": rows, "N": n, "K": k, **fused}, metrics))
            top = ", ".join(
                f"{c.block_n}x{c.block_k} w{c.warps} s{c.stages} k{c.splits}: {own[c] * 1e6:.2f}" for c in ranked[:4]
            )
            print(
                f"{name:20} {rows:2} rows, us: blas {metrics['blas_us']}, plain {metrics['plain_us']}",
                metrics["TB_per_s"],
                top,
                flush=True,
            )
    print("MEASURED: dict[tuple[int, int, int], Config | None] = {")
    for key, config in table.items():
        fields = (
            None if config is None else (config.block_n, config.block_k, config.warps, config.stages, config.splits)
        )
        print(f"    {key}: {None if fields is None else f'Config{fields}'},")
    print("}", flush=True)
    return arms, table


def time_kernels() -> list[dict]:
    """The small kernels at Llama-8B's widths, against the torch calls they stand for."""
    arms = []
    e, f, heads, groups, d = 4096, 14336, 32, 8, 128

    def note(name: str, rows: int, moved: int, own, torch_calls) -> None:
        count = max(4, min(64, COLD_BYTES // max(1, moved)))
        mine, theirs = each([own] * count), each([torch_calls] * count)
        metrics = {
            "us": round(mine * 1e6, 2),
            "us_torch": round(theirs * 1e6, 2),
            "GB_per_s": round(moved / mine / 1e9),
        }
        arms.append(arm(name, {"rows": rows}, metrics))
        print(f"{name:22} {rows:5} rows {metrics}", flush=True)

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
                with mock.patch.object(fused_qkv, "store_kv_ref", fused_qkv_store):
                    fused_qkv.fused_qkv_reference(qkv, ops, pages[0], pages[1], at)

            note(
                name,
                rows,
                4 * qkv.numel(),
                lambda ops=ops: fused_qkv.fused_qkv(qkv, ops, pages[0], pages[1], at),
                plain,
            )
    return arms


def fused_qkv_store(*arguments: torch.Tensor) -> None:
    from kvasir.kernels.store_kv import store_kv_triton

    store_kv_triton(*arguments)


# --------------------------------------------------------------------------------------------------------------- steps


class Model:
    """A model of random weights and a batch of sequences in the middle of decoding."""

    def __init__(self, shape: str) -> None:
        self.spec = build_spec(SHAPES[shape])
        self.model = decoder.Decoder(self.spec, Placement(torch.device("cuda"), BF16), 8192)
        fill_random(self.model, 0)
        site = Site("cuda", BF16, "plain", 16, tuple({layer.mixer.attention() for layer in self.spec.layers}))
        self.backend = TritonBackend()
        self.backend.prepare(site)

    def step(self, spans: list[tuple[int, int]]):
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


def variants(table: dict):
    """(name, patches): the plain torch path with our attention, then each step up."""

    def none(*_):
        return None

    def never(*_):
        return False

    blas = [mock.patch.object(linear, "choose", none), mock.patch.object(decoder, "choose", none)]
    torch_only = [*blas, *(mock.patch.object(m, "use_triton", never) for m in (norm, activation, fused_qkv))]
    measured = mock.patch.object(gemv, "MEASURED", {**gemv.MEASURED, **table})
    no_overlap = [mock.patch.object(m, "pdl", never) for m in (norm, activation, fused_qkv, gemv)]
    return {
        "torch": torch_only,
        "fused": blas,
        "fused + gemv, no overlap": [measured, *no_overlap],
        "fused + gemv": [measured],
    }


def time_steps(table: dict) -> list[dict]:
    arms = []
    for shape in ("llama-8b", "qwen3-0.6b"):
        made = Model(shape)
        spec = made.spec
        weights = sum(t.target.numel() for n, t in made.model.slots().items() if n != "embed.weight" or spec.tied) * 2
        for name, spans in STEPS.items():
            run = made.step(spans)
            logits = {}
            for variant, patches in variants(table).items():
                for patch in patches:
                    patch.start()
                try:
                    graph = graph_of(run)
                    with torch.inference_mode():
                        logits[variant] = run().float()
                    spent = seconds(graph, 15 if len(spans) > 1 or spans[0][1] == 1 else 5)
                    same = True
                    if (
                        variant == "fused + gemv" and spans[0][1] == 1
                    ):  # an early start must not read what is not there yet
                        kept = []
                        replayed = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(replayed):
                            out = run()
                        for _ in range(20):
                            replayed.replay()
                            kept.append(out.clone())
                        same = all(torch.equal(kept[0], k) for k in kept) and torch.equal(
                            kept[0].float(), logits["fused + gemv, no overlap"]
                        )
                finally:
                    for patch in patches:
                        patch.stop()
                rows = sum(n for _, n in spans)
                gap = float((logits[variant] - logits["torch"]).abs().max() / logits["torch"].abs().max())
                metrics = {
                    "us": round(spent * 1e6, 1),
                    "tokens_per_s": round(rows / spent, 1),
                    "weights_TB_per_s": round(weights / spent / 1e12, 2),
                    "gap_to_torch": round(gap, 4),
                    "failed": int(not same or not gap < 0.15),
                }
                arms.append(arm(f"{shape} {name}", {"variant": variant}, metrics))
                print(f"{shape:10} {name:16} {variant:26} {metrics}", flush=True)
        del made, run
        torch.cuda.empty_cache()
    return arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--skip", default="", help="parts to leave out: checks, kernels, gemv, steps")
    parser.add_argument("--rows", default="", help="rows of the GEMV part, e.g. 32,64; default: all")
    options = parser.parse_args()
    skip = set(options.skip.split(","))
    torch.manual_seed(0)
    arms, table = [], {}
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as processes:
        if "checks" not in skip:
            arms += checks(processes)
        if "gemv" not in skip:
            found, table = time_gemv(
                processes, [int(r) for r in options.rows.split(",")] if options.rows else list(ROWS)
            )
            arms += found
    if "kernels" not in skip:
        arms += time_kernels()
    if "steps" not in skip:
        arms += time_steps(table)
    failed = sum(a["metrics"].get("failed", 0) for a in arms)
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "gpu_fused.json").write_text(as_json(result("gpu_fused", arms, limits={"failed_checks": failed})))
    print("failed checks:", failed)
    return 1 if failed else 0


if __name__ == "__main__":
    assert _triton.AVAILABLE and torch.cuda.is_available(), "needs Triton and a GPU"
    sys.exit(main())
