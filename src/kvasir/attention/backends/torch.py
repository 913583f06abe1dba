"""Plain torch: the reference, the CPU path and, in exact mode, the oracle for everything else.

Normal mode: all spans of one row run together over their gathered pages (in buckets of similar length), longer spans
one by one. Exact mode: tiles of rows over blocks of keys, each of one shape (`kvasir.attention.exact_rows`), so that a
row's bits are the same in any batch, for any chunk size, after a prefix hit and as a node of a draft tree.

Legend: T rows, S spans, B spans of a part, L rows of a span, H query heads, G KV heads, R = H / G, D head dim,
W pages, P slots per page, N keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvasir.attention.backend import AttentionBackend, AttentionSpec
from kvasir.attention.exact_rows import Blocks, Exact, reach
from kvasir.attention.latent import UpProjection
from kvasir.kernels.paged_attention import INF, attend, tree_bits, visible
from kvasir.kv.codec import LayerCache
from kvasir.types import StepBatch


@dataclass(slots=True)
class _Part:
    """Spans that one call computes, for one cache group and window. Derived once a step, used by every layer.

    ``rows``: of the step; ``whole``: they are all. ``pages`` [B, W]. ``keep``: the gathered slots that may hold
    something seen (None: all). ``seen``/``bias``: the mask as bool and as addend, broadcast to [B, G, R, N] (single
    rows) or [L, N]; None: everything kept is seen. ``stale``: rows of the [B * G * N, D] matrix of gathered slots that
    nobody sees; they may hold anything, NaN included."""

    rows: slice | torch.Tensor
    whole: bool
    single: bool
    pages: torch.Tensor
    keep: slice | None = None
    seen: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    stale: torch.Tensor | None = None
    shared: dict = field(default_factory=dict)  # of the codec


class TorchBackend(AttentionBackend):
    """The reference in plain torch; in exact mode a row's bits are the same in any batch."""

    exact = True
    reference = True
    latents = True

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
        compute = self._exact if self.site.exact else self._normal
        result_THD, lse_TH = compute(q_THD, cache, spec, batch, sinks_H, return_lse)
        out_THD = result_THD if out_THD is None else out_THD.copy_(result_THD)
        return (out_THD, lse_TH) if return_lse else out_THD

    def run_expanded(
        self, q_THD: torch.Tensor, up: UpProjection, cache: LayerCache, spec: AttentionSpec, batch: StepBatch
    ) -> torch.Tensor:
        """``run_latent`` by its definition, one span after the other: make keys and values of heads, then attend."""
        parts, row = [], 0
        for span, (start, length) in enumerate(zip(batch.starts, batch.lengths)):
            pages = batch.tables[cache.group][span, : -(-(start + length) // cache.page_slots)]
            k, v = up.expand(cache.codec.read(cache, pages)[0][0, : start + length])  # [H, N, ...]
            seen = visible(start, length, 0, None, *(_tree(batch, row, length) or ()), device=k.device)
            heads = q_THD[row : row + length].transpose(0, 1)
            parts.append(attend(heads, k, v, spec.scale, seen, spec.softcap)[0].transpose(0, 1))
            row += length
        return torch.cat(parts)

    # ---------------------------------------------------------------------------------------------------- normal mode

    def pin(self, batch: StepBatch, spec: AttentionSpec, dtype: torch.dtype, bias: torch.Tensor, shared: dict) -> None:
        """Fix what ``run`` will do for a batch of one-row spans whose tensors are filled again for each step: read the
        pages that ``shared`` says, whole, and add ``bias`` [S, 1, 1, N]. Slots that nobody sees must hold numbers."""
        pages = batch.tables[0]
        batch.scratch["parts", 0, spec.num_kv_heads, spec.head_dim, spec.window, dtype] = [
            _Part(slice(0, len(pages)), True, True, pages, bias=bias, shared=shared)
        ]

    def _normal(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        sinks_H: torch.Tensor | None,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        key = ("parts", cache.group, spec.num_kv_heads, spec.head_dim, spec.window, q_THD.dtype)
        parts = batch.scratch.get(key)
        if parts is None:
            parts = batch.scratch[key] = _parts(batch, cache, spec, q_THD.dtype)
        results = [self._part(q_THD, cache, spec, part, sinks_H, want_lse) for part in parts]
        if len(parts) == 1 and parts[0].whole:
            return results[0]
        out_THD = q_THD.new_empty(*q_THD.shape[:2], spec.result_dim)
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device) if want_lse else None
        for part, (out, lse) in zip(parts, results):
            out_THD[part.rows] = out
            if want_lse:
                lse_TH[part.rows] = lse
        return out_THD, lse_TH

    def _part(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        part: _Part,
        sinks_H: torch.Tensor | None,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[rows, H, D] and, when wanted, the log-sum-exp [rows, H]."""
        groups = spec.num_kv_heads
        k, v = cache.codec.read(cache, part.pages, part.shared)  # [B, G, N, D]
        if part.keep is not None:
            k, v = k[:, :, part.keep], v[:, :, part.keep]
        if part.stale is not None:
            k, v = _clean(k, part.stale), v if spec.latent else _clean(v, part.stale)
        if spec.latent is not None:
            v = k[..., : spec.value_dim]
        q = (q_THD if part.whole else q_THD[part.rows]).view(-1, groups, spec.num_heads // groups, spec.head_dim)
        sinks = None if sinks_H is None else sinks_H.view(groups, -1)
        # A single row's query heads that share a KV head are rows over the same keys: [B, G, R, D].
        if not part.single:  # [G, R, L, D] over [G, 1, N, D]
            q, k, v = q.permute(1, 2, 0, 3), k[0].unsqueeze(1), v[0].unsqueeze(1)
            sinks = None if sinks is None else sinks.unsqueeze(-1)
        if spec.softcap is None and sinks is None and not want_lse:
            if not part.single:
                k, v = (x.expand(*q.shape[:2], *x.shape[2:]) for x in (k, v))
            out, lse = scaled_dot_product_attention(q, k, v, attn_mask=part.bias, scale=spec.scale), None
        else:
            out, lse = attend(q, k, v, spec.scale, part.seen, spec.softcap, sinks)
        if not part.single:
            out, lse = out.permute(2, 0, 1, 3), None if lse is None else lse.permute(2, 0, 1)
        return cache.codec.results(cache, out.flatten(1, 2)), None if lse is None else lse.flatten(1)

    # ----------------------------------------------------------------------------------------------------- exact mode

    def _exact(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        sinks_H: torch.Tensor | None,
        want_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        q_GMD = q_THD.unflatten(1, (spec.num_kv_heads, -1)).transpose(0, 1).flatten(1, 2).to(wide)
        sinks_GR = None if sinks_H is None else sinks_H.view(spec.num_kv_heads, -1).to(wide)
        # The pages of each span and what the codec derives from them: for all layers alike.
        key = ("exact", cache.group, spec)
        if key not in batch.scratch:
            batch.scratch[key] = Exact.of(spec, q_THD.device), {}
        exact, plans = batch.scratch[key]
        results: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        row = 0
        for span, length in enumerate(batch.lengths):
            if length:  # its keys and values are freed before the next span's are read: they get the same memory
                results += self._exact_span(q_GMD, cache, spec, batch, exact, plans, span, row, sinks_GR, want_lse)
            row += length
        if not results:  # a step of no rows
            return q_THD.new_empty(*q_THD.shape[:2], spec.result_dim), q_GMD.new_empty(q_THD.shape[:2])
        shape = (len(q_THD), exact.share)
        out_THV = torch.cat([out for out, _ in results], 1).unflatten(1, shape).transpose(0, 1).flatten(1, 2)
        lses = [lse for _, lse in results if lse is not None]
        lse_TH = torch.cat(lses, 1).unflatten(1, shape).transpose(0, 1).flatten(1, 2) if want_lse else None
        return cache.codec.results(cache, out_THV.to(q_THD.dtype)), lse_TH

    def _exact_span(
        self,
        q_GMD: torch.Tensor,
        cache: LayerCache,
        spec: AttentionSpec,
        batch: StepBatch,
        exact: Exact,
        plans: dict[int, tuple[torch.Tensor, dict]],
        span: int,
        row: int,
        sinks_GR: torch.Tensor | None,
        want_lse: bool,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Results and log-sum-exp of parts of the span whose rows begin at ``row`` of the step."""
        start, length, share = batch.starts[span], batch.lengths[span], exact.share
        first, end = _first_page(start, spec.window, cache.page_slots) * cache.page_slots, start + length
        stop = reach(end, exact.block)
        if span not in plans:
            plans[span] = _pages(batch, cache, span, first, end, stop), {}
        k, v = (x[:, : stop - first].to(q_GMD.dtype) for x in cache.codec.read(cache, *plans[span]))  # [G, N, D]
        if stop > end:  # read up to the end of the block, so that no block must be copied to get its size
            k[:, end - first :].zero_()
            v[:, end - first :].zero_()
        tree, blocks = _tree(batch, row, length), Blocks.of(k, v, first, exact.block)
        return [
            exact.rows(q_GMD[:, rows.start * share : rows.stop * share], seen, keys, sinks_GR, want_lse)
            for rows, seen, keys in self._companies(row, start, length, first, tree, blocks, k, v)
        ]

    @staticmethod
    def _companies(
        row: int,
        start: int,
        length: int,
        first: int,
        tree: tuple[torch.Tensor, torch.Tensor] | None,
        blocks: Blocks,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Iterator[tuple[slice, int, Blocks]]:
        """Yield rows of a span that see the same keys, with the end of the first and the keys. A row of a tree has keys
        of its own: its ancestors stand behind the context, as they would in a plain span."""
        if tree is None:
            yield slice(row, row + length), start + 1, blocks
            return
        for i, line in enumerate(tree_bits(tree[0])):
            path = line.nonzero().flatten() + start - first
            own = blocks.with_tail(k.index_select(1, path), v.index_select(1, path), start)
            yield slice(row + i, row + i + 1), start + len(path), own


# ----------------------------------------------------------------------------------------------- what a step looks like


def _parts(batch: StepBatch, cache: LayerCache, spec: AttentionSpec, dtype: torch.dtype) -> list[_Part]:
    parts: list[_Part] = []
    table_SW, size, window = batch.tables[cache.group], cache.page_slots, spec.window
    singles: list[tuple[int, int, int]] = []  # (pages read, span, row)
    row = 0
    for span, (start, length) in enumerate(zip(batch.starts, batch.lengths)):
        if length == 1:
            singles.append((start // size + 1 - _first_page(start, window, size), span, row))
        elif length:
            parts.append(_long_part(batch, table_SW, span, row, size, window, dtype))
        row += length
    for bucket in _buckets(singles):
        spans, rows = [s for _, s, _ in bucket], [r for _, _, r in bucket]
        parts.append(_single_part(batch, table_SW, spans, _dense(rows, table_SW.device), size, spec, dtype))
    return parts


def _buckets(singles: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Group spans so that each can be padded to the longest of its group without reading much more than it holds."""
    if not singles or max(singles)[0] <= 2 * min(singles)[0] + 2:
        return [singles] if singles else []
    buckets: list[list[tuple[int, int, int]]] = []
    for item in sorted(singles, reverse=True):
        if buckets and buckets[-1][0][0] <= 2 * item[0] + 2:
            buckets[-1].append(item)
        else:
            buckets.append([item])
    return buckets


def _dense(numbers: list[int], device: torch.device) -> slice | torch.Tensor:
    """An index of the rows ``numbers``: a slice where they are consecutive, which copies nothing."""
    first, count = numbers[0], len(numbers)
    return (
        slice(first, first + count)
        if numbers == list(range(first, first + count))
        else torch.tensor(numbers, device=device)
    )


def _single_part(
    batch: StepBatch,
    table_SW: torch.Tensor,
    spans: list[int],
    rows: slice | torch.Tensor,
    size: int,
    spec: AttentionSpec,
    dtype: torch.dtype,
) -> _Part:
    """A part of one-row spans. A lone span is cut exactly; several are padded to the longest and masked."""
    window, device = spec.window, table_SW.device
    starts = [batch.starts[s] for s in spans]
    first = [_first_page(start, window, size) for start in starts]
    if len(spans) == 1:
        end, start = starts[0] + 1, first[0] * size
        low = 0 if window is None else max(0, end - window)
        pages = table_SW[spans[0] : spans[0] + 1, first[0] : -(-end // size)]
        return _Part(rows, batch.lengths == [1], True, pages, slice(low - start, end - start))
    width = max(start // size + 1 - f for start, f in zip(starts, first))
    # Staged on the host: short copies to the device, and no read back.
    at_B1, first_B1 = np.array(starts)[:, None], np.array(first)[:, None]
    slot_BN = first_B1 * size + np.arange(width * size)
    seen_BN = slot_BN <= at_B1
    if window is not None:
        seen_BN &= slot_BN > at_B1 - window
    stale = torch.from_numpy(np.flatnonzero(np.repeat(~seen_BN, spec.num_kv_heads, 0)))
    column_BW = torch.from_numpy(np.minimum(first_B1 + np.arange(width), table_SW.shape[1] - 1))
    pages = table_SW[_dense(spans, device)].gather(1, column_BW.to(device))
    seen = torch.from_numpy(seen_BN[:, None, None]).to(device)
    whole = len(spans) == batch.input_ids.shape[0]
    return _Part(rows, whole, True, pages, None, seen, _bias(seen, dtype), stale.to(device) if len(stale) else None)


def _long_part(
    batch: StepBatch, table_SW: torch.Tensor, span: int, row: int, size: int, window: int | None, dtype: torch.dtype
) -> _Part:
    start, length = batch.starts[span], batch.lengths[span]
    page = _first_page(start, window, size)
    low = 0 if window is None else max(0, start - window + 1)
    end = start + length
    tree = _tree(batch, row, length)
    seen = visible(start, length, low, window, *(tree or ()), device=table_SW.device)
    pages = table_SW[span : span + 1, page : -(-end // size)]
    keep = slice(low - page * size, end - page * size)
    return _Part(slice(row, row + length), batch.lengths == [length], False, pages, keep, seen, _bias(seen, dtype))


def _tree(batch: StepBatch, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ancestor bits and positions of the span at ``row`` if it is a tree, else None."""
    if batch.ancestors is None or not bool(batch.ancestors[row].any()):
        return None
    return batch.ancestors[row : row + length], batch.positions[row : row + length]


def _first_page(start: int, window: int | None, size: int) -> int:
    """The first page that a span from ``start`` reads. Earlier pages may have been dropped."""
    return 0 if window is None else max(0, start - window + 1) // size


def _pages(batch: StepBatch, cache: LayerCache, span: int, first: int, end: int, reach: int) -> torch.Tensor:
    """Pages of the span's slots from ``first`` to ``end``, and the last of them again for slots up to ``reach``."""
    size = cache.page_slots
    numbers = torch.arange(first // size, -(-reach // size)).clamp_(max=(end - 1) // size)
    return batch.tables[cache.group][span].index_select(0, numbers.to(batch.tables[cache.group].device))


def _bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -INF)


def _clean(x_BGND: torch.Tensor, stale: torch.Tensor) -> torch.Tensor:
    """Zero the slots that nobody sees: a weight of zero times NaN is NaN."""
    return x_BGND.flatten(0, 2).index_fill_(0, stale, 0).view(x_BGND.shape)
