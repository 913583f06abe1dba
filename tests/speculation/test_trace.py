"""The drafting trace records every step and changes nothing else."""

import io
import json

from kvasir.engine.drafts.draft_times import DraftTimes
from kvasir.engine.drafts.drafting import Drafting
from kvasir.speculation.controller import Controller
from kvasir_lab.studies import trace_drafting as tool
from tests.speculation.helpers import driver, requests


def test_every_step_is_written_down(monkeypatch):
    plain = driver("ngram:min_match=1")
    plain.run(requests(plain, 0.0, 2))
    plain.close()
    for owner, name in (
        (Drafting, "__init__"),
        (Drafting, "charge"),
        (DraftTimes, "observe"),
        (Controller, "_gain"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    out = io.StringIO()
    tool.watch(out)
    d = driver("ngram:min_match=1")
    d.run(requests(d, 0.0, 2))
    head, *steps = map(json.loads, out.getvalue().splitlines())
    stats = d.engine.stats()
    d.close()
    assert head == {"drafter": "ngram", "control": d.engine.config.speculation.draft_control}
    assert [s["step"] for s in steps] == list(range(1, stats.step + 1)) and d.outputs.keys() == plain.outputs.keys()
    assert {key: out.tokens for key, out in d.outputs.items()} == {
        key: out.tokens for key, out in plain.outputs.items()
    }
    assert sum(s["accepted"] for s in steps) == stats.accepted_tokens > 0
    drafted = [s for s in steps if s["sort"] == "drafted"]
    assert drafted and all(s["rows"] >= s["sequences"] and s["charged"] > 0 and s["kind"][0] for s in drafted)
