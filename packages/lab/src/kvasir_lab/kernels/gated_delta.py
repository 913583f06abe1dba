"""Check the delta rule's kernels, and time a decode step and the scan of two prompts, ours and fla-core's.

At the heads of Qwen 3.5 9B and of Kimi Linear, in bf16 with states in fp32. A decode step folds the rows that wait and
leaves one, for 1 and 64 sequences, in a CUDA graph over cold states; the time of setting positions back (a launch) is
in it. With 64 sequences, one layer in ``WAITING`` writes its states, as on average of many steps: the layers make whole
cycles of every wait. The scan takes 2 x 8,192 rows from position 0, and its kernels are listed, then its times by the
shape of the last one. Next to each time stands what the bytes allow that have to be moved; for a step, a state that is
read and written. fla-core's step has no convolution, and its scan is the backend `fla`.

`probe` arms run the scan for types and heads that are kept from it, with loads ahead and without, and count the numbers
that are not finite. `walk` arms time a step by the shape of its programs. About 3 minutes on an H100, of which
checks take one. ``--steps`` times steps alone, also by how many rows wait.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import site
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvasir.kernels import gated_chunks, gated_delta, gated_rows
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers.recurrence_backend import RecurrenceBackend
from kvasir.layers.spec import GatedDeltaSpec, NormSpec
from kvasir.technique import load
from kvasir.types import CacheGroup, StepBatch
from kvasir_lab.kernels.frame import (
    BF16,
    COLD_BYTES,
    Grid,
    Report,
    check_grids,
    graph_seconds,
    kernel_times,
    measure_limits,
    timed,
    tried,
)
from tests.kernels.check_delta import LONG, SPECS, WIDE, World, by_kernel, by_reference, by_scan, compare, wide_lengths

SHAPES = {"Qwen 3.5 9B": WIDE["9B"], "Kimi Linear": WIDE["Kimi Linear"]}
WALKS = ((32, 4), (64, 4), (64, 8), (16, 4))  # values and warps of a step's program
WAITS = (1, 2, 3, 4, 6)  # rows that wait before a state is written
# Channels at once, and warps for a block.
COMPARES = ((64, 1), (64, 2), (64, 4), (64, 8), (32, 1), (32, 2), (32, 4), (128, 8))
CARRIES = ((32, 1), (32, 2), (32, 3), (64, 1), (64, 2), (128, 1))
NEAR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
PROBES = {"heads of 8": GatedDeltaSpec(1, 2, 8, 8, NormSpec()), "heads of 16": GatedDeltaSpec(1, 2, 16, 16, NormSpec())}


def check_steps(case: tuple[str, bool], dtype: torch.dtype, device: str) -> None:
    name, wide = case
    if wide:
        compare(WIDE[name], dtype, device, near=NEAR[dtype], kernel=by_scan, lengths=wide_lengths())
    else:
        compare(SPECS[name], dtype, device, near=NEAR[dtype])
        compare(SPECS[name], dtype, device, near=NEAR[dtype], kernel=by_scan, lengths=LONG)


GRIDS = {
    "steps": Grid(lambda: [(name, False) for name in SPECS], check_steps, {torch.float32: 1}),
    "wide": Grid(lambda: [(name, True) for name in WIDE], check_steps, {torch.float32: 1, torch.bfloat16: 1}),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--steps", action="store_true", help="time steps alone")
    parser.add_argument("--site", type=Path, help="folder with fla-core and einops, where they are not installed")


def check_package(report: Report, scan: Any) -> None:
    """fla-core's scan against the plain recurrence."""
    for name, spec in SHAPES.items():
        given = dict(near=2e-2, kernel=partial(by_scan, scan=scan), lengths=wide_lengths())
        try:
            compare(spec, BF16, "cuda", **given)
        except Exception as e:
            report.add("check fla", {"shape": name}, {"failed": 1, "why": f"{type(e).__name__}: {str(e)[:300]}"})
        else:
            report.add("check fla", {"shape": name}, {"failed": 0})


