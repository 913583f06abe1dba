"""Swap a drafter's weights many times under load: changed tokens (there must be none) and the time of a swap.

Usage: python -m kvasir_lab.studies swap_times [OUT.json] --model MODEL --drafter eagle:model=new --swaps 100 --batch 16

Every swap alternates between the first weights and random ones. A swap is timed on the device from its first copy to
its last, and on the host until the copies are launched. Tokens are compared with those of a run without swaps; outside
exact mode ties may end differently, which is said. A run that is cut keeps the host's times of every tenth swap.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch

from kvasir.bench.result import arm
from kvasir.client.admission import admit
from kvasir.config import EngineConfig
from kvasir.engine.engine import Engine
from kvasir.speculation.versions import Versions, copy
from kvasir.types import SamplingParams
from kvasir_lab.study import Report, study


def replies(engine: Engine, batch: int, tokens: int, every: int = 0, swap=lambda: None) -> dict[str, list[int]]:
    """Run ``batch`` requests, with a swap behind every ``every`` steps (0: none). Returns their tokens."""
    found: dict[str, list[int]] = {}
    for i in range(batch):
        params = SamplingParams(temperature=1.0 if i % 2 else 0.0, seed=i, max_tokens=tokens, ignore_eos=True)
        prompt = [300 + (7 * i + 3 * j) % 900 for j in range(64)]
        engine.submit(admit(prompt, params, engine.info, id=f"r{i}", arrival=0.0, encode=None))
    steps = 0
    while engine.has_work():
        for event in engine.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
        steps += 1
        if every and steps % every == 0:
            swap()
    return found


@study("swaps-{model}")
def main(
    report: Report,
    *,
    model: str = "",
    drafter: str = "eagle:model=new",
    swaps: int = 100,
    batch: int = 16,
    every: Annotated[int, "steps between two swaps"] = 7,
    exact: Annotated[bool, "exact mode, in which no tie may differ either"] = False,
) -> None:
    report.case = f"swaps-{Path(model).name or 'embedded'}"
    engine = Engine(
        EngineConfig.of(model=model, drafter=drafter, draft_control="fixed", batch_invariant=exact, max_num_seqs=64)
    )
    live = engine.proposals.drafting.drafter.weights()
    versions = Versions(live)
    copy(versions._candidate, {name: torch.randn_like(tensor) for name, tensor in live.items()})
    versions.candidate = 1
    cuda = next(iter(live.values())).device.type == "cuda"
    host, device, new = [], [], [True]
    size = sum(tensor.nbytes for tensor in live.values())
    config = {"drafter": drafter, "batch": batch, "every": every, "exact": exact}

    def swap() -> None:
        if len(host) == swaps:
            return
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        begun = time.perf_counter()
        if cuda:
            marks[0].record()
        versions.serve(new[0])
        if cuda:
            marks[1].record()
        host.append(time.perf_counter() - begun)
        device.append(marks)
        new[0] = not new[0]
        if len(host) % 10 == 0:
            metrics = {"swaps": len(host), "bytes": size, "host_ms_most": round(1e3 * max(host), 4)}
            report.replace([arm("swaps", config, metrics)])

    # Accepted drafts make replies shorter in steps; what is left after the last swap runs without.
    tokens = min(3 * every * swaps, engine.info.max_model_len - 65)
    right = replies(engine, batch, tokens)
    swapped = replies(engine, batch, tokens, every, swap)
    if cuda:
        torch.cuda.synchronize()
    spent = [a.elapsed_time(b) for a, b in device] if cuda else [1e3 * seconds for seconds in host]
    engine.close()
    report.arms = []
    metrics = {
        "swaps": len(host),
        "bytes": size,
        "tokens": sum(map(len, right.values())),
        "changed_tokens": sum(a != b for name in right for a, b in zip(right[name], swapped[name])),
        "lost_requests": sum(len(right[name]) != len(swapped.get(name, [])) for name in right),
        "ms_mean": round(sum(spent) / len(spent), 4),
        "ms_most": round(max(spent), 4),
        "host_ms_most": round(1e3 * max(host), 4),
    }
    report.add("swaps", config, metrics)
