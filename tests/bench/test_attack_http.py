"""The study ``attack_http``: its arms differ in their flags alone, and a limit of output tokens alone is one."""

from __future__ import annotations

import contextlib
import json
import urllib.request

import pytest

from kvasir.bench.client import served_model
from kvasir.bench.servers import serving
from kvasir_lab.studies import attack_http as tool
from tests.bench.test_result import check


def test_every_arm_has_every_number_of_attackers(tmp_path, monkeypatch):
    """The whole run without servers: the result is one that can be stored, and arms differ in their flags alone."""
    started: list[list[str]] = []

    class Server:
        url = "http://127.0.0.1:1"

        def wait(self, path: str) -> float:
            return 0.0

    @contextlib.contextmanager
    def fake(name, model, flags):
        started.append(flags)
        yield Server()

    async def window(server, model, attackers, rate, seconds):
        return {"honest_requests": 1, "attacks_answered": attackers}

    async def nothing(*args):
        return [], []

    for name, value in {"serving": fake, "window": window, "replay": nothing}.items():
        monkeypatch.setattr(tool, name, value)
    monkeypatch.setattr(tool, "served_model", lambda url, key: "base")
    monkeypatch.setattr(tool, "capacity", lambda server, model: 40.0)
    tool.main([str(tmp_path / "r.json"), "--attackers", "0,2"])
    found = json.loads((tmp_path / "r.json").read_text())
    check(found)
    assert [arm["name"] for arm in found["arms"]] == [
        f"{n} attackers, {name}" for name in tool.SETTINGS for n in (0, 2)
    ]
    shared = started[0]
    assert shared.count("--api-key") == len(tool.keys(2)) and len(set(map(tuple, started))) == len(tool.SETTINGS)
    assert all(flags == [*shared, *own] for flags, own in zip(started, tool.SETTINGS.values()))
    assert tool.SETTINGS["a cap"] == [f for f in tool.SETTINGS["fair and a cap"] if f not in tool.SETTINGS["fair"]]


@pytest.mark.parametrize("arm, tokens", [("a cap", 128), ("fcfs", 300)])
def test_a_cap_ends_the_answers_of_attackers(arm, tokens):
    """An attacker's answer ends at the limit where there is one, else where the attacker wants."""
    keys = [part for key in tool.keys(1) for part in ("--api-key", key)]
    with serving("kvasir", "nano", ["--device", "cpu", "--num-threads", "1", *keys, *tool.SETTINGS[arm]]) as server:
        server.wait("/health")
        asked = {"model": served_model(server.url, "honest0"), "prompt": [300], "max_tokens": 300, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer attacker0"},
        )
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == tokens
