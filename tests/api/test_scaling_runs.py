"""Background runs that outlive their server: the next server ends them as if nothing had happened."""

from __future__ import annotations

import errno
import json
import os
import stat
import time

import httpx
import pytest

from kvasir.api.scaling.scaling_store import RunStore
from kvasir.errors import ConfigError
from tests.api.running import running

RUNS = "/v1/scaling/runs"
BODY = {
    "strategy": "adaptive_consistency:n=4,wave=1,threshold=1",
    "seed": 5,
    "max_tokens": 40,
    "answer": "text",
    "problems": [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(3)],
}
CALLS = 12  # of the run


def ended(http, name):
    end = time.monotonic() + 120
    while (run := http.get(f"{RUNS}/{name}").json())["status"] == "running":
        assert time.monotonic() < end
        time.sleep(0.01)
    return run


def same(run):
    """The part of a result that must not depend on restarts; the prefix cache of a new server is cold."""
    results = [
        r | {"cost": {k: v for k, v in r["cost"].items() if k not in ("cached", "uncached")}} for r in run["results"]
    ]
    return {k: v for k, v in run.items() if k not in ("id", "created")} | {"results": results}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The files of a run just before its end, and its result."""
    folder = tmp_path_factory.mktemp("runs")
    with running(scaling_runs=str(folder / "kept")) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        server.engine.delay = 0.01
        name = http.post(RUNS, json=BODY).json()["id"]
        calls = folder / "kept" / f"{name}.calls.jsonl"
        while not calls.exists() or calls.read_bytes().count(b"\n") < CALLS:
            time.sleep(0.001)
        lines = calls.read_bytes().splitlines(keepends=True)
        run = ended(http, name)
        assert (
            run["status"] == "done" and sum(r["cost"]["calls"] for r in run["results"]) == CALLS and not calls.exists()
        )
        asked = (folder / "kept" / f"{name}.run.json").read_bytes()
    return name, asked, lines, run


@pytest.mark.parametrize("known", [None, 0, 1, 5, CALLS - 1])
def test_a_killed_server_costs_no_call_twice(left, known, tmp_path):
    """The server is killed after ``known`` calls (None: before the journal was begun)."""
    name, asked, lines, run = left
    (tmp_path / f"{name}.run.json").write_bytes(asked)
    if known is not None:
        (tmp_path / f"{name}.calls.jsonl").write_bytes(b"".join(lines[: 1 + known]) + b'{"key": ":p0#9", "torn')
    with running(scaling_runs=str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        again = ended(http, name)
        assert same(again) == same(run)
        assert len(server.engine.seen) == CALLS - (known or 0), "what had ended was not asked again"
        with http.stream("GET", f"{RUNS}/{name}/events") as reply:
            events = [json.loads(line[6:])["event"] for line in reply.iter_lines() if line.startswith("data: {")]
        assert events.count("end") == 3 and events[-1] == "run.end", "the whole run's events, replayed ones first"


def test_a_server_that_stops_leaves_the_run_to_the_next(left, tmp_path):
    *_, run = left
    with running(scaling_runs=str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        server.engine.delay = 0.05
        name = http.post(RUNS, json=BODY).json()["id"]
        while not (calls := tmp_path / f"{name}.calls.jsonl").exists() or calls.read_bytes().count(b"\n") < 4:
            time.sleep(0.005)
        assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in tmp_path.glob(f"{name}.*"))
        with pytest.raises(ConfigError, match="another server"):
            RunStore(tmp_path)
    with running(scaling_runs=str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        again = ended(http, name)
        assert len(server.engine.seen) <= CALLS - 3 and same(again)["results"] == same(run)["results"]
        assert again["usage"]["completion_tokens"] >= run["usage"]["completion_tokens"], (
            "what an orderly stop cut off was seen, and is paid"
        )
    with running(scaling_runs=str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert http.get(f"{RUNS}/{name}").json() == again and not server.engine.seen, (
            "what has ended is known, not run again"
        )
        with http.stream("GET", f"{RUNS}/{name}/events") as reply:
            assert "run.end" in next(line for line in reply.iter_lines() if line.startswith("data: "))


def test_what_was_cancelled_stays_so_and_belongs_to_its_key(tmp_path):
    options = {"scaling_runs": str(tmp_path), "api_key": ("one", "two")}
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    with running(**options) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        server.engine.delay = 0.2
        name = http.post(RUNS, json=BODY, headers=one).json()["id"]
        assert http.delete(f"{RUNS}/{name}", headers=one).json()["status"] == "cancelled"
    with running(**options) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert http.get(f"{RUNS}/{name}", headers=one).json()["status"] == "cancelled" and not server.engine.seen
        assert http.get(f"{RUNS}/{name}", headers=two).status_code == 404


def test_what_cannot_go_on_fails_or_is_left_alone(left, tmp_path):
    """Records that cannot continue: a journal of another question, an unknown model, and a broken file."""
    name, asked, lines, _ = left
    for other, change in (
        ("changed", ("question", "quest")),
        ("elsewhere", ('\\"strategy\\"', '\\"model\\": \\"nobody\\", \\"strategy\\"')),
    ):
        assert change[0] in asked.decode()
        (tmp_path / f"{other}.run.json").write_text(asked.decode().replace(*change))
        (tmp_path / f"{other}.calls.jsonl").write_bytes(b"".join(lines[:3]))
    (tmp_path / "broken.run.json").write_text('{"owner": ""')
    (tmp_path / "empty.run.json").write_text("{}")
    (tmp_path / "hollow.run.json").write_text('{"owner": "", "problems": 1, "seed": 1, "created": 1, "asked": {}}')
    with running(scaling_runs=str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        changed, elsewhere = ended(http, "changed"), ended(http, "elsewhere")
        assert changed["status"] == "failed" and "asked for something else" in changed["error"]["message"]
        assert elsewhere["status"] == "failed" and elsewhere["error"]["code"] == "model_not_found"
        assert http.get(f"{RUNS}/hollow").json()["error"]["code"] == "internal_error"
        for absent in ("broken", "empty"):
            assert http.get(f"{RUNS}/{absent}").status_code == 404 and (tmp_path / f"{absent}.run.json").exists()
        server.idle()


def test_an_end_torn_at_any_byte_costs_no_run(left, tmp_path, caplog):
    """The request is whole, so the run goes on from its journal, and the log says why."""
    name, asked, _, run = left
    end = json.dumps({"status": "done", "error": None, "results": [], "amounts": None, "done": 3}).encode()
    (tmp_path / f"{name}.run.json").write_bytes(asked)
    store = RunStore(tmp_path)
    for cut in range(len(end) + 1):
        (tmp_path / f"{name}.end.json").write_bytes(end[:cut])
        caplog.clear()
        [(found, _, ended_as)] = store.load()
        whole = cut == len(end)
        assert found == name and (ended_as is not None) == whole
        assert len(caplog.records) == (not whole) and all("it is run again" in r.getMessage() for r in caplog.records)
        (tmp_path / f"{name}.end.json").write_bytes(b"\0" * cut)  # what a power cut may leave
        assert store.load()[0][2] is None
    for cut in range(len(asked)):
        (tmp_path / f"{name}.run.json").write_bytes(asked[:cut])
        assert store.load() == []
    store.close()
    (tmp_path / f"{name}.run.json").write_bytes(asked)
    with running(scaling_runs=str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        assert same(ended(http, name)) == same(run)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_folder_that_takes_no_more_fails_new_runs_alone(fault, tmp_path, monkeypatch):
    """The disk fills up, or is mounted read-only, under a server that runs."""
    open_file, unlink = os.open, os.unlink

    def refuse(path, *more, **options):
        if str(path).startswith(str(tmp_path)) and (not more or more[0] & (os.O_WRONLY | os.O_RDWR)):
            raise OSError(fault, os.strerror(fault), str(path))
        return (open_file if more else unlink)(path, *more, **options)

    monkeypatch.setattr("kvasir.api.scaling.scaling_runs.MAX_KEPT", 1)
    one = BODY | {"problems": BODY["problems"][:1]}
    with running(scaling_runs=str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        first = [http.post(RUNS, json=one).json()["id"] for _ in range(2)]
        for name in first:
            ended(http, name)
        kept = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            patch.setattr(os, "unlink", refuse)
            for _ in range(2):
                r = http.post(RUNS, json=one)
                assert r.status_code == 503 and r.json()["error"]["code"] == "no_room"
                assert os.strerror(fault) in r.json()["error"]["message"]
            assert http.get(f"{RUNS}/{first[-1]}").json()["status"] == "done"
            assert http.get("/health").status_code == 200
        assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == kept, "nothing half written is left"
        last = http.post(RUNS, json=one).json()["id"]
        assert ended(http, last)["status"] == "done"


def test_old_runs_leave_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("kvasir.api.scaling.scaling_runs.MAX_KEPT", 2)
    with running(scaling_runs=str(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        names = [http.post(RUNS, json=BODY | {"problems": BODY["problems"][:1]}).json()["id"] for _ in range(1)]
        for _ in range(3):
            ended(http, names[-1])
            names.append(http.post(RUNS, json=BODY | {"problems": BODY["problems"][:1]}).json()["id"])
        ended(http, names[-1])
    assert len(list(tmp_path.glob("*.run.json"))) == 3, "two that had ended when the last was begun, and that one"
