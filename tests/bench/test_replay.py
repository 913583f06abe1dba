"""``kvasir bench trace`` with servers, ours with the embedded model and a stand-in for vLLM's, on a few requests."""

import json

import pytest

from kvasir.bench import replay
from kvasir.bench.case import parse
from kvasir.bench.load import METRICS, Load
from kvasir.bench.merge import merge
from kvasir.bench.result import judged, verdict
from kvasir.bench.servers import flags_of
from kvasir.bench.workloads import SHAPES
from kvasir.errors import ConfigError
from tests.bench.helpers import SITE, SMALL, log_of
from tests.bench.test_online import fake  # noqa: F401 (a fixture)
from tests.bench.test_result import check

LOAD = {"file": "t.jsonl", "rate": 60.0, "num_requests": 12, "seconds": 0.0, "scale": 0.0625}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Twelve requests of a Mooncake trace with two blocks each, the first of which is the same for all."""
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr("kvasir.bench.replay.REST", 0.1)
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    rows = [
        {"timestamp": 100 * i, "input_length": 1000, "output_length": 80, "hash_ids": [0, i + 1]} for i in range(12)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_a_b_a_at_a_share_of_the_peers_capacity(data):
    table = {
        "shape": "small",
        "repeats": 2,
        "settings": {"num_threads": 1, "device": "cpu"},
        "peer": {"name": "vllm", "repeats": [2, 1], "options": {"max_model_len": 128}},
        "traces": {"half": {**{k: v for k, v in LOAD.items() if k != "rate"}, "share": 0.02}},
    }
    found = replay.measure(parse("c", table), data, site=SITE)
    check(found)
    kvasir, vllm = found["arms"]
    assert kvasir["metrics"]["half.ttft_ms_p50"]["n"] == 2 and vllm["metrics"]["half.ttft_ms_p50"]["n"] == 3
    for entry in found["arms"]:
        assert set(entry["metrics"]["half.failed"]["values"]) == {0} and set(
            entry["metrics"]["half.short"]["values"]
        ) == {0}
    assert vllm["metrics"]["half.tokens_per_event"]["median"] == 1.0, "every token of a shape has text"
    assert kvasir["metrics"]["half.tokens_per_event"]["median"] >= 1.0, (
        "where the server falls behind, tokens leave together"
    )
    assert kvasir["metrics"]["half.cached_tokens"]["min"] >= 16 * 10, "the shared block is found again"
    assert all(a["metrics"]["half.capacity_requests_s"]["n"] == 1 for a in found["arms"]), "measured once a server"
    rate = 11 / vllm["metrics"]["half.window_s"]["median"]
    assert rate == pytest.approx(0.02 * vllm["metrics"]["half.capacity_requests_s"]["median"], rel=0.8)
    assert {f"half.{metric}" for metric in METRICS} <= set(kvasir["metrics"]), "what targets may speak of is measured"
    judged = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p99", "output_tok_s", "capacity_requests_s")
    assert set(found["targets"]) == {f"half.{m} kvasir/vllm" for m in judged}
    assert kvasir["metrics"]["half.step_time_error_eager"]["min"] > 0, "as it is after the load"
    assert not any("step_time" in key for key in [*vllm["metrics"], *found["ratios"], *found["targets"]])
    assert "half.ttft_ms_p50 vllm after/before" in found["ratios"] and not any("client" in r for r in found["ratios"])

    asked = log_of(data / "log")
    served = [e["options"] for e in asked if e["op"] == "serve"]
    assert len(served) == 2 and served[0]["max_model_len"] == "128" and served[0]["load_format"] == "dummy"
    sent = [tuple(e["prompt"]) for e in asked if e["op"] == "request"]
    first_life = sent[8 : 8 + 12 + 8 + 2 * 12]
    windows = [first_life[20:32], first_life[32:44]]
    assert len(sent) == 8 + 12 + 8 + 24 + 8 + 8 + 12, (
        "first requests, capacity, warm-up and two windows; then the same with one"
    )
    assert all(len({p[:32] for p in w}) == 1 and len(set(w)) == 12 for w in windows), "one shared block"
    known = [{p[:16] for p in part} for part in (first_life[:12], first_life[12:20], *windows)]
    assert all(not a & b for i, a in enumerate(known) for b in known[:i]), (
        "no window finds the prefixes of another in a cache"
    )


def test_loads_of_one_trace_share_a_life_and_a_capacity(data):
    table = {
        "shape": "small",
        "repeats": 1,
        "settings": {"num_threads": 1, "device": "cpu"},
        "arms": {"kvasir": {}, "smaller": {"max_num_seqs": 4, "windows": 0}},
        "peer": {"name": "vllm", "repeats": [1, 0], "options": {"max_model_len": 128}},
        "traces": {
            n: {**{k: v for k, v in LOAD.items() if k != "rate"}, "share": s}
            for n, s in (("more", 0.04), ("half", 0.02))
        },
    }
    steps = []
    found = replay.measure(parse("c", table), data, site=SITE, keep=steps.append)
    check(found)
    kvasir, smaller, vllm = found["arms"]
    assert set(smaller["metrics"]) == {"start_s", "more.capacity_requests_s", "half.capacity_requests_s"}
    assert "half.capacity_requests_s smaller/kvasir" in found["ratios"]
    for entry in found["arms"]:
        assert entry["metrics"]["half.capacity_requests_s"] == entry["metrics"]["more.capacity_requests_s"]
    assert vllm["metrics"]["more.window_s"]["median"] == pytest.approx(
        vllm["metrics"]["half.window_s"]["median"] / 2, rel=0.05
    )
    assert 150 < kvasir["metrics"]["half.cached_tokens"]["median"] < 12 * 32, "the shared block, not the window before"
    asked = log_of(data / "log")
    sent = [tuple(e["prompt"]) for e in asked if e["op"] == "request"]
    assert len([e for e in asked if e["op"] == "serve"]) == 1 and len(sent) == 8 + 12 + 2 * (8 + 12)
    assert not {p[:16] for p in sent[28:40]} & {p[:16] for p in sent[48:]}, "other prompts in every window of a life"

    assert [[a["name"] for a in s["arms"]] for s in steps] == [["vllm"]] * 4 + [["kvasir", "vllm"]] * 4 + [
        ["kvasir", "smaller", "vllm"]
    ] * 2
    capacity, first, _, second = (steps[i]["arms"][0]["metrics"] for i in range(4))
    assert set(capacity) == {"start_s", "more.capacity_requests_s"}, "a run that is cut in its first window has it"
    assert not any("half" in m for m in first) and any("half.ttft" in m for m in second)
    for so_far in steps:
        check(so_far)


def test_more_requests_wait_than_run_at_once_when_a_capacity_is_measured():
    """The places of all engines of the largest server count, since requests that run from the beginning leave no
    prompts to later steps."""
    arms = {"two": {"replicas": 2}, "one": {"windows": 0}}
    peer = {"name": "vllm", "options": {"max_num_seqs": 100, "data_parallel_size": 3}}
    table = {"model": "nano", "settings": {"max_num_seqs": 128}, "arms": arms, "peer": peer, "traces": {"one": LOAD}}
    case = parse("c", table)
    assert replay.most_at_once(case, case.peer) == 300 and replay.most_at_once(case, None) == 256
    assert case.windows == {"one": 0} and all("windows" not in settings for settings in case.arms.values())
    with pytest.raises(ConfigError, match="windows = 0 stands in arms of traces"):
        parse("c", {**table, "arms": {"two": {"windows": 0}}})


def test_an_arm_with_a_drafter_tells_how_much_was_drafted(data):
    """So that an arm that never drafted is seen; arms without a drafter say nothing of drafts."""
    arms = {"off": {}, "same": {"drafter": "draft_model:model=nano", "draft_control": "fixed"}}
    settings = {"num_threads": 1, "device": "cpu"}
    table = {"model": "nano", "repeats": 1, "settings": settings, "arms": arms, "traces": {"one": LOAD}}
    off, same = (entry["metrics"] for entry in replay.measure(parse("c", table), data)["arms"])
    assert same["one.draft_tokens"]["median"] >= same["one.accepted_draft_tokens"]["median"] > 0
    assert not any("draft" in key for key in off)


def test_a_load_that_the_peers_first_life_did_not_reach(data):
    table = {"shape": "small", "peer": {"name": "vllm", "repeats": [1, 1]}, "traces": {n: LOAD for n in ("one", "two")}}
    case, whole = parse("c", table), replay.Measured({f"{n}.output_tok_s": [8.0] for n in ("one", "two")})
    parts = {
        "before": {"vllm": replay.Measured({"one.output_tok_s": [4.0]})},
        "own": {"kvasir": whole},
        "after": {"vllm": whole},
    }
    ratios = replay._result(case, case.traces, parts, None)["ratios"]
    assert ratios == {
        "one.output_tok_s kvasir/vllm": 1.333,
        "two.output_tok_s kvasir/vllm": 1.0,
        "one.output_tok_s vllm after/before": 2.0,
    }


def test_a_load_may_have_fewer_windows_than_the_case_repeats(data):
    traces = {"twice": LOAD, "once": LOAD | {"windows": 1}}
    found = replay.measure(
        parse("c", {"shape": "small", "repeats": 2, "settings": {"num_threads": 1, "device": "cpu"}, "traces": traces}),
        data,
    )
    (only,) = found["arms"]
    assert (only["metrics"]["twice.ttft_ms_p50"]["n"], only["metrics"]["once.ttft_ms_p50"]["n"]) == (2, 1)
    assert (
        only["metrics"]["twice.step_time_error_eager"]["n"],
        only["metrics"]["once.step_time_error_eager"]["n"],
    ) == (1, 1)


def test_weights_on_disk_are_the_same_for_both(data):
    """Both engines read the weights from disk. Own weights would not compare, since a GPU's clocks depend on them."""
    table = {
        "shape": "small",
        "on_disk": True,
        "repeats": 1,
        "settings": {"num_threads": 1, "device": "cpu"},
        "traces": {"t": LOAD},
        "peer": {"name": "vllm", "repeats": [1, 0], "options": {"max_model_len": 128}},
    }
    found = replay.measure(parse("c", table), data, site=SITE)
    assert all(set(a["metrics"]["t.failed"]["values"]) == {0} for a in found["arms"]) and len(found["arms"]) == 2
    (served,) = [e["options"] for e in log_of(data / "log") if e["op"] == "serve"]
    assert served["load_format"] is None and "small-weights" in served["model"]


