"""Shared parts of the experiments: grids checked in many processes, timing by CUDA graphs, and the result on disk."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvasir.bench.result import arm, result, write_json

T = TypeVar("T")
BF16 = torch.bfloat16
PROCESSES = 16  # of checking and compiling, at most
COLD_BYTES = 256 << 20  # several times the L2 cache of a Hopper GPU (50 MB): inputs that rotate over it are cold
SHOWN = 6  # failures printed of a grid


# -------------------------------------------------------------------------------------------------------------- result


class Report:
    """Arms as they are measured: printed at once, and written after every part, so a run that is cut off keeps them."""

    def __init__(self, case: str, output: Path) -> None:
        self.case, self.output = case, output
        self.arms: list[dict[str, Any]] = []
        self.limits: dict[str, Any] = {}
        self.ratios: dict[str, float] = {}
        self._began = time.perf_counter()

    def add(self, name: str, config: dict[str, Any], metrics: dict[str, Any]) -> None:
        self.arms.append(arm(name, config, metrics))
        print(name, config, metrics, flush=True)

    @property
    def failed(self) -> int:
        """Checks that failed so far."""
        return sum(a["metrics"].get("failed", 0) for a in self.arms)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def save(self) -> None:
        limits = self.limits | {"failed_checks": self.failed}
        self.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.output, result(self.case, self.arms, ratios=self.ratios, limits=limits))
        print(f"saved after {self.seconds:.0f} s", flush=True)

    def end(self) -> int:
        """Save, and return the exit status: 1 when a check failed."""
        self.save()
        print("failed checks:", self.failed, flush=True)
        return int(self.failed > 0)


# -------------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Grid:
    """Cases of a kernel and their check.

    ``check(case, dtype, device)`` raises where the kernel is wrong, and returns its error: a number, a dict that has it
    under "kernel", or None. ``every``: by type, which share of the cases is checked (3: every third).
    """

    cases: Callable[[], Iterable[Any]]
    check: Callable[[Any, torch.dtype, str], Any]
    every: dict[torch.dtype, int]


ALL_TYPES = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 1}


def check_case(module: str, name: str, dtype: torch.dtype, index: int) -> tuple[float, str]:
    """The error of one case of ``module.GRIDS[name]``, and what failed ("": nothing)."""
    grid = importlib.import_module(module).GRIDS[name]
    case = list(grid.cases())[index]
    try:
        found = grid.check(case, dtype, "cuda")
    except Exception as e:  # a failed compile or launch is a result, too
        return float("inf"), f"{name} {dtype} {case}: {type(e).__name__}: {str(e)[:400]}"
    return (found.get("kernel", 0.0) if isinstance(found, dict) else found or 0.0), ""


def check_grids(
    report: Report,
    module: str,
    grids: dict[str, Grid],
    compiling: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]] = (),
) -> None:
    """Check ``grids`` (some or all of ``module.GRIDS``) in processes of their own: compiling takes most of the time.

    ``compiling``: functions and their arguments that fill Triton's cache on disk beside the checks, so that the timing
    which follows does not wait for it. One arm for each grid and type.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), mp_context=context) as processes:
        compiled = [processes.submit(function, *arguments) for function, arguments in compiling]
        checking = {
            processes.submit(check_case, module, name, dtype, index): (name, dtype)
            for name, grid in grids.items()
            for dtype, step in grid.every.items()
            for index in range(0, len(list(grid.cases())), step)
        }
        outcome: dict[tuple[str, torch.dtype], list[tuple[float, str]]] = defaultdict(list)
        for done in as_completed(checking):
            outcome[checking[done]].append(done.result())
        _wait(compiled)
    for (name, dtype), found in outcome.items():
        failed = [text for _, text in found if text]
        worst = max((error for error, text in found if not text), default=None)
        report.add(
            f"{name} grid", {"dtype": str(dtype)}, {"cases": len(found), "failed": len(failed), "worst_error": worst}
        )
        for text in failed[:SHOWN]:
            print(" ", text, flush=True)
    report.save()


def _wait(jobs: list[Future[Any]]) -> None:
    for job in jobs:
        if job.exception() is not None:
            print("does not compile:", str(job.exception())[:300], flush=True)


# -------------------------------------------------------------------------------------------------------------- timing


def graph_of(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
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


def elapsed(run: Callable[[], Any]) -> float:
    """Seconds of one ``run()`` between two events of the GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def timed(run: Callable[[], Any], repeats: int = 9) -> float:
    """Median seconds of ``run()``, after three that do not count."""
    return statistics.median([elapsed(run) for _ in range(repeats + 3)][3:])


def graph_seconds(run: Callable[[], Any], repeats: int = 9) -> float:
    """Median seconds of ``run()`` replayed as a CUDA graph: launches do not hide the kernel."""
    return timed(graph_of(run).replay, repeats)


def each(calls: list[Callable[[], Any]], repeats: int = 7) -> float:
    """Seconds of one of these calls, one after the other in a graph."""
    return graph_seconds(lambda: [call() for call in calls], repeats) / len(calls)


def tried(what: Any, measure: Callable[[], T]) -> T | None:
    """``measure()``, or None where it does not run; that is printed with ``what``."""
    try:
        return measure()
    except Exception as e:
        print("does not run:", what, type(e).__name__, str(e)[:200], flush=True)
        torch.cuda.synchronize()
        return None


def in_turns(runs: dict[Hashable, Callable[[], Any]], rounds: int = 9) -> dict[Hashable, float]:
    """Median seconds of each captured run over rounds in which all take turns. Those that do not run are left out."""
    graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
    for name, run in runs.items():
        graph = tried(name, lambda run=run: graph_of(run))
        if graph is not None:
            graphs[name] = graph
    times = defaultdict(list)
    for _ in range(rounds + 2):
        for name, graph in graphs.items():
            times[name].append(elapsed(graph.replay))
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def kernel_times(run: Callable[[], Any], most: int = 20) -> dict[str, float]:
    """Microseconds of ``run()`` by kernel, the longest first, with the number of launches: "name x3"."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            spent[event.name[:70]] += (event.time_range.end - event.time_range.start) / 3
            count[event.name[:70]] += 1
    longest = sorted(spent.items(), key=lambda item: -item[1])[:most]
    return {f"{name} x{count[name] / 3:g}": round(us, 1) for name, us in longest}


def copy_bandwidth() -> float:
    """Bytes a second that a copy within the GPU's memory reads and writes."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a), 10)


def matmul_rate() -> float:
    """Floating-point operations a second of a large bf16 product."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=BF16)
    return 2 * 8192**3 / timed(lambda: a @ b, 10)


def measure_limits(report: Report) -> tuple[float, float]:
    """Measure what the machine can do and note it in the result: bytes and operations a second."""
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    report.limits |= {"copy_GB_per_s": round(bandwidth / 1e9), "bf16_TFLOP_per_s": round(rate / 1e12)}
    return bandwidth, rate
