"""Measure drafters on `base` at the cost of a large model, under `goodput`: one engine a drafter, three batch sizes.

    python -m kvasir_lab.studies drafters_wide RESULT.json [--size 8b] [--batch 1 4 16] [--exits FOLDER]
        [--drafter NAME ...]
    python -m kvasir_lab.studies drafters_wide RESULT.json --idlm ADAPTER --batch 1 4 16 64

Needs an NVIDIA GPU and some 40 GB of disk in --folder. `base` is widened with its layers spread
(`widen_checkpoint.py`), so that an exit costs its share of the layers; heads are widened to fit, and `nano` drafts as
it is. --exits: a checkpoint of `kvasir train exits --target base`, for `layer_skip` against its static exits; its plain
run is its own. --drafter measures these alone. --idlm: an adapter of `kvasir train drafter idlm`, measured alone, on
`base` whose layers come first in the large model, since its adapter is widened with them. Requests come in groups of
the batch size. Results are written as they come.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from kvasir import LLM
from kvasir.models.checkpoint import resolve
from kvasir_lab.bench.speculation import TASKS, draft_metrics, task_loads
from kvasir_lab.studies.widen_checkpoint import SIZES
from kvasir_lab.studies.widen_head import widen
from kvasir_lab.studies.widen_idlm import widen as widen_idlm
from kvasir_lab.study import Arms, Report, study

NODES = 24  # most drafts of a sequence and step
ROUNDS = 2  # measured rounds, after one that warms up
# Folder that keeps widened models for the next run.
FOLDER = Path(tempfile.gettempdir()) / "drafters-wide"
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
        tool = [sys.executable, "-m", "kvasir_lab.studies", "widen_checkpoint"]
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


@study("drafters-wide-{size}")
def main(
    report: Report,
    *,
    size: Annotated[str, SIZES] = "8b",
    batch: tuple[int, ...] = (1, 4, 16),
    drafter: tuple[str, ...] = (),
    exits: Annotated[str, "folder of a checkpoint that was trained to exit early"] = "",
    static: Annotated[tuple[str, ...], "EXIT+DRAFTS of static baselines"] = ("16+4", "24+4"),
    idlm: Annotated[str, "folder of an I-DLM adapter of base, measured alone"] = "",
    folder: Path = FOLDER,
) -> Arms:
    folder.mkdir(parents=True, exist_ok=True)
    plans = [("base", [f"idlm:model={idlm}"] if idlm else list(drafter or ARMS))]
    if exits:
        plans.append((exits, ["layer_skip", *("layer_skip:exits={},static={}".format(*s.split("+")) for s in static)]))
    report.more["ratios"] = {}
    for name, drafters in plans:
        model, known, plain = widened(name, size, folder, not idlm), {}, {}
        for spec in ["", *drafters]:
            try:
                found = measure(model, spec and spec_of(spec, size, folder), batch, known)
            except Exception as error:  # the others are still worth measuring
                print(f"{spec}: {type(error).__name__}: {error}", flush=True)
                continue
            plain = plain or found
            for rows, metrics in found.items():
                label = f"{Path(name).name} {spec.partition(':model=/')[0] or 'plain'} {rows}"
                report.more["ratios"][f"tokens_per_second {label}/plain"] = round(
                    metrics["tokens_per_second"] / plain[rows]["tokens_per_second"], 4
                )
                yield label, {"model": Path(name).name, "drafter": spec, "batch": rows}, metrics