def test_one_load_with_our_settings(data, capsys):
    replay.run_load(
        Load.of("t", LOAD | {"arrivals": "recorded"}),
        {"num_threads": 1},
        model="",
        shape=None,
        peer=None,
        site=None,
        data=data,
        repeats=1,
        capacity=None,
        output=None,
        commit="abc1234",
    )
    found = json.loads(capsys.readouterr().out)
    check(found)
    (only,) = found["arms"]
    assert (
        only["metrics"]["t.requests"]["median"] == 12
        and only["metrics"]["t.failed"]["median"] == 0
        and found["commit"] == "abc1234"
    )
    assert only["config"]["loads"]["t"]["rate"] == 60.0 and only["config"]["num_threads"] == 1


def test_a_running_server(fake, data, capsys):  # noqa: F811
    replay.run_url(Load.of("t", LOAD), f"{fake.url}/v1/", data=data, repeats=2, api_key=None, output=None, commit=None)
    found = json.loads(capsys.readouterr().out)
    check(found)
    assert found["arms"][0]["metrics"]["t.short"]["values"] == [12, 12], "three tokens of five"
    assert len(fake.bodies) == 8 + 24


def test_nothing_succeeds(fake, data):  # noqa: F811
    fake.behaviour = lambda number: 400
    with pytest.raises(ConfigError, match="no request of the window succeeded"):
        replay.run_url(Load.of("t", LOAD), fake.url, data=data, repeats=1, api_key=None, output=None, commit=None)


