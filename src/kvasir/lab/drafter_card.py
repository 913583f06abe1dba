"""The card of a trained drafter: for which model, how it was trained, and what it is worth, with the command."""

from __future__ import annotations

from typing import Any

from kvasir.speculation.heads import class_of


def size_of(parameters: int) -> str:
    return f"{parameters / 1e6:.2f}M" if parameters >= 1e5 else f"{parameters:,}"


def card(run: dict[str, Any]) -> str:
    """README.md of the folder, from what `training.json` holds."""
    found, target = run["acceptance"], run["target"]
    depths = "\n".join(
        f"| {depth} | {share:.3f} | {tried} |"
        for depth, (share, tried) in enumerate(zip(found["by_depth"], found["tried"]), 1)
    )
    tasks = "\n".join(f"| {spec} | {value:.2f} |" for spec, value in found["by_task"].items())
    last = ", ".join(f"{x:.3f}" for x in run["history"][-1]["kl"]) if run["history"] else "none"
    return f"""# {class_of(run["kind"]).title} for `{target["name"]}`

A drafter for kvasir: `kvasir serve MODEL --drafter {run["kind"]}:model=FOLDER`. It changes no token, only how many a forward gives.
{size_of(run["parameters"])} parameters; embedding and output matrix are the model's own. For the weights with the fingerprint
`{target["weights"]}`; with others of the same shape it works, and drafts worse.

## Held-out problems

Greedy replies of the model to {found["replies"]} problems that training did not see, drafted as one chain of {len(found["by_depth"])}:
{found["tokens"]} tokens in {found["forwards"]} forwards, **{found["tokens_per_forward"]:.2f} tokens a forward**.

| depth | accepted, where the depth before was | tried |
|---|---|---|
{depths}

| task | tokens a forward |
|---|---|
{tasks}

## Training

{run["replies"]} replies of the model to the lab's training problems, a third each at temperature 0, 0.7 and 1; {run["tokens"] / 1e6:.1f}M tokens in
{run["steps"]} steps, {run["train_seconds"]:.0f} s on {run["device"]} ({run["total_seconds"]:.0f} s with sampling and measuring). KL to the
model's own distribution on its frozen hidden states, a step's loss weighted 0.8 to the depth; AdamW, peak learning rate {run["lr"]:g}, cosine,
seed {run["seed"]}. The last KL by depth: {last}. The whole record: `training.json`. {run["date"]}.

    {run["command"]}
"""
