"""The journal lets every token through once, in order, whatever is sent twice, late or from an older epoch."""

from __future__ import annotations

import dataclasses
import os
import stat
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.client import journal
from kvasir.client.journal import Entry, GapError, Journal
from kvasir.client.outbox import Outbox
from kvasir.errors import RequestError
from kvasir.types import BareLogprobs, Event, Grammar, Request, SamplingParams, TokenLogprob


def request(n: int = 1, **more) -> Request:
    return Request(id="r", prompt_ids=[1, 2], params=SamplingParams(n=n), seed=7, max_tokens=10, **more)


def entry(n: int = 1, **more) -> Entry:
    return Journal().add(request(n, **more))


def tokens(index: int, ids: list[int], **more) -> Event:
    return Event(kind="tokens", request_id="r", index=index, token_ids=ids, **more)


def logprob(number: int) -> TokenLogprob:
    return TokenLogprob(id=number, logprob=-1.0, rank=1)


def test_tokens_pass_once_and_overlaps_are_trimmed():
    it = entry()
    assert it.admit(tokens(0, [5, 6])).token_ids == [5, 6]
    assert it.admit(tokens(0, [5, 6])) is None
    assert it.admit(tokens(1, [6])) is None
    news = it.admit(tokens(1, [6, 7, 8], logprobs=[logprob(6), logprob(7), logprob(8)]))
    assert (news.index, news.token_ids, [p.id for p in news.logprobs]) == (2, [7, 8], [7, 8])
    assert it.request.emitted == [[5, 6, 7, 8]] and it.fresh == 4
    bare = entry()
    bare.admit(tokens(0, [5], bare=BareLogprobs([-5.0], [])))
    assert bare.admit(tokens(0, [5, 6], bare=BareLogprobs([-5.0, -6.0], [1.0, 2.0]))).bare == BareLogprobs(
        [-6.0], [2.0]
    )
    last = it.admit(tokens(2, [7, 8], finish_reason="stop", stop_reason=8))
    assert (last.index, last.token_ids, last.finish_reason, last.stop_reason) == (4, [], "stop", 8)
    assert it.done and it.admit(tokens(4, [9])) is None and it.admit(Event(kind="error", request_id="r")) is None


def test_missing_tokens_are_an_error():
    it = entry(2)
    with pytest.raises(GapError, match="tokens 0 to 2 of branch 0"):
        it.admit(tokens(3, [1]))
    with pytest.raises(GapError, match="branch 2"):
        it.admit(tokens(0, [1], branch=2))
    it.closed = True
    assert it.admit(tokens(3, [1])) is None
    assert it.admit(tokens(9, [1], finish_reason="cancelled")) is None and it.request.ended == [0]


@pytest.mark.parametrize("known", [0, 1, 5])
def test_a_gap_of_one_token_is_an_error_and_an_overlap_of_one_is_trimmed(known):
    """One token too few or twice is what a mistake by one in continuing gives; it must not pass as a whole answer."""
    ids = list(range(10, 20))
    for start in range(known + 2):
        it = entry(emitted=[ids[:known]])
        if start > known:
            with pytest.raises(GapError, match=f"tokens {known} to {known} of branch 0 never came"):
                it.admit(tokens(start, ids[start:]))
            assert it.request.emitted == [ids[:known]], "nothing of it was delivered"
        else:
            news = it.admit(tokens(start, ids[start:]))
            assert (news.index, news.token_ids) == (known, ids[known:]) and it.request.emitted == [ids]
    it = entry()
    it.admit(tokens(0, ids[:known]))
    with pytest.raises(GapError):
        it.admit(tokens(known + 1, [], finish_reason="stop"))


def test_older_and_newer_epochs_are_dropped():
    it = entry()
    it.holder = 0
    it.admit(tokens(0, [1]))
    it.rewind()
    assert (it.request.epoch, it.holder, it.fresh) == (1, None, 0)
    assert it.admit(tokens(1, [2])) is None and it.admit(tokens(1, [2], epoch=2)) is None
    assert it.admit(tokens(1, [2], epoch=1)).token_ids == [2]
    it.rewind()
    assert it.request.epoch == 1, "nobody had it: no new epoch"


