"""Decodes of models with recurrent layers over static buffers, as CUDA graphs run them: the tokens of eager steps."""

from __future__ import annotations

import pytest
import torch

from kvasir.engine.ways.capture import call_through
from kvasir.engine.ways.device_seats import DeviceSeats
from kvasir.engine.ways.eager_steps import EagerSteps
from kvasir.engine.ways.graphs import DecodeGraphs
from tests.engine.driver import Driver, use_ways
from tests.engine.stepwise import Stepwise
from tests.engine.test_draft_graphs import FORMS, FromTheDevice
from tests.engine.test_mixed_steps import forced
from tests.engine.test_states import Scripted, alone, answers, engine, first, fleet, folder  # noqa: F401 (fixtures)
from tests.speculation.helpers import install

SPANS = 8  # most drafts of a sequence in a step


def static(folder: str, drafts: int = 0, wider: bool = False, **options) -> tuple[Driver, list[int]]:  # noqa: F811
    """An engine whose decodes go over static buffers, and a list that gets the rows of each such step. ``wider``: its
    backend computes the rows of a draft together where it can, as those of a GPU do."""
    driver, ran = engine(folder, **options), []
    parts = driver.engine.runner.parts
    parts.backend = FromTheDevice(parts.backend) if wider else parts.backend
    use_ways(driver.engine.runner, call_through, drafts)
    graphs = driver.engine.runner.way(DecodeGraphs)
    real = graphs._compute

    def compute(size, output, form):
        ran.append(size)
        real(size, output, form)

    graphs._compute = compute
    return driver, ran


RUNS = {
    "preempted": (dict(max_num_batched_tokens=33), dict(preempt_every=3)),
    "arrivals": (dict(num_pages=24, max_num_seqs=4, max_num_batched_tokens=40), dict(gap=2)),
}


@pytest.mark.parametrize("how", RUNS)
def test_tokens_in_a_crowd(folder, alone, how):  # noqa: F811
    options, run = RUNS[how]
    driver, ran = static(folder, overlap=True, **options)
    driver.run(fleet(driver), **run)
    driver.run(fleet(driver, "again"), **run)
    driver.close()
    assert len(ran) > 8 and answers(driver) == answers(driver, "again") == first(alone)


def drafted(folder: str, alone: dict, right: int, wider: bool) -> dict:  # noqa: F811
    options = dict(max_num_batched_tokens=60, drafter="ngram", draft_control="fixed")
    driver, ran = static(folder, SPANS, wider, **options)
    install(driver, Scripted(alone, right))
    driver.run(fleet(driver), preempt_every=7)
    driver.close()
    assert not wider or {most for most, _ in driver.engine.runner.parts.backend.seen} >= {FORMS[1]}
    assert ran and driver.engine.stats().drafted_tokens
    return answers(driver)


@pytest.mark.parametrize("wider", [False, True])
@pytest.mark.parametrize("right", [0, 1, 99])
def test_drafts_leave_no_trace(folder, alone, right, wider):  # noqa: F811
    assert drafted(folder, alone, right, wider) == first(alone)


def test_the_comparison_sees_a_page_that_was_not_sent(folder, alone, monkeypatch):  # noqa: F811
    monkeypatch.setattr(DeviceSeats, "_send_states", lambda *given: None)
    driver, _ = static(folder)
    driver.run(fleet(driver))
    assert driver.errors or answers(driver) != first(alone)


def test_recurrences_that_cannot_be_captured_run_layer_by_layer(folder, monkeypatch):  # noqa: F811
    driver = engine(folder)
    mixer = type(driver.engine.runner.model.blocks[0].mixer)
    monkeypatch.setattr(mixer, "captured", False)
    use_ways(driver.engine.runner, call_through, 0)
    assert [type(way) for way in driver.engine.runner.ways] == [EagerSteps]
    driver.close()


def test_padding_leaves_states_alone(folder):  # noqa: F811
    driver, _ = static(folder)
    parts = driver.engine.runner.parts
    planes = parts.caches[0].planes
    before = {name: plane.clone() for name, plane in planes.items()}
    graphs = driver.engine.runner.way(DecodeGraphs)
    with torch.inference_mode():
        graphs._buffers.pad(4)
        graphs._compute(4, 0, 0)
    assert all(torch.equal(plane, before[name]) for name, plane in planes.items())
    driver.close()


def test_steps_with_prompts_in_pieces(folder, alone):  # noqa: F811
    driver = engine(folder, overlap=True, max_num_batched_tokens=33, max_num_seqs=4)
    use_ways(driver.engine.runner, None, 0, Stepwise(), 64)
    ran = forced(driver)
    for tag in ("", "again"):
        driver.run(fleet(driver, tag), gap=2, preempt_every=4)
        assert answers(driver, tag) == first(alone)
    assert len(ran) >= 9 and any(rows < size for size, rows in ran), "nothing was padded"
    driver.close()
