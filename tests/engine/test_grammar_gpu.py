"""Grammars on a GPU, in fp32: late draws and forced chains give the tokens of plain steps, with graphs and overlap."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_forced import KINDS, fleet
from tests.engine.test_graphs_gpu import driver, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(forcing: bool, repeats: int = 1, **options) -> tuple[dict, int]:
    """Tokens and ends of the last of several rounds, and the number of forced tokens."""
    d = driver(**options)
    if not forcing:
        d.engine.proposals.forcing.wanted = lambda drafting: False
    for _ in range(repeats):
        d.outputs.clear()
        d.run(list(fleet(d, KINDS)), gap=1)
    num_forced = d.engine.stats().forced_tokens
    return tokens(d), num_forced


@pytest.fixture(scope="module")
def plain():
    found, num_forced = run(False, cuda_graphs=False, overlap=False)
    assert num_forced == 0
    return found


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("forcing", [False, True])
def test_same_tokens(forcing, overlap, graphs, plain):
    found, num_forced = run(forcing, 3, cuda_graphs=graphs, overlap=overlap)
    assert found == plain
    assert bool(num_forced) == forcing


def test_a_late_draw_waits_for_nothing_on_the_device(monkeypatch):
    """Neither the launch nor the draw of a step under a grammar makes the host wait."""
    d = driver(overlap=True)
    d.engine.proposals.forcing.wanted = lambda drafting: False
    for _ in range(3):  # kernels are compiled and graphs captured in the first rounds
        d.run(list(fleet(d, KINDS[:3])))
        d.outputs.clear()
    runner = d.engine.runner
    runner.graphs._capture = None  # a capture waits
    launch, draw, drawn = runner.launch, runner.draw, []

    def strictly(call):
        def strict(*args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return strict

    monkeypatch.setattr(runner, "launch", strictly(launch))
    monkeypatch.setattr(runner, "draw", strictly(lambda: drawn.append(runner.parts._late is not None) or draw()))
    d.run(list(fleet(d, KINDS[:3])))
    assert not d.errors and sum(drawn) > 20
    d.close()
