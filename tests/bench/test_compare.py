"""``kvasir bench run`` with real processes: the embedded model between two runs of a stand-in for vLLM."""

import hashlib
import json
import random
import re
from pathlib import Path

import pytest

from kvasir.bench import case as cases
from kvasir.bench import compare, roofline
from kvasir.bench.case import parse
from kvasir.bench.worker import Worker
from kvasir.bench.workloads import SHAPES, Batch
from kvasir.config import EngineConfig, Settings
from kvasir.errors import ConfigError
from kvasir_lab.bench import ladder
from tests.bench.helpers import SITE, SMALL, log_of
from tests.bench.test_result import check

CASES = sorted((Path(__file__).parents[2] / "bench" / "cases").glob("*.toml"))
TABLE = {
    "shape": "small",
    "repeats": 2,
    "settings": {"num_threads": 1, "device": "cpu"},
    "arms": {"kvasir": {}},
    "peer": {"name": "vllm", "repeats": [2, 1], "options": {"max_model_len": 64}},
    "workloads": {
        "one": {
            "batch": 1,
            "prompt": 8,
            "output": 48,
            "warmup_prompt": 2,
            "targets": {"decode": 0.001, "prefill": 1e9},
        },
        "two": {"batch": 2, "prompt": 5, "output": 48},
    },
}


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture
def rated(monkeypatch):
    """Fix the machine's rates, so that no test measures them."""
    monkeypatch.setattr(
        roofline, "machine_rates", lambda device, dtype: {"copy_bytes_s": 1e10, "matmul_flop_s": 1e11, "dtype_bytes": 4}
    )


