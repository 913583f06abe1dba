"""Metrics, the OpenAPI document and the playground page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvasir.api.http.metric_definitions import DEFINITIONS
from kvasir.api.http.metrics import ALIASES
from kvasir.errors import RequestError
from kvasir.types import EngineStats, LearnStats
from tests.api.fake_client import FakeClient
from tests.api.running import all_routes, running

CHAT = "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "say: hello world"}]}


def samples(http: httpx.Client) -> dict[str, list]:
    out: dict[str, list] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            out.setdefault(sample.name, []).append(sample)
    return out


def test_metrics():
    with running() as server, httpx.Client(base_url=server.url, timeout=120) as http:
        for _ in range(3):
            http.post(CHAT, json=SAY)
        http.post(CHAT, json={"messages": []})
        http.get("/nothing/at/all")
        server.engine.refusal = RequestError("full", status=429, code="queue_full")
        http.post(CHAT, json=SAY)
        found = samples(http)
        value = {name: s[0].value for name, s in found.items()}
        assert value["kvasir:num_requests_running"] == value["vllm:num_requests_running"] == 0
        assert (value["kvasir:num_pages"], value["kvasir:pages_free"], value["kvasir:pages_cached"]) == (64, 60, 2)
        assert value["kvasir:kv_cache_usage"] == value["vllm:kv_cache_usage_perc"] == 4 / 64
        assert value["kvasir:generation_tokens_total"] == value["vllm:generation_tokens_total"] == 13
        assert value["kvasir:time_to_first_token_seconds_count"] == value["vllm:time_to_first_token_seconds_count"] == 3
        assert value["kvasir:inter_token_seconds_count"] == 9 and value["vllm:request_queue_time_seconds_count"] == 3
        assert value["vllm:e2e_request_latency_seconds_count"] == 4
        assert value["vllm:request_prompt_tokens_count"] == value["vllm:request_max_num_generation_tokens_count"] == 3
        assert value["vllm:request_generation_tokens_sum"] == value["vllm:request_max_num_generation_tokens_sum"] == 12
        assert found["vllm:num_requests_running"][0].labels == {"model_name": "fake"}
        assert {s.labels["reason"]: s.value for s in found["kvasir:requests_ended_total"]} == {
            "finished": 3,
            "queue_full": 1,
        }
        assert {s.labels["finished_reason"]: s.value for s in found["vllm:request_success_total"]} == {"stop": 3}
        http_counts = {(s.labels["route"], s.labels["status"]): s.value for s in found["kvasir:http_requests_total"]}
        assert (
            http_counts[(CHAT, "200")] == 3
            and http_counts[(CHAT, "400")] == 1
            and http_counts[(CHAT, "429")] == 1
            and http_counts[("none", "404")] == 1
        )
        assert (value["kvasir:engine_restarts_total"], value["kvasir:requests_quarantined_total"]) == (2, 1)
        assert (value["kvasir:tokens_per_forward"], value["kvasir:draft_saved_seconds"]) == (3.25, -0.5)
        errors = {s.labels["kind"]: s.value for s in found["kvasir:step_time_relative_error"]}
        assert errors == {"eager": 0.25, "graph": 0.125}
        assert found["kvasir:startup_seconds"][0].labels == {"phase": "weights"} and "kvasir:build_info" in value


def test_metrics_of_choices_and_of_the_phases():
    """Two prompts with two choices each, ended by a stop string that only the front end sees."""
    with running() as server, httpx.Client(base_url=server.url, timeout=120) as http:
        server.engine.delay = 0.01
        answer = http.post(
            "/v1/completions", json={"prompt": ["say: hello world to everyone", "say: hello"], "n": 2, "stop": " to"}
        ).json()
        http.post(CHAT, json={**SAY, "stream": True})
        value = {name: s[0].value for name, s in samples(http).items()}
    usage = answer["usage"]
    assert value["kvasir:decode_seconds_count"] == value["vllm:request_decode_time_seconds_count"] == 5
    assert value["kvasir:prefill_seconds_count"] == value["vllm:request_prefill_time_seconds_count"] == 3
    chat_prompt = value["vllm:request_prompt_tokens_sum"] - 2 * usage["prompt_tokens"]
    assert value["vllm:request_prompt_tokens_count"] == 5 and chat_prompt > 0
    assert (
        value["vllm:request_generation_tokens_count"] == 5
        and value["vllm:request_generation_tokens_sum"] == usage["completion_tokens"] + 4
    )
    assert value["vllm:request_max_num_generation_tokens_count"] == 3
    assert value["vllm:request_max_num_generation_tokens_sum"] == usage["completion_tokens"] / 2 + 4
    phases = value["vllm:request_prefill_time_seconds_sum"] + value["vllm:request_queue_time_seconds_sum"]
    assert value["vllm:request_prefill_time_seconds_sum"] > 0.02 and phases == pytest.approx(
        value["vllm:time_to_first_token_seconds_sum"]
    )
    assert value["vllm:request_decode_time_seconds_sum"] == pytest.approx(value["vllm:inter_token_latency_seconds_sum"])


def test_vllms_names_are_listed():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    listed = next(p for p in text.split("\n\n") if p.startswith("vLLM's names in `/metrics`")).partition("):")[2]
    names = [name.removeprefix("vllm:") for names in ALIASES.values() for name in names]
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(names)


def test_names_say_what_kind_a_metric_is(http):
    """Prometheus keeps ``_total`` for counters."""
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    assert not [f.name for f in families if f.type != "counter" and f.name.endswith("_total")]
    served = {f.name.removeprefix("kvasir:") for f in families if f.name.startswith("kvasir:")} - {"build_info"}
    absent = {d.name for d in DEFINITIONS} - served
    # Those of replicas, of a server that learns, and of tiers below the device.
    elsewhere = {d.name for d in DEFINITIONS if d.name.startswith(("replica_", "learn_", "tier_"))} | {"queued_seconds"}
    assert served <= {d.name for d in DEFINITIONS} and absent == elsewhere, "a metric is defined and not served"


def test_each_replicas_drafter_shows_what_it_learned():
    replicas = {n: EngineStats(learning=LearnStats(version=n + 1, kl_by_depth=[0.5])) for n in (0, 2)}
    read = {d.name: d.read for d in DEFINITIONS}
    several = EngineStats(by_replica=replicas)
    assert read["learn_version"](several) == [(("0",), 1), (("2",), 3)]
    assert read["learn_kl"](several) == [(("0", "0"), 0.5), (("2", "0"), 0.5)]
    assert read["learn_version"](replicas[0]) == [(("0",), 1)] and read["learn_version"](EngineStats()) is None


def test_openapi_names_every_route_and_schema(http, server):
    document = http.get("/openapi.json").json()
    served = {path for method, path in all_routes(server) if method in ("GET", "POST")} - {
        "/openapi.json",
        "/v1/models/fake",
        "/playground/fake",
    }
    assert served <= set(document["paths"])
    text = json.dumps(document)
    names = set(document["components"]["schemas"])
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= names


def test_the_playground_is_open_and_closed_in(http):
    r = http.get("/")
    assert r.status_code == 200 and r.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in r.headers["content-security-policy"]


def test_the_models_defaults_come_before_ours_and_after_the_clients():
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "max_new_tokens": 7, "do_sample": True}
    with running(FakeClient(generation_defaults=defaults)) as server:
        for path, body in ((CHAT, SAY), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
            httpx.post(server.url + path, json={**body, "top_p": 0.5}, timeout=120)
            p = server.engine.seen[-1].params
            assert (p.temperature, p.top_p, p.top_k, p.min_p) == (0.6, 0.5, 20, 0.0), path


def test_further_names_of_the_model_are_answered():
    """As with vLLM's ``--served-model-name a b``: all are served, and answers say the first."""
    body = {"messages": [{"role": "user", "content": "say: hello"}], "max_tokens": 8}
    with running(model_alias=("second", "third")) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        first = http.get("/v1/models").json()["data"][0]["id"]
        for name in ("second", "third", first):
            assert http.post("/v1/chat/completions", json=body | {"model": name}).json()["model"] == first
            assert http.get(f"/v1/models/{name}").json()["id"] == first
        assert http.post("/v1/chat/completions", json=body | {"model": "fourth"}).status_code == 404
        assert http.get("/v1/models/fourth").status_code == 404