def layers_of(spec: Any, count: int, layers: int) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    """Planes of several layers with states for ``count`` sequences, and their table [S, 2]."""
    group = CacheGroup("state", tuple(range(layers)), kind="state", states=(spec.state(),) * layers)
    pool = KVPool([group], PlainCodec(), [2 * count], 16, "cuda", BF16)
    table = torch.arange(2 * count, dtype=torch.int32, device="cuda").view(-1, 2)
    return [pool.layer(i).planes for i in range(layers)], table


def batch_of(starts: list[int], lengths: list[int], **more: Any) -> StepBatch:
    context, ends = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (starts, [0, *lengths]))
    none = torch.zeros(0)
    return StepBatch(none, none, ends.cumsum(0).int(), context, (), (), none, starts, lengths, **more)


def step_arms(report: Report, name: str, spec: Any, count: int, bandwidth: float) -> None:
    """Time a decode step of ``count`` sequences."""
    world = World(spec, BF16, "cuda", lengths=[[1]])
    heads, key_dim, value_dim = world.pool.layer(0).planes["matrix"].shape[1:]
    state_bytes = 4 * heads * key_dim * value_dim
    cycle = math.lcm(*WAITS)
    layers = -(-min(64, 1 + COLD_BYTES // (count * state_bytes)) // cycle) * cycle
    planes, table = layers_of(spec, count, layers)
    rows = torch.randn(count, planes[0]["ahead"].shape[-1], dtype=BF16, device="cuda")
    ones = torch.ones(count, dtype=torch.int64, device="cuda")
    batch = batch_of([100] * count, [1] * count, span_lengths=ones)
    out = torch.empty(count, heads, value_dim, device="cuda")

    def ours(waiting: int | None = None) -> None:
        """One step of each layer, after which rows wait as in the steady state: some states are written, others not."""
        waits = waiting or (gated_rows.WAITING if count >= gated_rows.MANY_SPANS else 1)
        for place, layer in enumerate(planes):
            layer["position"].fill_(99 - place % waits)
            gated_delta.step(rows, layer, table, batch, world.weights, False, out, waiting=waiting)

    keys = world.weights.key_heads
    q, k = (torch.randn(1, count, keys, key_dim, dtype=BF16, device="cuda") for _ in range(2))
    v = torch.randn(1, count, heads, value_dim, dtype=BF16, device="cuda")
    shape = (1, count, heads, key_dim) if world.weights.channelwise else (1, count, heads)
    decay, beta = -torch.rand(shape, device="cuda"), torch.rand(1, count, heads, device="cuda")
    bounds = torch.arange(count + 1, device="cuda")

    def package() -> None:
        kind = "kda" if world.weights.channelwise else "gated_delta_rule"
        run = getattr(importlib.import_module(f"fla.ops.{kind}"), f"fused_recurrent_{kind}")
        for layer in planes:
            state = layer["matrix"][:count].contiguous()
            run(q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True, cu_seqlens=bounds,
                use_qk_l2norm_in_kernel=True)  # fmt: skip

    limit = 2 * count * state_bytes / bandwidth
    for who, run in (("ours", ours), ("fla-core, with a copy of states", package)):
        found = tried((name, count, who), lambda run=run: graph_seconds(run, 5))
        if found is not None:
            us = found / layers * 1e6
            share = {"us": round(us, 2), "limit_us": round(limit * 1e6, 2), "of_limit": round(limit * 1e6 / us, 3)}
            report.add(f"step {count}", {"shape": name, "who": who}, share)
            report.save()
    for waiting in WAITS:
        found = tried((name, count, waiting), lambda waiting=waiting: graph_seconds(partial(ours, waiting), 5))
        if found is not None:
            report.add(f"wait {count}", {"shape": name, "waiting": waiting}, {"us": round(found / layers * 1e6, 2)})
            report.save()
    for values, warps in WALKS:
        with mock.patch.multiple(gated_rows, VALUES=values, WARPS=warps):
            found = tried((name, count, values, warps), lambda: graph_seconds(ours, 5))
        if found is not None:
            chosen = {"shape": name, "values": values, "warps": warps}
            report.add(f"walk {count}", chosen, {"us": round(found / layers * 1e6, 2)})
            report.save()


def scan_arms(report: Report, name: str, spec: Any, scans: dict[str, Any], bandwidth: float) -> None:
    """Time the scan of two prompts."""
    world, rows_each = World(spec, BF16, "cuda", lengths=[[1]]), 8192
    planes, table = layers_of(spec, 2, 1)
    matrix, width = planes[0]["matrix"], planes[0]["ahead"].shape[-1]
    heads, key_dim, value_dim = matrix.shape[1:]
    rows = torch.randn(2 * rows_each, width, dtype=BF16, device="cuda")
    batch = batch_of([0, 0], [rows_each] * 2)
    out = torch.empty(len(rows), heads, value_dim, device="cuda")
    moved = rows.nbytes + out.nbytes + 2 * 4 * heads * key_dim * value_dim
    limit_us, results = moved / bandwidth * 1e6, {}
    for who, scan in scans.items():

        def run(scan: Any = scan) -> None:
            gated_delta.step(rows, planes[0], table, batch, world.weights, False, out, scan)

        found = tried((name, who), lambda run=run: timed(run, 7))
        if found is None:
            continue
        results[who] = found
        metrics = {"us": round(found * 1e6, 1), "limit_us": round(limit_us, 1), "kernels_us": kernel_times(run)}
        report.add("scan 2 x 8192", {"shape": name, "who": who}, metrics)
    for values, stages in CARRIES:  # what a program of the last kernel takes, and how far ahead it loads
        with mock.patch.object(gated_chunks, "VALUES", values), mock.patch.object(gated_chunks, "STAGES", stages):
            found = tried((name, values, stages), lambda: timed(partial(run, gated_chunks.scan), 5))
            config = {"shape": name, "values": values, "stages": stages}
            if found is not None:
                report.add("carry 2 x 8192", config, {"us": round(found * 1e6, 1)})
    for part, warps in COMPARES if world.weights.channelwise else ():
        with mock.patch.multiple(gated_chunks, PART=part, WARPS=warps):
            found = tried((name, part, warps), lambda: timed(partial(run, gated_chunks.scan), 5))
        if found is not None:
            report.add("compare 2 x 8192", {"shape": name, "part": part, "warps": warps}, {"us": round(found * 1e6, 1)})
    if len(results) == 2:
        report.ratios[f"{name}: fla-core's scan / ours"] = round(results["fla-core"] / results["ours"], 3)


def probe(report: Report) -> None:
    """Count what is not finite where the scan is kept from types and heads."""
    for name, spec in PROBES.items():
        for dtype in (torch.float16, BF16):
            for stages in (2, 1):
                worlds = [World(spec, dtype, "cuda", lengths=LONG) for _ in range(3)]
                with (
                    mock.patch.object(gated_delta, "scans", lambda *_: True),
                    mock.patch.object(gated_chunks, "STAGES", stages),
                ):
                    got = tried((name, dtype), lambda worlds=worlds: worlds[0].run(by_scan))
                if got is None:
                    continue
                want, walked = worlds[1].run(by_reference), worlds[2].run(by_kernel)
                bad = int((~got.isfinite()).sum())
                error = {"of_rows": float((walked - want).abs().max()), "of_scan": float((got - want).abs().max())}
                config = {"heads": name, "dtype": str(dtype), "stages": stages}
                report.add("probe", config, {"not_finite": bad, **{k: f"{v:.2e}" for k, v in error.items()}})


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    if options.site is not None:
        site.addsitedir(str(options.site))
    report = Report("gpu_gated_delta", options.output)
    package = load("kvasir.layers.recurrences", "fla", RecurrenceBackend)
    has_package = importlib.util.find_spec("fla") is not None
    if not options.skip_checks:
        check_grids(report, __name__, GRIDS)
        report.save()
    bandwidth, _ = measure_limits(report)
    scans = {"ours": gated_chunks.scan} | ({"fla-core": package.scan} if has_package else {})
    report.limits["fla_core"] = importlib.import_module("fla").__version__ if has_package else "not installed"
    for name, spec in SHAPES.items():
        if not options.steps:
            scan_arms(report, name, spec, scans, bandwidth)
            report.save()
        for count in (1, 64):
            step_arms(report, name, spec, count, bandwidth)
    if options.steps:
        return report.end()
    if has_package and not options.skip_checks:
        check_package(report, package.scan)
    report.save()
    probe(report)  # last: a kernel that reads where it must not ends the process's use of the GPU
    return report.end()
