"""Train Medusa heads on a frozen model and jointly with it (Medusa-2), on equal tokens, and compare the results.

    python -m kvasir_lab.studies medusa2_study OUT.json [--target nano] [--arms medusa,joint] [--steps 800]
        [--folder FOLDER]

Arms: ``medusa`` is Medusa-1 as it ships (KL from the frozen model); ``frozen`` is the trainer of Medusa-2 with a model
that rests to the end, so only the joint training differs from ``joint``; the others give the heads' loss more weight.
All learn from the same replies of the target, and each arm has its trained tokens.

Measured for each arm: tokens a forward of the engine with every proposal verified, on problems of four tasks; the share
of its outputs that equal those of the same model without a drafter, and those of the target (the control: below 1 for
another model); and the model's own exact answers and perplexity on unseen problems.

An arm whose folder is there is not trained again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from kvasir.api.offline.llm import LLM
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir_lab.bench.speculation import TASKS, task_loads
from kvasir_lab.drafters.kind import DRAFTERS, MODELS
from kvasir_lab.drafters.training import Plan
from kvasir_lab.drafters.training import main as train
from kvasir_lab.evaluation.evaluator import Plan as Questions
from kvasir_lab.evaluation.evaluator import prepare, read_tokenizer
from kvasir_lab.evaluation.evaluator import run as answer
from kvasir_lab.evaluation.scores import figures
from kvasir_lab.study import Arms, Report, study

QUALITY, PROSE = ("chain", "countdown", "path", "facts", "state"), "story"
DOCUMENTS = 32  # of prose; the test split holds few that do not overlap
SHOWN = ("problems", "right", "exact", "interval", "documents", "perplexity", "perplexity_interval")
OUTPUT_TOKENS = 128


@dataclass(frozen=True)
class Arm:
    """An arm of training: a kind with options, of ``package``. ``rows``: the model's rows for a token of a text,
    by which its batches are smaller."""

    spec: str
    package: str
    rows: int


ARMS = {
    "medusa": Arm("medusa", DRAFTERS, 1),
    "frozen": Arm("medusa2:warmup=0.9999", MODELS, 2),
    "joint": Arm("medusa2", MODELS, 2),
    "joint scale=1": Arm("medusa2:scale=1", MODELS, 2),
}


def outputs_of(model: str, drafter: str, count: int, temperature: float) -> tuple[list[list[int]], dict[str, float]]:
    """The outputs, and what was counted."""
    load = task_loads(model, TASKS, count, 1, OUTPUT_TOKENS, temperature)[0]
    config = EngineConfig.of(
        model=model, device="cpu", max_num_seqs=4, batch_invariant=True, drafter=drafter, draft_control="fixed"
    )
    with LLM(config=config) as llm:
        outs = llm.generate([{"prompt_token_ids": p} for p in load.prompts], load.params)
        stats = llm.engine.stats()
    counted = {
        "tokens": stats.generation_tokens,
        "forwards": stats.forwards,
        "tokens_per_forward": round(stats.generation_tokens / max(1, stats.forwards), 4),
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
    }
    return [list(out.outputs[0].token_ids) for out in outs], counted


def quality(model: str, count: int) -> dict[str, Any]:
    """Shares of exact answers, with their intervals, and perplexity, of the model without a drafter."""
    plans, tokenizer = (Questions(QUALITY, count), Questions((PROSE,), DOCUMENTS)), read_tokenizer(resolve(model))
    found: dict[str, Any] = {}
    with LLM(config=EngineConfig.of(model=model, device="cpu", max_num_seqs=32)) as llm:
        for plan in plans:
            for exam in prepare(plan, tokenizer):
                found[exam.spec] = figures(answer(llm, exam, plan, tokenizer), plan.seed)
    return {name: {k: v for k, v in one.items() if k in SHOWN} for name, one in found.items()}


def same(outputs: list[list[int]], expected: list[list[int]]) -> float:
    return round(sum(a == b for a, b in zip(outputs, expected)) / len(expected), 4)


@study("medusa2-{target}")
def main(
    report: Report,
    *,
    target: str = "nano",
    steps: int = 800,
    replies: int = 768,
    count: Annotated[int, "problems of each task, to count forwards on"] = 6,
    problems: Annotated[int, "problems of each task, for the model's own answers"] = 200,
    folder: Annotated[Path | None, "where the trained weights go; default: next to OUT.json"] = None,
    arms: Annotated[str, "names with commas between them; default: all"] = ",".join(ARMS),
) -> Arms:
    if unknown := set(arms.split(",")) - set(ARMS):
        raise ConfigError(f"no arm {', '.join(sorted(unknown))}; there are: {', '.join(ARMS)}")
    if folder is None and report.output is None:
        raise ConfigError("name the file of the result, or a folder for the trained weights")
    root = folder or report.output.with_suffix(".models")
    root.mkdir(parents=True, exist_ok=True)
    temperatures = (0.0, 1.0)
    setting = {
        "target": target,
        "tasks": list(TASKS),
        "problems": count * len(TASKS),
        "output_tokens": OUTPUT_TOKENS,
        "quality_problems": problems,
        "temperatures": list(temperatures),
        "batch_invariant": True,
    }
    own = {t: outputs_of(target, "", count, t) for t in temperatures}
    yield "target", setting, {f"T{t:g}": found[1] for t, found in own.items()} | {"quality": quality(target, problems)}
    for name in arms.split(","):
        chosen = ARMS[name]
        place = root / name.replace(" ", "-").replace("=", "-")
        if not (place / "training.json").exists():
            plan = Plan(
                chosen.spec,
                chosen.package,
                steps=steps * chosen.rows // 2,
                replies=replies,
                held_out=replies // 16,
            )
            command = f"python -m kvasir_lab.studies medusa2_study, arm {name}"
            train(plan, target, place, samples=root / "replies.safetensors", device="cpu", command=command)
        record = json.loads((place / "training.json").read_text())
        whole = chosen.package == MODELS
        model, heads = (str(place), place / "medusa") if whole else (target, place)
        metrics: dict[str, Any] = {k: record[k] for k in ("parameters", "steps", "tokens", "replies")}
        metrics |= {"train_seconds": round(record["train_seconds"], 1), "held_out": record["acceptance"]}
        del metrics["held_out"]["by_task"]
        for t in temperatures:
            outputs, counted = outputs_of(model, f"medusa:model={heads}", count, t)
            plain = outputs_of(model, "", count, t)[0] if whole else own[t][0]
            equal = {"same_outputs": same(outputs, plain), "same_as_target": same(outputs, own[t][0])}
            metrics[f"T{t:g}"] = counted | equal
        yield name, {"spec": chosen.spec}, metrics | ({"quality": quality(model, problems)} if whole else {})
