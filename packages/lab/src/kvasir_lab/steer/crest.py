"""Calibrate CREST (arXiv 2512.24574): heads that lead to needless checks, and the directions to turn them away from.

1. Sample traces at temperature 1 and cut them at blank lines.
2. Record what every head gives where a segment ends.
3. Fit a linear probe a head. The 38 % with the best accuracy on held-out states are chosen.
4. The direction of a head is the difference of the class means, within the components of 95 % of the variance.

A cut is labelled by the segment that follows it, because its row decides that segment's first token; ``label=ended``
takes the segment that it ends, as published. Needless checks are known from the task's own ``steps``, or all checks
from keywords.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kvasir.errors import ConfigError
from kvasir.hooks.hook import Gate, Hook, write_set
from kvasir.models import checkpoint
from kvasir.models.hooks import made_for
from kvasir_lab.steer.probes import directions, fit, held_out
from kvasir_lab.steer.traces import KEYWORDS, Recording, cuts, sample, splitting_ids, task_of

PARAMS = "crest"


@dataclass(frozen=True)
class Plan:
    """A calibration. ``chosen``: share of the heads that turn. ``c``, ``gate``: of ``rotate``. ``keywords``: for tasks
    that do not label their steps."""

    task: str = "reflect"
    count: int = 1000
    seed: int = 0
    site: Literal["head_out", "attn_out"] = "head_out"
    chosen: float = 0.38
    c: float = -1.0
    gate: Literal["all", "threshold", "soft"] = "threshold"
    label: Literal["follows", "ended"] = "follows"
    keywords: tuple[str, ...] = KEYWORDS

    def __post_init__(self) -> None:
        if not 0 < self.chosen <= 1:
            raise ConfigError(f"chosen={self.chosen} must be a share of the heads, above 0 and up to 1")
        if self.site not in ("head_out", "attn_out"):
            raise ConfigError(f"site={self.site}: CREST has the sites head_out and attn_out")


def calibrate(model: str, plan: Plan, out: Path, **options: Any) -> dict[str, Any]:
    """Calibrate ``model`` by ``plan``, write the set of hooks to ``out``, and return its card. ``options``: of the
    engine. Raises ConfigError where the traces hold too few checks."""
    began, task, splits = time.monotonic(), task_of(plan.task), splitting_ids(model)
    with Recording(model, plan.site, Gate(splits), **options) as recording:
        made = made_for(recording.llm.engine.runner.model, checkpoint.resolve(model))
        states, labels = [], []
        for trace in sample(recording.llm, task, plan.task, "train", plan.count, plan.seed):
            found = [
                c for c in cuts(task, trace, splits, plan.keywords) if c.position < recording.llm.info.max_model_len - 1
            ]
            if found:
                states.append(recording.states(trace.ids, [cut.position for cut in found]))
                labels += [getattr(cut, plan.label) for cut in found]
    if sum(labels) < 20 or len(labels) - sum(labels) < 20:
        raise ConfigError(
            f"{len(labels)} segments hold {sum(labels)} checks to avoid: too few to tell them apart. Raise -n, or take "
            "a task or keywords with more of them."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states_NLD, labels_N = torch.cat(states).to(device), torch.tensor(labels, device=device)
    tensors, facts = solve(states_NLD, labels_N, plan, made.layers)
    hook = Hook(
        plan.site,
        tuple(sorted({int(name.split(".")[1]) for name in tensors})),
        f"rotate:c={plan.c},gate={plan.gate}",
        Gate(splits, answers=True),
        PARAMS,
    )
    card = {"method": "crest", "plan": asdict(plan), **facts, "seconds": round(time.monotonic() - began, 1)}
    write_set(out, [hook], tensors, made, card)
    return card


def solve(
    states_NLD: torch.Tensor, labels_N: torch.Tensor, plan: Plan, num_layers: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of the hook, and facts about them for the card. What the hook does not read: ``scale``, by which
    turned heads were brought back to their length on average, and ``gap``, how far the means lie apart."""
    count, heads = len(labels_N), states_NLD.shape[1] // num_layers
    probes = fit(states_NLD, labels_N, 2, held_out(count).to(labels_N.device))
    v_LD = directions(states_NLD, labels_N)
    weights_LD, biases_L = (
        probes.weights_LCD[:, 1] - probes.weights_LCD[:, 0],
        probes.biases_LC[:, 1] - probes.biases_LC[:, 0],
    )
    most = max(1, round(plan.chosen * num_layers * heads))
    chosen_L = torch.zeros(num_layers * heads, dtype=torch.bool, device=labels_N.device)
    chosen_L[probes.accuracy_L.topk(most).indices] = True
    rest_NL = states_NLD.float() + plan.c * torch.einsum("nld,ld->nl", states_NLD.float(), v_LD)[..., None] * v_LD
    scale_L = (states_NLD.float().norm(dim=-1) / rest_NL.norm(dim=-1).clamp(min=1e-6)).mean(0)
    means_2LD = [states_NLD[labels_N == label].float().mean(0) for label in (1, 0)]
    gap_L = ((means_2LD[0] - means_2LD[1]) * v_LD).sum(-1)
    tensors = {}
    for layer in range(num_layers):
        part = slice(layer * heads, (layer + 1) * heads)
        if chosen_L[part].any():
            found = {
                "direction": v_LD[part],
                "probe": weights_LD[part],
                "bias": biases_L[part],
                "heads": chosen_L[part].float(),
                "scale": scale_L[part],
                "gap": gap_L[part],
            }
            tensors |= {f"{PARAMS}.{layer}.{name}": x.cpu() for name, x in found.items()}
    accuracy = probes.accuracy_L
    facts = {
        "segments": count,
        "checks": int(labels_N.sum()),
        "heads": [most, num_layers * heads],
        "accuracy": {
            "least": round(float(accuracy.min()), 3),
            "median": round(float(accuracy.median()), 3),
            "most": round(float(accuracy.max()), 3),
            "of_chosen": round(float(accuracy[chosen_L].mean()), 3),
        },
    }
    return tensors, facts
