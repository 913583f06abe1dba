"""The drift bench: arms replay one stream, and the oracle and learning gain over what does not learn."""

from __future__ import annotations

import json

import pytest
import torch

from kvasir_lab.bench import drift


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def replayed(capsys, **options):
    """Metrics by arm."""
    drift.run(
        "nano", kind="medusa", max_tokens=20, device="cpu", output=None, commit="x",
        **(dict(tasks=["chain", "story"], requests=16, steps=3, start_steps=20, rate=3e-3, every=6) | options),
    )  # fmt: skip
    return {a["name"]: a["metrics"] for a in json.loads(capsys.readouterr().out)["arms"]}


def test_all_arms_give_the_same_tokens(capsys, monkeypatch):
    monkeypatch.setattr(drift, "ORACLE_STEPS", 1)
    monkeypatch.setattr(drift, "ROWS", 128)
    saved = []
    monkeypatch.setattr(drift, "save", lambda outcome, *_: saved.append([dict(a["metrics"]) for a in outcome["arms"]]))
    arms = replayed(capsys, tasks=["chain"], requests=10, steps=2, start_steps=4, rate=1e-2, every=4)
    assert set(arms) == {*drift.ARMS, drift.ORACLE}
    assert len({a["tokens"] for a in arms.values()}) == 1 and arms["static"]["swaps"] == 0
    assert all(0 < a["forwards"] <= a["tokens"] and a["chain_last_third"] >= 1 for a in arms.values())
    assert [len(arms) for arms in saved] == [1, 2, 3, 4, 5], "a run that is cut keeps its arms"
    assert ["chain_tokens_to_95" in arms[0] for arms in saved] == [False] * 4 + [True], "the oracle comes last"


@pytest.mark.slow
def test_learning_needs_fewer_forwards(capsys):
    arms = replayed(capsys, requests=40, rate=3e-4)
    assert arms[drift.ORACLE]["forwards"] < arms["static"]["forwards"]
    assert any(arms[name]["swaps"] for name in arms if name not in ("static", drift.ORACLE))
    assert all(arms[name]["forwards"] <= arms["static"]["forwards"] for name in arms)
    assert arms["rejected 0.25"]["story_last_third"] > 1.05 * arms["static"]["story_last_third"], "it follows a change"


def test_a_drafter_has_recovered_when_its_last_requests_are_as_good_as_the_oracles():
    oracle = drift.Counts([10] * 20, [4] * 20)
    counts = drift.Counts([10] * 20, [10] * 6 + [4] * 14)
    assert drift.recovered(counts, oracle, 0, 20) == 140
    assert drift.recovered(drift.Counts([10] * 20, [10] * 20), oracle, 0, 20) is None
