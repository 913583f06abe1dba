"""Tokens that the engine process collects into pieces: none is lost or moved, and none stays unsent at the end."""

from __future__ import annotations

import random

import pytest

from kvasir.client.outbox import Outbox
from kvasir.client.pieces import Pieces
from kvasir.types import BareLogprobs, Event, Request, SamplingParams, TokenLogprob


def request(name: str, piece: int, n: int = 1, **more) -> Request:
    return Request(id=name, prompt_ids=[1], params=SamplingParams(n=n), seed=0, max_tokens=100, piece=piece, **more)


def tokens(name: str, branch: int, index: int, ids: list[int], finish: str | None = None) -> Event:
    return Event(kind="tokens", request_id=name, branch=branch, index=index, token_ids=ids, finish_reason=finish)


def test_a_reader_of_the_whole_gets_few_events_and_all_tokens():
    rng, pieces = random.Random(0), Pieces()
    lengths = {("whole", 0): 70, ("whole", 1): 3, ("along", 0): 40}
    pieces.open(request("whole", 32, 2))
    pieces.open(request("along", 1))
    sent, at = [], dict.fromkeys(lengths, 0)
    while left := [key for key in lengths if at[key] < lengths[key]]:
        step = []
        for name, branch in left:
            count = min(rng.choice((1, 1, 3)), lengths[name, branch] - at[name, branch])
            first, at[name, branch] = at[name, branch], at[name, branch] + count
            ended = at[name, branch] == lengths[name, branch]
            step.append(tokens(name, branch, first, list(range(first, first + count)), "length" if ended else None))
        sent += pieces.ready(step)
    for key, length in lengths.items():
        events = [e for e in sent if (e.request_id, e.branch) == key]
        assert [t for e in events for t in e.token_ids] == list(range(length))
        assert all(e.index == sum(len(f.token_ids) for f in events[:i]) for i, e in enumerate(events))
        assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + ["length"]
        assert events[0].index == 0 and len(events[0].token_ids) <= 3, "the first does not wait"
        assert len(events) > 10 if key[0] == "along" else len(events) <= 4
    assert not pieces._requests["whole"].unsent


def test_an_event_that_cannot_be_joined_keeps_its_place():
    pieces = Pieces()
    pieces.open(request("r", 32))
    scored = tokens("r", 0, 3, [4])
    scored.prompt_logprobs = [None]
    assert pieces.ready([tokens("r", 0, 1, [1, 2])]) == []
    assert [e.token_ids for e in pieces.ready([scored, tokens("r", 0, 4, [5], "stop")])] == [[1, 2], [4, 5]]


def test_joined_events_keep_the_places_of_forced_tokens():
    pieces = Pieces()
    pieces.open(request("r", 32))
    first, second = tokens("r", 0, 1, [1, 2]), tokens("r", 0, 3, [4, 5], "stop")
    first.forced, second.forced = [2], [3, 4]
    assert [e.forced for e in pieces.ready([first, second])] == [[2, 3, 4]]


def test_an_end_without_tokens_sends_the_unsent_ones():
    pieces = Pieces()
    pieces.open(request("r", 32))
    assert pieces.ready([tokens("r", 0, 1, [1, 2])]) == []
    (last,) = pieces.ready([tokens("r", 0, 3, [], "cancelled")])
    assert (last.index, last.token_ids, last.finish_reason) == (1, [1, 2], "cancelled")


def test_an_error_ends_it_and_its_id_is_free():
    pieces = Pieces()
    pieces.open(request("r", 32))
    assert pieces.ready([tokens("r", 0, 1, [1])]) == []
    error = Event(kind="error", request_id="r")
    assert pieces.ready([error]) == [error]
    pieces.close("r")
    pieces.open(request("r", 1))
    assert [e.token_ids for e in pieces.ready([tokens("r", 0, 1, [7])])] == [[7]]


def sure(name: str, index: int, ids: list[int], finish: str | None = None, confidence: bool = True) -> Event:
    event = tokens(name, 0, index, ids, finish)
    event.logprobs = [TokenLogprob(t, -float(t), 1, confidence=t / 2 if confidence else None) for t in ids]
    return event


@pytest.mark.parametrize("confidence", [True, False])
def test_log_probabilities_go_as_plain_numbers_where_no_more_is_wanted(confidence):
    pieces = Pieces()
    pieces.open(request("r", 3, bare=True))
    sent = [
        e
        for i, finish in enumerate((None, None, None, None, None, "stop"))
        for e in pieces.ready([sure("r", i, [i], finish, confidence)])
    ]
    assert [e.token_ids for e in sent] == [[0], [1, 2, 3], [4, 5]] and all(e.logprobs is None for e in sent)
    assert sent[1].bare == BareLogprobs([-1.0, -2.0, -3.0], [0.5, 1.0, 1.5] if confidence else [])
    pieces.close("r")
    pieces.open(request("r", 1, bare=True))
    assert [pieces.ready([sure("r", i, [i])])[0].bare.logprobs for i in (1, 2)] == [[-1.0], [-2.0]], (
        "one by one as well"
    )


def test_ranks_and_alternatives_stay_where_they_are_wanted():
    """A reply in pieces keeps its entries while another request gets plain numbers."""
    pieces = Pieces()
    pieces.open(request("all", 2))
    pieces.open(request("other", 2, bare=True))
    assert pieces.ready([sure("all", 1, [1])]) == []
    (event,) = pieces.ready([sure("all", 2, [2])])
    assert [(p.id, p.rank) for p in event.logprobs] == [(1, 1), (2, 1)] and event.bare is None


def test_an_end_without_tokens_joins_tokens_with_log_probabilities():
    pieces = Pieces()
    pieces.open(request("r", 32, bare=True))
    assert pieces.ready([sure("r", 1, [1]), sure("r", 2, [2])]) == []
    (last,) = pieces.ready([tokens("r", 0, 3, [], "cancelled")])
    assert (last.token_ids, last.bare.logprobs, last.finish_reason) == ([1, 2], [-1.0, -2.0], "cancelled")


def test_an_outbox_joins_plain_numbers():
    outbox = Outbox()
    for event in (
        Event(kind="tokens", request_id="r", index=i, token_ids=[i], bare=BareLogprobs([-float(i)], [i + 0.5]))
        for i in range(3)
    ):
        outbox.put(event)
    assert len(outbox) == 1 and outbox._events[0].bare == BareLogprobs([0.0, -1.0, -2.0], [0.5, 1.5, 2.5])
