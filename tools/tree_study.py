"""Compare trees of a draft model: dynamic ones (DySpec) with fixed ones of as many nodes, chains, and drawn ones.

    python tools/tree_study.py RESULT.json [--model base] [--draft nano] [--count 3] [--nodes 8 24 64]
    python tools/tree_study.py RESULT.json --drafter ppd:rows=8 --drafter ppd:rows=24 [--nodes 64]    # these instead

Every proposal is verified, on problems of four tasks, four at once, on a CPU. Counted, not timed: tokens a
verification, and tokens a forward of a sequence. ``drawn`` is DySpec as published, by multi-round rejection: it keeps
the distribution, and its texts differ.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kvasir import LLM  # noqa: E402
from kvasir.bench.result import arm, result, write_json  # noqa: E402
from kvasir.bench.speculation import TASKS, task_loads  # noqa: E402

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="base")
    parser.add_argument("--draft", default="nano")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--nodes", type=int, nargs="+", help="default: 8 24 64; with --drafter 64")
    parser.add_argument("--drafter", action="append")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--without", nargs="+", default=[], help="names of arms that are left out")
    options = parser.parse_args()
    arms, nodes = [], options.nodes or ([64] if options.drafter else [8, 24, 64])
    chosen = [
        (name, f"draft_model:model={options.draft},max_depth={DEPTH},width=8{extra}", most, temperature)
        for name, extra, most, temperature in arms_of(nodes)
    ]
    if options.drafter:
        size = "" if nodes == [64] else "-{}"
        chosen = [
            (f"{name}{size.format(most)}-T{t:g}", name, most, t)
            for t, most, name in product((0.0, 1.0), nodes, options.drafter)
        ]
    chosen = [one for one in chosen if one[3] in options.temperature and one[0] not in options.without]
    for name, drafter, most, temperature in chosen:
        load = task_loads(options.model, TASKS, options.count, 1, 160, temperature)[0]
        with LLM(
            options.model, device="cpu", drafter=drafter, draft_control="fixed", max_draft_tokens=most, max_num_seqs=4
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
        arms.append(arm(name, {"drafter": drafter, "nodes": most, "temperature": temperature}, metrics))
        print(name, metrics, flush=True)
        write_json(options.output, result(f"trees-{options.model}", arms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
