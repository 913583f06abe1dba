"""``kvasir bench startup``: a real start, its phases in order, and a start that fails."""

import json
from pathlib import Path

import pytest

from kvasir.bench import startup
from kvasir.bench.servers import flags_of
from kvasir.bench.startup import run, start_once
from kvasir.bench.workloads import SHAPES
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models.loader import read_headers
from tests.bench.helpers import SITE, SMALL, log_of
from tests.bench.test_result import check


def test_options_become_flags_again():
    options = {
        "max_num_seqs": 4,
        "device": None,
        "fit": True,
        "poison": False,
        "enable_prefix_caching": False,
        "kv_codec": "plain",
    }
    assert flags_of(options) == ["--max-num-seqs", "4", "--fit", "--no-enable-prefix-caching", "--kv-codec", "plain"]


def test_one_start(capfd, tmp_path):
    run(EngineConfig(), {"num_threads": 1}, shape=None, repeats=1, output=tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    check(found)
    metrics = found["arms"][0]["metrics"]
    times = metrics["cold.breakdown"]
    assert 0 < times["live_s"] <= times["ready_s"] <= times["first_token_s"] == metrics["cold.first_token_s"]
    assert found["arms"][0]["config"]["flags"] == ["--num-threads", "1"] and "warm.first_token_s" not in metrics


def test_a_shape_on_disk_beside_a_peer(tmp_path, monkeypatch, capfd):
    """The peer is a stand-in; the checkpoint is real, so our server loads what transformers wrote."""
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    weights, begin = [], startup.start_once
    monkeypatch.setattr(
        startup,
        "start_once",
        lambda model, *rest: weights.append(sum(t.num_bytes for t in read_headers(Path(model)))) or begin(model, *rest),
    )
    options = {"num_threads": 1, "max_model_len": 64, "device": "cpu"}
    run(
        EngineConfig(),
        options,
        shape="small",
        repeats=2,
        output=tmp_path / "r.json",
        on_disk=True,
        peer="vllm",
        site=SITE,
        commit="abc1234",
    )
    found = json.loads((tmp_path / "r.json").read_text())
    check(found)
    kvasir, vllm = found["arms"]
    assert (kvasir["name"], vllm["name"]) == ("kvasir", "vllm") and "--load-format" not in kvasir["config"]["flags"]
    for start in (kvasir["metrics"]["cold.breakdown"], kvasir["metrics"]["warm.breakdown"]):
        assert start["engine.weight_bytes"] == weights[0] > 10_000 and start["engine.fill_s"] > 0
        assert start["engine.fill_gb_s"] == pytest.approx(weights[0] / start["engine.fill_s"] / 1e9, rel=1)
    assert "engine.fill_gb_s" not in vllm["metrics"]["cold.breakdown"]
    assert {"cold.first_token_s", "warm.first_token_s", "warm.all_s"} <= set(kvasir["metrics"]) & set(vllm["metrics"])
    assert "warm.first_token_s kvasir/vllm" in found["ratios"]
    served = [e["options"] for e in log_of(tmp_path / "log") if e["op"] == "serve"]
    assert [o["max_model_len"] for o in served] == ["64", "64"] and not Path(served[0]["model"]).exists()


@pytest.mark.parametrize(
    "options, message", [(dict(on_disk=True), "pass --shape"), (dict(peer="vlm"), "no peer named")]
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        run(EngineConfig(), {}, shape=None, repeats=1, output=None, **options)


def test_a_start_that_fails():
    with pytest.raises(ConfigError, match="ended with code 2 before /health/live"):
        start_once("/no/such/folder", [])