def test_a_b_a(log):
    found = compare.measure(parse("c", TABLE), peer=True, site=SITE)
    check(found)
    kvasir, vllm = found["arms"]
    key = "one.decode_tok_s"
    assert (kvasir["name"], vllm["name"]) == ("kvasir", "vllm")
    assert set(kvasir["metrics"]) == set(vllm["metrics"]) | {"kv_bytes_per_token", "kv_capacity_tokens"}
    assert kvasir["metrics"]["kv_bytes_per_token"] == 2 * 2 * 32 * 4, "two layers, keys and values, 32 wide, fp32"
    assert kvasir["metrics"][key]["n"] == 2 and vllm["metrics"][key]["n"] == 3 and vllm["metrics"]["start_s"]["n"] == 2
    assert found["ratios"][f"{key} kvasir/vllm"] == pytest.approx(
        kvasir["metrics"][key]["median"] / vllm["metrics"][key]["median"], rel=0.01
    )
    assert found["ratios"][f"{key} vllm after/before"] > 0
    assert (
        found["targets"][f"{key} kvasir/vllm"]["met"] and not found["targets"]["one.prefill_tok_s kvasir/vllm"]["met"]
    )
    assert vllm["config"]["version"] == "0.0.fake" and found["limits"]["one.prefill_tok_s"] > 0
    assert 0 < vllm["metrics"]["two.decode_tok_s"]["median"] < 1.1 * 2 / 0.002, (
        "the stand-in sleeps 2 ms a token, and a busy machine only makes that longer"
    )

    asked = log_of(log)
    starts = [e for e in asked if e["op"] == "start"]
    assert len(starts) == 2 and all(e["config"] for e in starts)
    assert starts[0]["options"] == {"max_model_len": 64, "load_format": "dummy", "enable_prefix_caching": False}

    def prompts(name, batch, prompt, number):
        rng = random.Random(f"{name} {number}")
        vocab = SMALL["vocab_size"]
        ids = [[rng.randrange(vocab // 64, vocab - vocab // 64) for _ in range(prompt)] for _ in range(batch)]
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()

    def life(numbers):
        return [
            (prompts(name, batch, size, number), count)
            for name, batch, long, short, out in (("one", 1, 8, 2, 48), ("two", 2, 5, 5, 48))
            for number, size in [(-1, short), *((n, long) for n in numbers)]
            for count in (1, out)
        ]

    sent = [(e["prompts"], e["count"]) for e in asked if e["op"] == "generate"]
    assert sent == life([0, 1]) + life([2]), "warm-up, two rounds; then warm-up and the third round"


def test_without_the_peer_and_one_workload(log, rated):
    found = compare.measure(parse("c", TABLE), peer=False, site=None, repeats=1, only=["two"])
    check(found)
    (only,) = found["arms"]
    measured = {f"two.{k}_tok_s" for k in ("prefill", "decode", "total")}
    assert (
        set(only["metrics"]) == {"start_s", "kv_bytes_per_token", "kv_capacity_tokens"} | measured
        and "targets" not in found
    )


def still(monkeypatch, asked=None):
    """Replace engines by stand-ins without a process. Returns the options of each life, in order.

    ``asked`` holds the prompts, the tokens of the first prompt and the tokens of the answers.
    """
    asked = [] if asked is None else asked
    lives = []

    class Still(Worker):
        def __init__(self, name, model, options, site=None):
            lives.append(options)
            self.facts, self.counts = {"start_s": 1.0}, {"at_once": options.get("max_num_seqs", 1), "preemptions": 0}
            if "num_pages" in options:
                self.facts["kv_capacity_tokens"] = 16 * options["num_pages"]

        def seconds(self, prompts, num_tokens):
            asked.append((len(prompts), len(prompts[0]), num_tokens))
            return 0.001 * num_tokens

        def close(self):
            pass

    monkeypatch.setattr(compare, "Worker", Still)
    return lives


def test_arms_take_turns_a_life_each(log, rated, monkeypatch):
    lives = still(monkeypatch)
    table = TABLE | {"arms": {"a": {"max_num_seqs": 2}, "b": {"max_num_seqs": 4}}}
    found = compare.measure(parse("c", table), peer=False, site=None, only=["two"])
    assert [options.get("max_num_seqs") for options in lives] == [2, 4, 2, 4]
    assert "two.decode_tok_s b/a" in found["ratios"] and all(
        a["metrics"]["two.decode_tok_s"]["n"] == 2 for a in found["arms"]
    )


def test_prompts_that_would_not_stay_cached_are_left_out(log, rated, monkeypatch, caplog):
    """112 tokens fit seven pages and not six; without cached prompts, what does not fit is measured."""
    still(monkeypatch)
    arms = {"small": {"num_pages": 6}, "large": {"num_pages": 7}}
    workloads = {"one": {"batch": 1, "prompt": 8, "output": 48}, "two": {"batch": 2, "prompt": 8, "output": 48}}
    table = {k: v for k, v in TABLE.items() if k != "peer"} | {"arms": arms, "workloads": workloads, "cached": True}
    found = compare.measure(parse("c", table), peer=False, site=None)
    check(found)
    rates = {a["name"]: {key for key in a["metrics"] if key.endswith("tok_s")} for a in found["arms"]}
    assert rates == {"small": {"one.decode_tok_s"}, "large": {"one.decode_tok_s", "two.decode_tok_s"}}
    assert "small: two is left out" in caplog.text and "large: two" not in caplog.text
    found = compare.measure(parse("c", table | {"cached": False}), peer=False, site=None)
    assert all("two.decode_tok_s" in a["metrics"] for a in found["arms"])


def test_decoding_over_cached_prompts(log, rated, monkeypatch):
    lives = still(monkeypatch, asked := [])
    table = TABLE | {
        "cached": True,
        "rounds": 3,
        "repeats": 2,
        "arms": {"a": {}, "b": {}},
        "targets": {"two.decode_tok_s b/a": 1.5},
    }
    table["workloads"] = {"two": {"batch": 2, "prompt": 5, "output": 48}}
    table["peer"] = {
        "name": "vllm",
        "repeats": [1, 1],
        "options": {"max_model_len": 64},
        "variants": {"vllm_fp8": {"kv_cache_dtype": "fp8"}},
    }
    stages = []
    found = compare.measure(
        parse("c", table), peer=True, site=SITE, keep=lambda so_far: stages.append(len(so_far["arms"]))
    )
    check(found)
    assert [options["enable_prefix_caching"] for options in lives] == [True] * 8
    assert [options.get("kv_cache_dtype") for options in lives] == [None, "fp8", *[None] * 5, "fp8"], (
        "the variant runs whenever the peer does"
    )
    assert asked[:4] == [(2, 5, 48), (2, 5, 1), (2, 5, 1), (2, 5, 48)], (
        "two runs that do not count, then a token and all of them"
    )
    names = {a["name"]: a["metrics"] for a in found["arms"]}
    assert list(names) == ["a", "b", "vllm", "vllm_fp8"] and {
        n: m["two.decode_tok_s"]["n"] for n, m in names.items()
    } == {"a": 6, "b": 6, "vllm": 2, "vllm_fp8": 2}
    assert names["a"]["two.decode_tok_s"]["median"] == pytest.approx(2000) and "two.total_tok_s" not in names["a"]
    assert found["targets"] == {"two.decode_tok_s b/a": {"ratio": 1.0, "at_least": 1.5, "met": False}}
    assert {"two.decode_tok_s a/vllm_fp8", "two.decode_tok_s vllm_fp8 after/before"} <= set(found["ratios"])
    assert stages == [3, 4, 4, 4, 4, 4], "kept after every life from the first of ours on"


def test_a_load_counts_what_ran_at_once(log, rated, monkeypatch):
    still(monkeypatch, asked := [])
    table = TABLE | {
        "arms": {"a": {"max_num_seqs": 2}, "b": {"max_num_seqs": 4, "kv_codec": "int4_bdr"}},
        "targets": {"load.at_once b/a": 2.0, "kv_bytes_per_token a/b": 3.0},
    }
    table["workloads"] = {
        "first": {"batch": 1, "prompt": 9, "output": 2, "measure": ["prefill"]},
        "load": {"batch": 8, "prompt": 5, "output": 3, "warmup_prompt": 2, "measure": ["total"]},
    }
    found = compare.measure(parse("c", table), peer=False, site=None, repeats=1)
    check(found)
    assert asked[:4] == [(1, 9, 1), (1, 9, 1), (8, 2, 3), (8, 5, 3)], "nothing runs that nobody measures"
    a, b = (entry["metrics"] for entry in found["arms"])
    assert set(a) == {"start_s", "first.prefill_tok_s", "load.total_tok_s", "load.at_once", "load.preemptions"}
    assert found["targets"] == {"load.at_once b/a": {"ratio": 2.0, "at_least": 2.0, "met": True}}, (
        "a ratio that was not measured is not judged"
    )
    assert found["limits"]["load.decode_tok_s b"] > found["limits"]["load.decode_tok_s"], "fewer bytes to read"


def test_a_count_of_nothing_has_no_drift(log, rated, monkeypatch):
    still(monkeypatch)
    table = TABLE | {"workloads": {"load": {"batch": 2, "prompt": 5, "output": 3, "measure": ["total"]}}}
    ratios = compare.measure(parse("c", table), peer=True, site=SITE)["ratios"]
    assert ratios["load.at_once vllm after/before"] == 1.0 and not any("preemptions" in r for r in ratios)


def test_an_arm_that_fails_does_not_cost_the_others(log, rated, monkeypatch):
    lives = still(monkeypatch)
    seconds = compare.Worker.seconds
    monkeypatch.setattr(
        compare.Worker,
        "seconds",
        lambda self, *asked: (
            (_ for _ in ()).throw(ConfigError("no kernel")) if len(lives) == 2 else seconds(self, *asked)
        ),
    )
    table = TABLE | {"arms": {"a": {}, "b": {}, "c": {}}}
    found = compare.measure(parse("c", table), peer=False, site=None, repeats=1, only=["two"])
    assert [a["name"] for a in found["arms"]] == ["a", "c"]


def test_a_variant_that_does_not_start_is_left_out(log, rated):
    table = TABLE | {
        "repeats": 1,
        "peer": {
            "name": "vllm",
            "repeats": [1, 0],
            "options": {"max_model_len": 64},
            "variants": {"other": {"max_model_len": 13}},
        },
    }
    found = compare.measure(parse("c", table), peer=True, site=SITE, only=["two"])
    assert [a["name"] for a in found["arms"]] == ["kvasir", "vllm"]


def test_the_result_so_far_is_on_disk(log, rated, monkeypatch, tmp_path):
    still(monkeypatch)
    finished = []
    monkeypatch.setattr(
        compare, "finish", lambda outcome, output, commit: finished.append(json.loads(output.read_text()))
    )
    compare.run_case(
        parse("c", TABLE),
        peer=False,
        site=None,
        repeats=1,
        only=None,
        output=tmp_path / "out" / "r.json",
        commit="abc1234",
    )
    check(finished[0])
    assert finished[0]["commit"] == "abc1234" and finished[0]["arms"][0]["metrics"]["one.decode_tok_s"]["n"] == 1


def test_beginnings_are_shared():
    short, long = Batch("a", 2, 4, 2).beginnings(640, "x"), Batch("b", 3, 9, 2).beginnings(640, "x")
    assert [p[:4] for p in long[:2]] == short and len({tuple(p) for p in long}) == 3
    assert Batch("a", 2, 4, 2).beginnings(640, "y") != short and all(10 <= t < 630 for p in long for t in p)


def test_ladder(log, rated, capsys, monkeypatch):
    lives = still(monkeypatch)
    rungs = ("enable_prefix_caching", "check")
    ladder.run(
        {"num_threads": 1},
        model="",
        shape="small",
        workloads=["w:1:8:48"],
        repeats=1,
        output=None,
        commit="abc1234",
        rungs=rungs,
    )
    found = json.loads(capsys.readouterr().out)
    check(found)
    assert [a["name"] for a in found["arms"]] == ["plain", "+enable_prefix_caching", "+check"] and found[
        "commit"
    ] == "abc1234"
    steps = [[False, False], [True, False], [True, True]]
    assert (
        [[a["config"][r] for r in rungs] for a in found["arms"]]
        == steps
        == [[options[r] for r in rungs] for options in lives]
    )
    assert {"w.decode_tok_s +check/plain", "w.decode_tok_s +check/+enable_prefix_caching"} <= set(found["ratios"])


def test_a_ladder_divides_its_rounds_and_leaves_out_what_a_cpu_does_not_have(log, rated, capsys, caplog, monkeypatch):
    lives = still(monkeypatch, asked := [])
    ladder.run({"device": "cpu"}, model="", shape=None, workloads=None, repeats=5, output=None, commit="abc1234")
    found = json.loads(capsys.readouterr().out)
    check(found)
    assert [options["fused_kernels"] for options in lives] == [False, True, False, True] and "cuda_graphs" not in lives[
        0
    ]
    assert {a["name"]: a["metrics"]["decode16.decode_tok_s"]["n"] for a in found["arms"]} == {
        "plain": 6,
        "+fused_kernels": 6,
    }
    assert all(options["enable_prefix_caching"] for options in lives) and (16, 64, 128) in asked
    assert "goes without cuda_graphs and overlap" in caplog.text


def test_rungs_within_reach(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert ladder.reachable({}, ladder.RUNGS) == ladder.RUNGS and ladder.reachable({"device": "cpu"}, ladder.RUNGS) == (
        "fused_kernels",
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="none of its switches changes anything on a CPU"):
        ladder.reachable({}, ("overlap",))


def test_a_ladder_needs_its_switches():
    with pytest.raises(ConfigError, match="no ladder: unknown setting 'warp_drive'"):
        ladder.run({}, model="", shape=None, workloads=None, repeats=1, output=None, commit=None, rungs=("warp_drive",))


def test_a_peer_that_fails(log, rated):
    table = TABLE | {"peer": {"name": "vllm", "options": {"max_model_len": 13}}}
    with pytest.raises(ConfigError, match="vllm: ValueError: no such length"):
        compare.measure(parse("c", table), peer=True, site=SITE)
    table["peer"]["options"]["max_model_len"] = 14
    with pytest.raises(ConfigError, match="the process of vllm ended with code 7"):
        compare.measure(parse("c", table), peer=True, site=SITE)


@pytest.mark.parametrize("end", [ConfigError("out of memory"), SystemExit(143)])
def test_what_was_measured_before_a_failure_is_kept(log, rated, monkeypatch, end):
    lives = still(monkeypatch)
    seconds = compare.Worker.seconds

    def failing(self, prompts, num_tokens):
        if len(lives) == 3 and len(prompts) == 2:
            raise end
        return seconds(self, prompts, num_tokens)

    monkeypatch.setattr(compare.Worker, "seconds", failing)
    found = compare.measure(parse("c", TABLE), peer=True, site=SITE)
    check(found)
    vllm = found["arms"][1]["metrics"]
    assert (
        vllm["one.decode_tok_s"]["n"] == 3
        and vllm["two.decode_tok_s"]["n"] == 2
        and "one.decode_tok_s kvasir/vllm" in found["targets"]
    )


def test_a_failure_before_ours_is_the_answer(log, rated, monkeypatch):
    still(monkeypatch)
    monkeypatch.setattr(
        compare.Worker, "seconds", lambda self, prompts, count: (_ for _ in ()).throw(ConfigError("out of memory"))
    )
    with pytest.raises(ConfigError, match="out of memory"):
        compare.measure(parse("c", TABLE), peer=True, site=SITE)


def test_refusals_before_anything_starts(log, tmp_path):
    case = parse("c", TABLE)
    with pytest.raises(ConfigError, match="has no package 'vllm'"):
        compare.measure(case, peer=True, site=str(tmp_path))
    with pytest.raises(ConfigError, match="no workload 'three'; there are one, two"):
        compare.measure(case, peer=False, site=None, only=["three"])


@pytest.mark.parametrize("file", CASES, ids=lambda f: f.stem)
def test_stored_cases_can_be_read(file):
    case = cases.read(file)
    assert case.workloads or case.served
    assert case.peer is None or sum(case.peer.repeats) >= 1
    for settings in case.arms.values():
        (Settings if case.served else EngineConfig).of(**settings)
    for w in case.workloads:
        assert w.batch.prompt + w.batch.output <= case.arms[case.first].get("max_model_len", 2048)


@pytest.mark.parametrize("name", ["batch-invariant", "llama-8b", "llama-8b-long", "llama-8b-long-prefill"])
def test_five_repeats_of_ours_and_the_peer_before_and_after(name):
    root = CASES[0].parents[2]
    case = cases.read(root / "bench" / "cases" / f"{name}.toml")
    assert case.repeats >= 5 and (case.peer is None or min(case.peer.repeats) >= 1 and sum(case.peer.repeats) >= 5)
    assert re.search(rf"^  .*\b{name} ?[|)]", (root / "tools" / "gpu_peer.sh").read_text(), re.MULTILINE), (
        "a step of the script"
    )


def test_there_are_stored_cases():
    assert len(CASES) >= 5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shapes": "x"}, "no key 'shapes'.*'shape'"),
        ({"model": "m"}, "a shape or a model"),
        ({"repeats": 0}, "repeats=0"),
        ({"arms": {"a": {"max_num_sequences": 3}}}, "arm a: unknown setting"),
        ({"workloads": {}}, "one of the three"),
        ({"traces": {"t": {"file": "f", "rate": 1.0}}}, "one of the three"),
        ({"arms": {"vllm": {}}}, "named like the peer"),
        ({"workloads": {"w": {"batch": 1, "prompt": 8}}}, "workload 'w:1:8:0'"),
        ({"workloads": {"w": {"batch": 1, "promt": 8}}}, "no key 'promt'"),
        ({"workloads": {"w": {"batch": 1, "prompt": 8, "output": 8, "targets": {"decoding": 1}}}}, "targets of w"),
        ({"peer": {"name": "vllm", "flags": 1}}, "the peer has no key 'flags'"),
        ({"rounds": 0}, "rounds=0"),
        ({"peer": {"name": "vllm", "variants": {"kvasir": {}}}}, "named like the peer: kvasir"),
        ({"targets": {"one.decode_tok_s a/b": 1}}, "with arms of"),
        ({"targets": {"kvasir/vllm of": 1}}, "expected 'METRIC ARM/ARM'"),
        (
            {"cached": True, "workloads": {"w": {"batch": 1, "prompt": 8, "output": 8, "measure": ["total"]}}},
            "a case with cached prompts measures only decoding",
        ),
        ({"workloads": {"w": {"batch": 1, "prompt": 8, "output": 8, "measure": ["ttft"]}}}, "has no key 'ttft'"),
        (
            {
                "workloads": {
                    "w": {"batch": 1, "prompt": 8, "output": 8, "measure": ["prefill"], "targets": {"decode": 1}}
                }
            },
            "only prefill is measured",
        ),
        ({"targets": {"too.decode_tok_s kvasir/vllm": 1}}, "'too.decode_tok_s' is not measured.*'two.decode_tok_s'"),
        ({"cached": True}, "target names prefill, but only decode is measured"),
        ({"cached": True, "workloads": {}, "traces": {"t": {"file": "f", "rate": 1.0}}}, "no cached prompts"),
        ({"rounds": 2, "workloads": {}, "traces": {"t": {"file": "f", "rate": 1.0}}}, "no rounds"),
        (
            {"workloads": {}, "traces": {"t": {"file": "f", "rate": 1.0, "targets": {"atmost": {"ttft_ms_p50": 1.0}}}}},
            "not 'atmost'",
        ),
        (
            {"workloads": {}, "traces": {"t": {"file": "f", "rate": 1.0, "targets": {"at_most": {"ttft_p50": 1.0}}}}},
            "'ttft_p50'.*'ttft_ms_p50'",
        ),
        ({"workloads": {}, "traces": {"t": {"rate": 1.0}}}, "names no file"),
        ({"workloads": {}, "traces": {"t": {"file": "f"}}}, "need a rate"),
        (
            {"workloads": {}, "traces": {"t": {"file": "f", "rate": 1.0, "arrivals": "bursty"}}},
            "neither poisson nor recorded",
        ),
        ({"workloads": {}, "traces": {"t": {"file": "f", "rate": -1.0}}}, "rate=-1.0: expected a number above 0"),
        ({"workloads": {}, "traces": {"t": {"file": "f", "rate": 1.0, "clip": 0}}}, "clip=0: expected"),
        ({"workloads": {}, "traces": {"t": {"file": "f", "rate": 1.0, "share": 0.5}}}, "give one of them"),
    ],
)
def test_bad_cases(change, message):
    with pytest.raises(ConfigError, match=message):
        parse("c", TABLE | change)


def test_a_case_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the case"):
        cases.read(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("a = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        cases.read(tmp_path / "bad.toml")
    (tmp_path / "odd.toml").write_text("odd = 1")
    with pytest.raises(ConfigError, match="odd.toml: the case has no key 'odd'"):
        cases.read(tmp_path / "odd.toml")
