"""The log line about the load: what happened since the line before, and nothing while the server is idle."""

from __future__ import annotations

import logging

import httpx

from kvasir.api.http.log_stats import LogStats
from kvasir.types import EngineStats
from tests.api.fake_client import FakeClient
from tests.api.running import running

SAY = {"messages": [{"role": "user", "content": "say: hello world"}]}


class Made:
    """Statistics, ended requests and a clock that a test sets."""

    def __init__(self) -> None:
        self.stats, self.ended, self.now = EngineStats(), 0, 0.0
        self.log = LogStats(lambda: self.stats, lambda: self.ended, 10.0, lambda: self.now)
        self.log.line()

    def after(self, seconds: float, ended: int = 0, **stats) -> str | None:
        self.now, self.ended = self.now + seconds, self.ended + ended
        self.stats = EngineStats(**stats)
        return self.log.line()


def test_a_line_counts_what_came_since_the_last_one():
    made = Made()
    line = made.after(
        10.0,
        ended=4,
        num_running=3,
        num_waiting=1,
        num_blocked=1,
        num_pages=100,
        num_free_pages=75,
        prompt_tokens=20_000,
        cached_tokens=5_000,
        generation_tokens=12_340,
        drafted_tokens=2_000,
        accepted_tokens=1_400,
        preemptions=2,
    )
    assert line == (
        "load: 3 running, 2 queued, 4 ended; 1,234 tokens/s out, 2,000 prompt tokens/s (25% cached); "
        "cache 25% in use; drafts 70% of 2,000 tokens accepted; 2 preempted"
    )
    line = made.after(5.0, num_running=1, prompt_tokens=20_000, cached_tokens=5_000, generation_tokens=12_840,
                      drafted_tokens=2_000, accepted_tokens=1_400, preemptions=2)  # fmt: skip
    assert line == "load: 1 running, 0 queued, 0 ended; 100 tokens/s out, 0 prompt tokens/s"


def test_a_line_says_what_came_back_from_tiers():
    made = Made()
    made.after(10.0, num_running=1, tiers={"device": {"hit_tokens": 5}, "host": {"hit_tokens": 100}})
    line = made.after(10.0, num_running=1, tiers={"device": {"hit_tokens": 9}, "host": {"hit_tokens": 1_600}})
    assert line.endswith("prompt tokens/s; 1,500 tokens came back from the host tier")
    assert "tier" not in made.after(10.0, num_running=1, tiers={"host": {"hit_tokens": 1_600}})


def test_an_idle_server_is_quiet():
    made = Made()
    assert made.after(10.0) is None
    assert made.after(10.0, ended=1, generation_tokens=5) is not None, "a request came and went between two lines"
    assert made.after(10.0, generation_tokens=5) is None


class Busy(FakeClient):
    def stats(self) -> EngineStats:
        return EngineStats(num_running=2)


def lines(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("load: ")]


def test_a_server_logs_at_its_interval(caplog):
    caplog.set_level(logging.INFO, logger="kvasir")
    with running(Busy(), log_stats_interval=0.02) as server:
        server.until(lambda: len(lines(caplog)) > 2)
    for options in ({"log_stats_interval": 0.0}, {"log_stats": False, "log_stats_interval": 0.02}):
        caplog.clear()
        with running(Busy(), **options) as server:
            httpx.post(server.url + "/v1/chat/completions", json=SAY, timeout=120)
        assert not lines(caplog)
    with running(FakeClient(), log_stats_interval=0.02) as server:
        server.until(lambda: server.service.phase == "ready")
        httpx.get(server.url + "/metrics", timeout=120)
    assert not lines(caplog), "idle"
