"""Products of Llama-8B by humming, by our own kernels and in bf16: checked against dequantised weights, then timed.

Needs the package humming (`pip install humming-kernels`) and a CUDA toolkit. A product has what the engine gives it:
norm for qkv and gate_up, gated activation, residual. Times are of CUDA graphs over weights that do not fit in the L2
cache together. ``--seconds``: no format and matrix is begun after so many.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch

from kvasir import technique
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.product_backend import BACKENDS, ProductBackend
from kvasir.layers.spec import NormSpec
from kvasir.layers.weight_format import Weight, load_format
from kvasir.layers.weights import Placement
from kvasir_lab.kernels.frame import BF16, COLD_BYTES, Report, each, measure_limits
from tests.layers.check_products import error_of

FORMATS = ("u4:group=128", "f8:scale=block", "mxfp4", "f8", "nvfp4", "i8", "fp6", "u4:group=128,zeros=true")
# Name -> widths, inputs, and what is fused.
MATRICES: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    "gate_up": ({"gate": 14336, "up": 14336}, 4096, {"norm": True, "activation": "silu"}),
    "qkv": ({"q": 4096, "k": 1024, "v": 1024}, 4096, {"norm": True}),
    "o": ({"o": 4096}, 4096, {"residual": True}),
    "down": ({"down": 4096}, 14336, {"residual": True}),
}
ROWS = (1, 8, 64, 1024)
MOST_ERROR = 0.006  # of a product, root mean square: bf16 results and bf16 scales give 0.003


def filled(spec: str, widths: dict[str, int], inputs: int) -> list[Weight]:
    """Weights of one shape, quantised from random numbers, that take ``COLD_BYTES`` together."""
    formats = None if spec == "plain" else (lambda slots: load_format(spec))
    weight = Linear(inputs, widths, bias=False, place=Placement(torch.device("cuda"), BF16, formats=formats)).weight
    first = 0
    for width in widths.values():
        w_NK = torch.randn(width, inputs, device="cuda", dtype=BF16) * inputs**-0.5
        if formats is None:
            weight.tensor[first : first + width].copy_(w_NK)
        else:
            weight.put(first, w_NK)
        first += width
    count = max(2, -(-COLD_BYTES // weight.num_bytes))
    return [weight, *(copied(weight) for _ in range(count - 1))]


def copied(weight: Weight) -> Weight:
    """Another weight with the same numbers."""
    found = object.__new__(Weight)
    vars(found).update(vars(weight), made=None)
    found.planes = {name: plane.clone() for name, plane in weight.planes.items()}
    return found


def time_matrix(report: Report, backend: ProductBackend, spec: str, name: str, plain: dict[str, list[Weight]]) -> None:
    """One matrix in one format: errors of a product, and times by rows."""
    widths, inputs, fused = MATRICES[name]
    own = filled(spec, widths, inputs)
    reason = backend.why_not_weight(own[0])
    if reason:
        print(f"{spec} {name}: left out: {reason}", flush=True)
        return
    matrix, theirs, begun = own[0].dequantise(), [copied(weight) for weight in own], time.perf_counter()
    before = own[0].num_bytes
    for weight in theirs:
        backend.take(weight, trial=True)
    norm = RMSNorm(inputs, NormSpec(1e-5), own[0].place)
    norm.weight.fill_(1.0)
    for rows in ROWS:
        x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
        theirs[0](x)
        errors = {"own": error_of(own[0](x), x, matrix), "humming": error_of(theirs[0](x), x, matrix)}
        how: dict[str, Any] = {"activation": fused.get("activation")}
        if "norm" in fused:
            how["norm"] = norm
        if "residual" in fused:
            how["residual_TO"] = torch.zeros(rows, sum(widths.values()), device="cuda", dtype=BF16)
        times = {
            label: each([partial(weight, x, **how) for weight in weights])
            for label, weights in (("bf16", plain[name]), ("own", own), ("humming", theirs))
        }
        report.add(
            f"humming {spec} {name}",
            {"rows": rows, "N": sum(widths.values()), "K": inputs},
            {
                **{f"{label}_us": round(spent * 1e6, 2) for label, spent in times.items()},
                "own_over_humming": round(times["own"] / times["humming"], 3),
                "bf16_over_humming": round(times["bf16"] / times["humming"], 3),
                **{f"error_{label}": round(error, 4) for label, error in errors.items()},
                "failed": int(errors["humming"] > MOST_ERROR),
                "bytes": before,
                "humming_bytes": theirs[0].num_bytes,
            },
        )
    print(f"{spec} {name}: {time.perf_counter() - begun:.1f} s", flush=True)
    report.save()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--matrices", nargs="+", default=list(MATRICES), choices=list(MATRICES))
    parser.add_argument("--seconds", type=float, default=210.0)


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    begun = time.perf_counter()
    report = Report("gpu_humming", options.output)
    measure_limits(report)
    backend = technique.load(BACKENDS, "humming", ProductBackend)
    if reasons := backend.why_not(Placement(torch.device("cuda"), BF16)):
        print("; ".join(reasons), flush=True)
        return 1
    plain = {name: filled("plain", *MATRICES[name][:2]) for name in options.matrices}
    failed = []
    for spec in options.formats:
        for name in options.matrices:
            if time.perf_counter() - begun > options.seconds:
                failed.append(f"{spec} {name}: out of time")
                continue
            try:
                time_matrix(report, backend, spec, name, plain)
            except Exception as e:  # one layout that fails must not cost the others their times
                failed.append(f"{spec} {name}: {type(e).__name__}: {str(e)[:300]}")
                print(failed[-1], flush=True)
            torch.cuda.empty_cache()
    print("\n".join(["not measured:", *failed] if failed else ["all measured"]), flush=True)
    return report.end()
