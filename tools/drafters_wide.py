"""Measure drafters on `base` at the cost of a large model, under `goodput`: one engine a drafter, three batch sizes.

    python tools/drafters_wide.py RESULT.json [--size 8b] [--batch 1 4 16] [--exits FOLDER] [--drafter NAME ...]
    python tools/drafters_wide.py RESULT.json --idlm ADAPTER --batch 1 4 16 64

Needs an NVIDIA GPU and some 40 GB of disk in --folder. `base` is widened with its layers spread
(`widen_checkpoint.py`), so that an exit costs its share of the layers; heads are widened to fit, and `nano` drafts as
it is. --exits: a checkpoint of `kvasir train exits --target base`, for `layer_skip` against its static exits; its plain
run is its own. --drafter measures these alone. --idlm: an adapter of `kvasir train drafter idlm`, measured alone, on
`base` whose layers come first in the large model, since its adapter is widened with them. Requests come in groups of
the batch size. Results are written as they come.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from kvasir import LLM  # noqa: E402
from kvasir.bench.result import arm, result, save  # noqa: E402
from kvasir.bench.speculation import TASKS, draft_metrics, task_loads  # noqa: E402
from kvasir.models.checkpoint import resolve  # noqa: E402
from tools.widen_checkpoint import SIZES  # noqa: E402
from tools.widen_head import widen  # noqa: E402
from tools.widen_idlm import widen as widen_idlm  # noqa: E402

NODES = 24  # most drafts of a sequence and step
ROUNDS = 2  # measured rounds, after one that warms up
DYSPEC = "draft_model:model=nano,tree=dyspec,max_depth=6"
ARMS = (
    "suffix",
    "medusa",
    "ppd",
    "token_recycling",
    "token_recycling:tree=published",
    "layer_skip",
    "draft_model:model=nano",
    DYSPEC,
)


def widened(name: str, size: str, folder: Path, spread: bool = True) -> Path:
    """The folder of a widened checkpoint, made if it is not there."""
    out = folder / f"{Path(name).name}-{size}{'' if spread else '-first'}"
    if not (out / "config.json").exists():
        tool = [sys.executable, str(ROOT / "tools" / "widen_checkpoint.py")]
        subprocess.run([*tool, name, str(out), "--size", size, *(["--spread"] if spread else [])], check=True)
    return out


def spec_of(drafter: str, size: str, folder: Path) -> str:
    """The drafter's spec, with a widened head where it has one."""
    name, _, adapter = drafter.partition(":model=")
    if name == "idlm":
        out = folder / f"idlm-{size}"
        widen_idlm(Path(adapter), resolve("base"), out, SIZES[size])
        return f"idlm:model={out}"
    if drafter not in ("medusa", "ppd"):
        return drafter
    out = folder / f"{drafter}-{size}"
    if not (out / "config.json").exists():
        widen(drafter, "", resolve("base"), out, SIZES[size], spread=True)
    return f"{drafter}:model={out}"


def measure(model: Path, drafter: str, batches: list[int], known: dict[int, list[list[int]]]) -> dict[int, Any]:
    """Metrics by batch size. ``known``: the plain outputs by batch size, filled by the plain run."""
    found: dict[int, Any] = {}
    with LLM(
        str(model),
        drafter=drafter,
        max_draft_tokens=NODES,
        max_num_seqs=max(batches),
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as llm:
        for batch in batches:
            count = {1: 2, 4: 4}.get(batch, max(8, batch // len(TASKS)))  # problems of each task
            loads = task_loads("base", TASKS, count, 1 + ROUNDS, 128, 0.0)
            rates, outputs = [], []
            for r, load in enumerate(loads):
                began, before = time.perf_counter(), len(outputs)
                if r == 1:
                    start = copy.deepcopy(llm.engine.stats())
                for at in range(0, len(load.prompts), batch):
                    part = [{"prompt_token_ids": p} for p in load.prompts[at : at + batch]]
                    done = llm.generate(part, load.params[at : at + batch])
                    outputs += [list(out.outputs[0].token_ids) for out in done]
                rates.append(sum(map(len, outputs[before:])) / (time.perf_counter() - began))
                if r == 0:
                    while llm.engine.idle():  # graphs are captured, as a server does that is idle
                        pass
            metrics: dict[str, Any] = {
                "tokens_per_second": round(statistics.median(rates[1:]), 2),
                "rounds": [round(rate, 2) for rate in rates[1:]],
            }
            if drafter:
                metrics |= draft_metrics(start, llm.engine.stats())
                same = [a == b for a, b in zip(outputs, known[batch])]
                metrics["same_outputs"] = round(sum(same) / len(same), 4)
            else:
                known[batch] = outputs
            found[batch] = metrics
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafter", nargs="+")
    parser.add_argument("--exits", default="", help="folder of a checkpoint that was trained to exit early")
    parser.add_argument("--static", nargs="+", default=["16+4", "24+4"], help="EXIT+DRAFTS of static baselines")
    parser.add_argument("--idlm", default="", help="folder of an I-DLM adapter of base, measured alone")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "drafters-wide")
    parser.add_argument("--commit")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    plans = [("base", [f"idlm:model={options.idlm}"] if options.idlm else list(options.drafter or ARMS))]
    if options.exits:
        static = [f"layer_skip:exits={s.split('+')[0]},static={s.split('+')[1]}" for s in options.static]
        plans.append((options.exits, ["layer_skip", *static]))
    arms: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name, drafters in plans:
        model, known, plain = widened(name, options.size, options.folder, not options.idlm), {}, {}
        for drafter in ["", *drafters]:
            try:
                found = measure(model, drafter and spec_of(drafter, options.size, options.folder), options.batch, known)
            except Exception as error:  # the others are still worth measuring
                print(f"{drafter}: {type(error).__name__}: {error}", flush=True)
                continue
            plain = plain or found
            for batch, metrics in found.items():
                label = f"{Path(name).name} {drafter.partition(':model=/')[0] or 'plain'} {batch}"
                arms.append(arm(label, {"model": Path(name).name, "drafter": drafter, "batch": batch}, metrics))
                ratios[f"tokens_per_second {label}/plain"] = round(
                    metrics["tokens_per_second"] / plain[batch]["tokens_per_second"], 4
                )
                print(label, ratios[f"tokens_per_second {label}/plain"], metrics, flush=True)
            save(result(f"drafters-wide-{options.size}", arms, ratios=ratios), options.output, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
