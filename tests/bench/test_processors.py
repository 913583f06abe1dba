"""The benchmark of processors: its loads run, and forced tokens are counted in steps."""

from __future__ import annotations

from kvasir import LLM
from kvasir_lab.bench import processors


def test_the_loads_run(monkeypatch):
    monkeypatch.setattr(processors, "TIMED", 4)
    monkeypatch.setattr(processors, "WARMUP", 2)
    monkeypatch.setattr(processors, "FREE", 12)
    with LLM("nano", device="cpu", max_model_len=256) as llm:
        metrics = processors.Loads(llm.engine, 2, 16, 1).run()
        assert llm.engine.stats().forced_tokens == processors.FORCED
    assert {f"{kind}.step_ms" for kind in processors.KINDS} <= metrics.keys()
    assert metrics["forced8.steps"] > 0 and metrics["tokens.over_penalties"] > 0
