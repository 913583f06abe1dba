"""On a Hopper GPU: all that a layer does after attention in one kernel, checked, and whole decode steps with it and without, in turns.

    python tools/gpu_after.py RESULT.json [--seconds 95]

First the kernel over its grid; then for each shape and number of rows the logits of a step with each config against those of the step as
it is, replays of one graph against each other, and the times of the graphs, which take turns. The file is written after each case. What
does not compile or run is said, and the rest goes on; after ``--seconds`` the process ends whatever it does, for a barrier that is never
passed would hang for good. Exit status 1 when something was wrong.
"""

# ruff: noqa: B023  (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir.bench.result import arm, as_json, result  # noqa: E402
from kvasir.bench.workloads import SHAPES  # noqa: E402
from kvasir.kernels import after_attention as after  # noqa: E402
from kvasir.kernels.after_attention import Config, Tiling  # noqa: E402
from tools import gpu_fused  # noqa: E402
from tools.gpu_decode import in_turns  # noqa: E402

BF16, PROCESSES, CONTEXT, SHARES = torch.bfloat16, 14, 1087, 5
CHECK_SECONDS = 50  # all of compiling and checking
WIDE = Config(Tiling(64, 256, 8), Tiling(64, 1024), Tiling(64, 512, 8), 8, 8)
MANY = Config(Tiling(64, 256, 8), Tiling(64, 256), Tiling(64, 128, 8), 8)
FEW_CONFIGS = {"wide": WIDE, "wide, no prefetch": replace(WIDE, prefetch=False),
               "half o and down": replace(WIDE, o=Tiling(32, 512, 4), down=Tiling(32, 1024, 4)),
               "unsplit": replace(WIDE, o=Tiling(16, 2048), down=Tiling(16, 1024)),
               "half": Config(Tiling(32, 512, 4), Tiling(32, 1024), Tiling(32, 1024, 4), 8, 8),
               # The next kernel starts early where these leave it registers and shared memory.
               "light": Config(Tiling(64, 256, 8), Tiling(32, 512), Tiling(64, 256, 8), 8, 8),
               "small": Config(Tiling(64, 256, 8), Tiling(64, 256), Tiling(64, 128, 8), 8, 8),
               "warp groups": Config(Tiling(64, 256, 8), Tiling(64, 512), Tiling(64, 512, 8), 8)}
SLICED = Config(Tiling(64, 256, 8), Tiling(64, 512), Tiling(64, 512, 8), 8, 8)
MANY_CONFIGS = {"many": MANY, "many, no prefetch": replace(MANY, prefetch=False), "many, larger down": replace(MANY, down=Tiling(64, 256, 8)),
                "many, half o and down": replace(MANY, o=Tiling(32, 512, 4), down=Tiling(32, 256, 4))}
LLAMA = Config(Tiling(64, 256, 2), Tiling(64, 256), Tiling(64, 256, 2), 8, 8, prefetch=False)
CASES = {("qwen3-0.6b", 8): FEW_CONFIGS, ("qwen3-0.6b", 64): MANY_CONFIGS, ("qwen3-0.6b", 16): FEW_CONFIGS,
         ("qwen3-0.6b", 32): {"sliced": SLICED, **MANY_CONFIGS}, ("llama-8b", 8): {"large": LLAMA}}


