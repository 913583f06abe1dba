"""Drafters get the outputs of the chosen layers for every committed row, whichever way a step runs, and nothing else
changes."""

from __future__ import annotations

import pytest
import torch

from kvasir.engine.ways.capture import EAGER_STEPS, call_through
from kvasir.engine.ways.decode_tapes import DecodeTapes
from kvasir.models.checkpoint import resolve
from kvasir.speculation.drafter import Drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Grammar
from kvasir_lab import export
from tests.engine.driver import use_ways
from tests.engine.test_mixed_steps import forced
from tests.speculation.helpers import LENGTHS, Hostile, driver, install, outputs, plain, requests

LAYERS = (0, 2, 3)


class Recorder(Drafter):
    """Keeps what it is handed, by request, branch and position; proposes the plain run's tokens with decoys, or
    nothing."""

    hidden_layers = LAYERS

    def __init__(self, expected: dict | None = None, layers: tuple[int, ...] = LAYERS) -> None:
        super().__init__()
        self.hidden_layers = layers
        self.hostile = None if expected is None else Hostile({key: tokens for key, (tokens, _) in expected.items()})
        self.rows: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
        self.ids: dict[tuple[str, int], list[int]] = {}

    def ingest(self, seq, hidden, start):
        assert hidden.shape[1] == len(self.hidden_layers) and start + len(hidden) < len(seq.tokens) + 1
        key = seq.request.id, seq.branch
        self.rows.setdefault(key, {}).update((start + i, row.clone()) for i, row in enumerate(hidden))
        self.ids[key] = list(seq.tokens)

    def propose(self, asks):
        return [DraftTree() for _ in asks] if self.hostile is None else self.hostile.propose(asks)


@pytest.fixture(scope="module")
def expected():
    return plain(1.0)


@torch.no_grad()
def truth(ids: list[int], layers: tuple[int, ...] = LAYERS, model=None) -> torch.Tensor:
    """Hidden states [T, layers, E] of the trainer's own model."""
    model = model or export.load(resolve("nano"))
    x, found = model.model.embed_tokens(torch.tensor([ids])), []
    for i, layer in enumerate(model.model.layers):
        x = layer(x, model.rope(len(ids)), None)
        if i in layers:
            found.append(x[0])
    return torch.stack(found, 1)


@pytest.mark.parametrize(
    "options, drafts",
    [
        (dict(), False),
        (dict(), True),
        (dict(static=True), True),
        (dict(max_num_batched_tokens=6), True),
        (dict(batch_invariant=False, enable_prefix_caching=False), False),  # decode steps from tapes
        (dict(batch_invariant=False, enable_prefix_caching=False, native=True), True),
        (dict(static=True, overlap=True), False),
        (dict(pieces=True, max_num_seqs=8, max_num_batched_tokens=64), True),
    ],
    ids=["eager", "trees", "static", "chunks", "tapes", "native", "overlap", "pieces"],
)
def test_every_committed_row_is_handed_over(options, drafts, expected):
    native = options.get("native")
    layers = (
        LAYERS[:2] if native else LAYERS
    )  # native steps compute the last layer only for rows whose logits are wanted
    d = driver("replay", **{k: v for k, v in options.items() if k != "native"})
    recorder = Recorder(expected if drafts else None, layers)
    install(d, recorder)
    sizes = forced(d) if options.get("pieces") else [()]
    if native and d.engine.runner.native is None:
        pytest.skip("no native kernels here")
    d.run(requests(d, 1.0))
    if not options.get("max_num_batched_tokens") and options.get("batch_invariant", True):
        assert outputs(d) == expected, "who looks on changes a token"
    assert sizes
    if native:
        tapes = d.engine.runner.way(DecodeTapes)
        assert not tapes._steps and not tapes._seen, "what is native needs no tape"
        assert d.engine.runner.native.native._program is not None and d.engine.stats().accepted_tokens > 0
    elif not options.get("batch_invariant", True):
        assert any(step.tape is not None for step in d.engine.runner.way(DecodeTapes)._steps.values())
    for key, rows in recorder.rows.items():
        ids = recorder.ids[key]
        cached = d.outputs[key].num_cached
        assert sorted(rows) == list(range(cached, max(rows) + 1)) and max(rows) >= len(ids) - 2
        right = truth(ids[: max(rows) + 1], layers)
        for position, row in rows.items():
            torch.testing.assert_close(row, right[position], rtol=2e-3, atol=2e-3)
    assert not d.engine.proposals.drafting._failures
    d.close()


