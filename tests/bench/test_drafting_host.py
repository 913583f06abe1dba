"""The cost of drafters on the host: every drafter reads the same documents, and its memory stays bounded."""

import json

import pytest

from kvasir.errors import ConfigError
from kvasir_lab.bench import drafting_host

COMMON = dict(tasks=["chain"], batches=[4], num_tokens=6000, output=None, commit="x")


def test_times_and_memory(capsys):
    drafting_host.run("nano", drafters=["suffix:max_tokens=1500", "token_recycling"], **COMMON)
    arms = json.loads(capsys.readouterr().out)["arms"]
    suffix, *reference, recycling = (a["metrics"] for a in arms)
    for plain in reference:  # drafters with native code have one
        assert "without native code" in arms[1]["name"]
        assert (
            all(plain[name] == suffix[name] for name in ("steps", "tokens", "drafted", "accepted"))
            and plain["held_mb"] > 2 * suffix["held_mb"]
        )
    assert suffix["tokens"] >= 6000 and suffix["accepted"] > 0 and recycling["accepted"] > 0
    assert 0 < suffix["held_mb"] <= 2 * 2 * 1500 * 420 * 1.1 / 1e6, "two generations of at most two states a token"
    assert all(0 < suffix[f"{part}_ms_p50"] <= suffix[f"{part}_ms_p99"] for part in ("propose", "cut", "around"))


def test_drafters_on_the_device_are_refused():
    with pytest.raises(ConfigError, match="--host measures CPU drafters"):
        drafting_host.run("nano", drafters=["layer_skip"], **COMMON)
