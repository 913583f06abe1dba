"""Compare trees of a draft model: dynamic ones (DySpec) with fixed ones of as many nodes, chains, and drawn ones.

    python -m kvasir_lab.studies tree_study RESULT.json [--model base] [--draft nano] [--count 3] [--nodes 8 24 64]
    python -m kvasir_lab.studies tree_study RESULT.json --drafter ppd:rows=8 --drafter ppd:rows=24
        [--nodes 64]    # these instead

Every proposal is verified, on problems of four tasks, four at once, on a CPU. Counted, not timed: tokens a
verification, and tokens a forward of a sequence. ``drawn`` is DySpec as published, by multi-round rejection: it keeps
the distribution, and its texts differ.
"""

from __future__ import annotations

from itertools import product
from typing import Annotated

from kvasir import LLM
from kvasir_lab.bench.speculation import TASKS, task_loads
from kvasir_lab.study import Arms, Report, study

DEPTH = 8


def arms_of(nodes: list[int]) -> list[tuple[str, str, int, float]]:
    """Name, options of the drafter, most nodes and temperature of each arm."""
    found = []
    for temperature in (0.0, 1.0):
        found.append((f"chain-T{temperature:g}", "", DEPTH, temperature))
        for most in nodes:
            threshold = f",threshold={0.3 / most:.4f}"  # low enough that the trees are full
            found.append((f"dyspec-{most}-T{temperature:g}", f",tree=dyspec{threshold}", most, temperature))
            found.append((f"fixed-{most}-T{temperature:g}", ",tree=fixed", most, temperature))
            if temperature:
                found.append((f"drawn-{most}-T1", f",tree=dyspec,max_accept=true{threshold}", most, temperature))
    found.append(("blocks-T1", ",max_accept=true", DEPTH, 1.0))
    return found


@study("trees-{model}")
def main(
    report: Report,
    *,
    model: str = "base",
    draft: str = "nano",
    count: int = 3,
    nodes: Annotated[tuple[int, ...], "default: 8 24 64; with --drafter 64"] = (),
    drafter: tuple[str, ...] = (),
    temperature: tuple[float, ...] = (0.0, 1.0),
    without: Annotated[tuple[str, ...], "names of arms that are left out"] = (),
) -> Arms:
    nodes = tuple(nodes) or ((64,) if drafter else (8, 24, 64))
    chosen = [
        (name, f"draft_model:model={draft},max_depth={DEPTH},width=8{extra}", most, t)
        for name, extra, most, t in arms_of(nodes)
    ]
    if drafter:
        size = "" if nodes == (64,) else "-{}"
        chosen = [
            (f"{name}{size.format(most)}-T{t:g}", name, most, t)
            for t, most, name in product((0.0, 1.0), nodes, drafter)
        ]
    for name, spec, most, t in chosen:
        if t not in temperature or name in without:
            continue
        load = task_loads(model, TASKS, count, 1, 160, t)[0]
        with LLM(
            model, device="cpu", drafter=spec, draft_control="fixed", max_draft_tokens=most, max_num_seqs=4
        ) as llm:
            outs = llm.generate([{"prompt_token_ids": p} for p in load.prompts], load.params)
            stats = llm.engine.stats()
        metrics = {
            "tokens": sum(len(out.outputs[0].token_ids) for out in outs),
            "verifications": stats.drafts,
            "nodes": round(stats.drafted_tokens / max(1, stats.drafts), 2),
            "tokens_per_verification": round(1 + stats.accepted_tokens / max(1, stats.drafts), 4),
            "tokens_per_sequence_forward": round(stats.generation_tokens / max(1, stats.forwards), 4),
        }
        yield name, {"drafter": spec, "nodes": most, "temperature": t}, metrics
