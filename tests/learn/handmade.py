"""Traces made by hand, and heads that are not at their start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kvasir.learn.base import Base
from kvasir.learn.trace import ACCEPTED, PLAIN, REJECTED, Trace
from kvasir.models.checkpoint import resolve
from kvasir.speculation import heads

Tree = list[tuple[int, int]]  # (parent node, -1: the anchor; token)


def nano(dtype: torch.dtype = torch.float32) -> Base:
    """The ends of the shipped model."""
    return Base.read(Path(resolve("nano")), torch.device("cpu"), dtype)


def head_for(kind: str, base: Base, noise: float = 0.1):
    """A head whose weights are all moved off their start."""
    cls = heads.class_of(kind)
    head = cls(cls.shape_for(base.dim, base.num_layers))
    head.begin_with(base.norm_E.float(), base.embed_VE.float(), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for i, p in enumerate(head.parameters()):
            p.add_(
                noise * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * max(1.0, p.shape[-1]) ** -0.5
            )
    return head


def trace_of(
    base: Base,
    layers: tuple[int, ...],
    steps: list[tuple[Tree, list[int]]],
    *,
    prompt: int = 4,
    seed: int = 0,
    request: str = "a",
    states=None,
) -> Trace:
    """The trace of a prompt and of verified trees, each with its accepted nodes. Tokens and states are drawn."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 500, prompt + 1).tolist()
    positions, row_tokens, parents, kinds = (
        list(range(prompt)),
        tokens[:prompt],
        list(range(-1, prompt - 1)),
        [PLAIN] * prompt,
    )
    last = prompt - 1  # the last committed row
    for tree, accepted in steps:
        anchor = len(positions)
        positions.append(len(tokens) - 1)
        row_tokens.append(tokens[-1])
        parents.append(last)
        kinds.append(PLAIN)
        for node, (parent, token) in enumerate(tree):
            above = anchor + 1 + parent
            positions.append(positions[above] + 1)
            row_tokens.append(token)
            parents.append(above)
            kinds.append(ACCEPTED if node in accepted else REJECTED)
        tokens += [tree[node][1] for node in accepted] + [int(rng.integers(5, 500))]
        last = anchor + 1 + accepted[-1] if accepted else anchor
    found = rng.standard_normal((len(positions), len(layers), base.dim)) if states is None else states
    arrays = [np.array(x, np.int32) for x in (tokens, positions, row_tokens, parents)]
    return Trace(
        arrays[0], 0, layers, found.astype(np.float32), "float32", *arrays[1:], np.array(kinds, np.uint8),
        request=request, prompt=prompt,
    )  # fmt: skip


STEPS = [
    ([(-1, 7), (0, 8), (1, 9), (1, 10), (0, 11), (-1, 12), (5, 13)], [0, 4]),  # branches left and right of the path
    ([], []),
    ([(-1, 20), (0, 21), (1, 22)], []),
    ([(-1, 30), (0, 31)], [0, 1]),
    ([(-1, 40), (-1, 41), (1, 42)], [1]),
]
