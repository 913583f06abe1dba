"""The verdict of a soak on made-up figures, and ``kvasir_lab/studies/gpu_soak.py`` run for seconds on a CPU."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from kvasir.bench.workloads import SHAPES
from kvasir_lab.studies import gpu_soak as tool
from tests.bench.helpers import SMALL
from tests.bench.test_result import check
from tests.integration import load
from tests.integration.load import BAD, KINDS, busy, gpu_mib, leaks, mixed, quarters
from tests.integration.serving import served

IDLE = {
    "kvasir:num_requests_running": 0,
    "kvasir:num_requests_waiting": 0,
    "kvasir:num_requests_blocked": 0,
    "kvasir:num_pages": 160,
    "kvasir:pages_free": 160,
}


def test_quarters():
    assert quarters([1, 1, 2, 2, 3, 3, 4, 5, 6]) == [1, 2, 3, 5] and quarters([7.0]) == [7] * 4


@pytest.mark.parametrize("step, leaked", [(0.0, False), (0.2, False), (0.3, True), (-1.0, False)])
def test_memory_that_keeps_growing_is_a_leak(step, leaked):
    series = {"rss_server": [100 + step * i for i in range(180)], "pages_free": [float(i) for i in range(180)]}
    found = leaks(series)
    assert bool(found) == leaked, (
        "half of the time is 90 samples, 24 MiB are allowed, and free pages are none of its business"
    )
    assert not leaked or found == ["rss_server grew from 120 to 147; 24 more are allowed"]


def test_what_fills_first_and_what_comes_and_goes_is_no_leak():
    rng = random.Random(0)
    warm = [min(400.0, 100 + 10 * i) + rng.uniform(-5, 5) for i in range(180)]
    assert not leaks({"rss_engine": warm, "gpu": [1000.0 if i % 7 else 9000.0 for i in range(180)]})
    assert leaks({"gpu": [1000.0] * 90 + [1300.0] * 90})


@pytest.mark.parametrize(
    "change, said",
    [({}, ""), ({"kvasir:num_requests_waiting": 2}, "2 waiting"), ({"kvasir:pages_free": 159}, "1 pages")],
)
def test_idle_is_nothing_running_and_every_page_free(change, said):
    assert busy(IDLE | change) == said


@pytest.mark.parametrize(
    "apps, mine, all_of_it", [("7, 1000\\n8, 200\\n9, 30", 1200, 5000), ("7, [N/A]", 0, 5000), ("", 0, 5000)]
)
def test_gpu_memory_by_process_where_the_driver_tells_them_apart(tmp_path, monkeypatch, apps, mine, all_of_it):
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text(f"#!/bin/sh\ncase $1 in *apps*) printf '{apps}\\n' ;; *) echo {all_of_it} ;; esac\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_mib([7, 8]) == mine and gpu_mib([]) == all_of_it
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert gpu_mib([7]) is None


def test_every_kind_of_request_is_drawn_and_fits():
    rng, drawn = random.Random(0), Counter()
    for _ in range(2000):
        kind, request = mixed(rng, 1024)
        drawn[kind] += 1
        assert kind == "bad" or len(request["prompt"]) + request["max_tokens"] <= 1024
        assert not (request["stream"] and "prompt_logprobs" in request)
    assert set(drawn) == set(KINDS) and min(drawn.values()) > 100 and len(BAD) > 5


@pytest.mark.slow
def test_what_a_greedy_reply_lost(tmp_path):
    """The gap is about nothing for the reply's own tokens and large for another token."""
    with served(tmp_path, "--max-model-len", "256") as server, httpx.Client(base_url=server.url, timeout=240) as http:
        ids = load._probe(http)
        assert len(ids) == load.PROBE["max_tokens"] and 0 <= load._lost(http, ids) < 1e-3
        for at in (0, 20, len(ids) - 1):
            assert load._lost(http, [*ids[:at], (ids[at] + 7) % 300, *ids[at + 1 :]]) > 0.125


def run(monkeypatch, tmp_path, *argv) -> tuple[int, dict]:
    status = tool.main([str(tmp_path / "r.json"), *argv])
    return status, json.loads(Path(tmp_path / "r.json").read_text())


@pytest.mark.slow
def test_the_tool_on_a_cpu(monkeypatch, tmp_path, capfd):
    status, found = run(monkeypatch, tmp_path, "nano", "--seconds", "15", "--", "--num-threads", "1")
    check(found)
    [arm] = found["arms"]
    assert status == 0 == arm["metrics"]["failed_checks"] == arm["metrics"]["requests"]["failed"], arm["metrics"][
        "reasons"
    ]
    assert (
        arm["metrics"]["requests"]["left"] > 10
        and arm["metrics"]["preemptions"] > 0
        and arm["metrics"]["pages_free_least"] < 16
    )
    assert set(arm["metrics"]["rss_engine"]) == {"q1", "q2", "q3", "q4", "most"}


@pytest.mark.slow
def test_the_tool_says_what_is_wrong(monkeypatch, tmp_path, capfd):
    """A shape with random weights, pages for all requests, and an answer that changes."""
    monkeypatch.setitem(SHAPES, "small", SMALL)
    answers = iter(range(9))
    monkeypatch.setattr(load, "_probe", lambda http: [next(answers)])
    status, found = run(
        monkeypatch,
        tmp_path,
        "--shape",
        "small",
        "--seconds",
        "5",
        "--clients",
        "4",
        "--",
        "--max-model-len",
        "256",
        "--num-pages",
        "4000",
        "--num-threads",
        "1",
    )
    check(found)
    said = found["arms"][0]["metrics"]["reasons"]
    assert status == 1 and "a greedy request has other tokens than before: [3] and [4]" in said, said
    assert "no preemptions: the load was not what it is meant to be" in said and not any(
        "failed" in reason for reason in said
    ), said
    assert found["case"] == "soak-small" and found["arms"][0]["config"]["shape"] == "small"
