"""The attention seam: rows of many sequences attend to their pages.

Legend: T rows, S spans, H query heads, G KV heads, D head dim, P slots per page.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvasir.technique import Technique

if TYPE_CHECKING:
    import torch

    from kvasir.attention.latent import UpProjection
    from kvasir.kv.codec import LayerCache
    from kvasir.kv.state import StateCache
    from kvasir.types import StepBatch

BACKENDS = "kvasir.attention.backends"


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Widths of the keys and values that a head makes of a latent (`kvasir.layers.spec.MLASpec`): ``nope_dim``
    elements of a key and ``value_dim`` elements of a value."""

    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer. ``scale`` multiplies q.k; ``softcap`` c means c * tanh(s / c); with a ``window`` of w
    a row sees the last w positions, itself included; ``sinks``: the layer has one learned logit per query head.

    ``value_dim``: width of values and results (None: as ``head_dim``). ``latent``: one cached row is the key of all
    heads, and its first ``value_dim`` elements are their value; queries and results of ``run`` are in that basis, and
    ``run_latent`` takes those of heads with the widths given."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_dim: int | None = None
    latent: LatentHeads | None = None

    @property
    def result_dim(self) -> int:
        """Width of a head's result of ``run``."""
        return self.value_dim or self.head_dim

    @property
    def mixed_dim(self) -> int:
        """Width of a head's result as a mixer gets it: of ``run_latent`` where there is a latent."""
        return self.result_dim if self.latent is None else self.latent.value_dim


class Recurrence(Protocol):
    """A recurrent layer, as far as it depends on the spans of a step."""

    results: tuple[int, int]  # heads, and elements of a head's result
    captured: bool  # whether a step of short spans asks the host for nothing, so that a graph can hold it

    def run(
        self, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch, out_THV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Results [T, *results] fp32 of a step's rows. ``out_THV``: the memory for them; None: new memory."""


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a backend is asked to run: everything that its capability check may need."""

    device: str
    dtype: torch.dtype
    codec_kernel: str
    page_slots: int
    specs: tuple[AttentionSpec, ...]
    exact: bool = False


class AttentionBackend(Technique):
    """Computes the attention of a step's rows. The round-trip rule holds: the K/V of this step's rows are already in
    the pages when ``run`` is called."""

    # Whether results have the reference's bits. A backend with another order of summation has not, even if a row
    # has the same bits in any batch.
    exact = False
    affects_kv = False
    # Whether it attends to latents (``AttentionSpec.latent``).
    latents = False
    # Layouts that it reads directly. Queries then come in the cache's basis.
    codec_kernels: ClassVar[frozenset[str]] = frozenset({"plain"})
    # Preference of ``auto``: of equally fast backends it takes the highest rank; rank 0 only where no other can serve.
    rank = 0
    # Whether this is the plain definition in torch, so that native steps and tapes may compute it in its place.
    reference = False
    # Whether a decode-shaped step depends on its number of spans and on device tensors alone, never on ``starts``.
    graphs = False

    def why_not(self, site: Site) -> list[str]:
        """Reasons why this backend cannot serve ``site``; empty means it can."""
        return []

    def why_only_named(self) -> str:
        """Why ``auto`` leaves this backend alone although it can serve; empty: it does not."""
        return ""

    def prepare(self, site: Site) -> None:
        """Set the backend up for ``site``, once, after it was chosen. ``site.exact`` asks for batch-invariant rows."""
        self.site = site

    def scratch_bytes(self, length: int) -> int:
        """Device memory, in bytes, that a span ending at position ``length`` takes in addition to its result."""
        return 0

    def together(self) -> tuple[int, ...]:
        """Row counts of a span, in rising order, for which steps with ``StepBatch.together`` are built. Empty: the
        backend cannot run such steps."""
        return ()

    def kinds(self, spec: AttentionSpec, max_seqs: int) -> list[list[tuple[int, int]]]:
        """Steps that together take every kernel that this backend compiles for layers like ``spec``. A step is a list
        of spans (positions before, rows). They are compiled ahead, so that no request waits for the compiler."""
        return []

    def plan(self, batch: StepBatch) -> None:
        """Derive what every layer needs into ``batch.scratch``. Called once a step, before the layers."""

    def pin(
        self, batch: StepBatch, spec: AttentionSpec, dtype: torch.dtype, bias: torch.Tensor, shared: dict[str, Any]
    ) -> None:
        """Plan a step whose tensors stay (a CPU tape): ``bias`` [S, 1, 1, N] is added to the scores of one row for each
        sequence, and ``shared`` is what ``Codec.read`` gets. Only a ``reference`` backend has to."""
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
        """Causal attention of every row over its own sequence: [T, H, D], and with ``return_lse`` the natural
        log-sum-exp [T, H] fp32. D is ``spec.result_dim``. ``out_THD``: the memory for the result; None: new memory.

        Row i of span s sees positions <= context[s] + i, bottom-right causal; with ``batch.ancestors`` a row of a tree
        sees the context and its ancestors. ``cache.group`` picks the page table.
        """
        raise NotImplementedError

    def run_latent(
        self,
        q_THD: torch.Tensor,
        up: UpProjection,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        *,
        out_THV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as ``run`` does, for heads that read a latent through ``up``: [T, H, V].

        ``q_THD``: queries of the heads, D = nope_dim + rope_dim. This form brings queries into the latent's basis and
        results back. A backend may compute long spans over keys and values made of the latents, which is the same up
        to rounding.
        """
        return up.project(self.run(up.absorb(q_THD), cache, spec, batch), out_THV)

    def run_recurrence(
        self, layer: Recurrence, rows_TX: torch.Tensor, cache: StateCache, batch: StepBatch
    ) -> torch.Tensor:
        """Run a recurrent layer, which attends to nothing. It goes through the backend because that is where a step
        which is captured in pieces is cut."""
        return layer.run(rows_TX, cache, batch)


def plan_step(backend: AttentionBackend, batch: StepBatch) -> None:
    """Plan a step for all its layers, also those of groups in which sequences have forgotten tokens."""
    for view in batch.views():
        backend.plan(view)