def test_accepted_and_prompt_logprobs_pass_once():
    it = entry()
    accepted = Event(kind="accepted", request_id="r")
    assert it.admit(accepted) is accepted and it.admit(accepted) is None
    scores = [None, logprob(2)]
    assert it.admit(tokens(0, [5], prompt_logprobs=scores)).prompt_logprobs == scores
    assert it.admit(tokens(0, [5], prompt_logprobs=scores)) is None
    assert it.admit(tokens(0, [5, 6], prompt_logprobs=scores)).prompt_logprobs is None


def test_an_error_ends_all_branches():
    it = entry(3)
    it.admit(tokens(0, [5], branch=1, finish_reason="stop"))
    assert it.live_branches == [0, 2] and not it.done
    error = Event(kind="error", request_id="r", status=500)
    assert it.admit(error) is error and it.done and it.live_branches == []


def test_an_entry_owns_its_state():
    mine = request(2, emitted=[[5]], ended=[1, 1])
    it = Journal().add(mine)
    it.admit(tokens(1, [6], branch=0))
    assert it.request.emitted == [[5, 6], []] and it.request.ended == [1]
    assert mine.emitted == [[5]] and mine.ended == [1, 1] and mine.epoch == 0


def test_ids_are_unique_while_in_use():
    book = Journal()
    first = book.add(request())
    with pytest.raises(RequestError) as caught:
        book.add(request())
    assert caught.value.status == 409
    book.remove(first)
    second = book.add(request())
    assert second.ticket > first.ticket
    book.remove(first)
    assert book.get("r") is second and len(book) == 1 and list(book) == [second]


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_any_resending_gives_each_token_once(data, sizes):
    """Deltas of random size, each possibly preceded by resent older ones, with deaths in between."""
    ids = list(range(sum(sizes)))
    it, read, sent = entry(), [], 0
    for size in sizes:
        sent += size
        if data.draw(st.booleans()):
            it.holder = 0
            it.rewind()
        for _ in range(data.draw(st.integers(0, 2))):
            old = data.draw(st.integers(0, len(read)))
            late = it.admit(
                tokens(
                    old, ids[old : data.draw(st.integers(old, sent))], epoch=data.draw(st.integers(0, it.request.epoch))
                )
            )
            read += late.token_ids if late else []
        start = data.draw(st.integers(0, len(read)))
        news = it.admit(
            tokens(start, ids[start:sent], epoch=it.request.epoch, finish_reason="length" if sent == len(ids) else None)
        )
        if news:
            assert news.index == len(read)
            read += news.token_ids
    assert read == ids == it.request.emitted[0] and it.done


# --------------------------------------------------------------------------------------------------------------- file


FULL = Request(
    id="ß\n\u2028 ",
    prompt_ids=[1, 2],
    seed=(1 << 64) - 1,
    max_tokens=9,
    priority=-1,
    arrival=12.5,
    tenant="t",
    epoch=3,
    emitted=[[4], []],
    ended=[1],
    bad_words=[[1]],
    params=SamplingParams(
        n=2, logit_bias={7: -2.5}, stop=("a\nb",), allowed_token_ids=(1, 2), grammar=Grammar("choice", '["x"]', (5,))
    ),
)


def test_a_file_gives_the_requests_back(tmp_path):
    path = tmp_path / "j"
    assert journal.write(path, []) == 0 and not path.exists()
    assert journal.write(path, [FULL, request()]) == 2
    assert journal.write(path, [request(2)]) == 1
    assert journal.load(path) == [FULL, request(), request(2)]
    assert len(path.read_bytes().strip().split(b"\n")) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_a_file_tells_of_came_before_now(tmp_path):
    """The clock restarts with the machine. Without this, journalled requests would wait for days behind new ones."""
    journal.write(tmp_path / "j", [dataclasses.replace(FULL, arrival=time.monotonic() + 1e6)])
    (found,) = journal.load(tmp_path / "j")
    assert found.arrival <= time.monotonic() and dataclasses.replace(found, arrival=FULL.arrival) == FULL


