"""Chunks of many tokens give the samples, confidences, costs and journal of single tokens, and rules see each token."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest

from kvasir.scaling import engine_endpoint
from kvasir.scaling.endpoint import Sampling
from kvasir.scaling.engine_endpoint import ClientEndpoint
from kvasir.scaling.journal import Journal
from kvasir.scaling.primitives import Context, Run
from kvasir.scaling.problem import Problem
from kvasir.scaling.solve import solve
from kvasir.scaling.strategy import load_strategy
from tests.models.small_tokenizers import make
from tests.scaling.played import Played
from tests.scaling.tabular import Tabular, problem, table
from tests.scaling.test_layer import ALL, Killed, Mortal, amounts, outcome, run, tiers

MESSAGES = ({"role": "user", "content": "Hello there"},)
# (tokens of a piece, tokens of an event, whether the engine dies)
WAYS = [(1, 1, False), (32, 1, False), (5, 3, False), (32, 1, True), (1, 3, True)]


def endpoint(at_once: int = 1, dies: bool = False, turn: int = 3, **options) -> ClientEndpoint:
    tokenizer = make("byte_level")
    return ClientEndpoint(
        Played(tokenizer.size, at_once=at_once, dies=dies, turn=turn), tokenizer, "played", parameters=3, **options
    )


def drawn(model: ClientEndpoint, n: int = 7, **options):
    """The samples of one call, and what it cost."""
    context = Context(Run([model], seed=3, sampling=Sampling(max_tokens=80)), "p0")
    return asyncio.run(context.sample(model, MESSAGES, n, **options)), {
        k: v for k, v in context.ledger.total().items() if k != "seconds"
    }


@pytest.mark.parametrize(("piece", "at_once", "dies"), WAYS)
@pytest.mark.parametrize("confidences", [20, 0])
def test_the_same_samples_confidences_and_costs(piece, at_once, dies, confidences, monkeypatch):
    """Every number is equal to the last bit: pieces change neither what is summed nor its order."""
    reference, cost = drawn(endpoint(confidences=confidences))
    monkeypatch.setattr(engine_endpoint, "PIECE", piece)
    model = endpoint(at_once, dies, confidences=confidences)
    assert drawn(model) == (reference, cost)
    assert (
        cost["generated"] + cost["discarded"]
        == model.engine.made
        == sum(len(s.ids) for s in reference)
        == sum(s.tokens for s in reference)
    )
    assert cost["uncached"] + cost["cached"] == len(model.engine.requests[0].prompt_ids) and cost["cached"] == 1
    sure = [s.confidence is not None and s.lowest is not None and s.logprob is not None for s in reference]
    assert all(sure) if confidences else not any(sure)
    assert {s.finish for s in reference} == {"stop", "length"} or len(reference) < 7
    text = make("byte_level")
    assert all(s.text == text.decode(s.ids) for s in reference)


def test_a_piece_is_one_chunk(monkeypatch):
    def told(piece: int) -> list[list[int]]:
        monkeypatch.setattr(engine_endpoint, "PIECE", piece)
        model, found = endpoint(turn=1), [[] for _ in range(4)]

        async def main():
            async for chunk in model.draw(engine_endpoint.Prompt(MESSAGES), 4, Sampling(max_tokens=80), 1):
                assert chunk.count == len(chunk.ids) == len(chunk.logprobs) == len(chunk.confidences)
                found[chunk.index].append(chunk.count)

        asyncio.run(main())
        return found

    single, several = told(1), told(32)
    assert all(set(counts) == {1} for counts in single) and [sum(c) for c in single] == [sum(c) for c in several]
    assert all(len(counts) <= 2 + sum(counts) // 32 for counts in several)


@pytest.mark.parametrize(("at_once", "dies"), [(1, False), (3, False), (1, True), (4, True)])
def test_a_delimiter_ends_a_sample_at_its_token(at_once, dies):
    """The sample ends with the token that completes the string, however many tokens an event brings.

    The rest is paid but wasted.
    """
    reference, _ = drawn(endpoint(), stop=("e", "th"))
    model = endpoint(at_once, dies)
    found, cost = drawn(model, stop=("e", "th"))
    assert found == reference and all(r.piece == 1 for r in model.engine.requests)
    whole, _ = drawn(endpoint())
    for stopped, full in zip(found, whole):
        assert full.ids[: len(stopped.ids)] == stopped.ids and not any(
            s in make("byte_level").decode(stopped.ids[:-1]) for s in ("e", "th")
        )
    assert sum(s.finish == "stop" and s.tokens < w.tokens for s, w in zip(found, whole)) >= 3
    assert cost["generated"] + cost["discarded"] == model.engine.made and cost["generated"] == sum(
        s.tokens for s in found
    )
    assert at_once == 1 or cost["discarded"] > 0


@pytest.mark.parametrize(("piece", "at_once", "dies"), WAYS)
@pytest.mark.parametrize(
    "rule", [{}, {"on": "e"}, {"accept": lambda text: len(text) % 3 > 0}], ids=["ends", "written", "accepted"]
)
def test_the_first_to_meet_a_rule_are_counted_in_tokens(piece, at_once, dies, rule, monkeypatch):
    def first(model):
        found, cost = drawn(model, 8, finish_after=3, **rule)
        assert cost["generated"] + cost["discarded"] == model.engine.made
        assert model.engine.requests[0].piece == (1 if rule else engine_endpoint.PIECE), (
            "only what no token decides comes in pieces"
        )
        return [(s.index, s.ids, s.met, s.confidence) for s in found if s.met is not None]

    reference = first(endpoint())
    monkeypatch.setattr(engine_endpoint, "PIECE", piece)
    assert first(endpoint(at_once, dies)) == reference and len(reference) == 3


def test_several_requests_of_a_call(monkeypatch):
    """Draw more samples than a request holds."""
    monkeypatch.setattr(engine_endpoint, "MAX_N", 8)
    reference, cost = drawn(endpoint(), 20)
    monkeypatch.setattr(engine_endpoint, "PIECE", 1)
    model = endpoint()
    assert drawn(model, 20) == (reference, cost) and len(model.engine.requests) == 3


SPEC = "rsa:N=4,K=2,T=3"
PROBLEMS = [Problem(f"p{i}", ({"role": "user", "content": f"Hello {i}"},)) for i in range(3)]


def played(journal: Journal | None = None, **options):
    model = endpoint(**options)
    return asyncio.run(
        solve(
            load_strategy(SPEC), PROBLEMS, [model], seed=5, sampling=Sampling(max_tokens=60), journal=journal, pause=0.0
        )
    )


def told(solution) -> list:
    return [(s.result.text, s.result.populations) for s in solution.solved]


@pytest.mark.parametrize(("before", "after"), [(1, 32), (32, 1)])
def test_a_run_begun_with_one_piece_goes_on_with_another(before, after, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_endpoint, "PIECE", before)
    reference = played(Journal(tmp_path / "whole", {}))
    lines = (tmp_path / "whole").read_text().splitlines()
    for lives in range(2, len(lines), 5):
        monkeypatch.setattr(engine_endpoint, "PIECE", before)
        with pytest.raises(Killed):
            played(Mortal(tmp_path / f"cut{lives}", {}, lives=lives))
        monkeypatch.setattr(engine_endpoint, "PIECE", after)
        again = played(Journal(tmp_path / f"cut{lives}", {}), dies=True)
        assert told(again) == told(reference)
        kept = ("calls", "uncached", "cached", "generated", "discarded", "flops")
        assert {k: again.ledger.total()[k] for k in kept} == {k: reference.ledger.total()[k] for k in kept}


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_every_strategy_with_a_table_that_answers_in_pieces(spec):
    """Compare results, votes and charges; `test_layer` checks conservation."""
    single, several = tiers(), tiers(piece=4)
    assert outcome(reference := run(spec, endpoints=single)) == outcome(found := run(spec, endpoints=several))
    assert amounts(found) == amounts(reference) and [e.counts for e in single] == [e.counts for e in several]


def test_what_was_seen_of_a_failed_call_is_whole_pieces():
    """A call that fails is charged for the chunks that came.

    The next try gives what an undisturbed one gives.
    """

    async def main(**options):
        model = Tabular(model=table(pause=0.9), **options)
        context = Context(Run([model], seed=3, sampling=Sampling(max_tokens=12), pause=0.0), "p0")
        samples = await context.sample(model, problem().messages, 5)
        return [dataclasses.astuple(s) for s in samples], sum(
            c.discarded for c in context.ledger.charges if c.kind == "lost"
        )

    (good, none), (single, seen), (several, less) = (
        asyncio.run(main(**o)) for o in ({}, {"faults": 1}, {"faults": 1, "piece": 8})
    )
    assert good == single == several and none == 0 and less < seen


def test_a_slow_chat_template_does_not_stall_the_event_loop(monkeypatch):
    """Prompts are encoded in another thread, in the order of their calls, and once each."""
    model, loop_thread, encoded = endpoint(), threading.get_ident(), []
    real, beats = model.tokenizer.encode_chat, threading.Event()

    def slow(messages, *args, **kwargs):
        assert threading.get_ident() != loop_thread, "the event loop waits for a chat template"
        encoded.append(messages[0]["content"])
        beats.clear()
        assert beats.wait(60), "the event loop does not go on"
        return real(messages, *args, **kwargs)

    async def beat():
        while True:
            beats.set()
            await asyncio.sleep(0)

    async def calls():
        beating = asyncio.create_task(beat())
        contexts = [Context(Run([model], seed=3, sampling=Sampling(max_tokens=8)), f"p{i}") for i in range(6)]
        asked = [[{"role": "user", "content": f"Hello {i}"}] for i in range(6)]
        try:
            return await asyncio.gather(*(c.sample(model, m, 2) for c, m in zip(contexts, asked)))
        finally:
            beating.cancel()

    monkeypatch.setattr(model.tokenizer, "encode_chat", slow)
    assert all(asyncio.run(calls()))
    assert encoded == [f"Hello {i}" for i in range(6)]
