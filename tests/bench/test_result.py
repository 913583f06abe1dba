"""The result schema: building a result, the stored results, and the statistics in them."""

import datetime
import json
import re
import subprocess
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvasir.bench import provenance
from kvasir.bench.provenance import missing
from kvasir.bench.result import arm, finish, judged, percentile, ratios_of, result, spread, without_paths

ROOT = Path(__file__).parents[2]
KEYS = {"case", "machine", "commit", "date", "versions", "command", "arms", "ratios", "limits"}
# Number of results without recorded hardware. It may only be lowered.
LISTED = 119
STORED = sorted((ROOT / "bench" / "results").rglob("*.json"))


def check(found):
    """Raise AssertionError unless ``found`` matches the schema exactly."""
    optional = {"hardware", "peer_version_source", "targets", "differences", "frontier", "right", "left_out", "pool"}
    optional |= {"cells", "trained", "parity"}
    assert KEYS <= set(found) <= KEYS | optional
    assert all(v and isinstance(v, str) for v in found.get("hardware", {}).values())
    assert all(
        set(t) in ({"ratio", "at_least", "met"}, {"ratio", "at_most", "met"}) for t in found.get("targets", {}).values()
    )
    assert without_paths(found) == found, "a path of one machine"
    assert (
        all(isinstance(found[k], str) for k in ("case", "machine", "commit", "date", "command"))
        and found["case"]
        and found["machine"]
    )
    assert datetime.datetime.fromisoformat(found["date"]).tzinfo is not None
    assert all(isinstance(v, str) for v in found["versions"].values()) and {"python", "torch"} <= set(found["versions"])
    assert found["arms"] and all(
        set(a) == {"name", "config", "metrics"} and a["name"] and a["metrics"] for a in found["arms"]
    )
    assert all(isinstance(v, (int, float)) for v in found["ratios"].values()) and isinstance(found["limits"], dict)
    names = [a["name"] for a in found["arms"]]
    assert set(found.get("right", {})) <= set(names) and not set(found.get("left_out", [])) & set(names)
    numbers = json.loads(json.dumps(found, allow_nan=False))
    assert numbers == found, "plain JSON, no NaN"


@pytest.mark.parametrize("file", STORED, ids=lambda f: f.stem)
def test_stored_results_are_of_the_schema(file):
    found = json.loads(file.read_text())
    check(found)
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?", found["commit"]), "which commit was measured"
    assert not re.search(r'[" ]/(work|root|home|tmp)/', file.read_text())


def test_there_are_stored_results():
    assert STORED


def test_every_stored_result_says_where_it_comes_from():
    """Only listed results lack facts, and exactly the facts that the list names. The list can only shrink."""
    root = ROOT / "bench" / "results"
    listed = tomllib.loads((root / "incomplete.toml").read_text())
    lacking = {str(f.relative_to(root)): missing(json.loads(f.read_text())) for f in STORED}
    assert listed == {name: facts for name, facts in lacking.items() if facts}
    assert len(listed) <= LISTED, "a new result must be complete"


def test_a_new_result_is_complete_and_the_check_names_each_fact_that_is_missing():
    good = result("case", [arm("kvasir", {}, {"m": 1}), arm("vllm_fp8", {"version": "0.25.1"}, {"m": 1})])
    good["command"], good["commit"] = "kvasir bench run", "abcdef1"
    assert missing(good) == []
    gpu = good | {"machine": "NVIDIA H200 x1, 16 cores", "hardware": {}}
    assert missing(gpu) == ["cpu", "cuda", "driver"]
    assert missing(gpu | {"hardware": {"gpu": "H200", "cpu": "Xeon", "cuda": "12.8", "driver": "570.1"}}) == []
    assert missing(good | {"commit": "", "command": ""}) == ["command", "commit"]
    assert missing(good | {"versions": {"python": "3.12"}}) == ["versions"]
    assert missing(good | {"arms": [arm("vllm", {"peer": "vllm"}, {"m": 1})]}) == ["peer version"]


def test_hardware_names_the_processor_and_the_driver(monkeypatch):
    assert provenance.hardware()["cpu"]
    answer = subprocess.CompletedProcess([], 0, "570.124.06\n570.124.06\n")
    monkeypatch.setattr(provenance.subprocess, "run", lambda *a, **k: answer)
    assert provenance._driver() == "570.124.06"
    monkeypatch.setattr(provenance.subprocess, "run", Mock(side_effect=FileNotFoundError))
    assert provenance._driver() == ""


def test_the_version_of_a_peer_is_read_from_its_folder(tmp_path):
    folder = tmp_path / "vllm-0.25.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1\n")
    assert provenance.peer_version("vllm", str(tmp_path)) == {"version": "0.25.1"}
    assert provenance.peer_version("llama_cpp", str(tmp_path)) == {}
    assert set(provenance.peer_version("transformers")) == {"version"}


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"arms": []},
        {"arms": [{"name": "a", "config": {}}]},
        {"date": "2026-01-01T00:00:00"},
        {"ratios": {"a": "2x"}},
        {"limits": {"x": float("nan")}},
    ],
)
def test_the_check_can_fail(change):
    good = result("case", [arm("a", {}, {"m": 1})])
    check(good)
    with pytest.raises((AssertionError, ValueError)):
        check(good | change)


