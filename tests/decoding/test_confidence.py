"""Confidence equals its definition: for each token on the device, and summed over a text."""

from __future__ import annotations

import math

import pytest
import torch

from kvasir.decoding.confidence import summed_up
from kvasir.decoding.sampler import Sampler
from kvasir.kernels.report import mean_surprise
from kvasir.types import Span
from tests.decoding.helpers import sequence

V, TOKENIZER = 40, 37


def by_definition(logits, k):
    logprobs = torch.log_softmax(logits[:TOKENIZER].double(), -1).tolist()
    return -sum(sorted(logprobs, reverse=True)[:k]) / k


def test_each_row_gets_its_own_k_whatever_its_neighbours_ask():
    """Rows of k = 0, 2, 5 and 20 in one batch with a row that asks for alternatives: each as if it were alone."""
    asked = [
        dict(),
        dict(confidence=2, logprobs=0),
        dict(confidence=5, logprobs=0),
        dict(confidence=20, logprobs=1),
        dict(logprobs=7),
    ]
    sampler = Sampler(V, TOKENIZER, len(asked), "cpu", ())
    logits = torch.randn(len(asked), V, generator=torch.Generator().manual_seed(2)) * 4
    spans = []
    for row, params in enumerate(asked):
        seq = sequence(row, [3, 4], **params)
        sampler.open(seq)
        spans.append(Span(seq, 1, 1, want={"sample": range(1)}, seat=row))
    together = sampler.sample(logits, sampler.pack(spans)).read()
    for row, (params, result) in enumerate(zip(asked, together)):
        alone = sampler.sample(logits[row : row + 1], sampler.pack(spans[row : row + 1])).read()[0]
        k = params.get("confidence", 0)
        if "logprobs" not in params:
            assert result.logprobs is None
            continue
        entry = result.logprobs[0]
        assert len(entry.top) == params["logprobs"] and entry.confidence == alone.logprobs[0].confidence
        assert (
            entry.confidence is None
            if not k
            else math.isclose(entry.confidence, by_definition(logits[row], k), rel_tol=1e-6)
        )


def test_a_flat_row_is_unsure_and_a_sharp_one_sure():
    """The sign: a uniform row gives ln V, a certain one far more; k = 1 would invert the score."""
    flat, sharp = torch.zeros(100), torch.zeros(100)
    sharp[7] = 12.0
    for k, surer in ((20, True), (1, False)):
        values = [
            mean_surprise(torch.log_softmax(row, -1).topk(k).values[None], torch.tensor([k])).item()
            for row in (flat, sharp)
        ]
        assert (values[1] > values[0]) == surer
        assert math.isclose(values[0], math.log(100), rel_tol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_the_window_against_brute_force(window):
    values = [float(v) for v in torch.rand(17, generator=torch.Generator().manual_seed(window))]
    mean, lowest = summed_up(values, window)
    width = min(window, len(values))
    assert math.isclose(mean, sum(values) / 17) and math.isclose(
        lowest, min(sum(values[i : i + width]) / width for i in range(17 - width + 1))
    )
    assert summed_up([], window) == (None, None) and summed_up(values)[1] is None
