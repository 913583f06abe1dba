"""The benchmark of thinking budgets: which gaps count, and what it makes of replies."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from kvasir.bench import client
from kvasir.bench.client import Reply
from kvasir_lab.bench import constrained, thinking


def reply(*times: float) -> Reply:
    return Reply(0.0, 0.0, 200, array("d", times), len(times), 0, times[-1])


def test_gaps_count_only_while_all_answers_decode():
    found = thinking.gaps([reply(0, 1, 2, 3, 9), reply(1, 3, 4, 5)])
    assert found == [1, 1, 2, 1, 1]


def test_the_marks_are_tokens(tmp_path):
    constrained.train_tokenizer(tmp_path, 700, most_bytes=1 << 16, marks=thinking.MARKS)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [tokenizer.token_to_id(mark) for mark in thinking.MARKS] == [thinking.THINK, thinking.THINK + 1]


def test_metrics_and_prompts(monkeypatch):
    async def replay(url, model, calls):
        assert all(call.prompt[-1] == thinking.THINK and len(call.prompt) == 8 for call in calls)
        step = 0.002 if calls[0].extra else 0.001
        return [reply(*(step * i for i in range(call.output))) for call in calls], []

    monkeypatch.setattr(client, "replay", replay)
    metrics = thinking.Loads(SimpleNamespace(name="kvasir", url=""), "m", 3, 8, 1).run()
    assert metrics["plain.gap_ms.p99"] == pytest.approx(1) and metrics["ended.p50_over_plain"] == pytest.approx(2)
