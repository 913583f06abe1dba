"""On a GPU in fp32, drafts give the tokens of the plain engine, in graphs and without."""

from __future__ import annotations

import pytest

from kvasir.engine.ways import graph_buckets
from kvasir.engine.ways.graph_buckets import ROW_BY_ROW
from tests.speculation import trained as heads
from tests.speculation.helpers import NANO, Hostile, WithGuests, driver, install, requests

pytestmark = pytest.mark.gpu


def run(drafter: str, hostile: dict | None = None, **options):
    options = {"device": "cuda", "dtype": "float32", "batch_invariant": False, "max_num_seqs": 16} | options
    d = driver(drafter.replace("guests", "replay"), **options)
    if hostile is not None:
        wild = Hostile(hostile) if drafter == "replay" else WithGuests(hostile, d.engine.runner.model.spec.hidden_size)
        wild.tail = (1, 2) if options["batch_invariant"] and drafter != "replay" else ()
        install(d, wild)
    for again in range(4):  # buckets are captured after a few uses, and the others here
        while again == 2 and d.engine.idle():
            pass
        d.outputs.clear()
        d.run(requests(d, 1.0, 2, logprobs=None))
    found = {key: out.tokens for key, out in d.outputs.items()}
    stats, graphs = d.engine.stats(), d.engine.runner.graphs
    captured = [] if graphs is None else [key for key in graphs._ready if key[2]]
    assert not d.errors
    d.close()
    return found, stats, captured


@pytest.fixture(scope="module")
def plain():
    return run("", cuda_graphs=False, overlap=False)[0]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    "drafter", ["ngram:min_match=1", "suffix:min_match=1", f"draft_model:model={NANO}", "hostile", "guests"]
)
@pytest.mark.parametrize("codec", ["plain"])
def test_same_tokens(drafter, graphs, codec, plain):
    hostile = plain if drafter in ("hostile", "guests") else None
    found, stats, captured = run(drafter.replace("hostile", "replay"), hostile, cuda_graphs=graphs, kv_codec=codec)
    assert found == plain and stats.accepted_tokens > 0
    assert bool(captured) == graphs and all(form > ROW_BY_ROW for _, _, form in captured), (
        "chains, trees and guests in one kind of graph"
    )


@pytest.mark.parametrize("drafter", ["ngram:min_match=1", "hostile"])
def test_the_switch_leaves_trees_to_eager_steps(drafter, plain, monkeypatch):
    """The same with chains row by row."""
    monkeypatch.setattr(graph_buckets, "SHARE_KEYS", False)
    found, _, captured = run(drafter.replace("hostile", "replay"), plain if drafter == "hostile" else None)
    assert found == plain and all(form == ROW_BY_ROW for _, _, form in captured)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("drafter", ["ngram:min_match=1", "hostile", "guests"])
def test_exact_mode_keeps_tokens_in_bf16(drafter, graphs):
    """Trees are cut to chains: the rows of a tree have their keys in other slots."""
    options = dict(dtype="bfloat16", batch_invariant=True)
    alone = run("", cuda_graphs=False, overlap=False, **options)[0]
    hostile = alone if drafter in ("hostile", "guests") else None
    found, stats, captured = run(drafter.replace("hostile", "replay"), hostile, cuda_graphs=graphs, **options)
    assert found == alone and stats.accepted_tokens > 0
    assert all(form == ROW_BY_ROW for _, _, form in captured)


@pytest.mark.parametrize("drafter", ["hostile", "guests", "ngram:min_match=1"])
@pytest.mark.parametrize("codec", ["int4_bdr", "int4", "int8", "fp8"])
def test_lossy_codecs_keep_tokens_too(codec, drafter):
    """Trees and chains run in the kernel for short spans, in graphs. Moves copy codes and scales, so a tree's keys are
    the same numbers in other slots."""
    alone = run("", kv_codec=codec, page_slots=None, cuda_graphs=False, overlap=False)[0]
    hostile = alone if drafter in ("hostile", "guests") else None
    found, stats, captured = run(drafter.replace("hostile", "replay"), hostile, kv_codec=codec, page_slots=None)
    assert stats.accepted_tokens > 0 and captured and all(form > ROW_BY_ROW for _, _, form in captured)
    assert sum(found[key] == alone[key] for key in alone) >= len(alone) - 1, "but for a tie"


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind, more", [("medusa", ""), ("eagle", ""), ("eagle", ",width=1"), ("ppd", "")])
def test_trained_heads_keep_tokens(kind, more, graphs, tmp_path):
    """Hidden states come from graphs and from eager steps; drafting itself is captured and stays captured."""
    folder = heads.trained(kind, tmp_path, 40)
    options = dict(device="cuda", dtype="float32", batch_invariant=False)
    alone = heads.driver(cuda_graphs=False, overlap=False, **options)
    alone.run(heads.requests(alone, 0.7, 2))
    expected = heads.tokens(alone)
    alone.close()
    d = heads.driver(f"{kind}:model={folder}{more}", cuda_graphs=graphs, **options)
    for _ in range(4):
        d.outputs.clear()
        d.run(heads.requests(d, 0.7, 2))
        assert heads.tokens(d) == expected
    stats, drafter = d.engine.stats(), d.engine.proposals.drafting.drafter
    assert stats.accepted_tokens > 20
    if kind == "eagle" and graphs:
        assert drafter._capture is not None and any(shape.replay for shape in drafter._shapes.values())
    d.close()
