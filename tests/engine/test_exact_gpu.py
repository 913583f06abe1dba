"""Exact mode on a GPU, in bf16: a request's tokens are the same alone and in any company, whatever happens around
it."""

from __future__ import annotations

import random

import pytest
import torch

from kvasir.types import Request
from tests import checkpoints
from tests.engine.driver import Driver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

COUNT, SHARED = 256, 64  # requests; tokens that a third of the prompts begin with
WIDE = dict(
    vocab_size=1000,
    hidden_size=512,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
)
MODELS = {
    "base": None,
    "dense": ("qwen3", WIDE),
    "experts": ("qwen3_moe", {**WIDE, "num_experts": 16, "moe_intermediate_size": 192}),
    "window": ("gemma3_text", {**WIDE, "sliding_window": 100}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> str:
    """A model in the package, or a folder."""
    if MODELS[request.param] is None:
        return request.param
    variant, changes = MODELS[request.param]
    return str(checkpoints.write(tmp_path_factory.mktemp(request.param), variant, **changes))


def driver(model: str, **options) -> Driver:
    return Driver(
        model,
        device="cuda",
        dtype="bfloat16",
        check=False,
        overlap=True,
        **{"max_num_seqs": COUNT, "num_pages": 8192, "max_num_batched_tokens": 2048, "poison": False} | options,
    )


def fleet(d: Driver) -> list[Request]:
    """Prompts of 1 to 400 tokens; greedy, hot, narrowed; a few with log-probabilities."""
    draw, vocab = random.Random(5), d.engine.info.tokenizer_size
    shared = [draw.randrange(3, vocab) for _ in range(SHARED)]
    requests = []
    for i in range(COUNT):
        prompt = [draw.randrange(3, vocab) for _ in range(draw.choice((1, 2, 15, 16, 17, 60, 130, 400)))]
        how = (
            dict(temperature=0),
            dict(temperature=1.0),
            dict(temperature=0.8, top_p=0.9),
            dict(temperature=1.2, top_k=20),
        )[i % 4]
        prompt = shared + prompt if i % 3 == 0 else prompt
        requests.append(d.request(f"r{i}", prompt, max_tokens=draw.randint(8, 24), ignore_eos=True, seed=i, **how))
    return requests


def tokens(d: Driver) -> dict[str, list[int]]:
    assert not d.errors
    return {name: out.tokens for (name, _), out in d.outputs.items()}


@pytest.fixture(scope="module")
def alone(model):
    """Run every request by itself, without a prefix cache and with its prompt in one step."""
    d = driver(model, enable_prefix_caching=False)
    for request in fleet(d):
        d.run([request])
    found = tokens(d)
    assert len({tuple(t) for t in found.values()}) > COUNT // 2, "the answers tell the requests apart"
    d.close()
    return found


@pytest.mark.parametrize("graphs", [True, False])
def test_together(graphs, model, alone):
    d = driver(model, cuda_graphs=graphs)
    if graphs:
        d.run([d.request("first", [3, 4, 5], max_tokens=2)])
        while d.engine.idle():
            pass
        assert d.engine.runner.graphs is not None and d.engine.runner.graphs._ready, "nothing was captured"
        del d.outputs["first", 0]
    d.run(fleet(d))
    assert tokens(d) == alone
    d.close()


def test_shuffled_with_aborts_prefix_hits_and_preemption(model, alone):
    """Use chunks of few rows, a pool that is too small, another order of arrivals, and cancel a tenth midway; then run
    all again."""
    d = driver(model, max_num_batched_tokens=200, num_pages=400, max_num_seqs=96)
    requests = fleet(d)
    cancelled = set()
    for order in range(2):
        random.Random(order).shuffle(requests)
        d.outputs.clear()
        for i, request in enumerate(requests):
            d.submit(request)
            for _ in range(i % 3):
                d.step(preempt=i % 20 == 0)
            if i % 10 == 9:
                victim = requests[i - 4].id
                cancelled.add(victim)
                d._take(d.engine.cancel(victim))
        d.run([])
        found = tokens(d)
        assert all(found[name] == alone[name] for name in found.keys() - cancelled)
        assert all(alone[name][: len(t)] == t for name, t in found.items()), (
            "what a cancelled request had was right, too"
        )
        assert len(found.keys() - cancelled) > COUNT // 2
        cancelled.clear()
    assert any(out.num_cached for out in d.outputs.values()), "no prefix was shared"
    d.close()


def test_beside_requests_that_the_step_cannot_draw_for(model, alone):
    """Other requests with log-probabilities and penalties take the forward pass from the graph, and draw in another
    way."""
    d = driver(model)
    requests = fleet(d)[:64]
    other = dict(max_tokens=20, ignore_eos=True, logprobs=3, repetition_penalty=1.1)
    company = [d.request(f"c{i}", list(range(3, 40 + i)), seed=i, **other) for i in range(8)]
    d.run([r for i, request in enumerate(requests) for r in (request, *company[i // 8 : i // 8 + (i % 8 == 0)])])
    found = tokens(d)
    assert all(found[r.id] == alone[r.id] for r in requests)
    d.close()


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4", "int4_bdr", "nvfp4"])
def test_over_a_quantised_cache(codec, model):
    """Alone, together, and again under pressure: a pool that holds the longest request and a little more, whose freed
    pages are filled with NaN, chunks of few rows, arrivals in another order, prefix hits and preemptions."""
    count = 32 if model == "base" or codec in ("int4", "int4_bdr") else 12

    def requests(d: Driver) -> list[Request]:
        return fleet(d)[:count]

    options = dict(kv_codec=codec, page_slots=None)
    d = driver(model, enable_prefix_caching=False, cuda_graphs=False, **options)
    for request in requests(d):
        d.run([request])
    alone = tokens(d)
    d.close()

    d = driver(model, cuda_graphs=True, **options)
    d.run(requests(d))
    assert tokens(d) == alone
    size = d.engine.runner.pool.page_slots
    d.close()

    d = driver(
        model,
        num_pages=-(-(SHARED + 400 + 24) // size) + 3,
        max_num_batched_tokens=150,
        max_num_seqs=12,
        max_model_len=512,
        poison=True,
        **options,
    )
    hits = 0
    for order in range(2):
        shuffled = requests(d)
        random.Random(order).shuffle(shuffled)
        d.outputs.clear()
        d.run(shuffled, gap=1, preempt_every=9)
        assert tokens(d) == alone
        hits += sum(out.num_cached > 0 for out in d.outputs.values())
    assert hits, "no prefix was shared"
    d.close()
