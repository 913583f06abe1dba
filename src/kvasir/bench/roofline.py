"""Upper limits of the machine: measured rates, and from them and the model's shape a limit for each workload.

The rates are measured in a process of their own (``python -m kvasir.bench.roofline [cpu|cuda] DTYPE``), which gives the
device's memory back when it ends. A figure above its limit is a fault of the benchmark. Data that a CPU's caches hold
need not come from memory; where they hold all that a decode step reads, no limit is given.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvasir.bench.worker import environment
from kvasir.bench.workloads import Batch
from kvasir.engine.start.sizing import token_bytes
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models import cost
from kvasir.models.spec import ModelSpec


def machine_rates(device: str, dtype: str) -> dict[str, float]:
    """Rates of the machine: {"copy_bytes_s", "matmul_flop_s", "dtype_bytes"}, and "cache_bytes" for a CPU.

    "copy_bytes_s" counts bytes read and bytes written in a second.
    """
    done = subprocess.run(
        [sys.executable, "-m", "kvasir.bench.roofline", device, dtype],
        capture_output=True,
        text=True,
        env=environment(),
    )
    if done.returncode:
        raise ConfigError(f"the machine's rates could not be measured: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def limits(
    spec: ModelSpec,
    batches: list[Batch],
    rates: dict[str, float],
    kv_share: float = 1.0,
    weight_share: float = 1.0,
) -> dict[str, float]:
    """Tokens a second that no engine can exceed, by metric. Each is set by the bytes moved or the operations done,
    whichever takes longer.

    ``kv_share`` is the number of bytes of keys and values relative to a plain cache, ``weight_share`` that of an
    element of the matrices relative to plain weights.
    """
    width = int(rates["dtype_bytes"])
    cached = rates.get("cache_bytes", 0)
    head = 2 * spec.vocab_size * spec.hidden_size  # operations of one row's logits
    found = {}
    for b in batches:
        context = b.prompt + b.output // 2
        weights = cost.touched_params(spec, b.batch) * width * weight_share
        moved = weights + b.batch * kv_share * cost.kv_bytes(spec, context, width)
        computed = b.batch * cost.flops_per_token(spec, context)
        if moved > cached:
            found[f"{b.name}.decode_tok_s"] = b.batch / max(
                (moved - cached) / rates["copy_bytes_s"], computed / rates["matmul_flop_s"]
            )
        else:
            log.info(
                "%s: what a decode step reads fits the CPU's caches (%.0f MiB), so no limit is given",
                b.name,
                cached / 2**20,
            )
        computed = b.prompt * (cost.flops_per_token(spec, max(1, b.prompt // 2)) - head) + head
        moved = max(0, cost.touched_params(spec, b.batch * b.prompt) * width * weight_share - cached)
        found[f"{b.name}.prefill_tok_s"] = (
            b.batch * b.prompt / max(b.batch * computed / rates["matmul_flop_s"], moved / rates["copy_bytes_s"])
        )
    return {name: round(value, 1) for name, value in found.items()}


def weight_share(config: dict[str, Any], width: int, weights: str = "auto") -> float:
    """Bytes of an element of a model's matrices, relative to numbers of ``width`` bytes. ``weights``: the setting."""
    from kvasir.models.quantisation import reader_of

    if weights == "plain" or weights == "auto" and reader_of(config) is None:
        return 1.0
    import torch

    from kvasir.models.loader import element_bytes

    return element_bytes(config, {2: torch.bfloat16, 4: torch.float32}[width], weights) / width


def kv_share(spec: ModelSpec, codec: str, width: int) -> float:
    """Bytes of a token's keys and values in ``codec``, relative to a plain cache of numbers of ``width`` bytes."""
    return sum(token_bytes(spec.cache_groups(), codec, width).values()) / sum(
        cost.kv_bytes_per_token(spec, width).values()
    )


def cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the CPU's last-level caches together; 0 where the system does not tell."""
    found: dict[int, dict[str, int]] = {}  # by level, then by the CPUs that share them
    for size in cpus.glob("cpu[0-9]*/cache/index*/size"):  # some systems list caches without sizes
        level, whose = (size.with_name(name).read_text().strip() for name in ("level", "shared_cpu_list"))
        found.setdefault(int(level), {})[whose] = int(size.read_text().strip().removesuffix("K")) << 10
    return sum(found[max(found)].values()) if found else 0


def measure(device: str, dtype: str) -> dict[str, float]:
    """Best rates of a few rounds: a copy far larger than the caches, and a square matmul in the model's type."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = device == "cuda"
    kind = getattr(torch, dtype if dtype != "auto" else "bfloat16" if gpu else "float32")
    size, side = (2 << 30, 8192) if gpu else (1 << 27, 1024)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, dtype=kind, device=device)
    b = torch.randn(side, side, dtype=kind, device=device)

    def best(run: Any, rounds: int) -> float:
        seconds = []
        for _ in range(rounds):
            if gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    return {
        "copy_bytes_s": 2 * size / best(lambda: target.copy_(source), 8),
        "matmul_flop_s": 2 * side**3 / best(lambda: a @ b, 8),
        "dtype_bytes": kind.itemsize,
    } | ({} if gpu else {"cache_bytes": cache_bytes()})


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:3])))
