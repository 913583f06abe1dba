"""CUDA graphs and overlap on a GPU, in fp32: the same tokens as step by step, whatever happens around them."""

from __future__ import annotations

import pytest
import torch

from kvasir.decoding.sampler import StepOutput
from kvasir.engine.ways.capture import CudaCapture, call_through
from kvasir.engine.ways.mixed_steps import MixedSteps
from tests.engine.driver import Driver, use_ways
from tests.engine.test_mixed_steps import forced

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [
    [300 + (7 * i) % 900 for i in range(40)][:length] + [300 + k, 301 + 2 * k]
    for k, length in enumerate([3, 14, 15, 30, 31, 38, 20, 9, 5])
]


def driver(**options) -> Driver:
    return Driver(
        **{"device": "cuda", "dtype": "float32", "batch_invariant": False, "max_num_seqs": 16, "num_pages": 128}
        | options
    )


def fleet(d: Driver, temperature: float, n: int = 1, **params) -> list:
    return [
        d.request(f"r{k}", p, temperature=temperature, max_tokens=24, ignore_eos=True, seed=k, n=n, **params)
        for k, p in enumerate(PROMPTS)
    ]


def tokens(d: Driver) -> dict:
    assert not d.errors
    found = {key: (out.tokens, out.finish_reason) for key, out in d.outputs.items()}
    d.close()
    return found


@pytest.fixture(scope="module")
def plain():
    """Tokens of eager steps, each read before the next is planned."""
    found = {}
    for temperature in (0.0, 1.0):
        d = driver(cuda_graphs=False, overlap=False)
        d.run(fleet(d, temperature, top_p=0.95, top_k=50))
        found[temperature] = tokens(d)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("graphs, overlap", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "how", [dict(), dict(gap=2), dict(gap=1, preempt_every=4)], ids=["together", "arrivals", "preempted"]
)
def test_same_tokens(graphs, overlap, how, temperature, plain):
    d = driver(cuda_graphs=graphs, overlap=overlap)
    d.run(fleet(d, temperature, top_p=0.95, top_k=50), **how)
    if graphs:
        assert d.engine.runner.graphs is not None and d.engine.runner.graphs._ready, "nothing was captured"
    assert tokens(d) == plain[temperature]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [dict(gap=1), dict(gap=2, preempt_every=4)], ids=["arrivals", "preempted"])
def test_same_tokens_of_mixed_steps_in_pieces(how, temperature, plain):
    d = driver(max_num_batched_tokens=48)
    ran = forced(d)
    d.run(fleet(d, temperature, top_p=0.95, top_k=50), **how)
    assert len(ran) > 5 and list(d.engine.runner.way(MixedSteps)._ready) == [64], "nothing was captured"
    assert tokens(d) == plain[temperature]


def test_same_tokens_in_a_tight_pool_with_prefix_hits(plain):
    d = driver(num_pages=12, max_model_len=112, max_num_batched_tokens=24)
    d.run(fleet(d, 1.0, top_p=0.95, top_k=50), gap=1)
    d.outputs.clear()
    d.run(fleet(d, 1.0, top_p=0.95, top_k=50), gap=1)
    assert any(out.num_cached for out in d.outputs.values())
    assert tokens(d) == plain[1.0]


