"""Stress twin: the same function with outlier channels in keys and values, which large models have and small ones lack.

Exact. A few RoPE pairs of every key head are multiplied by ``keys``, and those of the queries are divided by it.
Channels of every value head are multiplied by ``values``, and the columns of the output matrix that read them are
divided by it. Factors are powers of two, so stored numbers change in their exponent only and logits stay equal bit by
bit. A cache that rounds a token's channels on one common scale, however, loses everything but the outliers. This is
SmoothQuant's rescaling (arXiv 2211.10438) run backwards; the outliers are those of KIVI (arXiv 2402.02750). It costs
nothing at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvasir.convert.converter import Tensors

LARGEST = 1024  # Largest factor.


@dataclass(frozen=True)
class Config:
    """Factors ``keys`` and ``values`` (1 changes nothing).

    ``pairs``: RoPE pairs (two channels each) of every head.
    """

    keys: int = 16
    values: int = 1
    pairs: int = 4

    def __post_init__(self) -> None:
        for name, scale in (("keys", self.keys), ("values", self.values)):
            if not 1 <= scale <= LARGEST or scale & (scale - 1):
                raise ConfigError(
                    f"outlier_twin: {name}={scale} must be a power of two in 1..{LARGEST}, so that no weight is rounded"
                )
        if self.pairs < 1:
            raise ConfigError(f"outlier_twin: pairs={self.pairs} must be at least 1")


class OutlierTwin(Converter):
    """Outlier channels that preserve the function."""

    exact = True

    def check(self, source: Source) -> None:
        for i, layer in enumerate(source.spec.layers):
            if layer.mixer.kind != "gqa":
                raise ConfigError(
                    f"outlier_twin: layer {i} is '{layer.mixer.kind}', which has no key and value heads to rescale"
                )
            if layer.mixer.qk_norm is not None and layer.mixer.qk_norm.offset and self.config.keys > 1:
                raise ConfigError(
                    f"outlier_twin: {source.spec.family} stores the norms of queries and keys as an offset from one, "
                    "which a factor would round. Take keys=1 (values only), or a model of another family."
                )
            if self.config.pairs > layer.mixer.head_dim // 2:
                raise ConfigError(
                    f"outlier_twin: pairs={self.config.pairs}, "
                    f"but a head of {layer.mixer.head_dim} has {layer.mixer.head_dim // 2}"
                )

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        edits = self._edits(source)
        for name, tensor in tensors:
            if name in edits:
                tensor = self._scaled(name, tensor, *edits[name])
            yield name, tensor

    def _edits(self, source: Source) -> dict[str, tuple[int, int, float]]:
        """Stored name -> (dimension that holds the heads' channels, head dim, factor)."""
        keys, values, edits = float(self.config.keys), float(self.config.values), {}
        for i, layer in enumerate(source.spec.layers):
            mixer, at = layer.mixer, f"layers.{i}.mixer"
            # A norm of queries and keys would undo a factor before it, so the factor goes into the norm's weights.
            q, k = ("q_norm", "k_norm") if mixer.qk_norm is not None else ("q", "k")
            for part, dim, factor in ((q, 0, 1 / keys), (k, 0, keys), ("v", 0, values), ("o", 1, 1 / values)):
                edits[source.stored(f"{at}.{part}.weight")] = (dim, mixer.head_dim, factor)
                if mixer.qkv_bias and part in ("q", "k", "v"):
                    edits[source.stored(f"{at}.{part}.bias")] = (0, mixer.head_dim, factor)
        return edits

    def _scaled(self, name: str, tensor: torch.Tensor, dim: int, head_dim: int, factor: float) -> torch.Tensor:
        """``tensor`` with the chosen channels of every head along ``dim`` multiplied by ``factor``."""
        heads = tensor.unflatten(dim, (-1, head_dim))
        chosen = (slice(None),) * (dim + 1) + (channels(head_dim, self.config.pairs),)
        before = heads[chosen]
        after = before * factor
        if not (after / factor).equal(before):
            raise ConfigError(
                f"outlier_twin: '{name}' is stored as {str(tensor.dtype).removeprefix('torch.')}, "
                f"which cannot hold its values times {factor:g} exactly. "
                "Take a smaller factor or a checkpoint in bfloat16 or float32."
            )
        heads[chosen] = after
        return tensor


def channels(head_dim: int, pairs: int) -> list[int]:
    """Both channels of ``pairs`` RoPE pairs spread over the frequencies of a head (first half, then second half)."""
    half = head_dim // 2
    first = [(2 * i + 1) * half // (2 * pairs) for i in range(pairs)]
    return [*first, *(c + half for c in first)]
