"""The KV codec seam: what the bytes of one token's keys and values are. Only a codec touches the bytes.

A page is raw bytes: layer after layer; in each layer the codec's planes, in order; in each plane KV heads outermost,
then slots, then the plane's width. Element (page n, layer l, plane p, head g, slot s, i) is at ``n * page_bytes +
layer_offset[l] + plane_offset[p] + ((g * P + s) * width + i) * itemsize`` (int64). Layers may differ in heads and
widths. The scales of a quantising codec are planes of their own, so that copies, forks and transfers carry them. A
plane that the heads of a token share has one head.

Legend: T rows, G KV heads, D head dim, N pages, P slots per page, S sequences.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvasir.errors import ConfigError
from kvasir.technique import Technique

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvasir.kernels.fused_qkv import HeadOps
    from kvasir.kv.rotation import Rotation
    from kvasir.types import CacheRow

CODECS = "kvasir.kv.codecs"


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a slot and head: ``width`` elements of ``dtype``. The planes ``k`` and ``v`` hold the data
    itself. A plane's name begins with the side that it belongs to. ``shared``: all heads of a token have one such
    array, not one each."""

    name: str
    width: int
    dtype: torch.dtype
    shared: bool = False

    def heads(self, row: CacheRow) -> int:
        """Number of such arrays that a token has."""
        return 1 if self.shared else row.heads


@dataclass(frozen=True, slots=True, eq=False)
class CachedLayer:
    """A layer of the served model that keeps keys and values. ``index``: its place among all layers. ``angles``:
    cosines and sines [positions, width] in fp32, as in ``layers.rope.RopeTable``; None: the layer rotates nothing.
    ``added``: it stands behind the model's last layer, where a drafter has asked for it, and no calibration knows
    it."""

    index: int
    row: CacheRow
    angles: torch.Tensor | None
    added: bool = False


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's view of its group's pool: ``planes[name]`` is a strided [N, G, P, width] tensor (stride(0) is a
    page). ``views``: the codec's own views of the same memory, kept so that no step derives them again."""

    planes: dict[str, torch.Tensor]
    codec: Codec
    group: int
    page_slots: int
    head_dim: int
    dtype: torch.dtype  # the model's
    views: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)
    latent: int = 0  # as in ``CacheRow``


