"""vLLM's server with several engines is the one of ``vllm serve``, which starts them by spawn; with one engine, the API
server's module."""

from __future__ import annotations

import json
import subprocess
import sys

from kvasir.bench.worker import environment
from tests.bench.helpers import SITE


def test_several_engines_are_served_by_vllm_serve(tmp_path):
    notes = tmp_path / "notes"
    subprocess.run(
        [sys.executable, "-m", "kvasir.bench.peers.vllm_server", "--data-parallel-size", "2"],
        env=environment(SITE) | {"FAKE_VLLM_LOG": str(notes)},
        check=True,
        timeout=60,
    )
    told = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k != "time"} for line in told] == [
        {"op": "vllm serve", "engines": 2, "checked": True, "start": "spawn"}
    ]