@pytest.mark.parametrize("kept, met", [(1.0, True), (0.995, True), (0.994, False), (0.99, False)])
def test_no_worse_is_what_rounds_to_one(kept, met):
    bounds = Load.of("t", LOAD).bounds()
    assert (
        judged(bounds, {"t.output_tok_s kvasir/vllm": kept}, "kvasir/vllm")["t.output_tok_s kvasir/vllm"]["met"] is met
    )


def test_what_a_target_speaks_of_is_shown_and_merged(data):
    load = LOAD | {"targets": {"at_most": {"ttft_ms_p90": 1.5}}}
    case = parse("c", {"shape": "small", "peer": {"name": "vllm", "repeats": [1, 0]}, "traces": {"t": load}})
    parts = {
        part: {name: replay.Measured({"t.ttft_ms_p90": [value], "t.e2e_ms_p50": [value]})}
        for part, name, value in (("before", "vllm", 4.0), ("own", "kvasir", 8.0))
    }
    found = replay._result(case, case.traces, parts, None)
    assert (
        found["ratios"] == {"t.ttft_ms_p90 kvasir/vllm": 2.0}
        and merge([found, found])["targets"] == found["targets"] != {}
    )


@pytest.mark.parametrize("ratio, met", [(0.8, False), (1.0, True), (1.2, False)])
def test_a_target_with_two_ends(ratio, met):
    bounds = Load.of(
        "t", LOAD | {"targets": {"at_least": {"requests_s": 0.9}, "at_most": {"requests_s": 1.1}}}
    ).bounds()
    (found,) = judged(bounds, {"t.requests_s kvasir/vllm": ratio}, "kvasir/vllm").values()
    assert found["met"] is met and verdict(found).endswith(": at least 0.9 and at most 1.1")


def test_refusals(data):
    load = Load.of("t", LOAD | {"share": 0.5, "rate": None})
    with pytest.raises(ConfigError, match="give a rate instead"):
        replay.run_url(load, "http://127.0.0.1:1", data=data, repeats=1, api_key=None, output=None, commit=None)
    options = dict(model="", shape=None, data=data, repeats=1, output=None, commit=None)
    with pytest.raises(ConfigError, match="needs the peer, or its capacity"):
        replay.run_load(load, {}, peer=None, site=None, capacity=None, **options)
    with pytest.raises(ConfigError, match="no peer named 'vlm'.*vllm"):
        replay.run_load(load, {}, peer="vlm", site=None, capacity=None, **options)


def test_arms_of_a_case_with_traces_may_have_a_servers_settings():
    table = {"arms": {"two": {"replicas": 2}}}
    made = parse("c", table | {"traces": {"x": {"file": "f", "rate": 1.0}}})
    assert flags_of(made.arms["two"]) == ["--replicas", "2"]
    with pytest.raises(ConfigError, match="replicas"):
        parse("c", table | {"workloads": {"x": {"batch": 1, "prompt": 8, "output": 8}}})
