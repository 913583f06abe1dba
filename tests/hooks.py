"""Sets of hooks for tests: random directions and probes for the model in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from kvasir.hooks.hook import Gate, Hook, write_set

# The small model: layers, heads, their width, width of the state.
LAYERS, HEADS, DIM, WIDTH = 4, 4, 64, 192
ANSWERS = Gate(answers=True)


def write_hooks(folder: Path, hooks: list[Hook], seed: int = 0, made=None, shape=(LAYERS, HEADS, DIM, WIDTH)) -> Path:
    """Write a set whose directions, probes and classes are random. A direction of zeros would pass every test."""
    generator = torch.Generator().manual_seed(seed)
    _, heads, dim, width = shape
    tensors = {}
    for hook in hooks:
        own = (heads, dim) if hook.site == "head_out" else (1, width)
        for layer in hook.layers:
            named = {"direction": own, "probe": own, "bias": own[:1]}
            if hook.op.startswith("probe_shift"):
                named = {"weight": (3, *own), "bias": (3, *own[:1])}
            for name, size in named.items() if hook.op != "record" else ():
                tensors[f"{hook.params}.{layer}.{name}"] = torch.randn(size, generator=generator)
    return write_set(folder, hooks, tensors, made)


def some_sets(root: Path, layers=range(LAYERS), shape=(LAYERS, HEADS, DIM, WIDTH)) -> dict[str, Path]:
    """Eight sets of all sites, gates and operations."""
    all_layers, late, some = tuple(layers), tuple(layers)[1:], tuple(layers)[:1]
    sets = {
        "turn": [Hook("head_out", all_layers, "rotate:c=-1", ANSWERS)],
        "soft": [Hook("head_out", late, "rotate:c=-4,gate=soft", Gate(tuple(range(0, 2048, 2)), answers=True))],
        "hard": [Hook("attn_out", late, "rotate:c=-2,gate=threshold", Gate())],
        "push": [Hook("resid", some, "add:scale=0.2", Gate(window=(5, 40)))],
        "ban": [Hook("head_out", all_layers, "project:c=-1", Gate(tuple(range(1, 2048, 3))))],
        "mood": [Hook("resid", late, "probe_shift:target=1,p=0.9", ANSWERS)],
        "mood_sigmoid": [Hook("resid", late, "probe_shift:target=2,p=0.7,margin=sigmoid", ANSWERS)],
        "both": [
            Hook("head_out", all_layers, "rotate:c=-1", ANSWERS, "first"),
            Hook("head_out", late, "add:scale=0.1", Gate(window=(0, 50), answers=True), "second"),
            Hook("resid", some, "add:scale=0.1", ANSWERS, "third"),
        ],
    }
    return {name: write_hooks(root / name, hooks, seed, shape=shape) for seed, (name, hooks) in enumerate(sets.items())}
