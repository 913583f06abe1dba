"""Tokens that wait for each other in the engine process: nothing is lost, moved or held back at the end."""

from __future__ import annotations

import random

from kvasir.engine.pieces import Pieces
from kvasir.types import Event, Request, SamplingParams


def request(name: str, piece: int, n: int = 1) -> Request:
    return Request(id=name, prompt_ids=[1], params=SamplingParams(n=n), seed=0, max_tokens=100, piece=piece)


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
    assert not pieces._held


def test_what_cannot_be_joined_follows_what_it_came_behind():
    pieces = Pieces()
    pieces.open(request("r", 32))
    scored = tokens("r", 0, 3, [4])
    scored.prompt_logprobs = [None]
    assert pieces.ready([tokens("r", 0, 1, [1, 2])]) == []
    assert [e.token_ids for e in pieces.ready([scored, tokens("r", 0, 4, [5], "stop")])] == [[1, 2], [4, 5]]


def test_an_end_without_tokens_brings_what_was_held():
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
