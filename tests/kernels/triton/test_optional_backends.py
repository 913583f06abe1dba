"""Backends of optional packages, with stand-ins for the packages: what they are handed, and that results land in the
right rows."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import math
import sys
import types

import pytest
import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels import dense_attention
from kvasir.kernels import paged_attention as paged
from kvasir.technique import load
from tests.attention.helpers import make_world, truth

SPANS = {
    "together": [(40, 1), (33, 20), (0, 25)],
    "apart": [(0, 25), (40, 1), (33, 20)],
    "short ones between": [(7, 30), (5, 3), (0, 25)],
}


def install(monkeypatch, name: str, **members) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    max_seqlen_q,
    softmax_scale,
    causal,
    softcap,
    return_softmax_lse,
):
    lengths = cu_seqlens_q.diff().tolist()
    starts = [end - length for end, length in zip(cache_seqlens.tolist(), lengths)]
    assert (
        causal and max_seqlen_q == max(lengths) and page_table.shape[0] == len(lengths) and q.shape[0] == sum(lengths)
    )
    out, lse = paged.paged_attention_ref(
        q,
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        page_table,
        starts,
        lengths,
        softmax_scale,
        softcap=softcap or None,
    )
    return (out, lse.transpose(0, 1)) if return_softmax_lse else out


class Wrapper:
    def __init__(self, workspace, layout):
        assert workspace.dtype == torch.uint8 and layout == "HND"

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        sm_scale,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
    ):
        assert causal and q_data_type == kv_data_type
        pages = list(paged_kv_indices.split(paged_kv_indptr.diff().tolist()))
        self.lengths = qo_indptr.diff().tolist()
        ends = [(len(p) - 1) * page_size + last for p, last in zip(pages, paged_kv_last_page_len.tolist())]
        self.starts = [end - length for end, length in zip(ends, self.lengths)]
        self.table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
        self.how = {"softcap": logits_soft_cap}
        self.scale = sm_scale

    def run(self, q, kv, *, out, return_lse):
        found, lse = paged.paged_attention_ref(q, *kv, self.table, self.starts, self.lengths, self.scale, **self.how)
        out = found if out is None else out.copy_(found)
        return (out, lse / math.log(2)) if return_lse else out


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_long_spans_go_to_the_package(name, spans, device, monkeypatch):
    if name == "flash_attn":
        install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
    else:
        install(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(dense_attention, "MIN_ROWS", 30)
    world = make_world(SPANS[spans], device=device, dtype=torch.float16, dim=64, softcap=3.0)
    chosen = load("kvasir.attention.backends", name, AttentionBackend)
    assert chosen.why_not(world.site(device=device)) == []
    chosen.prepare(world.site(device=device))
    chosen.plan(world.batch)
    out, lse = chosen.run(world.q, world.cache, world.spec, world.batch, return_lse=True)
    want, want_lse = truth(world)
    torch.testing.assert_close(out.double().cpu(), want, atol=3e-3, rtol=3e-3)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-4, rtol=1e-5)
    assert torch.equal(chosen.run(world.q, world.cache, world.spec, world.batch), out)
    assert len(chosen.why_not(dataclasses.replace(world.site(exact=True, device=device), dtype=torch.float32))) == 2
