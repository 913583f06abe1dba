"""``kvasir bench profile`` on the CPU, and its arithmetic."""

import json

import pytest

from kvasir.config import EngineConfig
from kvasir.engine.engine import Engine
from kvasir.errors import ConfigError
from kvasir_lab.bench import profile
from kvasir_lab.bench.profile import TRACED, on_the_gpu, table, timeline
from tests.bench.test_result import check


def test_one_step(capsys):
    profile.run(
        EngineConfig.of(num_threads=1, device="cpu"), shape=None, batch=3, prompt=8, repeats=2, output=None, commit=None
    )
    found = json.loads(capsys.readouterr().out)
    check(found)
    metrics = found["arms"][0]["metrics"]
    assert metrics["step_ms"]["n"] == 2 and metrics["decode_tok_s"] == pytest.approx(
        3000 / metrics["step_ms"]["median"], rel=0.01
    )
    ops = {k: v for k, v in metrics.items() if k.startswith("us.")}
    assert any("mm" in name or "native_step" in name for name in ops) and list(ops.values())[0] == max(
        v for k, v in ops.items() if k != "us.other"
    )
    assert "gpu_idle_share" not in metrics


def test_every_step_has_a_prompt(monkeypatch, capsys):
    computed, submit = [], Engine.submit
    monkeypatch.setattr(
        Engine, "submit", lambda self, request: computed.append(len(request.prompt_ids)) or submit(self, request)
    )
    profile.run(
        EngineConfig.of(num_threads=1, device="cpu"),
        shape=None,
        batch=3,
        prompt=8,
        repeats=1,
        mixed=20,
        output=None,
        commit=None,
    )
    found = json.loads(capsys.readouterr().out)
    check(found)
    assert computed == [8] * 3 + [20] * (profile.WARMUP + 2 * profile.TIMED + TRACED)
    assert found["arms"][0]["config"]["mixed"] == 20
    with pytest.raises(ConfigError, match="three are left free"):
        profile.run(
            EngineConfig.of(max_num_seqs=3),
            shape=None,
            batch=3,
            prompt=8,
            repeats=1,
            mixed=20,
            output=None,
            commit=None,
        )
    with pytest.raises(ConfigError, match="3 decodes and a prompt of 62 tokens do not fit a step of 64 rows"):
        profile.run(
            EngineConfig.of(max_num_batched_tokens=64),
            shape=None,
            batch=3,
            prompt=8,
            repeats=1,
            mixed=62,
            output=None,
            commit=None,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16])
def test_one_step_on_a_gpu(batch):
    metrics = profile.measure(
        EngineConfig.of(device="cuda", max_num_seqs=32, enable_prefix_caching=False), batch, 32, 3
    )
    assert 0 < metrics["gpu_busy_ms"] <= metrics["gpu_step_ms"] and 0 <= metrics["gpu_idle_share"] < 1
    assert metrics["kernels_per_step"] >= 4 and any(k.startswith("us.") for k in metrics)
    assert sum(v for k, v in metrics.items() if k.startswith("us.")) >= 990 * metrics["gpu_busy_ms"], (
        "the table holds all of the busy time"
    )


def test_what_does_not_fit():
    with pytest.raises(ConfigError, match="do not fit: the context is 64"):
        profile.run(
            EngineConfig.of(max_model_len=64), shape=None, batch=1, prompt=32, repeats=1, output=None, commit=None
        )


@pytest.mark.parametrize(
    "intervals, busy, idle",
    [
        ([(7, 9)], 2, 0),
        ([(0, 2), (1, 3)], 3, 0),
        ([(5, 6), (0, 2)], 3, 3),
        ([(0, 10), (2, 3)], 10, 0),
        ([(0, 4), (1, 2), (5, 6), (4, 5)], 6, 0),
    ],
)
def test_every_moment_is_busy_or_idle(intervals, busy, idle):
    assert timeline(intervals) == (busy, idle)


def test_busy_and_idle_are_of_the_same_steps():
    """Gaps between kernels show even where profiled kernels take longer than a step without the profiler."""
    found = on_the_gpu(
        [(4000.0 * i, 4000.0 * i + 3200) for i in range(TRACED)]
        + [(4000.0 * i, 4000.0 * i + 100) for i in range(TRACED)]
    )
    idle = 800 * (TRACED - 1)
    assert found["gpu_busy_ms"] == 3.2 and found["gpu_step_ms"] == pytest.approx(3.2 + idle / TRACED / 1000)
    assert (
        found["gpu_idle_share"] == pytest.approx(idle / (idle + 3200 * TRACED), abs=1e-4)
        and found["kernels_per_step"] == 2
    )
    with pytest.raises(ConfigError, match="saw no kernel"):
        on_the_gpu([])


def test_the_table_is_per_step():
    found = table([("a", 8.0)] * TRACED + [("b", 24.0 * TRACED)] + [(f"k{i}", 1.0) for i in range(profile.SHOWN)])
    assert list(found)[:2] == [f"us.b x{1 / TRACED:g}", "us.a x1"] and list(found.values())[:2] == [24.0, 8.0]
    assert len(found) == profile.SHOWN + 1 and found["us.other"] == pytest.approx(2 / TRACED, abs=0.01)