class Compiled:
    """In place of a kernel: what is launched is compiled only."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments, **named: self.kernel.warmup(*arguments, grid=grid, **named)


def warm_config(shape: str, rows: int, config: Config) -> None:
    """Fill the kernel cache on disk."""
    s = SHAPES[shape]
    e, f, a = s["hidden_size"], s["intermediate_size"], s["num_attention_heads"] * s["head_dim"]
    x, h, o, gate_up, down, scale = (torch.empty(*n, dtype=BF16, device="cuda") for n in ((rows, a), (rows, e), (e, a), (2 * f, e), (e, f), (e,)))
    with mock.patch.object(after, "_after_attention", Compiled(after._after_attention)):
        after.after_attention(x, h, o, (scale, 1e-6), gate_up, down, "silu", config, after.counters(e, "cuda"))


def warm_step(shape: str, rows: int) -> None:
    """The kernels of a step as it is, from a model of one layer."""
    with mock.patch.dict(SHAPES[shape], num_hidden_layers=1):
        gpu_fused.Model(shape).step([(CONTEXT, 1)] * rows)()
    torch.cuda.synchronize()


def prepare() -> tuple[list[dict], bool]:
    """Compile, and check the grid, on all cores: what was found, and whether the kernel comes to an end."""
    until = time.monotonic() + CHECK_SECONDS
    processes = ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn"))
    checks = [processes.submit(gpu_fused.check_share, "after_attention", BF16, share, SHARES) for share in range(SHARES)]
    jobs = {(shape, rows): processes.submit(warm_step, shape, rows) for shape, rows in CASES}
    jobs |= {(*case, name): processes.submit(warm_config, *case, config) for case, configs in CASES.items() for name, config in configs.items()}
    counts, worst, lines, ended = 0, 0.0, [], True
    for share, job in enumerate(checks):
        try:
            count, error, failed = job.result(max(0.1, until - time.monotonic()))
            counts, worst, lines = counts + count, max(worst, error), lines + failed
        except Exception as e:
            lines.append(f"share {share} does not end: {type(e).__name__}: {str(e)[:200]}")
            ended = False
    for name, job in jobs.items():
        try:
            job.result(max(0.1, until - time.monotonic()))
        except Exception as e:
            print("does not compile:", name, type(e).__name__, str(e)[:300], flush=True)
    processes.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():  # one that hangs would keep the GPU
        process.kill()
    found = arm("check after_attention", {"dtype": str(BF16)}, {"cases": counts, "failed": len(lines), "worst_error": worst})
    print(found["name"], found["metrics"], *lines, sep="\n  ", flush=True)
    return [found], ended


def with_config(run, config: Config | None):
    """The step with every layer on the kernel; without one, on none."""
    def patched() -> torch.Tensor:
        with mock.patch.object(after, "choose", lambda *_: config):
            return run()
    return patched


def time_case(made: gpu_fused.Model, shape: str, rows: int, configs: dict[str, Config]) -> list[dict]:
    run, arms = made.step([(CONTEXT, 1)] * rows), []
    runs = {"as it is": with_config(run, None), **{name: with_config(run, config) for name, config in configs.items()}}
    logits, same = {}, {}
    for name, step in list(runs.items()):
        try:
            logits[name] = step().float()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            kept = []
            for _ in range(10):
                graph.replay()
                kept.append(out.clone())
            same[name] = all(torch.equal(logits[name], k.float()) for k in kept)
            del graph, out, kept
        except Exception as e:
            print("does not run:", shape, rows, name, type(e).__name__, str(e)[:300], flush=True)
            arms.append(arm(f"step {shape} {rows} x 1k", {"variant": name, "config": str(configs.get(name))}, {"failed": 1}))
            del runs[name]
    most = float(logits["as it is"].abs().max())
    for name, spent in sorted(in_turns(runs).items(), key=lambda item: item[1]):
        gap = float((logits[name] - logits["as it is"]).abs().max()) / most
        metrics = {"us": round(spent * 1e6, 1), "tokens_per_s": round(rows / spent, 1), "gap": round(gap, 4),
                   "failed": int(not gap < 0.15 or not same[name])}
        arms.append(arm(f"step {shape} {rows} x 1k", {"variant": name, "config": str(configs.get(name))}, metrics))
        print(f"step {shape:10} {rows:3} {name:22}", metrics, "" if same[name] else "replays differ", flush=True)
    return arms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=95)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    torch.manual_seed(0)
    started = time.monotonic()
    arms, ended = prepare()
    options.output.write_text(as_json(result("gpu_after", arms)))
    print(f"prepared after {time.monotonic() - started:.0f} s", flush=True)
    shape = made = None
    for (name, rows), configs in CASES.items() if ended else ():
        try:
            if name != shape:
                made = None
                torch.cuda.empty_cache()
                shape, made = name, gpu_fused.Model(name)
            arms += time_case(made, name, rows, configs)
        except Exception as e:
            print("does not run:", name, rows, type(e).__name__, str(e)[:300], flush=True)
            arms.append(arm(f"step {name} {rows} x 1k", {}, {"failed": 1}))
        options.output.write_text(as_json(result("gpu_after", arms)))
        print(f"{name} {rows} after {time.monotonic() - started:.0f} s", flush=True)
    failed = sum(a["metrics"].get("failed", 0) for a in arms)
    print("failed checks:", failed, flush=True)
    os._exit(1 if failed else 0)  # a process whose kernel never ends would be waited for


if __name__ == "__main__":
    assert torch.cuda.is_available(), "needs a GPU"
    sys.exit(main())
