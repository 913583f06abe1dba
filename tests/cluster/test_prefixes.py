"""The front's map of prefix caches equals the engines' indexes, whatever is lost, and its keys are theirs."""

from __future__ import annotations

import random

import pytest

from kvasir.client import ipc, messages
from kvasir.cluster.prefixes import PATIENCE, PrefixMap
from kvasir.engine.pages.shared_prefixes import share
from kvasir.types import ModelInfo, Request, SamplingParams, Sequence, Variant
from tests.client.helpers import Reader, beat, run, until
from tests.client.helpers import request as numbered
from tests.cluster.helpers import cluster
from tests.engine.fake import FULL, manager, window_group

PAGE = 4
WINDOW = window_group(4)
SECRET = b"s" * 32


def request(prompt: list[int], name: str = "r", **more) -> Request:
    return Request(id=name, prompt_ids=prompt, params=SamplingParams(), seed=0, max_tokens=10, **more)


def facts(weights: str) -> ModelInfo:
    return ModelInfo(name="m", max_model_len=100, vocab_size=10, tokenizer_size=10, weights=weights)


def joined(groups=(FULL,), num_pages=20, secret: bytes = SECRET):
    """Pages with a shared index, the facts of their model, and their log."""
    pages, info = manager(num_pages, PAGE, groups), facts("digest")
    return pages, info, share(pages, info, secret)


def compute(pages, wanted: Request) -> None:
    """Compute all tokens of a request and end it."""
    seq = Sequence(wanted)
    pages.admit(seq, pages.match(seq))
    copies: list = []
    assert pages.grow(seq, len(seq.tokens), copies)
    seq.num_computed = len(seq.tokens)
    pages.commit(seq)
    pages.release(seq)


def news(number: int, log, whole: bool = False) -> messages.PageNews:
    changes = log.take()
    stored = [node.key for node in (log.held() if whole else changes.stored)]
    return messages.PageNews(number, stored, changes.evicted, whole)


def in_index(pages) -> set[bytes]:
    return {key for key, node in pages.index.nodes.items() if node.pages[0]}


def test_the_front_computes_the_keys_of_the_engine():
    pages, info, log = joined()
    known = PrefixMap()
    known.secret = SECRET
    adapter = Variant("a", "content", start=6)
    wanted = [
        request(list(range(10))),
        request(list(range(10)), tenant="t"),
        request(list(range(10)), variant=adapter),
        request(list(range(5)), emitted=[[7, 7, 7, 7]]),
    ]
    for one in wanted:
        seq = Sequence(one)
        expected = [pages.index.key(seq, i) for i in range(len(seq.tokens) // PAGE)]
        assert known.keys(one, info) == expected and len(expected) == 2
    first, second, third, _ = (known.keys(one, info) for one in wanted)
    assert first[0] == third[0] and first[1] != third[1] and first[0] != second[0]
    other = PrefixMap()
    assert other.keys(wanted[0], info)[0] != first[0], "each cluster has a key of its own"
    assert known.keys(wanted[0], facts("")) == []


def test_the_root_names_the_weights_content():
    roots = []
    for weights in ("one", "two", "one"):
        pages, info = manager(20, PAGE), facts(weights)
        share(pages, info, SECRET)
        roots.append(info.prefix_root)
    assert roots[0] == roots[2] != roots[1]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW, FULL)])
@pytest.mark.parametrize("lose", range(6))
def test_the_map_equals_the_index_after_any_lost_message(groups, lose):
    pages, _, log = joined(groups)
    rng, known, number = random.Random(lose), PrefixMap(), 0
    group = log.group
    assert groups[group] is FULL
    lost = 0
    for step in range(40):
        compute(pages, request([rng.randrange(3) for _ in range(rng.randrange(4, 30))]))
        number += 1
        if step % 7 == lose:
            news(number, log)
            lost += 1
        elif known.take(0, news(number, log)):
            number += 1
            assert not known.take(0, news(number, log, whole=True))
    if known.missed(0, number):  # the last message was lost, and the heartbeat tells its number
        number += 1
        known.take(0, news(number, log, whole=True))
    assert lost >= 5
    assert known.pages(0) == {key for key, node in pages.index.nodes.items() if node.pages[group]}


