"""Features of a spec that no served family uses yet: attention sinks, and layers that read another layer's cache."""

from dataclasses import replace

import pytest
import torch

from kvasir.attention.backend import Site
from kvasir.attention.backends.torch import TorchBackend
from kvasir.engine.ways.batch import pack
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers.spec import DenseSpec, GQASpec, NormSpec, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.loader import fill_random
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.types import CacheRow, Request, SamplingParams, Sequence, Span
from tests import checkpoints
from tests.models.test_parity import Paged

MIXER = GQASpec(4, 2, 16, 0.25, qk_norm=NormSpec())
LAYER = LayerSpec(MIXER, DenseSpec(40), RopeSpec(100.0, 16), NormSpec())
SPEC = ModelSpec(
    family="none", hidden_size=32, vocab_size=50, max_position=64, layers=(LAYER,) * 3, final_norm=NormSpec()
)


def decoder(spec, dtype=torch.float32):
    made = Decoder(spec, Placement(torch.device("cpu"), dtype))
    fill_random(made, 0)
    return made


def run(model, chunk, length=20):
    """Logits of every position of one sequence, computed ``chunk`` rows per step."""
    spec = model.spec
    pool = KVPool(groups := spec.cache_groups(), PlainCodec(), [4] * len(groups), 16, "cpu", torch.float32)
    caches = [pool.layer(spec.cache_layer(i)) for i in range(len(spec.layers))]
    backend = TorchBackend()
    backend.prepare(Site("cpu", torch.float32, "plain", 16, tuple(spec.attentions())))
    seq = Sequence(
        Request(id="a", prompt_ids=list(range(1, length + 1)), params=SamplingParams(), seed=0, max_tokens=1)
    )
    seq.tables = [[1, 2]] * len(groups)
    out = []
    for start in range(0, length, chunk):
        batch = pack([Span(seq, start, min(chunk, length - start))], 16, "cpu", len(groups))
        backend.plan(batch)
        out.append(model.logits(model.forward(batch, caches, backend)))
    return torch.cat(out)


def test_a_layer_may_read_the_cache_of_an_earlier_one():
    shared = replace(SPEC, layers=(LAYER, LAYER, replace(LAYER, cache_of=1)))
    model = decoder(shared)
    names = model.slots()
    assert "layers.1.mixer.k.weight" in names and "layers.2.mixer.q.weight" in names
    assert not any(n.startswith(("layers.2.mixer.k", "layers.2.mixer.v")) for n in names)
    whole = run(model, 20)
    torch.testing.assert_close(run(model, 3), whole, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        model.slots()["layers.1.mixer.v.weight"].target.neg_()
        model.blocks[1].mixer.o.weight.tensor.neg_()  # layer 1 itself computes what it did
    assert (run(model, 20) - whole).abs().max() > 1e-2, "layer 2 reads what layer 1 wrote"


def test_sinks_reach_the_attention():
    model = decoder(replace(SPEC, layers=(replace(LAYER, mixer=replace(MIXER, sinks=True)),) * 3))
    before = run(model, 20)
    with torch.inference_mode():
        model.slots()["layers.0.mixer.sinks"].target.fill_(5.0)
    after = run(model, 20)
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(run(model, 3), after, atol=1e-4, rtol=1e-4)


def test_logit_scale_and_softcap():
    plain, hidden = decoder(SPEC), torch.randn(5, 32)
    changed = decoder(replace(SPEC, logit_scale=3.0, logit_softcap=2.0))
    torch.testing.assert_close(changed.logits(hidden), 2.0 * torch.tanh(plain.logits(hidden) * 3.0 / 2.0))
    assert changed.logits(hidden).abs().max() <= 2.0


WIDE = replace(LAYER, mixer=replace(MIXER, num_kv_heads=1, head_dim=24), rope=RopeSpec(100.0, 24))


def test_layers_of_one_lifetime_and_different_widths_share_a_page_table():
    """The result is that of pages of their own, which a window that hides nothing gives them."""
    mixed = replace(SPEC, layers=(LAYER, WIDE, LAYER, WIDE))
    (group,) = mixed.cache_groups()
    assert group.rows == (CacheRow(2, 16, 16), CacheRow(1, 24, 24)) * 2
    whole = run(decoder(mixed), 20)
    torch.testing.assert_close(run(decoder(mixed), 3), whole, atol=1e-4, rtol=1e-4)
    apart = replace(WIDE, mixer=replace(WIDE.mixer, window=60))  # never hides a position, and has pages of its own
    torch.testing.assert_close(run(decoder(replace(SPEC, layers=(LAYER, apart) * 2)), 20), whole, atol=1e-4, rtol=1e-4)


def test_layers_may_rotate_nothing():
    plain = replace(SPEC, layers=(LAYER, replace(LAYER, rope=None)))
    model = decoder(plain)
    torch.testing.assert_close(run(model, 3), run(model, 20), atol=1e-4, rtol=1e-4)
    assert (
        model.angles(torch.arange(2))[1].table is None and (run(model, 20) - run(decoder(SPEC), 20)).abs().max() > 1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_in_the_model_s_dtype_and_leave_their_input_alone(dtype):
    model, hidden = decoder(SPEC, dtype), torch.randn(3, 32).to(dtype)
    before = hidden.clone()
    assert model.logits(hidden).dtype == dtype and model.logits(hidden[:0]).shape == (0, 50)
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_wanted_rows_are_those_of_the_whole(family, tmp_path):
    """The last layer may leave out rows that nobody asked for."""
    folder = checkpoints.write(tmp_path / family, family)
    whole, some = Paged(folder), Paged(folder)
    spans = [Span(seq, 0, len(seq.tokens)) for seq in whole.seqs]
    everything = torch.cat(whole.step(spans))
    batch = pack([Span(seq, 0, len(seq.tokens)) for seq in some.seqs], 16, "cpu", len(some.pool.groups))
    wanted = torch.tensor([0, 40, 41, 61])
    some.backend.plan(batch)
    tap = {len(some.model.blocks) - 1: torch.empty(len(everything), some.model.spec.hidden_size)}
    for taps in (None, tap):
        hidden = some.model.forward(batch, some.caches, some.backend, taps, wanted)
        assert hidden.shape[0] == 4
        torch.testing.assert_close(some.model.logits(hidden), everything[wanted], atol=2e-5, rtol=2e-5)
