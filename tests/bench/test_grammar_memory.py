"""Measurements of kvasir_lab/studies/grammar_memory.py: processes that try grammars share a large vocabulary."""

from __future__ import annotations

import json

import pytest

from kvasir_lab.studies.grammar_memory import main

# A process's own share beside a host with 150,000 tokens: 16 MB were measured, and 170 where nothing is shared.
MOST_PROCESS_MB = 70


@pytest.mark.parametrize("vocabulary", [60_000])
def test_processes_share_the_tokenizer(vocabulary, tmp_path):
    assert main([str(tmp_path / "result.json"), "--vocabulary", str(vocabulary)]) == 0
    forked, apart = (arm["metrics"] for arm in json.loads((tmp_path / "result.json").read_text())["arms"])
    assert forked["process_mb"] < MOST_PROCESS_MB and forked["mb"] < 0.75 * apart["mb"]