def test_finish_shows_a_table_writes_the_file_and_prints_one_line(tmp_path, capsys):
    metrics = {
        "speed": spread([1000.5, 2000.5, 3000.5]),
        "once": spread([2.0]),
        "start": 0.51234,
        "parts": {"a_s": 1.0},
    }
    outcome = result("case", [arm("a", {"x": 1}, metrics)], ratios={"speed a/b": 1.5}, limits={"GB/s": 3})
    file = tmp_path / "new" / "result.json"
    finish(outcome, file)
    out, err = capsys.readouterr()
    assert json.loads(file.read_text()) == outcome and not out, "no raw JSON after the table"
    for text in ("2,000 (1,000 to 3,000)", "0.5123", "a_s 1", "1.50x"):
        assert text in err
    assert "2 (2 to 2)" not in err and "of the limit" not in err
    finish(outcome, None)
    out = capsys.readouterr().out
    assert json.loads(out) == outcome and out.count("\n") == 1


def test_the_command_is_what_was_typed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/some/where/kvasir", "bench", "offline", "--repeats", "1"])
    assert result("c", [])["command"] == "kvasir bench offline --repeats 1"
    monkeypatch.setattr("sys.argv", ["tools/x.py", "out.json"])
    assert result("c", [])["command"] == "tools/x.py out.json"


@pytest.mark.parametrize(
    "text, want",
    [
        (
            "kvasir bench run bench/cases/a.toml --json /tmp/out/a.json",
            "kvasir bench run bench/cases/a.toml --json a.json",
        ),
        ("--json=/tmp/out/a.json", "--json=a.json"),
        ("/opt/models/llama", "llama"),
        ("~/models/llama", "llama"),
        ("/data/run/", ""),
        ("http://127.0.0.1:8000/v1/completions", "http://127.0.0.1:8000/v1/completions"),
        ("12 GB/s, tok/s", "12 GB/s, tok/s"),
        ("decode1.decode_tok_s kvasir/vllm", "decode1.decode_tok_s kvasir/vllm"),
        ("../shared/data/traces", "../shared/data/traces"),
    ],
)
def test_paths_are_cut_to_their_last_part(text, want):
    assert without_paths({"a": [text]}) == {"a": [want]}


def test_a_result_names_no_path_and_takes_a_commit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/some/where/kvasir", "bench", "run", str(tmp_path / "case.toml")])
    outcome = result(
        "c", [arm("a", {"model": str(tmp_path / "model"), "flags": ["--config", str(tmp_path / "x.toml")]}, {"m": 1})]
    )
    finish(outcome, None, "abcdef123456")
    found = json.loads(capsys.readouterr().out)
    check(found)
    assert (
        str(tmp_path) not in json.dumps(found)
        and found["commit"] == "abcdef123456"
        and found["command"] == "kvasir bench run case.toml"
    )


def test_arms_that_came_later_name_no_path_either(tmp_path, capsys):
    outcome = result("c", [])
    outcome["arms"].append(arm("a", {"model": str(tmp_path / "model")}, {"m": 1}))
    finish(outcome, tmp_path / "out.json", "abcdef123456")
    finish(outcome, None, "abcdef123456")
    for text in (capsys.readouterr().out, (tmp_path / "out.json").read_text()):
        check(json.loads(text))
        assert json.loads(text)["arms"][0]["config"] == {"model": "model"}


def test_ratios_and_targets():
    a = arm("a", {}, {"x": spread([3.0]), "y": 1.0, "start_s": 1.0, "parts": {"b": 1}, "zero": 4.0})
    b = arm("b", {}, {"x": spread([2.0]), "start_s": 2.0, "parts": {"b": 1}, "zero": 0.0})
    ratios = ratios_of([a, b], [("a", "b"), ("a", "c")])
    assert ratios == {"x a/b": 1.5}
    assert judged({"x": {"at_least": 1.5}}, ratios, "a/b") == {"x a/b": {"ratio": 1.5, "at_least": 1.5, "met": True}}
    assert judged({"x": {"at_least": 1.51}}, ratios, "a/b")["x a/b"]["met"] is False
    assert judged({"x": {"at_most": 1.4}}, ratios, "a/b")["x a/b"]["met"] is False
    assert judged({"x": {"at_most": 1.5}, "other": {"at_most": 1.0}}, ratios, "a/b") == {
        "x a/b": {"ratio": 1.5, "at_most": 1.5, "met": True}
    }


def test_the_table_shows_verdicts_and_shares(capsys):
    outcome = result(
        "c",
        [arm("a", {}, {"x": 50.0})],
        ratios={"x a/b": 1.2},
        limits={"x": 200},
        targets={"x a/b": {"ratio": 1.2, "at_least": 1.5, "met": False}},
    )
    check(outcome)
    finish(outcome, None)
    err = capsys.readouterr().err
    assert "25%" in err and "MISSED: at least 1.5" in err


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3, "values": [3.0, 1.0, 2.0]}
    assert spread([1.0, 2.0])["median"] == 1.5


@pytest.mark.parametrize(
    "values, share, want",
    [
        ([5.0], 0.99, 5.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 0.0, 1.0),
        ([4.0, 1.0, 3.0, 2.0], 1.0, 4.0),
        (list(range(101)), 0.9, 90.0),
        ([0.0, 10.0], 0.99, 9.9),
    ],
)
def test_percentile(values, share, want):
    assert percentile(values, share) == pytest.approx(want)


def test_a_copy_of_the_tree_names_its_commit(monkeypatch):
    """On a machine whose repository is older, or absent, the variable says what was measured, in every tool."""
    monkeypatch.setenv("KVASIR_COMMIT", "0123abcd")
    assert result("x", [])["commit"] == "0123abcd"
    monkeypatch.delenv("KVASIR_COMMIT")
    assert result("x", [])["commit"] != "0123abcd"
