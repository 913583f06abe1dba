"""The study that times tiers, with small numbers on a CPU: every part runs to its end, and its figures fit together."""

from __future__ import annotations

import json

from kvasir_lab.studies import tier_times


def test_every_part_on_a_cpu(tmp_path):
    out = tmp_path / "times.json"
    given = "--model nano --device cpu --pages 6 --times 2 --batch 2 --warm 4 --steps 16 --prompt 200"
    tier_times.main([str(out), *given.split(), "--host-bytes", str(16 << 20), "--folder", str(tmp_path)])
    rates, step, restart = (arm["metrics"] for arm in json.loads(out.read_text())["arms"])
    for way in ("down", "up"):
        assert rates[f"ordered_{way}_gb_s"] > 0 and rates[f"scattered_{way}_share"] > 0
    assert step["alone_ms"] > 0 and step["ratio"] > 0
    assert restart["computed_cached"] == 0 and restart["host_cached"] == restart["disk_cached"] == 192
