"""The damage that a plain 4-bit cache does to a model and to its outlier twins, which a better cache must avoid.

The cache is simulated in the lab's own model and is no engine technique. Every key (after RoPE) and value is rounded
when written, per token and head, on an asymmetric grid of 16 levels from the smallest to the largest channel. Nothing
is packed, and no speed is claimed.

    python -m kvasir_lab.evaluation.stress MODEL [PROBLEMS] [FILE.json]

Shape suffixes: B rows, G KV heads, C cached positions, D head dim.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir_lab import export
from kvasir_lab import tokenizer as lab_tokenizer
from kvasir_lab.evaluation.evaluate import Score, evaluate
from kvasir_lab.model import Attention, Model

LEVELS = 16
SCALES = (1, 2, 4, 8, 16, 32)


def round_trip(x: torch.Tensor, levels: int = LEVELS) -> torch.Tensor:
    """Round x [..., D] as a token-wise asymmetric code of ``levels`` levels does.

    Scale and zero point are not rounded.
    """
    low, high = x.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / (levels - 1)).clamp(min=torch.finfo(x.dtype).tiny)
    return ((x - low) / step).round() * step + low


class RoundedPlane:
    """Keys or values [B, G, C, D] of one layer: rounded when written, read like any tensor."""

    def __init__(self, plane: torch.Tensor) -> None:
        self.plane, self.dtype = plane, plane.dtype

    def __setitem__(self, where: tuple, value: torch.Tensor) -> None:
        self.plane[where] = round_trip(value)

    def index_copy_(self, dim: int, at: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.plane.index_copy_(dim, at, round_trip(value))

    def __getitem__(self, where: tuple) -> torch.Tensor:
        return self.plane[where]


class RoundedAttention(Attention):
    """Attention whose cache is a `RoundedPlane`. The prompt, too, is read back from the cache."""

    def forward(self, x, rope, mask, cache, at):
        return super().forward(x, rope, mask, cache and tuple(RoundedPlane(plane) for plane in cache), at)


def with_rounded_cache(model: Model) -> Model:
    """A copy of ``model`` with a 4-bit cache."""
    rounded = copy.deepcopy(model)
    for layer in rounded.model.layers:
        attention = RoundedAttention(model.shape).to(model.model.embed_tokens.weight.device)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = attention
    return rounded.eval()


def damage(
    folder: Path,
    *,
    scales: Sequence[int] = SCALES,
    values: bool = False,
    count: int = 200,
    device: str = "cpu",
    max_new: int = 400,
) -> dict[int, tuple[Score, Score]]:
    """Exact match of the twin on `chain`, by scale: with an unrounded and with a 4-bit cache.

    ``values``: also give the values outliers.
    """
    tokenizer, curve = lab_tokenizer.load(folder), {}
    for scale in scales:
        with tempfile.TemporaryDirectory() as home:
            spec = f"outlier_twin:keys={scale},values={scale if values else 1}"
            convert(load_converter(spec), spec, folder, Path(home) / "twin")
            twin = export.load(Path(home) / "twin", device)
        plain, rounded = (
            evaluate(m, tokenizer, "chain", count, seed=7, max_new=max_new) for m in (twin, with_rounded_cache(twin))
        )
        curve[scale] = plain, rounded
    return curve


def main(model: str = "", count: str = "1000", file: str = "") -> None:
    """Measure ``model`` and its twins, print a table, and write ``file`` when given."""
    from kvasir.bench.result import arm, finish, result
    from kvasir.models import checkpoint

    folder, arms = checkpoint.resolve(model), []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for values in (False, True):
        for scale, scores in damage(folder, values=values, count=int(count), device=device).items():
            for cache, score in zip(("as stored", "4-bit simulated"), scores, strict=True):
                low, high = score.interval
                arms.append(
                    arm(
                        f"{'keys and values' if values else 'keys'} x{scale}, {cache}",
                        {"scale": scale, "values": values, "cache": cache},
                        {"right": score.right, "problems": score.total, "share": score.share, "low": low, "high": high},
                    )
                )
    finish(result(f"outlier-twin-{folder.name}", arms), Path(file) if file else None)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
