"""The samples of /metrics about the tiers of the KV cache."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvasir.api.http.metrics import Metrics
from kvasir.client.totals import Totals, together
from kvasir.types import EngineStats

COUNTS = dict(hit_tokens=64, waits=2, wait_seconds=0.5, read_bytes=10, written_bytes=30)
COUNTS |= dict(failed_pages=1, broken_pages=3, evicted_lost=4, evicted_kept=5)


def stats(**more) -> EngineStats:
    tiers = {"device": {"hit_tokens": 7, "evicted_lost": 1, "evicted_kept": 2}, "host": dict(COUNTS)}
    return EngineStats(**{"tiers": tiers, "tier_bytes": {"host": 1000}, "tier_used": {"host": 400}} | more)


def told(found: EngineStats) -> dict[tuple, float]:
    page = Metrics().render(found, "m").decode()
    return {
        (sample.name.removeprefix("kvasir:tier_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("kvasir:tier_")
    }


def test_bytes_hits_waits_and_evictions_by_tier_and_cause():
    assert told(stats()) == {
        ("bytes", "host"): 1000,
        ("used_bytes", "host"): 400,
        ("hit_tokens_total", "device"): 7,
        ("hit_tokens_total", "host"): 64,
        ("waits_total", "host"): 2,
        ("wait_seconds_total", "host"): 0.5,
        ("copied_bytes_total", "down", "host"): 30,
        ("copied_bytes_total", "host", "up"): 10,
        ("evicted_pages_total", "device", "lost"): 1,
        ("evicted_pages_total", "copied", "device"): 2,
        ("evicted_pages_total", "host", "lost"): 4,
        ("evicted_pages_total", "copied", "host"): 5,
        ("failed_pages_total", "host", "write"): 1,
        ("failed_pages_total", "host", "read"): 3,
    }


def test_an_engine_without_tiers_tells_nothing():
    assert told(EngineStats()) == {}


def test_counters_go_on_after_a_restart_and_add_up_over_replicas():
    totals = Totals()
    totals.heartbeat(stats())
    totals.process_ended()
    totals.heartbeat(stats())
    both = together([totals.now(), stats()])
    assert both.tiers["host"]["hit_tokens"] == 3 * 64 and both.tier_used == {"host": 800}
