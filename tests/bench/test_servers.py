"""Counters of a server that benchmarks read: of one moment, and not before the engine has reported them."""

from __future__ import annotations

import pytest

from kvasir.bench import servers


@pytest.fixture
def told(monkeypatch):
    """A server whose /metrics shows these pages one after the other, the last one from then on."""
    pages: list[str] = []
    server = servers.Server("kvasir", 0, None, 0.0)
    monkeypatch.setattr(servers, "REST", 0.0)
    monkeypatch.setattr(servers.Server, "_metrics", lambda _: pages.pop(0) if len(pages) > 1 else pages[0])
    return server, pages


def page(drafted: float, accepted: float) -> str:
    return f"kvasir:draft_tokens_total {drafted}\nkvasir:accepted_draft_tokens_total {accepted}\n"


def test_counters_are_read_until_they_rest(told):
    server, pages = told
    pages += [page(21, 3), page(90, 57), page(90, 57), page(1000, 1000)]
    assert server.counters(("draft_tokens", "accepted_draft_tokens")) == {
        "draft_tokens": 90.0,
        "accepted_draft_tokens": 57.0,
    }


def test_a_counter_that_is_not_told_is_zero(told):
    server, pages = told
    pages.append(page(4, 2))
    assert server.counters(("draft_tokens", "forwards")) == {"draft_tokens": 4.0, "forwards": 0.0}


def test_a_server_at_work_does_not_hold_the_reader(told):
    """Counters that never rest are read ten times, and the last reading counts."""
    server, pages = told
    pages += [page(number, number) for number in range(1, 20)]
    assert server.counters(("draft_tokens",)) == {"draft_tokens": 10.0}
