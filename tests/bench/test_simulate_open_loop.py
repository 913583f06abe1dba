"""The simulation of an open-loop trace with drafts: what is counted, and that drafts change it as they must."""

from __future__ import annotations

import pytest

from kvasir_lab.bench.drafting_sim import coins
from kvasir_lab.studies.simulate_open_loop import OpenLoop, chances

REQUESTS = [(0.05 * i, 100 + i, 40) for i in range(12)]


def figures(accept: str | None, **options) -> tuple[OpenLoop, dict[str, float]]:
    simulation = OpenLoop(REQUESTS, None if accept is None else coins(chances(accept)), **options)
    return simulation, simulation.serve()


@pytest.fixture(scope="module")
def off() -> tuple[OpenLoop, dict[str, float]]:
    return figures(None)


def test_every_token_is_delivered_and_counted_once(off):
    simulation, found = off
    assert len(simulation.first) == len(REQUESTS) and len(simulation.gaps) == len(REQUESTS) * 39
    assert simulation.gaps == simulation.deliveries, "without drafts every delivery is a token"
    drafted, _ = figures("0.9", control="fixed", depth=4)
    assert len(drafted.gaps) == len(simulation.gaps) > 1.5 * len(drafted.deliveries)
    assert sum(drafted.gaps) == pytest.approx(sum(drafted.deliveries))
    assert found["ttft_ms_p50"] < found["e2e_ms_mean"]


def test_right_drafts_end_requests_sooner_and_wrong_ones_later(off):
    assert figures("0.9", control="fixed", depth=4)[1]["e2e_ms_mean"] < 0.7 * off[1]["e2e_ms_mean"]
    assert figures("0", control="fixed", depth=4)[1]["e2e_ms_mean"] > 1.05 * off[1]["e2e_ms_mean"]
    assert chances("mixed")(1, 0) == 0.9 and chances("mixed")(2, 0) == 0.0
