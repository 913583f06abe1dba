"""`kvasir_lab.studies.replica_loss` says when the rate and first tokens are back after a kill, and what failed."""

from __future__ import annotations

import json
from array import array

import pytest

from kvasir.bench.client import Reply
from kvasir_lab.studies import replica_loss
from kvasir_lab.studies.replica_loss import judge, seconds_back

KILLED, ENDED = 10.0, 30.0


def reply(due: float, wait: float, tokens: int = 4, status: int = 200) -> Reply:
    """A reply whose tokens come together, ``wait`` seconds after it was due."""
    made = Reply(due, status=status, completion=tokens, ended=due + wait)
    made.events = array("d", [due + wait] * tokens)
    return made


def window(waits) -> list[Reply]:
    """Ten requests a second up to the end; ``waits``: the wait of a request that is due at this time."""
    return [reply(i / 10, waits(i / 10)) for i in range(int(ENDED * 10))]


def lost(until: float):
    """Waits that end together at ``until``, for what is due between the kill and then."""
    return lambda at: until - at if KILLED <= at < until else 0.1


@pytest.mark.parametrize("until", [12.0, 17.0])
def test_the_rate_is_back_when_the_last_window_below_it_has_ended(until):
    found = judge(window(lost(until)), 0.0, KILLED, ENDED)
    assert found["tokens_s_before"] == pytest.approx(40, rel=0.03) and found["tokens_s_least"] < 25
    assert found["seconds_until_rate"] == pytest.approx(until - KILLED, abs=0.6)
    # The median of a window is slow until half of its requests came after that.
    assert found["seconds_until_first_tokens"] == pytest.approx(until - KILLED + 1, abs=0.6)
    assert found["ttft_ms_p50_before"] == pytest.approx(100, abs=1) and found["failed"] == 0


def test_a_rate_that_never_comes_back_has_no_time():
    found = judge(window(lambda at: 0.1 if at < KILLED else 1e3), 0.0, KILLED, ENDED)
    assert found["seconds_until_rate"] is None and found["seconds_until_first_tokens"] is None


def test_undisturbed_windows_are_back_at_once():
    found = judge(window(lambda at: 0.1), 0.0, KILLED, ENDED)
    assert found["seconds_until_rate"] == found["seconds_until_first_tokens"] == 0.0


def test_failed_requests_are_counted():
    replies = window(lambda at: 0.1)
    replies[150].status, replies[151].status = 0, 500
    assert judge(replies, 0.0, KILLED, ENDED)["failed"] == 2


def test_a_dip_later_on_counts():
    assert seconds_back(lambda at: not 4 <= at < 5, 20.0) == 5.0
    assert seconds_back(lambda at: at < 4, 20.0) is None


@pytest.mark.slow
def test_a_killed_replica_costs_no_request(tmp_path):
    out = tmp_path / "out.json"
    replica_loss.main(
        [str(out), "--model", "nano", "--seconds", "20", "--kill-at", "6", "--at-once", "16", "--prompt", "32"]
        + ["--tokens", "32", "--share", "0.4", "--flags", "--num-threads 1"]
    )
    metrics = json.loads(out.read_text())["arms"][0]["metrics"]
    assert metrics["failed"] == 0 and metrics["seconds_until_process"] is not None
