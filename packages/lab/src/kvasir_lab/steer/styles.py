"""Calibrate an edit of style (arXiv 2504.10227): probes of the residual stream, and the shift that raises one class.

Problems of the style task that name a style are read; the state of the prompt's last row in every layer is what a
three-class probe sees. Layers whose probe is accurate on held-out problems are edited, from the prompt's last row on.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kvasir.errors import ConfigError
from kvasir.hooks.hook import Gate, Hook, Made, write_set
from kvasir.models import checkpoint
from kvasir.models.hooks import made_for
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.lookup import load_task
from kvasir_lab.steer.probes import fit, held_out
from kvasir_lab.steer.traces import Recording

PARAMS, SITE, TASK = "style", "resid", "style"
NAMED = "named"  # attribute of a task by which its questions name a class, as ``style`` has it
STYLES = ("plain", "formal", "lively")


@dataclass(frozen=True)
class Plan:
    """A calibration. ``p``: probability that the probe shall give the style; ``least``: accuracy below which a layer is
    left alone."""

    target: str = "formal"
    count: int = 300
    seed: int = 0
    p: float = 0.9
    margin: Literal["runner_up", "sigmoid"] = "runner_up"
    least: float = 0.9

    def __post_init__(self) -> None:
        if self.target not in STYLES:
            raise ConfigError(f"there is no style '{self.target}'; there are {', '.join(STYLES)}")


def calibrate(model: str, plan: Plan, out: Path, **options: Any) -> dict[str, Any]:
    """Calibrate ``model`` by ``plan``, write the set of hooks to ``out``, and return its card. ``options``: of the
    engine. Raises ConfigError where no layer's probe is accurate enough."""
    began, task = time.monotonic(), load_task(TASK)
    path = checkpoint.resolve(model)
    tokenizer = lab_tokenizer.load(path)
    states, labels = [], []
    with Recording(model, SITE, Gate(), **options) as recording:
        made = made_for(recording.llm.engine.runner.model, path)
        for problem in task.problems("train", plan.seed, plan.count * 4 // 3):
            style = getattr(task, NAMED)(problem)
            if style in STYLES:
                ids = tokenizer.encode(problem.prompt, add_special_tokens=False).ids
                states.append(recording.states(ids, [len(ids) - 1]))
                labels.append(STYLES.index(style))
    tensors, layers, accuracy = solve(torch.cat(states), torch.tensor(labels), plan.least)
    target = STYLES.index(plan.target)
    hook = Hook(
        SITE, layers, f"probe_shift:target={target},p={plan.p},margin={plan.margin}", Gate(answers=True), PARAMS
    )
    facts = {"layers": list(layers), "accuracy": accuracy, "seconds": round(time.monotonic() - began, 1)}
    return write_card(out, hook, tensors, made, {"method": "probe_shift", "plan": asdict(plan), **facts})


def solve(
    states_NLE: torch.Tensor, labels_N: torch.Tensor, least: float
) -> tuple[dict[str, torch.Tensor], tuple[int, ...], list[float]]:
    """The tensors of the layers whose probe is accurate, those layers, and the accuracy of all. Raises ConfigError
    where none is."""
    probes = fit(states_NLE, labels_N, len(STYLES), held_out(len(labels_N)))
    accuracy = [round(float(a), 3) for a in probes.accuracy_L]
    layers = tuple(i for i, a in enumerate(accuracy) if a >= least)
    if not layers:
        raise ConfigError(
            f"no layer's probe reaches an accuracy of {least}: {accuracy}. The model does not know the styles; train "
            "it on the task: kvasir train adapter lora --task style"
        )
    tensors = {}
    for layer in layers:
        tensors[f"{PARAMS}.{layer}.weight"] = probes.weights_LCD[layer]
        tensors[f"{PARAMS}.{layer}.bias"] = probes.biases_LC[layer]
    return tensors, layers, accuracy


def write_card(out: Path, hook: Hook, tensors: dict, made: Made, card: dict[str, Any]) -> dict[str, Any]:
    """Write the set with its card, and return the card."""
    write_set(out, [hook], {name: x.cpu() for name, x in tensors.items()}, made, card)
    return card
