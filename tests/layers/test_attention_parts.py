"""Parts of attention against scalar definitions in fp64: partial and proportional rotary, scales by position, gates,
value norms, keys as values."""

import math

import pytest
import torch

from kvasir.attention.backend import Site
from kvasir.attention.backends.torch import TorchBackend
from kvasir.engine.ways.batch import pack
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers.mixers.gqa import Mixer
from kvasir.layers.rope import Angles, RopeTable, frequencies
from kvasir.layers.spec import GQASpec, NormSpec, QueryScale, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.types import CacheGroup, Request, SamplingParams, Sequence, Span

H, G, D, E, T = 4, 2, 8, 12, 11
WHOLE, PARTIAL = RopeSpec(50.0, D), RopeSpec(50.0, 4)
PROPORTIONAL = RopeSpec(50.0, D, "proportional", num_pairs=1, factor=2.0)
NORM, HEADS = NormSpec(1e-5), NormSpec(1e-6)
CASES = {
    "plain": ({}, WHOLE),
    "no rotary": (dict(qk_norm=HEADS), None),
    "partial": (dict(qk_norm=HEADS, qkv_bias=True), PARTIAL),
    "proportional": ({}, PROPORTIONAL),
    "scale by position": (dict(query_scale=QueryScale(0.7, 3, 1)), WHOLE),
    "scale without rotary": (dict(query_scale=QueryScale(0.7, 4)), None),
    "value norm": (dict(value_norm=NORM), WHOLE),
    "keys are values": (dict(keys_are_values=True, qk_norm=HEADS), WHOLE),
    "keys are values, normed": (dict(keys_are_values=True, value_norm=NORM, qk_norm=HEADS), PROPORTIONAL),
    "gated": (dict(gated=True), WHOLE),
    "gated with biases": (dict(gated=True, qkv_bias=True, o_bias=True, qk_norm=HEADS), PARTIAL),
}


def normed(x, scale, eps):
    return x * (x.square().mean() + eps).rsqrt() * scale


def turned(x, position, rope):
    """Pairs (i, i + R/2) of the first R dimensions are complex numbers."""
    if rope is None:
        return x
    half, out = rope.head_dim // 2, x.clone()
    for i in range(half):
        angle = position * rope.theta ** (-2 * i / rope.head_dim)
        if rope.kind == "proportional":
            angle = angle / rope.factor if i < rope.num_pairs else 0.0
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def expected(spec, rope, slots, x):
    """Attention of every row, head by head."""
    w = {name: slot.target.double() for name, slot in slots.items()}

    def project(name, row):
        out = w[f"{name}.weight"] @ row
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    keys, values, out = [], [], []
    for position, row in enumerate(x.double()):
        k = project("k", row).view(G, D)
        v = (k if spec.keys_are_values else project("v", row).view(G, D)).clone()
        if spec.qk_norm is not None:
            k = torch.stack([normed(head, w["k_norm.weight"][0], spec.qk_norm.eps) for head in k])
        if spec.value_norm is not None:
            v = torch.stack([normed(head, 1.0, spec.value_norm.eps) for head in v])
        keys.append([turned(head, position, rope) for head in k])
        values.append(list(v))
        q = project("q", row).view(H, -1)
        heads = []
        for h in range(H):
            query, gate = q[h, :D], q[h, D:]
            if spec.qk_norm is not None:
                query = normed(query, w["q_norm.weight"][0], spec.qk_norm.eps)
            query = turned(query, position, rope) * spec.scale
            if (s := spec.query_scale) is not None:
                query = query * (1 + s.beta * math.log(1 + (position + s.offset) // s.length))
            g = h // (H // G)
            weights = torch.stack([query @ k[g] for k in keys]).softmax(0)
            head = sum(a * v[g] for a, v in zip(weights, values))
            heads.append(head * torch.sigmoid(gate) if spec.gated else head)
        out.append(project("o", torch.cat(heads)))
    return torch.stack(out)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_part_is_its_definition(case):
    quirks, rope = CASES[case]
    spec = GQASpec(H, G, D, 0.3, **quirks)
    mixer = Mixer(spec, E, Placement(torch.device("cpu"), torch.float32))
    generator = torch.Generator().manual_seed(3)
    for name, slot in mixer.slots().items():
        drawn = torch.randn(slot.shape, generator=generator)
        slot.fill(1 + 0.3 * drawn if "norm" in name else drawn * (0.4 if name.endswith("bias") else E**-0.5 * 1.5))
    assert sum(s.shape.numel() for n, s in mixer.slots().items() if "weight" in n and "norm" not in n) == spec.matrices(
        E
    )
    rest = [slot.shape.numel() for name, slot in mixer.slots().items() if "bias" in name or "norm" in name]
    assert sum(rest) == spec.vectors(E)
    x = torch.randn(T, E, generator=generator)
    pool = KVPool([CacheGroup("full", (0,), (spec.cache_row(),))], PlainCodec(), [4], 4, "cpu", torch.float32)
    backend = TorchBackend()
    backend.prepare(Site("cpu", torch.float32, "plain", 4, (spec.attention(),)))
    seq = Sequence(Request(id="a", prompt_ids=[1] * T, params=SamplingParams(), seed=0, max_tokens=1))
    seq.tables = [[1, 2, 3]]
    table, out = None if rope is None else RopeTable(rope, 32, torch.device("cpu")), []
    for start, length in ((0, 4), (4, 1), (5, 6)):
        batch = pack([Span(seq, start, length)], 4, "cpu", 1)
        backend.plan(batch)
        rows = x[start : start + length]
        out.append(mixer.forward(rows, Angles(table, batch.positions), pool.layer(0), backend, batch))
    want = expected(spec, rope, mixer.slots(), x)
    torch.testing.assert_close(torch.cat(out).double(), want, atol=2e-6, rtol=2e-5)


def test_frequencies_are_those_of_transformers():
    """proportional and longrope, which no small config reaches in every branch."""
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = dict(hidden_size=64, num_attention_heads=4, vocab_size=50, pad_token_id=None, eos_token_id=None)
    factors = dict(short_factor=[1.0, 1.5, 2.0, 4.0], long_factor=[2.0, 3.0, 5.0, 9.0])
    rope = {"rope_type": "longrope", "rope_theta": 70.0, "partial_rotary_factor": 0.5, **factors}
    rope["original_max_position_embeddings"] = 16
    config = Phi3Config(**shape, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope)
    spec = RopeSpec(
        70.0,
        8,
        "longrope",
        original_max_position=16,
        short_factors=tuple(factors["short_factor"]),
        long_factors=tuple(factors["long_factor"]),
    )
    for length, long in ((16, False), (17, True)):
        theirs, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
        torch.testing.assert_close(frequencies(spec, long), theirs)
        table = RopeTable(spec, length, torch.device("cpu"))
        assert torch.equal(table.table[3, :4], (3 * frequencies(spec, long)).cos())