@pytest.mark.parametrize("static", [False, True])
def test_rows_of_forced_chains_are_handed_over(static):
    """What a grammar forces is verified without the drafter, which still sees every committed row."""
    d = driver("replay", static=static)
    recorder = Recorder()
    install(d, recorder)
    grammar = Grammar("regex", "[ab]{2} the whole tail is fixed text, and long [0-9] end")
    d.run(requests(d, 1.0, grammar=grammar, ignore_eos=False, allowed_token_ids=None))
    assert d.engine.stats().forced_tokens > 20 and d.engine.stats().accepted_tokens == 0
    for key, rows in recorder.rows.items():
        ids = recorder.ids[key]
        assert sorted(rows) == list(range(d.outputs[key].num_cached, max(rows) + 1)) and max(rows) >= len(ids) - 2
        right = truth(ids[: max(rows) + 1])
        for position, row in rows.items():
            torch.testing.assert_close(row, right[position], rtol=2e-3, atol=2e-3)
    assert not d.engine.proposals.drafting._failures
    d.close()


class Chains(Recorder):
    def propose(self, asks):
        return [tree.trunk() for tree in super().propose(asks)]


def test_drafts_over_static_buffers_larger_than_they_need(expected):
    """As on a GPU, chains and decodes take turns and are tapped; some of them are padded to a larger captured
    bucket."""
    d = driver("replay", overlap=True, max_num_seqs=6)
    recorder, runner = Chains(expected), d.engine.runner
    install(d, recorder)
    use_ways(runner, call_through, 8)
    large = {(54, True, True), (24, False, True), (8, True, False), (6, False, False)}
    assert all(runner.graphs._try_capture(*key) for key in large)
    for _ in range(2):
        d.outputs.clear()
        d.run(requests(d, 1.0))
        assert outputs(d) == expected
    own = {key for key in runner.graphs._ready if key[2]} - large
    assert own and all(runner.graphs.choice._uses[key] > EAGER_STEPS for key in own), "they stood in first"
    for key, rows in recorder.rows.items():
        right = truth(recorder.ids[key][: max(rows) + 1])
        torch.testing.assert_close(torch.stack([*rows.values()]), right[[*rows]], rtol=2e-3, atol=2e-3)
    assert not d.engine.proposals.drafting._failures
    d.close()


def test_taps_that_are_off_cost_nothing(expected):
    d = driver("replay", static=True)
    install(d, Recorder())
    taps, taken = d.engine.runner.parts.taps, []
    real = taps.taken
    taps.taken = lambda *args: taken.append(taps.on) or real(*args)
    d.engine.proposals.drafting.controller._fixed, d.engine.proposals.drafting.controller._rest = False, 1000
    d.run(requests(d, 1.0))
    assert taken and not any(taken) and outputs(d) == expected
    d.close()


def test_two_listeners_get_their_own_layers_and_rest_by_themselves(expected):
    """A listener gets its own layers while the other one rests, and the other one gets nothing."""
    d = driver("replay", static=True)
    install(d, recorder := Recorder())
    second = d.engine.runner.listen((1, 2))
    taps, drafting, heard = d.engine.runner.parts.taps, d.engine.proposals.drafting, []
    assert taps.layers == (0, 1, 2, 3) and second.columns == [1, 2]
    drafting.controller._fixed, drafting.controller._rest = False, 1000
    commit = d.engine._commit

    def heard_at(span, result):
        heard.append((span.start, span.length, span.seq, second.of(result.hidden)))
        return commit(span, result)

    d.engine._commit = heard_at
    d.run(requests(d, 1.0))
    assert outputs(d) == expected and not drafting._failures
    right = {seq: truth(seq.tokens, (1, 2)) for *_, seq, _ in heard}
    for start, length, seq, hidden in heard:
        torch.testing.assert_close(hidden, right[seq][start : start + length], rtol=2e-3, atol=2e-3)
    assert sum(length == 1 for _, length, *_ in heard) > 20, "decodes while drafting rests"
    prompts = {(f"r{k}", 0): length for k, length in enumerate(LENGTHS)}
    assert all(max(rows) < prompts[key] for key, rows in recorder.rows.items()), "a resting drafter reads prompts alone"
    second.on = False
    assert not taps.on, "nobody asks"
    d.close()


def test_without_such_a_drafter_nothing_is_tapped():
    d = driver("ngram")
    assert d.engine.runner.parts.taps is None and (
        d.engine.runner.graphs is None or d.engine.runner.graphs._tapped is None
    )
    d.close()
