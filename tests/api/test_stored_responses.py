"""Responses that are kept: fetched, continued, generated in the background, cancelled, deleted."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from kvasir.api.protocols import responses_store
from kvasir.errors import RequestError
from tests.api.fake_client import FakeClient, tokenizer
from tests.api.running import Running, key, running

PATH = "/v1/responses"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
LONG = "say: <think>hm</think>" + "one two three four " * 5


@pytest.fixture
def client(server: Running):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


@pytest.fixture
def slow(server: Running):
    server.engine.delay = 0.02
    yield server
    server.engine.delay = 0.0
    server.idle()


def finished(client, name):
    end = time.monotonic() + 120
    while (r := client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.01)
    return r


def missing(http, name, headers=None) -> None:
    for r in (
        http.get(f"{PATH}/{name}", headers=headers),
        http.delete(f"{PATH}/{name}", headers=headers),
        http.post(f"{PATH}/{name}/cancel", headers=headers),
        http.post(PATH, json={"input": "x", "previous_response_id": name}, headers=headers),
    ):
        assert r.status_code == 404 and r.json()["error"]["code"] == "response_not_found", r.text
    assert r.json()["error"]["param"] == "previous_response_id"


# ----------------------------------------------------------------------------------------------------------- stored


def test_a_response_is_kept_until_it_is_deleted(client, http):
    r = client.responses.create(model="fake", input="say: hello", metadata={"a": "b"})
    again = client.responses.retrieve(r.id)
    assert again == r and again.store and again.metadata == {"a": "b"} and again.output_text == "hello"
    assert client.responses.delete(r.id) is None
    missing(http, r.id)
    missing(http, "nothing")


def test_what_shall_not_be_stored_is_not(client, http):
    r = client.responses.create(model="fake", input="say: hello", store=False)
    assert r.store is False
    missing(http, r.id)


def test_a_stream_is_stored_when_it_ends_and_not_when_its_client_leaves(client, slow, http):
    events = list(client.responses.create(model="fake", input="say: hello", stream=True))
    assert client.responses.retrieve(events[-1].response.id) == events[-1].response
    with client.responses.create(model="fake", input=LONG, stream=True) as stream:
        name = next(iter(stream)).response.id
    slow.idle()
    missing(http, name)


def test_another_key_sees_nothing():
    with running(api_key=("one", "two")) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        name = http.post(PATH, json={"input": "say: secret"}, headers=key("one")).json()["id"]
        missing(http, name, key("two"))
        assert http.get(f"{PATH}/{name}", headers=key("one")).json()["output"][0]["content"][0]["text"] == "secret"
        assert http.get(f"{PATH}/{name}").status_code == 401


def test_logprobs_are_served_and_encrypted_reasoning_is_refused_by_name(client, http):
    r = client.responses.create(
        model="fake", input="say: hello", include=["message.output_text.logprobs"], top_logprobs=2
    )
    again = client.responses.retrieve(r.id, include=["message.output_text.logprobs"])
    assert again == r and len(again.output[0].content[0].logprobs[0].top_logprobs) == 2
    for refused in (
        lambda: client.responses.create(model="fake", input="x", include=["reasoning.encrypted_content"]),
        lambda: client.responses.retrieve(r.id, include=["reasoning.encrypted_content"]),
    ):
        with pytest.raises(openai.BadRequestError, match="reasoning is not encrypted here") as e:
            refused()
        assert e.value.param == "include[0]"


# -------------------------------------------------------------------------------------------------------- continued

FIRST = [
    {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    {"role": "user", "content": f"say: <think>hm</think>calling {CALL}"},
]
THEN = [[{"type": "function_call_output", "output": "sunny"}], "say: <think>so</think>it is sunny", "say: bye"]


def prompts_of_a_conversation(client, server) -> tuple[list, list]:
    """The prompts of four turns, each a continuation of the one before it, and those of the same conversation sent as
    a whole every time."""
    continued, whole = [], []
    items, previous = list(FIRST), None
    for turn, more in enumerate([FIRST, *THEN]):
        if turn == 1:
            more = [{**more[0], "call_id": previous.output[-1].call_id}]
        more = [{"role": "user", "content": more}] if isinstance(more, str) else more
        items = items if turn == 0 else items + more
        client.responses.create(model="fake", input=items, tools=[TOOL], instructions="be nice", store=False)
        whole.append(server.engine.seen[-1].prompt_ids)
        previous = client.responses.create(
            model="fake",
            input=more,
            tools=[TOOL],
            instructions="be nice",
            previous_response_id=previous and previous.id,
            stream=False,
        )
        continued.append(server.engine.seen[-1].prompt_ids)
        items += [item.model_dump(exclude_none=True) for item in previous.output]
    return continued, whole


def test_a_continued_response_is_the_whole_conversation(client, server):
    continued, whole = prompts_of_a_conversation(client, server)
    assert continued == whole and len(continued) == 4
    text = tokenizer().decode(continued[-1], skip_special=False)
    assert text.count("<|im_start|>assistant") == 4 and "sunny" in text and "calling" in text


@pytest.mark.parametrize("lost", ["output", "input", "earlier"])
def test_the_check_of_continued_responses_can_fail(client, server, monkeypatch, lost):
    """Negative control: a store that loses one part of a conversation does not pass."""
    from kvasir.api.protocols.responses import items_of
    from kvasir.api.protocols.responses_job import ResponsesJob

    def lossy(job):
        return [
            *(job.earlier if lost != "earlier" else []),
            *(items_of(job.body.input) if lost != "input" else []),
            *(job.output.items if lost != "output" else []),
        ]

    monkeypatch.setattr(ResponsesJob, "items", lossy)
    continued, whole = prompts_of_a_conversation(client, server)
    assert continued != whole


def test_instructions_are_not_inherited_and_only_whole_answers_are_continued(client, slow, http):
    first = client.responses.create(model="fake", input="say: a", instructions="be rude")
    client.responses.create(model="fake", input="say: b", previous_response_id=first.id)
    prompt = tokenizer().decode(slow.engine.seen[-1].prompt_ids, skip_special=False)
    assert "be rude" not in prompt and prompt.count("<|im_start|>") == 4
    cut = client.responses.create(model="fake", input="say: one two three", max_output_tokens=2)
    assert cut.status == "incomplete"
    assert client.responses.create(model="fake", input="say: c", previous_response_id=cut.id).output_text == "c"
    going = client.responses.create(model="fake", input=LONG, background=True)
    r = http.post(PATH, json={"input": "x", "previous_response_id": going.id})
    assert r.status_code == 400 and r.json()["error"]["code"] == "response_not_completed"
    client.responses.cancel(going.id)
    r = http.post(PATH, json={"input": "x", "previous_response_id": going.id})
    assert r.status_code == 400 and "is cancelled" in r.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------------- background


def test_background_work_needs_no_client(client, slow):
    r = client.responses.create(model="fake", input=LONG, background=True)
    assert r.status == "queued" and r.background and not r.output
    slow.until(lambda: client.responses.retrieve(r.id).status == "in_progress")
    slow.until(lambda: len(client.responses.retrieve(r.id).output_text) > 4)  # it grows before one's eyes
    done = finished(client, r.id)
    assert done.status == "completed" and done.usage.output_tokens_details.reasoning_tokens > 0
    plain = client.responses.create(model="fake", input=LONG)
    assert done.output_text == plain.output_text and done.usage == plain.usage.model_copy(
        update={"input_tokens_details": done.usage.input_tokens_details}
    )
    assert client.responses.cancel(done.id) == done, "what has ended stays as it is"
    assert client.responses.create(model="fake", input="say: x", previous_response_id=r.id).output_text == "x"


def test_background_work_can_be_cancelled_and_deleted(client, slow, http):
    for end in ("cancel", "delete"):
        r = client.responses.create(model="fake", input=LONG, background=True)
        slow.until(lambda: client.responses.retrieve(r.id).status == "in_progress")  # noqa: B023
        if end == "cancel":
            cancelled = client.responses.cancel(r.id)
            assert cancelled == client.responses.retrieve(r.id) and cancelled.status == "cancelled"
            assert len(cancelled.output_text) < len("one two three four " * 4), "the work was cut off"
        else:
            client.responses.delete(r.id)
            missing(http, r.id)
        slow.idle()
    foreground = client.responses.create(model="fake", input="say: x")
    with pytest.raises(openai.BadRequestError, match="only a response with background=true"):
        client.responses.cancel(foreground.id)


def test_many_may_cancel_and_delete_at_once(client, slow, http):
    for _ in range(5):
        name = client.responses.create(model="fake", input=LONG, background=True, stream=False).id

        def end(i, name=name):
            return http.post(f"{PATH}/{name}/cancel") if i % 4 else http.delete(f"{PATH}/{name}")

        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(end, range(8)))
        assert {r.status_code for r in replies} <= {200, 404}
        assert all(r.json()["status"] == "cancelled" for r in replies if "status" in r.json())
        missing(http, name)
        slow.idle()


def test_a_background_stream_is_resumed_from_any_event(client, slow, http):
    with client.responses.create(model="fake", input=LONG, background=True, stream=True) as stream:
        seen = []
        for event in stream:
            seen.append(event)
            if len(seen) == 9:
                break  # the client leaves; the work goes on
    assert [e.type for e in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    name = seen[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
    whole = list(client.responses.retrieve(name, stream=True))
    assert [*seen, *rest] == whole and [e.sequence_number for e in whole] == list(range(len(whole)))
    assert whole[-1].type == "response.completed" and whole[-1].response == client.responses.retrieve(name)
    assert "".join(e.delta for e in whole if e.type == "response.output_text.delta") == whole[-1].response.output_text
    assert list(client.responses.retrieve(name, stream=True, starting_after=10**6)) == []
    for query in ("starting_after=-2", "starting_after=x", "starting_after=1e3"):
        assert http.get(f"{PATH}/{name}?stream=true&{query}").json()["error"]["param"] == "starting_after"
    quiet = client.responses.create(model="fake", input="say: x", background=True)
    assert http.get(f"{PATH}/{quiet.id}?stream=true").json()["error"]["code"] == "no_events"


def test_events_that_are_gone_are_told(client, server, http, monkeypatch):
    monkeypatch.setattr("kvasir.api.protocols.responses_background.MAX_EVENTS", 4)
    list(client.responses.create(model="fake", input=LONG, background=True, stream=True))
    name = server.engine.seen[-1].id
    server.idle()
    r = http.get(f"{PATH}/{name}?stream=true&starting_after=0")
    assert r.status_code == 400 and r.json()["error"]["code"] == "events_gone"
    assert "after a later one" in r.json()["error"]["message"]


def test_a_refusal_of_background_work_is_a_status_and_leaves_nothing(server, http):
    server.engine.refusal = RequestError("the queue is full", status=429, code="queue_full", retry_after=1.0)
    try:
        r = http.post(PATH, json={"input": "x", "background": True})
        assert r.status_code == 429 and r.headers["retry-after"] == "1"
    finally:
        server.engine.refusal = None
    server.idle()


def test_background_work_that_fails_says_so(client, server):
    server.engine.failure, server.engine.fail_after = RequestError("no pages", status=500, code="out_of_pages"), 3
    try:
        r = finished(client, client.responses.create(model="fake", input=LONG, background=True).id)
        events = list(client.responses.create(model="fake", input=LONG, background=True, stream=True))
    finally:
        server.engine.failure = None
    assert r.status == "failed" and r.error.message == "no pages"
    assert [e.type for e in events[-2:]] == ["error", "response.failed"]


def test_background_work_counts_against_its_keys_limit():
    client = FakeClient()
    with running(client, max_concurrent_per_key=1) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        client.delay = 0.05
        name = http.post(PATH, json={"input": LONG, "background": True}).json()["id"]
        assert http.post(PATH, json={"input": "x"}).status_code == 429
        http.post(f"{PATH}/{name}/cancel")
        client.delay = 0.0
        assert http.post(PATH, json={"input": "x"}).status_code == 200


# ----------------------------------------------------------------------------------------------------------- bounds


def test_the_store_is_bounded_in_bytes_by_key(monkeypatch):
    with running(api_key=("one", "two")) as server, httpx.Client(base_url=server.url, timeout=120) as http:

        def create(owner: str, text: str = "say: hello", **more) -> str:
            return http.post(PATH, json={"input": text, **more}, headers=key(owner)).json()["id"]

        def kept(owner: str, name: str) -> bool:
            return http.get(f"{PATH}/{name}", headers=key(owner)).status_code == 200

        other = create("two")
        one = len(http.get(f"{PATH}/{other}", headers=key("two")).content)
        monkeypatch.setattr(responses_store, "KEY_BYTES", 5 * one)
        names = [create("one") for _ in range(12)]
        count = sum(kept("one", name) for name in names)
        assert 2 <= count < 5 and [kept("one", n) for n in names] == [False] * (12 - count) + [True] * count
        assert kept("two", other), "another key's responses stay"
        monkeypatch.setattr(responses_store, "ALL_BYTES", 3 * one)
        last = create("one")
        assert kept("one", last) and not kept("two", other), "the oldest of all goes first"
        server.engine.delay = 0.05
        going = create("one", LONG, background=True)
        create("one")
        assert kept("one", going), "work that goes on is not forgotten"
        http.delete(f"{PATH}/{going}", headers=key("one"))


def test_the_store_is_bounded_in_time(client, http, monkeypatch):
    r = client.responses.create(model="fake", input="say: hello")
    assert client.responses.retrieve(r.id)
    now = time.time()
    monkeypatch.setattr(
        "kvasir.api.protocols.responses_store.time.time", lambda: now + responses_store.KEEP_SECONDS + 2
    )
    missing(http, r.id)


def test_a_conversation_has_a_bounded_number_of_items(client, http):
    many = [{"role": "user", "content": ""}] * 4095
    r = client.responses.create(model="fake", input="say: hello")
    error = http.post(PATH, json={"input": many, "previous_response_id": r.id}).json()["error"]
    assert error["param"] == "input" and "4096 items" in error["message"]
    error = http.post(PATH, json={"input": [{"role": "x"}], "previous_response_id": r.id}).json()["error"]
    assert error["param"] == "input[0].role", "places are those of the client's own items"
    assert json.loads(http.get(f"{PATH}/{r.id}").content)["status"] == "completed"


def test_the_sums_of_the_store_are_those_of_what_it_holds(monkeypatch):
    """Random puts, repeated puts and drops by three keys, against sums taken anew; and the bounds hold."""
    monkeypatch.setattr(responses_store, "KEY_BYTES", 4000)
    monkeypatch.setattr(responses_store, "ALL_BYTES", 9000)
    draw, store, names = random.Random(3), responses_store.ResponseStore(), []
    for number in range(600):
        if names and draw.random() < 0.2:
            store.drop(draw.choice(names))
        else:
            name = draw.choice(names) if names and draw.random() < 0.2 else f"r{number}"
            owner = next((s.owner for s in store if s.id == name), draw.choice("abc"))
            names.append(name)
            item = {"text": "x" * draw.randrange(900)}
            store.put(responses_store.Stored(name, owner, time.time() + number, [item], {"status": "completed"}))
        sums: dict[str, int] = {}
        for kept in store:
            sums[kept.owner] = sums.get(kept.owner, 0) + kept.bytes
        assert store._bytes == sums and store._whole == sum(sums.values()) <= 9000
        assert all(size <= 4000 for size in sums.values())
        assert sum(map(len, store._by_owner.values())) == len(store._counted) == len(list(store))