class Codec(Technique):
    """Encodes K/V on write and decodes them on read.

    Round-trip rule: a token's K/V *is* what the codec returns, from the step that produces it. So a row is encoded
    alone, and its bytes depend neither on another row nor on its batch.

    ``kernel`` names the layout that a fused attention kernel must know to read the pages directly. A new layout needs a
    new name; a known name with other planes is refused. Until a kernel knows the name, the reference runs it through
    ``read``: correct everywhere, slow on a GPU, as start-up says.

    `kvasir.kv.quantized.QuantizedCodec` makes a codec of ``side``, ``encode`` and ``decode``.
    """

    exact = False
    affects_kv = True
    kernel: str = ""
    # Slots of a page by default. Small pages are shared more often, and less of the last one is read in vain.
    page_slots: ClassVar[int] = 16
    fuses = False  # whether ``write_fused`` exists
    fuses_partial = False  # whether ``write_fused`` turns a part of a head
    native = False  # whether the C kernels encode and decode ``kernel``, if they know that layout, as this codec does
    latents = False  # whether rows with a ``CacheRow.latent`` may be stored, by ``write_row``
    # Whether ``write`` takes keys before RoPE, with their positions, and ``read`` turns them.
    turns = False
    # What a KV policy stores beside each token of a layer with such rows, in planes of its own; set at the start.
    beside: Callable[[CacheRow], list[Plane]] = staticmethod(lambda row: [])

    def attach(self, layers: Sequence[CachedLayer], device: torch.device, dtype: torch.dtype, exact: bool) -> None:
        """Take the served model, before the pool is made: for a codec with numbers of its own for each layer.

        ``exact``: a row's bits may not depend on its batch. Raises ConfigError for a model that does not fit."""

    def layer(self, index: int) -> Codec:
        """The codec of model layer ``index``, which is the one that the layer's ``LayerCache`` holds. Raises
        ConfigError."""
        return self

    @abstractmethod
    def planes(self, row: CacheRow, dtype: torch.dtype) -> list[Plane]:
        """The planes of one slot and head of a layer with such cache rows; ``dtype`` is the model's. A latent's rows
        have planes of keys only. Raises ConfigError for a width that does not fit. At least one plane must hold floats,
        so that a read of a freed page shows as NaN (``poison``)."""
        raise NotImplementedError

    @abstractmethod
    def write(
        self,
        cache: LayerCache,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        slots_T: torch.Tensor,
        shared: dict | None = None,
        positions_T: torch.Tensor | None = None,
    ) -> None:
        """Store one row per slot (``slots_T`` int64 = page * P + offset; -1: nowhere).

        ``shared``: what does not depend on the layer; empty at first, passed again for the group's other layers with
        the same slots. ``positions_T``: for a codec that ``turns``, whose keys come before RoPE."""
        raise NotImplementedError

    def write_row(
        self, cache: LayerCache, row_TD: torch.Tensor, slots_T: torch.Tensor, shared: dict | None = None
    ) -> None:
        """Store one row with a latent per slot: as ``write``, for a layer that has keys only. The first
        ``cache.latent`` elements may be stored otherwise than the rotary ones after them."""
        raise NotImplementedError

    def write_fused(
        self, cache: LayerCache, heads_TXD: torch.Tensor, ops: HeadOps, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """Do what ``ops`` says, and ``write``, in one kernel: the heads of a projection (queries, keys, values) become
        rotated queries [T, H, D] in the cache's basis.

        Called where ``fuses`` and ``kernels.fused_qkv.fits`` hold and the attention backend reads this codec's layout.
        """
        raise NotImplementedError

    def rotation(self, side: str, head_dim: int) -> Rotation | None:
        """The basis in which ``k`` or ``v`` is cached; None: the model's own."""
        return None

    def blocks_of(self, cache: LayerCache, pages: np.ndarray) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """A read of pages [..., W] as one gather: rows of the pool seen as a matrix of blocks, and the shape of what
        they hold, [2, ..., G, W * P, D], or [1, ...] where there are keys only. None: pages cannot be read so.

        Recorded steps call such a codec with more in ``shared``: its ``write`` must take ``rows``
        (``kernels.store_kv.row_index``), and its ``read`` must take ``blocks``, ``shape`` and ``pages``."""
        return None

    def queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Queries in the cache's basis, as ``write_fused`` returns them, for a layer that reads another layer's
        cache."""
        return q_THD

    def restore(self, out_THD: torch.Tensor) -> None:
        """Turn attention's result from the basis of the cached values into the model's, in place."""

    @abstractmethod
    def read(
        self, cache: LayerCache, pages: torch.Tensor, shared: dict | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode whole pages: page ids [..., W] -> two [..., G, W * P, D] tensors in the model's dtype, of any strides.
        Values of latent rows are a view of their keys. Values may have another width R where ``results`` undoes it.

        They are the caller's own. ``shared``: as in ``write``, for the same pages."""
        raise NotImplementedError

    def results(self, cache: LayerCache, out_THR: torch.Tensor) -> torch.Tensor:
        """Attention's results [T, H, R] over the values that ``read`` returned, as results over the model's own values
        [T, H, D]."""
        return out_THR


def places_of(cache: LayerCache, slots_T: torch.Tensor, shared: dict) -> dict:
    """``shared`` with the ``page`` and ``offset`` of the slots that rows go to, and in ``keep`` which rows these are
    (None: all)."""
    if "page" not in shared:
        keep = slots_T >= 0
        shared["keep"] = None if bool(keep.all()) else keep
        slots = slots_T if shared["keep"] is None else slots_T[keep]
        shared["page"], shared["offset"] = slots // cache.page_slots, slots % cache.page_slots
    return shared


def planes_of(codec: Codec, row: CacheRow, dtype: torch.dtype) -> list[Plane]:
    """The planes of a layer. Raises ConfigError for a row that the codec cannot store, with the nearest choice."""
    if row.latent and not codec.latents:
        raise ConfigError(
            f"kv_codec '{codec.name}' is for heads of keys and values, and this model caches latents (multi-head "
            "latent attention). Use --kv-codec plain, int8 or fp8."
        )
    return [*codec.planes(row, dtype), *codec.beside(row)]
