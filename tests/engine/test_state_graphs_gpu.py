"""Recurrent layers in CUDA graphs on a GPU, in exact mode: the tokens of eager steps."""

from __future__ import annotations

import pytest
import torch

from kvasir.engine.ways.graph_buckets import DECODES, ROW_BY_ROW
from kvasir.engine.ways.graphs import DecodeGraphs
from tests import checkpoints
from tests.engine.test_mixed_steps import forced
from tests.engine.test_states import Scripted, answers, engine, first, fleet
from tests.speculation.helpers import install

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPTIONS = dict(device="cuda", page_slots=16, max_num_batched_tokens=60)  # a page that Triton takes


@pytest.fixture(scope="module", params=["qwen3_5_text", "kimi_linear"])
def folder(request, tmp_path_factory):
    return str(checkpoints.write(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture(scope="module")
def eager(folder):
    driver = engine(folder, cuda_graphs=False, overlap=False, **OPTIONS)
    for request in fleet(driver):
        driver.run([request])
    driver.close()
    return answers(driver)


@pytest.mark.parametrize("how", [{}, dict(gap=2), dict(preempt_every=5)], ids=["together", "arrivals", "preempted"])
def test_same_tokens(folder, eager, how):
    driver = engine(folder, overlap=True, **OPTIONS)
    for tag in ("", "b", "c"):  # the second time steps are captured, the third time they are replayed
        driver.run(fleet(driver, tag), **how)
        assert answers(driver, tag) == first(eager)
    assert driver.engine.runner.way(DecodeGraphs)._ready, "nothing was captured"
    driver.close()


@pytest.mark.parametrize("right", [0, 1, 99])
def test_same_tokens_with_drafts(folder, eager, right):
    driver = engine(folder, drafter="ngram", draft_control="fixed", **OPTIONS)
    install(driver, Scripted(eager, right))
    for _ in range(3 if right < 99 else 12):  # whole chains leave few steps of a kind to a round
        driver.outputs.clear()
        driver.run(fleet(driver), preempt_every=7)
        assert answers(driver) == first(eager)
    assert driver.engine.runner.way(DecodeGraphs)._ready, "nothing was captured"
    driver.close()


def test_same_tokens_of_steps_with_prompts_in_pieces(folder, eager):
    driver = engine(folder, overlap=True, **OPTIONS)
    ran = forced(driver)
    driver.run(fleet(driver), gap=2, preempt_every=4)
    assert answers(driver) == first(eager) and ran, "nothing was captured"
    driver.close()


def test_drafts_outside_exact_mode_are_computed_together(folder):
    """Exact mode runs drafts row by row. Outside it, bits may differ from eager steps, but no step may fail."""
    driver = engine(folder, drafter="ngram", draft_control="fixed", batch_invariant=False, **OPTIONS)
    for request in fleet(driver):
        driver.run([request])
    install(driver, Scripted(answers(driver), 99))
    for _ in range(12):  # whole chains leave few steps of a kind to a round
        driver.outputs.clear()
        driver.run(fleet(driver))
        answers(driver)
    assert driver.engine.stats().drafted_tokens
    forms = {key.form for key in driver.engine.runner.way(DecodeGraphs)._ready}
    assert forms - {DECODES, ROW_BY_ROW}, "no wider form was captured"
    driver.close()
