"""The card of a trained drafter: its target model, how it was trained, what it is worth, and the command."""

from __future__ import annotations

from typing import Any

from kvasir.technique import find
from kvasir_lab.drafters.kind import DRAFTERS, Kind


def card(run: dict[str, Any]) -> str:
    """The folder's README.md, from the contents of `training.json`."""
    kind = find(run.get("package", DRAFTERS), run["kind"], Kind)[0]
    found, target = run["acceptance"], run["target"]
    depths = "\n".join(
        f"| {depth} | {share:.3f} | {tried} |"
        for depth, (share, tried) in enumerate(zip(found["by_depth"], found["tried"]), 1)
    )
    tasks = "\n".join(f"| {spec} | {value:.2f} |" for spec, value in found["by_task"].items())
    name, values = _last(run)
    if run.get("data", "self") == "self":
        data = "replies of the model to the lab's training problems, a third each at temperature 0, 0.7 and 1"
    else:
        data = "of the lab's training problems with the replies that the tasks give"
    return f"""# {kind.title} for `{target["name"]}`

{kind.intro(run)}

## Held-out problems

Greedy replies of the model to {found["replies"]} problems that training did not see, drafted as one chain of
{len(found["by_depth"])}: {found["tokens"]} tokens in {found["forwards"]} forwards,
**{found["tokens_per_forward"]:.2f} tokens a forward**.

| depth | accepted when the depth before was | tried |
|---|---|---|
{depths}

| task | tokens a forward |
|---|---|
{tasks}
{kind.more(found)}
## Training

{run["replies"]} {data}.
{run["tokens"] / 1e6:.1f}M tokens in {run["steps"]} steps, {run["train_seconds"]:.0f} s on {run["device"]}
({run["total_seconds"]:.0f} s with sampling and measuring). {kind.loss_text} AdamW, peak learning rate
{run["lr"]:g}, cosine, seed {run["seed"]}. The last {name} by depth: {values}. The whole record is in
`training.json`. {run["date"]}.

    {run["command"]}
"""


def _last(run: dict[str, Any]) -> tuple[str, str]:
    """Name of the loss and its last values."""
    for name, values in (run["history"][-1] if run["history"] else {}).items():
        if isinstance(values, list):
            return name.upper(), ", ".join(f"{x:.3f}" for x in values)
    return "loss", "none"