def test_a_map_that_does_not_look_at_numbers_would_be_found(monkeypatch):
    """Negative control of the test above."""

    def take(self, replica, message):
        known = self._of(replica)
        known.pages.update(message.stored)
        known.pages.difference_update(message.evicted)
        known.number = message.number
        return False

    monkeypatch.setattr(PrefixMap, "take", take)
    with pytest.raises(AssertionError):
        test_the_map_equals_the_index_after_any_lost_message((FULL,), 1)


def test_new_weights_void_what_was_told():
    pages, info, log = joined()
    compute(pages, request(list(range(12))))
    old = {node.key for node in log.take().stored}
    assert len(old) == 3
    pages.forget_prefixes()
    changes = log.take()
    assert changes.cleared and not changes.stored and not log.held()
    for number in range(4):  # pages of the old weights are evicted without a word
        compute(pages, request([number] * 60))
    evicted = log.take().evicted
    assert evicted and not old.intersection(evicted) and not old.intersection(in_index(pages))


def test_the_whole_is_asked_for_again_when_it_is_lost_too():
    known = PrefixMap()
    assert not known.take(0, messages.PageNews(1, [b"a"], []))
    assert known.take(0, messages.PageNews(3, [b"b"], []))
    asked = [known.take(0, messages.PageNews(n, [], [])) for n in range(4, 4 + PATIENCE)]
    assert sum(asked) == 1 and known.pages(0) == {b"a"}
    assert not known.take(0, messages.PageNews(30, [b"c"], [], whole=True))
    assert known.pages(0) == {b"c"} and not known.missed(0, 30) and known.missed(0, 31)


def test_pages_are_expected_until_the_request_ends():
    known = PrefixMap()
    keys = [b"a", b"b", b"c"]
    known.take(1, messages.PageNews(1, keys[:1], []))
    known.expect(0, "r", keys)
    known.expect(0, "s", keys[:2])
    assert [known.cached(r, keys) for r in (0, 1, 2)] == [3, 1, 0]
    known.settle("r")
    known.settle("r")
    assert known.cached(0, keys) == 2
    known.take(0, messages.PageNews(1, keys[:1], []))
    known.settle("s")
    assert known.cached(0, keys) == 1
    known.expect(0, "t", keys)
    known.forget(0)
    known.settle("t")
    assert known.cached(0, keys) == 0


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_lost_frame_is_made_up_for(monkeypatch):
    """Through real processes: every third message of the engines about pages never comes."""
    decoded = ipc.Decoder.body
    seen = {"lost": 0, "came": 0}

    def body(self, data):
        message = decoded(self, data)
        if isinstance(message, messages.PageNews) and not message.whole:
            seen["came"] += 1
            if seen["came"] % 3 == 0:
                seen["lost"] += 1
                return messages.PageNews(0, [], [])  # a number that was there already
        return message

    async def body_of_test():
        async with cluster(2) as it:
            for i in range(12):
                (await Reader(it, numbered(i, prompt=100 + 20 * i, max_tokens=20)).task).check()
            monkeypatch.undo()
            await until(lambda: it._prefixes._known and all(k.asked is None for k in it._prefixes._known.values()))
            await beat(*it.replicas)
            await until(lambda: all(k.asked is None for k in it._prefixes._known.values()))
            before = {r.number: set(it._prefixes.pages(r.number)) for r in it.replicas}
            for replica in it.replicas:
                it._prefixes._of(replica.number).asked = 0
                replica.send(messages.TellPages())
            await until(lambda: all(k.asked is None for k in it._prefixes._known.values()))
            assert before == {r.number: it._prefixes.pages(r.number) for r in it.replicas} and any(before.values())
            assert seen["lost"] >= 2

    monkeypatch.setattr(ipc.Decoder, "body", body)
    run(body_of_test())
