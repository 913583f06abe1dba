"""``kvasir bench startup``: a real start, in order, and a start that fails."""

import json

import pytest

from kvasir.bench.servers import flags_of
from kvasir.bench.startup import run, start_once
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from tests.bench.test_result import check


def test_options_become_flags_again():
    options = {"max_num_seqs": 4, "device": None, "fit": True, "enable_prefix_caching": False, "kv_codec": "plain"}
    assert flags_of(options) == ["--max-num-seqs", "4", "--fit", "--no-enable-prefix-caching", "--kv-codec", "plain"]


def test_one_start(capfd, tmp_path):
    run(EngineConfig(), {"num_threads": 1}, shape=None, repeats=1, output=tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    check(found)
    metrics = found["arms"][0]["metrics"]
    times = metrics["cold.breakdown"]
    assert 0 < times["live_s"] <= times["ready_s"] <= times["first_token_s"] == metrics["cold.first_token_s"]
    assert found["arms"][0]["config"]["flags"] == ["--num-threads", "1"] and "warm.first_token_s" not in metrics


def test_a_start_that_fails():
    with pytest.raises(ConfigError, match="ended with code 2 before /health/live"):
        start_once("/no/such/folder", [])
