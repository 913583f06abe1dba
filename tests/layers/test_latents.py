"""The latent mixer against its definition in fp64, head by head; with a writer, against the keys and values that it is
made of: at full rank the latent loses nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvasir.attention.backend import Site
from kvasir.attention.backends.torch import TorchBackend
from kvasir.engine.ways.batch import pack
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers.mixers.mla import Mixer
from kvasir.layers.rope import Angles, RopeTable
from kvasir.layers.spec import LatentWriter, MLASpec, NormSpec, QueryScale, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.types import CacheGroup, Request, SamplingParams, Sequence, Span

H, G, E, T, D = 3, 2, 20, 11, 8
NORM = NormSpec(1e-5)
SPEC = MLASpec(H, rank=12, rope_dim=6, nope_dim=D, value_dim=5, scale=0.3, norm=NORM)


def mixed(spec: MLASpec, x: torch.Tensor, exact: bool = False) -> tuple[Mixer, torch.Tensor]:
    """A mixer with random weights, and its result for the rows of one sequence."""
    place = Placement(torch.device("cpu"), torch.float32, exact)
    mixer = Mixer(spec, E, place)
    draw = torch.Generator().manual_seed(3)
    for slot in mixer.slots().values():
        slot.target.copy_(torch.randn(slot.target.shape, generator=draw) * 0.5)
    return mixer, run(mixer, spec, x)


def run(mixer: Mixer, spec: MLASpec, x: torch.Tensor) -> torch.Tensor:
    """The mixer's result for the rows of one sequence."""
    group = CacheGroup("g", (0,), (spec.cache_row(),))
    pool = KVPool([group], PlainCodec(), [3], 16, "cpu", torch.float32)
    backend = TorchBackend()
    backend.prepare(Site("cpu", torch.float32, "plain", 16, (spec.attention(),), mixer.exact))
    seq = Sequence(Request(id="a", prompt_ids=[1] * T, params=SamplingParams(), seed=0, max_tokens=1))
    seq.tables = [[2]]
    batch = pack([Span(seq, 0, T)], 16, "cpu", 1)
    backend.plan(batch)
    table = RopeTable(RopeSpec(50.0, spec.rope_dim), 32, torch.device("cpu")) if spec.rope_dim else None
    return mixer.forward(x, Angles(table, batch.positions), pool.layer(0), backend, batch)


def normed(x, weight, eps=1e-5):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x, theta=50.0):
    """Rows [T, ..., Q] at positions 0, 1, ...: pairs of the first and second half are complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angle), angle).view(len(x), *[1] * (x.dim() - 2), half)
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat((z.real, z.imag), -1)


def attended(q, k, v, scale):
    """Causal attention of [T, H, ...], one definition for all."""
    scores = torch.einsum("thd,nhd->htn", q, k) * scale
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return torch.einsum("htn,nhv->thv", scores.softmax(-1), v)


def head_weights(w, name, parts):
    """The rows of every head's parts, [H, rows, K]."""
    return torch.stack([torch.cat([w[f"{name}.{h}.{part}.weight"] for part in parts]) for h in range(H)])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, dict(q_rank=7), dict(rope_dim=0), dict(norm=None), dict(query_scale=QueryScale(0.7, 3)),
     dict(q_rank=7, biases=("q_a", "kv_a", "o"))],
    ids=["plain", "q_rank", "no RoPE", "no norm", "scale by position", "biases"],
)  # fmt: skip
def test_the_definition(changes, exact):
    spec, x = replace(SPEC, **changes), torch.randn(T, E, generator=torch.Generator().manual_seed(1))
    mixer, got = mixed(spec, x, exact)
    w = {name: slot.target.double() for name, slot in mixer.slots().items()}
    x, pairs = x.double(), ("real", "imag") if spec.rope_dim else ()
    row = x @ torch.cat([w[f"kv_a.{part}.weight"] for part in ("nope", *pairs)]).t()
    if "kv_a" in spec.biases:
        row = row + torch.cat([w[f"kv_a.{part}.bias"] for part in ("nope", *pairs)])
    latent, rope = row[:, : spec.rank], row[:, spec.rank :]
    latent = latent if spec.norm is None else normed(latent, w["kv_norm.weight"])
    inner = x
    if spec.q_rank is not None:
        inner = x @ w["q_a.weight"].t() + (w["q_a.bias"] if "q_a" in spec.biases else 0)
        inner = normed(inner, w["q_a_norm.weight"])
    q = torch.einsum("te,hne->thn", inner, head_weights(w, "q", ("nope", *pairs)))
    if spec.rope_dim:
        q, rope = torch.cat((q[..., :D], turned(q[..., D:])), -1), turned(rope)
    if spec.query_scale is not None:
        q = q * (1 + 0.7 * torch.log1p(torch.arange(T) // 3).double())[:, None, None]
    k = torch.einsum("tr,hnr->thn", latent, head_weights(w, "kv_b", ("key",)))
    v = torch.einsum("tr,hnr->thn", latent, head_weights(w, "kv_b", ("value",)))
    k = torch.cat((k, rope[:, None].expand(-1, H, -1)), -1)
    want = attended(q, k, v, spec.scale).flatten(1) @ w["o.weight"].t() + (w["o.bias"] if spec.biases else 0)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    assert sum(slot.target.numel() for slot in mixer.slots().values()) == spec.matrices(E) + spec.vectors(E)


def test_a_writer_of_full_rank_is_the_attention_that_it_came_from():
    """Grouped heads with normed keys and no RoPE: with the identity as the map to the latent, and each head reading its
    group's part of it, nothing changes."""
    side = G * D
    writer = LatentWriter(G, D, NORM)
    spec = MLASpec(H, rank=2 * side, rope_dim=0, nope_dim=D, value_dim=D, scale=0.3, writer=writer)
    x = torch.randn(T, E, generator=torch.Generator().manual_seed(1))
    place = Placement(torch.device("cpu"), torch.float32)
    mixer = Mixer(spec, E, place)
    group_of = [0, 0, 1]
    draw = torch.Generator().manual_seed(3)
    for slot in mixer.slots().values():
        slot.target.copy_(torch.randn(slot.target.shape, generator=draw) * 0.5)
    w = mixer.slots()
    w["writer.latent.weight"].target.copy_(torch.eye(2 * side))
    for head, group in enumerate(group_of):
        for part, first in (("key", 0), ("value", side)):
            target = w[f"kv_b.{head}.{part}.weight"].target
            target.zero_()[:, first + group * D : first + (group + 1) * D] = torch.eye(D)
    got = run(mixer, spec, x)
    w, x = {name: slot.target.double() for name, slot in w.items()}, x.double()
    q = normed((x @ w["q.weight"].t()).view(T, H, D), w["writer.q_norm.weight"])
    k = normed((x @ w["k.weight"].t()).view(T, G, D), w["writer.k_norm.weight"])[:, group_of]
    v = (x @ w["v.weight"].t()).view(T, G, D)[:, group_of]
    want = attended(q, k, v, spec.scale).flatten(1) @ w["o.weight"].t()
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
