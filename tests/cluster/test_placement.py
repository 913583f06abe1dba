"""Where replicas run: one GPU each, or a share of the cores; more than fit are refused with the fix."""

from __future__ import annotations

import pytest

from kvasir.cluster import placement
from kvasir.cluster.placement import VISIBLE, gpus, places
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError


@pytest.fixture
def host(monkeypatch):
    """Set the number of GPUs and cores of this host."""

    def set_to(cards: int, cores: int) -> None:
        monkeypatch.delenv(VISIBLE, raising=False)
        monkeypatch.setattr(placement, "_count", lambda: cards)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))

    return set_to


def test_each_replica_gets_a_gpu_of_its_own(host, monkeypatch):
    host(4, 8)
    assert [p.environment for p in places(EngineConfig(), 2)] == [{VISIBLE: "0"}, {VISIBLE: "1"}]
    monkeypatch.setenv(VISIBLE, "3, GPU-abc,1")
    assert [p.environment[VISIBLE] for p in places(EngineConfig(), 3)] == ["3", "GPU-abc", "1"]
    with pytest.raises(ConfigError, match="--replicas 3"):
        places(EngineConfig(), 4)


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_none(host, monkeypatch, visible):
    host(4, 8)
    monkeypatch.setenv(VISIBLE, visible)
    assert gpus() == []
    with pytest.raises(ConfigError, match="--device cpu"):
        places(EngineConfig.of(device="cuda"), 2)


def test_cores_are_divided_and_one_is_left_to_the_front(host):
    host(0, 17)
    assert [p.config.runner.num_threads for p in places(EngineConfig(), 4)] == [4] * 4
    assert [p.config.runner.num_threads for p in places(EngineConfig.of(num_threads=8), 2)] == [8, 8]
    host(4, 2)
    assert [p.environment for p in places(EngineConfig.of(device="cpu"), 2)] == [{}, {}]


def test_more_than_the_cores_hold_are_refused(host):
    host(0, 2)
    with pytest.raises(ConfigError, match="--replicas 2"):
        places(EngineConfig(), 3)
    with pytest.raises(ConfigError, match="--replicas 1, or lower --num-threads"):
        places(EngineConfig.of(num_threads=2), 2)
