"""Time steps that mix a prompt with decodes: in captured pieces and launched kernel by kernel, in turns.

Every step computes a new prompt beside the decodes. ``step_ms``: its wall time with overlap. ``launch_ms``: the host's
share, which launches it. ``alone_ms``: the time from a prompt's arrival at an idle engine to its only token.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import time
from itertools import count
from typing import Any

import torch

from kvasir.api.offline.llm import LLM
from kvasir.bench.result import ratios_of
from kvasir.bench.workloads import Batch, shape_folder
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.engine.ways.mixed_steps import MixedSteps
from kvasir.types import SamplingParams
from kvasir_lab.kernels.frame import Report

STEPS = 12  # measured in a round


class Bench:
    """An engine whose launches are timed, and the prompts it is given."""

    def __init__(self, engine: Any, info: Any) -> None:
        self.engine, self.info, self._ways = engine, info, engine.runner.ways
        self._numbers, self._words, self.launched = count(), random.Random(1), []
        launch = engine.runner.launch

        def timed(plan: Any) -> Any:
            began = time.perf_counter()
            try:
                return launch(plan)
            finally:
                self.launched.append(time.perf_counter() - began)

        engine.runner.launch = timed

    def _use(self, pieces: bool) -> None:
        """Run steps with prompts in captured pieces, or not."""
        self.engine.runner.use([way for way in self._ways if pieces or not isinstance(way, MixedSteps)])

    def submit(self, rows: int, max_tokens: int = 1) -> None:
        ids = Batch("mixed", 1, rows, 2).prompts(self.info.tokenizer_size, self._words)[0]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.submit(admit(ids, params, self.info, id=f"r{next(self._numbers)}", arrival=time.monotonic()))

    def steps(self, rows: int, pieces: bool, num: int = STEPS) -> tuple[float, float]:
        """Milliseconds of a step with a new prompt of ``rows`` tokens, and of its launch on the host."""
        self._use(pieces)
        for _ in range(3):
            self.submit(rows)
            self.engine.step()
        torch.cuda.synchronize()
        self.launched.clear()
        began = time.perf_counter()
        for _ in range(num):
            self.submit(rows)
            self.engine.step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / num, 1e3 * statistics.median(self.launched)

    def alone(self, rows: int, pieces: bool) -> float:
        """Milliseconds from a prompt to its token on an idle engine."""
        self._use(pieces)
        began = time.perf_counter()
        self.submit(rows)
        while self.engine.has_work():
            self.engine.step()
        return 1e3 * (time.perf_counter() - began)


def way(pieces: bool) -> str:
    return "pieces" if pieces else "kernels"


def measure(report: Report, bench: Bench, rows: list[int], batch: int, rounds: int) -> None:
    both = [(n, pieces) for n in rows for pieces in (False, True)]
    for n, pieces in both:  # compiles
        bench.alone(n, pieces)
    alone = {(n, pieces): [bench.alone(n, pieces) for _ in range(5)] for n, pieces in both}
    for _ in range(batch):
        bench.submit(512, 12000)
    for _ in range(24):
        bench.engine.step()
    for n, pieces in both:
        bench.steps(n, pieces)
    found: dict[tuple[int, bool], list[tuple[float, float]]] = {key: [] for key in both}
    for _ in range(rounds):
        for n, pieces in both:
            found[n, pieces].append(bench.steps(n, pieces))
    for n, pieces in both:
        steps, launches = zip(*found[n, pieces])
        taken = {"step_ms": steps, "launch_ms": launches, "alone_ms": alone[n, pieces]}
        metrics = {name: round(statistics.median(values), 3) for name, values in taken.items()}
        report.add(f"{way(pieces)}-{n}", {"batch": batch, "prompt": n}, metrics)
    report.ratios = ratios_of(report.arms, [(f"pieces-{n}", f"kernels-{n}") for n in rows])


def profile_host(bench: Bench, rows: int) -> None:
    """Print where the host spends the time of a launch."""
    for pieces in (True, False):
        profiler = cProfile.Profile()
        profiler.runcall(bench.steps, rows, pieces)
        print(f"--- {way(pieces)}, prompts of {rows}")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--batch", type=int, default=32, help="decodes of every step")
    parser.add_argument("--rows", default="16,64,256,512,768,1024", help="tokens of the prompts, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host", action="store_true", help="print where the host spends the time of a launch")


def run(options: argparse.Namespace) -> int:
    rows, report = (
        [int(n) for n in options.rows.split(",")],
        Report(f"mixed-{options.shape}-{options.batch}", options.output),
    )
    with shape_folder(options.shape) as folder:
        config = EngineConfig.of(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            served_model_name=options.shape,
            max_model_len=16384,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.85,
        )
        with LLM(config=config) as llm:
            bench = Bench(llm.engine, llm.info)
            bench.alone(16, True)
            began, captured = time.perf_counter(), 0
            while llm.engine.idle():
                captured += 1
            left = torch.cuda.mem_get_info()[0] >> 20
            print(f"{captured} captures in {time.perf_counter() - began:.1f} s, {left} MiB left", flush=True)
            mixed = bench.engine.runner.way(MixedSteps)
            print(f"{len(mixed._ready)} sizes up to {mixed.sizes[-1]} of mixed steps", flush=True)
            measure(report, bench, rows, options.batch, options.rounds)
            if options.host:
                profile_host(bench, rows[0])
    return report.end()
