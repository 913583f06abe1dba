"""The card of a trained drafter: its target model, how it was trained, what it is worth, and the command."""

from __future__ import annotations

from typing import Any

from kvasir.lab.drafters.kind import DRAFTERS, Kind, size_of
from kvasir.technique import find


def card(run: dict[str, Any]) -> str:
    """The folder's README.md, from the contents of `training.json`."""
    found, target = run["acceptance"], run["target"]
    depths = "\n".join(
        f"| {depth} | {share:.3f} | {tried} |"
        for depth, (share, tried) in enumerate(zip(found["by_depth"], found["tried"]), 1)
    )
    tasks = "\n".join(f"| {spec} | {value:.2f} |" for spec, value in found["by_task"].items())
    last = ", ".join(f"{x:.3f}" for x in run["history"][-1]["kl"]) if run["history"] else "none"
    return f"""# {find(DRAFTERS, run["kind"], Kind)[0].title} for `{target["name"]}`

A drafter for kvasir: `kvasir serve MODEL --drafter {run["kind"]}:model=FOLDER`. It changes how many tokens a forward
pass gives. It changes no token in exact mode; elsewhere only a tie between tokens may end differently.

It has {size_of(run["parameters"])} parameters; embedding and output matrix are the model's own. It was trained for the
weights with the fingerprint `{target["weights"]}`. With other weights of the same shape it works, but drafts worse.

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

## Training

{run["replies"]} replies of the model to the lab's training problems, a third each at temperature 0, 0.7 and 1.
{run["tokens"] / 1e6:.1f}M tokens in {run["steps"]} steps, {run["train_seconds"]:.0f} s on {run["device"]}
({run["total_seconds"]:.0f} s with sampling and measuring). The loss is the KL divergence from the model's own
distribution on its frozen hidden states, weighted by 0.8 to the power of the depth. AdamW, peak learning rate
{run["lr"]:g}, cosine, seed {run["seed"]}. The last KL by depth: {last}. The whole record is in
`training.json`. {run["date"]}.

    {run["command"]}
"""
