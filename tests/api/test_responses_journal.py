"""Background responses that outlive their server: the next one ends them as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time

import httpx
import pytest

from kvasir.api.protocols.responses_journal import ResponseJournal
from kvasir.client import journal
from kvasir.errors import ConfigError
from tests.api.fake_client import tokenizer
from tests.api.running import key, running

PATH = "/v1/responses"
TEXT = "one two three four " * 5
ASK = {
    "input": f"say: <think>hm</think>{TEXT}",
    "background": True,
    "stream": True,
    "temperature": 0.7,
    "metadata": {"job": "7"},
}


def ended(http: httpx.Client, name: str, **headers) -> dict:
    end = time.monotonic() + 120
    while (r := http.get(f"{PATH}/{name}", **headers).json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end
        time.sleep(0.01)
    return r


def events(http: httpx.Client, name: str) -> list[dict]:
    text = http.get(f"{PATH}/{name}?stream=true").text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def timeless(value):
    """Without what may differ: a new server's prefix cache is cold."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k != "input_tokens_details"}
    return [timeless(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The journal of a response as a kill right after its acceptance leaves it; its id, result, events and tokens."""
    path = tmp_path_factory.mktemp("left") / "journal"
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        first = http.post(PATH, json={"input": "say: start"}).json()["id"]
        server.engine.delay = 0.01
        with http.stream("POST", PATH, json=ASK | {"previous_response_id": first}) as r:
            next(r.iter_lines())  # its client leaves
        name = server.engine.seen[-1].id
        begun = path.read_bytes()
        assert begun.count(b"\n") == 1 and stat.S_IMODE(path.stat().st_mode) == 0o600
        result = ended(http, name)
        server.idle()
        server.until(lambda: path.read_bytes().count(b"\n") == 2)
        request = server.engine.seen[-1]
        answer = [t for t in server.engine.plan(request, 0)[0]]
        return name, begun, path.read_bytes(), result, events(http, name), request, answer


def test_a_killed_servers_work_is_ended_by_the_next(left, tmp_path):
    name, begun, _, result, told, request, _ = left
    path = tmp_path / "journal"
    path.write_bytes(begun + b'{"record":"ended","id":"torn')
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert timeless(ended(http, name)) == timeless(result) and result["metadata"] == {"job": "7"}
        again = server.engine.seen[-1]
        assert (again.seed, again.prompt_ids, again.tenant) == (request.seed, request.prompt_ids, request.tenant)
        assert timeless(events(http, name)) == timeless(told), "readers may go on from any event that they had"
        r = http.post(PATH, json={"input": "say: more", "previous_response_id": name})
        assert TEXT.strip() in tokenizer().decode(server.engine.seen[-1].prompt_ids) and r.status_code == 200
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert timeless(ended(http, name)) == timeless(result) and not server.engine.seen, "it is not generated again"
        assert http.delete(f"{PATH}/{name}").status_code == 200
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert http.get(f"{PATH}/{name}").status_code == 404
    assert not path.exists(), "nothing is left to keep"


@pytest.mark.parametrize("count", [0, 1, 9, -1])
def test_tokens_that_were_journalled_are_not_generated_again(left, tmp_path, count):
    """The client writes unfinished requests with their tokens when the server stops in order."""
    name, begun, _, result, told, request, answer = left
    path = tmp_path / "journal"
    path.write_bytes(begun)
    known = answer[: count if count >= 0 else len(answer) - 1]
    journal.write(path, [dataclasses.replace(request, emitted=[known]), dataclasses.replace(request, id="gone")])
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert timeless(ended(http, name)) == timeless(result) and timeless(events(http, name)) == timeless(told)
        assert [r.id for r in server.engine.seen] == [name] and server.engine.seen[0].emitted == [known]
    assert b'"gone"' not in path.read_bytes(), "requests of clients that are gone are forgotten"


def test_the_check_of_journalled_tokens_can_fail(left, tmp_path, monkeypatch):
    """Negative control: a server that forgets to tell the tokens it was left does not pass."""
    name, begun, _, result, _, request, answer = left
    path = tmp_path / "journal"
    path.write_bytes(begun)
    journal.write(path, [dataclasses.replace(request, emitted=[answer[:9]])])
    monkeypatch.setattr("kvasir.api.http.generation._resumed", lambda request, events: events)
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert timeless(ended(http, name)) != timeless(result)


def test_a_server_that_stops_leaves_its_work_to_the_next(left, tmp_path):
    *_, result, _, _, _ = left
    path = tmp_path / "journal"
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        server.engine.delay = 0.05
        name = http.post(PATH, json={**ASK, "stream": False}).json()["id"]
        with pytest.raises(ConfigError, match="another server writes journal"):
            ResponseJournal(str(path))
        server.until(lambda: len(http.get(f"{PATH}/{name}").json()["output"]) == 2)
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        again = ended(http, name)
        assert again["status"] == "completed" and [o["content"] for o in again["output"]] == [
            o["content"] for o in result["output"]
        ]


def test_what_was_cancelled_stays_so_and_belongs_to_its_key(tmp_path):
    options = {"journal": str(tmp_path / "j"), "api_key": ("one", "two")}
    with running(**options) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        server.engine.delay = 0.2
        name = http.post(PATH, json=ASK | {"stream": False, "cache_salt": "s"}, headers=key("one")).json()["id"]
        assert http.post(f"{PATH}/{name}/cancel", headers=key("one")).json()["status"] == "cancelled"
        going = http.post(PATH, json=ASK | {"stream": False, "cache_salt": "s"}, headers=key("one")).json()["id"]
        tenant = server.engine.seen[-1].tenant
    with running(**options) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert http.get(f"{PATH}/{name}", headers=key("one")).json()["status"] == "cancelled"
        assert http.get(f"{PATH}/{going}", headers=key("two")).status_code == 404
        assert ended(http, going, headers=key("one"))["status"] == "completed"
        assert server.engine.seen[-1].tenant == tenant, "pages are salted as before"


def test_what_cannot_go_on_fails(left, tmp_path):
    name, begun, *_ = left
    path = tmp_path / "journal"
    record = json.loads(begun)
    changes = [{"model": "nobody"}, {"body": "{}"}, {"items": [1]}, {"seed": "x", "tenant": None}]
    broken = [{**record, **change, "id": f"r{i}"} for i, change in enumerate(changes)]
    broken += [{"record": "begun", "id": "hollow"}, {"record": "what"}]
    path.write_bytes(begun + b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in broken))
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        codes = [ended(http, f"r{i}")["error"]["code"] for i in range(3)]
        assert codes == ["model_not_found", "missing_parameter", "server_error"]
        assert ended(http, name)["status"] == "completed", "the others go on"
        assert http.get(f"{PATH}/hollow").status_code == 404


@pytest.mark.parametrize("content", [b"hello\n", b'{"id": 5}\n'])
def test_a_file_that_is_no_journal_is_refused_at_start(tmp_path, content):
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(ConfigError, match="Name another file"):
        ResponseJournal(str(tmp_path / "j")).load()


def test_the_file_is_rewritten_when_it_grows(tmp_path, monkeypatch):
    monkeypatch.setattr("kvasir.api.protocols.responses_journal.COMPACT_BYTES", 1)
    path = tmp_path / "journal"
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        names = []
        for _ in range(8):
            names.append(http.post(PATH, json=ASK | {"stream": False}).json()["id"])
            ended(http, names[-1])
            if len(names) < 8:
                http.delete(f"{PATH}/{names[-1]}")
        server.idle()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len(lines) < 8 and [r["id"] for r in lines if r["record"] == "ended"] == names[-1:]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [p.name for p in tmp_path.iterdir()] == ["journal"]


def test_a_disk_that_is_full_refuses_background_work(tmp_path, monkeypatch):
    with (
        running(journal=str(tmp_path / "journal")) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        monkeypatch.setattr(journal, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        r = http.post(PATH, json=ASK)
        assert r.status_code == 503 and r.json()["error"]["code"] == "no_room"
        server.idle()
        assert http.post(PATH, json={"input": "say: x"}).status_code == 200


def test_a_full_disk_refuses_what_the_next_server_would_not_know(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        name = http.post(PATH, json=ASK | {"stream": False}).json()["id"]
        ended(http, name)
        server.until(lambda: path.read_bytes().count(b"\n") == 2)
        before = path.read_bytes()

        def torn(handle: int, data: bytes, write=os.write) -> int:
            if bytes(data).startswith(b'{"record"'):
                return write(handle, bytes(data)[:7])
            if b"eco" in bytes(data)[:3] or b'"' in bytes(data)[:4]:
                raise OSError(28, "No space left on device")
            return write(handle, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", torn)
            r = http.delete(f"{PATH}/{name}")
            assert r.status_code == 503 and r.json()["error"]["code"] == "no_room"
            assert http.post(PATH, json=ASK).status_code == 503
        assert path.read_bytes() == before
        assert http.get(f"{PATH}/{name}").json()["status"] == "completed"
        assert http.delete(f"{PATH}/{name}").status_code == 200
        server.idle()
    with running(journal=str(path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert http.get(f"{PATH}/{name}").status_code == 404
