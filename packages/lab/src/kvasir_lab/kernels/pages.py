"""Steps over random pages, for attention kernels: the heads of Llama-8B (32 query, 8 KV, 128 wide) in bf16."""

from __future__ import annotations

import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.attention.backends.triton import TritonBackend
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.types import CacheGroup, CacheRow, StepBatch
from kvasir_lab.kernels.frame import BF16, COLD_BYTES

Spans = list[tuple[int, int]]  # (start, length) of each
HEADS, GROUPS, DIM, SIZE = 32, 8, 128, 16
SPEC = AttentionSpec(HEADS, GROUPS, DIM, DIM**-0.5)


def make_batch(spans: Spans, tables: torch.Tensor, size: int = SIZE) -> StepBatch:
    """The step of ``spans`` over pages of ``size`` slots, as the engine would pack it."""
    starts, lengths = [s for s, _ in spans], [n for _, n in spans]
    positions = torch.cat([torch.arange(s, s + n) for s, n in spans]).cuda()
    row_start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    span_of = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(lengths)).cuda()
    slots = tables[span_of, positions // size].long() * size + positions % size
    return StepBatch(
        input_ids=positions,
        positions=positions,
        row_start=row_start,
        context=torch.tensor(starts, dtype=torch.int32).cuda(),
        tables=(tables,),
        slots=(slots,),
        logit_rows=positions[:0],
        starts=starts,
        lengths=lengths,
    )


def make_pool(spans: Spans, layers: int, extra: int = 0) -> tuple[KVPool, StepBatch]:
    """Random pages in random order, and the step over them. ``extra`` pages stand before those in use."""
    counts = [-(-(s + n) // SIZE) for s, n in spans]
    group = CacheGroup("full", tuple(range(layers)), (CacheRow(GROUPS, DIM, DIM),) * layers)
    pool = KVPool([group], PlainCodec(), [1 + extra + sum(counts)], SIZE, "cuda", BF16)
    for page in pool.pages[0].split(1024):
        page.view(BF16).normal_()
    order = (1 + extra + torch.randperm(sum(counts))).to(torch.int32)
    tables = torch.nn.utils.rnn.pad_sequence(list(order.split(counts)), batch_first=True)
    return pool, make_batch(spans, tables.contiguous().cuda())


def queries(spans: Spans) -> torch.Tensor:
    """Random queries [T, H, D] of the step of ``spans``."""
    return torch.randn(sum(n for _, n in spans), HEADS, DIM, device="cuda", dtype=BF16)


def key_bytes(spans: Spans) -> int:
    """Bytes of keys and values of one layer in bf16."""
    return 2 * sum(s + n for s, n in spans) * GROUPS * DIM * 2


def attention_flops(spans: Spans) -> int:
    """Operations of causal attention in one layer."""
    return 4 * HEADS * DIM * sum(n * s + n * (n + 1) // 2 for s, n in spans)


def cold_layers(spans: Spans, most: int) -> int:
    """Return as many layers as keep the L2 cache from holding the keys, at most ``most``."""
    return max(1, min(most, COLD_BYTES // key_bytes(spans)))


def backend(exact: bool = False) -> TritonBackend:
    """The engine's own attention backend."""
    chosen, site = TritonBackend(), Site("cuda", BF16, "plain", SIZE, (SPEC,), exact)
    assert not chosen.why_not(site), chosen.why_not(site)
    chosen.prepare(site)
    return chosen


def attention_inputs(q: torch.Tensor, pool: KVPool, layer: int, batch: StepBatch) -> tuple[torch.Tensor, ...]:
    """The first arguments of every attention kernel over pages."""
    planes = pool.layer(layer).planes
    return q, planes["k"], planes["v"], batch.tables[0], batch.context, batch.row_start
