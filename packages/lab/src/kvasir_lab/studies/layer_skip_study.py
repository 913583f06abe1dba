"""Count the layers that `layer_skip` computes for a token, drafts and judging included.

    python -m kvasir_lab.studies layer_skip_study OUT.json --label now [--model nano --model base] [--batch 1 --batch 4]

Layers are counted by calls, not by rows. A step of the model is its L layers and the head; one level of a draft is the
layers before the exit and the head; a judgement of shadow tokens is the head, counted as ``head_layers``. ``of_plain``:
relative to one step of the model for each token of a sequence. Every draft is verified (``fixed``). Arms of another
label that OUT.json holds are kept, so two versions of the source can be compared: PYTHONPATH selects the version,
``--version`` names it.

The models are the lab's, which were not trained to exit early, and one made of ``base`` in which the layers of the
second half add a tenth of what they did. That one has something to find, and says nothing about text.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

from kvasir.api.offline.llm import LLM
from kvasir.config import EngineConfig
from kvasir_lab.bench.speculation import TASKS, task_loads
from kvasir_lab.study import Arms, Report, study

FADED, SHARE = "base-faded", 0.1


def fade(engine: Any, share: float) -> None:
    """Layers behind the first half add ``share`` of what they do."""
    import torch

    blocks = engine.runner.model.blocks
    with torch.inference_mode():
        for block in blocks[len(blocks) // 2 :]:
            for layer in (block.mixer.o, block.ffn.down):
                layer.weight.tensor.mul_(share)
    engine.runner.weights_changed()


def count_layers(model: Any) -> dict[str, float]:
    """Count, from now on, what the drafter's calls compute."""
    found = {"draft_layers": 0.0, "judge_layers": 0.0, "draft_calls": 0, "judge_calls": 0}
    way_of, judge = getattr(model, "_way", None), getattr(model, "judge", None)

    def counted(launch, layers):
        def launched(step):
            found["draft_layers"] += layers + model.head_layers
            found["draft_calls"] += 1
            return launch(step)

        return launched

    def judged(pieces):
        found["judge_layers"] += model.head_layers
        found["judge_calls"] += 1
        return judge(pieces)

    if way_of is None:
        model._runner.launch = counted(model._runner.launch, len(model._runner.model.blocks))
    else:  # an early exit has a way to run for each number of layers
        model._way = lambda layers: SimpleNamespace(run=counted(way_of(layers).run, layers))
    if judge is not None:
        model.judge = judged
    return found


def run(
    name: str, batch: int, temperature: float, count: int, output_tokens: int, drafter: str
) -> tuple[dict[str, Any], list[list[int]]]:
    model = "base" if name == FADED else name
    load = task_loads(model, TASKS, count, 1, output_tokens, temperature)[0]
    config = EngineConfig.of(
        model=model,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        batch_invariant=True,
        drafter=drafter,
        draft_control="fixed",
    )
    with LLM(config=config) as llm:
        if name == FADED:
            fade(llm.engine, SHARE)
        found = count_layers(llm.engine.proposals.drafting.drafter._model) if drafter else {}
        outputs = [
            list(out.outputs[0].token_ids)
            for out in llm.generate([{"prompt_token_ids": p} for p in load.prompts], load.params)
        ]
        stats, tokens = llm.engine.stats(), sum(map(len, outputs))
        metrics: dict[str, Any] = {
            "tokens": tokens,
            "forwards": stats.step,
            "tokens_per_forward": round(tokens / stats.step, 4),
        }
        if drafter:
            exits = llm.engine.proposals.drafting.drafter._model
            step = exits.num_layers + exits.head_layers
            layers = stats.step * step + found["draft_layers"] + found["judge_layers"]
            metrics |= {
                "layers_per_token": round(layers / tokens, 4),
                "drafted": stats.drafted_tokens,
                "accepted": stats.accepted_tokens,
                "draft_calls": found["draft_calls"],
                "judge_calls": found["judge_calls"],
                "head_layers": round(exits.head_layers, 4),
                "exits": list(exits.exits),
                "num_layers": exits.num_layers,
            }
    return metrics, outputs


@study("layer-skip")
def main(
    report: Report,
    *,
    label: str = "now",
    version: str = "",
    model: tuple[str, ...] = ("nano", "base", FADED),
    batch: tuple[int, ...] = (1, 4),
    temperature: tuple[float, ...] = (0.0, 1.0),
    count: int = 4,
    output_tokens: int = 96,
    drafter: str = "layer_skip",
) -> Arms:
    report.arms = [a for a in report.before if a["config"]["label"] != label]
    for name, size, t in product(model, batch, temperature):
        plain, expected = run(name, size, t, count, output_tokens, "")
        metrics, outputs = run(name, size, t, count, output_tokens, drafter)
        step = metrics["num_layers"] + metrics["head_layers"]
        metrics["of_plain"] = round(metrics["layers_per_token"] / (step * plain["forwards"] / plain["tokens"]), 4)
        metrics["forwards_of_plain"] = round(metrics["forwards"] / plain["forwards"], 4)
        metrics["same_outputs"] = round(sum(a == b for a, b in zip(outputs, expected)) / len(expected), 4)
        config = {"label": label, "version": version, "model": name, "batch": size, "temperature": t}
        config |= {"drafter": drafter, "tasks": list(TASKS), "problems": count * len(TASKS)}
        yield f"{name} batch {size} T {t:g} {label}", config, metrics