def test_a_file_is_made_private_and_links_are_not_followed(tmp_path):
    path = tmp_path / "j"
    path.touch(0o644)
    journal.write(path, [FULL])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.symlink(path, tmp_path / "link")
    with pytest.raises(OSError):
        journal.write(tmp_path / "link", [FULL])


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"id": 5}', b"\xff", b'{"id": "a"}'])
def test_a_spoiled_line_costs_only_itself_and_is_told(tmp_path, line, caplog):
    path = tmp_path / "j"
    journal.write(path, [FULL])
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(line)
    journal.append(path, [b'{"record":"begun","id":"x"}'])
    journal.write(path, [request()])
    assert journal.read(path) == ([FULL, request()], [{"record": "begun", "id": "x"}])
    (told,) = caplog.records
    assert f"bytes {size} to {size + len(line)} cannot be read, so 1 record is lost" in told.getMessage()


def test_a_request_torn_at_any_byte_keeps_no_other_from_being_read(tmp_path):
    path = tmp_path / "j"
    journal.write(path, [request()])
    line = path.read_bytes()
    for cut in range(len(line)):
        path.write_bytes(line[:cut])
        journal.load(path)  # a server starts with it
        journal.write(path, [FULL])
        found = journal.load(path)
        assert found == ([request(), FULL] if cut == len(line) - 1 else [FULL]), cut


def test_a_file_of_something_else_is_refused(tmp_path):
    """The server would rewrite it without what it cannot read."""
    path = tmp_path / "j"
    for content in (b"hello\n", b'{"id": 5}\n', b"\x7fELF\n\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a journal"):
            journal.load(path)
    path.write_bytes(b"\0" * 40)  # what a power cut may leave of a journal
    assert journal.load(path) == []


def test_no_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        journal.load(tmp_path / "none")


# ------------------------------------------------------------------------------------------------------------- outbox


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_outbox_is_bounded_and_loses_nothing(steps):
    """Random puts and gets on three branches: what comes out is what went in, branch by branch."""
    import asyncio

    async def body():
        box, sent, got = Outbox(), [[], [], []], [[], [], []]

        async def take():
            event = await box.get()
            assert event.index == len(got[event.branch])
            got[event.branch] += event.token_ids
            if event.logprobs is not None:
                assert [p.id for p in event.logprobs] == event.token_ids

        for branch, count, read in steps:
            start = len(sent[branch])
            ids = list(range(start, start + count))
            sent[branch] += ids
            box.put(tokens(start, ids, branch=branch, logprobs=[logprob(i) for i in ids] if branch else None))
            assert len(box) <= 3
            if read and len(box):
                await take()
        while len(box):
            await take()
        assert got == sent

    asyncio.run(body())


def test_the_outbox_keeps_ends_errors_and_prompt_scores():
    import asyncio

    async def body():
        box = Outbox()
        box.put(tokens(0, [1]))
        box.put(tokens(1, [2], finish_reason="stop", stop_reason=2, num_cached=3))
        box.put(Event(kind="error", request_id="r"))
        first, second = await box.get(), await box.get()
        assert (first.token_ids, first.finish_reason, first.stop_reason, first.num_cached) == (
            [1, 2],
            "stop",
            2,
            3,
        ) and second.kind == "error"
        box.put(tokens(0, [1], prompt_logprobs=[None]))
        box.put(tokens(1, [2], logprobs=[logprob(2)]))
        box.put(tokens(2, [3], prompt_logprobs=[None]))
        assert len(box) == 3
        box = Outbox()
        waiting = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        waiting = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(tokens(0, [1]))
        box.put(tokens(1, [2]))
        assert (await waiting).token_ids == [1, 2], "what came before the reader had its turn is one event"

    asyncio.run(body())
