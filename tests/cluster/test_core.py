"""Replicas as one synchronous core: LLM, generate -i and solve use many engines like one."""

from __future__ import annotations

import json
import queue

import pytest

from kvasir.cluster.cluster_client import ClusterClient
from kvasir.cluster.core import ClusterCore
from kvasir.cluster.placement import Place
from kvasir.config import Settings
from kvasir.errors import ConfigError
from kvasir.types import Event
from tests.client.helpers import request
from tests.engine.fake_core import expected


def core(name: str = "SlowCore", **options) -> ClusterCore:
    settings = Settings.of(**{"watchdog": 60.0, "replicas": 2, **options})
    placed = [Place(settings.engine_only(), {})] * 2
    return ClusterCore(settings, ClusterClient(settings, factory=f"tests.engine.fake_core:{name}", placed=placed))


@pytest.mark.usefixtures("nothing_left_behind")
def test_requests_run_on_all_replicas_up_to_a_bound_and_cancelled_branches_are_silent():
    it = core(max_num_seqs=4)
    try:
        wanted = [request(i, n=1 + i % 2, max_tokens=30) for i in range(20)]
        waiting, tokens, refused, cut = list(wanted), {r.id: [[], []] for r in wanted}, 0, False
        ended = {r.id: set() for r in wanted}
        while any(len(ended[r.id]) < r.params.n for r in wanted):
            while waiting and not (error := it.submit(waiting[0])):
                waiting.pop(0)
            refused += bool(waiting) and error[0].status == 429
            silent = cut  # on a busy machine a step may return events of before its end was asked for
            for event in it.step():
                if event.kind == "tokens":
                    assert (event.request_id, event.branch) != ("r1", 1) or not silent, "its end was asked for"
                    tokens[event.request_id][event.branch] += event.token_ids
                    if event.finish_reason:
                        ended[event.request_id].add(event.branch)
                    if event.request_id == "r1" and event.branch == 1 and len(tokens["r1"][1]) > 5:
                        it.cancel("r1", 1)
                        cut = True
                        ended["r1"].add(1)
        assert refused and cut and it.stats().generation_tokens > 0
        for r in wanted:
            right = expected(r)
            assert tokens[r.id][0] == right[0]
            assert r.id == "r1" or r.params.n == 1 or tokens[r.id][1] == right[1]
        assert all(replica.totals.now().generation_tokens for replica in it._client.replicas)
    finally:
        it.close()


def test_what_ends_during_a_step_is_neither_lost_nor_told_of_a_cancelled_request():
    """The front's thread puts the last event of each request just after the step has emptied the queue."""

    class Late(queue.SimpleQueue):
        def get_nowait(self):
            try:
                return super().get_nowait()
            finally:
                if it._open:
                    for name in sorted(it._open):
                        self.put(Event(kind="tokens", request_id=name, finish_reason="length"))
                    it._open.clear()

    it = ClusterCore.__new__(ClusterCore)
    it._events, it._open, it._cancelled = Late(), {"cut", "whole"}, {"cut": {None}}
    it._events.put(Event(kind="accepted", request_id="whole"))
    assert [event.kind for event in it.step()] == ["accepted"]
    assert it.has_work(), "two events wait"
    assert [event.request_id for event in it.step()] == ["whole"]
    assert not it.has_work() and not it._cancelled


def test_a_start_that_fails_is_raised():
    with pytest.raises(ConfigError, match="gpu-memory-utilization"):
        core("refusing")


@pytest.mark.slow
def test_generate_with_replicas_gives_the_answers_of_one(tmp_path, kvasir, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(3)))
    lines = [{"prompt": f"{i} + {i} =", "max_tokens": 8, "seed": i, "n": 1 + i % 2} for i in range(6)]
    batch = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "nano", "prompt": f"{i} + 1 =", "max_tokens": 6, "seed": i},
        }
        for i in range(4)
    ]
    for entries in (lines, batch):
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        found = []
        for count in ("1", "2"):
            output = tmp_path / f"{len(entries)}-{count}.jsonl"
            done = kvasir(
                *("generate", "nano", "-i", source, "-o", output, "--replicas", count),
                *("--batch-invariant", "--device", "cpu", "--num-threads", "1"),
            )
            assert done.code == 0, done.err
            rows = [json.loads(line) for line in output.read_text().splitlines()]
            if entries is lines:
                found.append([[o["token_ids"] for o in row["outputs"]] for row in rows])
            else:
                texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
                found.append(sorted(texts.items()))
        assert found[0] == found[1]


@pytest.mark.slow
def test_solve_with_replicas_solves_what_one_engine_solves(tmp_path, kvasir, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(3)))
    found = []
    for count in ("1", "2"):
        output = tmp_path / f"{count}.json"
        done = kvasir(
            *("solve", "--model", "nano", "--task", "countdown", "--n", "4", "--strategy", "majority:n=2"),
            *("--replicas", count, "--json", output, "--batch-invariant", "--device", "cpu", "--num-threads", "1"),
        )
        assert done.code == 0, done.err
        found.append(json.loads(output.read_text())["right"])
    assert found[0] == found[1]
