"""On a GPU: steps that mix a prompt with decodes, in captured pieces and launched kernel by kernel, in turns in one process.

    python tools/gpu_mixed.py RESULT.json [--shape llama-8b] [--batch 32] [--rows 16,64,256,512,768,1024] [--rounds 5] [--host]

Every step computes a new prompt of so many tokens beside the decodes: ``step_ms`` is its wall time with overlap, ``launch_ms`` the host's
share that launches it, ``alone_ms`` the time from a prompt's arrival at an idle engine to its only token. ``--host`` prints where the host
spends the time of a launch.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from kvasir.api.llm import LLM  # noqa: E402
from kvasir.bench.result import arm, as_json, ratios_of, result  # noqa: E402
from kvasir.bench.workloads import Batch, shape_folder  # noqa: E402
from kvasir.client.admission import admit  # noqa: E402
from kvasir.config import EngineConfig  # noqa: E402
from kvasir.engine.mixed_steps import MixedSteps  # noqa: E402
from kvasir.types import SamplingParams  # noqa: E402

STEPS = 12  # of a round


class Bench:
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
        self.engine.runner.use([way for way in self._ways if pieces or not isinstance(way, MixedSteps)])

    def submit(self, rows: int, max_tokens: int = 1) -> None:
        ids = Batch("mixed", 1, rows, 2).prompts(self.info.tokenizer_size, self._words)[0]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.submit(admit(ids, params, self.info, id=f"r{next(self._numbers)}", arrival=time.monotonic()))

    def steps(self, rows: int, pieces: bool, num: int = STEPS) -> tuple[float, float]:
        """Milliseconds of a step with a new prompt of ``rows`` tokens, and of its launch."""
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
        """Milliseconds from a prompt to its token, nobody else there."""
        self._use(pieces)
        began = time.perf_counter()
        self.submit(rows)
        while self.engine.has_work():
            self.engine.step()
        return 1e3 * (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rows", default="16,64,256,512,768,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host", action="store_true")
    options = parser.parse_args()
    numbers, arms = [int(n) for n in options.rows.split(",")], []
    with (
        shape_folder(options.shape) as folder,
        LLM(
            config=EngineConfig.of(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                served_model_name=options.shape,
                max_model_len=16384,
                enable_prefix_caching=False,
                gpu_memory_utilization=0.85,
            )
        ) as llm,
    ):
        bench = Bench(llm.engine, llm.info)
        bench.alone(16, True)
        began, captured = time.perf_counter(), 0
        while llm.engine.idle():
            captured += 1
        print(
            f"{captured} captures in {time.perf_counter() - began:.1f} s, {torch.cuda.mem_get_info()[0] >> 20} MiB left",
            flush=True,
        )
        mixed = bench.engine.runner.way(MixedSteps)
        print(f"{len(mixed._ready)} sizes up to {mixed.sizes[-1]} of mixed steps", flush=True)
        for rows in numbers:  # compiles
            bench.alone(rows, False), bench.alone(rows, True)
        alone = {
            (rows, pieces): [bench.alone(rows, pieces) for _ in range(5)]
            for rows in numbers
            for pieces in (False, True)
        }
        for _ in range(options.batch):
            bench.submit(512, 12000)
        for _ in range(24):
            llm.engine.step()
        found: dict[tuple[int, bool], list[tuple[float, float]]] = {}
        for rows in numbers:
            for pieces in (True, False):
                bench.steps(rows, pieces)
        for _ in range(options.rounds):
            for rows in numbers:
                for pieces in (True, False):
                    found.setdefault((rows, pieces), []).append(bench.steps(rows, pieces))
        for rows in numbers:
            for pieces in (False, True):
                steps, launches = zip(*found[rows, pieces])
                taken = {"step_ms": steps, "launch_ms": launches, "alone_ms": alone[rows, pieces]}
                metrics = {name: round(statistics.median(values), 3) for name, values in taken.items()}
                arms.append(
                    arm(
                        f"{'pieces' if pieces else 'kernels'}-{rows}", {"batch": options.batch, "prompt": rows}, metrics
                    )
                )
                print(arms[-1]["name"], metrics, flush=True)
        if options.host:
            for pieces in (True, False):
                profiler = cProfile.Profile()
                profiler.runcall(bench.steps, numbers[0], pieces)
                print(f"--- {'pieces' if pieces else 'kernels'}, prompts of {numbers[0]}")
                pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    outcome = result(f"mixed-{options.shape}-{options.batch}", arms)
    outcome["ratios"] = ratios_of(arms, [(f"pieces-{rows}", f"kernels-{rows}") for rows in numbers])
    options.output.write_text(as_json(outcome))
    return 0


if __name__ == "__main__":
    assert torch.cuda.is_available(), "needs a GPU"
    sys.exit(main())
