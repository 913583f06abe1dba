"""The churn command finds nothing, and finds a front that does not raise the epoch."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvasir.client.journal import Entry
from kvasir.cluster import placement
from kvasir.config import Settings
from kvasir_lab.bench import churn

pytest.importorskip("cryptography")
BAD = ("failed", "doubled", "lost", "wrong")


def counts(seed: int, seconds: float, pause: tuple[float, float], replicas: int = 2) -> dict[str, int]:
    settings = Settings.of(replicas=replicas, watchdog=1.0, startup_timeout=8.0, crash_dumps="")
    run = churn.churn(settings, seconds=seconds, seed=seed, simulated=True, pause=pause, at_once=6)
    return asyncio.run(asyncio.wait_for(run, 200))


@pytest.mark.usefixtures("nothing_left_behind")
def test_nothing_is_lost_doubled_or_failed():
    found = counts(4, 5.0, (0.3, 1.2))
    assert not any(found[name] for name in BAD) and found["requests"] > 10 and found["restarts"] > 1, found


def test_a_front_that_does_not_raise_the_epoch_is_caught(monkeypatch):
    """Negative control: late tokens and ends of a cut connection count as new."""

    def rewind(self: Entry) -> None:
        self.holder, self.fresh = None, 0

    class OnlyCuts(churn.random.Random):
        def choice(self, among):
            return "cut" if among == ["killed", "stopped", "cut"] else super().choice(among)

    monkeypatch.setattr(churn.random, "Random", OnlyCuts)
    monkeypatch.setattr(Entry, "rewind", rewind)
    found = counts(1, 3.0, (0.1, 0.3))
    assert any(found[name] for name in BAD), found


def test_real_engines_have_a_gpu_each(monkeypatch):
    """Those behind keepers, too. On one GPU the second would find no memory."""
    monkeypatch.delenv(placement.VISIBLE, raising=False)
    monkeypatch.setattr(placement, "_count", lambda: 2)
    seen = []

    class Keeper(churn.Keeper):
        def __init__(self, factory, environment):
            seen.append(environment)
            super().__init__(factory, environment)

    class Caught(Exception):
        pass

    def client(settings, factory, placed):
        raise Caught([place.environment for place in placed])

    async def answers(settings, kinds):
        return []

    for name, stand_in in (("Keeper", Keeper), ("ClusterClient", client), ("answers", answers)):
        monkeypatch.setattr(churn, name, stand_in)
    with pytest.raises(Caught) as caught:
        asyncio.run(churn.churn(Settings.of(model="nano", replicas=2), seconds=0.1, seed=0, simulated=False))
    assert caught.value.args[0] == [{placement.VISIBLE: "0"}, {placement.VISIBLE: "1"}]
    assert seen == [{placement.VISIBLE: "1"}]


@pytest.mark.slow
def test_the_command_runs_a_real_model(tmp_path, monkeypatch):
    monkeypatch.setattr(churn, "KINDS", 6)
    settings = Settings.of(
        model="nano", device="cpu", batch_invariant=True, replicas=2, num_threads=1, watchdog=20.0, crash_dumps=""
    )
    file = tmp_path / "churn.json"
    assert churn.run(settings, minutes=0.5, seed=3, simulated=False, output=file)
    assert json.loads(file.read_text())["arms"][0]["metrics"]["requests"] > 0
