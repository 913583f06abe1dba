"""Adapters on a GPU: rows without one keep their bits, captured steps with and without, and the merged models."""

from __future__ import annotations

import pytest
import torch

from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.mixed_steps import MixedSteps
from kvasir.kernels.lora import MAX_ROWS
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.spec import NormSpec
from kvasir.layers.weights import Placement
from kvasir.types import StepBatch
from tests.adapters import merge, write_adapter
from tests.engine.driver import Driver
from tests.engine.test_adapters import ASKED, TEXT, fill_slots, fleet, request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Products of an 8B model and of Qwen3-0.6B: some have kernels written by hand for few rows, some are the BLAS's.
SHAPES = [(4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (14336, (4096,)), (1024, (3072, 3072)), (1024, (1024,))]


def batch_of(slots: torch.Tensor | None) -> StepBatch:
    none = torch.zeros(0)
    return StepBatch(none, none, none, none, (), (), none, [], [], variants=slots)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 33, 64, 100, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_without_an_adapter_keep_their_bits(shape, rows, exact):
    width, widths = shape
    torch.manual_seed(0)
    place = Placement(torch.device("cuda"), torch.bfloat16, exact=exact)
    product = Linear(width, dict(zip("abc", widths)), bias=False, place=place)
    product.weight.tensor.normal_(0, width**-0.5)
    product.use_adapters(3, 16)
    pairs = product.low_rank.pairs
    pairs.a_SCK.normal_(0, width**-0.5)
    pairs.b_SNR.normal_()
    pairs.ranks_S.fill_(16)
    norm = RMSNorm(width, NormSpec(1e-6), place)
    norm.weight.normal_(1.0, 0.1)
    x, residual = torch.randn(rows, width), torch.randn(rows, sum(widths))
    x, residual = (t.to("cuda", torch.bfloat16) for t in (x, residual))
    slots = torch.tensor([0, 1, 2, 0, 3], dtype=torch.int32, device="cuda").repeat(-(-rows // 5))[:rows].contiguous()
    free = slots == 0
    for form in ({}, {"norm": norm}, {"residual_TN": residual}, {"norm": norm, "activation": "silu"}):
        if "activation" in form and len(widths) != 2:
            continue
        own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in form.items()}
        want = product(x, **own)
        own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in form.items()}
        found = product(x, **own, batch=batch_of(slots))
        assert found.dtype == want.dtype
        assert torch.equal(found[free], want[free]), f"{form.keys()}"
        assert rows == 1 or not torch.equal(found[~free], want[~free])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(sorted({name for name, _ in ASKED if name})):
        write_adapter(root / name, rank=8 << (seed % 3), seed=seed, strength=0.3, one_hot=name == "g")
    return root


def driver(folders, **options) -> Driver:
    modules = tuple(f"{path.name}={path}" for path in sorted(folders.iterdir()) if "merged" not in path.name)
    lora = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 32, "lora_modules": modules}
    gpu = {"device": "cuda", "dtype": "float32", "max_num_seqs": 16, "num_pages": 128}
    return Driver(**gpu | lora | options)


def outputs(d: Driver) -> dict:
    assert not d.errors
    found = {key: out.tokens for key, out in d.outputs.items()}
    d.close()
    return found


@pytest.fixture(scope="module")
def alone(folders):
    d = driver(folders, cuda_graphs=False, overlap=False)
    for made in fleet(d):
        d.run([made])
    return outputs(d)


@pytest.mark.parametrize("how", [dict(), dict(gap=2), dict(gap=1, preempt_every=4)], ids=str)
def test_captured_steps_with_and_without_adapters(how, folders, alone, monkeypatch):
    monkeypatch.setattr("kvasir.engine.ways.graph_buckets.EAGER_STEPS", 1)
    monkeypatch.setattr("kvasir.engine.ways.mixed_steps.EAGER_STEPS", 1)
    d = driver(folders, overlap=True)
    for _ in range(2):
        d.outputs.clear()
        d.run(fleet(d), **how)
    ways = [way for way in d.engine.runner.ways if type(way) in (DecodeGraphs, MixedSteps) and way._varied]
    assert len(ways) == 2 and ways[0]._ready, "no step with adapters was captured"
    assert outputs(d) == alone


def test_two_slots_for_five_adapters(folders, alone):
    d = driver(folders, max_loras=2, overlap=True)
    d.run(fleet(d), gap=1)
    assert outputs(d) == alone


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 0.25)])
@pytest.mark.parametrize("count", [12, MAX_ROWS + 40])
def test_a_mixed_batch_equals_merged_models(folders, dtype, tolerance, count, tmp_path):
    text = (TEXT * 4)[:count]

    def scored(d: Driver, names) -> list[torch.Tensor]:
        d.run([request(d, str(i), name, text, prompt_logprobs=0) for i, name in enumerate(names)])
        found = [torch.tensor([p.logprob for p in d.outputs[str(i), 0].prompt_logprobs[1:]]) for i in range(len(names))]
        d.close()
        return found

    names, mixed = ["", "a", "c", "", "g"], driver(folders, dtype=dtype)
    fill_slots(mixed, "acg")
    found = scored(mixed, names)
    for name, logprobs in zip(names, found):
        model = str(merge(folders / name, tmp_path / name)) if name and not (tmp_path / name).exists() else "nano"
        want = scored(Driver(model=model, device="cuda", dtype=dtype), [""])[0]
        assert (logprobs - want).abs().mean() < tolerance, name
