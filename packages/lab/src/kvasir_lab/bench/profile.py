"""``kvasir bench profile``: where the time of a decode step goes: kernels by time, and the share in which the GPU is
idle.

With ``mixed`` every step also computes a prompt of so many tokens. Attention, at least, is then launched kernel by
kernel; the idle share shows from how many rows on the launches cost nothing.

``step_ms`` is the wall time of steps without a profiler. Busy and idle times come from other steps, under
``torch.profiler``. They share one timeline, that of the GPU from the first kernel of those steps to the end of the
last: the GPU is busy while any kernel runs, and idle otherwise. ``gpu_step_ms`` is the length of that timeline a step.

The profiler lengthens launches on the host and kernels on the GPU. Its cost is ``gpu_step_ms`` minus
``unprofiled_step_ms``, the wall time of the rounds just before and just after, since steps grow with their contexts.
Where kernels are launched one by one, the idle share is therefore an upper bound.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.bench.loaded import load_engine
from kvasir.bench.offline import described
from kvasir.bench.result import arm, finish, result, spread
from kvasir.bench.workloads import Batch, shape_folder
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.types import SamplingParams

if TYPE_CHECKING:
    from kvasir.engine.engine import Engine

# Steps until graphs are captured and clocks settle, timed steps in each round, and steps under the profiler.
WARMUP, TIMED, TRACED = 48, 32, 32
# Most kernels in the result.
SHOWN = 40
# Most characters of a kernel's name.
NAME = 90


def run(
    config: EngineConfig,
    *,
    shape: str | None,
    batch: int,
    prompt: int,
    repeats: int,
    output: Path | None,
    commit: str | None,
    mixed: int = 0,
) -> None:
    config = config.replace(enable_prefix_caching=False)
    with contextlib.ExitStack() as stack:
        if shape:
            folder = stack.enter_context(shape_folder(shape))
            config = config.replace(
                model=folder, load_format="dummy", skip_tokenizer_init=True, served_model_name=shape
            )
        metrics = measure(config, batch, prompt, repeats, mixed)
    name = f"profile-{shape or config.model.model or 'embedded'}-{batch}x{prompt}" + (f"+{mixed}" if mixed else "")
    finish(
        result(
            name,
            [arm("kvasir", described(config, shape) | {"batch": batch, "prompt": prompt, "mixed": mixed}, metrics)],
        ),
        output,
        commit,
    )


def measure(config: EngineConfig, batch: int, prompt: int, repeats: int, mixed: int = 0) -> dict[str, Any]:
    """Metrics of a decode step of ``batch`` sequences after prompts of ``prompt`` tokens, and with a new prompt of
    ``mixed`` tokens in each step.

    Times are in milliseconds, those of kernels in microseconds.
    """
    import torch

    from kvasir.engine.start.build import choose_device

    steps = WARMUP + (repeats + 1) * TIMED + TRACED
    with load_engine(config) as llm:
        if prompt + steps + 8 > llm.info.max_model_len or batch + 3 * bool(mixed) > config.scheduler.max_num_seqs:
            raise ConfigError(
                f"{batch} prompts of {prompt} tokens and {steps + 8} steps do not fit: "
                f"the context is {llm.info.max_model_len}, max_num_seqs {config.scheduler.max_num_seqs}"
                + " (with --mixed, three are left free)"
                * bool(mixed)
            )
        engine, gpu = llm.engine, choose_device(config).type == "cuda"
        # Prompts would queue up, and decodes would wait while prompts fill whole steps.
        if mixed and batch + mixed > engine.steps.full_rows:
            raise ConfigError(
                f"{batch} decodes and a prompt of {mixed} tokens do not fit a step of {engine.steps.full_rows} rows: "
                "raise --max-num-batched-tokens, or lower --mixed"
            )
        # The first sequences decode while the last prompts are computed; none may end before the last step is measured.
        params = SamplingParams(
            temperature=0.0, max_tokens=llm.info.max_model_len - prompt, ignore_eos=True, detokenize=False
        )
        for i, ids in enumerate(Batch("profile", batch, prompt, 2).prompts(llm.info.tokenizer_size, random.Random(0))):
            engine.submit(admit(ids, params, llm.info, id=f"profile-{i}", arrival=time.monotonic()))
        _until_decoding(engine, batch)
        words, numbers = random.Random(1), count()

        def step() -> None:
            if mixed:
                ids = Batch("mixed", 1, mixed, 1).prompts(llm.info.tokenizer_size, words)[0]
                engine.submit(
                    admit(
                        ids,
                        SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
                        llm.info,
                        id=f"mixed-{next(numbers)}",
                        arrival=time.monotonic(),
                    )
                )
            engine.step()

        def timed() -> float:
            _wait(gpu)
            started = time.perf_counter()
            _repeat(step, TIMED)
            _wait(gpu)
            return 1000 * (time.perf_counter() - started) / TIMED

        _repeat(step, WARMUP)
        walls = [timed() for _ in range(repeats)]
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * gpu
        with torch.profiler.profile(activities=activities) as profiler:
            _repeat(step, TRACED)
            _wait(gpu)
        beside = [walls[-1], timed()]
    wall = spread(walls)
    metrics: dict[str, Any] = {"step_ms": wall, "decode_tok_s": round(1000 * batch / wall["median"], 1)}
    if gpu:
        kernels = [
            (e.name, e.time_range.start, e.time_range.end)
            for e in profiler.events()
            if str(e.device_type).endswith("CUDA")
        ]
        metrics |= {"unprofiled_step_ms": spread(beside)} | on_the_gpu([(start, end) for _, start, end in kernels])
        taken = [(name, end - start) for name, start, end in kernels]
    else:
        taken = [(e.name, e.self_cpu_time_total) for e in profiler.events()]
    return metrics | table(taken)


def _until_decoding(engine: Engine, batch: int) -> None:
    """Step until every sequence has its first token."""
    begun: set[str] = set()
    while len(begun) < batch:
        for event in engine.step():
            if event.kind == "error":
                raise ConfigError(f"a request failed: {event.message}")
            if event.token_ids:
                begun.add(event.request_id)


def _repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def _wait(gpu: bool) -> None:
    if gpu:
        import torch

        torch.cuda.synchronize()


def on_the_gpu(kernels: list[tuple[float, float]]) -> dict[str, float]:
    """Metrics of the profiled steps, from the times in microseconds at which their kernels ran."""
    if not kernels:
        raise ConfigError("the profiler saw no kernel: this machine does not permit profiling of the GPU")
    busy, idle = timeline(kernels)
    return {
        "gpu_busy_ms": round(busy / 1000 / TRACED, 4),
        "gpu_step_ms": round((busy + idle) / 1000 / TRACED, 4),
        "gpu_idle_share": round(idle / (busy + idle), 4),
        "kernels_per_step": round(len(kernels) / TRACED, 1),
    }


def timeline(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Time covered by some interval, and time covered by none, between the first start and the last end.

    Both are sums of consecutive pieces: neither can be negative, and overlap counts once.
    """
    busy = idle = 0.0
    until = min(intervals)[0]
    for start, end in sorted(intervals):
        if start > until:
            idle, until = idle + start - until, start
        if end > until:
            busy, until = busy + end - until, end
    return busy, idle


def table(taken: list[tuple[str, float]]) -> dict[str, float]:
    """Microseconds a step by kernel (``us.NAME xCALLS``), the longest first; ``us.other`` is the rest."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, us in taken:
        times[name[:NAME]] += us / TRACED
        calls[name[:NAME]] += 1
    ordered = sorted(times, key=times.__getitem__, reverse=True)
    found = {f"us.{name} x{calls[name] / TRACED:g}": round(times[name], 2) for name in ordered[:SHOWN]}
    return found | ({"us.other": round(sum(times[n] for n in ordered[SHOWN:]), 2)} if len(ordered) > SHOWN else {})
