"""The attention seam: rows of many sequences attend to their pages.

Legend: T rows, S spans, H query heads, G KV heads, D head dim, P slots per page.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvasir.technique import Technique

if TYPE_CHECKING:
    import torch

    from kvasir.kv.codec import LayerCache
    from kvasir.types import StepBatch

BACKENDS = "kvasir.attention.backends"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention is. ``scale`` multiplies q.k; ``softcap`` c means c * tanh(s / c); ``window`` w means a
    row sees the last w positions, itself included; ``sinks``: the layer has one learned logit per query head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """Where a backend is asked to run: everything its capability check may need."""

    device: str
    dtype: torch.dtype
    codec_kernel: str
    page_slots: int
    specs: tuple[AttentionSpec, ...]
    exact: bool = False


class AttentionBackend(Technique):
    """The round-trip rule holds: K/V of this step's rows are already in the pages when ``run`` is called."""

    exact = False  # another order of summation than the reference's, even where it gives every row the same bits in any batch
    affects_kv = False
    codec_kernels: ClassVar[frozenset[str]] = frozenset(
        {"plain"}
    )  # layouts it reads directly; queries then come in the cache's basis
    rank = 0  # 0: for ``auto`` only where none with a rank can serve; among those as quick as each other it takes the highest
    reference = False  # whether this is the plain definition in torch, so that native steps and tapes may compute it in its place
    graphs = False  # whether a decode-shaped step depends on its number of spans and on device tensors alone, never on ``starts``

    def why_not(self, site: Site) -> list[str]:
        """Reasons why this backend cannot serve ``site``; empty means it can."""
        return []

    def why_only_named(self) -> str:
        """Why ``auto`` leaves this backend alone although it can serve; empty: it does not."""
        return ""

    def prepare(self, site: Site) -> None:
        """Once, after the choice: the place this backend will run at (``site.exact`` asks for batch-invariant rows)."""
        self.site = site

    def scratch_bytes(self, length: int) -> int:
        """Device memory that one span at the end of ``length`` positions takes beside what it returns."""
        return 0

    def together(self) -> tuple[int, ...]:
        """Rows a span, in rising order, that steps with ``StepBatch.together`` are built for here. None: such steps cannot be run."""
        return ()

    def kinds(self, spec: AttentionSpec, max_seqs: int) -> list[list[tuple[int, int]]]:
        """Steps, as spans (positions before, rows), that take every kernel which this backend compiles for layers like this one. Whoever
        meets one first waits for the compiler; compiled ahead, nobody does."""
        return []

    def plan(self, batch: StepBatch) -> None:
        """Once a step, before the layers: derive what every layer needs into ``batch.scratch``."""

    def pin(
        self, batch: StepBatch, spec: AttentionSpec, dtype: torch.dtype, bias: torch.Tensor, shared: dict[str, Any]
    ) -> None:
        """Plan a step whose tensors stay (a CPU tape): ``bias`` [S, 1, 1, N] is added to the scores of one row for each sequence, and
        ``shared`` is what ``Codec.read`` gets. Only a ``reference`` backend has to."""
        raise NotImplementedError

    @abstractmethod
    def run(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        *,
        sinks_H: torch.Tensor | None = None,
        return_lse: bool = False,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of every row over its own sequence: [T, H, D] (and the natural log-sum-exp [T, H] fp32). ``out_THD``: where
        the result goes, if not to new memory.

        Row i of span s sees positions <= context[s] + i, bottom-right causal; with ``batch.ancestors`` a tree row sees
        the context and its ancestors. ``cache.group`` picks the page table.
        """
        raise NotImplementedError