def test_cancels_leave_the_others_alone(plain):
    d = driver()
    for request in fleet(d, 1.0, top_p=0.95, top_k=50):
        d.submit(request)
    for after, name in ((9, "r3"), (3, "r0"), (4, "r8")):
        for _ in range(after):
            d.step()
        d._take(d.engine.cancel(name))
    d.run([])
    cancelled = {(name, 0) for name in ("r3", "r0", "r8")}
    assert {key: value for key, value in tokens(d).items() if key not in cancelled} == {
        k: v for k, v in plain[1.0].items() if k not in cancelled
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype, invariant", [("float32", False), ("bfloat16", True)])
def test_reports_of_captured_steps(dtype, invariant, temperature):
    """Log-probabilities, ranks and confidences are those of the sampler's own pipeline; in exact mode to the bit."""
    found = []
    for options in (dict(cuda_graphs=False, overlap=False), dict(cuda_graphs=True, overlap=True)):
        d = driver(dtype=dtype, batch_invariant=invariant, **options)
        requests = fleet(d, temperature, top_p=0.95, confidence=20)
        for k, logprobs in ((3, None), (4, 0)):
            requests[k] = d.request(f"r{k}", PROMPTS[k], max_tokens=24, ignore_eos=True, seed=k, logprobs=logprobs)
        d.run(requests)
        if d.engine.runner.graphs is not None:
            assert any(output == StepOutput.REPORTS for _, output, _ in d.engine.runner.graphs._ready), (
                "nothing was captured"
            )
        entries = {key: [e.id for e in out.logprobs] for key, out in d.outputs.items()}
        values = {
            key: [(e.logprob, e.confidence or 0.0, e.rank) for e in out.logprobs] for key, out in d.outputs.items()
        }
        found.append((tokens(d), entries, values))
    (ids, entries, values), (ids_2, entries_2, values_2) = found
    assert ids == ids_2 and entries == entries_2
    assert not values["r3", 0] and len(values["r4", 0]) == 24 and min(c for _, c, _ in values["r0", 0]) > 0
    if invariant:
        assert values == values_2
    for key, numbers in values.items():
        a, b = (torch.tensor(n).view(-1, 3) for n in (values_2[key], numbers))
        torch.testing.assert_close(a[:, :2], b[:, :2], rtol=1e-4, atol=1e-4)
        assert ((a - b)[:, 2].abs() <= 1).all(), "two logits that rounding may swap, at most"


@pytest.mark.parametrize(
    "kind", [dict(logprobs=2), dict(repetition_penalty=1.2), dict(n=2), dict(min_tokens=4)], ids=lambda k: next(iter(k))
)
def test_requests_the_step_cannot_draw_for(kind):
    """The forward pass comes from the graph, the rest from the sampler."""
    found = []
    for options in (dict(cuda_graphs=False, overlap=False), dict(cuda_graphs=True, overlap=True)):
        d = driver(**options)
        d.run(fleet(d, 1.0, **kind))
        found.append(tokens(d))
    assert found[0] == found[1]


def test_a_replay_is_bit_for_bit_the_captured_step():
    """The same buffers and padding without a capture give the same bits for every draw and every largest logit."""
    found = []
    for capture in (call_through, None):
        d = driver(check=False, poison=False)
        runner = d.engine.runner
        use_ways(runner, capture or CudaCapture(runner.device))
        seen, decode = [], runner.graphs.decode

        def kept(spans, output, decode=decode, seen=seen, graphs=runner.graphs):
            handle = decode(spans, output)
            seen.append(graphs._buffers.draws[: 6 * handle._size].view(6, -1)[:, : len(spans)].clone())
            return handle

        runner.graphs.decode = kept
        d.run(fleet(d, 1.0, confidence=20))
        found.append(seen)
        d.close()
    assert len(found[0]) == len(found[1]) > 8
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("params", [dict(), dict(confidence=20)], ids=["draws", "reports"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_launch_waits_for_nothing(graphs, params):
    d = driver(cuda_graphs=graphs, overlap=True, check=False, poison=False)
    for request in fleet(d, 1.0, top_p=0.9, n=2, **params):
        d.submit(request)
    for _ in range(12):
        d.step()
    launch = d.engine.runner.launch

    def strict(plan, late=False):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan, late)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    d.engine.runner.launch = strict
    d.run([d.request("late", PROMPTS[5], max_tokens=8, ignore_eos=True)])
    assert not d.errors
    d.close()


@pytest.mark.parametrize("params", [dict(), dict(confidence=20)], ids=["draws", "reports"])
@pytest.mark.parametrize("drafter", ["", "ngram:min_match=1"])
def test_captures_fit_the_memory_plan(drafter, params):
    """Every bucket can be captured after serving at full width, in a pool that was sized by measurement."""
    d = Driver(
        device="cuda",
        dtype="bfloat16",
        batch_invariant=False,
        num_pages=None,
        max_num_seqs=256,
        check=False,
        poison=False,
        gpu_memory_utilization=0.9,
        drafter=drafter,
    )
    d.run(
        [d.request(f"w{i}", [300 + i % 900] * 64, max_tokens=12, ignore_eos=True, seed=i, **params) for i in range(256)]
    )
    while d.engine.idle():
        pass
    graphs = d.engine.runner.graphs
    assert {size for size, *_ in graphs._ready} == set(graphs.buckets)
    assert any(output == StepOutput.REPORTS for _, output, _ in graphs._ready) == bool(params)
    d.outputs.clear()
    d.run(
        [d.request(f"w{i}", [300 + i % 900] * 64, max_tokens=12, ignore_eos=True, seed=i, **params) for i in range(256)]
    )
    assert not d.errors
    d.close()
